"""The SGLang engine: HTTP is only the trigger, the states come through the spool."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from hsdump import connections
from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, ServerAway, ServerLoad
from hsdump.engines.handover import HandOver
from hsdump.engines.handshake import generate_body, handshake, server_facts
from hsdump.engines.rows import Rows
from hsdump.errors import ServerError, SpoolError
from hsdump.locks import is_held
from hsdump.schema import EngineInfo
from hsdump.spool.names import Rid, new_run
from hsdump.spool.reader import FailedNote
from hsdump.spool.sweep import sweep_dead_clients, sweep_dead_spools

ENTRY_WAIT_S = 30.0
"""How long after the response an entry may take to appear. Measured on a CPU it is there before the response."""

CACHED_WAIT_S = 2.0
"""The same when the response says that tokens came from the prefix cache, whose rows may never come."""

TRANSIENT = frozenset(
    {"connection-lost", "spool-full", "shared-memory-full", "spool-error", "rows-missing", "spool-gone", "retracted"}
)
"""Failure notes after which another try may succeed."""


LOAD_WAIT_S = 10.0
"""How long a server may take to say how busy it is. A stalled one answers nothing at all."""

FORGET_EVERY_S = 1.0

FORGET_FOR_S = 1200.0
"""How long late rows of a given-up request are looked for; a server gives an entry up after half of that."""

Mark = tuple[int, int]
"""A file's inode and time of writing."""


class SglangEngine:
    """One SGLang server with hsdump's capture on. Use from one event loop."""

    def __init__(
        self,
        url: str,
        *,
        spool: Path | None = None,
        api_key: str | None = None,
        request_timeout_s: float = 600.0,
    ) -> None:
        """Args:
        url: base URL, such as `http://127.0.0.1:30000`.
        spool: the server's spool, when it cannot be found by itself.
        api_key: the server's `--api-key`.
        request_timeout_s: for one request, waiting in the server's queue included.
        """
        self.url = url.rstrip("/")
        self.run = new_run()
        self._spool = spool
        self._info: EngineInfo | None = None
        self._hand_over: HandOver | None = None
        self._lost = False
        self._looking = asyncio.Lock()
        self._announced: dict[Path, Mark | None] = {}
        """The announcements of the server that was greeted."""

        self._abandoned: dict[Rid, float] = {}
        """Requests that nobody waits for, and until when their rows are looked for."""

        self._next_forget_s = 0.0
        self._aborts: set[asyncio.Task[None]] = set()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = connections.client(self.url, timeout=request_timeout_s, headers=self._headers)

    def handshake(self) -> EngineInfo:
        """See `hsdump.engines.handshake.handshake`; also removes what dead clients and servers left behind."""
        sweep_dead_spools()
        info, hand_over = handshake(self.url, self.run, self._spool, self._headers)
        self._info, self._hand_over = info, hand_over
        if info.spool_dir is not None:
            spool = Path(info.spool_dir)
            # The server has answered just now, and no other can be in its spool beside it.
            self._announced = {path: _mark(path) for path in spool.glob("server-*.json")}
            sweep_dead_clients(spool)
        return info

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def spool_room(self) -> float:
        return 1.0 if self._hand_over is None else self._hand_over.room

    async def capture(self, request: CaptureRequest) -> CapturedSample:
        """Run one request and take its entry.

        Raises:
            ServerAway: the server is gone; `reconnect` first.
            CaptureFailed: this request failed.
        """
        hand_over = self._hand_over
        if self._lost or hand_over is None:
            raise ServerAway(f"{self.url} is away")
        rid = _rid(self.run, request)
        hand_over.expect(rid)
        answered = False
        try:
            meta = await self._send(rid, request)
            answered = True
            rows = await self._wait_for_rows(hand_over, rid, int(meta.get("cached_tokens") or 0))
        except BaseException:
            # The server may still publish it; a late entry must not fill the spool, nor a dead request the queue.
            self._abandoned[rid] = time.monotonic() + FORGET_FOR_S
            if not answered and not self._lost:
                self._abort_later(rid)
            hand_over.forget(rid)
            raise
        self._forget_abandoned()
        return self._as_sample(rows, request, meta)

    def request_id(self, request: CaptureRequest) -> str:
        return str(_rid(self.run, request))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See `Engine.abort`. SGLang drops requests of closed connections itself, but looks only every few seconds."""
        for rid in request_ids:
            with contextlib.suppress(httpx.HTTPError):
                await self._http.post("/abort_request", json={"rid": rid}, timeout=LOAD_WAIT_S)

    async def load(self) -> ServerLoad | None:
        """Ask `/v1/loads`, which SGLang has from 0.5.11 on without any option; summed over data-parallel ranks.

        Raises:
            ServerAway: nobody answers, or a server that was not greeted yet: `lost` says so.
        """
        self._raise_if_another()
        self._raise_if_dead()
        try:
            response = await self._http.get("/v1/loads", params={"include": "core"}, timeout=LOAD_WAIT_S)
            ranks = response.json()["loads"] if response.status_code == httpx.codes.OK else []
            running = sum(int(rank["num_running_reqs"]) for rank in ranks)
            waiting = sum(int(rank["num_waiting_reqs"]) for rank in ranks)
        except httpx.HTTPError as error:
            raise ServerAway(f"{self.url} does not say how busy it is ({error or type(error).__name__})") from error
        except (ValueError, KeyError, TypeError):
            return None
        return ServerLoad(running=running, waiting=waiting) if ranks else None

    async def reconnect(self) -> EngineInfo:
        """Shake hands again with what answers at the URL now.

        Raises:
            ServerError, SpoolError: nothing that captures answers there.
        """
        if self._hand_over is not None:
            hand_over, self._hand_over = self._hand_over, None
            self._abandoned.clear()
            await asyncio.to_thread(hand_over.close)
        info = await asyncio.to_thread(self.handshake)
        self._lost = False
        return info

    async def close(self) -> None:
        """Close connections (the server aborts what was running) and take this run's leftovers away."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=LOAD_WAIT_S)
        await self._http.aclose()
        if self._hand_over is not None:
            await asyncio.to_thread(self._hand_over.close)
        if self._info is not None and self._info.spool_dir is not None:
            # A killed client's last requests may have been finished after the sweep at the start.
            await asyncio.to_thread(sweep_dead_clients, Path(self._info.spool_dir))

    async def _send(self, rid: Rid, request: CaptureRequest) -> dict[str, Any]:
        """Send a request and wait for its response; give what the server says about it, its new tokens included."""
        ids = request.input_ids.tolist()
        body = generate_body(rid, ids, new_tokens=request.new_tokens, logprobs=request.logprobs)
        try:
            response = await self._http.post("/generate", json=body)
        except httpx.TimeoutException as error:
            raise CaptureFailed("timeout", f"no answer ({type(error).__name__})", transient=True) from error
        except httpx.TransportError as error:
            await self._raise_if_gone(error)
            raise CaptureFailed("connection-lost", str(error) or type(error).__name__, transient=True) from error
        if response.status_code != httpx.codes.OK:
            transient = response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS
            raise CaptureFailed(
                "server-error" if transient else "rejected-by-server",
                f"HTTP {response.status_code}: {_message(response)}",
                transient=transient,
            )
        return self._check_meta(response, len(request.input_ids))

    def _check_meta(self, response: httpx.Response, num_tokens: int) -> dict[str, Any]:
        try:
            answer = response.json()
            meta: dict[str, Any] = answer["meta_info"]
        except (ValueError, KeyError, TypeError) as error:
            raise CaptureFailed("bad-response", f"no meta_info: {response.text[:200]}", transient=True) from error
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort":
            raise CaptureFailed("aborted-by-server", str(reason.get("message", "")), transient=True)
        if meta.get("prompt_tokens", num_tokens) != num_tokens:
            raise CaptureFailed(
                "cut-by-server",
                f"the server took {meta['prompt_tokens']} of {num_tokens} tokens (--allow-auto-truncate?)",
                transient=False,
            )
        return {**meta, "output_ids": answer.get("output_ids") or []}

    async def _wait_for_rows(self, hand_over: HandOver, rid: Rid, cached_tokens: int) -> Rows:
        """Wait for the outcome. Tokens from the cache are fine when they are the request's own, after a retraction."""
        wait_s = CACHED_WAIT_S if cached_tokens else ENTRY_WAIT_S
        deadline_s, pause_s = time.monotonic() + wait_s, 0.001
        while True:
            try:
                match hand_over.poll(rid):
                    case Rows() as rows:
                        return rows
                    case FailedNote(reason, detail):
                        raise CaptureFailed(reason, detail, transient=reason in TRANSIENT)
            except SpoolError as error:
                self._lost = True  # a damaged ring has no reader any more: shake hands again
                raise CaptureFailed("damaged-entry", error.what, transient=True) from error
            if self._lost:
                raise ServerAway(f"{self.url} went away before the rows of {rid} were in")
            if time.monotonic() > deadline_s and cached_tokens:
                raise CaptureFailed(
                    "prefix-cached",
                    f"{cached_tokens} of {rid.num_tokens} tokens came from the prefix cache although the request had "
                    "an extra_key of its own; start the server with --disable-radix-cache",
                    transient=False,
                )
            if time.monotonic() > deadline_s:
                self._lost = True  # perhaps a restarted server with another spool: shake hands again
                far = hand_over.missing(rid)
                raise CaptureFailed("no-entry", f"{ENTRY_WAIT_S:.0f} s after the response: {far}", transient=True)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.05)

    def _as_sample(self, rows: Rows, request: CaptureRequest, meta: dict[str, Any]) -> CapturedSample:
        """Hand the rows out, after the tokens that the model saw were found to be the ones that were sent."""
        assert self._info is not None
        shape = self._info.shape
        token_ids, states, release, in_spool = rows.token_ids, rows.states, rows.release, rows.in_spool
        del rows  # an error below must not keep the memory mapped
        try:
            self._raise_if_another()
        except ServerAway:
            release()
            raise
        width = {(len(token_ids), shape.hidden_size)}
        if len(states) != len(shape.names) or {state.shape for state in states} != width:
            found = [state.shape for state in states]
            release()
            self._lost = True
            raise CaptureFailed("other-shape", f"states of {found} were handed over", transient=True)
        expected = _expected_ids(request, meta)
        if not np.array_equal(token_ids, expected):
            found_ids = f"rows of {len(token_ids)} tokens came, {len(expected)} were sent"
            if len(token_ids) == len(expected):
                row = int(np.argmax(token_ids != expected))
                found_ids = f"row {row} is token {token_ids[row]}, expected was {expected[row]}"
            release()
            raise CaptureFailed("wrong-tokens", found_ids, transient=True)
        return CapturedSample(token_ids=token_ids, states=states, release=release, in_spool=in_spool, meta=meta)

    def _raise_if_another(self) -> None:
        """See that the spool is still of the server that was greeted: one that was started anew in the same place may
        have another model, or other layers of the same number, and would be taken for it.

        An announcement that is gone is no other server yet.
        """
        for path, mark in self._announced.items():
            if _mark(path) not in (mark, None):
                self._lost = True
                raise ServerAway(f"{self.url} was started anew")

    def _raise_if_dead(self) -> None:
        """See that the server that was greeted lives: the one that answers in its place may use another spool, in
        which nobody looks for what it captures.
        """
        if self._announced and not self._greeted_lives():
            self._lost = True
            raise ServerAway(f"{self.url} went away")

    def _greeted_lives(self) -> bool:
        return any(is_held(path.with_suffix(".lock")) for path in self._announced)

    async def _raise_if_gone(self, error: Exception) -> None:
        """Tell a server that died, which is nobody's fault, from a connection that broke."""
        async with self._looking:  # one look for all whose connections broke at once
            if not self._lost and not await asyncio.to_thread(self._is_still_there):
                self._lost = True
        if self._lost:
            raise ServerAway(f"{self.url} went away ({error or type(error).__name__})") from error

    def _is_still_there(self) -> bool:
        """Tell whether the server that the handshake found is alive, its spool included."""
        if self._info is None or self._info.spool_dir is None or self._hand_over is None or self._hand_over.broken:
            return False
        try:
            server_facts(self.url, self._headers)
        except ServerError:
            return False
        return self._greeted_lives()

    def _abort_later(self, rid: Rid) -> None:
        task = asyncio.get_running_loop().create_task(self.abort([str(rid)]))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    def _forget_abandoned(self) -> None:
        """Drop late entries; each look costs some system calls, so not after every request."""
        now_s = time.monotonic()
        if self._hand_over is None or now_s <= self._next_forget_s:
            return
        self._next_forget_s = now_s + FORGET_EVERY_S
        self._abandoned = {rid: until_s for rid, until_s in self._abandoned.items() if now_s < until_s}
        for rid in self._abandoned:
            self._hand_over.forget(rid)


def _mark(path: Path) -> Mark | None:
    """Tell one writing of a file from the next, at the cost of one system call; None where it is gone."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def _rid(run: str, request: CaptureRequest) -> Rid:
    num_tokens = len(request.input_ids)
    if not request.new_tokens:
        return Rid(run, request.key, request.attempt, num_tokens)
    return Rid(run, request.key, request.attempt, num_tokens + request.new_tokens - 1, num_tokens)


def _expected_ids(request: CaptureRequest, meta: dict[str, Any]) -> NDArray[np.int64]:
    """Give the tokens that the rows must be of: those sent, then those generated but for the last."""
    if not request.new_tokens:
        return request.input_ids
    new = np.asarray(meta["output_ids"][: request.new_tokens - 1], dtype=np.int64)
    return np.concatenate([request.input_ids, new])


def _message(response: httpx.Response) -> str:
    try:
        body = response.json()
        return str(body.get("message") or body.get("error") or body)[:500]
    except (ValueError, AttributeError):
        return response.text[:500]
