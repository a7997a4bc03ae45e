"""Asking an SGLang server: token ids out, token ids back, through its own `/generate`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from hsdump import connections
from hsdump.engines.handshake import server_facts
from hsdump.errors import HsdumpError, ServerError
from hsdump.generate.options import Sampling

RESERVED_TOKENS = 1
"""A sample of `max_req_input_len` tokens would itself be refused as the input of a capture."""


class AskFailed(Exception):
    """This question has no answer. Counted and named by the driver; never leaves `hsdump.generate`."""

    def __init__(self, reason: str, detail: str, *, transient: bool) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail, self.transient = reason, detail, transient


@dataclass(frozen=True, kw_only=True, slots=True)
class Served:
    """What a server says about itself."""

    model_path: str
    version: str
    max_tokens: int | None
    """Of a prompt and its answer together; None when the server does not say."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reply:
    """What came back for one prompt."""

    output_ids: NDArray[np.int32]
    """[A] as sampled; after `stop` the last one is the token that ended it."""

    finish: str


class AnswerServer:
    """One server. Use from one event loop."""

    def __init__(self, url: str, *, api_key: str | None, wait_s: float, timeout_s: float = 3600.0) -> None:
        """Args:
        url: base URL.
        api_key: the server's `--api-key`.
        wait_s: how long to wait for a server that went away.
        timeout_s: for one answer, waiting in the server's queue included.
        """
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._wait_s = wait_s
        self._served: Served | None = None
        self._mending = asyncio.Lock()
        self._lost = False
        self._gone: ServerError | None = None
        timeout = httpx.Timeout(timeout_s, connect=30.0)
        self._http = connections.client(self.url, timeout=timeout, headers=self._headers)

    def greet(self) -> Served:
        """Ask what is served.

        Raises:
            ServerError: nobody answers, or it is no SGLang server.
        """
        facts = server_facts(self.url, self._headers)
        longest = facts.get("max_req_input_len")
        served = Served(
            model_path=str(facts["model_path"]),
            version=str(facts.get("version", "unknown")),
            max_tokens=int(longest) - RESERVED_TOKENS if isinstance(longest, int) else None,
        )
        if self._served is not None and served.model_path != self._served.model_path:
            raise ServerError(
                f"another model answers at {self.url} now: {served.model_path}, before {self._served.model_path}",
                "start the server as it was, or choose another --out",
            )
        self._served = self._served or served
        return served

    async def ask(self, prompt_ids: Sequence[int], sampling: Sampling, max_new_tokens: int, seed: int | None) -> Reply:
        """Get one answer.

        Raises:
            AskFailed: this question has none; `transient` says whether another try may help.
            ServerError: the server is gone for good.
        """
        if self._lost:
            await self._wait_for_server()
        body = {"input_ids": list(prompt_ids), "sampling_params": _parameters(sampling, max_new_tokens, seed)}
        try:
            response = await self._http.post("/generate", json=body)
        except httpx.TimeoutException as error:
            raise AskFailed("timeout", f"no answer ({type(error).__name__})", transient=True) from error
        except httpx.TransportError as error:
            self._lost = True
            raise AskFailed("connection-lost", str(error) or type(error).__name__, transient=True) from error
        if response.status_code != httpx.codes.OK:
            transient = response.status_code >= 500 or response.status_code == httpx.codes.TOO_MANY_REQUESTS
            reason = "server-error" if transient else "rejected-by-server"
            detail = f"HTTP {response.status_code}: {response.text[:500]}"
            raise AskFailed(reason, detail, transient=transient)
        return _reply(response, len(body["input_ids"]))

    async def close(self) -> None:
        """Close the connections; the server aborts what still runs."""
        await self._http.aclose()

    async def _wait_for_server(self) -> None:
        async with self._mending:
            if self._gone is not None:
                raise self._gone  # the others need not wait for it once more
            deadline_s = time.monotonic() + self._wait_s
            while self._lost:
                try:
                    await asyncio.to_thread(self.greet)
                    self._lost = False
                except HsdumpError as error:
                    if time.monotonic() > deadline_s or "another model" in error.what:
                        self._gone = ServerError(
                            f"the server went away and did not come back within {self._wait_s:.0f} s: {error.what}",
                            "start it again and run the same command: it goes on where it stopped",
                        )
                        raise self._gone from error
                    await asyncio.sleep(0.5)


def _parameters(sampling: Sampling, max_new_tokens: int, seed: int | None) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": max_new_tokens,
    }
    return parameters if seed is None else {**parameters, "sampling_seed": seed}


def _reply(response: httpx.Response, num_prompt_tokens: int) -> Reply:
    """Check that the answer belongs to all of the prompt and that its ids are all of the answer."""
    try:
        answer = response.json()
        meta = answer["meta_info"]
        finish = meta["finish_reason"] or {}
        output_ids = np.asarray(answer["output_ids"], dtype=np.int32)
        kind, counted, prompted = finish.get("type"), meta["completion_tokens"], meta["prompt_tokens"]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        what = f"no output_ids and meta_info ({type(error).__name__}: {error}): {response.text[:200]}"
        raise AskFailed("bad-response", what, transient=True) from error
    if kind == "abort":
        raise AskFailed("aborted-by-server", str(finish.get("message", "")), transient=True)
    if prompted != num_prompt_tokens:
        detail = f"the server took {prompted} of {num_prompt_tokens} tokens (--allow-auto-truncate?)"
        raise AskFailed("cut-by-server", detail, transient=False)
    if kind not in ("stop", "length"):
        raise AskFailed("bad-response", f"finish reason {kind!r} is not known", transient=False)
    if output_ids.ndim != 1 or len(output_ids) != counted:
        raise AskFailed("bad-response", f"{counted} tokens were made, {output_ids.size} came back", transient=True)
    if not len(output_ids) or int(output_ids.min()) < 0:
        raise AskFailed("no-tokens", "the answer has no tokens", transient=False)
    if kind == "stop" and finish.get("matched") != int(output_ids[-1]):
        # No stop text was asked for, so only a token can have ended it.
        raise AskFailed("bad-response", f"stopped by {finish.get('matched')!r}, not by its last token", transient=False)
    return Reply(output_ids=output_ids, finish=str(kind))
