"""Runs in a process of its own: load exports with their consumers' readers and write what these gave.

    python read.py CONSUMERS_FOLDER FORMAT:EXPORT_FOLDER:RESULT.pt ...

The consumers' packages import their whole training stack at the top (vision libraries, flash attention, servers'
clients), so only the modules of the readers are imported, under empty packages of the same names.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from unittest.mock import MagicMock

import torch


def module_of(root: Path, name: str, *beside: str) -> types.ModuleType:
    """Import a module without running the packages above it, nor those beside it."""
    parts = name.split(".")
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == parts[0]]:
        del sys.modules[loaded]  # there are two releases of one of them
    above = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    for empty in (*above, *beside):
        package = types.ModuleType(empty)
        package.__path__ = [str(root.joinpath(*empty.split(".")))]
        sys.modules[empty] = package
    return importlib.import_module(name)


def speculators(root: Path, export: Path) -> list[dict[str, object]]:
    """speculators 0.9.0: `ArrowDataset`, which compares the tokens of both files."""
    for client in ("openai", "openai.types", "openai.types.chat", "openai.types.completion"):
        sys.modules[client] = MagicMock()  # for generating data on a server; nothing is generated here
    data = module_of(root, "speculators.train.data", "speculators.data_generation")
    found = data.ArrowDataset(4096, str(export), on_missing="raise")
    return [found._get_raw_data(place) for place in range(len(found))]


def speculators_v1(root: Path, export: Path) -> list[dict[str, object]]:
    """speculators 0.3.0, the last release that reads these files: `Eagle3SampleFileDataset`."""
    data = module_of(root / "v1", "speculators.train.data")
    found = data.Eagle3SampleFileDataset(4096, datapath=str(export))
    samples = []
    for place, file in enumerate(found.data):
        sample = found.standardize_fn(torch.load(file, weights_only=True))
        assert len(found[place]["input_ids"]) == len(sample["input_ids"]) - 1  # it shifts tokens against states
        samples.append(sample)
    return samples


def specforge(root: Path, export: Path) -> list[dict[str, object]]:
    """SpecForge 0.2.0: `OfflineManifestReader` proves every file, `load_feature_file` reads it as its loader does."""
    reader = module_of(root, "specforge.runtime.data_plane.offline_reader")
    store = sys.modules["specforge.runtime.data_plane.feature_store"]
    references = list(reader.OfflineManifestReader(str(export), validate_files=True).read())
    files = sorted(path for path in export.rglob("data_*") if path.is_file())
    assert len(references) == len(files)
    return [store.load_feature_file(str(file)) for file in files]


def modelopt(root: Path, export: Path) -> list[dict[str, object]]:
    """ModelOpt 0.47.0: `OfflineSupervisedDataset` with the masks of the files."""
    utils = module_of(root, "modelopt.torch.speculative.eagle.utils", "modelopt.torch.utils")
    files = sorted(str(path) for path in export.glob("*.pt"))
    found = utils.OfflineSupervisedDataset(files, answer_only_loss=True)
    return [found[place] for place in range(len(found))]


if __name__ == "__main__":
    consumers = Path(sys.argv[1])
    sys.path.append(str(consumers))
    sys.path.append(str(consumers / "v1"))
    readers = {
        "speculators": speculators,
        "speculators-v1": speculators_v1,
        "specforge": specforge,
        "modelopt": modelopt,
    }
    for job in sys.argv[2:]:
        name, export, result = job.split(":")
        samples = readers[name](consumers, Path(export))
        torch.save([{k: v for k, v in sample.items() if not callable(v)} for sample in samples], result)
