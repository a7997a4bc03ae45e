"""`hsdump export`: a trained drafter as the folder that an engine loads."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.table import Table

from hsdump.cli.options import one_of
from hsdump.cli.output import Result, emit

EPILOG = "Example:  hsdump export /data/kimi-drafter --to sglang --out /models/kimi-eagle3"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(export)


def export(
    drafter: Path = typer.Argument(..., help="Folder that `hsdump train --out` wrote."),
    to: str = typer.Option(..., "--to", help="sglang, or vllm (the speculators form)."),
    out: Path = typer.Option(..., help="A new folder."),
    target: str = typer.Option(None, help="The target as vLLM will know it.  [default: where training read it]"),
    checkpoint: str = typer.Option("best", help="best or last."),
    draft_tokens: int = typer.Option(3, min=1, help="Draft tokens that the speculators form names as its default."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Write a checkpoint that the engine loads as it is, the layers in that engine's own counting."""
    from hsdump.draft.export import ENGINES, export_drafter

    found = export_drafter(
        drafter,
        out,
        one_of("--to", to, ENGINES),
        target=target,
        which=one_of("--checkpoint", checkpoint, ("best", "last")),
        draft_tokens=draft_tokens,
    )
    table = Table(title="export", title_justify="left", show_header=False)
    table.add_row("folder", f"{found.out} ({found.bytes:,} bytes, from {found.checkpoint})")
    table.add_row("layers", f"{found.layers}, which {found.engine} counts as {found.engine_layers}")
    table.add_row("embeddings", "its own" if found.embeddings == "own" else "the target's: the engine shares them")
    table.add_row("draft vocabulary", f"{found.draft_vocab_size} tokens")
    table.add_row("positions", f"{found.max_position_embeddings}, rope {found.rope_type}")
    serve = (
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {found.out}"
        if found.engine == "sglang"
        else f'--speculative-config \'{{"model": "{found.out}", "num_speculative_tokens": {draft_tokens}}}\''
    )
    table.add_row("serve with", serve)
    raise typer.Exit(emit(Result(data=found, text=table), as_json=json))
