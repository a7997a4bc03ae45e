"""A local store whose shards go to a URL: who may write there, what is there, and how one continues the other.

The local folder stays a store of its own: it may lack shards that were uploaded (`remote.json` says where they are).
At the URL there is, beside the shards, an index of exactly those, so that it is a whole store to a reader elsewhere.
"""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hsdump.errors import StoreBusy, StoreCorrupt, StoreError, StoreMismatch
from hsdump.store.format import (
    INDEX_NAME,
    MANIFEST_NAME,
    REMOTE_NAME,
    SHARDS_FOLDER,
    ShardHeader,
    decode_header,
    header_size,
    shard_name,
    shard_number,
)
from hsdump.store.fs import Fs
from hsdump.store.index import Event, Index, utc_now
from hsdump.store.manifest import Manifest, decode_manifest, differences, encode_manifest
from hsdump.store.remote import Remote, RemoteError

OWNER_NAME = "owner.json"

FIRST_BYTES = 1 << 16
"""Read of a shard at once to see its header."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteOptions:
    """Where shards go, and what stays here."""

    url: str | None = None
    """None: where the folder's own `remote.json` says, if it has one."""

    local_bytes: int | None = None
    """Most bytes of committed shards in the local folder; beyond, uploaded ones are deleted here. At most two
    unfinished shards come on top. None keeps all.
    """

    patience_s: float = 300.0
    """An upload is tried again for so long before the writer gives up; nothing is lost then, only not uploaded."""

    publish_s: float = 60.0
    """A reader elsewhere sees new samples after at most so long, and the time that their shards take."""

    connect: Callable[[str], Remote] = Remote


class LocalPart(msgspec.Struct, frozen=True, kw_only=True):
    """`remote.json`: this folder is the local part of the store at a URL."""

    url: str
    owner: str
    """Random; tells this folder from every other that may write there."""


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """`owner.json` at the URL: who writes there."""

    owner: str
    host: str
    pid: int
    folder: str
    at: str


def read_local_part(path: Path) -> LocalPart | None:
    """Read where a local store's shards are, besides here.

    Raises:
        StoreCorrupt: `remote.json` is damaged.
    """
    place = path / REMOTE_NAME
    if not place.exists():
        return None
    try:
        return msgspec.json.decode(place.read_bytes(), type=LocalPart)
    except msgspec.MsgspecError as error:
        fix = 'write {"url": "...", "owner": "..."} there, with the owner that URL/owner.json names'
        raise StoreCorrupt(f"{place} cannot be read: {error}", fix) from None


class Attached:
    """The remote side of a store that is open for writing."""

    def __init__(self, path: Path, part: LocalPart, options: RemoteOptions) -> None:
        self.path, self.part, self.options = path, part, options
        self.remote = options.connect(part.url)
        self.shards: dict[int, int] = {}
        """Number to bytes of what was there when the store was opened."""

        self._new_part = self._new_claim = False

    @classmethod
    def open(cls, path: Path, options: RemoteOptions, fs: Fs) -> Attached | None:
        """Take the URL for this folder; None for a store that has no remote side.

        Raises:
            StoreMismatch: the folder belongs to another URL.
            StoreBusy: another folder writes there.
            RemoteError: it cannot be reached.
        """
        part = read_local_part(path)
        if part is None and options.url is None:
            return None
        url = options.connect(options.url).url if options.url else None
        is_new = part is None
        if part is None:
            assert url is not None
            part = LocalPart(url=url, owner=uuid.uuid4().hex)
            fs.write_file(path / REMOTE_NAME, msgspec.json.encode(part) + b"\n")
        elif url not in {None, part.url}:
            fix = "leave the URL out, or write to a new folder"
            raise StoreMismatch(f"{path} is the local part of {part.url}, not of {url}", fix)
        attached = cls(path, part, options)
        attached._new_part = is_new
        try:
            attached._claim()
        except StoreBusy:
            attached.give_up(fs)
            raise
        names = attached.remote.sizes(SHARDS_FOLDER)
        numbered = ((shard_number(name), size) for name, size in names.items())
        attached.shards = {number: size for number, size in numbered if number is not None}
        return attached

    def restore_manifest(self, fs: Fs) -> None:
        """Begin with the manifest that is at the URL, where the folder has none."""
        if not (self.path / MANIFEST_NAME).exists():
            data = self.remote.read(MANIFEST_NAME)
            if data is not None:
                fs.write_file(self.path / MANIFEST_NAME, data)

    def agree_on(self, manifest: Manifest, *, put: bool) -> None:
        """Find the manifest there to be of the same data set.

        Args:
            put: write this one, where there is none yet.

        Raises:
            StoreMismatch: it is of another one.
        """
        data = self.remote.read(MANIFEST_NAME)
        if data is None:
            if put:
                self.remote.put_bytes(MANIFEST_NAME, encode_manifest(manifest))
            return
        where = f"{self.part.url}/{MANIFEST_NAME}"
        found = differences(decode_manifest(data, where), manifest)
        if found:
            what = f"{self.part.url} holds another data set:\n    " + "\n    ".join(found)
            raise StoreMismatch(what, "use the same settings again, or another URL")

    def restore_index(self, fs: Fs) -> bool:
        """Begin with the index that was last published; False when there was none."""
        target = self.path / INDEX_NAME
        partial = target.with_name(target.name + ".partial")
        fs.remove(partial)
        if not self.remote.get_file(INDEX_NAME, partial):
            return False
        fs.rename(partial, target)
        fs.sync_folder(self.path)
        return True

    def has(self, number: int, num_bytes: int) -> bool:
        """Tell whether a shard is there, as long as it must be."""
        return self.shards.get(number) == num_bytes

    def read_header(self, number: int) -> tuple[ShardHeader, int]:
        """Read and check the header of a shard at the URL.

        Raises:
            StoreCorrupt: it is none of ours, or it was another shard.
        """
        name, size = shard_name(number), self.shards[number]
        first = self.remote.read(f"{SHARDS_FOLDER}/{name}", 0, min(FIRST_BYTES, size)) or b""
        length = header_size(first, size, name)
        if length > len(first):
            first = self.remote.read(f"{SHARDS_FOLDER}/{name}", 0, length) or b""
        header = decode_header(first[:length], size, name)
        if header.number != number:
            raise StoreCorrupt(f"{name} is shard {header.number} under another name", "give it its own name back")
        return header, length

    def adopt_unknown(self, index: Index, here: set[int], manifest: Manifest, events: list[Event]) -> None:
        """Enter shards that are there and that neither the index nor the folder has, as after a loss of both."""
        known = {shard.number for shard in index.shards()} | here | set(index.dropped_remote())
        for number in sorted(self.shards.keys() - known):
            try:
                header, header_bytes = self.read_header(number)
                if header.manifest_digest != manifest.digest:
                    raise StoreMismatch("it was made with another manifest", "")
            except (StoreCorrupt, StoreMismatch) as error:
                events.append(Event(kind="remote-shard-ignored", subject=shard_name(number), detail=error.what))
                continue
            with index.transaction():
                index.add_shard(header, header_bytes)
            detail = f"{len(header.samples)} samples at {self.part.url}"
            events.append(Event(kind="remote-shard-indexed", subject=shard_name(number), detail=detail))

    def give_up(self, fs: Fs) -> None:
        """The store cannot be opened: leave the URL and the folder as they were found."""
        if self._new_claim:
            with suppress(RemoteError):  # what cannot be opened is the news; the claim says where it came from
                self.release()
        if self._new_part:
            fs.remove(self.path / REMOTE_NAME)

    def release(self) -> None:
        """Let other folders write there."""
        self.remote.remove(OWNER_NAME)

    def _claim(self) -> None:
        mine = Owner(
            owner=self.part.owner, host=socket.gethostname(), pid=os.getpid(), folder=str(self.path), at=utc_now()
        )
        if self.remote.create(OWNER_NAME, msgspec.json.encode(mine)):
            self._new_claim = True
            return
        data = self.remote.read(OWNER_NAME)
        try:
            other = msgspec.json.decode(data or b"", type=Owner)
        except msgspec.MsgspecError as error:
            raise StoreError(f"{self.part.url}/{OWNER_NAME} cannot be read: {error}", _release(self.part.url)) from None
        if other.owner != self.part.owner:
            what = (
                f"{self.part.url} is being written from {other.folder} by process {other.pid} on {other.host} "
                f"since {other.at}"
            )
            raise StoreBusy(what, f"wait for it to end; if that machine is lost: {_release(self.part.url)}")
        self.remote.put_bytes(OWNER_NAME, msgspec.json.encode(mine))


def release(url: str) -> Owner | None:
    """Free a store at a URL whose writer is gone for good; gives who that was."""
    remote = Remote(url)
    data = remote.read(OWNER_NAME)
    remote.remove(OWNER_NAME)
    try:
        return msgspec.json.decode(data, type=Owner) if data else None
    except msgspec.MsgspecError:
        return None


def _release(url: str) -> str:
    return f"hsdump store release {url}"
