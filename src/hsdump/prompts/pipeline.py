"""All inputs to a stream of samples and skips."""

from __future__ import annotations

import itertools
import multiprocessing
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hsdump.arrays import xxh3
from hsdump.errors import InputError
from hsdump.keys import KeySet
from hsdump.prompts.conversation import TokenRow
from hsdump.prompts.hub import is_dataset
from hsdump.prompts.inputs import check_input, read_rows
from hsdump.prompts.options import PromptOptions, RowRefused, Skip
from hsdump.prompts.renderer import Outcome, Renderer, own_id, row_source
from hsdump.prompts.row import Row
from hsdump.prompts.rows import parse_row
from hsdump.prompts.tokenrows import token_sample
from hsdump.samples import TokenSample

_INLINE_ROWS = 2_000
_BATCH_ROWS = 64
_BATCHES_AHEAD = 4


@dataclass(kw_only=True, slots=True)
class Notes:
    """What happened to rows, counted, with one sample of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    """`rows`, `shape:messages`, `mask:sentinel`, `thinking-lost`, `tokens-straddling` and so on."""

    examples: dict[str, TokenSample] = field(default_factory=dict)

    def add(self, outcome: Outcome) -> None:
        self.counts.update(outcome.notes)
        if outcome.samples:
            for name in outcome.notes:
                if name != "rows" and name not in self.examples:
                    self.examples[name] = outcome.samples[0]


def read_samples(
    inputs: Sequence[Path],
    renderer: Renderer | None,
    options: PromptOptions,
    notes: Notes | None = None,
    *,
    workers: int = 1,
) -> Iterator[TokenSample | Skip]:
    """Stream the samples of files, in order, each content once.

    Memory: some rows for each worker, and sets of the keys and ids seen (45 bytes a sample).

    Args:
        inputs: files in any format that `read_rows` knows; what `hsdump prepare` wrote is one of them.
        renderer: None when every row is tokenized already.
        options: the same that the renderer was loaded with.
        notes: filled with what a report should say.
        workers: processes that render and tokenize. The order, and so the output, does not depend on it.

    Yields:
        A `Skip` for everything that will not be captured, at the place where it was found.

    Raises:
        InputError: a file that cannot be read, or a row that needs a tokenizer when there is none.
    """
    for item in read_masked(inputs, renderer, options, notes, workers=workers):
        yield item if isinstance(item, Skip) else item[0]


def read_masked(
    inputs: Sequence[Path],
    renderer: Renderer | None,
    options: PromptOptions,
    notes: Notes | None = None,
    *,
    workers: int = 1,
) -> Iterator[tuple[TokenSample, str] | Skip]:
    """Do as `read_samples`, and give with each sample how its mask was found."""
    seen, ids = KeySet(), KeySet()
    notes = Notes() if notes is None else notes
    for path in inputs:
        check_input(path)  # all of them now: the last one may be hours away
    rows = (row for path in inputs for row in _rows(path, renderer))
    for outcome in _outcomes(rows, renderer, options, workers):
        notes.add(outcome)
        if outcome.row_id is not None and not ids.add(xxh3(outcome.row_id.encode())):
            # Not an error: ids are names for people, samples are told apart by their content.
            notes.counts["duplicate-ids"] += 1
        yield from outcome.skips
        for sample, strategy in zip(outcome.samples, outcome.strategies, strict=True):
            if seen.add(sample.key):
                yield sample, strategy
            else:
                yield Skip(source=sample.source, reason="duplicate", detail=f"same tokens and mask as {sample.key}")


def prepared_settings(path: Path) -> dict[str, Any]:
    """Give what made the tokens of a file that `hsdump prepare` wrote; empty for any other file."""
    check_input(path)
    if is_dataset(path):
        return {}
    with path.open("rb") as file:
        if file.read(4) != b"PAR1":
            return {}
    from hsdump.prompts.samples_file import read_settings  # pyarrow, for Parquet only

    return read_settings(path)


def _rows(path: Path, renderer: Renderer | None) -> Iterator[Row | Skip]:
    """Read one file; tokens that another tokenizer made are not this model's."""
    made_with = prepared_settings(path).get("tokenizer_digest") if renderer is not None else None
    if renderer is not None and made_with not in (None, renderer.tokenizer_digest):
        raise InputError(
            f"{path} was prepared with another tokenizer ({made_with}; this model's is {renderer.tokenizer_digest})",
            "run hsdump prepare again with --model set to this model",
        )
    yield from read_rows(path)


def _outcomes(
    rows: Iterator[Row | Skip], renderer: Renderer | None, options: PromptOptions, workers: int
) -> Iterator[Outcome]:
    # A small input is done before the first worker has imported its libraries.
    alone = workers <= 1 or (renderer is not None and not renderer.can_travel)
    inline = rows if alone else itertools.islice(rows, _INLINE_ROWS)
    for row in inline:
        yield _outcome(row, renderer, options)
    following = next(rows, None)
    if following is not None:
        yield from _parallel(itertools.chain([following], rows), renderer, options, workers)


def _outcome(row: Row | Skip, renderer: Renderer | None, options: PromptOptions) -> Outcome:
    if isinstance(row, Skip):
        outcome = Outcome(skips=(row,))
    elif renderer is not None:
        outcome = renderer.outcome(row)
    else:
        outcome = tokens_only(row, options)
    outcome.notes["rows"] += 1
    return outcome if isinstance(row, Skip) else replace(outcome, row_id=own_id(row))


def _parallel(
    rows: Iterator[Row | Skip], renderer: Renderer | None, options: PromptOptions, workers: int
) -> Iterator[Outcome]:
    """Keep every worker busy with a bounded number of batches, and give results in the order of the rows."""
    # Spawned, not forked: the tokenizer's own threads and a progress display's would not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin, initargs=(renderer, options))
    waiting: deque[Future[list[Outcome]]] = deque()
    try:
        while batch := list(itertools.islice(rows, _BATCH_ROWS)):
            waiting.append(pool.submit(_batch, batch))
            if len(waiting) >= workers * _BATCHES_AHEAD:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Worker:
    """What one worker process holds."""

    renderer: Renderer | None = None
    options: PromptOptions = PromptOptions()


def _begin(renderer: Renderer | None, options: PromptOptions) -> None:
    _Worker.renderer, _Worker.options = renderer, options


def _batch(rows: list[Row | Skip]) -> list[Outcome]:
    return [_outcome(row, _Worker.renderer, _Worker.options) for row in rows]


def tokens_only(row: Row, options: PromptOptions) -> Outcome:
    """Do what can be done without a tokenizer.

    Raises:
        InputError: the row holds text.
    """
    source = row_source(row)
    try:
        shape, parsed = parse_row(row.value, options)
        if not isinstance(parsed, TokenRow):
            raise InputError(
                f"{row.source} holds text, and no model was named to tokenize it",
                "pass --model with the target's folder (its tokenizer and chat template are used)",
            )
        sample = token_sample(parsed, source=source, vocab_size=options.vocab_size, options=options)
    except RowRefused as refused:
        return Outcome(skips=(Skip(source=source, reason=refused.reason, detail=refused.detail),))
    return Outcome(samples=(sample,), strategies=("given",), notes=Counter({f"shape:{shape}": 1}))
