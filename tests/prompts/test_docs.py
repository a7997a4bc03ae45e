"""docs/prompts.md names every reason, in the column that the code gives it."""

from __future__ import annotations

import re
from pathlib import Path

from hsdump.prompts.options import POLICY_REASONS

ROOT = Path(__file__).parents[2]


def test_every_reason_is_documented() -> None:
    last_row = (ROOT / "docs" / "prompts.md").read_text(encoding="utf-8").strip().splitlines()[-1]
    by_rule, damaged = (set(re.findall(r"`([a-z-]+)`", cell)) for cell in last_row.strip("|").split("|"))
    assert by_rule == set(POLICY_REASONS)
    raised: set[str] = set()
    for path in (ROOT / "src" / "hsdump" / "prompts").glob("*.py"):
        text = path.read_text(encoding="utf-8")
        raised |= set(re.findall(r'RowRefused\(\s*"([a-z-]+)"', text)) | set(re.findall(r'reason="([a-z-]+)"', text))
    assert raised == by_rule | damaged
