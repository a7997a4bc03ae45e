"""Table and pictures of a story's results.

python -m benchmarks.story.report benchmarks/results/story.json     (.md beside it; two .svg with matplotlib)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Steps = dict[str, dict[str, Any]]

KINDS = {
    "sound": "the server's own",
    "transformers": "transformers' instead of the server's",
    "layers-shifted": "auxiliary layers shifted by one",
    "pre-norm-final": "final state before the norm",
    "rows-shifted": "rows shifted by one",
    "prompts-only": "prompts only, no answers",
    "fp8": "fp8 store",
    "half": "half of the samples",
    "quarter": "a quarter of the samples",
    "untrained": "none: untrained",
}


def table(head: list[str], rows: list[list[Any]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return ["", *lines, *("| " + " | ".join(map(show, row)) + " |" for row in rows), ""]


def show(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def report(story: dict[str, Any]) -> str:
    """Write everything that was measured as Markdown."""
    steps: Steps = story["steps"]
    machine, versions = story["machine"], story["versions"]
    where = machine.get("gpu") or f"{machine['cpus']} CPU cores, no GPU"
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    lines = [
        f"# A story of one drafter, scale `{story['scale']}`",
        "",
        f"{where}{'; ' if known else ''}{known}.",
        "",
        *(f"    {said}" for said in story["commands"]),
    ]
    for part in (target, serving, drafting, bench, rounding, evaluated, lesson, times):
        lines += part(steps)
    lines += [f"\nNote: {note}" for note in story.get("notes", [])]
    if story.get("errors"):
        lines += ["", "Failed on the way:", ""]
        lines += [f"- {one['step']}, call {one['call']}: `{one['error'].splitlines()[0]}`" for one in story["errors"]]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def target(steps: Steps) -> list[str]:
    found, text = steps.get("target.train"), steps.get("target.text")
    if not found or not text:
        return []
    rows = [[name, found.get(name)] for name in ("weights", "layers", "hidden_size", "steps", "tokens", "epochs")]
    rows += [
        [name, found.get(name)]
        for name in ("seconds", "tokens_per_s", "loss", "held_out_loss", "trained_loss", "written_loss", "dense_error")
    ]
    rows += [["files of text", text["files"]], ["characters", text["characters"]]]
    every = max(1, len(found["curve"]) // 8)
    curve = "; ".join(f"{point['s']:.0f} s {point['loss']:.2f}" for point in found["curve"][::every])
    return ["", "## Target", *table(["", ""], rows), f"Loss: {curve}"]


def serving(steps: Steps) -> list[str]:
    rows: list[list[Any]] = []
    for name, fields in (
        ("serve.generate", ("answers", "answer_tokens", "answer_tokens_per_s", "seconds")),
        (
            "serve.rates",
            (
                "plain_tokens_per_s",
                "capture_on_ratio",
                "drained_ratio",
                "store_tokens_per_s",
                "store_ratio",
                "store_direct_ratio",
                "beside_writer_ratio",
            ),
        ),
        (
            "serve.extract",
            ("committed", "tokens", "tokens_per_s", "gb_per_s", "seconds", "retries"),
        ),
    ):
        rows += [[name, field, steps[name].get(field)] for field in fields if name in steps and field in steps[name]]
    for name in ("serve.verify", "serve.prove", "serve.probe"):
        if name in steps:
            rows.append([name, "verdict", steps[name].get("verdict")])
    if "serve.detach" in steps:
        found = steps["serve.detach"]
        rows.append(["serve.detach", "proofs", "; ".join(found.get("proofs") or found.get("words") or [])])
    words = steps.get("serve.prove", {}).get("words", [])
    lines = ["", "## Served, captured, proved", *table(["step", "figure", ""], rows), *(f"- {word}" for word in words)]
    readings = dict(steps.get("serve.rates", {}).get("readings", {}))
    readings.pop("writer_bytes_per_s", None)
    if readings:
        shown = [[name, "; ".join(f"{value:,.0f}" for value in values)] for name, values in readings.items()]
        lines += ["", "Each reading, in the order in which it was taken; the ratios are of medians:"]
        lines += table(["reading", "tokens/s"], shown)
    return lines


def drafting(steps: Steps) -> list[str]:
    rows = []
    if "draft.vocab" in steps:
        found = steps["draft.vocab"]
        rows.append(["vocab", f"{found['size']:,} of {found['target_size']:,}", found["coverage_held_out"]])
    if "draft.train" in steps:
        found = steps["draft.train"]
        rows.append(["train", f"{found['steps']:,} steps, {found['tokens']:,} tokens", found["acceptance_length"]])
    if "draft.export" in steps:
        found = steps["draft.export"]
        rows.append(["export", f"layers {found['layers']} are {found['engine_layers']} for SGLang", None])
    head = ["", "", "held-out tokens covered; acceptance length by teacher forcing"]
    return ["", "## Drafter", *table(head, rows)] if rows else []


def bench(steps: Steps) -> list[str]:
    rows = []
    for _, found in sorted((name, found) for name, found in steps.items() if name.startswith("bench.steps-")):
        for row in found["rows"]:
            rates = " ".join(f"{rate:.1%}" for rate in row["per_position"])
            costs = [row.get("plain_forward_ms"), row.get("round_ms"), row.get("break_even_length")]
            speeds = [row["tokens_per_s"], row["plain_tokens_per_s"], row["speedup"]]
            rows.append([found["steps"], row["concurrency"], row["acceptance_length"], rates, *speeds, *costs])
    if not rows:
        return []
    head = ["steps", "in flight", "acceptance length", "per position", "tokens/s", "without", "speedup"]
    head += ["plain forward, ms", "round, ms", "length that breaks even"]
    lines = ["", "## SGLang with the drafter and without", *table(head, rows)]
    if "bench.lossless" in steps:
        found = steps["bench.lossless"]
        margins = ", ".join(str(one["margin"]) for one in found["parted"])
        lines.append(
            f"Greedy: {found['identical']} of {found['requests']} outputs identical; "
            f"{found['differing_at_a_near_tie']} differ first at a near tie, {found['differing_otherwise']} otherwise "
            f"(margins of the two best logits: {margins or 'none'}). Plain at 16 in flight equals plain at 1 for "
            f"{found['plain_against_itself_at_16']} of {found['requests']}."
        )
    return lines


def rounding(steps: Steps) -> list[str]:
    """Show how many outputs agree on servers that round less."""
    rows = []
    for name, found in steps.items():
        if name.startswith("rounding."):
            margins = ", ".join(str(one["margin"]) for one in found["parted"])
            rows.append([name.partition(".")[2], found["identical"], found["requests"]])
            rows[-1] += [found["differing_at_a_near_tie"], found["differing_otherwise"], margins]
            rows[-1] += [found["plain_against_itself_at_16"]]
    if not rows:
        return []
    head = [
        "server",
        "identical",
        "of",
        "others, at a near tie",
        "otherwise",
        "margins",
        "plain at 16 in flight as at 1",
    ]
    return ["", "## The same outputs, where servers round less", *table(head, rows)]


def evaluated(steps: Steps) -> list[str]:
    """Show decoding in one process, which is what a CPU run's drafter is foretold."""
    rows, lines = [], []
    for _, found in sorted((name, found) for name, found in steps.items() if name.startswith("bench.eval-")):
        for row in found["walked"]:
            rates = " ".join(f"{rate:.1%}" for rate in row["per_position"])
            rows.append([found["steps"], row["category"], row["prompts"], row["acceptance_length"], rates])
        if found["untrained"]:
            rows.append([found["steps"], "untrained", found["untrained"]["prompts"]])
            rows[-1] += [found["untrained"]["acceptance_length"], None]
        same = found["walked"][0]["prompts"] - len(found["differing"])
        lines.append(
            f"- {found['steps']} draft tokens: {same} of {found['walked'][0]['prompts']} outputs are the target's own, "
            f"{found['near_ties']} of the others part at a tie"
        )
    if not rows:
        return []
    head = ["draft tokens", "questions", "number", "acceptance length", "per position"]
    why = "Decoded with `hsdump eval` (transformers, one process)."
    return ["", "## Decoding", "", why, *table(head, rows), *lines]


def lesson(steps: Steps) -> list[str]:
    rows = []
    for kind, words in KINDS.items():
        found, judged = steps.get(f"lesson.{kind}"), steps.get(f"lesson.check-{kind}", {})
        if not found:
            continue
        stopped = not judged["train_takes_it"] if judged else None
        forced, decoded = found["forced"], found["decoded"]
        rates = " ".join(f"{rate:.1%}" for rate in decoded["per_position"])
        lengths = [forced["acceptance_length"], decoded["acceptance_length"], rates, found.get("own_validation")]
        rows.append([words, *lengths, judged.get("verify"), judged.get("prove"), stopped])
    if not rows:
        return []
    head = [
        "states learned from",
        "length, true states forced",
        "decoded",
        "per position",
        "on its own held-out states",
    ]
    head += ["verify", "prove", "train refuses it"]
    lines = ["", "## The lesson", *table(head, rows)]
    for kind, words in KINDS.items():
        refusal = steps.get(f"lesson.check-{kind}", {}).get("refusal")
        if refusal:
            lines.append(f"- {words}: {steps[f'lesson.check-{kind}'].get('words', [refusal])[0]}")
    return lines


def times(steps: Steps) -> list[str]:
    """Show what the stages took, and extraction's share of it."""
    stages: dict[str, float] = {}
    for name, found in steps.items():
        stage = name.partition(".")[0]
        stages[stage] = stages.get(stage, 0.0) + found["step_seconds"]
    story = sum(seconds for stage, seconds in stages.items() if stage != "lesson")
    lines = ["", "## Time", *table(["stage", "seconds"], [[stage, seconds] for stage, seconds in stages.items()])]
    if "serve.extract" in steps:
        taken = float(steps["serve.extract"].get("command_seconds") or steps["serve.extract"]["step_seconds"])
        share = taken / story
        lines.append(
            f"Extraction took {taken:.1f} s, {share:.1%} of the story without the lesson (starts not counted)."
        )
    return lines


def by_position(steps: Steps) -> dict[str, list[float]]:
    """Give acceptance by position of whatever was measured."""
    found: dict[str, list[float]] = {}
    for name, step in steps.items():
        if name.startswith("bench.steps-"):
            found[f"SGLang, {step['steps']} steps"] = step["rows"][0]["per_position"]
        elif name.startswith("bench.eval-"):
            found[f"eval, {step['steps']} draft tokens"] = step["walked"][0]["per_position"]
    return found


def pictures(story: dict[str, Any], path: Path) -> list[Path]:
    """Draw acceptance by position, and tokens/s with and without where a server was measured."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "story"  # the same picture from the same figures
    import matplotlib.pyplot as plt

    steps: Steps = story["steps"]
    written = []
    figure, axis = plt.subplots(figsize=(6, 3.6))
    for name, rates in by_position(steps).items():
        axis.plot(range(1, len(rates) + 1), rates, "o-", label=name)
    for kind in ("sound", "layers-shifted", "pre-norm-final", "rows-shifted"):
        if f"lesson.{kind}" in steps:
            rates = steps[f"lesson.{kind}"]["forced"]["per_position"]
            axis.plot(range(1, len(rates) + 1), rates, "x--", label=f"lesson, forced: {kind}")
    if axis.lines:
        axis.set(xlabel="position in the draft", ylabel="share of drafts taken", ylim=(0, 1))
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.legend(fontsize=8)
        written.append(save(figure, path.with_name(f"{path.stem}-acceptance.svg")))
    measured = [step for name, step in steps.items() if name.startswith("bench.steps-") and len(step["rows"]) > 1]
    if measured:
        rows = measured[0]["rows"]
        figure, axis = plt.subplots(figsize=(6, 3.6))
        flights = [row["concurrency"] for row in rows]
        axis.plot(flights, [row["tokens_per_s"] for row in rows], "o-", label=f"with, {measured[0]['steps']} steps")
        axis.plot(flights, [row["plain_tokens_per_s"] for row in rows], "s-", label="without")
        axis.set(xlabel="requests in flight", ylabel="tokens/s", xscale="log", ylim=(0, None))
        axis.set_xticks(flights, [str(number) for number in flights])
        axis.legend()
        written.append(save(figure, path.with_name(f"{path.stem}-speed.svg")))
    return written


def save(figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    return path


def main() -> None:
    path = Path(sys.argv[1])
    story = json.loads(path.read_text(encoding="utf-8"))
    path.with_suffix(".md").write_text(report(story), encoding="utf-8")
    try:
        print(*pictures(story, path))
    except ModuleNotFoundError:
        print("no pictures: pip install matplotlib")


if __name__ == "__main__":
    main()
