"""Collectors over real HTTP on loopback, with engines whose behaviour the test decides."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from hsdump.cli.watching import Watch, run_session
from hsdump.engines.base import CaptureFailed, CaptureRequest, Engine, ServerAway
from hsdump.engines.collector import CollectorEngine, HttpTransport
from hsdump.errors import ServerError
from hsdump.extract import collector as collector_module
from hsdump.extract.collector import Collector
from hsdump.extract.collector_http import serving
from hsdump.extract.plan import ExtractOptions
from hsdump.extract.state import RunState
from hsdump.store import Store
from tests.unit.test_driver import ScriptedEngine, rows_file

TOKEN = "a-token-for-tests-0123456789"


@asynccontextmanager
async def collecting(out: Path) -> AsyncIterator[tuple[str, Collector]]:
    """Serve one collector in this loop."""
    collector = Collector("http://the-server", out)
    with serving(collector, "127.0.0.1", 0, TOKEN) as port:
        yield f"http://127.0.0.1:{port}", collector
        await collector.close()


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedEngine]:
    """Have collectors find scripted engines beside them."""
    made: list[ScriptedEngine] = []

    def make(url: str, **_: Any) -> ScriptedEngine:
        made.append(ScriptedEngine(SCRIPT.get("script")))
        return made[-1]

    monkeypatch.setattr(collector_module, "SglangEngine", make)
    SCRIPT.clear()
    return made


SCRIPT: dict[str, Any] = {}


async def run(folder: Path, urls: list[str], count: int, **changes: Any) -> RunState:
    engines: dict[str, Engine] = {url: CollectorEngine(HttpTransport(url, TOKEN)) for url in urls}
    options = ExtractOptions(inputs=(rows_file(folder, count),), out=folder, disk_reserve=0, commit_s=0.1, **changes)
    return await run_session(engines, options, Watch(quiet=True))


def test_two_partitions_have_everything_once_and_a_second_run_finds_it(tmp_path: Path) -> None:
    async def both() -> tuple[RunState, RunState]:
        async with AsyncExitStack() as stack:
            parts = [await stack.enter_async_context(collecting(tmp_path / name)) for name in ("one", "two")]
            urls = [url for url, _ in parts]
            return await run(tmp_path, urls, 60), await run(tmp_path, urls, 70)

    first, second = asyncio.run(both())
    assert (first.exit_code(), first.committed) == (0, 60)
    assert (second.exit_code(), second.already, second.committed) == (0, 60, 10)
    keys = Store(tmp_path / "one").keys() + Store(tmp_path / "two").keys()
    assert len(keys) == len(set(keys)) == 70
    assert min(len(Store(tmp_path / name)) for name in ("one", "two")) > 10


@pytest.mark.parametrize("others", [0, 1], ids=["the only one", "one of two"])
def test_a_collector_that_dies_before_it_has_begun_is_taken_in_later(tmp_path: Path, others: int) -> None:
    class DiesOnce(HttpTransport):
        died = False

        async def call(self, method: str, body: bytes) -> bytes:
            if method == "begin" and not self.died:
                self.died = True
                raise ServerAway("it died")
            return await super().call(method, body)

    async def once() -> RunState:
        async with AsyncExitStack() as stack:
            urls = [(await stack.enter_async_context(collecting(tmp_path / f"{at}")))[0] for at in range(others + 1)]
            engines: dict[str, Engine] = {url: CollectorEngine(HttpTransport(url, TOKEN)) for url in urls}
            engines[urls[0]] = CollectorEngine(DiesOnce(urls[0], TOKEN))
            options = ExtractOptions(
                inputs=(rows_file(tmp_path, 80),), out=tmp_path, disk_reserve=0, commit_s=0.1, max_rate=60.0
            )
            return await run_session(engines, options, Watch(quiet=True))

    if not others:
        with pytest.raises(ServerError, match="it died"):
            asyncio.run(once())
        return
    state = asyncio.run(once())
    assert (state.exit_code(), state.committed) == (0, 80)
    assert min(len(Store(tmp_path / name)) for name in "01") > 0


def test_a_driver_that_fails_before_it_begins_leaves_no_engine_behind(
    tmp_path: Path, scripted: list[ScriptedEngine]
) -> None:
    """An engine holds its server's ring, of which there is one."""

    async def once() -> RunState:
        async with collecting(tmp_path / "one") as (url, _):
            failed = CollectorEngine(HttpTransport(url, TOKEN))
            await failed.ask()
            await failed.close()
            state = await run(tmp_path, [url], 5)
            assert [engine.closed for engine in scripted] == [True, True]
            return state

    assert asyncio.run(once()).committed == 5


def test_a_driver_that_hangs_up_leaves_no_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def once() -> RunState:
        async with collecting(tmp_path / "one") as (url, _):
            with socket.create_connection((urlsplit(url).hostname, urlsplit(url).port or 0)) as half:
                head = f"POST /v1/ask HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 9\r\n\r\n"
                half.sendall(head.encode() + b"abc")
                half.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, at once
            return await run(tmp_path, [url], 5)

    assert asyncio.run(once()).committed == 5
    assert "Traceback" not in capfd.readouterr().err


def test_failures_come_back_with_the_servers_words(tmp_path: Path) -> None:
    def refuse(request: CaptureRequest, before: int) -> None:
        if request.input_ids[2] == 9:
            raise CaptureFailed("rejected-by-server", "HTTP 400: no", transient=False)

    SCRIPT["script"] = refuse

    async def once() -> tuple[RunState, RunState]:
        async with collecting(tmp_path / "one") as (url, _):
            return await run(tmp_path, [url], 6), await run(tmp_path, [url], 6)

    first, second = asyncio.run(once())
    assert first.exit_code() == 3
    assert first.failures[0].detail == "HTTP 400: no"
    assert (second.already, second.earlier_failures) == (5, 1)


def test_a_collector_that_is_gone_leaves_its_work_to_the_others(tmp_path: Path) -> None:
    async def lose_one() -> RunState:
        async with AsyncExitStack() as stack:
            one, _ = await stack.enter_async_context(collecting(tmp_path / "one"))
            gone = Collector("http://the-server", tmp_path / "two")
            with ExitStack() as served:
                port = served.enter_context(serving(gone, "127.0.0.1", 0, TOKEN))
                running = asyncio.create_task(run(tmp_path, [one, f"http://127.0.0.1:{port}"], 80, max_rate=60.0))
                while not list((tmp_path / "two").glob("shards/*")) and not running.done():
                    await asyncio.sleep(0.01)
                served.close()
                await gone.close()
            return await running

    state = asyncio.run(lose_one())
    assert state.exit_code() == 0
    assert {lane.status for lane in state.lanes} == {"up", "away"}
    assert len({*Store(tmp_path / "one").keys(), *Store(tmp_path / "two").keys()}) == 80


def test_strangers_and_other_terms_are_refused(tmp_path: Path) -> None:
    async def ask() -> None:
        async with collecting(tmp_path / "one") as (url, _):
            async with httpx.AsyncClient(base_url=url) as client:
                refused = await client.post("/v1/ping")
                # Said, so that the client does not send the next request into a connection that is being closed.
                assert (refused.status_code, refused.headers["connection"]) == (401, "close")
                headers = {"Authorization": f"Bearer {TOKEN}"}
                assert (await client.post("/v1/nonsense", headers=headers)).status_code == 409
                answer = await client.post("/v1/put", headers=headers, content=b"\xff")
                assert answer.status_code == 409
            await run(tmp_path, [url], 2)
            with pytest.raises(ServerError, match="max_tokens: the store has 100, this run has 50"):
                await run(tmp_path, [url], 2, max_tokens=50)

    asyncio.run(ask())
