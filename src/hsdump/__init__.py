"""hsdump: hidden states of a running SGLang server as verified EAGLE-3 training data.

SGLang imports this package inside its own processes, so nothing heavier than the version is loaded here; the public
names are looked up on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hsdump._version import __version__

if TYPE_CHECKING:
    from hsdump.store import Store

__all__ = ["Store", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "Store":
        from hsdump.store import Store

        return Store
    raise AttributeError(f"module 'hsdump' has no attribute {name!r}")
