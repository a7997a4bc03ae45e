"""Fixtures of the prompts tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hsdump.prompts import PromptOptions, Renderer

from .helpers import LoadRenderer, make_model
from .templates import CHATML


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with the plain ChatML template."""
    return make_model(tmp_path_factory.mktemp("model"), CHATML)


@pytest.fixture
def load(model: Path) -> LoadRenderer:
    """Load the test model's tokenizer with a template and options."""

    def load_renderer(template: str = CHATML, **options: Any) -> Renderer:
        return Renderer.load(str(model), PromptOptions(chat_template=template, **options))

    return load_renderer
