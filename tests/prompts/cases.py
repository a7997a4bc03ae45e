"""The field's bug cases, carried out: a table of ids and outcomes.

    python -m tests.prompts.cases FOLDER        (or HSDUMP_REAL_FOLDER)

FOLDER holds `cases.jsonl` and `templates/`. Each case's input goes through `hsdump prepare` (or the reader, the
renderer or `hsdump generate` where the case is about them), and code compares what comes out with what the case calls
right. Exits 1 when a case fails or has no check.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

from hsdump.cli import prepare as verb
from hsdump.errors import HsdumpError
from hsdump.prompts import PromptOptions, Renderer, read_samples
from hsdump.prompts.renderer import Outcome
from hsdump.prompts.row import Row
from hsdump.samples import TokenSample

from .helpers import learned
from .real import FOLDER_VARIABLE, model_for, renderer_for

KINDS = (
    *("dataset-shape", "roles", "content", "tools", "thinking"),
    *("template", "mask", "tokenization", "truncation"),
)
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PLAIN = CHATML + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """What one `hsdump prepare` left."""

    code: int
    error: str
    report: dict[str, Any]
    samples: dict[str, TokenSample]
    renderer: Renderer

    @property
    def skips(self) -> dict[str, int]:
        found: dict[str, int] = self.report.get("skips", {})
        return found

    @property
    def notes(self) -> dict[str, int]:
        found: dict[str, int] = self.report.get("notes", {})
        return found

    def learned(self, source: str) -> str:
        """Give the learned text of a row, of all samples that it was cut into; runs are set apart by a bar."""
        own = [sample for name, sample in self.samples.items() if name.partition("#")[0] == source]
        return "|".join(learned(self.renderer, sample) for sample in own)

    def text(self, source: str) -> str:
        return self.renderer.tokens.decode(self.samples[source].input_ids.tolist())

    def detail(self, reason: str) -> str:
        return " ".join(f"{example['source']}: {example['detail']}" for example in self.report["examples"][reason])


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of cases.jsonl and a place to work in."""

    raw: dict[str, Any]
    real: Path
    scratch: Path
    made: list[int] = field(default_factory=list)

    @property
    def records(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.raw["input"]["records"]
        return found

    @property
    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = self.raw["input"].get("options") or {}
        return found

    @cached_property
    def template(self) -> str:
        """The template that the case names, or plain ChatML."""
        name = self.raw["input"].get("template")
        return self.options.get("inline_template") or (self.named(name) if name else PLAIN)

    def named(self, name: str) -> str:
        """Read a template whose file name holds `name`."""
        (path,) = (path for path in self.templates if path.name == name or name in path.stem)
        return path.read_text(encoding="utf-8")

    @cached_property
    def templates(self) -> list[Path]:
        return sorted((self.real / "templates").glob("*.jinja"))

    def record(self, name: str) -> dict[str, Any]:
        return next(record for record in self.records if record.get("id") == name)

    def replies(self, name: str) -> list[str]:
        """Give the texts of the assistant in a record of plain turns."""
        turns = self.record(name).get("messages") or self.record(name)["conversations"]
        roles = [(turn.get("role") or turn["from"], turn.get("content") or turn.get("value") or "") for turn in turns]
        return [text for role, text in roles if role in ("assistant", "gpt")]

    def write(self, records: list[Any] | None = None) -> list[Path]:
        """Write the case's input as files."""
        self.made.append(0)
        folder = self.scratch / f"input{len(self.made)}"
        folder.mkdir(parents=True)
        given = self.raw["input"]
        if records is None and given["type"] in ("raw", "files"):
            files = given["files"] if given["type"] == "files" else [given]
            for file in files:
                (folder / file["filename"]).write_text(file["text"], encoding="utf-8")
            return [folder / file["filename"] for file in files]
        path = folder / "rows.jsonl"
        rows = self.records if records is None else records
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return [path]

    def renderer(self, template: str | None = None, **options: Any) -> Renderer:
        self.made.append(0)
        return renderer_for(self.scratch / f"model{len(self.made)}", template or self.template, **options)

    def outcomes(self, template: str | None = None, **options: Any) -> list[Outcome]:
        """Render each record alone."""
        renderer = self.renderer(template, **options)
        return [renderer.outcome(Row(source=f"row{at}", value=row)) for at, row in enumerate(self.records)]

    def prepare(self, *options: str, template: str | None = None, records: list[Any] | None = None) -> Prepared:
        """Run `hsdump prepare` as a script would."""
        inputs = self.write(records)
        model = model_for(self.scratch / f"model{len(self.made)}", template or self.template)
        out = inputs[0].parent / "samples.parquet"
        app = typer.Typer()
        app.callback()(lambda: None)
        verb.add_to(app)
        arguments = ["prepare", *map(str, inputs), "--model", str(model), "--out", str(out), "--json", *options]
        result = CliRunner().invoke(app, arguments, standalone_mode=False)
        if result.exception is not None and not isinstance(result.exception, HsdumpError):
            raise result.exception
        failed = isinstance(result.exception, HsdumpError)
        found = [] if failed else [s for s in read_samples([out], None, PromptOptions()) if isinstance(s, TokenSample)]
        return Prepared(
            code=result.exception.exit_code if isinstance(result.exception, HsdumpError) else int(result.return_value),
            error=str(result.exception) if failed else "",
            report={} if failed else json.loads(result.stdout),
            samples={sample.source: sample for sample in found},
            renderer=Renderer.load(str(model), PromptOptions()),
        )


def outcome_of(case: Case) -> str:
    """Carry one case out: `ok`, or what is wrong."""
    from .case_checks import CHECKS

    check = CHECKS.get(case.raw["id"])
    if check is None:
        return "no check"
    try:
        check(case)
    except AssertionError as error:
        place = error.__traceback__
        while place is not None and place.tb_next is not None:
            place = place.tb_next
        line = place.tb_lineno if place else 0
        return f"FAILED at line {line}: {str(error).splitlines()[0] if str(error) else 'assertion'}"
    except Exception as error:  # noqa: BLE001 - the table has a row for each case, whatever it does
        return f"FAILED: {type(error).__name__}: {error}"
    return "ok"


def run_cases(folder: Path) -> list[tuple[str, str, str]]:
    """Give (id, kind, outcome) of every case of the kinds that are about prompts."""
    lines = (folder / "cases.jsonl").read_text(encoding="utf-8").split("\n")
    rows = []
    for raw in (json.loads(line) for line in lines if line):
        if raw["kind"] in KINDS:
            with tempfile.TemporaryDirectory() as scratch:
                rows.append((raw["id"], raw["kind"], outcome_of(Case(raw=raw, real=folder, scratch=Path(scratch)))))
    return rows


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.prompts.cases", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=os.environ.get(FOLDER_VARIABLE))
    folder = parser.parse_args().folder
    if folder is None:
        parser.error(f"name the folder, or set {FOLDER_VARIABLE}")
    rows = run_cases(folder)
    for name, kind, outcome in rows:
        sys.stdout.write(f"{name:42} {kind:14} {outcome}\n")
    good = sum(outcome == "ok" for _, _, outcome in rows)
    sys.stdout.write(f"{good} of {len(rows)} as they should be\n")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
