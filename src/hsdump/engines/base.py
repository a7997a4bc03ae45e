"""What `extract` needs of an engine, so that SGLang and the embedded one are drop-in.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hsdump.arrays import StateArray
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaptureRequest:
    """One sample to run through the target."""

    key: str
    """The sample's key (`hsdump.samples.sample_key`)."""

    input_ids: NDArray[np.int64]
    """[S]"""

    attempt: int
    """0 for the first try; a late result of an earlier attempt never counts."""

    new_tokens: int = 0
    """Let the server generate so many tokens, greedily, and capture the rows of its decode steps too."""

    sample: TokenSample | None = None
    """The whole sample, for engines that write it themselves (a collector beside a remote server)."""

    logprobs: bool = False
    """Ask for the server's own log-probabilities of the tokens as well."""


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CapturedSample:
    """The target's states for one request, row t of every array being token t."""

    token_ids: NDArray[np.int64]
    """[S] as the model saw them, read back from the engine: must equal the request's. Of a request that generates, the
    generated tokens follow, without the last one, which is never fed to the model and so has no row."""

    states: tuple[StateArray, ...]
    """L+1 arrays [S, H] in the order of `StateShape.names`. May be views of shared memory until `release`."""

    release: Callable[[], None] = field(default=_nothing)
    """Give the engine's memory back. Call once, when the bytes are safe elsewhere."""

    in_spool: bool = False
    """Until then the states take memory of the server's spool and none of this process."""

    meta: Mapping[str, Any] = field(default_factory=dict)
    """What the server said about the request: SGLang's `meta_info`, log-probabilities included."""


class CaptureFailed(Exception):
    """This request has no states. Not an `HsdumpError`: the driver counts it, names it, and may try again."""

    def __init__(self, reason: str, detail: str, *, transient: bool) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.transient = reason, detail, transient

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


class ServerAway(CaptureFailed):
    """The server that ran this request is gone, which says nothing about the sample: no try of it is used up."""

    def __init__(self, detail: str) -> None:
        super().__init__("server-away", detail, transient=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerLoad:
    """What a server says about its work, ours included."""

    running: int
    """Requests that are generating. Ours never do: their prefill is all there is."""

    waiting: int
    """Requests in its queue."""


class Engine(Protocol):
    """An engine that can run tokens and hand out states."""

    @property
    def lost(self) -> bool:
        """Tell that the other end went away, so that nothing succeeds before `reconnect` did."""

    @property
    def spool_room(self) -> float:
        """Share of the spool that takes rows for certain. Less than what is held leaves of it where memory comes back
        pass by pass and in order; 1 where it comes back as it is released.
        """

    def handshake(self) -> EngineInfo:
        """Say what is on at the other end, or raise `ServerError` with the remedy."""

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        """Run one request.

        Raises:
            ServerAway: the other end is gone; the request may be run elsewhere.
            CaptureFailed: this request failed; `transient` says whether another try may help.
        """

    async def reconnect(self) -> EngineInfo:
        """Shake hands again, once, with whatever answers now. No request may be on its way.

        Raises:
            HsdumpError: nothing that captures answers.
        """

    async def load(self) -> ServerLoad | None:
        """Ask how busy the other end is; None where that cannot be said.

        Raises:
            ServerAway: no answer within some seconds.
        """

    def request_id(self, request: CaptureRequest) -> str:
        """Name a request as the other end knows it; empty where it has no names."""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Have the other end drop requests that nobody waits for. Best effort: it may have finished them."""

    async def close(self) -> None:
        """Let go of everything, entries of unfinished requests included."""
