"""kill -9 at every step, and a disk that is full from any step on: never a mixture, and the next command mends it."""

from __future__ import annotations

import signal
from itertools import count
from pathlib import Path

import pytest

from hsdump.errors import PatchError
from hsdump.patch import importing
from hsdump.patch.journal import read_journals
from hsdump.patch.restore import RestoreOptions, clean, restore
from hsdump.patch.site import Site, find_site
from hsdump.patch.status import CLEAN, INTERRUPTED, PATCHED, status
from hsdump.patch.transaction import ApplyOptions, apply
from tests.patch.making import FaultyDisk, everything, in_child, make_site

APPLY = ApplyOptions(import_check=False)
RESTORE = RestoreOptions(import_check=False)
EDITED = [
    "sglang/srt/layers/logits_processor.py",
    "sglang/srt/model_executor/model_runner.py",
    "sglang/srt/model_executor/forward_batch_info.py",
]


@pytest.fixture(autouse=True)
def little_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy two files of hsdump instead of thirty: each is the same few steps."""
    monkeypatch.setattr(importing, "SERVER_SIDE", ("_version.py",))


@pytest.fixture(autouse=True)
def no_look_at_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through /proc takes 20 ms, hundreds of times; it is tested elsewhere."""
    monkeypatch.setattr("hsdump.patch.live.find_processes", lambda _site: [])


def fresh(in_memory: Path, number: int) -> Site:
    return find_site(folder=make_site(in_memory / f"site {number}"))


def whole(site: Site, originals: dict[str, tuple[bytes, int, int]]) -> int:
    """Assert that every file is the original or a whole patched one; count the patched."""
    patched = 0
    for name in EDITED:
        data = (site.root / name).read_bytes()
        if data != originals[name][0]:
            compile(data, name, "exec")
            assert data.count(b"# >>> hsdump patch") == data.count(b"# <<< hsdump patch") == 1
            patched += 1
    return patched


def check_after(site: Site, originals: dict[str, tuple[bytes, int, int]], *, restoring: bool) -> None:
    """Assert that status tells what is in the files."""
    patched, found = whole(site, originals), status(site)
    if found.state == CLEAN:
        assert patched == 0
        assert not any(journal.state in ("applying", "applied", "restoring") for journal in read_journals(site))
    elif found.state == PATCHED:
        assert patched == len(EDITED)
    else:
        assert found.state == INTERRUPTED
        assert f"{patched} of 3 files hold the patch" in found.what
        assert "completes or rolls back" in found.next
        assert ("restoring" if restoring else "applying") in found.what


def given_back(site: Site, originals: dict[str, tuple[bytes, int, int]]) -> None:
    clean(site)
    assert everything(site.root) == originals


@pytest.mark.parametrize("then", ["apply", "restore"])
def test_apply_killed_at_every_step(in_memory: Path, then: str) -> None:
    for fuse in count(1):
        site = fresh(in_memory, fuse)
        originals = everything(site.root)
        code = in_child(lambda site=site, fuse=fuse: apply(site, APPLY, FaultyDisk(fuse, "kill")))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        check_after(site, originals, restoring=False)
        if then == "apply":
            if status(site).state != PATCHED:
                apply(site, APPLY)
            assert status(site).state == PATCHED
        restore(site, RESTORE)
        given_back(site, originals)
    assert fuse > 60, "the steps are not seen"


@pytest.mark.parametrize("then", ["apply", "restore"])
def test_restore_killed_at_every_step(in_memory: Path, then: str) -> None:
    for fuse in count(1):
        site = fresh(in_memory, fuse)
        originals = everything(site.root)
        apply(site, APPLY)
        code = in_child(lambda site=site, fuse=fuse: restore(site, RESTORE, FaultyDisk(fuse, "kill")))
        if code == 0:
            break
        assert code == -signal.SIGKILL
        check_after(site, originals, restoring=True)
        if then == "apply" and status(site).state != PATCHED:
            apply(site, APPLY)  # over the backups that a finished restore keeps
            assert status(site).state == PATCHED
        restore(site, RESTORE)
        given_back(site, originals)
    assert fuse > 20, "the steps are not seen"


def test_a_disk_that_is_full_from_any_step_on_changes_nothing(in_memory: Path) -> None:
    for fuse in count(1):
        site = fresh(in_memory, fuse)
        originals = everything(site.root)
        disk = FaultyDisk(fuse, "full")
        try:
            apply(site, APPLY, disk)
        except PatchError as error:
            message = str(error)
        else:
            break
        assert "No space left on device" in message
        assert "everything is as it was" in message
        assert everything(site.root) == originals
    assert fuse > 30, "the steps are not seen"


def test_a_disk_that_is_full_during_restore_goes_on_from_there(in_memory: Path) -> None:
    for fuse in count(1):
        site = fresh(in_memory, fuse)
        originals = everything(site.root)
        apply(site, APPLY)
        try:
            restore(site, RESTORE, FaultyDisk(fuse, "full"))
        except PatchError as error:
            message = str(error)
        else:
            break
        assert "it goes on from here" in message
        check_after(site, originals, restoring=True)
        restore(site, RESTORE)
        given_back(site, originals)
    assert fuse > 5, "the steps are not seen"
