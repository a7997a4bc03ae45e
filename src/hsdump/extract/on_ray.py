"""`--ray`: the same run on a Ray cluster. One collector actor a server, on the server's own node.

Ray starts the actors, puts them where the servers are, and starts them again when they die; what a collector is, and
what the driver makes of its death, is the same as over HTTP.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hsdump.engines.base import ServerAway
from hsdump.engines.collector import CollectorEngine
from hsdump.errors import HsdumpError, ServerError, UsageError
from hsdump.extract.collector import Collector, said
from hsdump.extract.session import Endpoint

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True, slots=True)
class RayRun:
    """Collectors on a cluster, and where each writes on its own node."""

    engines: dict[str, CollectorEngine]
    partitions: dict[str, Path]


class CollectorActor:
    """What Ray runs beside a server. Errors travel as values: Ray would wrap them in its own."""

    def __init__(self, url: str, out: str, spool: str | None, api_key: str | None) -> None:
        self._collector = Collector(url, Path(out), spool=Path(spool) if spool else None, api_key=api_key)

    async def call(self, method: str, body: bytes) -> tuple[bytes, str | None]:
        """Give the answer, or what went wrong."""
        try:
            return await self._collector.call(method, body), None
        except HsdumpError as error:
            return b"", said(error)


class RayTransport:
    """Calls to one actor."""

    def __init__(self, actor: Any, name: str) -> None:
        self._actor, self._name = actor, name

    async def call(self, method: str, body: bytes) -> bytes:
        from ray.exceptions import RayError

        try:
            answer, problem = await self._actor.call.remote(method, body)
        except RayError as error:
            raise ServerAway(f"the collector actor of {self._name} died ({type(error).__name__})") from error
        if problem is not None:
            raise ServerError(f"the collector actor of {self._name}: {problem}", "see the actor's log in Ray")
        return bytes(answer)

    async def close(self) -> None:
        import ray

        ray.kill(self._actor)


def start_on_ray(address: str, endpoints: list[Endpoint], out: Path) -> RayRun:
    """Connect to a cluster and start one collector beside each server.

    Args:
        address: a cluster's address, or `auto`; `local` starts one on this host.
        endpoints: the servers; the host in a URL is the node's address, a loopback address means this node.
        out: the store; partitions are written to `OUT.parts/` on each node.

    Raises:
        UsageError: Ray is not installed, no cluster answers, or a server's host is no node of it.
    """
    try:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
    except ImportError:
        raise UsageError("--ray needs Ray, which is not installed", "install it: pip install 'hsdump[ray]'") from None
    try:
        ray.init(address=None if address == "local" else address, log_to_driver=False, include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise UsageError(f"--ray {address}: {error}", "name a cluster that runs: ray start --head") from error
    nodes = {node["NodeManagerAddress"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
    here = ray.get_runtime_context().get_node_id()
    engines, partitions = {}, {}
    for endpoint in endpoints:
        host = urlsplit(endpoint.url).hostname or ""
        node = here if host in LOOPBACK else nodes.get(host)
        if node is None:
            raise UsageError(
                f"{endpoint.url} is on no node of the Ray cluster (nodes: {', '.join(sorted(nodes))})",
                "use each server's URL with its node's address",
            )
        part = out.parent / f"{out.name}.parts" / re.sub(r"[^A-Za-z0-9.-]+", "-", urlsplit(endpoint.url).netloc)
        # Started again for ever when it dies; one call at a time would let a long poll block the rest.
        strategy = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        remote = ray.remote(max_restarts=-1, max_concurrency=64, num_cpus=0, scheduling_strategy=strategy)(
            CollectorActor
        )
        spool = str(endpoint.spool) if endpoint.spool else None
        actor = remote.remote(endpoint.url, str(part.absolute()), spool, os.environ.get("HSDUMP_API_KEY"))
        engines[endpoint.url] = CollectorEngine(RayTransport(actor, endpoint.url))
        partitions[endpoint.url] = part.absolute()
    return RayRun(engines, partitions)


def stop_ray() -> None:
    """Let go of the cluster."""
    import ray

    ray.shutdown()
