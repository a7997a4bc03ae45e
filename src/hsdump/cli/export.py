"""`hsdump export`: a trained drafter as the folder that an engine loads."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from msgspec import to_builtins
from rich.table import Table

from hsdump.cli.options import one_of
from hsdump.cli.output import Result, emit
from hsdump.errors import UsageError

if TYPE_CHECKING:
    from hsdump.draft.accept import Accepted

MOST_PROMPTS = 16

EPILOG = "Example:  hsdump export /data/kimi-drafter --to sglang --out /models/kimi-eagle3"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(export)


def export(
    drafter: Path = typer.Argument(..., help="Folder that `hsdump train --out` wrote."),
    to: str = typer.Option(..., "--to", help="sglang, or vllm (the speculators form)."),
    out: Path = typer.Option(..., help="A new folder."),
    target: str = typer.Option(None, show_default="where training read it", help="The target as vLLM will know it."),
    checkpoint: str = typer.Option("best", help="best or last."),
    draft_tokens: int = typer.Option(3, min=1, help="Draft tokens that the speculators form names as its default."),
    server: str = typer.Option(None, help="URL where that engine serves, or will serve, the target with this drafter."),
    launch: str = typer.Option(None, help="Command that starts it there, with {draft} where the folder goes."),
    prompts: Path = typer.Option(None, help="Questions for the engine, as `hsdump prepare` reads rows."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Write a checkpoint that the engine loads as it is, the layers in that engine's own counting.

    With --server the engine answers some prompts, and must have accepted some of what was drafted.

    Exit codes: 0, 1 the engine accepted nothing or requests failed, 69 it did not start or answer.
    """
    from hsdump.draft.export import ENGINES, export_drafter

    engine_check = _engine_check(server, launch, prompts, out)
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
        else f'--speculative-config \'{{"method": "eagle3", "model": "{found.out}", '
        f'"num_speculative_tokens": {draft_tokens}}}\''
    )
    table.add_row("serve with", serve)
    data = to_builtins(found)
    if engine_check is None:
        raise typer.Exit(emit(Result(data=data, text=table), as_json=json))
    accepted = engine_check(found.target)
    data["engine_check"] = {**to_builtins(accepted), "problem": accepted.problem}
    rates = " ".join(f"{rate:.1%}" for rate in accepted.found.per_position)
    length = f"{accepted.found.acceptance_length or 0.0:.3f} tokens a forward, by position {rates}"
    table.add_row(f"in {accepted.engine}", accepted.problem or f"{accepted.found.drafts:,} drafts, {length}")
    raise typer.Exit(emit(Result(data=data, text=table, exit_code=1 if accepted.problem else 0), as_json=json))


def _engine_check(
    server: str | None, launch: str | None, prompts: Path | None, out: Path
) -> Callable[[str], Accepted] | None:
    """Look at the options before anything is written; give what asks the engine, of a target's folder.

    Raises:
        UsageError: options that do not belong together.
    """
    from hsdump.draft.accept import load_and_accept, with_folder
    from hsdump.draft.eval import read_prompts
    from hsdump.draft.sweep import Launch

    if server is None or prompts is None:
        if (server, launch, prompts) != (None, None, None):
            raise UsageError("--server, --prompts and --launch belong together", "give --server URL --prompts FILE")
        return None
    how = None
    if launch is not None:
        log = Path(tempfile.mkdtemp(prefix="hsdump-export-")) / "server.log"
        how = Launch(url=server, command=with_folder(launch, str(out)), log=log)

    def check(target: str) -> Accepted:
        asked = [one.prompt for one in read_prompts(prompts, target, MOST_PROMPTS)]
        return load_and_accept(server, asked, launch=how, key=os.environ.get("HSDUMP_API_KEY"))

    return check
