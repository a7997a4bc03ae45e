"""`python -m hsdump.demo.run --out demo-out`: the whole job in small, without a server, a GPU or a download.

From questions to a drafter that an engine loads, with a code model of 7 MB that comes along (`train_target`).

It calls the same commands that a user types, one process each, and says each one before it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
from rich.console import Console
from rich.filesize import decimal

from hsdump._version import __version__
from hsdump.arrays import to_float32
from hsdump.errors import HsdumpError, UsageError
from hsdump.store import Store

TARGET = Path(__file__).with_name("target")
PROMPTS = Path(__file__).with_name("prompts.jsonl")
"""Conversations in many languages; a small drafter cannot learn from these, but `prepare --show` is worth a look."""

TRAINING: Final = (
    *("--optimizer", "muon", "--lr", "8e-3", "--warmup", "15", "--clip", "1", "--ttt-steps", "3", "--tokens", "2048"),
    *("--epochs", "10", "--max-steps", "210", "--validate-every", "105", "--save-every", "105", "--held-out", "0.03"),
)
MARKER = "made-by-hsdump-demo.txt"
VERDICTS = {0: "clean", 1: "suspicious", 2: "corrupt"}
"""What the exit codes of `hsdump verify` mean."""

STOPPED = 130
STOP_S = 10.0
NOT_LOSSLESS = 1
"""Of `hsdump eval`, which says more in its report."""

LEARN, TEST, NEW_TOKENS = 800, 12, 128
"""Answers to learn from, questions to test with, tokens of the longest answer."""

DRAFT_VOCAB: Final = "256"
"""Of the target's 512."""

ENGINES: Final = ("sglang", "vllm")

LAYERS: Final = "2,5,7"
"""Of eight. The last of the usual ones (2, 4, 5) is far from the end in so shallow a model."""

ENVIRONMENT: Final = {
    # No progress bar of other libraries, and a proof that nothing is downloaded.
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    # glibc would hand the memory of every large tensor back to the system, and fetch it again for the next one.
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}
"""Of every command."""


@dataclass(frozen=True, slots=True)
class Places:
    """Everything that the demo writes, and nothing else is removed by the next one."""

    out: Path

    @property
    def answers(self) -> Path:
        return self.out / "answers.jsonl"

    @property
    def questions(self) -> Path:
        return self.out / "test.jsonl"

    @property
    def vocab(self) -> Path:
        return self.out / "store.vocab.safetensors"

    @property
    def drafter(self) -> Path:
        return self.out / "drafter"

    @property
    def evaluation(self) -> Path:
        return self.out / "evaluation.json"

    def exported(self, engine: str) -> Path:
        """Where the drafter is for an engine."""
        return self.out / f"drafter-{engine}"

    @property
    def store(self) -> Path:
        return self.out / "store"

    @property
    def summary(self) -> Path:
        return self.out / "summary.json"

    def start_afresh(self) -> None:
        """Remove what an earlier demo wrote here, and only that.

        Raises:
            UsageError: the folder holds files of somebody else.
        """
        marker = self.out / MARKER
        if self.out.exists() and not self.out.is_dir():
            raise UsageError(f"{self.out} is a file", "name a folder with --out")
        if self.out.is_dir() and any(self.out.iterdir()) and not marker.exists():
            raise UsageError(
                f"{self.out} holds files that the demo did not write", "name a new or an empty folder with --out"
            )
        for folder in (self.store, self.drafter, self.exported("sglang"), self.exported("vllm")):
            shutil.rmtree(folder, ignore_errors=True)
        for path in (self.answers, self.questions, self.vocab, self.evaluation, self.summary):
            path.unlink(missing_ok=True)
        self.out.mkdir(parents=True, exist_ok=True)
        marker.write_text(
            "The next demo removes and writes again: answers.jsonl, test.jsonl, store, store.vocab.safetensors,\n"
            "drafter, drafter-sglang, drafter-vllm, evaluation.json, summary.json\n"
        )


@dataclass(frozen=True, slots=True)
class _Beside:
    """A command on its way while another one has the terminal."""

    words: tuple[str | Path, ...]
    process: subprocess.Popen[bytes]
    seconds: Future[float]
    """How long it ran."""


class _StepFailed(Exception):
    """A command's exit code says that there is no going on."""

    def __init__(self, step: str, code: int) -> None:
        super().__init__(step, code)
        self.step, self.code = step, code


@dataclass(kw_only=True, slots=True)
class Demo:
    """One run of the demo."""

    places: Places
    console: Console
    seconds: dict[str, float] = field(default_factory=dict)
    """Of each step's processes; some run at the same time, so that they add up to more than the whole took."""

    started_s: float = field(default_factory=time.monotonic)
    beside: list[_Beside] = field(default_factory=list)

    def run(self) -> int:
        """Go through all steps.

        Returns:
            0, or the exit code of the command that failed (of `hsdump verify` unless the store is clean).
        """
        self.places.start_afresh()
        try:
            return self._steps()
        except _StepFailed as failed:
            self._say(f"the demo ends here: {failed.step} gave exit code {failed.code}")
            return failed.code
        finally:
            for beside in self.beside:
                self._stop(beside)

    def _steps(self) -> int:
        places = self.places
        self._ask()
        model = ("--engine", "transformers", "--model", TARGET, "--compute", "float32")
        self._hsdump("extract", places.answers, *model, "--layers", LAYERS, "--out", places.store)
        looking = self._start("verify", places.store)
        self._hsdump("vocab", places.store, "--size", DRAFT_VOCAB, "--held-out", "0.03")
        verdict = self._end(looking, tuple(VERDICTS))
        self._hsdump("train", places.store, "--out", places.drafter, *TRAINING)
        exporting = [self._start("export", places.drafter, "--to", to, "--out", places.exported(to)) for to in ENGINES]
        evaluation = self._evaluate()
        for beside in exporting:
            self._end(beside)
        with Store(places.store) as store:
            summary = self._summary(store, VERDICTS[verdict]) | evaluation
            places.summary.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
            self.console.print(_explained(store, summary, places), soft_wrap=True, markup=False, highlight=False)
        return verdict or (0 if summary["lossless"] else 1)

    def _ask(self) -> None:
        self._say(f"asking the demo's target ({_short(TARGET)}) how functions of the standard library go on")
        sizes = ("--learn", str(LEARN), "--test", str(TEST), "--new-tokens", str(NEW_TOKENS))
        self._run("answers", ["hsdump.demo.questions", str(TARGET), str(self.places.out), *sizes])

    def _evaluate(self) -> dict[str, Any]:
        """Decode the test questions with the drafter and with an untrained one, and check what comes out."""
        places = self.places
        how = ("--new-tokens", str(NEW_TOKENS), "--untrained", "--json")
        words = ("eval", places.drafter, "--prompts", places.questions, *how)
        self._say(f"{_typed(words)} > {places.evaluation}")
        with places.evaluation.open("wb") as file:
            self._run("eval", ["hsdump.cli.main", *map(str, words)], file, known=(0, NOT_LOSSLESS))
        if not places.evaluation.stat().st_size:
            raise _StepFailed("hsdump eval", 1)  # it died, which has the same exit code as a lossy output
        found = msgspec.json.decode(places.evaluation.read_bytes())
        return {
            "acceptance_length": found["walked"][0]["acceptance_length"],
            "acceptance_length_untrained": found["untrained"]["acceptance_length"],
            "acceptance_per_position": found["walked"][0]["per_position"],
            "lossless": found["lossless"] or len(found["differing"]) == found["near_ties"],
            "outputs_differing_at_ties": found["near_ties"],
            "prompts_decoded": found["walked"][0]["prompts"],
        }

    def _hsdump(self, *words: str | Path) -> None:
        """Run one command as a user would, its output going straight to the terminal."""
        self._say(_typed(words))
        self._run(str(words[0]), ["hsdump.cli.main", *map(str, words)])

    def _run(self, step: str, module: list[str], stdout: BinaryIO | None = None, known: Sequence[int] = (0,)) -> None:
        """Run a module as its own process and add up how long its step took."""
        started_s = time.monotonic()
        code = subprocess.run(_command(module), env=_environment(), stdout=stdout, check=False).returncode
        self._took(step, time.monotonic() - started_s)
        if code not in known:
            raise _StepFailed(step if step == "answers" else f"hsdump {step}", code)

    def _start(self, *words: str | Path) -> _Beside:
        """Start a command that runs beside the next one; what it prints is kept until `_end`."""
        command = _command(["hsdump.cli.main", *map(str, words)])
        process = subprocess.Popen(command, env=_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.beside.append(_Beside(words, process, _watched(process, time.monotonic())))
        return self.beside[-1]

    def _end(self, beside: _Beside, known: Sequence[int] = (0,)) -> int:
        """Wait for it, say what was typed and what came out. Gives one of the exit codes that are `known`."""
        text, _ = beside.process.communicate()
        step = str(beside.words[0])
        self._took(step, beside.seconds.result())
        self._say(_typed(beside.words))
        self.console.print(text.decode(errors="replace"), end="", soft_wrap=True, markup=False, highlight=False)
        if beside.process.returncode not in known:
            raise _StepFailed(f"hsdump {step}", beside.process.returncode)
        return beside.process.returncode

    def _stop(self, beside: _Beside) -> None:
        """End what still runs when the demo ends early, as Ctrl-C would: it puts its half-written files away."""
        with beside.process:
            if beside.process.poll() is None:
                self._say(f"stopped: {_typed(beside.words)[2:]}")
                beside.process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    beside.process.wait(STOP_S)
                beside.process.kill()

    def _took(self, step: str, seconds: float) -> None:
        self.seconds[step] = round(self.seconds.get(step, 0.0) + seconds, 2)

    def _say(self, text: str) -> None:
        self.console.print(f"\n{text}", style="bold", soft_wrap=True, markup=False, highlight=False)
        self.console.file.flush()

    def _summary(self, store: Store, verdict: str) -> dict[str, Any]:
        shape = store.manifest.shape
        samples, tokens, loss_tokens = store.totals()
        return {
            "samples": samples,
            "tokens": tokens,
            "loss_tokens": loss_tokens,
            "bytes": tokens * shape.bytes_per_token,
            "bytes_per_token": shape.bytes_per_token,
            "bytes_on_disk": sum(path.stat().st_size for path in store.path.rglob("*") if path.is_file()),
            "layers": list(shape.layers),
            "hidden_size": shape.hidden_size,
            "dtype": shape.dtype,
            "final_state": shape.final_state,
            "verdict": verdict,
            "seconds": {**self.seconds, "total": round(time.monotonic() - self.started_s, 2)},
            "store": str(store.path),
            "hsdump_version": __version__,
        }


def _explained(store: Store, summary: dict[str, Any], places: Places) -> str:
    """Say to a newcomer what happened, where it lies, and what comes next."""
    return "\n".join([_what_happened(summary, places), _one_sample(store), _what_next(places)])


def _what_happened(summary: dict[str, Any], places: Places) -> str:
    layers = ", ".join(map(str, summary["layers"]))
    return f"""
What happened, in {summary["seconds"]["total"]:.0f} s
  A small code model answered {summary["samples"]} questions: it went on with functions of Python's standard library.
  It read all {summary["tokens"]:,} tokens again; {summary["loss_tokens"]:,} are its own words, which a drafter learns.
  For every token {len(summary["layers"]) + 1} vectors of {summary["hidden_size"]} numbers were kept: what comes out of
  decoder layers {layers} (counted from 1), and the final state, which the model's lm_head reads.
  `hsdump verify` read all of it back and finds it {summary["verdict"]}.
  An EAGLE-3 drafter was trained on these, and exported for SGLang and vLLM.

How good it is, on {summary["prompts_decoded"]} questions that the drafter has not learned from, 3 draft tokens, greedy
  acceptance length {summary["acceptance_length"]:.2f} tokens a forward of the target (1: no drafter, 4: the most)
  {summary["acceptance_length_untrained"]:.2f} with an untrained drafter of the same shape
  {_lossless(summary)}

Where it lies
  {places.store}  {decimal(summary["bytes_on_disk"])}, {summary["bytes_per_token"]:,} bytes of states a token
  {places.drafter}  the drafter, its progress and settings
  {places.exported("sglang")}, {places.exported("vllm")}  the same, as these engines load it
  {places.summary}  the numbers of this run, for scripts
"""


def _lossless(summary: dict[str, Any]) -> str:
    if not summary["lossless"]:
        return "NOT lossless: an output differs from the target's own"
    ties = summary["outputs_differing_at_ties"]
    return "lossless: every output is the target's own" + (f", {ties} but for a tie of two tokens" if ties else "")


def _one_sample(store: Store) -> str:
    shape, sample = store.manifest.shape, store[0]
    lines = [
        f"One sample of it, made from {sample.source}",
        f"  input_ids  int64     [{sample.num_tokens}]",
        f"  loss_mask  uint8     [{sample.num_tokens}]       {int(sample.loss_mask.sum())} of them 1",
    ]
    for name, state in sample.states.items():
        norms_S = np.linalg.norm(to_float32(state, shape.dtype), axis=1)
        size = f"[{state.shape[0]}, {state.shape[1]}]"
        lines.append(
            f"  {name:<10} {shape.dtype:<9} {size:<11} a token's vector is {norms_S.mean():.1f} long on average"
        )
    return "\n".join(lines)


def _what_next(places: Places) -> str:
    hsdump = _as_typed("hsdump")
    return f"""
Look further
  {hsdump} prepare {_short(PROMPTS)} --model {_short(TARGET)} --out {places.out / "chats.parquet"} --show 2
  {hsdump} eval {places.drafter} --store {places.store}
  {hsdump} verify {places.store} --json
  README.md, "Reading the store", says how to get at the arrays from Python

With a real server (SGLang 0.5.11 or later, hsdump installed beside it)
  hsdump serve -- --model-path MODEL --port 30000          your own SGLang arguments after the --
  hsdump extract chats.jsonl --server http://127.0.0.1:30000 --out STORE
  hsdump verify STORE
"""


def _typed(words: Sequence[str | Path]) -> str:
    return f"$ {_as_typed('hsdump')} {shlex.join(map(str, words))}"


def _watched(process: subprocess.Popen[bytes], started_s: float) -> Future[float]:
    """Time a process that nobody waits for yet."""
    seconds: Future[float] = Future()

    def watch() -> None:
        process.wait()
        seconds.set_result(time.monotonic() - started_s)

    threading.Thread(target=watch, daemon=True).start()
    return seconds


def _command(module: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", *module]


def _environment() -> dict[str, str]:
    return {**os.environ, **ENVIRONMENT}


def _as_typed(script: str) -> str:
    """Give a script of this environment as the reader can type it, in or outside of the activated environment."""
    beside = Path(sys.executable).with_name(script)
    return script if not beside.exists() or shutil.which(script) == str(beside) else str(_short(beside))


def _short(path: Path) -> Path:
    """Give a path below the current folder without the way to it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def main(argv: list[str] | None = None) -> int:
    """Run the demo and give its exit code; a user's mistake never shows a stack trace."""
    parser = argparse.ArgumentParser(prog="python -m hsdump.demo.run", description="The whole job in small.")
    parser.add_argument("--out", type=Path, default=Path("demo-out"), help="folder; an earlier demo in it is made anew")
    places = Places(parser.parse_args(argv).out)
    console = Console()
    try:
        return Demo(places=places, console=console).run()
    except HsdumpError as error:
        sys.stderr.write(f"hsdump demo: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        sys.stderr.write("hsdump demo: stopped\n")
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
