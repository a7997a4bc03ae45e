"""The shapes that are measured: layer counts and widths of real models, random weights, tokens without a tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsdump.layers import eagle3_layers


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One model shape and how much of it a run takes."""

    name: str
    config: dict[str, Any]
    lengths: tuple[int, ...]
    tokens_per_run: int
    exact_count: int
    exact_length: int
    json_count: int
    store_tokens: int
    decode_s: float
    gpu_flags: tuple[str, ...] = ()
    cpu_flags: tuple[str, ...] = ()

    @property
    def layers(self) -> tuple[int, ...]:
        return eagle3_layers(self.config["num_hidden_layers"])

    @property
    def vocab(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def bytes_per_token(self) -> int:
        return (len(self.layers) + 1) * int(self.config["hidden_size"]) * 2

    def flags(self, device: str) -> list[str]:
        return list(self.gpu_flags if device == "cuda" else self.cpu_flags)

    def write(self, folder: Path) -> Path:
        """Write the model's folder: a config only, SGLang fills the weights (`--load-format dummy`)."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


def _llama(**changes: Any) -> dict[str, Any]:
    base = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {**base, **changes}


def _kimi() -> dict[str, Any]:
    """Kimi-K2.5's width (hidden 7168, 64 heads of latent attention) with 6 layers and 32 experts, to fit one GPU."""
    yarn = {
        "type": "yarn",
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 1.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    return {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 6,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "num_nextn_predict_layers": 0,
        "vocab_size": 163840,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-6,
        "rope_theta": 50000.0,
        "rope_scaling": yarn,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        "use_cache": True,
    }


_PREFILL_BUCKETS = ("--cuda-graph-bs-prefill", "1024", "2048", "4096", "6144", "8192")
_SHARED_GPU = ("--cuda-graph-max-bs-decode", "16", "--max-total-tokens", "81920")
"""Three servers on one GPU: room for the requests in flight and some users each, not for all that is free."""

SHAPES = {
    "l8b": Shape(
        name="l8b",
        config=_llama(),
        lengths=(256, 2048, 8000),
        tokens_per_run=250_000,
        exact_count=32,
        exact_length=2048,
        json_count=4,
        store_tokens=700_000,
        decode_s=7.0,
        gpu_flags=(*_PREFILL_BUCKETS, *_SHARED_GPU),
    ),
    "kimi": Shape(
        name="kimi",
        config=_kimi(),
        lengths=(256, 2048, 8000),
        tokens_per_run=250_000,
        exact_count=32,
        exact_length=2048,
        json_count=4,
        store_tokens=400_000,
        decode_s=7.0,
        gpu_flags=("--moe-runner-backend", "triton", *_SHARED_GPU),
    ),
    "tiny": Shape(
        name="tiny",
        config=_llama(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            vocab_size=2048,
            max_position_embeddings=4096,
        ),
        lengths=(64, 256),
        tokens_per_run=4000,
        exact_count=6,
        exact_length=200,
        json_count=2,
        store_tokens=4000,
        decode_s=2.0,
        cpu_flags=("--chunked-prefill-size", "512", "--sleep-on-idle"),
    ),
}
