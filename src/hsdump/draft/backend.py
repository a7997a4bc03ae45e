"""`hsdump train --backend speculators`: data and a fully resolved configuration for that library's own trainer.

Defaults that fork between releases and engines (`norm_before_residual`, `norm_before_fc`, `norm_output`) are written
out, and its `--dry-run` can show what it makes of the file before anything is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from hsdump.draft.begin import Sources, check_store, choose_vocab
from hsdump.draft.checkpoints import write_json
from hsdump.draft.options import TrainOptions
from hsdump.draft.target import Target
from hsdump.errors import InputError, UsageError
from hsdump.store import Store
from hsdump.store.export import ExportOptions, export_store

FORMAT = "speculators"
LOSSES = {"kl": "kl_div", "hard": "ce", "lk": "nla", "tv": "tv"}

MOST_DROPPED = 0.001
"""Share of the samples that the library may drop for their length before the preparation is refused."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """What lies ready."""

    data: str
    config: str
    samples: int
    longer: int
    """Samples longer than a batch, which the library would cut or drop."""

    command: str
    """Runs the training, where there is a GPU and speculators 0.9."""


def prepare_speculators(sources: Sources, options: TrainOptions) -> Prepared:
    """Export the store, its mapping and a configuration into `--out`.

    Raises:
        UsageError: the folder is taken, or no sample is held out.
        InputError: more samples than `MOST_DROPPED` are longer than a batch.
    """
    check_store(sources.store, unproved=sources.unproved)
    if not options.held_out:
        what = "--held-out 0 leaves nothing to validate on, which the library's loader refuses"
        raise UsageError(what, "leave it away, or give a share: --held-out 0.05")
    if sources.out.exists() and any(sources.out.iterdir()):
        raise UsageError(f"{sources.out} is not empty", "name a new folder with --out")
    with Store(sources.store) as store:
        manifest, lengths = store.manifest, store.lengths()
    longer = int((lengths > options.tokens).sum())
    if longer > MOST_DROPPED * len(lengths):
        what = f"{longer} of {len(lengths)} samples are longer than a batch of {options.tokens} tokens"
        raise InputError(what, f"raise --tokens to {int(lengths.max())}")
    folder = sources.model or manifest.model_path
    vocab = choose_vocab(sources, Target(folder).vocab_size)
    data = sources.out / "data"
    data.mkdir(parents=True)
    export_store(sources.store, ExportOptions(to=FORMAT, out=data, model=Path(folder)))
    _write_frequencies(data / "token_freq.pt", vocab.target_ids)
    config = sources.out / "config.yaml"  # JSON is YAML
    write_json(config, _config(sources, options, folder, list(options.layers or manifest.layers), vocab.size))
    return Prepared(
        data=str(data),
        config=str(config),
        samples=len(lengths),
        longer=longer,
        command=f"torchrun --standalone --nproc-per-node gpu -m speculators.train --config {config}",
    )


def _config(sources: Sources, options: TrainOptions, target: str, layers: list[int], size: int) -> dict[str, Any]:
    out = sources.out.resolve()
    widths = options.widths
    return {
        "speculator_type": "eagle3",
        "seed": options.seed,
        "verifier": {"verifier_name_or_path": str(Path(target).resolve()), "trust_remote_code": False},
        "draft": {
            "num_layers": 1,
            "draft_arch": "llama",
            "target_layer_ids": layers,  # its ids are inputs of layers, as hsdump's are
            "token_freq_path": str(out / "data/token_freq.pt"),
            "draft_vocab_size": size,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "embed_requires_grad": widths.own_embeddings,
            # Its own default is a window of 2,048 tokens, which no engine applies to such a drafter.
            "full_attention_indices": [0],
        },
        "data": {
            "data_path": str(out / "data"),
            "total_seq_len": options.tokens,
            "train_data_ratio": 1.0 - options.held_out,
        },
        "generation": {"on_missing": "raise"},
        "loss": {
            "loss_fn": LOSSES[options.loss],
            "ttt_steps": options.ttt_steps,
            "ttt_step_loss_decay": options.step_decay,
        },
        "optimizer": {"optimizer": "adamw", "lr": options.lr, "weight_decay": options.weight_decay},
        "scheduler": {"scheduler_type": "cosine", "scheduler_warmup_steps": options.warmup},
        "trainer": {
            "epochs": options.epochs,
            "max_steps": options.max_steps,
            "save_path": str(out / "checkpoints"),
            "save_best": True,
            "fsdp_shard": options.fsdp,
        },
    }


def _write_frequencies(path: Path, target_ids: np.ndarray[Any, np.dtype[np.int64]]) -> None:
    """Give each token of our mapping the same count and no other one any: the library then chooses just these."""
    import torch

    torch.save({int(one): 1 for one in target_ids}, path)


def show_prepared(prepared: Prepared) -> str:
    """Say what to run."""
    return (
        f"{prepared.samples} samples in {prepared.data}, {prepared.longer} longer than a batch\n"
        f"settings in {prepared.config}\nrun: {prepared.command}"
    )
