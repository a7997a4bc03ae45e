"""Files that other trainers read.

    speculators-v1   data_<i>.pt                       final state pre-norm
    speculators      hidden_states/hs_<i>.safetensors, with Arrow rows of tokens and masks beside them; pre-norm
    specforge        rows_<a>-<b>/data_<i>.ckpt[.gz]   post-norm
    modelopt         <key>.pt                          post-norm

The functions at the end say what a file holds.

Letters: S = tokens of one sample, L = auxiliary layers, H = hidden size.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hsdump.arrays import StateArray
from hsdump.errors import StoreError, UsageError
from hsdump.layers import FINAL, FINAL_PRE_NORM
from hsdump.store.arrow_rows import write_arrow_rows
from hsdump.store.final_norm import FinalNorm
from hsdump.store.fs import Fs
from hsdump.store.opening import disk_errors
from hsdump.store.reader import Store, StoredSample

ROWS_PER_FOLDER = 2000
"""Of the specforge layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportOptions:
    """What to write, and where."""

    to: str
    out: Path
    model: Path | None = None
    """Target's folder, for its final norm; None takes the manifest's."""

    gzip: bool = False
    dry_run: bool = False
    progress: Callable[[int, int], None] | None = None
    """Called with samples and bytes written since the last call."""


class ExportReport(msgspec.Struct, kw_only=True):
    """What was written; also `export.json` in the folder."""

    format: str
    store: str
    manifest_digest: str
    samples: int
    files: int = 0
    """Written by this run."""

    kept: int = 0
    """There already, from an earlier run."""

    num_bytes: int = 0
    aux_layer_ids: list[int]
    """In the format's own meaning, which `layer_ids_mean` spells out."""

    layer_ids_mean: str
    final_state: str
    """What the files hold."""

    converted: str = ""
    """How the final state was converted, when it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """One consumer's wishes."""

    final_state: str
    """`post_norm` or `pre_norm`."""

    layer_shift: int
    """Added to hsdump's layer ids to get the consumer's."""

    layer_meaning: str
    file_name: Callable[[int, StoredSample], str]
    content: Callable[[StoredSample, dict[str, Any]], dict[str, Any]]
    """From a sample and its states as torch tensors (final converted) to what the file holds."""


def export_store(path: Path, options: ExportOptions) -> ExportReport:
    """Write all samples of a store. Files appear complete or not at all, and are not written twice.

    Raises:
        UsageError: unknown format, or torch is not installed.
        InputError: the final norm is needed and cannot be read.
        StoreError: the folder holds an export of something else.
        StoreCorrupt: a sample's bytes do not hold.
    """
    wanted = _format(options.to)
    with Store(path, check=True) as store:
        manifest = store.manifest
        norm, converted = _conversion(store, wanted, options)
        report = ExportReport(
            format=options.to,
            store=store.name,
            manifest_digest=manifest.digest,
            samples=len(store),
            aux_layer_ids=[layer + wanted.layer_shift for layer in manifest.layers],
            layer_ids_mean=wanted.layer_meaning,
            final_state=wanted.final_state,
            converted=converted,
        )
        with disk_errors(options.out):
            _write_all(store, wanted, norm, options, report)
    return report


def _write_all(
    store: Store, wanted: Format, norm: FinalNorm | None, options: ExportOptions, report: ExportReport
) -> None:
    fs, suffix = Fs(), ".gz" if options.gzip else ""
    if not options.dry_run:
        _claim(options.out, report, fs)
    for place, sample in enumerate(store):
        target = options.out / (wanted.file_name(place, sample) + suffix)
        if target.exists():
            report.kept += 1
        elif options.dry_run:
            report.files += 1
            report.num_bytes += sample.num_tokens * store.manifest.shape.bytes_per_token
        else:
            data = _file_bytes(sample, wanted, norm, store.manifest.dtype, target.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            _put(target, gzip.compress(data, compresslevel=1, mtime=0) if options.gzip else data)
            report.files += 1
            report.num_bytes += len(data)
        if options.progress:
            options.progress(1, sample.num_tokens * store.manifest.shape.bytes_per_token)
    if not options.dry_run:
        if options.to == "speculators":
            write_arrow_rows(store, options.out, fs)
        fs.write_file(options.out / "export.json", msgspec.json.format(msgspec.json.encode(report), indent=2))


def _file_bytes(sample: StoredSample, wanted: Format, norm: FinalNorm | None, dtype: str, name: str) -> bytes:
    states = dict(sample.states)
    pre_norm = states.pop(FINAL_PRE_NORM, None)
    if pre_norm is not None and wanted.final_state == "pre_norm":
        states[FINAL] = pre_norm
    if norm is not None:
        change = norm.undo if wanted.final_state == "pre_norm" else norm.apply
        states[FINAL] = change(states[FINAL], dtype)
    content = wanted.content(sample, {key: _tensor(state, dtype) for key, state in states.items()})
    if name.endswith(".safetensors"):
        from safetensors.torch import save

        return bytes(save(content))
    import torch

    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def _put(path: Path, data: bytes) -> None:
    """Complete or not there; a power loss may cost some files, which the next run writes again."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.rename(path)


def _claim(out: Path, report: ExportReport, fs: Fs) -> None:
    """Refuse to mix exports: positions name the files, so one folder belongs to one store and format."""
    out.mkdir(parents=True, exist_ok=True)
    notes = out / "export.json"
    if notes.exists():
        before = msgspec.json.decode(notes.read_bytes(), type=ExportReport)
        same = (before.format, before.manifest_digest, before.final_state) == (
            report.format,
            report.manifest_digest,
            report.final_state,
        )
        if not same:
            what = f"{out} holds the export {before.format} of {before.store}"
            raise StoreError(what, "name another folder with --out")
    elif any(out.iterdir()):
        raise StoreError(f"{out} is not empty", "name a new folder with --out")
    fs.write_file(notes, msgspec.json.format(msgspec.json.encode(report), indent=2))


def _conversion(store: Store, wanted: Format, options: ExportOptions) -> tuple[FinalNorm | None, str]:
    manifest = store.manifest
    if manifest.final_state in {wanted.final_state, "both"}:
        return None, ""
    model = options.model or Path(manifest.model_path)
    norm = FinalNorm.load(model, manifest.hidden_size)
    if wanted.final_state == "pre_norm":
        return norm, f"post_norm to pre_norm, divided by the norm weight of {model} (rms 1, same after the norm)"
    return norm, f"pre_norm to post_norm, by the RMSNorm of {model} (eps {norm.eps:g})"


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise UsageError(f"--to {name} is not known", f"choose one of {', '.join(FORMATS)}")
    try:
        import torch  # noqa: F401 - is it there?
    except ImportError:
        raise UsageError("exports need torch, which is not installed", "pip install 'hsdump[train]'") from None
    return FORMATS[name]


def _tensor(state_SH: StateArray, dtype: str) -> Any:
    import torch

    tensor = torch.from_numpy(np.array(state_SH))  # its own memory: the shard is read-only
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _ids(sample: StoredSample) -> Any:
    import torch

    return torch.from_numpy(sample.input_ids.astype(np.int64))


def _mask(sample: StoredSample) -> Any:
    import torch

    return torch.from_numpy(sample.loss_mask.astype(np.int64))


def _aux(states: dict[str, Any]) -> list[Any]:
    return [state for name, state in states.items() if name != FINAL]


def _speculators_v1(sample: StoredSample, states: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": _ids(sample), "hidden_states": list(states.values()), "loss_mask": _mask(sample)}


def _speculators(sample: StoredSample, states: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {"hidden_states": torch.stack(list(states.values()), dim=1).contiguous(), "token_ids": _ids(sample)}


def _specforge(sample: StoredSample, states: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {
        "input_ids": _ids(sample),
        "loss_mask": _mask(sample),
        "hidden_state": states[FINAL][None],
        "aux_hidden_state": torch.cat(_aux(states), dim=-1)[None],
    }


def _modelopt(sample: StoredSample, states: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {
        "input_ids": _ids(sample),
        "hidden_states": states[FINAL],
        "aux_hidden_states": torch.cat(_aux(states), dim=-1),
        "loss_mask": _mask(sample),
        "conversation_id": sample.key,
    }


def _specforge_name(place: int, _: StoredSample) -> str:
    first = place - place % ROWS_PER_FOLDER
    return f"rows_{first}-{first + ROWS_PER_FOLDER}/data_{place}.ckpt"


INPUT_OF = "id k is the input of layer k (hsdump's own id)"
OUTPUT_OF = "id k is the output of layer k (hsdump's id less 1)"

FORMATS = {
    "speculators-v1": Format(
        final_state="pre_norm",
        layer_shift=0,
        layer_meaning=INPUT_OF,
        file_name=lambda place, _: f"data_{place}.pt",
        content=_speculators_v1,
    ),
    "speculators": Format(
        final_state="pre_norm",
        layer_shift=0,
        layer_meaning=INPUT_OF,
        file_name=lambda place, _: f"hidden_states/hs_{place}.safetensors",
        content=_speculators,
    ),
    "specforge": Format(
        final_state="post_norm",
        layer_shift=-1,
        layer_meaning=OUTPUT_OF,
        file_name=_specforge_name,
        content=_specforge,
    ),
    "modelopt": Format(
        final_state="post_norm",
        layer_shift=-1,
        layer_meaning=OUTPUT_OF,
        file_name=lambda _, sample: f"{sample.key}.pt",
        content=_modelopt,
    ),
}
