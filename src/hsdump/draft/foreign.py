"""Drafters that others trained, and our own exports: SGLang's and speculators' checkpoint folders read back.

Letters: K = draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from hsdump.draft.checkpoints import DRAFTER, fill, load_drafter, load_tensors
from hsdump.draft.config import DrafterConfig, rope_of
from hsdump.draft.model import Drafter
from hsdump.draft.target import Target
from hsdump.draft.vocab import DraftVocab
from hsdump.errors import InputError

FORKS = ("norm_before_fc", "norm_output", "fc_norm", "norm_before_residual", "use_aux_norm")
"""Variants of the layer that change every number and are not ours."""


def read_vocab(folder: Path, target_size: int) -> DraftVocab:
    """Give the mapping of a drafter; every token when it has none and its head is as long as the target's.

    Raises:
        InputError: no drafter there, or a mapping that is missing or wrong.
    """
    if (folder / DRAFTER).exists():
        from hsdump.draft.checkpoints import VOCAB
        from hsdump.draft.vocab import load_vocab

        return load_vocab(folder / VOCAB, target_size)
    tensors = _tensors(folder)
    if "d2t" not in tensors:
        rows = tensors["lm_head.weight"].shape[0] if "lm_head.weight" in tensors else 0
        if rows == target_size:
            return DraftVocab.exact(target_size)
        what = f"{folder} proposes {rows} tokens and holds no d2t that says which"
        raise InputError(what, "get a complete checkpoint; engines would take the first ids, silently")
    t2d = tensors["t2d"].numpy() if "t2d" in tensors else None
    return DraftVocab.checked(tensors["d2t"].numpy(), t2d, target_size, str(folder), made=f"of {folder.name}")


def read_drafter(
    folder: Path, target: Target, vocab: DraftVocab, facts: Mapping[str, Any]
) -> tuple[DrafterConfig, Drafter]:
    """Build a drafter from `hsdump train`'s folder, SGLang's `LlamaForCausalLMEagle3` form, or speculators'.

    Raises:
        InputError: a variant of EAGLE-3 that is not trained here, or weights that are missing.
    """
    if (folder / DRAFTER).exists():
        drafter, _ = load_drafter(folder, model=target.checkpoint.folder)
        config = msgspec.structs.replace(drafter.config, **_new_facts(drafter.config, facts, str(folder)))
        drafter.config = config
        return config, drafter
    raw = _config(folder)
    layer: dict[str, Any] = raw.get("transformer_layer_config") or raw
    forked = [key for key in FORKS if raw.get(key) or layer.get(key) or (raw.get("eagle_config") or {}).get(key)]
    if "speculators_model_type" in raw and "norm_before_residual" not in raw:
        forked.append("norm_before_residual")  # true there, unless it is said
    if forked or int(layer.get("num_hidden_layers", 1)) != 1:
        what = f"{folder} is another kind of EAGLE-3: {', '.join(forked) or 'more than one layer'}"
        raise InputError(what, "train it with the library it came from: hsdump train --backend speculators")
    tensors = {
        name.replace("midlayer.", "layers.0.").removeprefix("model."): value.float()
        for name, value in _tensors(folder).items()
        if name not in {"d2t", "t2d"}
    }
    embeddings = tensors.pop("embed_tokens.weight", None)
    theirs = torch.from_numpy(target.embeddings())
    own = embeddings is not None and not torch.equal(embeddings.to(torch.bfloat16), theirs.to(torch.bfloat16))
    config = DrafterConfig(
        hidden_size=int(layer["hidden_size"]),
        intermediate_size=int(layer["intermediate_size"]),
        num_heads=int(layer["num_attention_heads"]),
        num_kv_heads=int(layer.get("num_key_value_heads") or layer["num_attention_heads"]),
        head_dim=int(layer.get("head_dim") or layer["hidden_size"] // layer["num_attention_heads"]),
        rms_norm_eps=float(layer["rms_norm_eps"]),
        rope=rope_of(layer),
        max_position_embeddings=int(layer["max_position_embeddings"]),
        own_embeddings=own,
        eos_token_id=target.checkpoint.config.get("eos_token_id"),
        **facts,
    )
    drafter = Drafter(config, vocab)
    with torch.no_grad():
        drafter.embed_tokens.weight.copy_(embeddings if own else theirs)
    if own:
        assert embeddings is not None
        tensors["embed_tokens.weight"] = embeddings
    fill(drafter, tensors, str(folder))
    return config, drafter


def _new_facts(config: DrafterConfig, facts: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Take over what the new store knows; the layers are the drafter's own and may not change."""
    if list(config.layers) != list(facts["layers"]):
        what = f"{where} was trained on layers {config.layers}, this store is read at {facts['layers']}"
        raise InputError(what, f"train on the same ones: --layers {','.join(map(str, config.layers))}")
    return {key: value for key, value in facts.items() if key not in {"layers", "draft_vocab_size"}}


def _config(folder: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        raise InputError(f"{folder} is no drafter: {error}", "name a folder with config.json and weights") from error


def _tensors(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InputError(f"{folder} holds no safetensors weights", "pickled weights are not read: convert them first")
    found: dict[str, Tensor] = {}
    for file in files:
        found |= load_tensors(file)
    for name, tensor in found.items():
        if tensor.is_floating_point() and not np.isfinite(float(tensor.float().sum())):
            raise InputError(f"{folder}: {name} is not finite", "get the checkpoint again")
    return found
