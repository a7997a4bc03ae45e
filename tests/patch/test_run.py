"""`hsdump run` and the commands around it, with an interpreter whose SGLang only sleeps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hsdump.cli.main import main
from hsdump.errors import PatchError
from hsdump.patch.live import find_processes
from hsdump.patch.site import Site, find_site
from hsdump.patch.status import CLEAN, PATCHED, status
from tests.patch.making import FILES, everything, make_site

SERVER = "sglang/launch_server.py"


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an interpreter that sees a small SGLang 0.5.9."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    packages = make_site(tmp_path / "packages", {SERVER: "import time\ntime.sleep(60)\n"})
    script = tmp_path / "bin/python"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\nPYTHONPATH='{packages}' exec {sys.executable} -S \"$@\"\n")
    script.chmod(0o755)
    return script


def start(python: Path) -> subprocess.Popen[str]:
    command = ["run", "--python", str(python), "--no-import-check", "--spool", str(python.parent / "spool")]
    return subprocess.Popen(
        [sys.executable, "-m", "hsdump.cli.main", *command, "--spool-bytes", str(1 << 20), "--", "--port", "1"],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 60
    while not what():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(process.communicate()[1])
        time.sleep(0.05)


def serving(site: Site) -> bool:
    return status(site).state == PATCHED and bool(find_processes(site))


def everything_but_caches(site: Site) -> dict[str, tuple[bytes, int, int]]:
    """Give what the package holds, without what the interpreter compiled of files that are not patched."""
    unpatched = ("__pycache__/__init__.", "__pycache__/launch_server.")
    return {name: file for name, file in everything(site.package).items() if not name.startswith(unpatched)}


def end(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str]:
    time.sleep(0.5)  # it is there a moment before it would die of the signal
    process.send_signal(number)
    _, text = process.communicate(timeout=120)
    return process.returncode, text


def test_a_run_restores_at_its_end_and_after_a_crash_at_the_next_start(python: Path) -> None:
    site = find_site(python=str(python))
    before = everything(site.package)
    first = start(python)
    wait_for(lambda: serving(site), first)
    second = start(python)
    _, text = second.communicate(timeout=60)
    assert second.returncode == PatchError.exit_code
    assert "another `hsdump run` serves from" in text
    code, text = end(first, signal.SIGINT)
    assert code == 128 + signal.SIGINT
    assert "restored; no process runs from this environment" in text
    assert {n: f for n, f in everything_but_caches(site).items() if "bak_hsdump" not in n} == before

    crashed = start(python)
    wait_for(lambda: serving(site), crashed)
    os.killpg(crashed.pid, signal.SIGKILL)
    crashed.communicate()
    assert status(site).what == "patched, by an `hsdump run` that died"
    left = status(site).patch_id
    again = start(python)
    wait_for(lambda: status(site).patch_id not in ("", left) and serving(site), again)
    code, text = end(again, signal.SIGTERM)
    assert "an earlier hsdump run ended without restoring patch" in text
    assert code == 128 + signal.SIGTERM, text
    assert status(site).state == CLEAN
    assert main(["patch", "clean", "--python", str(python)]) == 0
    assert everything_but_caches(site) == before


def test_the_commands_and_their_exit_codes(python: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = ["--site", str(find_site(python=str(python)).root)]
    before = everything(Path(site[1]))

    def run(*words: str) -> tuple[int, str]:
        code = main([words[0], *words[1:]])
        shown = capsys.readouterr()
        return code, shown.out + shown.err

    assert run("patch", "status", *site)[0] == 0
    code, text = run("patch", "diff", "--json", *site)
    assert json.loads(text)["applied"] is False
    code, text = run("patch", "apply", *site)
    assert code == PatchError.exit_code
    assert "belongs to no interpreter that could import it" in text
    assert everything(Path(site[1])) == before
    assert run("patch", "apply", "--no-import-check", "--reason", "TICKET-7", *site)[0] == 0
    code, text = run("patch", "status", "--json", *site)
    assert (code, json.loads(text)[0]["reason"]) == (1, "TICKET-7")
    assert run("patch", "verify", *site)[0] == 0
    code, text = run("patch", "clean", *site)
    assert code == PatchError.exit_code
    assert "its backup and journal are needed" in text
    code, text = run("patch", "log", *site)
    assert "reason    TICKET-7" in text
    assert "+# >>> hsdump patch" in text
    code, text = run("doctor", "--json", *site)
    assert json.loads(text)[0]["in_place"] == "patch"
    code, text = run("detach", "--json", *site)
    assert "source: as installed" in json.loads(text)["proofs"][1 if code else -3]
    assert run("patch", "clean", *site)[0] == 0
    assert everything(Path(site[1])) == before
    code, text = run("patch", "status")
    assert code == 64
    assert "name one environment" in text


def test_serve_uses_a_patch_that_is_in_place(python: Path) -> None:
    from hsdump.launch.command import ServeOptions, build_command, check_environment

    assert main(["patch", "apply", "--no-import-check", "--python", str(python)]) == 0
    assert check_environment(str(python)) == ("0.5.9", "patch")
    command = build_command(
        ServeOptions(python=str(python), spool=Path("/dev/shm/hsdump-x"), attach="patch", sglang_args=("--port", "1"))
    )
    assert command.variables["SGLANG_HS_DUMP_DIR"] == "/dev/shm/hsdump-x"
    assert "HSDUMP_SPOOL" not in command.variables
    assert main(["detach", "--no-import-check", "--python", str(python)]) == 0


def test_a_patched_module_imports_with_and_without_hsdump(python: Path) -> None:
    """The real import check; and a block whose code is gone: a line in the log, and SGLang goes on."""
    assert main(["patch", "apply", "--python", str(python)]) == 0
    site = find_site(python=str(python))
    program = "import sglang.srt.model_executor.model_runner as m; print(m.ModelRunner.load_model.__module__)"

    def imported(**variables: str) -> tuple[str, str]:
        done = subprocess.run(
            [str(python), "-c", program], env={**os.environ, **variables}, capture_output=True, text=True, check=True
        )
        return done.stdout.strip(), done.stderr

    assert imported()[0] == "sglang.srt.model_executor.model_runner"
    for folder in site.state.glob("*-code"):
        folder.rename(folder.with_name("away"))
    out, err = imported(SGLANG_HS_DUMP_DIR="/dev/shm/hsdump-nowhere")
    assert out == "sglang.srt.model_executor.model_runner"
    assert "hsdump captures nothing" in err
    (site.state / "away").rename(site.state / f"{status(site).patch_id}-code")
    assert main(["detach", "--python", str(python)]) == 0
    assert {n for n in everything(site.root) if n in FILES} == set(FILES)
