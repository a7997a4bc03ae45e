"""Data sets by their names on the hub, from a cache as the hub's own client leaves it; no network."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hsdump.errors import InputError
from hsdump.prompts.hub import dataset_rows, is_dataset

READ = """
import json, sys
from pathlib import Path
from hsdump.errors import InputError
from hsdump.prompts.inputs import read_rows
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = [[row.source, row.value] for row in read_rows(Path(name))]
    except InputError as error:
        found[name] = str(error)
print(json.dumps(found))
"""
REVISION = "0123456789" * 4


def test_a_cached_data_set_is_read_by_its_name(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "datasets--org--chats"
    files = repository / "snapshots" / REVISION
    files.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    (files / "train.jsonl").write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "c", "completion": "d"}\n')
    (files / "test.jsonl").write_text('{"prompt": "t", "completion": "u"}\n')
    # In a process of its own: the libraries read these variables when they are imported.
    env = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"}
    names = ["org/chats", "org/chats:test", "org/chats:dev", "org/none"]
    done = subprocess.run([sys.executable, "-c", READ, *names], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["org/chats"] == [
        ["org/chats:train[0]", {"prompt": "a", "completion": "b"}],
        ["org/chats:train[1]", {"prompt": "c", "completion": "d"}],
    ]
    assert found["org/chats:test"] == [["org/chats:test[0]", {"prompt": "t", "completion": "u"}]]
    assert "the data set org/chats, split dev, cannot be read" in found["org/chats:dev"]
    assert "there is no file org/none, and the data set org/none, split train, cannot be read" in found["org/none"]
    assert "without a network: hf download --repo-type dataset org/none elsewhere" in found["org/none"]


def test_files_are_never_taken_for_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chats").write_text("{}")
    names = ("org/chats", "org/chats-v1.5:train[:10%]", "data/chats", "data/none.jsonl", "/org/chats", "chats", "a/b/c")
    assert [name for name in names if is_dataset(Path(name))] == ["org/chats", "org/chats-v1.5:train[:10%]"]


def test_without_the_extra_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"needs the extra `datasets`\n  fix: pip install 'hsdump\[datasets\]'"):
        next(dataset_rows(Path("org/chats")))
