"""What a layer id means, and which ids are refused."""

import pytest

from hsdump.errors import UsageError
from hsdump.layers import (
    check_layers,
    eagle3_layers,
    ids_for,
    meaning_of,
    parse_layers,
    parse_native,
    resolve_layers,
    state_names,
)


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (61, (2, 30, 58)),  # Kimi-K2.5, DeepSeek-V3
        (32, (2, 16, 29)),  # Llama-3.1-8B
        (8, (2, 4, 5)),
        (7, (2, 3, 4)),
        (6, (2, 3, 4)),
        (5, (2, 3, 4)),
        (4, (1, 2, 3)),
    ],
)
def test_the_default_layers_are_three_distinct_ones(num_layers: int, expected: tuple[int, ...]) -> None:
    assert eagle3_layers(num_layers) == expected
    assert check_layers(expected, num_layers) == expected


def test_a_model_too_shallow_for_eagle3_is_named() -> None:
    with pytest.raises(UsageError, match="a model of 3 layers has no three distinct"):
        eagle3_layers(3)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((2, 999), r"layers \[999\] are outside this model of 8 layers"),
        ((0, 2), "0 is the embedding table"),
        ((2, 8), "8 is the final state, which is always captured"),
        ((-1,), r"layers \[-1\] are outside"),
        ((2, 2), "hold an id twice"),
        ((), "hold no id"),
    ],
)
def test_layers_that_cannot_be_captured_are_refused(layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_layers(layers, 8)


def test_layers_are_put_in_ascending_order() -> None:
    assert check_layers((5, 2, 4), 8) == (2, 4, 5)
    assert state_names((2, 4, 5)) == ("layer2", "layer4", "layer5", "final")


def test_layers_as_typed() -> None:
    assert parse_layers("auto") is None
    assert parse_layers("2, 16,29") == (2, 16, 29)
    with pytest.raises(UsageError, match="--layers 'two' is not a list of numbers"):
        parse_layers("two")


@pytest.mark.parametrize(
    ("engine", "model_class", "ids", "layers"),
    [
        ("sglang", "LlamaForCausalLM", (2, 4, 5), (3, 5, 6)),
        ("sglang", "Qwen3ForCausalLM", (1, 4, 5), (2, 5, 6)),
        ("sglang", "DeepseekV3ForCausalLM", (2, 3, 4), (2, 3, 4)),
        ("sglang", "DeepseekV3ForCausalLM", (1, 3, 4), (2, 4, 5)),
        ("sglang", "KimiK25ForConditionalGeneration", (2, 30, 58), (2, 30, 58)),
        ("vllm", "LlamaForCausalLM", (2, 4, 5), (2, 4, 5)),
        ("transformers", "LlamaForCausalLM", (1, 4), (1, 4)),
    ],
)
def test_engines_ids_and_hsdumps(engine: str, model_class: str, ids: tuple[int, ...], layers: tuple[int, ...]) -> None:
    """SGLang's rows as tests/server/test_proof.py finds them by numbers on the real server."""
    assert meaning_of(engine, model_class, ids) == layers
    again = ids_for(engine, model_class, layers)
    assert again is not None
    assert meaning_of(engine, model_class, again) == layers


def test_layers_that_an_engine_cannot_say() -> None:
    assert ids_for("sglang", "DeepseekV3ForCausalLM", (1, 3, 4)) is None
    assert ids_for("sglang", "LlamaForCausalLM", (1, 3, 4)) == (0, 2, 3)


def test_words_for_layers() -> None:
    assert resolve_layers("all", 6) == (1, 2, 3, 4, 5)
    assert resolve_layers("auto", 8) == eagle3_layers(8)
    assert resolve_layers("4,2", 8) == (2, 4)
    assert parse_native("native:2,4") == (2, 4)
    assert parse_native("2,4") is None
    with pytest.raises(UsageError, match="names no ids"):
        parse_native("native:auto")
