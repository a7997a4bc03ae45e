"""Which connection a request takes, seen from a server that counts them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from hsdump import connections

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class CountingServer:
    """Answers every request after it was let; counts connections."""

    def __init__(self) -> None:
        self.accepted = self.answered = 0
        self.open = 0
        self.let = asyncio.Event()
        self.let.set()
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        self.open += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await self.let.wait()
                writer.write(ANSWER)
                await writer.drain()
                self.answered += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
            self.open -= 1


@asynccontextmanager
async def counting() -> AsyncIterator[tuple[CountingServer, httpx.AsyncClient]]:
    server = CountingServer()
    listening = await asyncio.start_server(server.handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    async with connections.client(server.url, timeout=10) as client:
        yield server, client
    listening.close()
    while server.open:
        await asyncio.sleep(0.01)


def with_server(test: Callable[[CountingServer, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def run() -> None:
        async with counting() as (server, client):
            await test(server, client)

    asyncio.run(run())


def test_as_many_connections_as_requests_at_a_time_and_each_is_used_again() -> None:
    async def test(server: CountingServer, client: httpx.AsyncClient) -> None:
        for _ in range(5):
            replies = await asyncio.gather(*(client.get("/") for _ in range(100)))
            assert {reply.text for reply in replies} == {"ok"}
        assert server.accepted == 100
        assert server.answered == 500
        for _ in range(50):
            await client.get("/")
        assert server.accepted == 100

    with_server(test)


def test_an_idle_connection_is_closed_before_the_server_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "KEPT_S", 0.05)

    async def test(server: CountingServer, client: httpx.AsyncClient) -> None:
        await asyncio.gather(*(client.get("/") for _ in range(8)))
        await asyncio.sleep(0.2)
        assert server.open == 8
        await client.get("/")
        await asyncio.sleep(0.1)
        assert (server.accepted, server.open) == (9, 1)

    with_server(test)


@pytest.mark.parametrize("used_before", [False, True], ids=["new connection", "used connection"])
@pytest.mark.parametrize("second", [None, 0, 1], ids=["once", "twice at once", "twice"])
def test_a_request_that_is_given_up_at_any_moment_is_in_nobodys_way(used_before: bool, second: int | None) -> None:
    async def test(server: CountingServer, client: httpx.AsyncClient) -> None:
        for passes in range(70):
            if used_before:
                await client.get("/")
            given_up = asyncio.create_task(client.get("/"))
            for _ in range(passes):
                await asyncio.sleep(0)
            given_up.cancel()
            if second is not None:
                for _ in range(second):
                    await asyncio.sleep(0)
                given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            assert (await client.get("/", timeout=2)).text == "ok", passes

    with_server(test)


def test_a_request_that_took_too_long_leaves_no_connection_that_waits_for_its_answer() -> None:
    async def test(server: CountingServer, client: httpx.AsyncClient) -> None:
        server.let.clear()
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/", timeout=0.05)
        server.let.set()
        assert [(await client.get("/")).text for _ in range(3)] == ["ok"] * 3
        assert server.accepted == 2

    with_server(test)


def test_a_body_that_is_left_early_takes_its_connection_along() -> None:
    async def test(server: CountingServer, client: httpx.AsyncClient) -> None:
        async with client.stream("GET", "/"):
            pass
        assert (await client.get("/")).text == "ok"
        assert server.accepted == 2

    with_server(test)


def test_a_client_that_is_closed_closes_its_connections() -> None:
    async def run() -> None:
        async with counting() as (server, client):
            await asyncio.gather(*(client.get("/") for _ in range(4)))
            async with client.stream("GET", "/"):  # one that is being read
                await client.aclose()
            await asyncio.sleep(0.1)
            assert server.open == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("environment", "url", "proxied"),
    [
        ({}, "http://10.0.0.1:30000", False),
        ({"http_proxy": "http://proxy:3128"}, "http://10.0.0.1:30000", True),
        ({"http_proxy": "http://proxy:3128"}, "https://10.0.0.1:30000", False),
        ({"all_proxy": "http://proxy:3128"}, "http://10.0.0.1:30000", True),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "localhost,127.0.0.1"}, "http://127.0.0.1:30000", False),
        ({"http_proxy": "http://proxy:3128", "no_proxy": "*"}, "http://10.0.0.1:30000", False),
    ],
)
def test_proxies_are_left_to_httpx(
    environment: dict[str, str], url: str, proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert connections.is_proxied(url) is proxied

    async def made() -> bool:
        async with connections.client(url, timeout=1) as client:
            return bool(client._mounts)

    assert asyncio.run(made()) is proxied
