"""Each thing that forbids a change: named, with what helps, and nothing changed."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hsdump.errors import PatchError, UsageError
from hsdump.locks import AliveLock
from hsdump.patch import live
from hsdump.patch.disk import Disk
from hsdump.patch.journal import BACKUP, locked
from hsdump.patch.restore import RUN_LOCK, Restored, RestoreOptions, clean, restore
from hsdump.patch.site import Site, find_site
from hsdump.patch.status import CLEAN, DAMAGED, INTERRUPTED, MODIFIED, ORPHANED, OVERWRITTEN, PATCHED, status
from hsdump.patch.transaction import ApplyOptions, apply, make_plan
from tests.patch.making import FILES, LOGITS, everything, make_site

APPLY = ApplyOptions(import_check=False)
RESTORE = RestoreOptions(import_check=False)
LOGITS_FILE = "sglang/srt/layers/logits_processor.py"


@contextmanager
def unchanged(root: Path) -> Iterator[None]:
    before = everything(root)
    yield
    assert everything(root) == before


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return find_site(folder=make_site(tmp_path / "a place with spaces"))


def edit(site: Site, text: str = "# mine\n") -> None:
    path = site.root / LOGITS_FILE
    path.write_bytes(text.encode() + path.read_bytes())


def refused(site: Site, match: str, options: ApplyOptions = APPLY) -> None:
    with unchanged(site.root), pytest.raises(PatchError, match=match):
        apply(site, options)


def test_a_path_with_spaces_and_every_kind_of_line_end(site: Site) -> None:
    before = everything(site.root)
    apply(site, APPLY)
    assert status(site).state == PATCHED
    for name in FILES:
        compile((site.root / name).read_bytes(), name, "exec")
    assert not list((site.root / "sglang/srt/layers/__pycache__").glob("*.pyc")), "compiled originals would still run"
    done = restore(site, RESTORE)
    assert done.outcome == "restored"
    assert restore(site, RESTORE) == Restored(patch_id=None, outcome="nothing is patched here")
    assert status(site).state == CLEAN
    clean(site)
    assert everything(site.root) == before


def test_a_second_patch(site: Site) -> None:
    apply(site, APPLY)
    refused(site, r"carries hsdump's patch [0-9a-f]{8} already.*\n  fix: .*hsdump patch restore")


def test_a_read_only_file(site: Site) -> None:
    (site.root / LOGITS_FILE).chmod(0o440)
    refused(site, r"is not writable \(mode 0440.*\n  fix: .*chmod u\+w")


def test_a_read_only_file_system(site: Site) -> None:
    class ReadOnly(Disk):
        def make_folder(self, path: Path) -> None:
            raise OSError(errno.EROFS, "Read-only file system", str(path))

    with unchanged(site.root), pytest.raises(PatchError, match=r"cannot be written .*Read-only file system"):
        apply(site, APPLY, ReadOnly())


def test_a_short_disk(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs(site.root)
    monkeypatch.setattr(os, "statvfs", lambda _path: os.statvfs_result((*real[:4], 1000, *real[5:])))
    refused(site, r"bytes are free under .* are needed for backups")


def test_an_edited_file_is_shown_and_goes_on_only_when_asked(site: Site) -> None:
    edit(site)
    refused(site, r"has been edited since it was installed: .*RECORD says.*\n  fix: .*--accept-modified")
    assert status(site).state == MODIFIED
    before = everything(site.root)
    apply(site, ApplyOptions(import_check=False, accept_modified=True))
    restore(site, RESTORE)
    clean(site)
    assert everything(site.root) == before


def test_two_at_once(site: Site) -> None:
    with locked(site, Disk()), pytest.raises(PatchError, match="another hsdump is changing"):
        apply(site, APPLY)
    assert status(site).state == CLEAN


def test_cleaning_takes_the_lock_of_a_dead_run_only(site: Site) -> None:
    """A second run beside one that lost its lock would take its patch for a crash's, and restore it."""
    apply(site, APPLY)
    restore(site, RESTORE)
    lock = AliveLock(site.state / RUN_LOCK)
    clean(site)
    assert lock.in_place
    lock.release()
    (site.state / RUN_LOCK).touch()
    clean(site)
    assert not site.state.exists()


def test_a_backup_that_somebody_made_by_hand(site: Site) -> None:
    (site.root / (LOGITS_FILE + BACKUP)).write_text("old")
    refused(site, "holds something else than .* does now\n  fix: no journal knows it")
    assert status(site).state == ORPHANED
    assert clean(site) == []
    assert clean(site, orphans=True) == [LOGITS_FILE + BACKUP]
    assert status(site).state == CLEAN


def test_a_symbolic_link_in_place_of_a_file(site: Site) -> None:
    path = site.root / LOGITS_FILE
    path.rename(site.root / "shared.py")
    path.symlink_to(site.root / "shared.py")
    refused(site, r"is a symbolic link to .*shared\.py: other environments may share that file")


def test_symlinked_site_packages_are_one_environment(site: Site, tmp_path: Path) -> None:
    (tmp_path / "linked").symlink_to(site.root)
    linked = find_site(folder=tmp_path / "linked")
    assert linked.package == site.package
    apply(linked, APPLY)
    assert status(site).state == PATCHED
    restore(site, RESTORE)
    assert status(linked).state == CLEAN


def test_a_checkout_is_compared_with_git(tmp_path: Path) -> None:
    root = make_site(tmp_path / "checkout", wheel=False)
    site = find_site(folder=root)
    assert (site.editable, site.version) == (True, "0.5.9")
    refused(site, "may have been edited: no RECORD lists it")
    git = ["git", "-c", "user.email=a@b.c", "-c", "user.name=n", "-c", "commit.gpgsign=false", "-C", str(root)]
    for command in (["init", "-q"], ["add", "sglang"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *command], check=True)
    apply(site, APPLY)
    restore(site, RESTORE)
    clean(site)
    edit(site)
    refused(site, r"(?s)differs from git's HEAD:.*\+# mine")


def test_an_editable_install_is_found_through_its_interpreter(tmp_path: Path) -> None:
    root = make_site(tmp_path / "checkout", wheel=False)
    fake = tmp_path / "env/bin/python"
    fake.parent.mkdir(parents=True)
    fake.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.path.insert(0, {str(root)!r}); exec(sys.argv[1])" "$2"\n'
    )
    fake.chmod(0o755)
    site = find_site(python=str(fake))
    assert (site.package, site.editable, site.python) == (root / "sglang", True, str(fake))


def test_places_that_are_missing_or_ambiguous(tmp_path: Path) -> None:
    renamed = LOGITS.replace("aux_hidden_states", "extra")
    site = find_site(folder=make_site(tmp_path / "a", {LOGITS_FILE: renamed}))
    refused(site, r"the place for LogitsProcessor is missing .*expected \(self, input_ids.*\n  fix: use --target")
    moved = {LOGITS_FILE: "", "sglang/srt/one.py": LOGITS, "sglang/srt/two.py": LOGITS}
    refused(find_site(folder=make_site(tmp_path / "b", moved)), "is ambiguous in SGLang")
    found = make_plan(find_site(folder=make_site(tmp_path / "c", {LOGITS_FILE: "", "sglang/srt/one.py": LOGITS})))
    assert found.changes[0].record.path == "sglang/srt/one.py", "a fork that moved the class"


def test_targets(site: Site) -> None:
    plan = make_plan(site, "models/tiny.py")
    kinds = [[block.kind for block in change.edit.blocks] for change in plan.changes]
    assert kinds == [["begin", "layer", "final", "model"], ["batch"]]
    with pytest.raises(UsageError, match="is no file below"):
        make_plan(site, "models/../../../etc/passwd")
    with pytest.raises(PatchError, match="no single forward loop over layers"):
        make_plan(site, "layers/logits_processor.py")


def test_edits_after_apply_are_shown_from_three_sides_and_can_be_kept(site: Site) -> None:
    apply(site, APPLY)
    edit(site)
    with unchanged(site.root), pytest.raises(PatchError) as found:
        restore(site, RESTORE)
    assert "what hsdump did" in str(found.value)
    assert "+# >>> hsdump patch" in str(found.value)
    assert "what somebody did since" in str(found.value)
    assert "+# mine" in str(found.value)
    assert "--keep-edits" in found.value.fix
    assert status(site).state == MODIFIED
    restore(site, RestoreOptions(import_check=False, keep_edits=True))
    assert (site.root / LOGITS_FILE).read_text() == "# mine\n" + LOGITS
    assert status(site).state == MODIFIED, "of the wheel's file, not by hsdump"


def test_edits_inside_our_own_block_cannot_be_kept(site: Site) -> None:
    apply(site, APPLY)
    path = site.root / LOGITS_FILE
    path.write_text(path.read_text().replace("attach_logits", "attach_nothing"))
    with unchanged(site.root), pytest.raises(PatchError, match="edited inside hsdump's own block"):
        restore(site, RestoreOptions(import_check=False, keep_edits=True))


@pytest.mark.parametrize("harm", ["missing", "one byte"])
def test_a_backup_that_is_not_what_was_saved(site: Site, harm: str) -> None:
    before = everything(site.root)
    apply(site, APPLY)
    backup = site.root / (LOGITS_FILE + BACKUP)
    if harm == "missing":
        backup.unlink()
    else:
        data = bytearray(backup.read_bytes())
        data[len(data) // 2] ^= 1
        backup.write_bytes(data)
    assert status(site).state == DAMAGED
    match = "is missing" if harm == "missing" else "its hash differs"
    with unchanged(site.root), pytest.raises(PatchError, match=rf"{match}\n  fix: --without-backup"):
        restore(site, RESTORE)
    restore(site, RestoreOptions(import_check=False, without_backup=True))
    clean(site)
    assert everything(site.root) == before


def test_sglang_installed_again_over_the_patch(site: Site) -> None:
    apply(site, APPLY)
    make_new = {name: text + "# new\n" for name, text in FILES.items()}
    for path in site.root.glob("*.dist-info/*"):
        path.unlink()
    next(iter(site.root.glob("*.dist-info"))).rmdir()
    make_site(site.root, make_new, version="0.5.12")
    upgraded = find_site(folder=site.root)
    assert status(upgraded).state == OVERWRITTEN
    with unchanged(site.root / "sglang"):
        assert "SGLang was installed again since (now 0.5.12)" in restore(upgraded, RESTORE).outcome
    assert len(clean(upgraded)) == 4
    assert status(upgraded).state == CLEAN


@contextmanager
def server(site: Site) -> Iterator[int]:
    """Run something that looks like an SGLang of this environment: by its PYTHONPATH and its command line."""
    stand_in = site.root / "sglang/launch_server.py"
    stand_in.write_text("import time\ntime.sleep(60)\n")
    # -B: bytecode that it writes while a test looks would be a change of the tree that is not ours.
    process = subprocess.Popen(
        [sys.executable, "-B", "-m", "sglang.launch_server"], env={**os.environ, "PYTHONPATH": str(site.root)}
    )
    try:
        deadline = time.monotonic() + 20
        while not live.find_processes(site) and time.monotonic() < deadline:
            time.sleep(0.05)
        yield process.pid
    finally:
        process.kill()
        process.wait()
        stand_in.unlink()


def test_a_running_server(site: Site) -> None:
    with server(site) as pid:
        refused(
            site, rf"(?s)a server of this environment is running:.*pid {pid}: .*sglang\.launch_server.*PYTHONPATH names"
        )
    apply(site, APPLY)
    with server(site) as pid:
        with unchanged(site.root), pytest.raises(PatchError, match=rf"pid {pid}"):
            restore(site, RESTORE)
        restore(site, RestoreOptions(import_check=False, force=True))
    assert status(site).state == CLEAN


def test_another_environments_server_is_nobodys_business(site: Site, tmp_path: Path) -> None:
    other = find_site(folder=make_site(tmp_path / "other"))
    with server(other):
        apply(site, APPLY)
        restore(site, RESTORE)


def test_gpu_memory_must_be_free(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "tools/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\necho '999999999, 70123 MiB'\n")
    tool.chmod(0o755)
    apply(site, APPLY)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    with unchanged(site.root), pytest.raises(PatchError, match=r"GPU memory is still held: pid 999999999: 70123 MiB"):
        restore(site, RESTORE)
    tool.write_text(f"#!/bin/sh\necho '{os.getppid()}, 12 MiB'\n")
    assert "0 MiB of GPU memory held by this environment; 1 others hold some" in restore(site, RESTORE).proofs


def test_an_interrupted_apply_is_told(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsdump.patch.transaction.roll_back", lambda *_: None)
    monkeypatch.setattr("hsdump.patch.transaction._swap", lambda *_: os.close(-1))
    monkeypatch.setattr(Disk, "remove", lambda *_: None)
    with contextlib.suppress(PatchError):
        apply(site, APPLY)
    monkeypatch.undo()
    assert status(site).state == INTERRUPTED
    assert restore(site, RESTORE).outcome == "rolled back"
    assert status(site).state == CLEAN
