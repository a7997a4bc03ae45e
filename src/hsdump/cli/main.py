"""The `hsdump` command. One module per verb; this file only gathers them and owns the way out."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Sequence
from typing import Any

import typer

from hsdump import lean
from hsdump._version import __version__
from hsdump.errors import HsdumpError, UsageError

VERBS = (
    "doctor",
    "serve",
    "run",
    "patch",
    "detach",
    "prepare",
    "generate",
    "plan",
    "extract",
    "collect",
    "status",
    "verify",
    "probe",
    "prove",
    "compare",
    "vocab",
    "train",
    "eval",
    "export",
    "bench",
    "store",
)
"""Modules of `hsdump.cli`, in the order of the job. Each has `add_to(app)`."""

WITHOUT_TORCH = ("prepare", "generate", "plan", "extract", "collect", "status")
"""What runs long beside a server, or many times: such a process is kept small."""

TABLE_COLUMNS = 112
"""Terminals narrower than this get help as plain lines: rich's tables would cut the names of options there."""

TORCH_FIX = 'install it: pip install "hsdump[train]"'

CommandLineError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)
"""Base of all complaints about the command line. Newer Typers carry their own click, older ones use the package."""


def build_app(verbs: Sequence[str] = VERBS) -> typer.Typer:
    """Put verbs together."""
    app = typer.Typer(
        name="hsdump",
        help="Turn a running SGLang server into verified EAGLE-3 training data.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich" if shutil.get_terminal_size().columns >= TABLE_COLUMNS else None,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if version:
            typer.echo(f"hsdump {__version__}")
            raise typer.Exit

    for verb in verbs:
        importlib.import_module(f"hsdump.cli.{verb}").add_to(app)
    return app


def whole_sentences(command: Any) -> None:
    """Have plain help list commands by their whole first sentence: left to itself, click cuts it to one line."""
    for below in getattr(command, "commands", {}).values():
        whole_sentences(below)
        if below.short_help is None and below.help:
            below.short_help = " ".join(below.help.split("\n\n")[0].split())


def main(argv: list[str] | None = None) -> int:
    """Run one command and give its exit code back; a user's mistake never shows a stack trace."""
    argv = sys.argv[1:] if argv is None else argv
    # Only the verb that runs is imported: `serve` works beside an SGLang that has none of the client's libraries.
    asked = _verb(argv)
    command = typer.main.get_command(build_app([asked] if asked in VERBS else VERBS))
    whole_sentences(command)
    try:
        code = command.main(args=argv, prog_name="hsdump", standalone_mode=False)
    except HsdumpError as error:
        typer.echo(f"hsdump: {error}", err=True)
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        problem = UsageError(f"hsdump {asked} needs torch, which this environment does not have", TORCH_FIX)
        typer.echo(f"hsdump: {problem}", err=True)
        return problem.exit_code
    except typer.Abort:
        typer.echo("hsdump: stopped", err=True)
        return 130
    except CommandLineError as error:
        error.show()  # type: ignore[attr-defined]  # found at run time, see above
        # click's own code is 2, which `hsdump verify` needs for "corrupt".
        return UsageError.exit_code
    return int(code or 0)


def _verb(argv: Sequence[str]) -> str | None:
    return next((word for word in argv if not word.startswith("-")), None)


def run() -> None:
    """Console script."""
    lean.be_lean(_verb(sys.argv[1:]) in WITHOUT_TORCH)
    sys.exit(main())


if __name__ == "__main__":
    run()
