"""Which living processes run an environment's SGLang, and which of them hold GPU memory. No port is asked."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hsdump.errors import PatchError
from hsdump.patch.site import Site

PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """A process that runs, or may run, from an environment."""

    pid: int
    command: str
    why: str
    """What ties it to the environment."""

    certain: bool = True
    """False: it is an SGLang, but may not be looked into, so it may be of this environment."""

    spool: str | None = None
    """What its environment names as spool, when capture is on there."""


def find_processes(site: Site) -> list[Process]:
    """Look through all processes for those of this environment's SGLang.

    They are known by mapped and open files, command line, working folder and PYTHONPATH. This process and its parents
    are left out.
    """
    mine = _own_line()
    found = []
    for folder in PROC.iterdir():
        if folder.name.isdigit() and int(folder.name) not in mine:
            process = _look(site, folder)
            if process is not None:
                found.append(process)
    return sorted(found, key=lambda process: process.pid)


def refuse_running(site: Site, force: str) -> None:
    """Stop when a server of the environment is running.

    Args:
        force: the option that goes on nevertheless, for the message.

    Raises:
        PatchError: names the processes.
    """
    found = find_processes(site)
    if not found:
        return
    lines = [f"pid {process.pid}: {process.command[:120]} ({process.why})" for process in found[:8]]
    sure = any(process.certain for process in found)
    what = "a server of this environment is running" if sure else "an SGLang is running that may be of this environment"
    raise PatchError(
        f"{what}:\n    " + "\n    ".join(lines),
        f"stop it, and wait until its processes have ended (kill {found[0].pid}); {force} goes on nevertheless",
    )


def _own_line() -> set[int]:
    pids, pid = set(), os.getpid()
    while pid > 1:
        pids.add(pid)
        try:
            pid = int((PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError, IndexError):
            break
    return pids


def _look(site: Site, folder: Path) -> Process | None:
    try:
        words = (folder / "cmdline").read_bytes().rstrip(b"\0").decode(errors="replace").split("\0")
    except OSError:
        return None  # it has ended
    if words[0].startswith("sglang::") or _is_python(folder, words):
        return _examine(site, folder, words)
    return None


def _examine(site: Site, folder: Path, words: list[str]) -> Process | None:
    command = " ".join(words)
    title = command.startswith("sglang::")
    try:
        environment = _environment(folder)
        maps = (folder / "maps").read_text(errors="replace")
        opened = _links(folder / "fd")
        here = str((folder / "cwd").readlink())
    except PermissionError:
        if title or any(word.startswith("sglang.") for word in words):
            return Process(pid=int(folder.name), command=command, why="of another user", certain=False)
        return None
    except OSError:
        return None
    runs = title or any(word.split(".")[0] == "sglang" or "/sglang/" in word for word in words)
    why = _tie(site, maps, opened, words, here, environment) if runs else _maps_package(site, maps, opened)
    if why is None:
        return None
    spool = environment.get("SGLANG_HS_DUMP_DIR") or environment.get("HSDUMP_SPOOL")
    return Process(pid=int(folder.name), command=command, why=why, spool=spool)


def _is_python(folder: Path, words: list[str]) -> bool:
    try:
        name = (folder / "exe").readlink().name
    except OSError:
        name = Path(words[0]).name
    return name.startswith(("python", "pypy"))


def _tie(
    site: Site, maps: str, opened: list[str], words: list[str], here: str, environment: dict[str, str]
) -> str | None:
    """Say what ties an SGLang process to the environment, or give None."""
    package = _maps_package(site, maps, opened)
    if package:
        return package
    roots = {str(site.root), str(site.given.parent)}
    paths = [os.path.realpath(path) for path in environment.get("PYTHONPATH", "").split(":") if path]
    if roots & set(paths):
        return f"PYTHONPATH names {site.given.parent}"
    if any(f"{root}/" in word for root in roots for word in words):
        return "its command line names the package"
    if os.path.realpath(here) in roots:
        return "its working folder holds the package"
    # The environment's own interpreter, unless another tree stands before it.
    if site.prefix is None or site.by_pythonpath or any((Path(path) / "sglang/srt").is_dir() for path in paths):
        return None
    # Not all of the prefix: virtual environments made from a base interpreter have files of that one mapped, too.
    inside = Path(words[0]).parent in (site.prefix / "bin", site.prefix.resolve() / "bin")
    return f"runs from {site.prefix}" if inside or f" {site.libraries}/" in maps else None


def _maps_package(site: Site, maps: str, opened: list[str]) -> str | None:
    inside = f"{site.package}/"
    if f" {inside}" in maps:
        return "has files of the package mapped"
    return "has files of the package open" if any(path.startswith(inside) for path in opened) else None


def _environment(folder: Path) -> dict[str, str]:
    text = (folder / "environ").read_bytes().decode(errors="replace")
    return dict(part.split("=", 1) for part in text.split("\0") if "=" in part)


def _links(folder: Path) -> list[str]:
    found = []
    for link in folder.iterdir():
        try:
            found.append(str(link.readlink()))
        except OSError:
            continue
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuUser:
    """A process that holds memory of a GPU."""

    pid: int
    used: str
    known: bool
    """False: no such process is to be seen from here, as in a container."""


def gpu_users() -> list[GpuUser] | None:
    """Ask nvidia-smi who holds GPU memory; None where it is not installed or does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-compute-apps=pid,used_memory", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    users = []
    for line in done.stdout.splitlines():
        pid, _, used = line.partition(",")
        if pid.strip().isdigit():
            users.append(GpuUser(pid=int(pid), used=used.strip(), known=(PROC / pid.strip()).is_dir()))
    return users


def refuse_gpu_memory(site: Site) -> str:
    """Make sure that no process of the environment, and no invisible one, holds GPU memory.

    Returns:
        What was found, for the journal.

    Raises:
        PatchError: memory is still held.
    """
    users = gpu_users()
    if users is None:
        return "no NVIDIA tools here: GPU memory was not looked at"
    ours = {process.pid for process in find_processes(site)} | _of_libraries(site)
    held = [user for user in users if user.pid in ours or not user.known]
    if held:
        lines = [f"pid {user.pid}: {user.used}{'' if user.known else ' (not visible from here)'}" for user in held]
        raise PatchError(
            "GPU memory is still held: " + ", ".join(lines),
            "wait until nvidia-smi shows 0 MiB, end what is left over, or use --force",
        )
    return "0 MiB of GPU memory held by this environment" + (f"; {len(users)} others hold some" if users else "")


def _of_libraries(site: Site) -> set[int]:
    """Give every process that has a file of the environment's packages mapped, whatever it calls itself."""
    inside = f" {site.libraries}/"
    found = set()
    for folder in PROC.iterdir():
        if folder.name.isdigit():
            try:
                if inside in (folder / "maps").read_text(errors="replace"):
                    found.add(int(folder.name))
            except OSError:
                continue
    return found - _own_line()
