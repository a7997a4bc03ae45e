"""Which samples are held out: by content, so that every command and every later run agrees."""

from __future__ import annotations


def is_held_out(key: str, share: float) -> bool:
    """Tell whether a sample belongs to the held-out share.

    Its key decides, which is a checksum: the same sample is on the same side in every store, however the store grew.
    """
    return int(key[:8], 16) < share * (1 << 32)
