"""Codecs: what comes back, how large it is, and what a damaged or hostile encoding leads to."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hsdump.arrays import to_float32
from hsdump.errors import StoreCorrupt, UsageError
from hsdump.store import Store, StoreWriter
from hsdump.store.codecs import CODECS, decode_state, encode_state
from hsdump.store.fp8 import E4M3_VALUES, encode_fp8, from_float32, to_e4m3
from hsdump.verify import verify_store
from tests.store.making import assert_holds, make_manifest, make_sample, make_states

E4M3_ERROR = 0.03
"""A code has 3 mantissa bits: at most 1/16 = 6.25 % off, uniformly 1/16/sqrt(3) = 3.6 % in the worst octave."""


def all_bfloat16() -> np.ndarray:
    return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)


def test_e4m3_rounds_exactly_as_torch_does() -> None:
    rng = np.random.default_rng(0)
    codes = np.sort(E4M3_VALUES[:127].astype(np.float64))
    ties = ((codes[1:] + codes[:-1]) / 2).astype(np.float32)
    beside = np.concatenate([np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(1e9))])
    wide = rng.integers(0, 1 << 32, 1 << 20, dtype=np.uint32).view(np.float32)
    usual = rng.standard_normal(1 << 18, dtype=np.float32) * 100
    edge = np.array([448, 464, np.nextafter(np.float32(464), np.float32(1e9)), 1e-12, 0, -0.0], np.float32)
    for values in (all_bfloat16(), codes.astype(np.float32), ties, beside, wide, usual, edge):
        # Above 464 older torch gives NaN and newer 448; the codec never goes there.
        inside = values[(np.abs(values) <= 464) | np.isnan(values)]
        for signed in (inside, -inside):
            expected = torch.from_numpy(signed.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
            found = to_e4m3(signed)
            # The sign of NaN is nobody's number.
            nan = (expected & 0x7F) == 0x7F
            np.testing.assert_array_equal(found[~nan], expected[~nan])
            assert ((found[nan] & 0x7F) == 0x7F).all()


def test_e4m3_codes_mean_what_torch_says() -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(E4M3_VALUES, expected)


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bfloat16", torch.bfloat16), ("float16", torch.float16)])
def test_rounding_to_state_dtypes_is_torchs(dtype: str, torch_dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(0, 1 << 32, 1 << 18, dtype=np.uint32).view(np.float32)
    expected = torch.from_numpy(values.copy()).to(torch_dtype).float().numpy()
    np.testing.assert_array_equal(to_float32(from_float32(values, dtype), dtype), expected)


def test_fp8_has_a_scale_of_its_own_for_every_token() -> None:
    rows = np.array([[1.0, -0.5, 0.25], [1e-4, 5e-5, 0.0], [0, 0, 0], [3e4, 1, -3e4]], np.float32)
    codes, scales, error = encode_fp8(rows, "float32")
    np.testing.assert_allclose(scales, np.abs(rows).max(axis=1) / 448, rtol=1e-6)
    assert (E4M3_VALUES[codes] * scales[:, None])[2].tolist() == [0, 0, 0]
    assert error < E4M3_ERROR


def test_fp8_hides_nothing_that_is_not_finite() -> None:
    rows = np.ones((3, 4), np.float32)
    rows[0, 1], rows[1, 2] = np.nan, np.inf
    shape = make_manifest(hidden_size=4, dtype="float32").shape
    encoded = encode_state("fp8", rows, shape)
    parts = {part.suffix: part.data.tobytes() for part in encoded.parts}
    decoded = decode_state("fp8", parts, 3, shape)
    assert np.isnan(decoded[:2]).any(axis=1).all()
    assert np.isfinite(decoded[2]).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("num_tokens", [1, 37])
def test_states_come_back(codec: str, dtype: str, num_tokens: int) -> None:
    manifest = make_manifest(dtype=dtype, hidden_size=96, codec=codec)
    shape = manifest.shape
    for state in make_states(manifest, np.random.default_rng(0), num_tokens):
        encoded = encode_state(codec, state, shape)
        parts = {part.suffix: memoryview(part.data).cast("B") for part in encoded.parts}
        decoded = decode_state(codec, parts, num_tokens, shape)
        assert decoded.dtype == state.dtype
        if codec == "fp8":
            original, found = to_float32(state, dtype), to_float32(decoded, dtype)
            relative = np.linalg.norm(found - original) / np.linalg.norm(original)
            assert relative < E4M3_ERROR
            # The record says what was lost before the last rounding to the dtype (bfloat16: up to 0.4 %).
            assert encoded.error == pytest.approx(relative, abs=4e-3)
        else:
            np.testing.assert_array_equal(decoded, state)


def test_blosc2_cuts_long_states_into_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsdump.store.codecs.CHUNK_BYTES", 1000)
    shape = make_manifest(hidden_size=96).shape
    state = make_states(make_manifest(hidden_size=96), np.random.default_rng(0), 50)[0]
    encoded = encode_state("blosc2", state, shape)
    np.testing.assert_array_equal(decode_state("blosc2", {"": encoded.parts[0].data}, 50, shape), state)


def test_damaged_blosc2_is_an_error_whatever_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsdump.store.codecs.CHUNK_BYTES", 4000)
    shape = make_manifest(hidden_size=96).shape
    state = make_states(make_manifest(hidden_size=96), np.random.default_rng(0), 50)[0]
    data = encode_state("blosc2", state, shape).parts[0].data
    for cut in (0, 1, 31, 32, len(data) // 2, len(data) - 1):
        with pytest.raises(StoreCorrupt, match="codec 'blosc2' cannot be decoded"):
            decode_state("blosc2", {"": data[:cut]}, 50, shape)
    with pytest.raises(StoreCorrupt, match="cannot be decoded"):
        decode_state("blosc2", {"": data + data}, 50, shape)
    for at in (4, 5, 12, 13):  # sizes in the first chunk's header
        hostile = bytearray(data)
        hostile[at] ^= 0x55
        with pytest.raises(StoreCorrupt, match="cannot be decoded"):
            decode_state("blosc2", {"": bytes(hostile)}, 50, shape)


@pytest.mark.parametrize("codec", CODECS)
def test_a_store_of_each_codec_is_read_verified_and_named_in_its_records(tmp_path: Path, codec: str) -> None:
    manifest = make_manifest(codec=codec, hidden_size=64)
    made = [make_sample(seed, manifest, num_tokens=20) for seed in range(6)]
    with StoreWriter.open(tmp_path / "store", manifest) as writer:
        for one in made:
            writer.add(one.sample, one.states)
        writer.commit()
    assert verify_store(tmp_path / "store").verdict == "clean"
    with Store(tmp_path / "store") as store:
        record = store.row(made[2].sample.key).record
        codecs = {entry.name: entry.codec for entry in record.tensors}
        assert codecs["final"] == codec
        assert codecs["input_ids"] == codecs["loss_mask"] == "raw"
        assert set(record.errors) == (set(manifest.shape.names) if codec == "fp8" else set())
        assert all(0 < error < E4M3_ERROR for error in record.errors.values())
    if codec != "fp8":
        assert_holds(tmp_path / "store", made)


def test_fp8_takes_half_the_bytes(tmp_path: Path) -> None:
    manifest = make_manifest(codec="fp8", hidden_size=1024)
    one = make_sample(0, manifest, num_tokens=64)
    with StoreWriter.open(tmp_path / "store", manifest) as writer:
        writer.add(one.sample, one.states)
        writer.commit()
    with Store(tmp_path / "store") as store:
        tensors = store.row(0).record.tensors
    stored = sum(entry.num_bytes for entry in tensors if entry.codec == "fp8")
    assert stored / sum(state.nbytes for state in one.states) <= 0.51


def test_blosc2_without_its_library_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any) -> Any:
        if name == "blosc2":
            raise ImportError(name)
        return real(name, *args)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UsageError, match=r"needs the blosc2 package.*\n.*pip install 'hsdump\[blosc2\]'"):
        StoreWriter.open(tmp_path / "store", make_manifest(codec="blosc2"))
    assert not (tmp_path / "store").exists()
