"""How much of what parts greedy outputs is rounding: the comparison of `bench`, on servers that round less.

With a drafter the target reads several tokens at once, and sums of bfloat16 come out in another order than one token at
a time. Where two tokens are nearly as likely, that decides. A server that computes in float32, or whose kernels do the
same whatever is beside a token, has fewer such places; a drafter that changed outputs would do so there as well.
"""

from __future__ import annotations

from functools import partial

from benchmarks.story import bench
from benchmarks.story.state import Story
from benchmarks.story.together import together


def rounding_stage(story: Story) -> None:
    """Compare outputs with and without drafts, for each way to round that this scale has."""
    ways = {name: way for name, way in story.scale.rounding.items() if story.figures(f"rounding.{name}") is None}
    if story.engine != "sglang" or not ways:
        return
    story.need(bench.START_S[story.device] + bench.LOSSLESS_S, "starting servers")
    steps, starts = story.scale.steps[0], {}
    for name, way in ways.items():
        plain_flags, eagle_flags = (*story.scale.bench_flags, *way.flags), (*bench.flags(story, steps), *way.flags)
        starts[f"{name} plain"] = partial(story.serve, f"plain-{name}", *plain_flags)
        starts[f"{name} eagle"] = partial(story.serve, f"eagle-{name}", *eagle_flags)
    at_once = len(starts) if story.device == "cuda" else 1
    with together(starts, at_once=at_once, note=story.note) as urls:
        for name, way in ways.items():
            eagle, plain = urls.get(f"{name} eagle"), urls.get(f"{name} plain")
            if eagle and plain:
                bench.compare(story, f"rounding.{name}", eagle, plain, way.near_tie)
