"""`hsdump prove`: are a store's states the server's own?"""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsdump.cli.output import Result, emit
from hsdump.cli.progress import byte_progress
from hsdump.verify.proof_file import PROOF_NAME, PROVED
from hsdump.verify.prove import ProofReport, ProveOptions, prove_store

EPILOG = "Example:  hsdump prove /data/kimi-store --server http://127.0.0.1:30000 --samples 300"

ALL = 0


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(prove)


def prove(
    store: Path = typer.Argument(..., help="Folder that `hsdump extract --out` wrote."),
    server: str = typer.Option(..., help="The server that the states are said to be of; its key in HSDUMP_API_KEY."),
    samples: int = typer.Option(64, min=ALL, help="Samples to look at, 0 for all; 300 show 1 % of wrong ones."),
    seed: int = typer.Option(0, help="Which samples --samples chooses."),
    model: str = typer.Option(None, show_default="where the server read it", help="The served checkpoint's folder."),
    text: bool = typer.Option(True, help="--no-text: the tokens never were text of a conversation."),
    spool: Path = typer.Option(None, help="The server's spool, where it cannot be found (containers)."),
    json: bool = typer.Option(False, "--json", help="Print the proof as JSON."),
) -> None:
    """Hold final states against the server's log-probabilities, and all states against a second capture.

    Only the head of the checkpoint is read. The proof is written into the store as proof.json.

    Exit codes: 0 proved, 1 not proved, 2 can't (and why), or only in part: a server that does not capture the store's
    layers vouches for its final states alone.
    """
    options = ProveOptions(
        samples=samples or None,
        seed=seed,
        model=model,
        text=text,
        spool=spool,
        api_key=os.environ.get("HSDUMP_API_KEY"),
    )
    with byte_progress("prove") as tick:
        report = prove_store(store, server, options, tick)
    raise typer.Exit(emit(Result(data=report, text=_show(store, report), exit_code=report.exit_code), as_json=json))


def _show(store: Path, report: ProofReport) -> RenderableType:
    colour = "green" if report.verdict == PROVED else "red" if report.exit_code == 1 else "yellow"
    head = Text(f"{store}: ")
    head.append(report.verdict, style=f"bold {colour}")
    head.append(f", {report.samples} of {report.of_samples} samples, {report.tokens} tokens, against {report.engine}")
    if report.wrong_share_below is not None:
        head.append(
            f"\nwith 95 % confidence fewer than {100 * report.wrong_share_below:.3g} % of its samples are wrong"
        )
    parts: list[RenderableType] = [head, *(Text(f"- {words}") for words in report.words)]
    if report.states:
        parts.append(_states(report))
    if report.logits is not None:
        parts.append(_worst(report))
    kept = f"{store / PROOF_NAME} stays as it is: it proves all states of what the store holds"
    parts.append(Text(kept if report.is_kept_back else f"written to {store / PROOF_NAME}"))
    return Group(*parts)


def _states(report: ProofReport) -> Table:
    table = Table(title="stored against captured again", title_justify="left")
    for name in ("state", "median", "p99", "worst row", "cosine", "rows off", "closest"):
        table.add_column(name, justify="left" if name in ("state", "closest") else "right")
    for diff in report.states:
        numbers = (f"{diff.median:.2g}", f"{diff.p99:.2g}", f"{diff.worst:.2g}", f"{diff.cosine:.5f}")
        table.add_row(diff.state, *numbers, str(diff.off_rows), diff.best_match)
    return table


def _worst(report: ProofReport) -> Table:
    assert report.logits is not None
    table = Table(title="tokens with the largest error", title_justify="left")
    for name in ("sample", "row", "token", "server", "from the state"):
        table.add_column(name, justify="left" if name == "sample" else "right")
    for worst in report.logits.worst:
        numbers = (str(worst.row), str(worst.token), f"{worst.server:.4f}", f"{worst.ours:.4f}")
        table.add_row(worst.sample, *numbers)
    return table
