"""How fast a store is, as shares of what this machine can do in the same minutes.

    python benchmarks/store/measure.py --folder DISK_FOLDER [--states STORE] [--out benchmarks/results]

Each pair (the store, the machine's own limit) is measured alternately, several times, and the median of the ratios
counts: on a shared machine both see the same neighbours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from hsdump.arrays import to_float32, xxh3
from hsdump.samples import TokenSample
from hsdump.store import Manifest, Store, StoreWriter, WriterOptions
from hsdump.store.codecs import decode_state, encode_state
from hsdump.store.scrub import scrub

HIDDEN, LAYERS = 7168, [2, 30, 58]
TOKENS, SAMPLES = 1024, 12
REPEATS = 7
IN_FLIGHT = 16
"""Samples that were captured and are not written, as many as `hsdump extract` has in flight."""

Numbers = dict[str, object]


def manifest(hidden_size: int = HIDDEN, **changes: object) -> Manifest:
    facts: dict[str, object] = {
        "engine": "sglang",
        "engine_version": "0.5.23",
        "model_path": "-",
        "model_digest": "-",
        "model_class": "DeepseekV3ForCausalLM",
        "num_layers": 61,
        "vocab_size": 163_840,
        "layers": LAYERS,
        "hidden_size": hidden_size,
        "dtype": "bfloat16",
        "final_state": "post_norm",
        "layer_meaning": "-",
        "tokenizer_digest": "-",
        "template_digest": "-",
        "max_tokens": 131_072,
    }
    return Manifest(**{**facts, **changes})  # type: ignore[arg-type]


def timed(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def ratios(store: Callable[[], object], limit: Callable[[], object], num_bytes: int) -> Numbers:
    """Alternate the two; rates in GB/s, the store's as a share of the limit's."""
    pairs = [(timed(store), timed(limit)) for _ in range(REPEATS)]
    return {
        "store_GB_per_s": round(num_bytes / statistics.median(pair[0] for pair in pairs) / 1e9, 3),
        "limit_GB_per_s": round(num_bytes / statistics.median(pair[1] for pair in pairs) / 1e9, 3),
        "ratio": round(statistics.median(limit_s / store_s for store_s, limit_s in pairs), 3),
        "ratio_min_max": [round(function(b / a for a, b in pairs), 3) for function in (min, max)],
    }


def commit_rate(folder: Path, repeats: int, *, checksums: bool = False) -> Numbers:
    """Raw commit against write + fsync of the same bytes into one file; with checksums, of the same bytes hashed."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    states = [rng.integers(0, 1 << 16, (TOKENS, HIDDEN), dtype=np.uint16) for _ in range(4)]
    mask = np.ones(TOKENS, np.uint8)
    samples = [TokenSample.make(f"s{i}", rng.integers(0, 1000, TOKENS), mask) for i in range(SAMPLES)]
    num_bytes = SAMPLES * sum(state.nbytes for state in states)

    def by_store() -> None:
        with StoreWriter.open(folder / "store", manifest()) as writer:
            for sample in samples:
                writer.add(sample, states)
            writer.commit()

    def plainly() -> None:
        fd = os.open(folder / "plain", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for _ in samples:
            for state in states:
                if checksums:
                    xxh3(state)
                os.write(fd, state.data.cast("B"))
        os.fsync(fd)
        os.close(fd)

    def clean() -> None:
        shutil.rmtree(folder / "store", ignore_errors=True)
        (folder / "plain").unlink(missing_ok=True)
        os.sync()

    def cleaned(act: Callable[[], None]) -> float:
        clean()
        return timed(act)

    pairs = [(cleaned(by_store), cleaned(plainly)) for _ in range(repeats)]
    clean()
    return {
        "bytes": num_bytes,
        "store_GB_per_s": round(num_bytes / statistics.median(pair[0] for pair in pairs) / 1e9, 3),
        "limit_GB_per_s": round(num_bytes / statistics.median(pair[1] for pair in pairs) / 1e9, 3),
        "ratio": round(statistics.median(plain_s / store_s for store_s, plain_s in pairs), 3),
        "ratio_min_max": [round(function(b / a for a, b in pairs), 3) for function in (min, max)],
    }


def pipeline(folder: Path, repeats: int, disk_bytes_per_s: float) -> Numbers:
    """A source that gives samples at its own pace: how much of that, or of the disk's, is committed.

    Each shard holds two samples; the source's rate is a multiple of what write + fsync reached in this run. The two
    ways of committing alternate.
    """
    rng = np.random.default_rng(0)
    states = [rng.integers(0, 1 << 16, (TOKENS, HIDDEN), dtype=np.uint16) for _ in range(4)]
    size = sum(state.nbytes for state in states)
    samples = [TokenSample.make(f"s{i}", rng.integers(0, 1000, TOKENS), np.ones(TOKENS, np.uint8)) for i in range(12)]

    def run(pace_s: float, *, second_thread: bool) -> float:
        shutil.rmtree(folder / "pipe", ignore_errors=True)
        os.sync()
        with StoreWriter.open(folder / "pipe", manifest(), options=WriterOptions(shard_bytes=2 * size)) as writer:
            started = time.perf_counter()
            for number, sample in enumerate(samples):
                time.sleep(max(0.0, started + number * pace_s - time.perf_counter()))
                writer.add(sample, states)
                if writer.is_full:
                    if second_thread:
                        writer.begin_commit()
                    else:
                        writer.commit()
            writer.commit()
            return time.perf_counter() - started

    found: Numbers = {}
    for times in (1, 2):
        pace_s = size / disk_bytes_per_s / times
        pairs = [(run(pace_s, second_thread=False), run(pace_s, second_thread=True)) for _ in range(repeats)]
        alone, beside = (statistics.median(pair[which] for pair in pairs) for which in (0, 1))
        found[f"source_{times}x_disk"] = {
            "sample_MB": round(size / 1e6, 1),
            "source_GB_per_s": round(times * disk_bytes_per_s / 1e9, 3),
            "commit_GB_per_s": round(len(samples) * size / alone / 1e9, 3),
            "begin_commit_GB_per_s": round(len(samples) * size / beside / 1e9, 3),
            "commit_of_disk": round(len(samples) * size / alone / disk_bytes_per_s, 3),
            "begin_commit_of_disk": round(len(samples) * size / beside / disk_bytes_per_s, 3),
            "gain": round(statistics.median(a / b for a, b in pairs), 3),
        }
    shutil.rmtree(folder / "pipe")
    return found


def filling(folder: Path, repeats: int, gigabytes: float) -> Numbers:
    """Much more than one shard as fast as it can be brought: one shard after the other, several side by side as in
    `hsdump extract`, also past the page cache, and plain files with one and with four writers. All alternate.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    states = [rng.integers(0, 1 << 16, (TOKENS, HIDDEN), dtype=np.uint16) for _ in range(4)]
    size = sum(state.nbytes for state in states)
    count, mask = round(gigabytes * 1e9 / size), np.ones(TOKENS, np.uint8)
    samples = [TokenSample.make(f"s{i}", rng.integers(0, 1000, TOKENS), mask) for i in range(count)]
    store, files = folder / "filled", [folder / f"plain{number}" for number in range(4)]
    ways: dict[str, Callable[[], int]] = {
        "add": lambda: _fill_store(store, samples, states, side_by_side=False),
        "begin_add": lambda: _fill_store(store, samples, states, side_by_side=True),
        "begin_add, direct": lambda: _fill_store(store, samples, states, side_by_side=True, direct=True),
        "one plain file": lambda: _fill_files(files[:1], states, count),
        "four plain files": lambda: _fill_files(files, states, count),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s: dict[str, list[float]] = {name: [] for name in ways}
    num_files: dict[str, int] = {}
    for number in range(repeats):
        for name in ways if number % 2 == 0 else reversed(ways):
            os.sync()
            started, cpu_before_s = time.perf_counter(), time.process_time()
            num_files[name] = ways[name]()
            rates[name].append(count * size / (time.perf_counter() - started) / 1e9)
            cpu_s[name].append((time.process_time() - cpu_before_s) / (count * size / 1e9))
            shutil.rmtree(store, ignore_errors=True)
            for path in files:
                path.unlink(missing_ok=True)
    return {
        "bytes": count * size,
        "sample_MB": round(size / 1e6, 1),
        "GB_per_s": {name: round(statistics.median(found), 3) for name, found in rates.items()},
        "GB_per_s_min_max": {name: [round(min(found), 3), round(max(found), 3)] for name, found in rates.items()},
        "cpu_s_a_GB": {name: round(statistics.median(found), 3) for name, found in cpu_s.items()},
        "files": num_files,
    }


def _fill_store(
    path: Path, samples: list[TokenSample], states: list[np.ndarray], *, side_by_side: bool, direct: bool = False
) -> int:
    on_their_way: deque[Future[bool]] = deque()
    with StoreWriter.open(path, manifest(), options=WriterOptions(direct=direct)) as writer:
        for sample in samples:
            encoded = writer.encode(sample, states)
            if not side_by_side:
                writer.add_encoded(encoded)
            else:
                if len(on_their_way) >= IN_FLIGHT:
                    on_their_way.popleft().result()
                on_their_way.append(writer.begin_add(encoded))
            if writer.is_full:
                writer.begin_commit()
        writer.commit()
    return len(list((path / "shards").iterdir()))


def _fill_files(paths: list[Path], states: list[np.ndarray], count: int) -> int:
    def write(which: int) -> None:
        fd = os.open(paths[which], os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        for _ in range(which, count, len(paths)):
            for state in states:
                os.write(fd, state.data.cast("B"))
        os.fsync(fd)
        os.close(fd)

    with ThreadPoolExecutor(len(paths)) as pool:
        list(pool.map(write, range(len(paths))))
    return len(paths)


def read_rate(folder: Path) -> Numbers:
    """Copying all states out of the page cache against copying as much from one array to another."""
    rng = np.random.default_rng(0)
    path = folder / "read"
    shutil.rmtree(path, ignore_errors=True)
    states = [rng.integers(0, 1 << 16, (TOKENS, HIDDEN), dtype=np.uint16) for _ in range(4)]
    with StoreWriter.open(path, manifest()) as writer:
        for number in range(SAMPLES):
            ids = rng.integers(0, 1000, TOKENS)
            writer.add(TokenSample.make(f"s{number}", ids, np.ones(TOKENS, np.uint8)), states)
        writer.commit()
    target = np.empty((TOKENS, HIDDEN), np.uint16)
    sources = [[state.copy() for state in states] for _ in range(SAMPLES)]
    store = Store(path)

    def from_store() -> None:
        for sample in store:
            for state in sample.states.values():
                np.copyto(target, state)

    def from_memory() -> None:
        for sample in sources:
            for state in sample:
                np.copyto(target, state)

    from_store()
    from_memory()
    found = ratios(from_store, from_memory, SAMPLES * 4 * target.nbytes)
    shutil.rmtree(path)
    return found


def codec_rates(states: list[np.ndarray], names: list[str], hidden_size: int) -> Numbers:
    """Size and MB/s of one core, and what fp8 loses of each layer."""
    shape = manifest(hidden_size).shape
    found: Numbers = {}
    for codec in ("raw", "blosc2", "fp8"):
        started = time.process_time()
        encoded = [encode_state(codec, state, shape) for state in states]
        encode_s = time.process_time() - started
        parts = [{part.suffix: bytes(memoryview(part.data).cast("B")) for part in one.parts} for one in encoded]
        started = time.process_time()
        decoded = [decode_state(codec, one, len(state), shape) for one, state in zip(parts, states, strict=True)]
        if codec == "raw":
            decoded = [state.copy() for state in decoded]
        decode_s = time.process_time() - started
        raw = sum(state.nbytes for state in states)
        result: Numbers = {
            "size": round(sum(len(data) for one in parts for data in one.values()) / raw, 4),
            "encode_MB_per_s_core": round(raw / encode_s / 1e6) if encode_s > 0.001 else None,
            "decode_MB_per_s_core": round(raw / decode_s / 1e6) if decode_s > 0.001 else None,
        }
        if codec == "fp8":
            result["relative_error"] = {
                name: round(_error(state, back), 5) for name, state, back in zip(names, states, decoded, strict=True)
            }
        else:
            assert all(np.array_equal(state, back) for state, back in zip(states, decoded, strict=True))
        found[codec] = result
    return found


def _error(state: np.ndarray, back: np.ndarray) -> float:
    original = to_float32(state, "bfloat16")
    return float(np.linalg.norm(to_float32(back, "bfloat16") - original) / np.linalg.norm(original))


def many_samples(folder: Path, count: int) -> Numbers:
    """Open, list, resume and scrub a store of very many very small samples, each in a process of its own."""
    path = folder / "many"
    shutil.rmtree(path, ignore_errors=True)
    found: Numbers = {"samples": count}
    for step in ("fill", "open", "list", "read", "resume", "scrub", "verify"):
        code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import measure; measure.step_{step}"
        run = subprocess.run(
            [sys.executable, "-c", f"{code}({str(path)!r}, {count})"], check=True, capture_output=True, text=True
        )
        seconds, rss = run.stdout.split()[-2:]
        found[step] = {"seconds": float(seconds), "peak_rss_MB": int(rss) // 1024}
    found["bytes"] = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    shutil.rmtree(path)
    return found


def _report(act: Callable[[], object]) -> None:
    seconds = timed(act)
    # Not getrusage: its peak is inherited from the parent over fork and exec.
    status = Path("/proc/self/status").read_text()
    print(round(seconds, 3), next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _small(number: int) -> tuple[TokenSample, list[np.ndarray]]:
    ids = np.array([number % 1000, number // 1000 % 1000, number // 1_000_000, 7], np.int64)
    states = [np.full((4, 8), 0x3F80, np.uint16) + np.arange(8, dtype=np.uint16) + layer for layer in range(4)]
    return TokenSample.make(f"row {number}", ids, np.ones(4, np.uint8)), states


def step_fill(path: str, count: int) -> None:
    def fill() -> None:
        with StoreWriter.open(Path(path), manifest(8)) as writer:
            for number in range(count):
                sample, states = _small(number)
                writer.add(sample, states)
                if number % 5000 == 4999:
                    writer.commit()
            writer.commit()

    _report(fill)


def step_open(path: str, count: int) -> None:
    _report(lambda: len(Store(path)) == count or sys.exit("samples are missing"))


def step_list(path: str, count: int) -> None:
    _report(lambda: sum(row.record.num_tokens for row in map(Store(path).row, range(count))))


def step_read(path: str, count: int) -> None:
    store = Store(path)
    order = np.random.default_rng(0).permutation(count).tolist()
    _report(lambda: [store[place].states["final"].sum() for place in order])


def step_resume(path: str, count: int) -> None:
    def resume() -> None:
        with StoreWriter.open(Path(path), manifest(8)) as writer:
            assert all(writer.is_committed(_small(number)[0].key) for number in range(0, count, 97))

    _report(resume)


def step_scrub(path: str, count: int) -> None:
    _report(lambda: scrub(Path(path)).samples == count or sys.exit("samples are missing"))


def step_verify(path: str, count: int) -> None:
    from hsdump.verify import verify_store

    _report(lambda: verify_store(Path(path)).samples == count or sys.exit("samples are missing"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to write: the disk that is measured")
    parser.add_argument("--states", type=Path, help="a store of a real model's states, for the codecs")
    parser.add_argument("--many", type=int, default=100_000, help="small samples; 0 leaves that part out")
    parser.add_argument("--repeats", type=int, default=25, help="of each commit")
    parser.add_argument("--fill", type=float, default=4.0, help="GB of large samples; 0 leaves that part out")
    parser.add_argument("--only-fill", action="store_true", help="nothing but that part, and no file of results")
    parser.add_argument("--out", type=Path, help="where results go")
    options = parser.parse_args()
    if options.only_fill:
        print(json.dumps(filling(options.folder, options.repeats, options.fill)))
        return
    results: Numbers = {"machine": {"cpus": os.cpu_count(), "python": platform.python_version()}}
    results["commit"] = commit_rate(options.folder, options.repeats)
    print(json.dumps(results["commit"]))
    memory = Path("/dev/shm")
    if os.access(memory, os.W_OK):
        # No disk to wait for: what checksums, header and index cost a core beside copying the bytes.
        results["commit_without_disk"] = commit_rate(memory / "hsdump-measure", options.repeats)
        hashed = commit_rate(memory / "hsdump-measure", options.repeats, checksums=True)
        results["commit_without_disk_with_checksums"] = hashed
        (memory / "hsdump-measure").rmdir()
        print(json.dumps(results["commit_without_disk"]))
    assert isinstance(results["commit"], dict)
    disk = results["commit"]["limit_GB_per_s"] * 1e9
    results["pipeline"] = pipeline(options.folder, max(3, options.repeats // 3), disk)
    print(json.dumps(results["pipeline"]))
    if options.fill:
        results["filling"] = filling(options.folder, max(3, options.repeats // 5), options.fill)
        print(json.dumps(results["filling"]))
    results["read"] = read_rate(options.folder)
    print(json.dumps(results["read"]))
    if options.states:
        with Store(options.states) as store:
            names = list(store.manifest.shape.names)
            rows = [np.concatenate([store[place].states[name] for place in range(len(store))]) for name in names]
            found = codec_rates([row[:4096] for row in rows], names, store.manifest.hidden_size)
            results["codecs"] = {"model": store.manifest.model_class, "tokens": min(len(rows[0]), 4096), **found}
            print(json.dumps(results["codecs"]))
    if options.many:
        results["many"] = many_samples(options.folder, options.many)
        print(json.dumps(results["many"]))
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "store.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
