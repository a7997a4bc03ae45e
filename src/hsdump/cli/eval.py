"""`hsdump eval`: how many tokens a drafter would win, before an engine has it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsdump.cli.options import one_of
from hsdump.cli.output import Result, emit
from hsdump.cli.progress import count_progress
from hsdump.errors import UsageError

if TYPE_CHECKING:
    from hsdump.draft.eval import Evaluation

EPILOG = "Example:  hsdump eval /data/kimi-drafter --store /data/kimi-store"

NOT_LOSSLESS = 1


def add_to(app: typer.Typer) -> None:
    app.command(name="eval", epilog=EPILOG)(evaluate)


def evaluate(
    drafter: Path = typer.Argument(..., help="Folder that `hsdump train --out` wrote."),
    store: Path = typer.Option(None, help="Teacher forcing on this store's held-out samples; needs no target."),
    all_: bool = typer.Option(False, "--all", help="On all samples of the store."),
    prompts: Path = typer.Option(None, help="Decode these questions for real, with the target in this process."),
    limit: int = typer.Option(None, min=1, help="Most prompts."),
    model: str = typer.Option(None, show_default="where training read it", help="The target's folder."),
    checkpoint: str = typer.Option("best", help="best or last."),
    new_tokens: int = typer.Option(128, min=2, help="Longest answer."),
    draft_tokens: int = typer.Option(3, min=1, max=16, help="Tokens of a draft."),
    temperature: float = typer.Option(0.0, min=0.0, help="0: greedy, with the lossless check."),
    seed: int = typer.Option(0, help="Of sampling."),
    untrained: bool = typer.Option(False, help="Decode with an untrained drafter too, for comparison."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Measure acceptance, per position and per category; with --prompts check that greedy output stays the target's.

    Exit codes: 0, or 1 when an output differs by more than a tie's rounding.
    """
    if store is None and prompts is None:
        raise UsageError("nothing to evaluate on", "give --store STORE, --prompts FILE, or both")
    from hsdump.draft.eval import EvalOptions
    from hsdump.draft.eval import evaluate as run

    options = EvalOptions(
        store=store,
        everything=all_,
        prompts=prompts,
        limit=limit,
        model=model,
        checkpoint=one_of("--checkpoint", checkpoint, ("best", "last")),
        new_tokens=new_tokens,
        draft_tokens=draft_tokens,
        temperature=temperature,
        seed=seed,
        untrained=untrained,
    )
    with count_progress("prompts") as tick:
        found = run(drafter, options, tick)
    lossy = found.lossless is False and found.near_ties < len(found.differing)
    code = emit(Result(data=found, text=_show(found), exit_code=NOT_LOSSLESS if lossy else 0), as_json=json)
    raise typer.Exit(code)


def _show(found: Evaluation) -> RenderableType:
    table = Table(title=f"eval, {found.draft_tokens} draft tokens", title_justify="left")
    for name in ("how", "prompts", "acceptance length", *(f"token {place + 1}" for place in range(found.draft_tokens))):
        table.add_column(name, justify="left" if name == "how" else "right")
    if found.forced is not None:
        rates = (f"{rate:.1%}" for rate in found.forced.per_position)
        table.add_row("stored states", f"{found.forced.samples}", f"{found.forced.acceptance_length:.3f}", *rates)
    for row in [*found.walked, *([found.untrained] if found.untrained else [])]:
        rates = (f"{rate:.1%}" for rate in row.per_position)
        table.add_row(f"decoding: {row.category}", f"{row.prompts}", f"{row.acceptance_length:.3f}", *rates)
    lines = []
    if found.lossless is True:
        lines.append("lossless: every output is the target's own, token by token")
    elif found.lossless is False:
        lines.append(f"{len(found.differing)} outputs differ, {found.near_ties} of them at a tie of two tokens")
    return Group(table, Text("\n".join(lines)))
