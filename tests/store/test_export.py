"""Exports: what each file holds, and that the final state is the one that its reader expects."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from safetensors.torch import load_file, save_file

from hsdump.errors import InputError, StoreError
from hsdump.store import Manifest, StoreWriter
from hsdump.store.export import FORMATS, ExportOptions, export_store
from tests.store.making import Made, fill, make_manifest, make_sample

WIDTH = 64
EPS = 1e-5

BFLOAT16 = 2.0**-8
"""Relative step of bfloat16; one rounding is half of it."""


def norm(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm as Llama does it."""
    wide = states.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * normed.to(states.dtype)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model(tmp_path)


def make_model(parent: Path) -> Path:
    """A folder with a config and a final norm, whose weights differ widely as real ones do."""
    folder = parent / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": EPS}))
    weight = (torch.rand(WIDTH, generator=torch.Generator().manual_seed(0)) * 4 + 0.05).to(torch.bfloat16)
    save_file({"model.norm.weight": weight, "other": torch.zeros(3)}, folder / "model.safetensors")
    return folder


def as_torch(state: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(state.copy()).view(torch.bfloat16)


def make_store(path: Path, model: Path, **changes: object) -> tuple[Manifest, list[Made], list[torch.Tensor]]:
    """A store of real post-norm states; gives the pre-norm ones that they were made of, too."""
    manifest = make_manifest(hidden_size=WIDTH, model_path=str(model), **changes)
    weight = load_file(model / "model.safetensors")["model.norm.weight"]
    made, before = [], []
    for seed in range(3):
        one = make_sample(seed, manifest, num_tokens=5 + seed)
        pre = as_torch(one.states[-1]) * 37
        post = norm(pre, weight)
        finals = {"pre_norm": [pre], "post_norm": [post], "both": [post, pre]}[manifest.final_state]
        made.append(Made(one.sample, (*one.states[:2], *(final.view(torch.uint16).numpy() for final in finals))))
        before.append(pre)
    with StoreWriter.open(path, manifest) as writer:
        for one in made:
            writer.add(one.sample, one.states)
        writer.commit()
    return manifest, made, before


def files_of(path: Path, to: str, out: Path, **options: object) -> list[dict[str, object]]:
    report = export_store(path, ExportOptions(to=to, out=out, **options))  # type: ignore[arg-type]  # a dict of mixed
    assert report.files == 3
    names = sorted(file for file in out.rglob("*") if file.suffix in {".pt", ".ckpt", ".safetensors"})
    return [load_file(name) if name.suffix == ".safetensors" else torch.load(name) for name in names]


def test_speculators_v1(tmp_path: Path, model: Path) -> None:
    _, made, before = make_store(tmp_path / "store", model)
    weight = load_file(model / "model.safetensors")["model.norm.weight"]
    for one, pre, found in zip(
        made, before, files_of(tmp_path / "store", "speculators-v1", tmp_path / "out"), strict=True
    ):
        assert list(found) == ["input_ids", "hidden_states", "loss_mask"]
        assert (found["input_ids"].dtype, found["loss_mask"].dtype) == (torch.int64, torch.int64)
        assert found["input_ids"].tolist() == one.sample.input_ids.tolist()
        assert found["loss_mask"].tolist() == one.sample.loss_mask.tolist()
        assert len(found["hidden_states"]) == 3
        assert torch.equal(found["hidden_states"][0], as_torch(one.states[0]))
        assert_same_behind_the_norm(found["hidden_states"][-1], pre, weight)


def assert_same_behind_the_norm(found: torch.Tensor, pre: torch.Tensor, weight: torch.Tensor) -> None:
    """What a trainer that applies the target's own norm computes from it is what the target computed."""
    expected = norm(pre, weight).float()
    # Rounded to bfloat16 as y, as y / w, as the normed rows and as the result: four half steps.
    torch.testing.assert_close(norm(found, weight).float(), expected, rtol=4 * BFLOAT16 / 2 * 1.01, atol=0)
    # And it is no post-norm state under another name.
    assert (norm(norm(pre, weight), weight).float() - expected).norm() / expected.norm() > 0.1
    cosine = torch.nn.functional.cosine_similarity(found.float(), pre.float())
    assert (cosine > 0.9999).all()


def test_speculators_with_arrow_rows(tmp_path: Path, model: Path) -> None:
    _, made, before = make_store(tmp_path / "store", model)
    weight = load_file(model / "model.safetensors")["model.norm.weight"]
    for one, pre, found in zip(
        made, before, files_of(tmp_path / "store", "speculators", tmp_path / "out"), strict=True
    ):
        assert found["hidden_states"].shape == (len(one.sample.input_ids), 3, WIDTH)
        assert found["hidden_states"].dtype == torch.bfloat16
        assert torch.equal(found["hidden_states"][:, 1], as_torch(one.states[1]))
        assert found["token_ids"].tolist() == one.sample.input_ids.tolist()
        assert_same_behind_the_norm(found["hidden_states"][:, -1], pre, weight)
    with pa.OSFile(str(tmp_path / "out" / "data-00000-of-00001.arrow")) as file:
        rows = pa.ipc.open_stream(file).read_all().to_pylist()
    assert [row["input_ids"] for row in rows] == [one.sample.input_ids.tolist() for one in made]
    assert [row["loss_mask"] for row in rows] == [one.sample.loss_mask.tolist() for one in made]
    notes = json.loads((tmp_path / "out" / "export.json").read_text())
    assert notes["aux_layer_ids"] == [2, 4]
    assert "post_norm to pre_norm" in notes["converted"]


def test_specforge(tmp_path: Path, model: Path) -> None:
    _, made, _ = make_store(tmp_path / "store", model)
    for one, found in zip(made, files_of(tmp_path / "store", "specforge", tmp_path / "out"), strict=True):
        length = len(one.sample.input_ids)
        assert found["hidden_state"].shape == (1, length, WIDTH)
        assert found["aux_hidden_state"].shape == (1, length, 2 * WIDTH)
        assert torch.equal(found["hidden_state"][0], as_torch(one.states[-1]))
        assert torch.equal(found["aux_hidden_state"][0, :, WIDTH:], as_torch(one.states[1]))
        assert found["loss_mask"].dtype == found["input_ids"].dtype == torch.int64
    notes = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (notes["aux_layer_ids"], notes["converted"]) == ([1, 3], "")
    assert (tmp_path / "out" / "rows_0-2000" / "data_2.ckpt").is_file()


def test_specforge_gzip(tmp_path: Path, model: Path) -> None:
    import gzip

    make_store(tmp_path / "store", model)
    export_store(tmp_path / "store", ExportOptions(to="specforge", out=tmp_path / "out", gzip=True))
    with gzip.open(tmp_path / "out" / "rows_0-2000" / "data_0.ckpt.gz") as file:
        assert set(torch.load(file)) == {"input_ids", "loss_mask", "hidden_state", "aux_hidden_state"}


def test_modelopt(tmp_path: Path, model: Path) -> None:
    _, made, _ = make_store(tmp_path / "store", model)
    by_key = {one.sample.key: one for one in made}
    for found in files_of(tmp_path / "store", "modelopt", tmp_path / "out"):
        one = by_key[found["conversation_id"]]
        assert torch.equal(found["hidden_states"], as_torch(one.states[-1]))
        assert found["aux_hidden_states"].shape == (len(one.sample.input_ids), 2 * WIDTH)


def test_a_pre_norm_store_becomes_post_norm_as_the_model_would(tmp_path: Path, model: Path) -> None:
    _, made, before = make_store(tmp_path / "store", model, final_state="pre_norm")
    weight = load_file(model / "model.safetensors")["model.norm.weight"]
    for pre, found in zip(before, files_of(tmp_path / "store", "specforge", tmp_path / "out"), strict=True):
        # numpy and torch add squares in another order: the last bit before the first rounding may differ.
        torch.testing.assert_close(found["hidden_state"][0].float(), norm(pre, weight).float(), rtol=BFLOAT16, atol=0)
    for one, found in zip(made, files_of(tmp_path / "store", "speculators", tmp_path / "out2"), strict=True):
        assert torch.equal(found["hidden_states"][:, -1], as_torch(one.states[-1]))  # untouched


@pytest.mark.parametrize("to", sorted(FORMATS))
def test_of_both_final_states_each_format_takes_its_own(tmp_path: Path, model: Path, to: str) -> None:
    """Bit for bit, and without the checkpoint."""
    _, made, _ = make_store(tmp_path / "store", model, final_state="both")
    (model / "config.json").unlink()
    by_ids = {tuple(one.sample.input_ids.tolist()): one for one in made}
    for found in files_of(tmp_path / "store", to, tmp_path / "out"):
        one = by_ids[tuple(found.get("input_ids", found.get("token_ids")).tolist())]
        aux, final = {
            "speculators-v1": lambda f: (f["hidden_states"][:-1], f["hidden_states"][-1]),
            "speculators": lambda f: (f["hidden_states"][:, :-1].unbind(1), f["hidden_states"][:, -1]),
            "specforge": lambda f: (f["aux_hidden_state"][0].split(WIDTH, -1), f["hidden_state"][0]),
            "modelopt": lambda f: (f["aux_hidden_states"].split(WIDTH, -1), f["hidden_states"]),
        }[to](found)
        post, pre = (as_torch(state) for state in one.states[-2:])
        assert torch.equal(final, pre if to.startswith("speculators") else post)
        assert len(aux) == 2
        assert all(torch.equal(state, as_torch(expected)) for state, expected in zip(aux, one.states, strict=False))
    notes = json.loads((tmp_path / "out" / "export.json").read_text())
    assert (notes["final_state"], notes["converted"]) == (FORMATS[to].final_state, "")


def test_a_norm_that_cannot_be_had_is_refused_before_a_file_is_written(tmp_path: Path, model: Path) -> None:
    make_store(tmp_path / "store", model)
    options = ExportOptions(to="speculators", out=tmp_path / "out")
    (model / "config.json").write_text(json.dumps({"model_type": "gemma3_text", "rms_norm_eps": EPS}))
    with pytest.raises(InputError, match="model type 'gemma3_text' is not a plain RMSNorm"):
        export_store(tmp_path / "store", options)
    (model / "config.json").write_text(json.dumps({"model_type": "llama", "rms_norm_eps": EPS}))
    save_file({"model.norm.weight": torch.zeros(WIDTH)}, model / "model.safetensors")
    with pytest.raises(InputError, match="holds zeros"):
        export_store(tmp_path / "store", options)
    save_file({"model.norm.weight": torch.ones(3)}, model / "model.safetensors")
    with pytest.raises(InputError, match=r"is F32 \[3\], the store's states are 64 wide"):
        export_store(tmp_path / "store", options)
    save_file({"other": torch.ones(3)}, model / "model.safetensors")
    with pytest.raises(InputError, match=r"no safetensors file holds one of model\.norm\.weight"):
        export_store(tmp_path / "store", options)
    (model / "config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json cannot be read.*\n  fix: name the target's folder"):
        export_store(tmp_path / "store", options)
    assert not (tmp_path / "out").exists()


def test_an_export_goes_on_where_it_stopped_and_is_never_mixed(tmp_path: Path, model: Path) -> None:
    make_store(tmp_path / "store", model)
    out = tmp_path / "out"
    dry = export_store(tmp_path / "store", ExportOptions(to="specforge", out=out, dry_run=True))
    assert (dry.files, out.exists()) == (3, False)
    export_store(tmp_path / "store", ExportOptions(to="specforge", out=out))
    (out / "rows_0-2000" / "data_1.ckpt").unlink()
    report = export_store(tmp_path / "store", ExportOptions(to="specforge", out=out))
    assert (report.files, report.kept) == (1, 2)
    with pytest.raises(StoreError, match="holds the export specforge"):
        export_store(tmp_path / "store", ExportOptions(to="modelopt", out=out))
    with pytest.raises(StoreError, match="is not empty"):
        export_store(tmp_path / "store", ExportOptions(to="modelopt", out=model))


@pytest.mark.parametrize("to", sorted(FORMATS))
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_other_dtypes_keep_theirs(tmp_path: Path, model: Path, to: str, dtype: str) -> None:
    fill(tmp_path / "store", range(3), make_manifest(hidden_size=WIDTH, dtype=dtype, model_path=str(model)))
    found = files_of(tmp_path / "store", to, tmp_path / "out")[0]
    states = found.get("hidden_states", found.get("hidden_state"))
    states = states[0] if isinstance(states, list) else states
    assert states.dtype == getattr(torch, dtype)
