"""The one owner of what a layer id means.

hsdump's own meaning, used in options, handshakes, manifests and file names: **index into transformers'
`output_hidden_states`**. 0 is the embeddings, k (1 <= k < num_layers) is the output of decoder layer k-1, before
any norm, which is also the input of decoder layer k. Index num_layers is the state after the final norm: hsdump
stores it as the *final* state, never as an auxiliary layer.

Every model file of SGLang keeps its own list `layers_to_capture` in just this meaning ("input of layer k"), however
its public setter shifts the ids that it is given; see `hsdump.sglang.switch`. Standard library only.
"""

from __future__ import annotations

from collections.abc import Sequence

from hsdump.errors import UsageError

FINAL = "final"
"""Name of the final state in spool entries and stores."""

FINAL_PRE_NORM = "final_pre_norm"
"""Name of the state in front of the last norm, where both are held: `final` is the one behind it then."""

FINAL_STATES = ("post_norm", "pre_norm", "both")
"""What is held of the final state: behind the model's last norm, in front of it, or both."""

AUTO, ALL, NATIVE = "auto", "all", "native:"
"""Words for --layers: EAGLE-3's choice, every layer that can be captured, and ids in the engine's own meaning."""

_SGLANG_FLIPS = ("DeepseekV2", "DeepseekV3", "Glm4MoeLite", "KimiK25")
"""Model classes of SGLang whose public setter takes id k as "input of layer k", unless the first id is 1: then all of
them are "output of layer k". All other classes always mean "output of layer k".

Source: SGLang 0.5.23, `set_eagle3_layers_to_capture` in its 29 model files; found again by `hsdump probe`."""


def eagle3_layers(num_layers: int) -> tuple[int, ...]:
    """Give the three auxiliary layers that EAGLE-3 drafters are trained on: one low, one middle, one high.

    For a model of at least 7 layers: 2, num_layers // 2, num_layers - 3 (SGLang's own default for
    `set_eagle3_layers_to_capture(None)`). Shallower models would get the same layer twice, which silently narrows the
    drafter's input, so there the ids are moved apart to the nearest distinct ones.

    Returns:
        Three ascending ids in hsdump's meaning, each in 1..num_layers-1.

    Raises:
        UsageError: fewer than 4 layers cannot give three distinct auxiliary layers.
    """
    if num_layers < 4:
        raise UsageError(
            f"a model of {num_layers} layers has no three distinct auxiliary layers for EAGLE-3",
            f"name the layers to capture yourself, each in 1..{max(num_layers - 1, 1)}: --layers 1",
        )
    low = min(2, num_layers - 3)
    middle = min(max(num_layers // 2, low + 1), num_layers - 2)
    high = max(num_layers - 3, middle + 1)
    return (low, middle, high)


def check_layers(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return the ids as an ascending tuple, or say which cannot be captured from a model of this depth.

    Raises:
        UsageError: an id outside 1..num_layers-1, or the same id twice.
    """
    wrong = [layer for layer in layers if not 1 <= layer < num_layers]
    if wrong:
        hint = ""
        if 0 in wrong:
            hint = " (0 is the embedding table, which a trainer reads from the checkpoint)"
        elif num_layers in wrong:
            hint = f" ({num_layers} is the final state, which is always captured)"
        raise UsageError(
            f"layers {wrong} are outside this model of {num_layers} layers{hint}",
            f"choose ids in 1..{num_layers - 1}; id k is transformers' output_hidden_states[k]",
        )
    if len(set(layers)) != len(layers) or not layers:
        raise UsageError(
            f"layers {list(layers)} hold {'an id twice' if layers else 'no id'}",
            "name at least one layer, each once, for instance --layers 2,16,29",
        )
    return tuple(sorted(layers))


def parse_layers(text: str) -> tuple[int, ...] | None:
    """Read `auto` (None) or `i,j,k` as a user types it.

    Raises:
        UsageError: anything else.
    """
    if text.strip().lower() == "auto":
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--layers {text!r} is not a list of numbers", "use auto, or ids like 2,16,29") from None


def state_names(layers: Sequence[int], final_state: str = "post_norm") -> tuple[str, ...]:
    """Name the states of one sample in storage order: the auxiliary layers ascending, then the final state or both."""
    finals = (FINAL, FINAL_PRE_NORM) if final_state == "both" else (FINAL,)
    return (*(f"layer{layer}" for layer in layers), *finals)


def resolve_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Give the ids that `auto`, `all` or `i,j,k` means for a model of this depth.

    Raises:
        UsageError: ids that cannot be captured, or text that is none of these.
    """
    if text.strip().lower() == ALL:
        return tuple(range(1, num_layers))
    wanted = parse_layers(text)
    return eagle3_layers(num_layers) if wanted is None else check_layers(wanted, num_layers)


def parse_native(text: str) -> tuple[int, ...] | None:
    """Read `native:i,j,k`, ids that go to the engine's own setter unchanged; None for any other text.

    Raises:
        UsageError: what follows is no list of numbers.
    """
    if not text.strip().lower().startswith(NATIVE):
        return None
    ids = parse_layers(text.strip()[len(NATIVE) :])
    if not ids:
        raise UsageError(
            f"--layers {text!r} names no ids", "use ids in the engine's own meaning: --layers native:2,4,5"
        )
    return ids


def meaning_of(engine: str, model_class: str, ids: Sequence[int]) -> tuple[int, ...]:
    """Translate ids in an engine's own meaning into hsdump's, by what its source says.

    Args:
        engine: `sglang`, `vllm` or `transformers`.
        model_class: as the engine names it; only SGLang's classes differ among themselves.
        ids: as given to the engine's setter or written into a drafter's config, in that order.
    """
    if engine != "sglang" or not ids:
        return tuple(ids)
    if model_class.startswith(_SGLANG_FLIPS) and ids[0] != 1:
        return tuple(ids)
    return tuple(layer + 1 for layer in ids)


def ids_for(engine: str, model_class: str, layers: Sequence[int]) -> tuple[int, ...] | None:
    """Give the ids that make an engine capture these layers of hsdump's, also for the config of a drafter.

    Returns:
        Ids in the engine's own meaning, or None where its setter has no way to say them (DeepSeek's cannot start at
        layer 1).
    """
    for candidate in (tuple(layers), tuple(layer - 1 for layer in layers)):
        if min(candidate, default=0) >= 0 and meaning_of(engine, model_class, candidate) == tuple(layers):
            return candidate
    return None
