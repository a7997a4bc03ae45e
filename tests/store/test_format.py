"""Format v1 is frozen: docs/format.md says what the bytes are, this file holds the code to it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from hsdump.errors import StoreCorrupt
from hsdump.samples import TokenSample
from hsdump.store import Manifest, Store, StoreWriter, WriterOptions
from hsdump.store.format import (
    ALIGNMENT,
    SampleRecord,
    TensorEntry,
    decode_header,
    encode_header,
    header_cost,
    header_size,
    shard_name,
    shard_number,
    shard_path,
)
from hsdump.store.manifest import decode_manifest, encode_manifest
from hsdump.store.shard_reader import read_header
from hsdump.verify import verify_store
from tests.store.conftest import PROFILE
from tests.store.making import Made, assert_equal, assert_holds, fill, make_manifest, make_sample

GOLDEN = Path(__file__).parent / "golden" / "v1"


def golden_manifest(codec: str) -> Manifest:
    return make_manifest(codec=codec, hidden_size=4, hsdump_version="1.0", attach="plugin", notes=["golden"])


def golden_samples() -> list[Made]:
    """Two samples whose numbers can be worked out by hand: 3 tokens, then 1."""
    made = []
    for number, length in enumerate((3, 1)):
        ids = np.arange(length, dtype=np.int64) + 10 * number
        mask = (ids % 2).astype(np.uint8) if length > 1 else np.ones(1, np.uint8)
        values = [np.arange(4 * length, dtype=np.float32).reshape(length, 4) / 4 + layer for layer in range(3)]
        states = tuple((value.view(np.uint32) >> 16).astype(np.uint16) for value in values)
        made.append(Made(TokenSample.make(f"golden «{number}»", ids, mask), states))
    return made


def write_golden(path: Path, codec: str) -> None:
    with StoreWriter.open(path, golden_manifest(codec)) as writer:
        for one in golden_samples():
            writer.add(one.sample, one.states)
        writer.commit()


@pytest.mark.parametrize("codec", ["raw", "fp8"])
def test_bytes_are_frozen(tmp_path: Path, codec: str) -> None:
    """Other bytes need another format version, and a reader for this one. (blosc2's depend on its release.)"""
    write_golden(tmp_path / "store", codec)
    assert shard_path(tmp_path / "store", 0).read_bytes() == (GOLDEN / f"{codec}.safetensors").read_bytes()
    assert (tmp_path / "store" / "manifest.json").read_bytes() == (GOLDEN / f"{codec}.manifest.json").read_bytes()


@pytest.mark.parametrize("codec", ["raw", "blosc2", "fp8"])
def test_stores_of_v1_stay_readable(tmp_path: Path, codec: str) -> None:
    path = tmp_path / "store"
    (path / "shards").mkdir(parents=True)
    (path / "manifest.json").write_bytes((GOLDEN / f"{codec}.manifest.json").read_bytes())
    shard_path(path, 0).write_bytes((GOLDEN / f"{codec}.safetensors").read_bytes())
    if codec != "fp8":
        assert_holds(path, golden_samples())
    with Store(path, check=True) as store:
        for one in golden_samples():
            found = store[one.sample.key].states
            for state, expected in zip(found.values(), one.states, strict=True):
                wide = [(bits.astype(np.uint32) << 16).view(np.float32) for bits in (state, expected)]
                np.testing.assert_allclose(*wide, rtol=0 if codec != "fp8" else 1 / 16)


def test_the_example_in_the_specification() -> None:
    """The specification's byte-by-byte example, read by nothing but the standard library and xxhash."""
    data = (GOLDEN / "raw.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert (8 + length) % 64 == 0
    assert data[8:37] == b'{"__metadata__":{"checksum":"'
    checksum = data[37:69]
    assert xxhash.xxh3_128_hexdigest(data[:37] + b"0" * 32 + data[69 : 8 + length]).encode() == checksum
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert set(metadata) == {
        "checksum",
        "format",
        "format_version",
        "shard",
        "manifest_digest",
        "manifest",
        "samples",
    }
    assert (metadata["format"], metadata["format_version"], metadata["shard"]) == ("hsdump-store", "1", "0")
    samples = json.loads(metadata["samples"])
    key = samples[0]["key"]
    first = header[f"{key}/input_ids"]
    assert first == {"dtype": "I64", "shape": [3], "data_offsets": [0, 24]}
    assert header["pad/0"] == {"dtype": "U8", "shape": [40], "data_offsets": [24, 64]}
    begin = 8 + length
    assert data[begin : begin + 24] == (0).to_bytes(8, "little") + (1).to_bytes(8, "little") + (2).to_bytes(8, "little")
    name, codec, digest = samples[0]["tensors"][0]
    assert (name, codec, digest) == ("input_ids", "raw", xxhash.xxh3_128_hexdigest(data[begin : begin + 24]))


def test_a_header_with_a_reserved_place_is_the_same_but_for_spaces(tmp_path: Path) -> None:
    short, long = ((tmp_path / name) for name in ("short", "long"))
    manifest = make_manifest(hidden_size=4096)
    made = [make_sample(seed, manifest, num_tokens=50) for seed in range(8)]
    for path, at_once in ((short, 1), (long, 8)):
        with StoreWriter.open(path, manifest, options=WriterOptions(shard_bytes=1 << 30)) as writer:
            for number, one in enumerate(made, start=1):
                writer.add(one.sample, one.states)
                if number % at_once == 0:
                    writer.commit()
    assert_holds(long, made)
    assert_holds(short, made)
    with safe_open(shard_path(long, 0), "np") as file:
        assert len([name for name in file.keys() if name.endswith("/final")]) == 8  # noqa: SIM118 - not a dict
    assert read_header(shard_path(long, 0))[1] % ALIGNMENT == 0


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    source=st.text(max_size=40),
    errors=st.booleans(),
)
def test_headers_round_trip_and_their_cost_is_an_upper_bound(lengths: list[int], source: str, errors: bool) -> None:
    """Whatever a source is called: quotes, control characters, surrogates that JSON must escape."""
    source = source.encode("utf-8", "replace").decode()
    offset, records = 0, []
    for number, length in enumerate(lengths):
        entries = []
        for name, dtype, size in (("input_ids", "I64", 8 * length), ("layer2.scale", "F32", 4 * length)):
            entries.append(TensorEntry(name, "raw", dtype, [length], offset, size, f"{number:032x}"))
            offset += size + -size % ALIGNMENT
        records.append(
            SampleRecord(
                key=f"{number:032x}",
                source=source,
                num_tokens=length,
                num_learned=length // 2,
                attempts=1,
                tensors=entries,
                errors={"layer2": 0.5} if errors else {},
            )
        )
    manifest = make_manifest()
    block = encode_header(7, manifest, records)
    bound = len(encode_header(7, manifest, [])) + sum(header_cost(record) for record in records)
    assert len(block) <= bound + ALIGNMENT
    header = decode_header(block, len(block) + offset, "x")
    assert (header.number, header.manifest, header.manifest_digest) == (7, manifest, manifest.digest)
    for found, record in zip(header.samples, records, strict=True):
        assert found.source == record.source
        assert [entry.offset - len(block) for entry in found.tensors] == [entry.offset for entry in record.tensors]


def test_names_of_shards() -> None:
    assert shard_name(7) == "000007.safetensors"
    assert shard_number("000007.safetensors") == 7
    assert shard_number(shard_name(12_345_678)) == 12_345_678
    for other in ("7.safetensors", "0000007.safetensors", "000007.safetensors.partial", "../000007.safetensors"):
        assert shard_number(other) is None


def test_manifests_round_trip_and_unknown_fields_are_left_alone() -> None:
    manifest = golden_manifest("raw")
    data = encode_manifest(manifest)
    assert decode_manifest(data, "x") == manifest
    later = json.dumps({**json.loads(data), "a_later_field": 1}).encode()
    assert decode_manifest(later, "x") == manifest
    assert manifest.digest == golden_manifest("raw").digest
    assert manifest.digest != golden_manifest("fp8").digest


@pytest.mark.parametrize(
    ("name", "value"), [("dtype", "int8"), ("final_state", "normed"), ("layers", [4, 2]), ("hidden_size", 0)]
)
def test_a_manifest_that_no_hsdump_writes_is_damaged(name: str, value: object) -> None:
    data = msgspec.json.encode(msgspec.structs.replace(golden_manifest("raw"), **{name: value}))
    with pytest.raises(StoreCorrupt, match=f"is not a manifest: {name} is"):
        decode_manifest(data, "x")


# One named test per attack on the header: its checksum is no secret, so all of these can carry a right one.


def _signed(text: bytes) -> bytes:
    text = b'{"__metadata__":{"checksum":"' + b"0" * 32 + text
    size = 8 + len(text)
    block = bytearray((size + -size % 64 - 8).to_bytes(8, "little") + text + b" " * (-size % 64))
    block[37:69] = xxhash.xxh3_128_hexdigest(bytes(block)).encode()
    return bytes(block)


def _metadata(samples: str = "[]") -> bytes:
    manifest = msgspec.json.encode(msgspec.json.encode(make_manifest()).decode())
    fields = b'","shard":"0","manifest_digest":"x","manifest":' + manifest
    return fields + b',"samples":' + json.dumps(samples).encode() + b"}"


EIGHT = b'{"dtype":"U8","shape":[8],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("attack", "rest", "data_bytes"),
    [
        ("not JSON", b'"', 0),
        ("no metadata", b'"}}', 0),
        ("hole", b',"pad/0":{"dtype":"U8","shape":[8],"data_offsets":[64,72]}}', 72),
        ("overlap", b',"pad/0":' + EIGHT + b',"pad/1":' + EIGHT + b"}", 8),
        ("wrong size", b',"pad/0":{"dtype":"U8","shape":[9],"data_offsets":[0,8]}}', 8),
        ("unknown dtype", b',"pad/0":{"dtype":"C128","shape":[8],"data_offsets":[0,8]}}', 8),
        ("negative", b',"pad/0":{"dtype":"U8","shape":[-8],"data_offsets":[0,-8]}}', 0),
        ("two negatives", b',"pad/0":{"dtype":"U8","shape":[-8,-8],"data_offsets":[0,64]}}', 64),
        ("nobody's tensor", b',"x/final":{"dtype":"U8","shape":[64],"data_offsets":[0,64]}}', 64),
        ("tail", b"}", 64),
    ],
)  # fmt: skip
def test_hostile_headers_are_refused(attack: str, rest: bytes, data_bytes: int) -> None:
    block = _signed((_metadata() if attack not in {"not JSON", "no metadata"} else b"") + rest)
    assert header_size(block, len(block) + data_bytes, "x") == len(block)
    with pytest.raises(StoreCorrupt, match="its header is not one that hsdump writes"):
        decode_header(block, len(block) + data_bytes, "x")


def test_a_header_that_says_it_is_longer_than_the_file() -> None:
    for claimed in (1 << 40, 100, 2**64 - 1):
        with pytest.raises(StoreCorrupt, match="are no header length for 50 bytes"):
            header_size(claimed.to_bytes(8, "little"), 50, "x")
    with pytest.raises(StoreCorrupt, match="are no header length"):
        header_size(b"\x00", 1, "x")


FLIPS = {"dev": 150, "ci": 1000, "nightly": 5000}[PROFILE]


def test_every_flipped_bit_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "store"
    made = fill(path, range(6))
    keys = {one.sample.key for one in made}
    shard = shard_path(path, 0)
    data = shard.read_bytes()
    places = {entry.offset: key for key in keys for entry in Store(path).row(key).record.tensors}
    header_bytes = read_header(shard)[1]
    rng = np.random.default_rng(0)
    for position in rng.choice(8 * len(data), FLIPS, replace=False):
        at, bit = divmod(int(position), 8)
        _write(shard, at, data[at] ^ (1 << bit))
        report = verify_store(path)
        assert report.exit_code == 2, (at, bit)
        if at < header_bytes:
            assert {finding.sample for finding in report.findings} == keys
        elif not any(finding.check == "shard-damaged" for finding in report.findings):  # that is a pad
            place = max(offset for offset in places if offset <= at)
            assert places[place] in {finding.sample for finding in report.findings if finding.check == "checksum"}
        _write(shard, at, data[at])
    assert verify_store(path).verdict == "clean"


def test_every_class_of_truncation_is_found_and_named(tmp_path: Path) -> None:
    path = tmp_path / "store"
    made = fill(path, range(3))
    shard = shard_path(path, 0)
    data = shard.read_bytes()
    header_bytes = read_header(shard)[1]
    lengths = [0, 1, 7, 8, 9, 40, header_bytes - 1, header_bytes, header_bytes + 1, len(data) // 2, len(data) - 64]
    for length in (*lengths, len(data) - 1, len(data) + 1, len(data) + 64):
        shard.write_bytes(data[:length] + bytes(max(0, length - len(data))))
        report = verify_store(path)
        assert report.exit_code == 2, length
        assert {finding.sample for finding in report.findings} == {one.sample.key for one in made}
    shard.write_bytes(data)
    with Store(path) as store:
        assert_equal(store, made[0])


def _write(path: Path, offset: int, byte: int) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), bytes([byte]), offset)
