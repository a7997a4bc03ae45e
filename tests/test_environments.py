"""The environments that the Makefile builds: told when missing, and the same next month."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it where Python has none
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
ENGINE_ENV = ROOT / "tests/engine_env"


def test_a_server_test_without_its_environment_fails_and_names_the_command(tmp_path: Path) -> None:
    test = tmp_path / "test_needs_server.py"
    test.write_text(
        "import pytest\n\n@pytest.mark.server\ndef test_server(): pass\n\ndef test_without(): pass\n", encoding="utf-8"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "pyproject.toml", "--rootdir", ".", str(test)],
        cwd=ROOT,
        env={**os.environ, "HSDUMP_SGLANG_PYTHON": str(tmp_path / "nowhere/python")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "nowhere/python is missing; build it with `make engines`" in run.stdout
    assert "1 passed, 1 error" in run.stdout


@pytest.mark.parametrize("name", ["requirements.txt", "overlay-requirements.txt"])
def test_requirements_are_pinned_exactly(name: str) -> None:
    lines = (ENGINE_ENV / name).read_text(encoding="utf-8").splitlines()
    wanted = [line for line in lines if line and not line.startswith("#")]
    assert wanted
    assert [line for line in wanted if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []


def test_the_entry_point_that_sglang_looks_up_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (plugin,) = project["entry-points"]["sglang.srt.plugins"].items()
    assert callable(EntryPoint(*plugin, group="sglang.srt.plugins").load())


def test_the_stand_in_resolves_any_kernel_and_refuses_to_run_it() -> None:
    program = (
        "from sgl_kernel import a_kernel\n"
        "from sgl_kernel.some.deep_module import another\n"
        "import sgl_kernel\n"
        "assert {a_kernel, sgl_kernel.a_kernel} == {a_kernel} and a_kernel != another\n"
        "assert not hasattr(sgl_kernel, '__version__')\n"
        "try:\n    another(1)\nexcept NotImplementedError as error:\n    print(error)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(ENGINE_ENV)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == "sgl_kernel.some.deep_module.another needs a GPU; this is the stand-in for a CPU"
