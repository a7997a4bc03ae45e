"""What `--help` shows: rich takes words in square brackets for markup and shows nothing in their place."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from rich.text import Text

from hsdump.cli.main import TABLE_COLUMNS, build_app, whole_sentences


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    yield name, command
    for word, below in getattr(command, "commands", {}).items():
        yield from _commands(below, f"{name} {word}")


def test_every_word_of_a_help_text_is_shown() -> None:
    commands = list(_commands(typer.main.get_command(build_app()), "hsdump"))
    assert len(commands) > 25
    for name, command in commands:
        texts = [command.help, command.epilog, *(getattr(option, "help", None) for option in command.params)]
        for text in filter(None, texts):
            assert Text.from_markup(text).plain == text, f"{name}: {text}"


@pytest.mark.parametrize("columns", [60, 80, TABLE_COLUMNS - 1, TABLE_COLUMNS, 160])
def test_no_option_and_no_sentence_is_cut_however_narrow_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    root = typer.main.get_command(build_app())
    whole_sentences(root)
    for name, command in _commands(root, "hsdump"):
        command.main(["--help"], prog_name=name, standalone_mode=False)
        shown = capsys.readouterr().out
        below = getattr(command, "commands", {}).values()
        letters = "".join(shown.replace("│", " ").split())
        assert all("".join(one.help.split("\n\n")[0].split()) in letters for one in below), name
        options = [word for option in command.params for word in (*option.opts, *option.secondary_opts)]
        missing = [word for word in options if word.startswith("--") and word not in shown]
        assert not missing, f"{name}: {missing}"


def test_every_command_shows_an_example_that_it_would_take() -> None:
    for name, command in _commands(typer.main.get_command(build_app()), "hsdump"):
        if hasattr(command, "commands"):
            continue
        assert command.epilog, f"{name} has no example"
        examples = [line.split(":", 1)[-1] if "Example" in line else line for line in command.epilog.splitlines()]
        for example in filter(None, map(str.strip, examples)):
            words, verbs = shlex.split(example), name.split()
            while "=" in words[0]:  # the environment
                words.pop(0)
            assert words[: len(verbs)] == verbs
            command.make_context(verbs[-1], words[len(verbs) :])  # parses, and runs nothing
