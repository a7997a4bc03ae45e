"""What a client asks of a server beside states, for benchmarks of the client alone."""

from __future__ import annotations

from collections.abc import Sequence

from hsdump.engines.base import CaptureRequest, ServerLoad
from hsdump.schema import EngineInfo, StateShape


class StandIn:
    """An engine that is always there and says of itself what it was given; `capture` is up to who derives from it."""

    lost = False
    spool_room = 1.0

    def __init__(self, info: EngineInfo) -> None:
        self._info = info

    def handshake(self) -> EngineInfo:
        return self._info

    async def reconnect(self) -> EngineInfo:
        return self._info

    async def load(self) -> ServerLoad | None:
        return None

    def request_id(self, request: CaptureRequest) -> str:
        return f"hsdump-{request.key}"

    async def abort(self, request_ids: Sequence[str]) -> None:  # noqa: ARG002 - the protocol's
        return None

    async def close(self) -> None:
        return None


def info_of(shape: StateShape, *, vocab_size: int, spool_max_bytes: int | None = None) -> EngineInfo:
    """Say what such a server is."""
    return EngineInfo(
        engine="sglang",
        engine_version="none",
        attach="none",
        hsdump_version="none",
        model_path="/nowhere",
        model_class="None",
        num_layers=max(shape.layers) + 1,
        vocab_size=vocab_size,
        context_length=4096,
        shape=shape,
        device="none",
        spool_max_bytes=spool_max_bytes,
    )
