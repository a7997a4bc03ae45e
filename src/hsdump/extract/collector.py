"""The far end: a run beside a server that takes samples from a driver elsewhere and writes its partition here."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from hsdump.engines.collector import Begun, Outcome, Terms, WireSample
from hsdump.engines.sglang_http import SglangEngine
from hsdump.errors import HsdumpError, ServerError, UsageError
from hsdump.extract.events import Events
from hsdump.extract.lanes import Lane
from hsdump.extract.plan import ExtractOptions, make_plan
from hsdump.extract.session import Session, limits_of, make_session
from hsdump.extract.state import RunState
from hsdump.prompts import Skip
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo

SILENCE_S = 120.0
"""A driver that asks nothing for so long is gone: what is there is finished and committed."""


class Collector:
    """Serves one driver at a time. All methods from one event loop."""

    def __init__(self, url: str, out: Path, *, spool: Path | None = None, api_key: str | None = None) -> None:
        """Args:
        url: of the server beside it.
        out: the partition to write.
        """
        self.url, self.out, self._spool, self._api_key = url, out, spool, api_key
        self._engine: SglangEngine | None = None
        self._info: EngineInfo | None = None
        self._session: Session | None = None
        self._run: asyncio.Task[RunState] | None = None
        self._queue: asyncio.Queue[TokenSample | None] = asyncio.Queue()
        self._known: set[str] = set()
        self._outcomes: list[Outcome] = []
        """Those that the driver has not had for certain."""

        self._outcomes_had = 0
        self._number = 0
        self._heard_s = time.monotonic()
        self._calls = {
            "info": self.info,
            "begin": self.begin,
            "put": self.put,
            "outcomes": self.outcomes,
            "ping": self.ping,
            "end": self.end,
        }

    async def call(self, method: str, body: bytes) -> bytes:
        """Answer one call of a driver.

        Raises:
            HsdumpError: said to the driver as it is.
        """
        self._heard_s = time.monotonic()
        if method not in self._calls:
            raise UsageError(f"there is no call {method!r}", "use the same hsdump release on both sides")
        try:
            return await self._calls[method](body)
        except msgspec.MsgspecError as error:
            raise UsageError(f"{method}: {error}", "use the same hsdump release on both sides") from error

    async def ping(self, _: bytes) -> bytes:
        """Say that the run goes on.

        Raises:
            ServerError: it ended.
        """
        if self._run is not None and self._run.done():
            raise ServerError(f"the collector's run ended: {self._why()}", "it begins again with the next handshake")
        return b""

    async def info(self, _: bytes) -> bytes:
        """Shake hands with the server, anew each time; a run that is going on is finished first."""
        await self._finish("another driver came")
        greeted, self._engine = self._engine, None
        if greeted is not None:  # by a driver that failed before it began: it may hold the server's ring
            await greeted.close()
        engine = SglangEngine(self.url, spool=self._spool, api_key=self._api_key)
        try:
            self._info = await asyncio.to_thread(engine.handshake)
        except BaseException:
            await engine.close()
            raise
        self._engine = engine
        return msgspec.msgpack.encode(asdict(self._info))

    async def begin(self, body: bytes) -> bytes:
        """Open the partition and start the run."""
        terms = msgspec.msgpack.decode(body, type=Terms)
        engine, info = self._engine, self._info
        if engine is None or info is None:
            raise UsageError("begin before info", "use the same hsdump release on both sides")
        options = _options_of(terms, self.out)
        plan = make_plan(options, info)
        manifest = msgspec.structs.replace(
            plan.manifest,
            tokenizer_digest=terms.tokenizer_digest,
            template_digest=terms.template_digest,
            extra=terms.prompts,
        )
        self._queue, self._known = asyncio.Queue(), set()
        self._outcomes, self._outcomes_had, self._number = [], 0, self._number + 1
        events = Events([self._on_event])
        lane = Lane(self.url, engine, info, limits_of(options))
        session = make_session([lane], replace(plan, manifest=manifest), options, events, self._rows)
        self._run = asyncio.create_task(session.run())
        while not session.state.is_open and not self._run.done():
            await asyncio.sleep(0.01)
        if self._run.done():
            with contextlib.suppress(asyncio.CancelledError):
                await session.fleet.close()
            run, self._run, self._engine = self._run, None, None
            run.result()  # raises why the store could not be opened
        self._session = session
        begun = Begun(
            run=self._number,
            partition=str(self.out),
            committed=await asyncio.to_thread(session.keeper.committed_keys().pack),
            failed=sorted(session.keeper.failed_keys()),
        )
        return msgspec.msgpack.encode(begun)

    async def put(self, body: bytes) -> bytes:
        """Take samples over. One that is committed already is said so at once; one on its way is not taken twice."""
        if self._session is None:
            raise UsageError("put before begin", "use the same hsdump release on both sides")
        for wire in msgspec.msgpack.decode(body, type=list[WireSample]):
            sample = wire.sample()
            if sample.key != wire.key:
                raise UsageError(
                    f"sample {wire.key} arrived as {sample.key}", "it was damaged on its way; send it again"
                )
            if self._session.keeper.is_safe(sample.key):
                self._say(Outcome(sample.key))
            elif sample.key not in self._known:
                self._known.add(sample.key)
                self._queue.put_nowait(sample)
        if self._run is None or self._run.done():
            self._say_stopped()
        return b""

    async def outcomes(self, body: bytes) -> bytes:
        """Give what became of samples since the driver last asked; waits a little when there is nothing."""
        asked: dict[str, Any] = msgspec.msgpack.decode(body)
        since, deadline_s = int(asked["since"]), time.monotonic() + float(asked["wait_s"])
        if asked["run"] != self._number or since < self._outcomes_had:
            raise ServerError("another driver took this collector over", "use one driver at a time")
        del self._outcomes[: since - self._outcomes_had]  # of a million samples they would take 200 MB
        self._outcomes_had = since
        while not self._outcomes and time.monotonic() < deadline_s:
            if self._run is not None and self._run.done():
                self._say_stopped()
            await asyncio.sleep(0.02)
        return msgspec.msgpack.encode(self._outcomes)

    async def end(self, _: bytes) -> bytes:
        """Finish and commit what is there; the report is the answer."""
        state = await self._finish(None)
        return msgspec.json.encode(state.report() if state else {})

    async def watch(self) -> None:
        """Finish a run whose driver is silent. For ever; cancel it."""
        while True:
            await asyncio.sleep(1.0)
            if self._run is not None and time.monotonic() - self._heard_s > SILENCE_S:
                await self._finish(f"the driver was silent for {SILENCE_S:.0f} s")

    async def close(self) -> None:
        await self._finish("the collector was stopped")
        if self._engine is not None:
            await self._engine.close()

    async def _finish(self, why: str | None) -> RunState | None:
        """End the run: with a reason what is queued is left, without one it is done."""
        run, session, self._run, self._session = self._run, self._session, None, None
        if run is None or session is None:
            return None
        if why is not None:
            session.driver.stop(why)
        self._queue.put_nowait(None)
        try:
            return await run
        finally:
            await session.fleet.close()
            self._engine = None

    async def _rows(self) -> AsyncIterator[TokenSample | Skip]:
        while (sample := await self._queue.get()) is not None:
            yield sample

    def _on_event(self, kind: str, facts: dict[str, Any]) -> None:
        """Runs in the store thread or the loop; appending to a list is safe from both."""
        if kind == "committed":
            for key in facts["keys"]:
                self._say(Outcome(key))
        elif kind == "failed":
            self._say(Outcome(facts["key"], facts["reason"], facts["detail"]))

    def _say(self, outcome: Outcome) -> None:
        self._outcomes.append(outcome)
        self._known.discard(outcome.key)

    def _say_stopped(self) -> None:
        for key in list(self._known):
            self._say(Outcome(key, "stopped", self._why()))

    def _why(self) -> str:
        state = self._session.state if self._session is not None else None
        return (state.stopped if state else None) or "it was stopped"


def _options_of(terms: Terms, out: Path) -> ExtractOptions:
    return ExtractOptions(
        inputs=(),
        out=out,
        layers=terms.layers,
        max_tokens=terms.max_tokens,
        concurrency=terms.concurrency,
        attempts=terms.attempts,
        retry_failed=True,  # which failures are taken again, the driver decides
        codec=terms.codec,
        shard_bytes=terms.shard_bytes,
        direct=terms.direct,
        commit_s=terms.commit_s,
        disk_reserve=terms.disk_reserve,
        tokens_in_flight=terms.tokens_in_flight,
        live_share=terms.live_share,
        server_wait_s=terms.server_wait_s,
    )


def said(error: HsdumpError) -> str:
    """Word an error for the other end."""
    return f"{error.what}; {error.fix}"
