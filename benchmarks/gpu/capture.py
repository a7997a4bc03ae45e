"""Capture at the speed of the GPU, from no capture at all to committed samples, side by side in one run.

    python -m benchmarks.gpu.capture --device cuda --shapes l8b,kimi --out OUT      (one H200, about 8 minutes a shape)
    python -m benchmarks.gpu.capture --device cpu --shapes tiny --out OUT           (the same steps, tiny, anywhere)

Modes of a shape, each with the same random token ids for each length:

- `none`       a server without hsdump
- `json`       SGLang's own way out on that server (final state only: what this release offers)
- `aux`        ordinary requests on a server with capture on: auxiliary states computed, nothing copied
- `shm`        hsdump's requests, drained from the ring
- `store-raw`, `store-blosc2`   the same through `hsdump extract` to a committed store on disk
- `naive`      the story's patch: four tensors a request, torch.save into /dev/shm, synchronous
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gpu.shapes import SHAPES, Shape
from benchmarks.serving.load import captured, decode_gaps, make_samples, ordinary, read_naive, write_rows
from benchmarks.serving.servers import Target, server

from hsdump.arrays import to_float32
from hsdump.samples import sample_key
from hsdump.spool.ring import read_counters

NAIVE_PATCH = Path(__file__).parent / "naive_patch"
"""The story's own patch as a plugin; it fires on ids that begin with `naive-` only."""


def main() -> None:
    args = parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    target = Target(
        device=args.device,
        python=args.sglang_python,
        pythonpath=os.pathsep.join((str(NAIVE_PATCH), args.pythonpath)),
        log_dir=args.out,
    )
    results: dict[str, Any] = {"machine": machine(args.device), "versions": versions(args.sglang_python), "rows": []}
    words = [
        "OUT" if before in ("--out", "--work") else word for before, word in zip(sys.argv, sys.argv[1:], strict=False)
    ]
    results["command"] = "python -m benchmarks.gpu.capture " + " ".join(words)
    for name in args.shapes.split(","):
        bench = Bench(args, target, SHAPES[name], results)
        for stage in (getattr(bench, stage) for stage in args.stages.split(",")):
            begin = time.monotonic()
            try:
                stage()
            except Exception as error:  # a benchmark keeps what it has
                results.setdefault("errors", []).append(
                    f"{name} {stage.__name__}: {type(error).__name__}: {error}"[:2000]
                )
                print(results["errors"][-1], flush=True)
            print(f"[{name}] {stage.__name__} took {time.monotonic() - begin:.0f} s", flush=True)
            (args.out / f"gpu-capture-{args.shapes.replace(',', '-')}.json").write_text(json.dumps(results, indent=1))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shapes", default="l8b,kimi")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/hsdump-bench"))
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--pythonpath", default=os.environ.get("PYTHONPATH", ""))
    parser.add_argument("--spool-bytes", type=int, default=1 << 30, help="the ring; 8 GiB for a full-speed GPU run")
    parser.add_argument("--lengths", default="")
    parser.add_argument("--codecs", default="raw,blosc2", help="of the committed stores")
    parser.add_argument("--no-decode", action="store_true", help="leave the ordinary decode traffic out")
    parser.add_argument("--store-tokens", type=int, default=130_000, help="tokens of each committed store")
    parser.add_argument("--stages", default="disk,without,with_capture,naive,compare")
    parser.add_argument("--rounds", type=int, default=2)
    return parser.parse_args()


class Bench:
    """All modes of one shape."""

    def __init__(self, args: argparse.Namespace, target: Target, shape: Shape, results: dict[str, Any]) -> None:
        self.args, self.target, self.shape, self.results = args, target, shape, results
        self.model = shape.write(args.work / shape.name)
        lengths = [int(n) for n in args.lengths.split(",")] if args.lengths else shape.lengths
        self.samples = {n: make_samples(max(4, shape.tokens_per_run // n), n, shape.vocab, n) for n in lengths}
        self.exact = make_samples(shape.exact_count, shape.exact_length, shape.vocab, 77)
        self.kept: dict[str, list[np.ndarray]] = {}
        self.rate: dict[int, float] = {}

    def row(self, mode: str, length: int, tokens_per_s: float, **more: Any) -> None:
        if mode == "none":
            self.rate[length] = max(tokens_per_s, self.rate.get(length, 0.0))
        base = self.rate.get(length)
        found = {
            "shape": self.shape.name,
            "length": length,
            "mode": mode,
            "tokens_per_s": round(tokens_per_s, 1),
            "ratio_to_no_capture": round(tokens_per_s / base, 4) if base else None,
            "gb_per_s": round(tokens_per_s * self.shape.bytes_per_token / 1e9, 3),
            **more,
        }
        self.results["rows"].append(found)
        print(json.dumps(found), flush=True)

    def warm_up(self, url: str) -> None:
        """Every length once: kernels are compiled for shapes that were not seen before."""
        for length, samples in self.samples.items():
            ordinary(url, samples[: max(4, 16384 // length)])

    def disk(self) -> None:
        """What the disk takes at most: plain writes of 64 MiB blocks and one fsync a file, 1 and 4 at a time."""
        block = os.urandom(64 << 20)
        for writers in (1, 4):
            blocks = (2 << 30) // (64 << 20) // writers if self.args.device == "cuda" else 2
            start = time.perf_counter()
            threads = [
                threading.Thread(target=write_file, args=(self.args.work / f"disk-{n}", block, blocks))
                for n in range(writers)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            rate = writers * blocks * len(block) / (time.perf_counter() - start) / 1e9
            self.results.setdefault("disk_gb_per_s", {})[str(writers)] = round(rate, 3)
            for n in range(writers):
                (self.args.work / f"disk-{n}").unlink()

    def without(self) -> None:
        """No capture, and SGLang's JSON on the same server."""
        flags = [*self.shape.flags(self.args.device), "--enable-return-hidden-states"]
        with server(self.target, f"{self.shape.name}-none", self.model, flags) as url:
            self.warm_up(url)
            for _ in range(self.args.rounds):
                for length, samples in self.samples.items():
                    self.row("none", length, ordinary(url, samples).tokens_per_s)
            few = self.exact[: self.shape.json_count]
            found = ordinary(url, few, hidden=True)
            per_token = found.num_bytes / sum(map(len, few))
            self.rate.setdefault(len(few[0]), ordinary(url, self.exact).tokens_per_s)
            self.row("json", len(few[0]), found.tokens_per_s, http_bytes_per_token=round(per_token))

    def with_capture(self) -> None:
        """hsdump: aux only, drained ring, committed stores, ordinary decode beside."""
        layers = ",".join(map(str, self.shape.layers))
        serve = ["--layers", layers, "--spool-bytes", str(self.args.spool_bytes), "--hand-over", "ring"]
        flags = self.shape.flags(self.args.device)
        with server(self.target, f"{self.shape.name}-hsdump", self.model, flags, serve=serve) as url:
            self.warm_up(url)
            for _ in range(self.args.rounds):
                for length, samples in self.samples.items():
                    self.row("aux", length, ordinary(url, samples).tokens_per_s)
                    found = captured(url, samples)
                    self.row("shm", length, found.tokens_per_s, drained_s=round(found.drained_s, 4))
            self.row("shm-exact", self.shape.exact_length, captured(url, self.exact, keep=self.kept).tokens_per_s)
            self.results.setdefault("counters", {})[self.shape.name] = self.counters()
            if not self.args.no_decode:
                self.decode_beside(url)
            for codec in filter(None, self.args.codecs.split(",")):
                self.store(url, codec)

    def counters(self) -> dict[str, Any]:
        """What the server side says its own work cost."""
        for path in Path("/dev/shm").glob("hsdump-*/ring-[0-9]*"):
            found = asdict(read_counters(path))
            batches = max(found["batches"], 1)
            per_batch = {"busy_us_per_batch": round(found["busy_ns"] / batches / 1e3, 1)}
            return {**found, **per_batch, "late_us_per_batch": round(found["late_ns"] / batches / 1e3, 1)}
        return {}

    def decode_beside(self, url: str) -> None:
        """Pauses between tokens of eight ordinary users: alone, beside plain prefill, beside the same captured."""
        samples = self.samples[sorted(self.samples)[-2 if len(self.samples) > 1 else -1]]
        found: dict[str, Any] = {}
        for name, beside in (("alone", None), ("beside_plain", ordinary), ("beside_capture", captured)):
            threads = [threading.Thread(target=beside, args=(url, samples))] if beside else []
            for thread in threads:
                thread.start()
            gaps, answers = map(np.array, decode_gaps(url, self.shape.vocab, self.shape.decode_s))
            for thread in threads:
                thread.join()
            found[name] = {f"p{q}_ms": round(float(np.percentile(gaps, q)) * 1e3, 2) for q in (50, 95)}
            found[name] |= {f"answer_p{q}_s": round(float(np.percentile(answers, q)), 3) for q in (50, 95)}
            found[name] |= {"tokens": len(gaps), "mean_ms": round(float(gaps.mean()) * 1e3, 2)}
        self.results.setdefault("decode", {})[self.shape.name] = found
        print(json.dumps(found), flush=True)

    def store(self, url: str, codec: str) -> None:
        length = sorted(self.samples)[-2 if len(self.samples) > 1 else -1]
        out = self.args.work / f"store-{codec}"
        shutil.rmtree(out, ignore_errors=True)
        some = self.samples[length][: max(4, self.args.store_tokens // length)]
        rows = write_rows(self.args.work / "rows.jsonl", some)
        command = [sys.executable, "-m", "hsdump.cli.main", "extract", str(rows), "--server", url, "--out", str(out)]
        command += ["--codec", codec, "--json", "--concurrency", str(max(8, 40960 // length))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"extract {codec}: {done.returncode} {done.stdout[-500:]} {done.stderr[-1500:]}")
        report = json.loads(done.stdout)
        size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
        more = {"seconds": report["seconds"], "retries": report["retries"], "committed": report["committed"]}
        ratio = round(size / report["state_bytes"], 4)
        self.row(f"store-{codec}", length, report["tokens_per_s"], disk_bytes_ratio=ratio, **more)
        verify = [sys.executable, "-m", "hsdump.cli.main", "verify", str(out), "--json"]
        code = subprocess.run(verify, capture_output=True, check=False).returncode
        self.results.setdefault("verify", {})[f"{self.shape.name} {codec}"] = code
        shutil.rmtree(out, ignore_errors=True)

    def naive(self) -> None:
        """The story's patch, on its own server; its files are also the reference for our bytes."""
        folder = Path("/dev/shm/naive") if self.args.device == "cuda" else self.args.work / "naive"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        env = {"NAIVE_DIR": str(folder), "NAIVE_LAYERS": ",".join(map(str, self.shape.layers))}
        flags = self.shape.flags(self.args.device)
        with server(self.target, f"{self.shape.name}-naive", self.model, flags, env=env) as url:
            self.warm_up(url)
            for length, samples in self.samples.items():
                if length == min(self.samples) and len(self.samples) > 1:
                    continue
                some = samples[: max(4, self.shape.tokens_per_run // 3 // length)]
                self.row("naive", length, ordinary(url, some, rid="naive-").tokens_per_s)
                for path in folder.iterdir():
                    path.unlink()
            ordinary(url, self.exact, rid="exact-")
            self.reference = [
                read_naive(folder, number, len(self.shape.layers) + 1) for number in range(len(self.exact))
            ]
        shutil.rmtree(folder, ignore_errors=True)

    def compare(self) -> None:
        """Our rows against the naive patch's for the same requests, in another process and other batches."""
        errors, equal = [], 0
        for ids, reference in zip(self.exact, self.reference, strict=True):
            found = self.kept[sample_key(ids, np.ones(len(ids), dtype=np.uint8))]
            for ours, theirs in zip(found, reference, strict=True):
                equal += bool(np.array_equal(ours, theirs))
                a, b = to_float32(ours, "bfloat16"), to_float32(theirs, "bfloat16")
                errors.append(float(np.linalg.norm(a - b) / np.linalg.norm(b)))
        self.results.setdefault("against_naive", {})[self.shape.name] = {
            "states_compared": len(errors),
            "bitwise_equal": equal,
            "worst_relative_error": round(max(errors), 6),
            "median_relative_error": round(float(np.median(errors)), 6),
        }
        print(json.dumps(self.results["against_naive"]), flush=True)


def write_file(path: Path, block: bytes, blocks: int) -> None:
    with path.open("wb", buffering=0) as file:
        for _ in range(blocks):
            file.write(block)
        os.fsync(file.fileno())


def machine(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"cpus": os.cpu_count(), "processor": platform.machine()}
    if device == "cuda":
        import torch

        found["gpu"] = torch.cuda.get_device_name(0)
    return found


def versions(python: str) -> dict[str, str]:
    code = "import sglang, torch, transformers; print(sglang.__version__, torch.__version__, transformers.__version__)"
    env = {**os.environ, "SGLANG_USE_CPU_ENGINE": os.environ.get("SGLANG_USE_CPU_ENGINE", "0")}
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, env=env)
    words = done.stdout.split()[-3:]
    return dict(zip(("sglang", "torch", "transformers"), words, strict=False))


if __name__ == "__main__":
    main()
