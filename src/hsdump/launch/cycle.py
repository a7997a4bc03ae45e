"""Patch, serve, restore: `hsdump run`. Whatever ends the server, the source is given back; after a crash, next time."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from hsdump.errors import PatchError
from hsdump.launch.command import ServeOptions, build_command
from hsdump.launch.supervise import run_server
from hsdump.locks import AliveLock
from hsdump.patch.journal import APPLIED, open_journal
from hsdump.patch.live import find_processes
from hsdump.patch.restore import RUN_LOCK, RestoreOptions, restore
from hsdump.patch.site import Site
from hsdump.patch.transaction import ApplyOptions, apply

OWNER = "run"
END_WAIT_S = 60.0
"""SGLang's processes end some seconds after their launcher."""

Tell = Callable[[str], None]


def run_patched(site: Site, serving: ServeOptions, applying: ApplyOptions, tell: Tell) -> int:
    """Apply, serve until the server ends, restore.

    A patch that somebody applied by hand before is used, and left in place.

    Returns:
        The server's exit code.

    Raises:
        PatchError: the patch cannot be applied, or not be restored after the server's end.
    """
    options = replace(serving, attach="patch")
    command = build_command(options)
    with _alone(site), _interruptible():
        _finish_crashed(site, applying, tell)
        current = open_journal(site)
        if current is not None:
            tell(f"using patch {current.patch_id} of {current.created}, which stays in place afterwards")
            return run_server(options, command)
        journal = apply(site, replace(applying, owner=OWNER))
        tell(f"applied patch {journal.patch_id} to {site.package} ({len(journal.files)} files)")
        try:
            return run_server(options, command)
        finally:
            _give_back(site, applying, tell)


def _give_back(site: Site, applying: ApplyOptions, tell: Tell) -> None:
    deadline_s = time.monotonic() + END_WAIT_S
    while find_processes(site) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    done = restore(site, RestoreOptions(owner=OWNER, import_check=applying.import_check))
    tell(f"patch {done.patch_id}: {done.outcome}; {'; '.join(done.proofs)}")


def _finish_crashed(site: Site, applying: ApplyOptions, tell: Tell) -> None:
    """Restore what a run that was killed left behind."""
    journal = open_journal(site)
    if journal is None or (journal.state == APPLIED and not journal.owner):
        return
    tell(f"an earlier hsdump run ended without restoring patch {journal.patch_id}")
    done = restore(site, RestoreOptions(owner=OWNER, import_check=applying.import_check))
    tell(f"patch {done.patch_id}: {done.outcome}")


@contextmanager
def _alone(site: Site) -> Iterator[None]:
    try:
        site.state.mkdir(exist_ok=True)
        lock = AliveLock(site.state / RUN_LOCK)
    except BlockingIOError:
        raise PatchError(
            f"another `hsdump run` serves from {site.package}",
            "a second server of the same environment: hsdump serve, which uses the patch that is in place",
        ) from None
    except OSError as error:
        raise PatchError(
            f"{site.root} cannot be written ({error})", f"run this as the user who owns {site.root}"
        ) from error
    try:
        yield
    finally:
        lock.release()
        with contextlib.suppress(OSError):
            site.state.rmdir()


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turn a request to end, before the server is there to be told, into Ctrl-C: every step undoes itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
