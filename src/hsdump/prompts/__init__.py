"""Conversations in, exact tokens and loss masks out.

    read_samples(paths, Renderer.load(model, options), options)  ->  TokenSample | Skip, one after another

Client side: needs transformers for the tokenizer and the template, never torch or an engine.
"""

from hsdump.prompts.options import PromptOptions, Skip
from hsdump.prompts.pipeline import Notes, prepared_settings, read_samples
from hsdump.prompts.renderer import Renderer

__all__ = ["Notes", "PromptOptions", "Renderer", "Skip", "prepared_settings", "read_samples"]
