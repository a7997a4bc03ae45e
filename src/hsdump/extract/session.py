"""From URLs to a run: shaking hands with all servers, putting the parts together, taking them apart again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hsdump.engines.base import Engine, ServerAway
from hsdump.engines.collector import CollectorEngine, Terms
from hsdump.errors import HsdumpError, ServerError, UsageError
from hsdump.extract.driver import Driver
from hsdump.extract.events import Events
from hsdump.extract.keeper import Keeper
from hsdump.extract.lanes import Fleet, FleetLimits, Lane, model_differences
from hsdump.extract.ledger import Ledger
from hsdump.extract.plan import ExtractOptions, ExtractPlan, count_rows
from hsdump.extract.state import RunState
from hsdump.prompts import Skip, read_samples
from hsdump.samples import TokenSample
from hsdump.schema import EngineInfo
from hsdump.store import StoreWriter, WriterOptions

Rows = Iterator[TokenSample | Skip] | AsyncIterator[TokenSample | Skip]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is."""

    url: str
    spool: Path | None = None


def read_endpoints(servers: Sequence[str], file: Path | None, spool: Path | None) -> list[Endpoint]:
    """Put `--server` and `--servers` together. A line of the file is a URL, and the server's spool where it cannot be
    found by itself; # begins a comment.

    Raises:
        UsageError: no server, one twice, a file that cannot be read, or a spool for several.
    """
    found = [Endpoint(url.rstrip("/"), spool) for url in servers]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--servers {file} cannot be read: {error}", "name a file with one URL a line") from error
        for line in lines:
            words = line.split("#")[0].split()
            if words:
                found.append(Endpoint(words[0].rstrip("/"), Path(words[1]) if len(words) > 1 else None))
    if not found:
        raise UsageError("--server is missing", "give the server's URL: --server http://127.0.0.1:30000")
    if spool is not None and len(found) > 1:
        raise UsageError("--spool names one spool for several servers", "put spools behind the URLs in --servers FILE")
    urls = [endpoint.url for endpoint in found]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise UsageError(f"the server {twice[0]} is named twice", "name each server once")
    return found


async def shake_hands(engines: dict[str, Engine], limits: FleetLimits) -> tuple[list[Lane], EngineInfo]:
    """Ask all servers what they are. One that does not answer is taken in when it does; one must.

    Returns:
        A lane for each, and the facts that all have in common.

    Raises:
        ServerError: nobody captures, or two servers would give states that may not be mixed.
    """
    asked = (
        engine.ask() if isinstance(engine, CollectorEngine) else asyncio.to_thread(engine.handshake)
        for engine in engines.values()
    )
    answers = await asyncio.gather(*asked, return_exceptions=True)
    for answer in answers:
        if isinstance(answer, BaseException) and not isinstance(answer, HsdumpError):
            raise answer
    infos = [answer for answer in answers if isinstance(answer, EngineInfo)]
    errors = [answer for answer in answers if isinstance(answer, HsdumpError)]
    if not infos:
        raise errors[0]
    lanes = []
    for (name, engine), answer in zip(engines.items(), answers, strict=True):
        lane = Lane(name, engine, answer if isinstance(answer, EngineInfo) else None, limits)
        if isinstance(answer, HsdumpError):
            lane.problem = answer
        elif isinstance(answer, EngineInfo) and (changed := model_differences(infos[0], answer)):
            raise ServerError(
                f"{name} is not what {next(iter(engines))} is: {'; '.join(changed)}",
                "states of different models or layers make no data set: extract from each into a store of its own",
            )
        lanes.append(lane)
    return lanes, infos[0]


COLLECTOR_QUEUE = 64
"""Times a server's concurrency, the samples that a collector holds until they are committed."""


def limits_of(options: ExtractOptions, *, collectors: bool = False) -> FleetLimits:
    """Give a run's limits. Collectors keep those of their servers; here they only bound what is out."""
    if collectors:
        return FleetLimits(
            concurrency=options.concurrency * COLLECTOR_QUEUE,
            max_rate=options.max_rate,
            live_share=1.0,
            server_wait_s=options.server_wait_s,
        )
    return FleetLimits(
        concurrency=options.concurrency,
        tokens=options.tokens_in_flight,
        max_rate=options.max_rate,
        live_share=options.live_share,
        server_wait_s=options.server_wait_s,
    )


async def begin_collecting(lanes: Sequence[Lane], plan: ExtractPlan, options: ExtractOptions) -> None:
    """Open the partitions of all collectors under the same terms; those that are away get them when they come, and so
    do those that die just now.

    Raises:
        ServerError: a partition was made under other terms, or no collector is left.
    """
    terms = Terms(
        layers=plan.shape.layers,
        max_tokens=plan.prompt_options.max_tokens,
        tokenizer_digest=plan.manifest.tokenizer_digest,
        template_digest=plan.manifest.template_digest,
        prompts=plan.manifest.extra,
        codec=options.codec,
        shard_bytes=options.shard_bytes,
        direct=options.direct,
        commit_s=options.commit_s,
        attempts=options.attempts,
        concurrency=options.concurrency,
        tokens_in_flight=options.tokens_in_flight,
        live_share=options.live_share,
        disk_reserve=options.disk_reserve,
        server_wait_s=options.server_wait_s,
    )
    begins = []
    for lane in lanes:
        if isinstance(lane.engine, CollectorEngine):
            lane.engine.terms = terms
            if lane.info is not None:
                begins.append((lane, lane.engine.begin(terms)))
    answers = await asyncio.gather(*(begin for _, begin in begins), return_exceptions=True)
    problem: BaseException | None = None
    for (lane, _), answer in zip(begins, answers, strict=True):
        if isinstance(answer, ServerError) and isinstance(answer.__cause__, ServerAway):
            lane.info, lane.problem, problem = None, answer, answer
        elif isinstance(answer, BaseException):
            raise answer
    if problem is not None and all(lane.info is None for lane in lanes):
        raise problem


@dataclass(frozen=True, slots=True)
class Session:
    """One run, ready to go."""

    driver: Driver
    fleet: Fleet
    keeper: Keeper | Ledger
    open_rows: Callable[[], Rows]

    @property
    def state(self) -> RunState:
        return self.driver.state

    async def run(self) -> RunState:
        return await self.driver.run(self.open_rows)


def make_session(
    lanes: Sequence[Lane],
    plan: ExtractPlan,
    options: ExtractOptions,
    events: Events,
    open_rows: Callable[[], Rows] | None = None,
) -> Session:
    """Put a run together.

    Args:
        open_rows: where samples come from; None for the files of the options.
    """

    def open_store() -> StoreWriter:
        writer_options = WriterOptions(shard_bytes=options.shard_bytes, remote=options.remote, direct=options.direct)
        return StoreWriter.open(options.out, plan.manifest, options=writer_options)

    def read_files() -> Rows:
        return read_samples(options.inputs, plan.renderer, plan.prompt_options)

    collectors = [lane.engine for lane in lanes if isinstance(lane.engine, CollectorEngine)]
    state = RunState(rows_expected=count_rows(options.inputs) if options.inputs and open_rows is None else None)
    keeper: Keeper | Ledger = Keeper(open_store, plan, options, state, events)
    if collectors:
        keeper = Ledger(collectors, plan, state, events)
    limits = limits_of(options, collectors=bool(collectors))
    fleet = Fleet(lanes, plan.info, plan.manifest.model_digest, limits, events)
    driver = Driver(fleet, plan, options, keeper, state, events)
    return Session(driver, fleet, keeper, open_rows or read_files)
