"""The one owner of names in the spool: request ids, files, folders.

A request id says all that the server needs to know, so the server keeps no list of samples and nothing has to be
registered before a request is sent.
"""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - the point of a spool is to be in shared memory
PREFIX = "hsdump-"
ENV_SPOOL = "HSDUMP_SPOOL"
ENV_DUMP_DIR = "SGLANG_HS_DUMP_DIR"
"""Switches a patched server on, as HSDUMP_SPOOL does for a server with the plugin; either names the spool."""

ENV_LAYERS = "HSDUMP_LAYERS"
DEFAULT_SPOOL_BYTES = 8 << 30
"""Of all entries, or of all rings of a host together."""

ENV_SPOOL_BYTES = "HSDUMP_SPOOL_BYTES"
ENV_HAND_OVER = "HSDUMP_HAND_OVER"
ENV_SHARE_RANKS = "HSDUMP_SHARE_RANKS"
ENV_STAGING_BYTES = "HSDUMP_STAGING_BYTES"

_RID = re.compile(r"hsdump-([0-9a-f]{8})-([0-9a-f]{32})-([0-9]{1,4})-([0-9]{1,9})(?:-d([0-9]{1,9}))?")
_RUN = re.compile(r"[0-9a-f]{8}")


@dataclass(frozen=True, slots=True)
class Rid:
    """A capture request's id, `hsdump-<run>-<sample>-<attempt>-<num_tokens>`, of a request that generates with
    `-d<prompt_tokens>` at its end."""

    run: str
    """8 hex digits: one run of one client."""

    key: str
    """32 hex digits: the sample (`hsdump.samples.sample_key`)."""

    attempt: int

    num_tokens: int
    """Rows that make the entry complete."""

    prompt_tokens: int | None = None
    """Of a request that generates: the rows before it are prefill, those from it on must come from decode steps."""

    def __str__(self) -> str:
        text = f"{PREFIX}{self.run}-{self.key}-{self.attempt}-{self.num_tokens}"
        return text if self.prompt_tokens is None else f"{text}-d{self.prompt_tokens}"

    @classmethod
    def parse(cls, text: str) -> Rid | None:
        """Read an id, or give None for a request that is not hsdump's.

        Only digits and hex pass, so an id is safe as a file name.
        """
        match = _RID.fullmatch(text)
        if match is None:
            return None
        run, key, attempt, num_tokens, prompt_tokens = match.groups()
        prompt = None if prompt_tokens is None else int(prompt_tokens)
        if not int(num_tokens) or (prompt is not None and not 0 < prompt <= int(num_tokens)):
            return None
        return cls(run, key, int(attempt), int(num_tokens), prompt)


def new_run() -> str:
    """Give a fresh run id."""
    return secrets.token_hex(4)


def new_spool_dir() -> Path:
    """Name a folder for one server's spool; nothing is created."""
    return SHARED_MEMORY / f"{PREFIX}{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class SpoolPaths:
    """Where things lie in one spool."""

    root: Path

    @property
    def partial(self) -> Path:
        return self.root / "partial"

    @property
    def ready(self) -> Path:
        return self.root / "ready"

    @property
    def failed(self) -> Path:
        return self.root / "failed"

    @property
    def clients(self) -> Path:
        return self.root / "clients"

    def folders(self) -> tuple[Path, ...]:
        return (self.root, self.partial, self.ready, self.failed, self.clients)

    def server_file(self, pid: int) -> Path:
        return self.root / f"server-{pid}.json"

    def server_lock(self, pid: int) -> Path:
        return self.root / f"server-{pid}.lock"

    def ring(self, pid: int) -> Path:
        return self.root / f"ring-{pid}"

    def dead_ring(self, pid: int | str) -> Path:
        """A ring of a process that is gone, while it is being removed; `*` for all of them."""
        return self.root / f"ring-{pid}.dead"

    @property
    def launcher_lock(self) -> Path:
        """Held by the `hsdump serve` that made the spool, and by whoever removes it."""
        return self.root / "launcher.lock"

    @property
    def ring_lock(self) -> Path:
        """Held by the one client that empties the rings."""
        return self.root / "ring-reader.lock"

    def client_lock(self, run: str) -> Path:
        return self.clients / f"{run}.lock"

    def entries(self) -> tuple[Path, ...]:
        """The folders whose files are named by request id."""
        return (self.partial, self.ready, self.failed)


def is_run(text: str) -> bool:
    """Tell whether this is a run id."""
    return _RUN.fullmatch(text) is not None
