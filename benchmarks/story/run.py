"""The whole story at small scale: a target, its states captured from the real SGLang, a drafter that makes it faster.

    python -m benchmarks.story.run --device cuda --out OUT --work WORK --stages target,serve
    python -m benchmarks.story.run --device cpu --sglang-python .venv-sglang/bin/python --out OUT --work WORK

Stages: target, serve, draft, bench, rounding, lesson (README.md beside this file says what each does and how long it
takes). What is done is remembered under WORK; the same command goes on behind it. A call ends itself before `--seconds`
are over.
Exit codes: 0 all stages are done, 4 the time was over (call again), 1 a step failed.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.capture import machine, versions
from benchmarks.serving.servers import Target, end_left_over
from benchmarks.story import bench, drafting, lesson, rounding, serving, text
from benchmarks.story import target as training
from benchmarks.story.scale import SCALES
from benchmarks.story.state import CLEANING, OutOfTime, Stopped, Story, write

MLA_ON_CPU = Path(__file__).parents[2] / "tests/server/mla_on_cpu"
CLEAN_UP_S = 40.0
"""What stopping servers and commands may take after the time is over."""

AGAIN_S = 15.0
"""The alarm comes again until somebody has taken it. Longer than a command takes to be stopped."""

FIRST_PORT, PORTS_A_CALL = 20_000, 1_000
"""Below the ports that a kernel gives to connections; each call begins behind the one before."""

WAIT_STEP_S = 0.5
DONE, FAILED, CALL_AGAIN = 0, 1, 4
LOG_BYTES = 1 << 18


def main(argv: list[str] | None = None) -> int:
    """Run the stages that are asked for; give the exit code."""
    begin = time.monotonic()
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    CLEANING.clear()
    before = {number: signal.signal(number, _time_is_over) for number in (signal.SIGALRM, signal.SIGTERM)}
    signal.setitimer(signal.ITIMER_REAL, max(args.seconds - CLEAN_UP_S, 1.0), AGAIN_S)
    story = None
    try:
        story = make_story(args, argv, begin)
        for stage in args.stages.split(","):
            attempt_stage(story, stage)
    except Stopped as over:
        print(f"the time of this call is over: {over}", flush=True)
        if story is not None:
            story.postponed.append(str(over))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        if story is not None:
            story.publish()
            keep_logs(story)
    code = CALL_AGAIN if story is None or story.postponed else DONE
    code = FAILED if story is not None and story.failed else code
    more = "" if code == DONE else "; the same command goes on"
    print(f"exit code {code} after {time.monotonic() - begin:.0f} s{more}", flush=True)
    return code


def attempt_stage(story: Story, stage: str) -> None:
    """Run a stage; where it cannot go on, the others still can.

    Raises:
        Stopped: this call is over.
    """
    print(f"== {stage}, {story.left():.0f} s are left", flush=True)
    try:
        lacks = wait_for_makings(story, stage)
        if lacks:
            story.postpone(stage, f"there is no {', '.join(lacks)} yet")
        else:
            STAGES[stage](story)
    except Stopped:
        raise
    except OutOfTime as over:
        story.postpone(stage, over)
    except Exception as error:  # a benchmark keeps what it has
        story.note(stage, error)
    finally:
        free_memory(story, stage)


def wait_for_makings(story: Story, stage: str) -> list[str]:
    """Give what a stage lacks, after the wait that was asked for: another process may be making it."""
    until_s = time.monotonic() + min(story.wait_s, story.left())
    while True:
        wanted = [name for name in BEFORE[stage] if not (name in GIVEN and story.model_path)]
        lacks = [name for name in wanted if story.figures(name) is None]
        if not lacks or time.monotonic() >= until_s:
            return lacks
        time.sleep(WAIT_STEP_S)


def free_memory(story: Story, stage: str) -> None:
    """Give a GPU's memory back to the servers and commands of the next stage, and note how much it was."""
    if "torch" not in sys.modules:
        return
    import torch

    if torch.cuda.is_available():
        gc.collect()
        peaks = story.about.setdefault("peak_gpu_gib", {})
        peaks[stage] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--scale", choices=sorted(SCALES), help="[default: gpu or cpu, as the device]")
    parser.add_argument(
        "--stages", default=",".join(WHOLE), help="[default: all]; the lesson's own: stores,judge,learn"
    )
    parser.add_argument("--kinds", default="", help="drafters of the lesson to train, as sound,half [default: all]")
    parser.add_argument("--out", type=Path, required=True, help="results and logs, small")
    parser.add_argument("--work", type=Path, required=True, help="everything else; must stay between calls")
    parser.add_argument("--seconds", type=float, default=570.0, help="this call has ended by then")
    parser.add_argument("--engine", choices=["sglang", "transformers"], default="sglang")
    parser.add_argument("--in-process", action="store_true", help="hsdump's commands in this process, for a test")
    parser.add_argument("--llama", action="store_true", help="a Llama-shaped target, should latent attention not work")
    parser.add_argument("--model", type=Path, help="a target that exists already; stage target then only reads text")
    parser.add_argument("--text", type=Path, help="a folder with more text")
    parser.add_argument("--sglang-python", default=sys.executable)
    parser.add_argument("--pythonpath", default=os.environ.get("PYTHONPATH", ""), help="of the servers")
    parser.add_argument("--wait", type=float, default=0.0, help="seconds, for what another process makes in --work")
    parser.add_argument("--first-port", type=int, default=FIRST_PORT, help="apart from those of a story beside it")
    args = parser.parse_args(argv)
    unknown = set(args.stages.split(",")) - set(STAGES)
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    args.kinds = tuple(filter(None, args.kinds.split(",")))
    unknown = set(args.kinds) - set(lesson.LEARNED)
    if unknown:
        parser.error(f"no kind {', '.join(sorted(unknown))}; there are {', '.join(lesson.LEARNED)}")
    return args


def make_story(args: argparse.Namespace, argv: list[str], begin_s: float) -> Story:
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    logs = args.work / "logs"
    logs.mkdir(exist_ok=True)
    said = said_so_far(args.work, argv)
    paths = [str(MLA_ON_CPU)] if args.device == "cpu" else []
    pids = args.work / f"servers-{args.first_port}.pids"
    target = Target(
        device=args.device,
        python=str(Path(args.sglang_python).absolute()),
        pythonpath=os.pathsep.join([*paths, args.pythonpath]),
        made_up=False,
        log_dir=logs,
        first_port=args.first_port + PORTS_A_CALL * (len(said) % 10),
        pid_file=pids,
    )
    if args.engine == "sglang":
        print(f"left over from an earlier call, ended: {end_left_over(pids)}", flush=True)
    about: dict[str, Any] = {
        "commands": said,
        "free_gib": free_space(args.work),
        "machine": machine(args.device),
        "versions": versions_of(args.work, target.python) if args.engine == "sglang" else {},
    }
    return Story(
        scale=SCALES[args.scale or {"cuda": "gpu", "cpu": "cpu"}[args.device]],
        device=args.device,
        work=args.work.absolute(),
        out=args.out.absolute(),
        target=target,
        until_s=begin_s + args.seconds - CLEAN_UP_S,
        llama=args.llama,
        engine=args.engine,
        in_process=args.in_process,
        text=args.text,
        model_path=args.model,
        beside="" if args.first_port == FIRST_PORT else f"-{args.first_port}",
        wait_s=args.wait,
        kinds=args.kinds,
        about=about,
    )


def free_space(work: Path) -> dict[str, float]:
    """Say what the disk and shared memory have left at the start."""
    places = {"work": work, "shared_memory": Path("/dev/shm")}
    found = {name: round(shutil.disk_usage(path).free / 2**30, 1) for name, path in places.items() if path.exists()}
    print(f"GiB free: {found}", flush=True)
    return found


def versions_of(work: Path, python: str) -> dict[str, str]:
    """Ask once: importing SGLang takes seconds of each call."""
    path = work / "versions.json"
    if not path.exists():
        write(path, versions(python))
    return dict(json.loads(path.read_text(encoding="utf-8")))


def said_so_far(work: Path, argv: list[str]) -> list[str]:
    """Remember this call's command line without the machine's folders; give those of all calls of this story."""
    folders = {"--out": "OUT", "--work": "WORK", "--pythonpath": "PATH", "--text": "TEXT", "--model": "MODEL"}
    folders["--sglang-python"] = "PYTHON"
    words = [folders.get(before, word) for before, word in zip(["", *argv], argv, strict=False)]
    path = work / "commands.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    found.append("python -m benchmarks.story.run " + " ".join(words))
    write(path, found)
    return list(found)


def target_stage(story: Story) -> None:
    """Find text, write questions, train the target."""
    scale, data = story.scale, story.data
    story.step("target.text", 5, lambda: text.prepare(scale, data, story.text))
    if story.model_path is not None:
        return

    def train() -> dict[str, Any]:
        figures = training.train_target(
            scale, data, story.work / "target", device=story.device, llama=story.llama, left_s=lambda: story.left() - 15
        )
        if figures is None:
            raise OutOfTime("the target is trained further by the next call")
        return dict(figures)

    story.step("target.train", 10, train)


STAGES: dict[str, Callable[[Story], None]] = {
    "target": target_stage,
    "serve": serving.serve_stage,
    "draft": drafting.draft_stage,
    "bench": bench.bench_stage,
    "rounding": rounding.rounding_stage,
    "lesson": lesson.lesson_stage,
    "stores": lesson.stores_stage,
    "judge": lesson.judge_stage,
    "learn": lesson.learn_stage,
}
"""The last three are what the lesson consists of, for several processes side by side."""

WHOLE = ("target", "serve", "draft", "bench", "rounding", "lesson")
"""What a call does that asks for no stages."""

BEFORE = {
    "target": (),
    "serve": ("target.train",),
    "draft": ("serve.extract",),
    "bench": ("draft.export",),
    "rounding": ("draft.export",),
    "lesson": ("draft.vocab",),
    "stores": ("draft.vocab",),
    "judge": ("lesson.stores",),
    "learn": ("lesson.stores",),
}
"""Steps that a stage cannot do without."""

GIVEN = ("target.train",)
"""Not needed where a model is given."""


def _time_is_over(number: int, _frame: FrameType | None) -> None:
    if not CLEANING.is_set():
        raise Stopped("stopped" if number == signal.SIGTERM else "a step was still at work")


def keep_logs(story: Story) -> None:
    """Put the ends of all logs into one small file beside the results."""
    with (story.out / "logs.txt").open("w", encoding="utf-8") as file:
        for path in sorted((story.work / "logs").glob("*")):
            data = path.read_bytes()[-LOG_BYTES:]
            file.write(f"\n===== {path.name}\n{data.decode(errors='replace')}\n")
    for name in ("progress.csv",):
        if (story.drafter / name).exists():
            shutil.copy(story.drafter / name, story.out / f"drafter-{name}")


if __name__ == "__main__":
    sys.exit(main())
