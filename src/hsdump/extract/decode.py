"""`hsdump extract --phase decode`: the states that a drafter really sees, row by row while the server generates.

A measurement, not the way to much data: the prompt of each sample is answered greedily, and the rows of the answer are
those of decode steps. The same tokens can be captured by prefill into a second store, for `hsdump compare`.

Letters: P = tokens of the prompt, N = generated tokens.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hsdump.engines.base import CapturedSample, CaptureFailed, CaptureRequest, Engine
from hsdump.errors import ServerError, StoreError, UsageError
from hsdump.extract.plan import ExtractOptions, ExtractPlan, make_plan
from hsdump.prompts import Skip, read_samples
from hsdump.samples import TokenSample
from hsdump.store import Manifest, Store, StoreWriter, WriterOptions

MEANING = "; rows of learned tokens come from decode steps, the others from prefill"
"""Added to the manifest's layer meaning, which is a fact: the two phases are never mixed in one store."""

SUFFIX = "#decode"


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeOptions:
    """What is special about this phase."""

    new_tokens: int
    """N; fewer where the end of the answer comes first."""

    prefill_out: Path | None = None
    """Capture the same tokens by prefill into this store too."""


@dataclass(kw_only=True, slots=True)
class DecodeState:
    """Counts of one run."""

    committed: int = 0
    already: int = 0
    tokens: int = 0
    generated: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)
    """The first failures, in words."""

    @property
    def exit_code(self) -> int:
        nothing = not self.committed and not self.already
        return 3 if self.failed or nothing else 0

    def report(self) -> dict[str, object]:
        """Give the run's result for `--json`."""
        return {
            "exit_code": self.exit_code,
            "phase": "decode",
            "committed": self.committed,
            "already_committed": self.already,
            "tokens": self.tokens,
            "generated": self.generated,
            "failed": dict(self.failed),
            "skipped": dict(self.skipped),
            "details": self.details,
        }


class DecodeRun:
    """One run through one engine."""

    def __init__(self, engine: Engine, options: ExtractOptions, decode: DecodeOptions) -> None:
        """Nothing is sent yet."""
        self._engine, self._options, self._decode = engine, options, decode
        self.state = DecodeState()
        self._slots = asyncio.Semaphore(options.concurrency)

    async def run(self, tick: Callable[[int, int], None] = lambda _n, _b: None) -> DecodeState:
        """Go through the input.

        Raises:
            ServerError: no capture there, or decode steps cannot be captured; says which flag helps.
            StoreError, StoreMismatch: a store cannot be written, or holds the other phase.
        """
        info = await asyncio.to_thread(self._engine.handshake)
        if info.no_decode:
            raise ServerError("this server's decode steps cannot be captured", info.no_decode)
        plan = make_plan(self._options, info)
        if self._decode.prefill_out == self._options.out:
            raise UsageError("--prefill-out is the store itself", "name another folder")
        known = _sources(self._options.out)
        with ExitStack() as stores:
            out = stores.enter_context(_open(self._options, self._options.out, _as_decode(plan.manifest)))
            twin = None
            if self._decode.prefill_out is not None:
                twin = stores.enter_context(_open(self._options, self._decode.prefill_out, plan.manifest))
            tasks = []
            for row in read_samples(self._options.inputs, plan.renderer, plan.prompt_options):
                if isinstance(row, Skip):
                    self.state.skipped[row.reason] += 1
                    out.record_skip(row.source, row.reason, row.detail)
                elif row.source + SUFFIX in known:
                    self.state.already += 1
                else:
                    tasks.append(asyncio.create_task(self._one(row, plan, out, twin, tick)))
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                self.state.committed = len(out.commit())
                if twin is not None:
                    twin.commit()
        return self.state

    async def _one(
        self,
        sample: TokenSample,
        plan: ExtractPlan,
        out: StoreWriter,
        twin: StoreWriter | None,
        tick: Callable[[int, int], None],
    ) -> None:
        async with self._slots:
            learned = np.flatnonzero(sample.loss_mask)
            prompt = sample.input_ids[: int(learned[0])] if len(learned) else sample.input_ids
            room = plan.info.context_length - len(prompt)
            if not len(prompt) or room < 2:
                self.state.skipped["no-prompt" if not len(prompt) else "longer-than-context"] += 1
                out.record_skip(sample.source, "no-prompt", "nothing stands before the first learned token")
                return
            new = min(self._decode.new_tokens, room)
            try:
                captured = await self._capture(sample.key, prompt, new)
            except CaptureFailed as failure:
                self._fail(sample, failure, out)
                return
            made, rows = _made(sample.source, captured, len(prompt), _ends(plan.info.model_path))
            try:
                added = out.add(made, [captured.states[index][:rows] for index in plan.columns])
            finally:
                captured.release()
            tick(1, made.input_ids.nbytes)
            self.state.tokens += rows
            self.state.generated += rows - len(prompt)
            if not added:
                self.state.already += 1
            if twin is not None:
                await self._twin(made, plan, twin)

    async def _twin(self, made: TokenSample, plan: ExtractPlan, twin: StoreWriter) -> None:
        try:
            captured = await self._capture(made.key, made.input_ids, 0)
        except CaptureFailed as failure:
            self._fail(made, failure, twin)
            return
        try:
            twin.add(made, [captured.states[index] for index in plan.columns])
        finally:
            captured.release()

    async def _capture(self, key: str, ids: Any, new_tokens: int) -> CapturedSample:
        for attempt in range(self._options.attempts):
            try:
                return await self._engine.capture(
                    CaptureRequest(key=key, input_ids=ids, attempt=attempt, new_tokens=new_tokens)
                )
            except CaptureFailed as failure:
                if not failure.transient or attempt + 1 == self._options.attempts:
                    raise
                await asyncio.sleep(0.2 * 2**attempt)
        raise AssertionError("the last attempt raises or returns")

    def _fail(self, sample: TokenSample, failure: CaptureFailed, store: StoreWriter) -> None:
        self.state.failed[failure.reason] += 1
        if len(self.state.details) < 5:
            self.state.details.append(f"{sample.source}: {failure}")
        store.record_failure(sample, failure.reason, failure.detail, attempts=self._options.attempts)


def _made(source: str, captured: CapturedSample, prompt_tokens: int, ends: frozenset[int]) -> tuple[TokenSample, int]:
    """Make a sample of what was generated, up to the end of the answer, and count its rows."""
    ids = np.array(captured.token_ids)
    stops = [row for row in range(prompt_tokens, len(ids)) if int(ids[row]) in ends]
    rows = stops[0] + 1 if stops else len(ids)
    mask = (np.arange(rows) >= prompt_tokens).astype(np.uint8)
    return TokenSample.make(source + SUFFIX, ids[:rows], mask), rows


def _ends(model_path: str) -> frozenset[int]:
    """Read the ids that end an answer; none when the model's folder cannot be read from here."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            config = msgspec.json.decode((Path(model_path) / name).read_bytes(), type=dict[str, Any])
        except (OSError, msgspec.MsgspecError):
            continue
        ids = config.get("eos_token_id")
        found |= set(ids) if isinstance(ids, list) else {ids} if isinstance(ids, int) else set()
    return frozenset(found)


def _as_decode(manifest: Manifest) -> Manifest:
    extra = {**manifest.extra, "phase": "decode"}
    return msgspec.structs.replace(manifest, layer_meaning=manifest.layer_meaning + MEANING, extra=extra)


def _open(options: ExtractOptions, path: Path, manifest: Manifest) -> StoreWriter:
    return StoreWriter.open(
        path, manifest, options=WriterOptions(shard_bytes=options.shard_bytes, direct=options.direct)
    )


def _sources(path: Path) -> frozenset[str]:
    """Give the sources that a store holds already; its keys are of tokens that are not known before."""
    try:
        with Store(path) as store:
            return frozenset(store.row(place).record.source for place in range(len(store)))
    except StoreError:
        return frozenset()
