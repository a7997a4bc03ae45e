"""What the whole suite shares: tiny models, and the real server's environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_env.sgl_kernel.widening import widen_where_needed
from tests.server.harness import SGLANG_PYTHON
from tests.tiny_models import tiny_model_path

# Transformers' answers are what most tests compare with.
widen_where_needed()


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """Give a Llama of 8 layers, hidden size 256, with random weights."""
    return tiny_model_path("llama")


@pytest.fixture(scope="session")
def tiny_qwen3() -> Path:
    """Give a Qwen3 of 8 layers, hidden size 256, with random weights."""
    return tiny_model_path("qwen3")


@pytest.fixture(scope="session")
def tiny_gemma3() -> Path:
    """Give a Gemma 3 of 8 layers, hidden size 256, with random weights."""
    return tiny_model_path("gemma3")


@pytest.fixture(scope="session")
def tiny_dsv3() -> Path:
    """Give a DeepSeek-V3 of 6 layers (latent attention, mixture of experts from the second) with random weights."""
    return tiny_model_path("dsv3")


LONGEST_FIRST = ("capture", "driver", "kills", "patch", "proof", "generate", "speculation", "bad_input")
"""The files that start most servers. Two processes share the suite by files, so the short ones belong at the end."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the long files first. Within a file, nothing moves."""
    order = {f"test_{name}.py": place for place, name in enumerate(LONGEST_FIRST)}

    def place(item: pytest.Item) -> int:
        if item.path.parent.name != "server":
            return len(order) + 1
        return order.get(item.path.name, len(order))

    items.sort(key=place)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Fail, not skip, a test that needs a server when there is none to start: a skip would look like a pass."""
    if item.get_closest_marker("server") and not SGLANG_PYTHON.exists():
        what = f"{SGLANG_PYTHON} is missing"
        pytest.fail(f"{what}; build it with `make engines`, or leave its tests out with -m 'not server'", pytrace=False)
