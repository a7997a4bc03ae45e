"""Run by SGLang's own Python: our export in SGLang's own model class, on the CPU.

    .venv-sglang/bin/python tests/draft/sglang_drafter.py EXPORT INPUTS OUT

The class is built from the export's `config.json`, filled by its own `load_weights`, and asked for the logits of one
document. Only the paged attention is replaced, by a causal one over the document: it holds no weights, and a server's
memory pool belongs to it. Prints what it found as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")

import torch  # the environment above is read while these are imported
from safetensors.torch import load_file, save_file


def main(folder: Path, inputs: Path, out: Path) -> None:
    import transformers
    from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(model_path=str(folder), device="cpu", attention_backend="torch_native", load_format="dummy")
    publish(args, role="scheduler", ranks=SpawnRanks(world_rank=0))
    init_distributed_environment(
        world_size=1, rank=0, local_rank=0, distributed_init_method=f"file://{out}.group", backend="gloo"
    )
    initialize_model_parallel(backend="gloo")
    from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

    config = transformers.AutoConfig.from_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    model = LlamaForCausalLMEagle3(config)
    given = load_file(folder / "model.safetensors")
    weights = dict(model.named_parameters())
    for weight in weights.values():
        weight.data.fill_(float("nan"))
    ignored = [name for name, value in given.items() if name != "t2d" and not _taken(model, weights, name, value)]
    asked = load_file(inputs)
    embeddings = model.model.embed_tokens.weight
    if torch.isnan(embeddings).all():  # as a server does: the target's are shared
        embeddings.data[: len(asked["embeddings"])].copy_(asked["embeddings"])
        embeddings.data[len(asked["embeddings"]) :].zero_()  # SGLang fills vocabularies up to a multiple of 64
    model.lm_head.weight.data[config.draft_vocab_size :].zero_()
    empty = sorted(name for name, weight in weights.items() if torch.isnan(weight).any())
    normed = _forward(model, asked)
    logits = normed @ model.lm_head.weight[: config.draft_vocab_size].T
    save_file({"logits": logits.contiguous(), "hot": model.get_hot_token_id().to(torch.int64)}, out)
    sys.stdout.write(json.dumps({"class": config.architectures[0], "empty": empty, "ignored": ignored}) + "\n")


def _taken(model: Any, weights: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> bool:
    """Have one tensor loaded, and see whether anything became of it: unknown names are passed over in silence."""
    before = sum(int(torch.isnan(weight).sum()) for weight in weights.values())
    model.load_weights([(name, value.float() if value.is_floating_point() else value)])
    after = sum(int(torch.isnan(weight).sum()) for weight in weights.values())
    # At least: a head of 60 rows is filled up to 64.
    return before - after >= value.numel() or (name == "d2t" and model.get_hot_token_id() is not None)


def _forward(model: Any, asked: dict[str, torch.Tensor]) -> torch.Tensor:
    """[T, H] what its head reads."""
    attention = model.model.layers[0].self_attn
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _batch: Any, **_: Any) -> torch.Tensor:
        wide = zip((q, k, v), (heads, kv_heads, kv_heads), strict=True)
        parts = [x.view(len(x), count, dim).transpose(0, 1)[None] for x, count in wide]
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).reshape(len(q), -1)

    object.__setattr__(attention, "attn", causal)
    attention._modules.pop("attn")
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: False, is_idle=lambda: False),
        mm_input_embeds=None,
        spec_info=SimpleNamespace(hidden_states=asked["aux"]),
    )
    with torch.inference_mode():
        normed, _ = model.model(asked["input_ids"], torch.arange(len(asked["input_ids"])), batch)
    return normed


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
