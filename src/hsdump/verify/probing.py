"""Probing a server once: ask it, judge, and remember the outcome for as long as the server is the same."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from hsdump.arrays import xxh3
from hsdump.errors import InputError, ServerError, UsageError
from hsdump.extract.identity import UNKNOWN, model_digest
from hsdump.lean import apart
from hsdump.schema import EngineInfo
from hsdump.verify.probe import Captured, Prober, ProbeReport, gather, probe_sequences
from hsdump.verify.witness import Witness

PROBE_TIMEOUT_S = 120.0
"""For one request of 24 tokens, behind whatever the server is at."""

_PASSING = ("spool_dir", "spool_max_bytes", "context_length", "notes")
"""Facts of a server that change nothing about its states."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeOptions:
    """How to probe."""

    model: str | None = None
    """The served checkpoint; None: where the server says that it read it."""

    depth: str = "ends"
    spool: Path | None = None
    api_key: str | None = None
    fresh: bool = False
    """Do not believe an earlier probe of the same server."""


def probe_server(url: str, options: ProbeOptions) -> ProbeReport:
    """Identify what a server captures.

    Raises:
        ServerError: nobody answers, or nothing is captured there.
        UsageError: no torch here.
    """
    witness = Witness.meet(url, spool=options.spool, api_key=options.api_key, timeout_s=PROBE_TIMEOUT_S)
    if witness.info is None or witness.engine is None:
        raise ServerError(
            f"the server at {url} captures nothing: {witness.no_capture}", "start it with: hsdump serve -- ..."
        )
    model = options.model or witness.info.model_path
    identity = identity_of(witness.info, model, options.depth)
    known = None if options.fresh else _remembered(identity)
    if known is not None:
        asyncio.run(witness.engine.close())
        return known
    report = _probe(witness, witness.info, model, options.depth)
    report.identity = identity
    if report.verdict == "agrees":
        _remember(report)
    return report


def require_sound(url: str, options: ProbeOptions) -> str:
    """Probe before an extraction.

    Returns:
        One line for people.

    Raises:
        ServerError: the numbers contradict what the capture claims.
    """
    try:
        report = probe_server(url, options)
    except (UsageError, InputError) as error:
        return f"probe: can't identify the layers by numbers: {error.what}"
    if report.verdict == "contradicts":
        raise ServerError(
            f"the states of the server at {url} are not what they are said to be: {'; '.join(report.words)}",
            "do not train on them; `hsdump probe --depth all` shows both readings layer by layer",
        )
    again = " (known)" if report.cached else ""
    words = f": {'; '.join(report.words)}" if report.verdict != "agrees" else ""
    return f"probe{again}: {report.verdict} on layers {[state.claimed for state in report.states]}{words}"


def identity_of(info: EngineInfo, model: str, depth: str) -> str:
    """Digest every fact of a server and its model that its states depend on."""
    facts = {name: value for name, value in asdict(info).items() if name not in _PASSING}
    return xxh3(msgspec.json.encode(facts, order="sorted"), model_digest(model).encode(), depth.encode())


def _probe(witness: Witness, info: EngineInfo, model: str, depth: str) -> ProbeReport:
    sequences = probe_sequences(info.vocab_size)
    answers = asyncio.run(witness.ask_all(sequences))
    if witness.failures:
        key, reason = next(iter(witness.failures.items()))
        raise ServerError(f"the server at {witness.url} did not answer a probe ({key}: {reason})", "see its log")
    report = apart(_judge, info, model, depth, gather(sequences, answers, info.shape.dtype))
    digests = {model_digest(model), model_digest(info.model_path)}
    if len(digests - {UNKNOWN}) == 2:
        report.words.append(f"{model} is not byte for byte the checkpoint that the server reads, {info.model_path}")
    return report


def _judge(info: EngineInfo, model: str, depth: str, answers: Captured) -> ProbeReport:
    return Prober(info, model, depth=depth).judge(answers)


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hsdump" / "probes"


def _remembered(identity: str) -> ProbeReport | None:
    try:
        report = msgspec.json.decode((_folder() / f"{identity}.json").read_bytes(), type=ProbeReport)
    except (OSError, msgspec.MsgspecError, RuntimeError):  # RuntimeError: there is no home
        return None
    report.cached = True
    return report


def _remember(report: ProbeReport) -> None:
    """Best effort: a probe that is not remembered is only made again."""
    try:
        folder = _folder()
        folder.mkdir(parents=True, exist_ok=True)
        partial = folder / f".{report.identity}.{os.getpid()}"
        partial.write_bytes(msgspec.json.encode(report))
        partial.replace(folder / f"{report.identity}.json")
    except (OSError, RuntimeError):
        return
