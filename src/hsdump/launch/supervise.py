"""Run the server as a child, pass signals on, and take the spool away when it has ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from types import FrameType

from hsdump.errors import SpoolError
from hsdump.launch.command import ServeCommand, ServeOptions
from hsdump.locks import TRIES, AliveLock, is_held
from hsdump.spool.names import SpoolPaths
from hsdump.spool.sweep import clear_spool, list_strangers, remove_held


def make_spool(options: ServeOptions) -> AliveLock:
    """Create the spool and hold it, so that nobody takes it for an abandoned one while the server loads.

    Raises:
        SpoolError: the file system is smaller than what `--spool-bytes` promises, the folder is somebody else's, or
            there is no right to create it.
    """
    paths = SpoolPaths(options.spool)
    try:
        if paths.root.is_dir() and (strangers := list_strangers(paths.root)):
            raise SpoolError(
                f"{paths.root} is no spool: it holds {', '.join(strangers[:3])}",
                f"name a folder of its own with --spool, such as {paths.root}/hsdump-spool",
            )
        lock = _hold(paths)
        if any(is_held(server) for server in paths.root.glob("server-*.lock")):
            lock.release()
            raise SpoolError(
                f"{paths.root} is the spool of a server that is running", "leave --spool out, or name another folder"
            )
        clear_spool(lock)  # what a killed server of this spool left
        for folder in paths.folders():
            folder.mkdir(mode=0o700, exist_ok=True)
    except BlockingIOError:
        raise SpoolError(
            f"{paths.root} belongs to another hsdump serve that is running", "leave --spool out, or name another folder"
        ) from None
    except OSError as error:
        raise SpoolError(f"the spool {paths.root} cannot be made ({error})", "name a folder with --spool") from error
    stat = os.statvfs(paths.root)
    total = stat.f_blocks * stat.f_frsize
    if options.spool_bytes > total:
        remove_held(lock)
        raise SpoolError(
            f"--spool-bytes {options.spool_bytes} is more than all of the file system under {paths.root} ({total})",
            f"use --spool-bytes {total // 2}, or enlarge it (docker: --shm-size, Kubernetes: emptyDir sizeLimit)",
        )
    return lock


def _hold(paths: SpoolPaths) -> AliveLock:
    """Make the folder and take its lock, again where a sweep of what was there before takes the folder away."""
    for _ in range(TRIES):
        paths.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return AliveLock(paths.launcher_lock)
    raise OSError("it is removed again and again")


def run_server(options: ServeOptions, command: ServeCommand) -> int:
    """Start the server and wait for its end; the spool exists exactly as long.

    Returns:
        The server's exit code, or 128 + signal number.
    """
    lock = make_spool(options)
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if child is None:
            early.append(number)
        elif child.poll() is None:
            child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    try:
        child = subprocess.Popen(command.argv, env={**options.environment, **command.variables})
        for missed in early:  # there was nobody to tell
            child.send_signal(missed)
        code = child.wait()
    finally:
        remove_held(lock)
    return 128 - code if code < 0 else code
