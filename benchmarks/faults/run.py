"""The fault campaign: every fault of `tests/server/campaign.py`, many times, on a real SGLang on the CPU.

    python -m benchmarks.faults.run --times 20 --json faults.json                    all of it (about an hour)
    python -m benchmarks.faults.run --times 20 --faults reset,ctrl-c-twice --json faults.json

What the file has already is not done again, so a campaign may be run in parts. Needs to be root, for disks of its own.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from tests.server.campaign import QUICK, SLOW, SPOOL, STALLED_CLIENTS, World, small_disk
from tests.server.fault_proxy import FaultProxy
from tests.server.harness import SglangServer
from tests.tiny_models import tiny_model_path

from hsdump.spool.names import new_spool_dir

SPOOL_FILE_SYSTEM_BYTES = 300 << 20
"""A server leaves 256 MiB of its spool's file system free, whatever its own limit."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--faults", default=",".join([*QUICK, *SPOOL, *SLOW]))
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--stall-seconds", type=float, default=60.0)
    args = parser.parse_args()
    wanted = args.faults.split(",")
    with tempfile.TemporaryDirectory() as folder:
        run_on(Path(folder), [name for name in wanted if name in QUICK or name in SLOW], args, spool=False)
        run_on(Path(folder), [name for name in wanted if name in SPOOL], args, spool=True)


def run_on(folder: Path, faults: list[str], args: argparse.Namespace, *, spool: bool) -> None:
    """Run faults on one server, which is started again where a fault is about that."""
    if not faults:
        return
    with ExitStack() as stack:
        server = SglangServer(model=tiny_model_path("llama"), log=folder / "server.log")
        if spool:
            place = new_spool_dir()
            stack.callback(shutil.rmtree, place, ignore_errors=True)
            stack.enter_context(small_disk(place, SPOOL_FILE_SYSTEM_BYTES))
            server.serve_options = ("--spool", str(place), "--spool-bytes", str(8 << 20))
        stack.enter_context(server)
        proxy = stack.enter_context(FaultProxy(server.port))
        world = World(server=server, proxy=proxy, folder=folder)
        release = httpx.get(f"{server.url}/server_info").json()["version"]
        # In rounds, so that a campaign that is cut short has done each about as often.
        for number in range(1, args.times + 1):
            for name in faults:
                repeat(world, name, args, release, number)


def repeat(world: World, name: str, args: argparse.Namespace, release: str, number: int) -> None:
    """Do one fault until it was done so often, and write down what came of it, each time."""
    fault: Any = {**QUICK, **SPOOL, **SLOW}[name]
    more = {"seconds": args.stall_seconds} if name == "stalled" else {}
    while True:
        whole = json.loads(args.json.read_text()) if args.json.exists() else {}
        whole["machine"] = {"cpus": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()}
        whole["sglang"] = release
        new = {"times": 0, "passed": 0, "seconds": 0.0, "details": [], "failures": []}
        entry = whole.setdefault("faults", {}).setdefault(name, new)
        if entry["times"] >= number:
            break
        started_s, ports_in_use = time.monotonic(), world.server.ports_in_use
        try:
            if world.server.process is None:  # its start failed in the fault before
                world.server.start()
            entry["details"].append(fault(world, entry["times"], **more))
            entry["passed"] += 1
        except Exception:
            entry["failures"].append(traceback.format_exc(limit=4))
            print(entry["failures"][-1], flush=True)
        gc.collect()
        entry["times"] += 1
        if again := world.server.ports_in_use - ports_in_use:
            entry["starts_that_met_a_used_port"] = entry.get("starts_that_met_a_used_port", 0) + again
        entry["seconds"] = round(entry["seconds"] + time.monotonic() - started_s, 1)
        print(f"{name}: {entry['passed']} of {entry['times']} passed, {entry['seconds']} s", flush=True)
        args.json.write_text(json.dumps(whole, indent=1) + "\n")
        write_table(whole, args.json.with_suffix(".md"))


def note(name: str) -> str:
    """Say what one time of a fault is, where that is not plain."""
    return f" (each time {STALLED_CLIENTS} clients)" if name == "stalled" else ""


def write_table(whole: dict[str, Any], path: Path) -> None:
    lines = [
        "# Fault campaign",
        "",
        f"SGLang {whole['sglang']} on the CPU, tiny models; {whole['machine']['cpus']} cores. Command:",
        "`python -m benchmarks.faults.run --times N --json faults.json`",
        "",
        "Passed means: each sample in the store exactly once, verify clean, no entry or lock of ours left",
        "in shared memory, no process left. A replaced server: refused by the run (exit 4) and the store (exit 75).",
        "",
        "| fault | times | passed | s |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {name}{note(name)} | {e['times']} | {e['passed']} | {e['seconds']:.0f} |"
        for name, e in whole["faults"].items()
    ]
    rest = {name: 20 - whole["faults"].get(name, {}).get("times", 0) for name in (*QUICK, *SPOOL, *SLOW)}
    todo = ", ".join(f"{name} {count}" for name, count in rest.items() if count > 0)
    if todo:
        lines += ["", f"Left to do until each was done 20 times: {todo}."]
    for text in whole.get("notes", ()):  # written by hand: what those were that did not pass
        lines += ["", text]
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
