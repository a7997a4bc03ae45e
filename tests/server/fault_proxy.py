"""A proxy that stands between a client and a real server and does to requests what networks and servers do.

Faults strike `POST /generate` of samples only, never the handshake's few tokens.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

FAULTS = ("http-500", "http-503", "timeout", "reset", "truncated", "abort", "garbage")

HANDSHAKE_SUFFIX = "-0-4"
"""Attempt 0, four tokens: the handshake's own request. Samples of a campaign are longer."""


class FaultProxy:
    """Forwards HTTP to a server, from `with` to the end of the block, in a thread with a loop of its own."""

    def __init__(self, upstream_port: int) -> None:
        self.upstream_port = upstream_port
        self.port = 0
        self.struck: Counter[str] = Counter()
        self._choose: Callable[[int], str | None] = lambda _number: None
        self._count = 0
        self._frozen = False
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="fault-proxy", daemon=True)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def arm(self, choose: Callable[[int], str | None]) -> None:
        """Ask `choose` for each sample's request, counted from 0, which fault strikes it, if any."""
        self._choose, self._count = choose, 0
        self.struck.clear()

    def freeze(self, frozen: bool) -> None:
        """Stop forwarding anything at all, as a stalled server; connections stay open."""
        self._frozen = frozen

    def __enter__(self) -> FaultProxy:  # noqa: PYI034 - typing.Self is 3.11
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        writer.close()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Forward one request; False when the connection ends with it."""
        head = await reader.readuntil(b"\r\n\r\n")
        body = await reader.readexactly(_content_length(head))
        while self._frozen:
            await asyncio.sleep(0.05)
        fault = self._fault_for(head, body)
        if fault in ("http-500", "http-503"):
            text = json.dumps({"error": f"injected {fault}"}).encode()
            status = fault.removeprefix("http-").encode()
            writer.write(b"HTTP/1.1 %s Fault\r\nContent-Type: application/json\r\n" % status)
            writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(text), text))
            await writer.drain()
            return True
        if fault == "timeout":
            await asyncio.sleep(3600)
        if fault == "reset":
            _reset(writer)
            return False
        if fault == "abort":
            rid = json.loads(body)["rid"]
            asyncio.get_running_loop().call_later(0.01, self._start, self._abort(rid))
        answer = await self._forward(head, body)
        if fault == "truncated":
            writer.write(answer[: len(answer) - 40])
            await writer.drain()
            return False
        if fault == "garbage":
            text = b"<html>not the API</html>"
            answer = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)
        writer.write(answer)
        await writer.drain()
        return True

    def _fault_for(self, head: bytes, body: bytes) -> str | None:
        if not head.startswith(b"POST /generate"):
            return None
        if str(json.loads(body).get("rid", "")).endswith(HANDSHAKE_SUFFIX):
            return None
        fault = self._choose(self._count)
        self._count += 1
        if fault is not None:
            self.struck[fault] += 1
        return fault

    async def _forward(self, head: bytes, body: bytes) -> bytes:
        """Send a request on and give the whole answer. The server is told to close, so the answer has an end."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        try:
            lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"connection:")]
            writer.write(b"\r\n".join([lines[0], b"Connection: close", *lines[1:]]) + body)
            answer = await reader.read(-1)
        finally:
            writer.close()
        start, _, rest = answer.partition(b"\r\n\r\n")
        if not start:
            raise ConnectionResetError
        kept = [line for line in start.split(b"\r\n") if not line.lower().startswith(b"connection:")]
        if not any(line.lower().startswith((b"content-length:", b"transfer-encoding:")) for line in kept):
            kept.append(b"Content-Length: %d" % len(rest))
        return b"\r\n".join(kept) + b"\r\n\r\n" + rest

    async def _abort(self, rid: str) -> None:
        body = json.dumps({"rid": rid}).encode()
        head = b"POST /abort_request HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        with suppress(OSError):
            await self._forward(head + b"Content-Length: %d\r\n\r\n" % len(body), body)

    def _start(self, coroutine: object) -> None:
        task: asyncio.Task[None] = self._loop.create_task(coroutine)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST instead of FIN."""
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
