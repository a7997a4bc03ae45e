"""The shape of a drafter: one EAGLE-3 decoder layer beside a target, and all that an engine must know to build it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hsdump.errors import UsageError
from hsdump.verify.checkpoint import Checkpoint

ROPE_KEYS = ("rope_parameters", "rope_scaling")

YARN_OF_MLA = ("mscale", "mscale_all_dim")
"""DeepSeek's additions to YaRN. A Llama layer knows the plain one only, and engines treat these differently."""
WHOLE_CONTEXT = "full_attention"
"""Transformers' name for layers without a window, in settings by type of layer."""


class DrafterConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything but the weights."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: dict[str, Any]
    """As transformers' `rope_parameters`: rope_type, rope_theta and what a scaling needs. The target's own."""

    max_position_embeddings: int
    vocab_size: int
    draft_vocab_size: int
    layers: list[int]
    """Auxiliary layers in hsdump's meaning (`hsdump.layers`)."""

    num_target_layers: int
    target_class: str
    target_path: str
    target_digest: str
    eos_token_id: int | list[int] | None = None
    own_embeddings: bool = False
    """Trained embeddings of its own; otherwise the target's, frozen."""

    store_engine: str = ""
    """The engine whose states it learned from."""

    def llama(self) -> Any:
        """Give the config that transformers' rotary embedding reads."""
        import transformers

        return transformers.LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            **rope_arguments(self.rope),
        )


def rope_arguments(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Give the rotary embedding's settings as this release of transformers takes them."""
    import transformers

    if int(transformers.__version__.split(".", maxsplit=1)[0]) >= 5:
        return {"rope_parameters": dict(rope)}
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {"rope_theta": rope["rope_theta"], "rope_scaling": None if plain else scaling}


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read a config's rotary settings in whichever of the two ways it writes them.

    Where layers of one type have others than those of another type (Gemma 3), those that see the whole context count,
    as the drafter's layer does.
    """
    found = next((dict(config[key]) for key in ROPE_KEYS if isinstance(config.get(key), dict)), {})
    by_type = {name: value for name, value in found.items() if isinstance(value, dict)}
    if by_type:
        found = dict(by_type.get(WHOLE_CONTEXT) or next(iter(by_type.values())))
    rope = {key: value for key, value in found.items() if key not in YARN_OF_MLA}
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
        rope.pop("type", None)
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", float(config.get("rope_theta") or 10000.0))
    return rope


class Widths(msgspec.Struct, frozen=True, kw_only=True):
    """What a user may choose of a new drafter; None: as the target has it."""

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate: int | None = None
    own_embeddings: bool = False


def new_config(target: Checkpoint, widths: Widths, facts: Mapping[str, Any]) -> DrafterConfig:
    """Shape a new drafter after its target.

    Args:
        facts: the fields of `DrafterConfig` that the store and the vocabulary know.

    Raises:
        UsageError: head counts that do not divide.
    """
    config, hidden = target.config, target.hidden_size
    latent = config.get("kv_lora_rank") is not None
    heads_of_target = int(config["num_attention_heads"])
    dim = widths.head_dim or (
        (128 if hidden % 128 == 0 else 64) if latent else int(config.get("head_dim") or hidden // heads_of_target)
    )
    heads = widths.heads or (hidden // dim if latent else heads_of_target)
    grouped = max(1, heads // 8) if latent else int(config.get("num_key_value_heads") or heads)
    kv_heads = widths.kv_heads or grouped
    if heads % kv_heads:
        raise UsageError(f"--heads {heads} is no multiple of --kv-heads {kv_heads}", "choose counts that divide")
    experts = config.get("moe_intermediate_size") is not None
    return DrafterConfig(
        hidden_size=hidden,
        intermediate_size=widths.intermediate or (int(config["intermediate_size"]) if not experts else 4 * hidden),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope=rope_of(config),
        max_position_embeddings=int(config.get("max_position_embeddings") or 4096),
        eos_token_id=config.get("eos_token_id"),
        own_embeddings=widths.own_embeddings,
        **facts,
    )
