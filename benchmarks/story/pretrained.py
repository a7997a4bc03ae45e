"""A real pre-trained target: a GGUF file becomes a bfloat16 folder that SGLang and hsdump read.

    python -m benchmarks.story.pretrained gemma-3-270m-q4_k_m.gguf MODEL

Transformers reads the file, with the package `gguf`. A base model brings no chat template, and Gemma makes no sense
without its first token: the template written here puts that first, then each message on lines of its own.
"""

from __future__ import annotations

import argparse
from pathlib import Path

PLAIN_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
)
"""For a model that goes on with what it reads."""


def convert(file: Path, out: Path) -> Path:
    """Write the weights of a GGUF file, its tokenizer and a template as a Hugging Face folder in bfloat16."""
    import torch
    import transformers
    from transformers.utils.quantization_config import GgufConfig

    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    unpacked = GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        **place, dtype=torch.bfloat16, quantization_config=unpacked
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(**place)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = PLAIN_TEMPLATE
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def main() -> None:
    """Convert one file, as named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.story.pretrained", description=convert.__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(convert(options.file, options.out))


if __name__ == "__main__":
    main()
