"""`hsdump vocab`: which of the target's tokens a drafter may propose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hsdump.cli.output import Result, emit
from hsdump.cli.progress import byte_progress
from hsdump.draft.counting import count_tokens, coverage_facts, curve, recommended, special_tokens
from hsdump.draft.vocab import DraftVocab, choose, default_vocab, load_vocab, save_vocab
from hsdump.errors import UsageError
from hsdump.store import Store

EPILOG = "Example:  hsdump vocab /data/kimi-store --size 32000"


def add_to(app: typer.Typer) -> None:
    app.command(epilog=EPILOG)(vocab)


def vocab(
    store: Path = typer.Argument(..., help="Folder that `hsdump extract --out` wrote."),
    size: int = typer.Option(None, show_default="the recommended size", help="Tokens of the draft vocabulary."),
    exact: bool = typer.Option(False, "--exact", help="Every token of the target; no mapping."),
    from_: Path = typer.Option(None, "--from", help="A mapping or a drafter to use again; says what it covers here."),
    out: Path = typer.Option(None, show_default="STORE.vocab.safetensors", help="The file to write."),
    model: str = typer.Option(None, show_default="what the store names", help="The target's folder (tokenizer)."),
    held_out: float = typer.Option(0.05, min=0.0, max=0.9, help="Share of the samples to test coverage on."),
    json: bool = typer.Option(False, "--json", help="Print the report as JSON."),
) -> None:
    """Count the tokens that are learned from, choose the draft vocabulary, and write d2t and t2d."""
    if sum((size is not None, exact, from_ is not None)) > 1:
        raise UsageError("--size, --exact and --from exclude each other", "give one of them")
    with Store(store) as opened, byte_progress("vocab") as tick:
        always = special_tokens(model or opened.manifest.model_path)
        counts = count_tokens(opened, held_out, tick)
        target_size = opened.manifest.vocab_size
    always = {number: text for number, text in always.items() if number < target_size}
    rows = curve(counts, set(always))
    if from_ is not None:
        chosen = _of_drafter(from_, target_size) if from_.is_dir() else load_vocab(from_, target_size)
    elif exact:
        chosen = DraftVocab.exact(target_size)
    else:
        chosen = choose(counts.train, recommended(rows) if size is None else size, always)
    lacking = {text for number, text in always.items() if not chosen.t2d[number]}
    path = default_vocab(store) if out is None else out
    save_vocab(chosen, path)
    data: dict[str, Any] = {
        "file": str(path),
        **coverage_facts(chosen, counts),
        "digest": chosen.digest,
        "made": chosen.facts,
        "always": sorted(always.values()),
        "lacking": sorted(lacking),
        "curve": rows,
        "recommended": recommended(rows),
        "samples": counts.samples,
        "held_out_samples": counts.held_out_samples,
    }
    raise typer.Exit(emit(Result(data=data, text=_show(data)), as_json=json))


def _of_drafter(folder: Path, target_size: int) -> DraftVocab:
    from hsdump.draft.foreign import read_vocab  # needs torch, and nothing else here does

    return read_vocab(folder, target_size)


def _show(data: dict[str, Any]) -> RenderableType:
    table = Table(title="what a draft vocabulary of each size covers", title_justify="left")
    for name in ("size", "learned tokens", "held-out tokens"):
        table.add_column(name, justify="right")
    for row in data["curve"]:
        mark = " <- recommended" if row["size"] == data["recommended"] else ""
        held_out = "" if row["held_out"] is None else f"{row['held_out']:.3%}"
        table.add_row(f"{row['size']}", f"{row['train']:.3%}", held_out + mark)
    held_out = "" if data["coverage_held_out"] is None else f", {data['coverage_held_out']:.3%} of the held-out ones"
    lines = [
        f"{data['file']}: {data['size']} of {data['target_size']} tokens",
        f"covers {data['coverage_train']:.3%} of the learned tokens{held_out}; {len(data['always'])} are always in",
    ]
    if data["made"].get("filled"):
        lines.append(f"{data['made']['filled']} of them do not occur here: the lowest ids, to fill the size")
    if data["lacking"]:
        lines.append(f"it lacks {', '.join(data['lacking'])}: a draft ends where the target says one of these")
    return Group(table, Text("\n".join(lines)))
