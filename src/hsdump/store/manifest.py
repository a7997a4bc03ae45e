"""`manifest.json`: what the states in a store are, so that nothing of another kind is ever mixed in."""

from __future__ import annotations

from typing import Any

import msgspec

from hsdump.arrays import NUMPY_DTYPES, xxh3
from hsdump.errors import StoreCorrupt, StoreError
from hsdump.layers import FINAL_STATES
from hsdump.schema import StateShape

FORMAT_VERSION = 1


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One store's facts. Those named in `FACTS` decide whether a resume may go on; the others only inform."""

    format_version: int = FORMAT_VERSION
    engine: str
    engine_version: str
    model_path: str
    """Where the model was read from. Not compared: a model may move."""

    model_digest: str
    model_class: str
    num_layers: int
    vocab_size: int
    layers: list[int]
    """[L] ascending, in hsdump's meaning (`hsdump.layers`)."""

    hidden_size: int
    dtype: str
    final_state: str
    """`post_norm`, `pre_norm` or `both`."""

    layer_meaning: str
    tokenizer_digest: str
    template_digest: str
    max_tokens: int
    codec: str = "raw"
    hsdump_version: str = ""
    created: str = ""
    """UTC, ISO 8601."""

    attach: str = ""
    notes: list[str] = []
    extra: dict[str, str] = {}
    """By name. Those that begin with `PROMPTS` are compared where both sides have them."""

    @property
    def shape(self) -> StateShape:
        """Names, width and dtype of the states of every sample."""
        return StateShape(
            layers=tuple(self.layers), hidden_size=self.hidden_size, dtype=self.dtype, final_state=self.final_state
        )

    @property
    def digest(self) -> str:
        """xxh3-128 of the facts alone: ties shards and index to this manifest, whatever its notes say."""
        return xxh3(msgspec.json.encode({name: getattr(self, name) for name in FACTS}))


FACTS = (
    "format_version",
    "engine",
    "engine_version",
    "model_digest",
    "model_class",
    "num_layers",
    "vocab_size",
    "layers",
    "hidden_size",
    "dtype",
    "final_state",
    "layer_meaning",
    "tokenizer_digest",
    "template_digest",
    "max_tokens",
    "codec",
)
"""Fields that must be equal for two captures to be one data set."""


PROMPTS = "prompts."
"""Begins the names in `extra` of the settings that made tokens and masks of rows, as `prompts.thinking`. They are no
facts, because stores of earlier releases are without them."""


def differences(stored: Manifest, asked: Manifest) -> list[str]:
    """Name every fact that differs, as `layers: the store has [2, 4], this run has [2, 5]`."""
    facts = [(name, getattr(stored, name), getattr(asked, name)) for name in FACTS]
    facts += [
        (name.removeprefix(PROMPTS), value, asked.extra.get(name, value))
        for name, value in sorted(stored.extra.items())
        if name.startswith(PROMPTS)
    ]
    return [f"{name}: the store has {before!r}, this run has {now!r}" for name, before, now in facts if before != now]


def encode_manifest(manifest: Manifest) -> bytes:
    """Give the bytes of `manifest.json`."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"


def decode_manifest(data: bytes, where: str) -> Manifest:
    """Read a manifest and check what the rest of the code relies on.

    Raises:
        StoreError: written by a later format.
        StoreCorrupt: not a manifest, or one that no hsdump writes.
    """
    try:
        version = msgspec.json.decode(data, type=_Version).format_version
        if version > FORMAT_VERSION:
            raise StoreError(
                f"{where} has format version {version}, this hsdump reads up to {FORMAT_VERSION}",
                "install a newer hsdump: pip install -U hsdump",
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise _broken(where, str(error)) from None
    problem = _problem(manifest)
    if problem:
        raise _broken(where, problem)
    return manifest


class _Version(msgspec.Struct):
    format_version: int


def _broken(where: str, problem: str) -> StoreCorrupt:
    fix = "open the store for writing once (`hsdump store scrub --repair STORE`): it is made again from the shards"
    return StoreCorrupt(f"{where} is not a manifest: {problem}", fix)


def _problem(manifest: Manifest) -> str | None:
    checks: list[tuple[bool, Any, str]] = [
        (manifest.dtype in NUMPY_DTYPES, manifest.dtype, "dtype"),
        (manifest.final_state in FINAL_STATES, manifest.final_state, "final_state"),
        (manifest.hidden_size > 0, manifest.hidden_size, "hidden_size"),
        (manifest.layers == sorted(set(manifest.layers)), manifest.layers, "layers"),
    ]
    return next((f"{name} is {value!r}" for holds, value, name in checks if not holds), None)
