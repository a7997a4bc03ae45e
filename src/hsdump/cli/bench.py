"""`hsdump bench`: acceptance and speed of a running server with a drafter, beside one without."""

from __future__ import annotations

import os
import tempfile
from functools import partial
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from hsdump.cli.output import Result, emit
from hsdump.draft.bench import Bench, Speed, bench
from hsdump.draft.sweep import Launch, Sweep, parse_settings
from hsdump.draft.sweep import sweep as run_sweep
from hsdump.errors import UsageError

EPILOG = "Example:  hsdump bench --server http://127.0.0.1:30000 --prompts questions.jsonl --model /models/Qwen3-8B"

SOME_FAILED = 3


def add_to(app: typer.Typer) -> None:
    app.command(name="bench", epilog=EPILOG)(run)


def run(
    server: str = typer.Option(..., help="URL of a server with a drafter (SGLang or vLLM); its key in HSDUMP_API_KEY."),
    prompts: Path = typer.Option(..., help="Questions, as `hsdump prepare` reads rows."),
    model: str = typer.Option(..., help="The target's folder (tokenizer and template)."),
    baseline: str = typer.Option(None, help="URL of the same server without a drafter."),
    concurrency: str = typer.Option("1,4,16", help="Requests in flight, one round each."),
    limit: int = typer.Option(64, min=1, help="Most prompts."),
    new_tokens: int = typer.Option(128, min=1, help="Longest answer."),
    sweep: str = typer.Option(None, help="Settings to try, steps:topk:tokens with commas between; needs --launch."),
    launch: str = typer.Option(None, help="Command that starts a server at --server, with {steps} {topk} {tokens}."),
    launch_baseline: str = typer.Option(None, help="Command that starts it without a drafter, for --sweep."),
    plot: Path = typer.Option(None, help="Write an HTML plot (needs the extra `report`)."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Ask the same questions at several concurrencies; acceptance is what the server itself counted.

    Exit codes: 0, 3 some requests failed.
    """
    from hsdump.draft.eval import read_prompts

    try:
        numbers = [int(part) for part in concurrency.split(",")]
    except ValueError:
        raise UsageError(f"--concurrency {concurrency!r} is not a list of numbers", "use 1,4,16") from None
    asked = [one.prompt for one in read_prompts(prompts, model, limit)]
    key = os.environ.get("HSDUMP_API_KEY")
    found: Bench | Sweep
    if sweep is None and launch is None:
        found = bench(server, asked, baseline=baseline, concurrencies=numbers, new_tokens=new_tokens, key=key)
    else:
        if sweep is None or launch is None or baseline is not None:
            fix = "give both; the server without a drafter is started by --launch-baseline, not named by --baseline"
            raise UsageError("--sweep and --launch belong together", fix)
        log = Path(tempfile.mkdtemp(prefix="hsdump-bench-")) / "servers.log"
        say = partial(Console(stderr=True).print, markup=False, highlight=False, soft_wrap=True)
        how = Launch(url=server, command=launch, baseline=launch_baseline, log=log, say=say)
        settings = parse_settings(sweep)
        found = run_sweep(how, settings, asked, concurrencies=numbers, new_tokens=new_tokens, key=key)
    if plot is not None:
        _plot(found, plot)
    failed = any(row.failed for _, rows in _series(found) for row in rows)
    code = emit(Result(data=found, text=_show(found), exit_code=SOME_FAILED if failed else 0), as_json=json)
    raise typer.Exit(code)


def _series(found: Bench | Sweep) -> list[tuple[str, list[Speed]]]:
    """Name what was measured: with the drafter (by its setting) and without."""
    if isinstance(found, Sweep):
        named = [(str(one.setting), one.rows) for one in found.settings]
    else:
        named = [("with the drafter", found.rows)]
    return [*named, *([("without", found.baseline)] if found.baseline else [])]


def _show(found: Bench | Sweep) -> Table:
    table = Table(title=f"bench: {found.server} ({found.engine})", title_justify="left")
    if isinstance(found, Sweep):
        table.add_column("steps:topk:tokens", justify="right")
        table.caption = "fastest: " + ", ".join(
            f"{name} at {number} in flight" for number, name in found.best().items()
        )
    for name in ("in flight", "tokens/s", "without", "speedup", "acceptance length", "per position", "failed"):
        table.add_column(name, justify="right")
    before = {row.concurrency: row.tokens_per_s for row in found.baseline}
    for name, rows in _series(found):
        if name == "without":
            continue
        for row in rows:
            plain = before.get(row.concurrency)
            table.add_row(
                *([name] if isinstance(found, Sweep) else []),
                f"{row.concurrency}",
                f"{row.tokens_per_s:,.0f}",
                "" if plain is None else f"{plain:,.0f}",
                f"{row.tokens_per_s / plain:.2f}x" if plain else "",
                "" if row.acceptance_length is None else f"{row.acceptance_length:.3f}",
                " ".join(f"{rate:.1%}" for rate in row.per_position),
                f"{row.failed}",
            )
    return table


def _plot(found: Bench | Sweep, path: Path) -> None:
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        raise UsageError(f"--plot needs plotly ({error})", 'install it: pip install "hsdump[report]"') from error
    figure = go.Figure()
    for name, rows in _series(found):
        x, y = [row.concurrency for row in rows], [row.tokens_per_s for row in rows]
        figure.add_trace(go.Scatter(name=name, x=x, y=y))
    figure.update_layout(xaxis_title="requests in flight", yaxis_title="tokens/s", xaxis_type="log")
    figure.write_html(str(path), include_plotlyjs=True)
