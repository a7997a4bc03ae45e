"""Serving a collector over HTTP: loopback or a private address, a token, a bounded body. Nothing else."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hsdump.errors import HsdumpError, UsageError
from hsdump.extract.collector import Collector, said

MAX_BODY_BYTES = 64 << 20
CALL_LIMIT_S = 300.0


def check_address(host: str) -> None:
    """Refuse to listen where strangers are.

    Raises:
        UsageError: not an address, or neither loopback nor private.
    """
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise UsageError(f"--listen {host} is not an address", "use 127.0.0.1 or a private address") from error
    if not (address.is_loopback or address.is_private) or address.is_unspecified:
        raise UsageError(
            f"--listen {host} is neither loopback nor private",
            "listen at 127.0.0.1 (and use a tunnel), or at the private address that the driver reaches",
        )


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a driver that hung up: it asks again, or is gone."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(collector: Collector, host: str, port: int, token: str) -> Iterator[int]:
    """Answer drivers while the body runs. The collector's loop is the running one.

    Yields:
        The port, for `port` 0 the one that was free.

    Raises:
        UsageError: the address is public or taken, or the token is too short to be one.
    """
    check_address(host)
    if len(token) < 16:
        raise UsageError("the token is shorter than 16 characters", "make one: openssl rand -hex 16")
    loop, expected = asyncio.get_running_loop(), f"Bearer {token}".encode()
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 600

        def do_POST(self) -> None:
            if ended.is_set():  # a connection that was kept open; who reads nothing tries again elsewhere
                self.close_connection = True
                return
            if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), expected):
                self._answer(401, b"wrong token: set HSDUMP_COLLECT_TOKEN on both sides")
                return
            length = self.headers.get("Content-Length", "")
            if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
                self._answer(413, b"no length, or too long")
                return
            body = self.rfile.read(int(length))
            method = self.path.removeprefix("/v1/")
            try:
                future = asyncio.run_coroutine_threadsafe(collector.call(method, body), loop)
                self._answer(200, future.result(CALL_LIMIT_S))
            except HsdumpError as error:
                self._answer(409, said(error).encode())
            except (TimeoutError, CancelledError):
                self._answer(503, b"the collector is being stopped, or took too long")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            if status in {401, 413}:
                self.send_header("Connection", "close")  # the body was not read; it also ends the connection here
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
            """Say nothing: tokens and paths of drivers are nobody's business."""

    try:
        server = _Server((host, port), Handler)
    except OSError as error:
        raise UsageError(f"--listen {host}:{port} cannot be used: {error.strerror}", "choose a free port") from error
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="hsdump-collect", daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        ended.set()
        server.shutdown()
        server.server_close()
        thread.join()
