"""The command that `hsdump serve` starts, the checks before it, and the life of its spool."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hsdump import locks
from hsdump.cli.main import main
from hsdump.errors import SpoolError, UsageError
from hsdump.launch.command import ServeOptions, build_command, check_environment
from hsdump.launch.supervise import make_spool
from hsdump.sglang.announce import Announcement
from hsdump.spool.sweep import remove_held


def options(tmp_path: Path, **changes: object) -> ServeOptions:
    values: dict[str, object] = {
        "python": sys.executable,
        "spool": tmp_path / "hsdump-spool",
        "sglang_args": ("--model-path", "/m", "--port", "30000"),
        "environment": dict(os.environ),
    }
    return ServeOptions(**{**values, **changes})  # type: ignore[arg-type]


def test_the_user_s_own_arguments_are_passed_on_untouched(tmp_path: Path) -> None:
    command = build_command(options(tmp_path, layers="2,4", spool_bytes=1 << 30))
    assert command.argv == (sys.executable, "-m", "sglang.launch_server", "--model-path", "/m", "--port", "30000")
    assert command.variables == {
        "HSDUMP_SPOOL": str(tmp_path / "hsdump-spool"),
        "HSDUMP_LAYERS": "2,4",
        "HSDUMP_SPOOL_BYTES": str(1 << 30),
    }


@pytest.mark.parametrize(
    ("before", "after"), [("", None), ("mine", "mine,hsdump"), ("mine, hsdump", None), ("hsdump", None)]
)
def test_a_restricting_plugin_list_keeps_its_meaning(tmp_path: Path, before: str, after: str | None) -> None:
    command = build_command(options(tmp_path, environment={"SGLANG_PLUGINS": before}))
    assert command.variables.get("SGLANG_PLUGINS") == after


def test_print_gives_a_line_one_can_paste(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["serve", "--print", "--spool", "/dev/shm/hsdump-x", "--python", "py", "--", "--model-path", "a b"])
    assert code == 0
    shown = capsys.readouterr().out
    assert shown == (
        "env HSDUMP_SPOOL=/dev/shm/hsdump-x HSDUMP_LAYERS=auto HSDUMP_SPOOL_BYTES=8589934592 \\\n"
        "  py -m sglang.launch_server --model-path 'a b'\n"
    )


def test_no_sglang_arguments_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--print"]) == UsageError.exit_code
    assert "no SGLang arguments after --" in capsys.readouterr().err


def test_what_is_missing_in_the_environment_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not run"):
        check_environment(str(tmp_path / "python"))
    with pytest.raises(UsageError, match="has no SGLang"):
        check_environment(sys.executable)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho boom >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(UsageError, match="cannot be asked for its packages: boom"):
        check_environment(str(broken))


def interpreter(folder: Path, *files: str) -> str:
    """Make an interpreter that sees only these packages; SGLang's own code is broken there."""
    for name in ("sglang/__init__.py", *files):
        path = folder / "packages" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('imported')\n" if path.suffix == ".py" else "")
    (folder / "packages/sglang-0.5.99.dist-info").mkdir()
    (folder / "packages/sglang-0.5.99.dist-info/METADATA").write_text("Name: sglang\nVersion: 0.5.99\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH={folder / "packages"} exec {sys.executable} -S "$@"\n')
    script.chmod(0o755)
    return str(script)


def test_sglang_is_looked_at_without_being_imported(tmp_path: Path) -> None:
    """Importing it takes many seconds; what is broken in it, the server's own start says best."""
    with pytest.raises(UsageError, match=r"SGLang 0\.5\.99 has no plugin API"):
        check_environment(interpreter(tmp_path / "old", "sglang/srt/__init__.py"))
    python = interpreter(tmp_path / "bare", "sglang/srt/plugins/__init__.py")
    with pytest.raises(UsageError, match=r"hsdump is not installed beside SGLang 0\.5\.99 .*\n  fix: .* pip install"):
        check_environment(python)
    plugin = tmp_path / "bare/packages/hsdump-0.dist-info/entry_points.txt"
    plugin.parent.mkdir()
    plugin.write_text("[sglang.srt.plugins]\nhsdump = hsdump.sglang.plugin:register\n")
    (plugin.parent / "METADATA").write_text("Name: hsdump\nVersion: 0\n")
    assert check_environment(python) == ("0.5.99", "plugin")


def test_a_spool_larger_than_its_file_system_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="more than all of the file system"):
        make_spool(options(tmp_path, spool_bytes=1 << 60))
    assert not (tmp_path / "hsdump-spool").exists()


def test_a_folder_with_other_things_in_it_is_no_spool_and_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "hsdump-spool"
    folder.mkdir()
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(SpoolError, match=r"is no spool: it holds thesis\.tex"):
        make_spool(options(tmp_path))
    assert (folder / "thesis.tex").exists()


def test_what_a_killed_server_left_in_its_spool_goes_and_what_others_added_later_stays(tmp_path: Path) -> None:
    folder = tmp_path / "hsdump-spool"
    (folder / "ready").mkdir(parents=True)
    for name in ("ready/hsdump-x", "ring-7", "server-7.json", "server-7.lock"):
        (folder / name).write_text("x")
    lock = make_spool(options(tmp_path))
    assert sorted(path.name for path in folder.iterdir()) == ["clients", "failed", "launcher.lock", "partial", "ready"]
    assert list((folder / "ready").iterdir()) == []
    (folder / "notes.txt").write_text("x")
    remove_held(lock)
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_the_spool_of_a_running_server_is_left_alone(tmp_path: Path) -> None:
    """One that was started by hand holds no launcher's lock."""
    server = Announcement(tmp_path / "hsdump-spool")
    with pytest.raises(SpoolError, match="is the spool of a server that is running"):
        make_spool(options(tmp_path))
    assert server._lock.in_place
    server._lock.release()
    make_spool(options(tmp_path)).release()


def test_a_launcher_that_waits_for_another_ones_end_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, take = make_spool(options(tmp_path)), locks.take

    def take_after_the_end(fd: int) -> bool:
        monkeypatch.setattr(locks, "take", take)
        remove_held(first)
        return take(fd)

    monkeypatch.setattr(locks, "take", take_after_the_end)
    second = make_spool(options(tmp_path))
    assert second.in_place
    assert {path.name for path in (tmp_path / "hsdump-spool").iterdir()} >= {"partial", "ready", "failed", "clients"}
    first.release()
    assert second.in_place, "only its own lock is given back"


def test_one_spool_has_one_launcher(tmp_path: Path) -> None:
    lock = make_spool(options(tmp_path))
    assert (tmp_path / "hsdump-spool").stat().st_mode & 0o777 == 0o700
    with pytest.raises(SpoolError, match="belongs to another hsdump serve"):
        make_spool(options(tmp_path))
    lock.release()


SERVE = """
import os, signal, subprocess, sys
from pathlib import Path
from hsdump.launch import supervise
from hsdump.launch.command import ServeOptions, build_command
{before}
o = ServeOptions(python=sys.argv[1], spool=Path(sys.argv[2]), sglang_args=('x',), spool_bytes=1 << 20)
sys.exit(supervise.run_server(o, build_command(o)))
"""


def stand_in(tmp_path: Path, text: str) -> Path:
    """Make a program that stands for SGLang's interpreter."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_spool_that_vanished_meanwhile_does_not_hide_the_servers_exit_code(tmp_path: Path) -> None:
    """logind removes a user's shared memory at the last logout (RemoveIPC)."""
    fake = stand_in(tmp_path, 'rm -r "$HSDUMP_SPOOL"; exit 3')
    command = [sys.executable, "-c", SERVE.format(before=""), str(fake), str(tmp_path / "hsdump-spool")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "")


def test_a_signal_that_comes_before_the_server_is_there_still_reaches_it(tmp_path: Path) -> None:
    fake, start = stand_in(tmp_path, "exec sleep 5"), "start = subprocess.Popen"
    ended = "def popen(*a, **k): os.kill(os.getpid(), signal.SIGTERM); return start(*a, **k)"
    code = SERVE.format(before=f"{start}\n{ended}\nsubprocess.Popen = popen")
    done = subprocess.run([sys.executable, "-c", code, str(fake), str(tmp_path / "spool")], timeout=60, check=False)
    assert done.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_server_and_the_spool_goes_with_it(tmp_path: Path, number: signal.Signals) -> None:
    fake, spool = stand_in(tmp_path, "exec sleep 60"), tmp_path / "hsdump-spool"
    server = subprocess.Popen([sys.executable, "-c", SERVE.format(before=""), str(fake), str(spool)])
    deadline = time.monotonic() + 30
    while not (spool / "ready").is_dir() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.3)
    server.send_signal(number)
    assert server.wait(timeout=30) == 128 + number
    assert not spool.exists()
