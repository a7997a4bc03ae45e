"""Finding out what is really on behind a URL: an SGLang server, and which spool its capture writes to.

A server says "plugin loaded" in its log even when the plugin raised, so nothing is believed: a few tokens are sent, and
the spool in which their states appear is the server's.
"""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from hsdump.engines.handover import FilesHandOver, HandOver, RingHandOver
from hsdump.engines.rows import Rows
from hsdump.errors import ServerError, SpoolError, UsageError
from hsdump.locks import is_held
from hsdump.schema import EngineInfo, StateShape
from hsdump.spool.names import PREFIX, SHARED_MEMORY, Rid
from hsdump.spool.reader import FailedNote

HELLO_TOKENS = 4
HELLO_WAIT_S = 10.0

REMEDY = (
    "start the server with `hsdump serve -- <your SGLang arguments>`; if its log says that the plugin hsdump failed, "
    "mend that first; a server in a container must share /dev/shm with this command (see --spool)"
)


@dataclass(frozen=True, slots=True)
class Offer:
    """One announcement found in a spool, its process alive."""

    root: Path
    port: int
    info: EngineInfo | None
    declined: str | None
    ring: str | None
    """Name of this process's ring."""


def handshake(
    url: str, run: str, spool: Path | None = None, headers: dict[str, str] | None = None
) -> tuple[EngineInfo, HandOver]:
    """Find the server's spool and prove that it is this server's.

    Args:
        url: base URL of the server.
        run: this client's run id.
        spool: look only there.
        headers: sent with every request, for a server that asks for a key.

    Returns:
        What the server offers, and this run's end of its hand-over.

    Raises:
        ServerError: nobody answers, it is not SGLang, or no capture is on; says what to do.
        SpoolError: the spool cannot be used by this process.
    """
    facts = server_facts(url, headers)
    offers = find_offers(spool)
    # What the server says of itself counts: behind a proxy or a container's mapped port the URL has another port.
    here = [offer for offer in offers if offer.port == (facts.get("port") or httpx.URL(url).port)]
    for offer in here:
        if offer.declined is not None:
            raise ServerError(f"the server at {url} runs, but captures nothing: {offer.declined}", REMEDY)
    # Containers may all have the same port, and a proxy may say none; the hello below decides either way.
    candidates = {offer.root: offer for offer in (here or offers) if offer.info is not None}
    if not candidates:
        where = str(spool) if spool else f"{SHARED_MEMORY}/{PREFIX}*"
        # A plugin that cannot hook into SGLang gives up before there is a model, and knows no port yet.
        early = sorted({offer.declined for offer in offers if offer.declined is not None and not offer.port})
        gave_up = "".join(f"; a server that had no port yet gave up: {reason}" for reason in early)
        raise ServerError(
            f"the server at {url} has no hsdump capture on: no live announcement of it in {where}{gave_up}", REMEDY
        )
    ends, aside = _open_ends(candidates, offers, run)
    try:
        chosen, widths = _say_hello(url, run, ends, headers, aside)
        _check_widths(url, candidates[chosen], widths)
    except BaseException:
        for end in ends.values():
            end.close()
        raise
    for root, end in ends.items():
        if root != chosen:
            end.close()
    info = candidates[chosen].info
    assert info is not None
    context = min(info.context_length, int(facts.get("max_req_input_len") or info.context_length))
    return replace(info, context_length=context), ends[chosen]


def _open_ends(
    candidates: dict[Path, Offer], offers: list[Offer], run: str
) -> tuple[dict[Path, HandOver], list[ServerError | SpoolError]]:
    """Open the client's end of every spool that may be the server's.

    One that cannot be opened may be another server's, which somebody else extracts from, so its error is kept aside
    until it is known whether the server is among the others.

    Raises:
        ServerError, SpoolError: none could be opened.
    """
    ends: dict[Path, HandOver] = {}
    aside: list[ServerError | SpoolError] = []
    for root, offer in candidates.items():
        try:
            ends[root] = _open_end(offer, [other for other in offers if other.root == root], run)
        except (ServerError, SpoolError) as error:
            aside.append(error)
    if not ends:
        raise aside[0]
    return ends, aside


def _open_end(offer: Offer, together: list[Offer], run: str) -> HandOver:
    """Open the client's end; a ring of one tensor-parallel rank is only part of the rows, so all must be there."""
    info = offer.info
    assert info is not None
    if info.hand_over != "ring":
        return FilesHandOver(offer.root, run)
    rings = [offer.root / other.ring for other in together if other.ring]
    if len(rings) != info.rings:
        raise ServerError(
            f"the server in {offer.root} has {info.rings} capturing processes, {len(rings)} of them alive",
            "see its log, and start it again",
        )
    return RingHandOver(offer.root, run, rings, info.shape)


def server_facts(url: str, headers: dict[str, str] | None = None) -> dict[str, Any]:
    """Ask what the server is.

    Raises:
        ServerError: nobody answers, or not an SGLang.
        UsageError: this is no URL.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(
            f"{url} is no URL: http:// or https:// is missing", f"--server http://{url.rsplit('://', maxsplit=1)[-1]}"
        )
    facts: dict[str, Any] = {}
    with httpx.Client(base_url=url, timeout=30.0, headers=headers) as client:
        for paths in (("/model_info", "/get_model_info"), ("/server_info", "/get_server_info")):
            facts |= _first_answer(client, url, paths)
    if "model_path" not in facts:
        raise ServerError(f"{url} answers, but not as an SGLang server", "pass the URL of an SGLang server: --server")
    return facts


def _first_answer(client: httpx.Client, url: str, paths: tuple[str, str]) -> dict[str, Any]:
    for path in paths:
        try:
            response = client.get(path)
            if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
                raise ServerError(f"the server at {url} wants a key", "set HSDUMP_API_KEY to the server's --api-key")
            found = response.json() if response.status_code == httpx.codes.OK else None
        except httpx.TransportError as error:
            raise ServerError(
                f"nothing answers at {url} ({error or type(error).__name__})",
                "start it with `hsdump serve -- ...`, wait for 'The server is fired up', or pass the right --server",
            ) from error
        except (httpx.InvalidURL, ValueError):
            found = None
        if isinstance(found, dict):
            return found
    return {}


def find_offers(spool: Path | None = None) -> list[Offer]:
    """Read the announcements of all living servers on this host, or of one spool."""
    roots = [spool] if spool else sorted(SHARED_MEMORY.glob(f"{PREFIX}*"))
    return [
        offer
        for root in roots
        for path in sorted(root.glob("server-*.json"))
        if is_held(path.with_suffix(".lock")) and (offer := _read_offer(root, path)) is not None
    ]


def _read_offer(root: Path, path: Path) -> Offer | None:
    try:
        raw = json.loads(path.read_bytes())
        info = None
        if "info" in raw:
            shape = StateShape(**{**raw["info"]["shape"], "layers": tuple(raw["info"]["shape"]["layers"])})
            lists = {name: tuple(raw["info"].get(name, ())) for name in ("notes", "engine_layers")}
            info = EngineInfo(**{**raw["info"], **lists, "shape": shape, "spool_dir": str(root)})
        ring = raw.get("ring")
        if ring is not None and not re.fullmatch(r"ring-\d+", ring):
            return None
        return Offer(root, int(raw["port"]), info, raw.get("declined"), ring)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _check_widths(url: str, offer: Offer, widths: list[tuple[int, ...]]) -> None:
    """See on the first reply, before anything is written, that the states are as many and as wide as announced."""
    assert offer.info is not None
    shape = offer.info.shape
    expected = [(HELLO_TOKENS, shape.hidden_size)] * len(shape.names)
    if widths != expected:
        raise ServerError(
            f"the server at {url} announces {len(expected)} states of {list(expected[0])} for {HELLO_TOKENS} tokens "
            f"and hands over {len(widths)} of {sorted({str(list(width)) for width in widths})}",
            "server and client run different hsdump releases, or the model is not what its config says: see its log",
        )


def _say_hello(
    url: str,
    run: str,
    ends: dict[Path, HandOver],
    headers: dict[str, str] | None,
    aside: list[ServerError | SpoolError],
) -> tuple[Path, list[tuple[int, ...]]]:
    """Capture a few tokens and see in which spool they appear, and in which shapes."""
    ids = np.arange(HELLO_TOKENS, dtype=np.int64)
    # A fresh key each time: the cache namespace goes with it, and tokens of an earlier hello are not computed again.
    rid = Rid(run, secrets.token_hex(16), 0, HELLO_TOKENS)
    for end in ends.values():
        end.expect(rid)
    try:
        response = httpx.post(f"{url}/generate", json=generate_body(rid, ids.tolist()), timeout=60.0, headers=headers)
    except httpx.TransportError as error:
        raise ServerError(
            f"the server at {url} did not answer a request of {HELLO_TOKENS} tokens ({error or type(error).__name__})",
            "see its log; it may still be loading",
        ) from error
    if response.status_code != httpx.codes.OK:
        raise ServerError(
            f"the server at {url} refused a request of {HELLO_TOKENS} tokens: {response.text[:200]}",
            "see its log; capture needs POST /generate with input_ids",
        )
    deadline_s = time.monotonic() + HELLO_WAIT_S
    while time.monotonic() < deadline_s:
        for root, end in ends.items():
            match end.poll(rid):
                case Rows() as rows:
                    widths = [tuple(state.shape) for state in rows.states]
                    rows.release()
                    return root, widths
                case FailedNote(reason, detail):
                    raise SpoolError(
                        f"the server could not capture {HELLO_TOKENS} tokens: {reason}: {detail}",
                        "give it a larger --spool-bytes, or free /dev/shm",
                    )
        time.sleep(0.01)
    if aside:
        raise aside[0]
    raise ServerError(
        f"the server at {url} answered, but its states did not appear in {', '.join(map(str, ends))} "
        f"within {HELLO_WAIT_S:.0f} s",
        REMEDY,
    )


def generate_body(rid: Rid, input_ids: list[int], *, new_tokens: int = 0, logprobs: bool = False) -> dict[str, Any]:
    """Build the body of a capture request: prefill only unless told otherwise, and a cache namespace of its own.

    Without the `extra_key`, tokens that an earlier request left in the prefix cache would not be computed again, and
    their rows would not exist.
    """
    sampling: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 0.0}
    body: dict[str, Any] = {"rid": str(rid), "extra_key": str(rid), "input_ids": input_ids, "sampling_params": sampling}
    if new_tokens:
        sampling["ignore_eos"] = True  # the entry's size must be known when the first row comes
    if logprobs:
        sampling["max_new_tokens"] = max(new_tokens, 1)  # its log-probability is that of the last row
        body |= {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    return body
