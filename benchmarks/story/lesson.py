"""Fifth stage (being written)."""

from benchmarks.story.state import Story


def lesson_stage(story: Story) -> None:
    raise NotImplementedError
