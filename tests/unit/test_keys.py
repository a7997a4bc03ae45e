"""A set of keys is a set, however many there are."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hsdump.arrays import xxh3
from hsdump.keys import KEY_BYTES, KeySet

FEW_BYTES = st.lists(st.sampled_from([0, 1]), min_size=KEY_BYTES, max_size=KEY_BYTES).map(lambda raw: bytes(raw).hex())
"""Keys of zeros and ones: many in one bucket, with the bytes of one across two others."""


@settings(deadline=None, max_examples=50)
@given(st.lists(FEW_BYTES, max_size=60), st.lists(FEW_BYTES, max_size=20), st.lists(FEW_BYTES, max_size=20))
def test_it_does_what_a_set_does(first: list[str], gone: list[str], then: list[str]) -> None:
    ours, theirs = KeySet(first), set(first)
    ours.difference_update(gone)
    theirs.difference_update(gone)
    for key in then:
        assert ours.add(key) == (key not in theirs)
        theirs.add(key)
    assert len(ours) == len(theirs)
    assert list(ours) == sorted(theirs)
    assert all((key in ours) == (key in theirs) for key in first + gone + then)
    again = KeySet(then)
    again.unpack(ours.pack())
    assert (list(again), len(again)) == (list(ours), len(ours))


def test_a_key_across_two_neighbours_is_not_there() -> None:
    one, two = bytes(15) + b"\x01", bytes(2) + b"\x02" + bytes(13)
    across = bytes(2) + (one + two[2:])[2 + 7 : 2 + 7 + 14]
    ours = KeySet([one.hex(), two.hex()])
    assert across.hex() not in ours
    assert (one.hex() in ours, two.hex() in ours) == (True, True)


@pytest.mark.parametrize("key", ["", "row-1", "ab" * 15, "ab" * 17, "xy" * 16])
def test_what_is_no_key_is_never_there(key: str) -> None:
    ours = KeySet([xxh3(b"")])
    assert key not in ours
    ours.discard(key)
    with pytest.raises(ValueError, match="is no key of 32 hex digits"):
        ours.add(key)


def test_half_a_key_is_not_unpacked() -> None:
    with pytest.raises(ValueError, match="17 bytes are no whole number of keys"):
        KeySet().unpack(bytes(17))


def test_a_hundred_thousand_keys_take_little_memory() -> None:
    count = 100_000
    ours = KeySet(xxh3(number.to_bytes(8, "big")) for number in range(count))
    num_bytes = sys.getsizeof(ours._tails) + sum(map(sys.getsizeof, ours._tails))
    # 14 bytes a key, and 41 for each of 65,536 buckets, filled or not.
    assert num_bytes < count * 14 + 65_536 * 48
