"""Small templates, each with one habit of the templates in the field. Written for these tests."""

from __future__ import annotations

CONTROL_TOKENS = ("<|bos|>", "<|im_start|>", "<|im_end|>", "<|stop|>", "<|pad|>", "<|turn|>", "<|call|>", "<|obs|>")
"""Added to the test tokenizer."""

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Keeps everything as it is."""
