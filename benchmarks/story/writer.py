"""A process that does nothing but write to a disk at a steady rate: what that alone costs a server beside it.

python -m benchmarks.story.writer FOLDER BYTES_PER_S
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CHUNK_BYTES = 8 << 20
FILE_BYTES = 1 << 30
KEPT_FILES = 4


def write(folder: Path, bytes_per_s: float) -> None:
    """Write files one after the other, each made durable, until this process is stopped; the last few are kept."""
    chunk, begin, written, number = os.urandom(CHUNK_BYTES), time.monotonic(), 0, 0
    while True:
        path = folder / f"{number}.bin"
        with path.open("wb", buffering=0) as file:
            for _ in range(FILE_BYTES // CHUNK_BYTES):
                file.write(chunk)
                written += CHUNK_BYTES
                time.sleep(max(begin + written / bytes_per_s - time.monotonic(), 0.0))
            os.fsync(file.fileno())
        number += 1
        (folder / f"{number - KEPT_FILES}.bin").unlink(missing_ok=True)


@contextmanager
def writing(folder: Path, bytes_per_s: float) -> Iterator[None]:
    """Have it written beside what is done meanwhile; nothing of it stays."""
    folder.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.story.writer", str(folder), str(bytes_per_s)])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), float(sys.argv[2]))
