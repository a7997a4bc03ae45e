"""What one store holds and how it came to be. Facts that matter are compared on every resume."""

from __future__ import annotations

from pathlib import Path

import msgspec

from hsdump.arrays import xxh3
from hsdump.errors import StoreCorrupt, StoreError, StoreMismatch
from hsdump.schema import StateShape

FORMAT_VERSION = 1
FILE_NAME = "manifest.json"


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=False):
    """The content of `manifest.json`."""

    format_version: int
    engine: str
    engine_version: str
    model_digest: str
    model_class: str
    num_layers: int
    vocab_size: int
    layers: list[int]
    """Auxiliary layers, ascending, in the meaning that `layer_meaning` spells out."""

    hidden_size: int
    dtype: str
    final_state: str
    layer_meaning: str
    tokenizer_digest: str
    template_digest: str
    max_tokens: int
    codec: str

    # Not compared: where and when, not what.
    model_path: str = ""
    hsdump_version: str = ""
    created: str = ""
    attach: str = ""
    notes: list[str] = []
    extra: dict[str, str] = {}

    @property
    def shape(self) -> StateShape:
        """The states of one sample."""
        return StateShape(
            layers=tuple(self.layers),
            hidden_size=self.hidden_size,
            dtype=self.dtype,
            final_state=self.final_state,
        )

    @property
    def digest(self) -> str:
        """32 hex digits over the facts that matter; ties index and shards to this manifest."""
        facts = {name: getattr(self, name) for name in FACTS}
        return xxh3(msgspec.json.encode(facts, order="sorted"))


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
"""Two samples that differ in any of these may not share a store."""


def check_same(path: Path, found: Manifest, wanted: Manifest) -> None:
    """Refuse to add to a store that was made with other settings.

    Raises:
        StoreMismatch: with every difference, not just the first.
    """
    different = [
        f"{name}: the store has {getattr(found, name)!r}, this run {getattr(wanted, name)!r}"
        for name in FACTS
        if getattr(found, name) != getattr(wanted, name)
    ]
    if different:
        raise StoreMismatch(
            f"the store {path} was made with other settings:\n    " + "\n    ".join(different),
            "extract into a new store with --out, or set this run up as the store was made",
        )


def read_manifest(path: Path) -> Manifest | None:
    """Read a store's manifest; None where there is none.

    Raises:
        StoreCorrupt: the file is there, but not a manifest.
        StoreError: a format version that this hsdump does not know.
    """
    try:
        data = (path / FILE_NAME).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(
            f"{path / FILE_NAME} is damaged ({error})",
            "every shard carries a copy: remove the file and run any hsdump command that writes to the store",
        ) from error
    if manifest.format_version != FORMAT_VERSION:
        raise StoreError(
            f"the store {path} has format version {manifest.format_version}, this hsdump reads {FORMAT_VERSION}",
            "use the hsdump version that wrote it, or upgrade",
        )
    return manifest


def encode_manifest(manifest: Manifest) -> bytes:
    """Give the bytes of `manifest.json`."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
