"""The hand-over in shared memory: bytes, quota, leftovers. Both sides run here, in one process or two."""

import fcntl
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hsdump import locks
from hsdump.errors import SpoolError
from hsdump.locks import AliveLock, is_held
from hsdump.schema import StateShape
from hsdump.sglang.announce import Announcement
from hsdump.spool import sweep
from hsdump.spool.entry import decode_header, encode_header, entry_bytes
from hsdump.spool.names import Rid, SpoolPaths, new_run
from hsdump.spool.reader import FailedNote, ReadyEntry, SpoolReader
from hsdump.spool.sweep import Swept, _remove_abandoned, sweep_dead_clients, sweep_dead_spools
from hsdump.spool.writer import Refused, SpoolWriter

SHAPE = StateShape(layers=(2, 4), hidden_size=8, dtype="bfloat16", final_state="post_norm")
KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for folder in SpoolPaths(tmp_path / "hsdump-spool").folders():
        folder.mkdir()
    return tmp_path / "hsdump-spool"


def rid(run: str, num_tokens: int = 3, attempt: int = 0) -> Rid:
    return Rid(run, KEY, attempt, num_tokens)


def write_entry(writer: SpoolWriter, which: Rid) -> None:
    entry = writer.begin(which)
    layout = entry.layout
    ids = b"".join(token.to_bytes(8, "little") for token in range(which.num_tokens))
    writer.write(entry, layout.payload_offset, memoryview(ids))
    for index in range(len(SHAPE.names)):
        writer.write(entry, layout.state_offset(index), memoryview(bytes([index + 1]) * layout.state_bytes))
    assert writer.publish(entry)


def test_a_rid_survives_the_round_trip_and_nothing_else_passes() -> None:
    run = new_run()
    assert Rid.parse(str(rid(run, 17, 3))) == rid(run, 17, 3)
    for text in (
        "HEALTH_CHECK_17",
        "hsdump-",
        f"hsdump-{run}-{KEY}-0-0",  # no tokens
        f"hsdump-{run}-{KEY}-0-3/../../etc/passwd",
        f"hsdump-{run}-{KEY[:-1]}-0-3",
        f"hsdump-{run}-{KEY}-0-3\n",
    ):
        assert Rid.parse(text) is None


def test_an_entry_comes_out_as_it_went_in(root: Path) -> None:
    reader = SpoolReader(root, new_run())
    which = rid(reader.run)
    assert reader.take(which) is None
    write_entry(SpoolWriter(root, SHAPE, max_bytes=1 << 20, keep_free_bytes=0), which)
    entry = reader.take(which)
    assert isinstance(entry, ReadyEntry)
    assert bytes(entry.token_ids()) == b"".join(token.to_bytes(8, "little") for token in range(3))
    assert [bytes(entry.state(i)) for i in range(3)] == [bytes([i + 1]) * 48 for i in range(3)]
    assert entry.layout.shape == SHAPE
    entry.release()
    assert reader.take(which) is None
    reader.close()
    assert [path for folder in SpoolPaths(root).entries() for path in folder.iterdir()] == []


def test_entry_bytes_is_an_upper_bound() -> None:
    for num_tokens in (1, 3, 64, 1000):
        _, layout = encode_header(str(rid(new_run(), num_tokens)), SHAPE, num_tokens)
        assert layout.total_bytes <= entry_bytes(SHAPE, num_tokens)


def test_the_header_bytes_are_frozen() -> None:
    """Server and client may be of different versions: change these bytes only with a new MAGIC."""
    head, layout = encode_header("hsdump-x", SHAPE, 2)
    body = (
        b'{"num_tokens":2,"rid":"hsdump-x","shape":{"dtype":"bfloat16","final_state":"post_norm",'
        b'"hidden_size":8,"layers":[2,4]}}'
    )
    assert head.startswith(b"HSDSPL1\n" + (len(head) - 16).to_bytes(8, "little") + body)
    assert head[16 + len(body) :].strip(b" ") == b""
    assert (layout.payload_offset, layout.state_offset(0), layout.state_offset(1)) == (192, 256, 320)
    assert decode_header(head) == ("hsdump-x", layout)


@pytest.mark.parametrize("damage", [b"", b"HSDSPL2\n" + bytes(100), b"HSDSPL1\n" + b"\xff" * 100])
def test_damaged_bytes_are_no_entry(root: Path, damage: bytes) -> None:
    with pytest.raises(ValueError, match="no spool entry"):
        decode_header(damage)
    if damage:
        reader = SpoolReader(root, new_run())
        (root / "ready" / str(rid(reader.run))).write_bytes(damage)
        with pytest.raises(SpoolError, match="is damaged"):
            reader.take(rid(reader.run))
        reader.close()


def test_a_truncated_entry_is_not_taken(root: Path) -> None:
    reader = SpoolReader(root, new_run())
    write_entry(SpoolWriter(root, SHAPE, max_bytes=1 << 20, keep_free_bytes=0), rid(reader.run))
    os.truncate(root / "ready" / str(rid(reader.run)), 300)
    with pytest.raises(SpoolError, match=r"is damaged: it holds 3 rows of .* in 300 bytes"):
        reader.take(rid(reader.run))
    reader.close()


def test_beyond_the_quota_a_request_is_refused_at_once(root: Path) -> None:
    run = new_run()
    writer = SpoolWriter(root, SHAPE, max_bytes=800, keep_free_bytes=0)
    write_entry(writer, rid(run, attempt=0))
    with pytest.raises(Refused, match="448 of 800 bytes in use"):
        writer.begin(rid(run, attempt=1))
    with pytest.raises(Refused, match="bytes free"):
        SpoolWriter(root, SHAPE, max_bytes=1 << 60, keep_free_bytes=1 << 60).begin(rid(run, attempt=2))
    assert list((root / "partial").iterdir()) == []


def test_a_failure_note_reaches_the_client_once(root: Path) -> None:
    reader = SpoolReader(root, new_run())
    writer = SpoolWriter(root, SHAPE, max_bytes=1 << 20)
    writer.fail(rid(reader.run), "prefix-cached", "rows 0..7")
    assert reader.take(rid(reader.run)) == FailedNote("prefix-cached", "rows 0..7")
    assert reader.take(rid(reader.run)) is None
    reader.close()


def test_publishing_what_the_client_swept_away_is_harmless(root: Path) -> None:
    writer = SpoolWriter(root, SHAPE, max_bytes=1 << 20, keep_free_bytes=0)
    entry = writer.begin(rid(new_run()))
    (root / "partial" / str(entry.rid)).unlink()
    assert not writer.publish(entry)


def test_a_spool_that_is_not_there_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="in containers share /dev/shm"):
        SpoolReader(tmp_path / "nowhere", new_run())


def test_leftovers_of_a_killed_client_are_swept_and_those_of_a_living_one_stay(root: Path) -> None:
    writer = SpoolWriter(root, SHAPE, max_bytes=1 << 20, keep_free_bytes=0)
    living = SpoolReader(root, new_run())
    code = (
        "import sys, time; from pathlib import Path; from hsdump.spool.reader import SpoolReader\n"
        "SpoolReader(Path(sys.argv[1]), 'deadbeef'); print('open', flush=True); time.sleep(60)"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(root)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    write_entry(writer, rid("deadbeef"))
    writer.begin(rid("deadbeef", attempt=1))
    writer.fail(rid("deadbeef", attempt=2), "spool-full", "")
    write_entry(writer, rid(living.run))
    assert sweep_dead_clients(root).files == 0
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    swept = sweep_dead_clients(root)
    assert swept.files == 3
    assert swept.num_bytes > 2 * SHAPE.bytes_per_token
    assert not (root / "clients" / "deadbeef.lock").exists()
    assert isinstance(living.take(rid(living.run)), ReadyEntry)
    living.close()


def test_spools_of_dead_servers_are_swept(tmp_path: Path, root: Path) -> None:
    lock = AliveLock(SpoolPaths(root).server_lock(os.getpid()))
    assert sweep_dead_spools(tmp_path).spools == ()
    lock.release()
    (tmp_path / "hsdump-not-a-spool").mkdir()
    (tmp_path / "another").mkdir()
    assert sweep_dead_spools(tmp_path).spools == (str(root),)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["another", "hsdump-not-a-spool"]


def test_a_lock_is_held_by_the_living_only(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    assert not is_held(path)
    lock = AliveLock(path)
    assert is_held(path)
    with pytest.raises(BlockingIOError):
        AliveLock(path)
    lock.release()
    assert not is_held(path)


@pytest.mark.parametrize("name", ["server", "client"])
def test_a_lock_that_is_just_being_taken_is_no_dead_processs(
    root: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a server start at the same moment, as do actors, and each clears up after the dead."""
    take, paths, other = locks.take, SpoolPaths(root), Announcement(root)

    def clear_up() -> None:
        other._remove_dead()
        sweep_dead_clients(root)

    def take_after_others(fd: int) -> bool:
        monkeypatch.setattr(locks, "take", take)
        clear_up()
        return take(fd)

    monkeypatch.setattr(locks, "take", take_after_others)
    path = paths.server_lock(os.getpid() + 1) if name == "server" else paths.client_lock(new_run())
    lock = AliveLock(path)
    assert is_held(path)
    assert path.read_text() == str(os.getpid())
    clear_up()
    assert is_held(path)
    lock.release()
    assert not path.exists()


def test_a_dead_ranks_ring_is_removed_when_its_number_is_free_again(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gigabytes take longer than a rank waits which got the same number after a container's restart."""
    paths, unlink, others = SpoolPaths(root), Path.unlink, []
    for path in (paths.server_lock(7), paths.server_file(7), paths.ring(7)):
        path.touch()

    def slow(path: Path, missing_ok: bool = False) -> None:
        if path.name.startswith("ring-7"):
            others.append(AliveLock(paths.server_lock(7)))
            paths.ring(7).write_text("its new ring")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", slow)
    server = Announcement(root)
    assert len(others) == 1
    assert others[0].in_place
    assert [path.name for path in root.glob("ring-*")] == ["ring-7"]
    assert paths.ring(7).read_text() == "its new ring"
    server._lock.release()
    others[0].release()


def test_whoever_waits_for_a_lock_that_is_moved_away_takes_the_one_in_its_place(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep holds the lock of a dead spool as long as it removes its gigabytes, under another name."""
    path, take = SpoolPaths(root).launcher_lock, locks.take
    sweeping = AliveLock(path)

    def take_after_the_move(fd: int) -> bool:
        monkeypatch.setattr(locks, "take", take)
        sweeping.path = SpoolPaths(root.rename(tmp_path / "hsdump-spool-7.dead")).launcher_lock
        root.mkdir()
        return take(fd)

    monkeypatch.setattr(locks, "take", take_after_the_move)
    lock = AliveLock(path)
    assert lock.in_place
    assert sweeping.in_place
    with pytest.raises(BlockingIOError):
        AliveLock(path)
    lock.release()


def test_a_look_at_a_lock_does_not_refuse_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "a.lock"
    path.touch()
    with path.open() as looking, ThreadPoolExecutor(1) as pool:
        fcntl.flock(looking, fcntl.LOCK_SH)
        lock = pool.submit(AliveLock, path)
        time.sleep(2 * locks.PAUSE_S)
        assert not lock.done()
        fcntl.flock(looking, fcntl.LOCK_UN)
        lock.result().release()


def test_a_sweep_leaves_a_folder_alone_in_which_a_server_starts(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher, or the server itself, takes its lock between a sweep's look and its removal."""
    launcher = AliveLock(SpoolPaths(root).launcher_lock)
    assert _remove_abandoned(root) == Swept()
    launcher.release()
    look, started = sweep.is_abandoned, []

    def look_and_start(place: Path, *, besides: Path | None = None) -> bool:
        found = look(place, besides=besides)
        if not started:
            started.append(Announcement(root))
        return found

    monkeypatch.setattr(sweep, "is_abandoned", look_and_start)
    assert _remove_abandoned(root) == Swept()
    assert started[0]._lock.in_place
    assert SpoolPaths(root).partial.is_dir()
    started[0]._lock.release()
    assert sweep_dead_spools(tmp_path).spools == (str(root),)
    assert list(tmp_path.iterdir()) == []


def test_a_server_moves_in_although_a_sweep_takes_the_folder_away(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = locks.take

    def take_after_the_sweep(fd: int) -> bool:
        monkeypatch.setattr(locks, "take", take)
        assert sweep_dead_spools(tmp_path).spools == (str(root),)
        return take(fd)

    monkeypatch.setattr(locks, "take", take_after_the_sweep)
    server = Announcement(root)
    assert server._lock.in_place
    assert all(folder.is_dir() for folder in SpoolPaths(root).folders())


def test_a_removal_that_was_cut_short_is_ended_by_the_next_sweep(tmp_path: Path) -> None:
    half = tmp_path / "hsdump-x-77.dead"
    half.mkdir()
    (half / "ring-7").write_text("x")
    assert sweep_dead_spools(tmp_path).spools == (str(half),)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_while_moving_in_gives_the_lock_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Announcement, "_remove_dead", lambda _self: (_ for _ in ()).throw(RuntimeError("disk")))
        with pytest.raises(RuntimeError):
            Announcement(root)
    (root / "server-foo.lock").touch()
    Announcement(root).decline("disk")
    assert "disk" in SpoolPaths(root).server_file(os.getpid()).read_text()


def test_another_users_lock_counts_as_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError

    path = tmp_path / "a.lock"
    path.touch()
    monkeypatch.setattr(locks.os, "open", refuse)
    assert is_held(path)
    with locks.left_behind(path) as dead:
        assert not dead
