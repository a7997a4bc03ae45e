"""A process that does nothing but write to a disk at a steady rate: what that alone costs a server beside it.

python -m benchmarks.story.writer FOLDER BYTES_PER_S
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 8 << 20
FILE_BYTES = 1 << 30
THREADS = 2
"""One core copies some 0.5 GB/s into the page cache of a virtual machine."""


@dataclass
class Written:
    """What a writer did."""

    bytes_per_s: float = 0.0


def write(folder: Path, bytes_per_s: float) -> None:
    """Write files one after the other in each of a few threads, each made durable and then overwritten, until this
    process is stopped or its parent is gone; print how many bytes that were.
    """
    stop, parent = threading.Event(), os.getppid()
    written = [0] * THREADS
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())

    def fill(which: int) -> None:
        chunk, begin_s, path = os.urandom(CHUNK_BYTES), time.monotonic(), folder / f"{which}.bin"
        while not stop.is_set():
            with path.open("wb", buffering=0) as file:
                while not stop.is_set() and file.tell() < FILE_BYTES:
                    file.write(chunk)
                    written[which] += CHUNK_BYTES
                    stop.wait(max(begin_s + THREADS * written[which] / bytes_per_s - time.monotonic(), 0.0))
                os.fsync(file.fileno())

    threads = [threading.Thread(target=fill, args=(which,)) for which in range(THREADS)]
    for thread in threads:
        thread.start()
    while not stop.wait(1.0):
        if os.getppid() != parent or not all(thread.is_alive() for thread in threads):
            stop.set()
            sys.exit("the parent or a thread is gone")
    print(sum(written), flush=True)


@contextmanager
def writing(folder: Path, bytes_per_s: float) -> Iterator[Written]:
    """Have it written beside what is done meanwhile; nothing of it stays.

    Raises:
        RuntimeError: it ended by itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.story.writer", str(folder), str(bytes_per_s)]
    found, begin_s = Written(), time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield found
            if process.poll() is not None:
                raise RuntimeError(f"the writer ended with {process.returncode}")
            seconds = time.monotonic() - begin_s
            process.terminate()
            found.bytes_per_s = int(process.communicate()[0]) / seconds
        finally:
            process.kill()
            process.wait()
            shutil.rmtree(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), float(sys.argv[2]))
