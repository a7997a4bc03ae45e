"""`hsdump prepare`: conversations to tokens and loss masks, in one file that `hsdump extract` takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import typer
from rich.console import Console, Group
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from hsdump.cli.options import one_of, read_template, roles_of
from hsdump.cli.output import Result, emit
from hsdump.errors import InputError
from hsdump.prompts import PromptOptions, Renderer, Skip
from hsdump.prompts.options import DEFAULT_DATE
from hsdump.prompts.page import Page
from hsdump.prompts.pipeline import read_masked
from hsdump.prompts.report import PrepareReport
from hsdump.prompts.samples_file import writing_samples
from hsdump.prompts.show import show_sample

ROWS_LOST = 3
"""Exit code: samples were written, and some rows were damaged (`--skip-bad-rows` makes it 0)."""

EPILOG = "Example:  hsdump prepare chats.jsonl --model /models/Kimi-K2.5 --out chats.parquet"


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("prepare", epilog=EPILOG)(prepare)


def prepare(
    *,
    inputs: list[Path] = typer.Argument(help="JSONL, JSON, Parquet, Arrow, TSV or text, also as .gz or .zst."),
    out: Path = typer.Option(..., "--out", help="Parquet file to write."),
    model: str | None = typer.Option(None, "--model", help="The target's folder: its tokenizer and chat template."),
    max_tokens: int = typer.Option(32_768, min=1, help="Longest sample."),
    too_long: str = typer.Option("skip", help="Above --max-tokens: skip, split (turns off its end) or cut."),
    turns: str = typer.Option("all", help="Assistant turns to learn: all or last."),
    thinking: str = typer.Option("keep", help="The assistant's thinking: keep, require, template, drop or refuse."),
    control_tokens: str = typer.Option("skip", help="Rows whose text spells a control token: skip or allow."),
    text: str = typer.Option("chat", help="Rows that are text: chat (of this template, proved) or all (learn all)."),
    chat_template: Path | None = typer.Option(None, help="Jinja file to use instead of the model's template."),
    date: str = typer.Option(DEFAULT_DATE, help="What templates print as today."),
    default_system: str | None = typer.Option(None, help="System message for rows that bring none."),
    role: list[str] = typer.Option([], help="Another role name, as NAME=assistant. Repeatable."),
    trust_remote_code: bool = typer.Option(False, "--trust-remote-code", help="Run the model's own tokenizer code."),
    skip_bad_rows: bool = typer.Option(False, "--skip-bad-rows", help="Exit 0 although rows were damaged."),
    show: int = typer.Option(0, min=0, max=20, help="Print this many samples, learned tokens coloured."),
    html: Path | None = typer.Option(None, "--html", help="Write a page with masks over text, lengths and reasons."),
    workers: int | None = typer.Option(None, min=1, help="Processes; by default one for each core."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> int:
    """Turn conversations into token ids and loss masks.

    Exit code 0: every row became a sample or was skipped by a documented rule. 3: some rows were damaged or not
    understood. 65: nothing was left.
    """
    options = PromptOptions(
        max_tokens=max_tokens,
        too_long=one_of("--too-long", too_long, ("skip", "split", "cut")),
        turns=one_of("--turns", turns, ("all", "last")),
        thinking=one_of("--thinking", thinking, ("keep", "require", "template", "drop", "refuse")),
        control_tokens=one_of("--control-tokens", control_tokens, ("skip", "allow")),
        text=one_of("--text", text, ("chat", "all")),
        chat_template=read_template(chat_template),
        date=date,
        default_system=default_system,
        roles=roles_of(role),
        trust_remote_code=trust_remote_code,
        skip_bad_rows=skip_bad_rows,
    )
    renderer = Renderer.load(model, options) if model else None
    settings = {**options.settings(), "model": model, "inputs": [str(path) for path in inputs]}
    if renderer is not None:
        settings["tokenizer_digest"] = renderer.tokenizer_digest
        settings["template_digest"] = renderer.template_digest
    report = PrepareReport(settings=settings)
    page = Page(tokens=renderer.tokens if renderer else None)
    with writing_samples(out, settings) as file, _progress(report) as progress:
        for item in read_masked(inputs, renderer, options, report.notes, workers=workers or _cores()):
            progress()
            if isinstance(item, Skip):
                report.add(item)
                continue
            sample, mask = item
            report.add(sample)
            file.append(sample, mask)
            page.add(sample)
        if not report.samples:
            raise InputError(_nothing_left(report), "see the reasons above; rows are named by file and line")
    data = report.data()
    out.with_name(out.name + ".report.json").write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2))
    if html is not None:
        html.write_text(page.html(data, report.notes), encoding="utf-8")
    shown = [show_sample(sample, page.tokens) for sample in page.samples[:show] if page.tokens is not None]
    code = ROWS_LOST if report.lost and not skip_bad_rows else 0
    return emit(Result(data=data, text=Group(*shown, report.text()), exit_code=code), as_json=as_json)


@contextmanager
def _progress(report: PrepareReport) -> Iterator[Callable[[], None]]:
    """Show counts while rows go by, on a terminal only; standard output stays the report's."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading")

        def step() -> None:
            rows = report.notes.counts["rows"]
            if rows % 100 == 0:
                seconds = progress.tasks[0].elapsed or 1e-9
                text = f"{rows:,} rows  {report.samples:,} samples  {report.tokens / seconds:,.0f} tokens/s"
                progress.update(task, description=f"{text}  {sum(report.skips.values()):,} skipped")

        yield step


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _nothing_left(report: PrepareReport) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in report.skips.most_common()) or "no rows"
    lines = [f"0 samples from {report.notes.counts['rows']} rows ({reasons})"]
    lines += [f"  {examples[0]['source']}: {examples[0]['detail']}" for examples in report.examples.values()]
    return "\n".join(lines)
