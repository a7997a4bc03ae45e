"""Connections to servers: how long an idle one is used again, and what choosing one costs."""

from __future__ import annotations

import contextlib
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import cache, partial
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import httpx

KEPT_S = 2.0
"""Servers close a connection that was idle for 5 s (uvicorn's default, and so SGLang's and vLLM's), which is httpx's
own limit as well: a request on a connection of just that age meets its end and fails, although nothing is wrong. Less
than half of that is safe.
"""

ONE = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEPT_S)


def client(url: str, *, timeout: httpx.Timeout | float, headers: Mapping[str, str] | None = None) -> httpx.AsyncClient:
    """Give a client for many requests at a time to one server; how many is up to who sends them.

    Args:
        url: the server's base URL. Where the environment names a proxy for it, httpx's own pool of connections is used.
    """
    if is_proxied(url):
        limits = httpx.Limits(max_connections=None, keepalive_expiry=KEPT_S)
        return httpx.AsyncClient(base_url=url, timeout=timeout, headers=headers, limits=limits)
    return httpx.AsyncClient(base_url=url, timeout=timeout, headers=headers, transport=Separately())


def is_proxied(url: str) -> bool:
    """Tell whether the environment has requests to this URL take a proxy."""
    parts, proxies = urlsplit(url), getproxies()
    return (parts.scheme in proxies or "all" in proxies) and not proxy_bypass(parts.hostname or "")


class Separately(httpx.AsyncBaseTransport):
    """A pool of its own for each connection, and the one used last is used next.

    The pool of httpcore (1.0.9) goes through all its connections for every request, with a system call for each, and
    closes idle ones as soon as it has more than it keeps, busy ones counted: with hundreds of requests in flight that
    takes longer than a small model takes for them.
    """

    def __init__(self) -> None:
        self._free: deque[tuple[httpx.AsyncHTTPTransport, float]] = deque()
        """Those that nobody uses, with the time since when; used last comes last."""

        self._busy: set[httpx.AsyncHTTPTransport] = set()

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        while self._free and time.monotonic() - self._free[0][1] > KEPT_S:
            with contextlib.suppress(Exception):  # a stranger's end is no fault of this request
                await self._free.popleft()[0].aclose()
        transport = self._free.pop()[0] if self._free else httpx.AsyncHTTPTransport(verify=verified(), limits=ONE)
        self._busy.add(transport)
        try:
            response = await transport.handle_async_request(request)
        except BaseException:
            await self.done_with(transport, again=False)
            raise
        assert isinstance(response.stream, httpx.AsyncByteStream)
        response.stream = _Body(response.stream, partial(self.done_with, transport))
        return response

    async def aclose(self) -> None:
        transports = [*self._busy, *(free for free, _ in self._free)]
        self._busy.clear()
        self._free.clear()
        for transport in transports:
            with contextlib.suppress(Exception):
                await transport.aclose()

    async def done_with(self, transport: httpx.AsyncHTTPTransport, *, again: bool) -> None:
        """Take a connection back, or let it go where its request did not come to its end: httpcore, cancelled in the
        wrong moment, goes on counting a request that is gone, and the next one would wait for it.
        """
        self._busy.discard(transport)
        if again:
            self._free.append((transport, time.monotonic()))
        else:
            await transport.aclose()


@cache
def verified() -> ssl.SSLContext:
    """Give what https is verified by; made once, since reading the certificates takes longer than a request."""
    return httpx.create_ssl_context()


class _Body(httpx.AsyncByteStream):
    """A response's body that says when it is over, and whether it was read to its end."""

    def __init__(self, body: httpx.AsyncByteStream, done: Callable[..., Awaitable[None]]) -> None:
        self._body = body
        self._done: Callable[..., Awaitable[None]] | None = done
        self._is_whole = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._body:
            yield part
        self._is_whole = True

    async def aclose(self) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        try:
            await self._body.aclose()
        except BaseException:
            await done(again=False)
            raise
        await done(again=self._is_whole)
