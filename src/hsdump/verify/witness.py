"""What the server itself says about tokens: its log-probabilities, and its states where capture is on.

Letters: S = tokens of one sample, H = hidden size.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from hsdump import connections
from hsdump.arrays import StateArray
from hsdump.engines.base import CaptureFailed, CaptureRequest
from hsdump.engines.handshake import server_facts
from hsdump.engines.sglang_http import SglangEngine
from hsdump.errors import ServerError, SpoolError
from hsdump.schema import EngineInfo

AT_ONCE = 8
ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Answer:
    """One request's answer. Row t speaks of the token that follows token t."""

    logprobs: NDArray[np.float64]
    """[S] of the next token; the last row's is that of the token that the server would have said."""

    next_ids: NDArray[np.int64]
    """[S] the tokens that these are of."""

    top_ids: NDArray[np.int64]
    """[S] the server's most probable next token."""

    top_logprobs: NDArray[np.float64]
    """[S]"""

    told: NDArray[np.bool_]
    """[S] rows whose next token the server named as it was sent."""

    states: Mapping[str, StateArray] | None = None
    """Name to [S, H], own memory; None when the server captures nothing."""


@dataclass(kw_only=True, slots=True)
class Witness:
    """A server that can be asked."""

    url: str
    facts: dict[str, Any]
    info: EngineInfo | None
    """None: no capture there, log-probabilities only."""

    no_capture: str = ""
    """Why there is none."""

    failures: dict[str, str] = field(default_factory=dict)
    """Key to reason, of requests that got no answer."""

    engine: SglangEngine | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def meet(
        cls, url: str, *, spool: Path | None = None, api_key: str | None = None, timeout_s: float = 600.0
    ) -> Witness:
        """Shake hands, if the server has capture on; else ask only what it is.

        Args:
            timeout_s: for one request, the server's queue included.

        Raises:
            ServerError: nothing answers, or no SGLang.
        """
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        facts = server_facts(url, headers)
        engine = SglangEngine(url, spool=spool, api_key=api_key, request_timeout_s=timeout_s)
        try:
            return cls(url=url, facts=facts, info=engine.handshake(), engine=engine, headers=headers)
        except (ServerError, SpoolError) as error:
            return cls(url=url, facts=facts, info=None, no_capture=error.what, headers=headers)

    async def ask_all(
        self, samples: Sequence[tuple[str, NDArray[np.int64]]], tick: Callable[[], None] = lambda: None
    ) -> dict[str, Answer]:
        """Ask about all samples, a few at a time; those without an answer are named in `failures`.

        Args:
            samples: (key, token ids).
        """
        slots, answers = asyncio.Semaphore(AT_ONCE), {}
        async with connections.client(self.url, timeout=600.0, headers=self.headers) as http:

            async def one(key: str, ids: NDArray[np.int64]) -> None:
                async with slots:
                    try:
                        answers[key] = await self._ask(http, key, ids)
                    except CaptureFailed as failure:
                        self.failures[key] = str(failure)
                    tick()

            try:
                await asyncio.gather(*(one(key, ids) for key, ids in samples))
            finally:
                if self.engine is not None:
                    await self.engine.close()
        return answers

    async def _ask(self, http: httpx.AsyncClient, key: str, ids: NDArray[np.int64]) -> Answer:
        if self.engine is None or self.info is None:
            return read_answer(await _plain(http, ids), ids, None)
        for attempt in range(ATTEMPTS):
            try:
                request = CaptureRequest(key=key, input_ids=ids, attempt=attempt, logprobs=True)
                captured = await self.engine.capture(request)
            except CaptureFailed as failure:
                if not failure.transient or attempt + 1 == ATTEMPTS:
                    raise
                await asyncio.sleep(0.2)
                continue
            names = self.info.shape.names
            try:
                states = {name: state.copy() for name, state in zip(names, captured.states, strict=True)}
            finally:
                captured.release()
            return read_answer(captured.meta, ids, states)
        raise AssertionError("the last attempt raises or returns")


def read_answer(meta: Mapping[str, Any], ids: NDArray[np.int64], states: Mapping[str, StateArray] | None) -> Answer:
    """Read SGLang's `meta_info` about a request of these ids.

    Raises:
        CaptureFailed: it holds no log-probabilities of all tokens.
    """
    try:
        given = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"][:1]]
        tops = [*meta["input_top_logprobs"][1:], *meta["output_top_logprobs"][:1]]
        next_ids = np.array([entry[1] for entry in given], np.int64)
        found = Answer(
            logprobs=np.array([entry[0] for entry in given], np.float64),
            next_ids=next_ids,
            told=next_ids == np.append(ids[1:], next_ids[-1:]),
            top_ids=np.array([top[0][1] for top in tops], np.int64),
            top_logprobs=np.array([top[0][0] for top in tops], np.float64),
            states=states,
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise CaptureFailed("no-logprobs", f"the server's answer holds none ({error!r})", transient=False) from error
    if len(found.logprobs) != len(ids) or (not found.told[: len(ids) - 1].any() and len(ids) > 1):
        detail = f"{len(found.logprobs)} of other tokens or in another number for {len(ids)} tokens"
        raise CaptureFailed("no-logprobs", detail, transient=False)
    return found


async def _plain(http: httpx.AsyncClient, ids: NDArray[np.int64]) -> Mapping[str, Any]:
    """Ask a server without capture for the log-probabilities alone."""
    body = {
        "input_ids": ids.tolist(),
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
    }
    try:
        response = await http.post("/generate", json=body)
        response.raise_for_status()
        meta: Mapping[str, Any] = response.json()["meta_info"]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise CaptureFailed("server-error", f"{type(error).__name__}: {error}"[:300], transient=False) from error
    return meta
