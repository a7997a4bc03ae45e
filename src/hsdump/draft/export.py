"""A trained drafter as the folder that an engine loads: SGLang's form, or the speculators form that vLLM reads.

The auxiliary layers are written in the engine's own meaning of an id, which differs by one between SGLang's model
classes (`hsdump.layers`). Variants that engines default differently are always written out: vLLM takes a speculators
config that does not speak of `norm_before_residual` for true.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import msgspec
import torch
from torch import Tensor

from hsdump.draft.checkpoints import load_drafter, trained, write_json
from hsdump.draft.config import DrafterConfig
from hsdump.draft.model import Drafter
from hsdump.errors import UsageError
from hsdump.layers import ids_for

Engine = Literal["sglang", "vllm"]
ENGINES: tuple[Engine, ...] = ("sglang", "vllm")


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What an export wrote."""

    out: str
    engine: str
    layers: list[int]
    """In hsdump's meaning."""

    engine_layers: list[int]
    """The same ones as the engine counts them."""

    embeddings: str
    """`own`, or `target's` when they are not in the folder and the engine shares the target's."""

    draft_vocab_size: int
    max_position_embeddings: int
    rope_type: str
    checkpoint: str
    target: str
    """Where training read it."""

    bytes: int


def export_drafter(
    folder: Path, out: Path, engine: Engine, *, target: str | None = None, which: str = "best", draft_tokens: int = 3
) -> Exported:
    """Write an engine's checkpoint folder, complete or not at all.

    Args:
        target: the target's folder or name as the engine will know it; None: the one of training.
        which: checkpoint, `best` or `last`.
        draft_tokens: of a draft, which the speculators form has to name.

    Raises:
        InputError: no drafter there.
        UsageError: the folder is taken, or the engine has no way to name these layers.
    """
    if out.exists():
        raise UsageError(f"{out} exists", "name a new folder with --out")
    drafter, facts = load_drafter(folder, which)
    config = drafter.config
    ids = ids_for(engine, config.target_class, config.layers)
    if ids is None:
        what = f"{engine} has no ids for layers {config.layers} of {config.target_class}"
        raise UsageError(what, "capture and train on layers that begin later, such as the default ones")
    name = target or config.target_path
    settings = sglang_config(config, ids) if engine == "sglang" else speculators_config(config, ids, name, draft_tokens)
    weights = engine_weights(drafter, engine)
    partial = out.with_name(f"{out.name}.{uuid4().hex}.partial")
    try:
        _write(partial, settings, weights, engine)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Exported(
        out=str(out),
        engine=engine,
        layers=list(config.layers),
        engine_layers=list(ids),
        embeddings="own" if config.own_embeddings else "target's",
        draft_vocab_size=config.draft_vocab_size,
        max_position_embeddings=config.max_position_embeddings,
        rope_type=str(config.rope["rope_type"]),
        checkpoint=str(facts["checkpoint"]),
        target=config.target_path,
        bytes=sum(path.stat().st_size for path in out.iterdir()),
    )


def engine_weights(drafter: Drafter, engine: Engine) -> dict[str, Tensor]:
    """Name and round the weights as an engine reads them: bfloat16, the maps beside them."""
    weights = {name: weight.detach().to(torch.bfloat16) for name, weight in trained(drafter)}
    if engine == "sglang":
        weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    if drafter.vocab.size != drafter.vocab.target_size:
        weights |= {"d2t": drafter.d2t.clone(), "t2d": drafter.t2d.clone()}
    return weights


def _llama(config: DrafterConfig) -> dict[str, Any]:
    """What both forms say of the decoder layer."""
    scaling = None if config.rope["rope_type"] == "default" else {**config.rope, "type": config.rope["rope_type"]}
    return {
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope["rope_theta"],
        "rope_scaling": scaling,
        "rope_parameters": config.rope,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": config.eos_token_id,
    }


def sglang_config(config: DrafterConfig, ids: tuple[int, ...]) -> dict[str, Any]:
    """Give the `config.json` of SGLang's `LlamaForCausalLMEagle3`."""
    return {
        **_llama(config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "num_aux_hidden_states": len(ids),
        "norm_output": False,
        "norm_before_residual": False,
        "fc_norm": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(ids),
            "use_aux_hidden_state": True,
            "norm_before_fc": False,
        },
    }


def speculators_config(config: DrafterConfig, ids: tuple[int, ...], target: str, draft_tokens: int) -> dict[str, Any]:
    """Give the `config.json` of the speculators form, which vLLM takes as it is."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "transformer_layer_config": _llama(config),
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": config.own_embeddings,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": draft_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": target, "architectures": [config.target_class]},
        },
    }


def _write(folder: Path, settings: dict[str, Any], weights: dict[str, Tensor], engine: Engine) -> None:
    from safetensors.torch import save_file

    try:
        folder.mkdir(parents=True)
        save_file({key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors")
        with (folder / "model.safetensors").open("rb") as file:
            os.fsync(file.fileno())
        write_json(folder / "config.json", settings)
    except OSError as error:
        raise UsageError(f"{folder} cannot be written: {error.strerror}", "choose another --out") from error
    assert engine in ENGINES
