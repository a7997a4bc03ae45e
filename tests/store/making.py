"""Small stores for tests: samples whose numbers follow from a seed, so that a dict can be the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import NUMPY_DTYPES, StateArray
from hsdump.samples import TokenSample
from hsdump.store import Manifest, Store, StoreWriter, WriterOptions

VOCAB = 1000


def make_manifest(**changes: object) -> Manifest:
    facts: dict[str, object] = {
        "format_version": 1,
        "engine": "sglang",
        "engine_version": "0.5.23",
        "model_path": "models/tiny",
        "model_digest": "0" * 32,
        "model_class": "LlamaForCausalLM",
        "num_layers": 8,
        "vocab_size": VOCAB,
        "layers": [2, 4],
        "hidden_size": 8,
        "dtype": "bfloat16",
        "final_state": "post_norm",
        "layer_meaning": "index into transformers' output_hidden_states",
        "tokenizer_digest": "1" * 32,
        "template_digest": "2" * 32,
        "max_tokens": 4096,
        "codec": "raw",
        "created": "2026-01-01T00:00:00+00:00",
    }
    return Manifest(**{**facts, **changes})  # type: ignore[arg-type]  # a dict of mixed values


@dataclass(frozen=True, slots=True)
class Made:
    """A sample and its states."""

    sample: TokenSample
    states: tuple[StateArray, ...]


def make_states(manifest: Manifest, rng: np.random.Generator, num_tokens: int) -> tuple[StateArray, ...]:
    """Random states of about the size that real ones have, in the manifest's dtype."""
    shape = manifest.shape
    numbers = [rng.standard_normal((num_tokens, shape.hidden_size), dtype=np.float32) for _ in shape.names]
    if shape.dtype == "bfloat16":
        return tuple((values.view(np.uint32) >> 16).astype(np.uint16) for values in numbers)
    return tuple(values.astype(NUMPY_DTYPES[shape.dtype]) for values in numbers)


def make_sample(seed: int, manifest: Manifest | None = None, num_tokens: int | None = None) -> Made:
    manifest = manifest or make_manifest()
    rng = np.random.default_rng(seed)
    length = num_tokens or int(rng.integers(1, 40))
    ids: NDArray[np.int64] = rng.integers(0, VOCAB, length)
    mask = (np.arange(length) >= length // 2).astype(np.uint8)
    return Made(TokenSample.make(f"row-{seed}", ids, mask), make_states(manifest, rng, length))


def fill(
    path: Path, seeds: range | list[int], manifest: Manifest | None = None, options: WriterOptions | None = None
) -> list[Made]:
    """Commit samples in one go."""
    manifest = manifest or make_manifest()
    made = [make_sample(seed, manifest) for seed in seeds]
    with StoreWriter.open(path, manifest, options=options) as writer:
        for one in made:
            writer.add(one.sample, one.states)
        writer.commit()
    return made


def assert_holds(path: Path, expected: list[Made]) -> None:
    """The store holds exactly these samples, bit for bit."""
    with Store(path, check=True) as store:
        assert sorted(store.keys()) == sorted(one.sample.key for one in expected)
        for one in expected:
            assert_equal(store, one)


def assert_equal(store: Store, one: Made) -> None:
    found = store[one.sample.key]
    assert found.source == one.sample.source
    assert found.num_tokens == len(one.sample.input_ids)
    np.testing.assert_array_equal(found.input_ids, one.sample.input_ids)
    np.testing.assert_array_equal(found.loss_mask, one.sample.loss_mask)
    assert tuple(found.states) == store.manifest.shape.names
    for state, expected in zip(found.states.values(), one.states, strict=True):
        assert state.dtype == expected.dtype
        np.testing.assert_array_equal(state, expected)
