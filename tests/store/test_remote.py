"""Stores with a URL: a real S3 protocol (moto's server on this machine), a mounted folder, and a remote side that dies.

The faults go to fsspec's memory file system, whose files appear as a whole as an object store's do.
"""

from __future__ import annotations

import json
import pickle
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from hsdump.cli.main import main
from hsdump.errors import StoreBusy, StoreCorrupt, StoreError, StoreMismatch, UsageError
from hsdump.store import Store, StoreWriter, WriterOptions
from hsdump.store.attach import RemoteOptions, release
from hsdump.store.format import shard_path
from hsdump.store.remote import Remote, RemoteError, as_url
from hsdump.store.scrub import repair, scrub
from hsdump.store.surgery import SurgeryOptions, merge, recode, remove
from hsdump.torch import HiddenStateDataset
from hsdump.verify import verify_store
from tests.store.faults import Crash, FaultyFs
from tests.store.making import Made, assert_equal, assert_holds, fill, make_manifest, make_sample

SMALL = 1
"""Bytes after which a shard is closed: every sample has its own."""


@pytest.fixture
def url() -> Iterator[str]:
    """A new place in fsspec's memory."""
    place = f"memory://{uuid.uuid4().hex}/store"
    yield place
    fsspec.filesystem("memory").rm(place.partition("//")[2].partition("/")[0], recursive=True)


@pytest.fixture(scope="module")
def s3(request: pytest.FixtureRequest) -> Iterator[Callable[[], str]]:
    """A bucket of moto's server; gives new URLs in it."""
    from moto.server import ThreadedMotoServer

    patch = pytest.MonkeyPatch()
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        patch.setenv(name, value)
    fsspec.filesystem("s3").mkdir("states")
    yield lambda: f"s3://states/{uuid.uuid4().hex}"
    fsspec.filesystem("s3").clear_instance_cache()
    patch.undo()
    server.stop()


def options(url: str | None, **changes: Any) -> WriterOptions:
    fs = changes.pop("fs", FaultyFs())
    return WriterOptions(shard_bytes=SMALL, fs=fs, remote=RemoteOptions(url=url, patience_s=0, **changes))


def write(path: Path, url: str | None, seeds: range, **changes: Any) -> list[Made]:
    return fill(path, seeds, options=options(url, **changes))


def shards(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "shards").iterdir())


def test_a_store_on_s3(tmp_path: Path, s3: Callable[[], str], capsys: pytest.CaptureFixture[str]) -> None:
    url, path = s3(), tmp_path / "store"
    made = write(path, url, range(5), local_bytes=0)
    assert shards(path) == []  # all uploaded, nothing kept
    assert_holds(path, made)
    assert_holds(Path(url), made)  # also as a path, which swallows a slash
    with Store(url) as store:
        assert (store.name, len(store), store.is_whole) == (url, 5, False)
        again = pickle.loads(pickle.dumps(store))  # noqa: S301 - as a loader's worker gets it
        assert_equal(again, made[3])
    assert HiddenStateDataset(url)[2].key == made[2].sample.key
    made += write(path, None, range(5, 8))  # the folder knows where its shards are
    store.refresh()
    assert len(store) == 8
    assert scrub(Path(url)).samples == scrub(path).samples == 8
    merge([Path(url)], tmp_path / "pulled", SurgeryOptions())
    assert_holds(tmp_path / "pulled", made)
    for words in (["info", url], ["ls", url], ["show", "0", "--store", url], ["scrub", url], ["push", str(path)]):
        assert main(["store", *words, "--json"]) == 0, words
    assert json.loads("{" + capsys.readouterr().out.rpartition("\n{")[2])["url"] == url
    assert main(["store", "export", url, "--to", "modelopt", "--out", str(tmp_path / "exported")]) == 0
    assert len(list((tmp_path / "exported").glob("*.pt"))) == 8


def test_a_store_in_a_mounted_folder(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mount/store"
    made = write(tmp_path / "store", url, range(3), local_bytes=0)
    assert_holds(Path(url), made)
    assert_holds(tmp_path / "mount" / "store", made)  # what is at the URL is a store like any other
    assert not list((tmp_path / "mount").rglob("*.partial"))
    remove(tmp_path / "store", [made[1].sample.key], SurgeryOptions(writer=options(None)))
    assert_holds(Path(url), [made[0], made[2]])
    assert len(shards(tmp_path / "mount" / "store")) == 2


def test_the_local_folder_stays_small(tmp_path: Path, url: str) -> None:
    path = tmp_path / "store"
    largest = 0
    with StoreWriter.open(path, make_manifest(), options=options(url, local_bytes=20_000)) as writer:
        for seed in range(40):
            one = make_sample(seed)
            writer.add(one.sample, one.states)
            writer.commit()
            largest = max(largest, sum(file.stat().st_size for file in (path / "shards").iterdir()))
        everything = sum(shard.num_bytes for shard in writer.index.shards())
    assert largest <= 20_000 < everything / 4


def test_another_folder_goes_on_where_the_first_one_ended(tmp_path: Path, url: str) -> None:
    made = write(tmp_path / "one", url, range(3))
    made += write(tmp_path / "two", url, range(3, 5))  # made of what is at the URL
    assert_holds(tmp_path / "two", made)
    with pytest.raises(StoreMismatch, match=r"layers: the store has \[2, 4\], this run has \[1, 3\]"):
        StoreWriter.open(tmp_path / "three", make_manifest(layers=[1, 3]), options=options(url))
    made += write(tmp_path / "one", None, range(5, 6))
    assert_holds(Path(url), made)


def test_two_folders_cannot_write_to_one_url(tmp_path: Path, url: str) -> None:
    with StoreWriter.open(tmp_path / "one", make_manifest(), options=options(url)):
        with pytest.raises(StoreBusy, match=rf"{url} is being written from {tmp_path}/one by process \d+ on") as caught:
            StoreWriter.open(tmp_path / "two", make_manifest(), options=options(url))
        assert f"hsdump store release {url}" in caught.value.fix
    write(tmp_path / "two", url, range(2))  # it ended
    writer = StoreWriter.open(tmp_path / "one", make_manifest(), options=options(url))
    writer.close(upload=False)  # as a machine that is lost
    owner = release(url)
    assert owner is not None
    assert owner.folder == str(tmp_path / "one")
    assert release(url) is None
    with pytest.raises(StoreMismatch, match=r"is the local part of memory://.*, not of memory://other/x"):
        StoreWriter.open(tmp_path / "two", make_manifest(), options=options("memory://other/x"))


class FaultyRemote(Remote):
    """Shares the fuse of a disk: its steps are the disk's, too."""

    def __init__(self, url: str, fs: FaultyFs) -> None:
        self.fs = fs
        super().__init__(url)

    def _step(self) -> None:
        try:
            self.fs._step()
        except OSError as error:
            raise RemoteError(f"the test's network: {error}", "") from error

    def put_file(self, local: Path, name: str) -> None:
        self._step()
        super().put_file(local, name)
        self._step()  # it arrived, and nobody hears of it

    def put_bytes(self, name: str, data: bytes) -> None:
        self._step()
        super().put_bytes(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._step()
        return super().create(name, data)

    def remove(self, name: str) -> None:
        self._step()
        super().remove(name)


@pytest.mark.parametrize("kind", ["crash", "error"])
@pytest.mark.parametrize("local_bytes", [None, 0])
def test_dying_at_any_step_here_or_there_loses_nothing(fast_folder: Path, kind: str, local_bytes: int | None) -> None:
    """At every step of disk and network: what was committed is here or there, and a reader elsewhere sees no half."""
    manifest, fuse, done = make_manifest(), 0, False
    while not done:
        fuse += 1
        path, url = fast_folder / str(fuse), f"memory://{fast_folder.name}/{fuse}"
        fs = FaultyFs(fuse, kind=kind, seed=fuse)
        faulty = options(url, local_bytes=local_bytes, fs=fs, connect=lambda place, fs=fs: FaultyRemote(place, fs))
        committed, left = [], [make_sample(seed) for seed in range(4)]
        gone = left[1].sample.key
        try:
            with StoreWriter.open(path, manifest, options=faulty) as writer:
                for one in left:
                    writer.add(one.sample, one.states)
                    committed += writer.commit()
            remove(path, [gone], SurgeryOptions(writer=faulty))
            done = fs.operations < fuse
        except (Crash, StoreError):
            if fs.dead:
                fs.lose_power()
        _assert_reader_elsewhere_sees_whole_samples(url, left)
        with StoreWriter.open(path, manifest, options=options(url, local_bytes=local_bytes)) as writer:
            assert {key for key in committed if not writer.is_committed(key)} <= {gone}
            for one in left:
                writer.add(one.sample, one.states)
            writer.commit()
        assert_holds(path, left)
        assert_holds(Path(url), left)
    assert fuse > 40


def _assert_reader_elsewhere_sees_whole_samples(url: str, made: list[Made]) -> None:
    by_key = {one.sample.key: one for one in made}
    try:
        store = Store(url, check=True)
    except StoreError:
        return  # nothing was published yet
    with store:
        for sample in store:
            assert_equal(store, by_key[sample.key])


def test_an_upload_is_tried_again_and_a_lasting_failure_stops_the_writer(tmp_path: Path, url: str) -> None:
    class Flaky(Remote):
        failures = 2

        def put_file(self, local: Path, name: str) -> None:
            if Flaky.failures:
                Flaky.failures -= 1
                raise RemoteError("the network is away", "")
            super().put_file(local, name)

    patient = RemoteOptions(url=url, patience_s=30, connect=Flaky)
    made = fill(tmp_path / "store", range(2), options=WriterOptions(remote=patient))
    assert_holds(Path(url), made)
    Flaky.failures = 10**9
    writer = StoreWriter.open(tmp_path / "store", make_manifest(), options=options(None, connect=Flaky))
    one = make_sample(7)
    writer.add(one.sample, one.states)
    assert writer.commit() == [one.sample.key]  # safe here, whatever the network does
    with pytest.raises(RemoteError, match="the network is away"):
        writer.close()
    assert_holds(tmp_path / "store", [*made, one])
    assert_holds(Path(url), made)
    with StoreWriter.reopen(tmp_path / "store") as writer:
        assert writer.shards_to_upload == 1
    assert_holds(Path(url), [*made, one])


@pytest.mark.parametrize("lost", [("index.sqlite",), ("manifest.json",), ("index.sqlite", "manifest.json")])
def test_what_is_lost_here_is_restored_from_there(tmp_path: Path, url: str, lost: tuple[str, ...]) -> None:
    path = tmp_path / "store"
    made = write(path, url, range(4), local_bytes=0)
    with StoreWriter.open(path, make_manifest(), options=options(None)) as writer:
        writer.record_failure(make_sample(9).sample, "timeout", "", attempts=1)
    for name in lost:
        (path / name).unlink()
    with StoreWriter.open(path, make_manifest(), options=options(None)) as writer:
        assert [failure.reason for failure in writer.failures().values()] == ["timeout"]
        assert [event.kind for event in writer.recovered] == (["index-restored"] if "index.sqlite" in lost else [])
    assert_holds(path, made)


def test_a_damaged_shard_here_is_replaced_by_the_one_there(tmp_path: Path, url: str) -> None:
    path = tmp_path / "store"
    made = write(path, url, range(3))
    place = shard_path(path, 1)
    place.write_bytes(place.read_bytes()[:-1])
    with StoreWriter.open(path, make_manifest(), options=options(None)) as writer:
        assert [event.kind for event in writer.recovered] == ["shard-quarantined"]
    assert_holds(path, made)
    memory = fsspec.filesystem("memory")
    data = bytearray(memory.cat_file(f"{url.partition('//')[2]}/shards/000001.safetensors"))
    data[-70] ^= 1
    memory.pipe_file(f"{url.partition('//')[2]}/shards/000001.safetensors", bytes(data))
    assert [found.number for found in scrub(Path(url)).damaged] == [1]
    report = repair(path, options=options(None))
    assert report.missing == [made[1].sample.key]
    assert_holds(Path(url), [made[0], made[2]])


def test_shards_at_the_url_that_no_index_knows_are_entered_or_named(tmp_path: Path, url: str) -> None:
    made = write(tmp_path / "one", url, range(3))
    memory, root = fsspec.filesystem("memory"), url.partition("//")[2]
    memory.rm_file(f"{root}/index.sqlite")
    memory.pipe_file(f"{root}/shards/000007.safetensors", b"x" * 640)
    with StoreWriter.open(tmp_path / "two", make_manifest(), options=options(url)) as writer:
        kinds = [event.kind for event in writer.recovered]
        assert kinds == ["remote-shard-indexed"] * 3 + ["remote-shard-ignored"]
        one = make_sample(50)
        writer.add(one.sample, one.states)
    assert_holds(tmp_path / "two", made)


def test_what_is_refused(tmp_path: Path, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = write(tmp_path / "store", url, range(2), local_bytes=0)
    with pytest.raises(UsageError, match="sftp does not promise that a file appears as a whole"):
        StoreWriter.open(tmp_path / "x", make_manifest(), options=options("sftp://host/x"))
    with pytest.raises(StoreError, match=r"memory://nothing/here is not a store"):
        Store("memory://nothing/here")
    with pytest.raises(UsageError, match="is a URL; samples are committed to a local folder first"):
        StoreWriter.open(Path(url), make_manifest())
    with pytest.raises(UsageError, match="are at a URL, which cannot be replaced in one step"):
        recode(tmp_path / "store", tmp_path / "out", "blosc2", SurgeryOptions(), replace=True)
    with pytest.raises(UsageError, match=r"verify reads files, and some shards of .* are only at"):
        verify_store(tmp_path / "store")
    fill(tmp_path / "plain", range(1))
    assert main(["store", "push", str(tmp_path / "plain")]) == 64
    assert "has no URL yet" in capsys.readouterr().err
    fsspec.filesystem("memory").rm_file(f"{url.partition('//')[2]}/shards/000000.safetensors")
    with pytest.raises(StoreCorrupt, match=rf"sample {made[0].sample.key} .*it is not there"):
        Store(tmp_path / "store")[0]
    (tmp_path / "store" / "remote.json").write_text("{")
    with pytest.raises(StoreCorrupt, match=r"remote\.json cannot be read"):
        Store(tmp_path / "store")


def test_urls_survive_being_paths() -> None:
    for text in ("s3://bucket/a/b", "file:///abs/a", "memory://x/y"):
        assert as_url(text) == as_url(Path(text)) == text
    for text in ("/abs/s3", "store", "./s3:x", "c:/x", "a/b:c/d"):
        assert as_url(text) is None
