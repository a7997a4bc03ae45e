"""What choosing a connection costs a client: httpx's own pool and ours, at so many requests in flight.

    python -m benchmarks.extract.connections --json benchmarks/results/connections.json

The server is a process that answers after 50 ms, so the client's processor time is all that is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from hsdump import connections

IDS = list(range(200))
ANSWER_S = 0.05
ANSWER = b'{"meta_info": {}}'
REQUESTS = 2000


def serve(port: Connection) -> None:
    """Answer every POST after a while; say the port."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(lengths[0].split(b":")[1]))
                await asyncio.sleep(ANSWER_S)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(ANSWER), ANSWER))
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def measure(client: httpx.AsyncClient, at_once: int) -> dict[str, float]:
    slots = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with slots:
            (await client.post("/generate", json={"input_ids": IDS})).raise_for_status()

    cpu_s, begin_s = time.process_time(), time.monotonic()
    async with client:
        await asyncio.gather(*(one() for _ in range(REQUESTS)))
    cpu_ms = 1e3 * (time.process_time() - cpu_s) / REQUESTS
    return {"requests_per_s": round(REQUESTS / (time.monotonic() - begin_s), 1), "cpu_ms_a_request": round(cpu_ms, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    ours, its = multiprocessing.Pipe()
    server = multiprocessing.Process(target=serve, args=(its,), daemon=True)
    server.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=connections.KEPT_S)
    clients: dict[str, Callable[[], httpx.AsyncClient]] = {
        "httpx": lambda: httpx.AsyncClient(base_url=url, timeout=60, limits=limits),
        "a pool for each": lambda: connections.client(url, timeout=60),
    }
    rows = []
    for at_once in (16, 64, 256):
        for name, make in clients.items():
            rows.append({"in_flight": at_once, "client": name, **asyncio.run(measure(make(), at_once))})
            print(rows[-1], flush=True)
    server.terminate()
    about = {"cpus": os.cpu_count(), "python": platform.python_version(), "httpx": httpx.__version__}
    command = "python -m benchmarks.extract.connections --json benchmarks/results/connections.json"
    args.json.write_text(json.dumps({"machine": about, "command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
