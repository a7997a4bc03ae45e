"""A folder at a URL, through fsspec, in which a file is there complete or not at all.

Object stores put whole objects, so what a reader finds is never half. On file systems a file is written under another
name and renamed.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hsdump.errors import StoreError, UsageError

OBJECT_STORES = frozenset(("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "memory"))
"""Protocols whose put replaces an object as a whole."""

FILE_SYSTEMS = frozenset(("file", "local"))

_URL = re.compile(r"([a-z][a-z0-9]+)::?/{1,3}(.+)")


class RemoteError(StoreError):
    """The remote side did not do what was asked."""


def as_url(place: str | os.PathLike[str]) -> str | None:
    """Give the URL that a place is, or None for a path.

    `Path("s3://bucket/store")` is `s3:/bucket/store`: command lines and functions that take paths bring URLs in this
    form, so it is read as the URL that it was.
    """
    text = os.fspath(place)
    match = _URL.fullmatch(text)
    if match is None or (match[1] not in OBJECT_STORES | FILE_SYSTEMS and "://" not in text):
        return None
    slash = "/" if match[1] in FILE_SYSTEMS else ""
    return f"{match[1]}://{slash}{match[2].strip('/')}"


class Remote:
    """One store's folder at a URL. May be used by several threads, and kept over a fork."""

    def __init__(self, url: str) -> None:
        """Args:
        url: as fsspec takes it; credentials and endpoints come from where its file systems look for them.

        Raises:
            UsageError: no fsspec, no driver for this protocol, or one that may show half a file.
        """
        self.url = as_url(url) or url
        self._protocol = self.url.partition("://")[0]
        if self._protocol not in OBJECT_STORES | FILE_SYSTEMS:
            what = f"{url}: {self._protocol} does not promise that a file appears as a whole"
            raise UsageError(what, "use s3://, gs:// or az://, or file:// for a mounted folder")
        self._fs: Any = None
        self._pid = 0
        self._connected()

    def put_file(self, local: Path, name: str) -> None:
        """Upload a file; it shows up complete or not at all, in the place of what had its name.

        Raises:
            RemoteError: it is not there afterwards, or not with its length.
        """
        fs, target = self._connected(), self._path(name)
        with self._translated("put", name):
            if self._protocol in FILE_SYSTEMS:
                fs.makedirs(fs._parent(target), exist_ok=True)
                partial = f"{target}.{uuid.uuid4().hex}.partial"
                fs.put_file(str(local), partial)
                _sync(Path(partial))
                Path(partial).replace(target)
            else:
                fs.put_file(str(local), target)
            fs.invalidate_cache()
            found, expected = fs.info(target)["size"], local.stat().st_size
        if found != expected:
            raise RemoteError(
                f"{self.url}/{name} has {found} bytes instead of {expected}", "run the same command again"
            )

    def put_bytes(self, name: str, data: bytes) -> None:
        """Write a small file as a whole."""
        fs, target = self._connected(), self._path(name)
        with self._translated("put", name):
            if self._protocol in FILE_SYSTEMS:
                fs.makedirs(fs._parent(target), exist_ok=True)
                partial = Path(f"{target}.{uuid.uuid4().hex}.partial")
                partial.write_bytes(data)
                _sync(partial)
                partial.replace(target)
            else:
                fs.pipe_file(target, data)

    def create(self, name: str, data: bytes) -> bool:
        """Write a small file that must not be there yet; False when it is."""
        fs, target = self._connected(), self._path(name)
        with self._translated("create", name):
            if self._protocol in FILE_SYSTEMS:
                fs.makedirs(fs._parent(target), exist_ok=True)
            fs.invalidate_cache()
            if fs.exists(target):
                return False
            try:
                fs.pipe_file(target, data, mode="create")
            except FileExistsError:
                return False
        return True

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes | None:
        """Read a file or a part of it; None when there is no such file."""
        with self._translated("read", name):
            try:
                return bytes(self._connected().cat_file(self._path(name), start=start, end=end))
            except FileNotFoundError:
                return None

    def get_file(self, name: str, local: Path) -> bool:
        """Download a file; False when there is none."""
        with self._translated("get", name):
            try:
                self._connected().get_file(self._path(name), str(local))
            except FileNotFoundError:
                return False
        return True

    def sizes(self, folder: str) -> dict[str, int]:
        """List the files of a folder with their bytes, as they are now."""
        fs = self._connected()
        with self._translated("list", folder):
            fs.invalidate_cache()
            try:
                found = fs.ls(self._path(folder), detail=True, refresh=True)
            except FileNotFoundError:
                return {}
            return {entry["name"].rpartition("/")[2]: entry["size"] for entry in found if entry["type"] == "file"}

    def remove(self, name: str) -> None:
        """Delete a file; one that is gone is fine."""
        with self._translated("remove", name):
            try:
                self._connected().rm_file(self._path(name))
            except FileNotFoundError:
                return

    def _path(self, name: str) -> str:
        return f"{self.url.partition('://')[2]}/{name}"

    def _connected(self) -> Any:
        """A file system's connections do not survive a fork, so a child makes its own."""
        if self._pid != os.getpid():
            try:
                import fsspec

                self._fs = fsspec.filesystem(self._protocol, skip_instance_cache=self._fs is not None)
            except ImportError as error:
                what = f"{self.url} cannot be reached: {error}"
                raise UsageError(
                    what, "pip install 'hsdump[remote]' (s3), or the fsspec driver that it names"
                ) from None
            self._pid = os.getpid()
        return self._fs

    @contextmanager
    def _translated(self, act: str, name: str) -> Iterator[None]:
        """The one place where drivers' exceptions end; each driver has its own, of no common kind."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:
            what = f"{self.url}: cannot {act} {name}: {type(error).__name__}: {error}"
            fix = "see that the URL is reachable and your credentials hold, then run the same command again"
            raise RemoteError(what, fix) from error


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
