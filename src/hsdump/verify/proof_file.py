"""`proof.json` beside a store's manifest: what was proved, and whether that still is what the store holds."""

from __future__ import annotations

import msgspec

from hsdump.arrays import xxh3
from hsdump.store.reader import Store

PROOF_NAME = "proof.json"
NO_PROOF = "none"
PROVED, NOT_PROVED = "proved", "not proved"


class _Proof(msgspec.Struct):
    verdict: str
    samples: int = 0
    of_samples: int = 0
    store_digest: str = ""
    manifest_digest: str = ""


def store_digest(store: Store) -> str:
    """Digest what a store holds, from its index alone."""
    parts = []
    for key in sorted(store.keys()):
        record = store.row(key).record
        parts.append(key + "".join(entry.name + entry.checksum for entry in record.tensors))
    return xxh3(*(part.encode() for part in parts)) if parts else xxh3(b"")


def proof_standing(store: Store) -> str:
    """Say what a store's proof is worth now.

    Returns:
        The verdict alone (`proved` and so on) when the proof is of just what the store holds; `none`; or `outdated` or
        `unreadable` and why.
    """
    try:
        proof = msgspec.json.decode((store.path / PROOF_NAME).read_bytes(), type=_Proof)
    except FileNotFoundError:
        return NO_PROOF
    except (OSError, msgspec.MsgspecError) as error:
        return f"unreadable: {error}"
    if (proof.store_digest, proof.manifest_digest) != (store_digest(store), store.manifest.digest):
        was = f"{proof.verdict} when the store held {proof.of_samples} samples"
        return f"outdated: {was}, and it has changed since; prove it again"
    return proof.verdict
