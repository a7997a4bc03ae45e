"""A store takes only samples that were made as its first ones were."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from hsdump.cli.watching import Watch, run_session
from hsdump.errors import StoreMismatch
from hsdump.extract.plan import ExtractOptions
from hsdump.extract.state import RunState
from hsdump.prompts import PromptOptions, Renderer
from hsdump.prompts.row import Row
from hsdump.prompts.samples_file import writing_samples
from tests.prompts.cases import CHATML
from tests.prompts.real import model_for
from tests.unit.test_driver import ScriptedEngine


def test_a_store_is_of_one_way_to_make_tokens(tmp_path: Path) -> None:
    """Else a conversation whose mask or text another setting changes would be in it twice, once each way."""
    model = model_for(tmp_path / "model", CHATML)
    rows = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>b</think>c"}]
    rows.write_text(json.dumps({"messages": turns}) + "\n")

    def extract(inputs: Path, **prompts: Any) -> RunState:
        options = ExtractOptions(
            inputs=(inputs,),
            out=tmp_path / "store",
            model=str(model),
            disk_reserve=0,
            prompts=PromptOptions(**prompts),
        )
        return asyncio.run(run_session({"one": ScriptedEngine()}, options, Watch(quiet=True)))

    assert extract(rows).committed == 1
    assert extract(rows).already == 1
    with pytest.raises(StoreMismatch, match="turns: the store has 'all', this run has 'last'"):
        extract(rows, turns="last")
    with pytest.raises(StoreMismatch, match="thinking: the store has 'keep', this run has 'drop'"):
        extract(rows, thinking="drop")
    prepared = tmp_path / "rows.parquet"
    renderer = Renderer.load(str(model), PromptOptions(date="2026-01-02"))
    made_by = {"tokenizer_digest": renderer.tokenizer_digest, "template_digest": renderer.template_digest}
    with writing_samples(prepared, renderer.options.settings() | made_by) as file:
        for sample in renderer.outcome(Row(source="row", value={"messages": turns})).samples:
            file.append(sample, "sentinel")
    with pytest.raises(StoreMismatch, match="date: the store has '2025-01-01', this run has '2026-01-02'"):
        extract(prepared)
