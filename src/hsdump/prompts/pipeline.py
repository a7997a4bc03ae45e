"""All inputs to a stream of samples and skips."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from hsdump.errors import InputError
from hsdump.prompts.conversation import TokenRow
from hsdump.prompts.inputs import Row, read_rows
from hsdump.prompts.options import PromptOptions, RowRefused, Skip
from hsdump.prompts.renderer import Outcome, Renderer, row_source
from hsdump.prompts.rows import parse_row
from hsdump.prompts.tokenrows import token_sample
from hsdump.samples import TokenSample


def read_samples(
    inputs: Sequence[Path],
    renderer: Renderer | None,
    options: PromptOptions,
    notes: Counter[str] | None = None,
) -> Iterator[TokenSample | Skip]:
    """Stream the samples of files, in order, each content once.

    Memory: one row, and 16 bytes for each sample seen (its key), however long the input is.

    Args:
        inputs: files in any format that `read_rows` knows; what `hsdump prepare` wrote is one of them.
        renderer: None when every row is tokenized already.
        options: the same that the renderer was loaded with.
        notes: filled with counts for a report: `rows`, `shape:...`, `mask:...`.

    Yields:
        A `Skip` for everything that will not be captured, at the place where it was found.

    Raises:
        InputError: a file that cannot be read, or a row that needs a tokenizer when there is none.
    """
    seen: set[bytes] = set()
    counts: Counter[str] = Counter() if notes is None else notes
    for path in inputs:
        for row in read_rows(path):
            counts["rows"] += 1
            if isinstance(row, Skip):
                yield row
                continue
            outcome = renderer.outcome(row) if renderer is not None else tokens_only(row, options)
            counts.update(outcome.notes)
            yield from outcome.skips
            for sample in outcome.samples:
                key = bytes.fromhex(sample.key)
                if key in seen:
                    yield Skip(source=sample.source, reason="duplicate", detail=f"same tokens and mask as {sample.key}")
                    continue
                seen.add(key)
                yield sample


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
    return Outcome(samples=(sample,), notes=Counter({f"shape:{shape}": 1}))
