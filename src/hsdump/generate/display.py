"""What a person sees while the target answers, and at the end."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from hsdump.generate.state import GenerateState
from hsdump.live import LivePanel, Views


def live_panel(state: GenerateState, *, quiet: bool = False) -> LivePanel:
    """Show how far the answers are, until the end of its `shown` block."""
    return LivePanel(Views(panel=lambda: panel(state), line=lambda: status_line(state)), quiet=quiet)


def panel(state: GenerateState) -> RenderableType:
    """Draw everything about the run that changes."""
    table = Table.grid(padding=(0, 2))
    table.add_row("conversations", f"{state.done} done, {state.in_flight} in flight, {_of(state)}")
    table.add_row("answers", f"{state.answers} with {state.answer_tokens:,} tokens, {_rates(state)}")
    table.add_row("ended by", counts_in_words(state.finish))
    table.add_row("left", _eta(state))
    bar = Table.grid()  # alone, a bar ends without a new line
    bar.add_row(ProgressBar(total=state.total, completed=state.closed, width=60))
    rows: list[RenderableType] = [bar, table]
    if state.failed or state.skipped:
        rows.append(Text(counts_in_words(state.failed + state.skipped), style="yellow"))
    return Group(*rows)


def status_line(state: GenerateState) -> str:
    """Say it in one line of plain text."""
    failed = f"; {counts_in_words(state.failed)}" if state.failed else ""
    return (
        f"hsdump: {state.done} conversations done, {_of(state)}, {state.in_flight} in flight, {state.answers} answers "
        f"({counts_in_words(state.finish)}), {_rates(state)}, {_eta(state)}{failed}"
    )


def summary(state: GenerateState) -> RenderableType:
    """Say at the end what became of every row."""
    table = Table(title="generate", title_justify="left", show_header=False)
    table.add_row("rows read", f"{state.rows:,}")
    table.add_row("questions", f"{state.questions:,} x {state.per_question}")
    table.add_row("answers in this run", f"{state.answers:,} with {state.answer_tokens:,} tokens, {_rates(state)}")
    if state.finish:
        table.add_row("ended by", counts_in_words(state.finish))
    if state.already:
        table.add_row("conversations answered before", f"{state.already:,}")
    if state.earlier_failures:
        table.add_row("failed earlier", f"{state.earlier_failures} (ask again with --retry-failed)")
    made = state.samples
    table.add_row("samples", f"{made['samples']:,}, {made['tokens']:,} tokens, {made['loss_tokens']:,} of them learned")
    for name in ("duplicate", "cut-dropped"):
        if made[name]:
            table.add_row(f"left out: {name}", f"{made[name]:,}")
    for name, count in sorted((+state.notes).items()):
        table.add_row(Text(name, style="dim"), f"{count:,}")
    for style, word, reasons in (("red", "failed", state.failed), ("yellow", "skipped", state.skipped)):
        for reason, count in sorted(reasons.items()):
            first = state.examples[reason][0]
            table.add_row(
                Text(f"{word}: {reason}", style=style), Text(f"{count:,}  {first['source']}: {first['detail']}")
            )
    if state.stopped:
        fix = f"\nfix: {state.error.fix}" if state.error else ""
        table.add_row("[red]stopped early", Text(f"{state.stopped}{fix}"))
    return table


def _of(state: GenerateState) -> str:
    return f"{state.rows} rows read" if state.total is None else f"{state.closed} of {state.total}"


def _rates(state: GenerateState) -> str:
    return f"{state.answers / state.seconds:,.1f} answers/s, {state.answer_tokens / state.seconds:,.0f} tokens/s"


def _eta(state: GenerateState) -> str:
    worked = state.closed - state.already - state.earlier_failures
    if state.total is None or not worked:
        return "unknown"
    seconds = (state.total - state.closed) * state.seconds / worked
    return f"about {timedelta(seconds=int(max(seconds, 0)))} left"


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Say how many of what, by name."""
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"
