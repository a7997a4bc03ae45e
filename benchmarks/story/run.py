"""The whole story at small scale: a target, its states captured from the real SGLang, a drafter that makes it faster.

    python -m benchmarks.story.run --device cuda --out OUT --work WORK --stages target,serve
    python -m benchmarks.story.run --device cpu --sglang-python .venv-sglang/bin/python --out OUT --work WORK

Stages: target, serve, draft, bench, lesson (README.md beside this file says what each does and how long it takes). What
is done is remembered under WORK; the same command goes on behind it. A call ends itself before `--seconds` are over.
Exit codes: 0 all stages are done, 4 the time was over (call again), 1 a step failed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.gpu.capture import machine, versions
from benchmarks.serving.servers import Target
from benchmarks.story import bench, drafting, lesson, serving, text
from benchmarks.story import target as training
from benchmarks.story.scale import SCALES
from benchmarks.story.state import OutOfTime, Story, write

STAGES = ("target", "serve", "draft", "bench", "lesson")
MLA_ON_CPU = Path(__file__).parents[2] / "tests/server/mla_on_cpu"
CLEAN_UP_S = 40.0
"""What stopping servers and commands may take after the time is over."""

DONE, FAILED, CALL_AGAIN = 0, 1, 4
LOG_BYTES = 1 << 18


def main(argv: list[str] | None = None) -> int:
    """Run the stages that are asked for; give the exit code."""
    begin = time.monotonic()
    argv = sys.argv[1:] if argv is None else argv
    args = parse_args(argv)
    story = make_story(args, argv, begin)
    before = {number: signal.signal(number, _time_is_over) for number in (signal.SIGALRM, signal.SIGTERM)}
    signal.setitimer(signal.ITIMER_REAL, max(args.seconds - CLEAN_UP_S, 1.0))
    code = DONE
    try:
        for stage in args.stages.split(","):
            run_stage(story, stage)
    except OutOfTime as over:
        print(f"the time of this call is over: {over}; the same command goes on", flush=True)
        code = CALL_AGAIN
    except Exception as error:  # a benchmark keeps what it has
        traceback.print_exc()
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        story.about["error"] = first.replace(str(story.work), "WORK").replace(str(story.out), "OUT")[:500]
        code = FAILED
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
        story.publish()
        keep_logs(story)
    print(f"exit code {code} after {time.monotonic() - begin:.0f} s", flush=True)
    return code


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], required=True)
    parser.add_argument("--scale", choices=sorted(SCALES), help="[default: gpu or cpu, as the device]")
    parser.add_argument("--stages", default=",".join(STAGES))
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
    args = parser.parse_args(argv)
    unknown = set(args.stages.split(",")) - set(STAGES)
    if unknown:
        parser.error(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return args


def make_story(args: argparse.Namespace, argv: list[str], begin_s: float) -> Story:
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    logs = args.work / "logs"
    logs.mkdir(exist_ok=True)
    paths = [str(MLA_ON_CPU)] if args.device == "cpu" else []
    target = Target(
        device=args.device,
        python=str(Path(args.sglang_python).absolute()),
        pythonpath=os.pathsep.join([*paths, args.pythonpath]),
        made_up=False,
        log_dir=logs,
    )
    about: dict[str, Any] = {
        "commands": said_so_far(args.work, argv),
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
        about=about,
    )


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


def run_stage(story: Story, stage: str) -> None:
    print(f"== {stage}, {story.left():.0f} s are left", flush=True)
    if stage == "target":
        target_stage(story)
    else:
        {
            "serve": serving.serve_stage,
            "draft": drafting.draft_stage,
            "bench": bench.bench_stage,
            "lesson": lesson.lesson_stage,
        }[stage](story)


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


def _time_is_over(number: int, _frame: FrameType | None) -> None:
    for other in (signal.SIGALRM, signal.SIGTERM):  # a second one must not end the cleaning up
        signal.signal(other, signal.SIG_IGN)
    raise OutOfTime("stopped" if number == signal.SIGTERM else "a step was still at work")


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
