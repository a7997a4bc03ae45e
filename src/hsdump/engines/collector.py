"""Talking to a collector: a run beside a remote server, which writes a partition of the store there.

Samples go to it, outcomes come back, states stay where they are. To the driver a collector is one more engine, whose
`capture` ends when the sample is committed in its partition. How calls travel is the transport's business: HTTP with a
token, or Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import httpx
import msgspec
import numpy as np

from hsdump import connections
from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, ServerAway, ServerLoad
from hsdump.errors import HsdumpError, ServerError
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo, StateShape

GATHER_S = 0.02
"""Samples are sent together that come within this time."""

POLL_S = 5.0
"""How long a question for outcomes may wait at the collector."""

CALL_WAIT_S = 180.0
"""A call may include the handshake with a server that is just coming up."""


class WireSample(msgspec.Struct, frozen=True):
    """A sample on its way to a collector."""

    key: str
    source: str
    input_ids: bytes
    """int64, little endian."""

    loss_mask: bytes

    @classmethod
    def of(cls, sample: TokenSample) -> WireSample:
        ids = np.ascontiguousarray(sample.input_ids, "<i8").tobytes()
        return cls(sample.key, sample.source, ids, np.ascontiguousarray(sample.loss_mask, np.uint8).tobytes())

    def sample(self) -> TokenSample:
        """Rebuild it, its key included: what arrived is what was sent."""
        ids = np.frombuffer(self.input_ids, "<i8").astype(np.int64)
        return TokenSample.make(self.source, ids, np.frombuffer(self.loss_mask, np.uint8))


class Outcome(msgspec.Struct, frozen=True):
    """What became of a sample."""

    key: str
    reason: str = ""
    """Empty when it is committed; otherwise why it failed, `stopped` when the collector's own run ended before it."""

    detail: str = ""


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What the driver settles for all partitions, so that they can be merged."""

    layers: tuple[int, ...] | None
    max_tokens: int
    tokenizer_digest: str
    template_digest: str
    prompts: dict[str, str]
    """What made the tokens, for the manifest's `extra`."""

    codec: str
    shard_bytes: int
    direct: bool = False
    commit_s: float
    attempts: int
    concurrency: int
    tokens_in_flight: int | None
    live_share: float
    disk_reserve: int
    server_wait_s: float


class Begun(msgspec.Struct, frozen=True, kw_only=True):
    """A partition that is open."""

    run: int
    """Counts from the collector's start."""

    partition: str
    committed: bytes
    """A packed `KeySet`: of a million samples 16 MB, where a list of keys would take 90 here and there."""

    failed: list[str]


class Transport(Protocol):
    """One way to a collector. Methods: info, begin, put, outcomes, ping, end."""

    async def call(self, method: str, body: bytes) -> bytes:
        """Raises:
        ServerAway: nobody is there.
        ServerError: the collector refused, in its own words.
        """

    async def close(self) -> None: ...


class HttpTransport:
    """POST with a token, to a private address or loopback."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url
        headers = {"Authorization": f"Bearer {token}"}
        self._http = connections.client(url, timeout=CALL_WAIT_S, headers=headers)

    async def call(self, method: str, body: bytes) -> bytes:
        try:
            response = await self._http.post(f"/v1/{method}", content=body)
        except httpx.HTTPError as error:
            raise ServerAway(f"the collector at {self.url} is away ({error or type(error).__name__})") from error
        if response.status_code == httpx.codes.OK:
            return response.content
        raise ServerError(f"the collector at {self.url}: {response.text[:1000]}", "see its own output")

    async def close(self) -> None:
        await self._http.aclose()


class CollectorEngine:
    """One collector. Use from one event loop; `begin` after each handshake, before the first `capture`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.terms: Terms | None = None
        """Under which a partition is opened, again after a reconnect."""

        self._waiting: dict[str, asyncio.Future[Outcome]] = {}
        self._outbox: list[WireSample] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._lost = True
        self.begun: Begun | None = None

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def spool_room(self) -> float:
        return 1.0  # the collector sees to its server's

    def handshake(self) -> EngineInfo:
        raise AssertionError("a collector is asked in the event loop: use shake_hands")

    async def ask(self) -> EngineInfo:
        """Ask what captures there.

        Raises:
            ServerError: nobody answers, or the collector's own handshake failed.
        """
        try:
            raw = await self._transport.call("info", b"")
        except ServerAway as away:
            raise ServerError(away.detail, "start it there: hsdump collect --server URL --out PARTITION") from away
        info: dict[str, Any] = msgspec.msgpack.decode(raw)
        shape = StateShape(**{**info["shape"], "layers": tuple(info["shape"]["layers"])})
        return EngineInfo(**{**info, "shape": shape, "notes": tuple(info["notes"])})

    async def begin(self, terms: Terms) -> Begun:
        """Open the partition under these terms.

        Raises:
            ServerError: it was made under other terms, or cannot be written.
        """
        self.terms = terms
        try:
            raw = await self._transport.call("begin", msgspec.msgpack.encode(terms))
        except ServerAway as away:
            raise ServerError(away.detail, "start the collector again") from away
        try:
            self.begun = msgspec.msgpack.decode(raw, type=Begun)
        except msgspec.MsgspecError as error:
            raise ServerError(f"begin: {error}", "use the same hsdump release on both sides") from error
        self._lost = False
        self._tasks = [asyncio.create_task(self._send_all()), asyncio.create_task(self._follow())]
        return self.begun

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        """Have a sample captured and committed there. The states stay: the result has none."""
        if self._lost:
            raise ServerAway("the collector is away")
        assert request.sample is not None
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting[request.key] = future
        self._outbox.append(WireSample.of(request.sample))
        try:
            outcome = await future
        finally:
            self._waiting.pop(request.key, None)
        if outcome.reason == "stopped":
            raise ServerAway(outcome.detail)
        if outcome.reason:
            raise CaptureFailed(outcome.reason, outcome.detail, transient=False)
        return CapturedSample(token_ids=request.input_ids, states=())

    async def reconnect(self) -> EngineInfo:
        info = await self.ask()
        await self._stop_tasks()
        if self.terms is not None:
            await self.begin(self.terms)
        return info

    async def load(self) -> ServerLoad | None:
        """See that it is there. How busy its server is, the collector watches itself."""
        try:
            await self._transport.call("ping", b"")
        except HsdumpError as error:
            raise ServerAway(error.what) from error
        return None

    def request_id(self, request: CaptureRequest) -> str:  # noqa: ARG002 - the protocol's
        return ""

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Nothing to do: the collector looks after its server."""

    async def close(self) -> None:
        """Let the collector finish and commit what it has."""
        await self._stop_tasks()
        if not self._lost:
            try:
                await self._transport.call("end", b"")
            except (ServerAway, HsdumpError):
                self._lost = True  # it commits by itself when its driver is silent
        await self._transport.close()

    async def _send_all(self) -> None:
        while True:
            await asyncio.sleep(GATHER_S)
            if self._outbox:
                batch, self._outbox = self._outbox, []
                await self._call_or_lose("put", msgspec.msgpack.encode(batch))

    async def _follow(self) -> None:
        seen = 0
        while not self._lost and self.begun is not None:
            asked = {"run": self.begun.run, "since": seen, "wait_s": POLL_S}
            raw = await self._call_or_lose("outcomes", msgspec.msgpack.encode(asked))
            for outcome in msgspec.msgpack.decode(raw, type=list[Outcome]) if raw else []:
                seen += 1
                future = self._waiting.get(outcome.key)
                if future is not None and not future.done():
                    future.set_result(outcome)

    async def _call_or_lose(self, method: str, body: bytes) -> bytes:
        try:
            return await self._transport.call(method, body)
        except (ServerAway, HsdumpError) as error:
            self._lost = True
            detail = error.detail if isinstance(error, ServerAway) else str(getattr(error, "what", error))
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(ServerAway(detail))
            return b""

    async def _stop_tasks(self) -> None:
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._outbox.clear()
