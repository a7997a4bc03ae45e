"""What a layer id means, and which ids are refused."""

import pytest

from hsdump.errors import UsageError
from hsdump.layers import check_layers, eagle3_layers, parse_layers, state_names


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
