"""The target: a small Kimi (latent attention, a mixture of experts), trained from nothing for some minutes.

Experts are computed all at once. transformers' own ways are a loop over experts (a hundred small kernels and a wait for
the device in each layer) and `grouped_mm` (sorts and gathers tokens, and its weights must be bfloat16, which rules out
float32 weights under autocast). With eight experts, two of them chosen, one wide MLP over all of them with the gate
of an expert that was not chosen at 0 is four times the multiplications of this part, in two large matrix products that
run at the device's full rate; it gives the same numbers (`dense_error` in the figures).

Experts are kept busy as DeepSeek-V3 does it: no auxiliary loss, the bias of the choice moves against the load.

Letters: B = rows of a batch, T = tokens, H = hidden size, E = experts, I = width of one, K = chosen ones.
"""

from __future__ import annotations

import copy
import gc
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from benchmarks.story.scale import YARN, Scale
from benchmarks.story.state import afresh
from torch import Tensor

from hsdump.demo.train_target import Training

BIAS_STEP = 1e-3
"""How fast the bias of an expert moves, as in DeepSeek-V3's report."""

SAVE_EVERY_S = 75.0
MEAN_OVER = 20
"""Steps of one point of the loss curve."""


def dense_experts(self: Any, hidden_TH: Tensor, chosen_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Stand in for the `forward` of transformers' experts, and note how often each was chosen."""
    num_experts, wide, _ = self.gate_up_proj.shape
    self.load_E = torch.bincount(chosen_TK.flatten(), minlength=num_experts)
    gates_TE = torch.zeros(len(hidden_TH), num_experts, device=hidden_TH.device, dtype=weights_TK.dtype)
    gates_TE = gates_TE.scatter(1, chosen_TK, weights_TK)
    both = torch.nn.functional.linear(hidden_TH, self.gate_up_proj.reshape(num_experts * wide, -1))
    gate_TEI, up_TEI = both.view(len(hidden_TH), num_experts, wide).chunk(2, dim=-1)
    inner_TEI = torch.nn.functional.silu(gate_TEI) * up_TEI * gates_TE[..., None].to(both.dtype)
    down_HEI = self.down_proj.permute(1, 0, 2).reshape(self.down_proj.shape[1], -1)
    return torch.nn.functional.linear(inner_TEI.flatten(1), down_HEI).to(hidden_TH.dtype)


def make_model(scale: Scale, *, llama: bool, seed: int = 0) -> Any:
    """Make the untrained target."""
    import transformers

    transformers.set_seed(seed)
    common = {
        "vocab_size": scale.vocab_size,
        "max_position_embeddings": scale.positions,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    if llama:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **scale.llama))
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**common, **scale.model))


def keys_for_sglang(scale: Scale) -> dict[str, Any]:
    """Give what SGLang's DeepSeek code reads of a config and transformers does not write."""
    rope = {**YARN, "mscale_all_dim": 1.0, "original_max_position_embeddings": scale.positions, "rope_theta": 10000.0}
    return {
        "rope_parameters": rope,
        "rope_scaling": rope,
        "rope_theta": 10000.0,
        "moe_layer_freq": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }


def mixtures(model: Any) -> list[Any]:
    """Give the layers' mixtures of experts, each with `gate` and `experts`."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def compute_densely(model: Any) -> None:
    for mixture in mixtures(model):
        mixture.experts.forward = MethodType(dense_experts, mixture.experts)


class Pretraining(Training):
    """Pre-training that can be cut at any step."""

    def __init__(self, scale: Scale, folder: Path, model: Any, device: str) -> None:
        self.scale, self.folder, self.device = scale, folder, device
        self.number, self.spent_s = 0, 0.0
        self.curve: list[dict[str, Any]] = []
        self._recent: list[Tensor] = []
        self._begun_s = time.monotonic()
        model.to(device).train()
        compute_densely(model)
        super().__init__(model, scale.target_s / 60, scale.batch_rows, 0, scale.adam_lr)

    @property
    def seconds(self) -> float:
        """Seconds of training, those before a cut included."""
        return self.spent_s + time.monotonic() - self._begun_s

    @property
    def done(self) -> float:
        return min(self.seconds / self.scale.target_s, 1.0)

    def learn(self, ids_BT: Tensor) -> Tensor:
        """Take one step, and move the experts' bias towards an equal load."""
        loss: Tensor = super().learn(ids_BT)
        for mixture in mixtures(self.model):
            load_E = mixture.experts.load_E.float()
            mixture.gate.e_score_correction_bias += BIAS_STEP * torch.sign(load_E.mean() - load_E)
        return loss

    def rows(self, rows_RT: np.ndarray) -> Iterator[Tensor]:
        """Give batches from where the training is, epoch after epoch."""
        batches = max(1, len(rows_RT) // self.scale.batch_rows)
        while True:
            epoch, place = divmod(self.number, batches)
            order = np.random.default_rng(epoch).permutation(len(rows_RT))
            while place < batches:
                some = order[place * self.scale.batch_rows : (place + 1) * self.scale.batch_rows]
                yield torch.from_numpy(rows_RT[some].astype(np.int64)).to(self.device)
                place += 1

    def run(self, rows_RT: np.ndarray, left_s: Callable[[], float]) -> bool:
        """Train until it is done, or the time is over; True: done."""
        saved_s = time.monotonic()
        for ids in self.rows(rows_RT):
            if self.done >= 1.0:
                break
            self._recent.append(self.learn(ids))
            self.number += 1
            if len(self._recent) == MEAN_OVER:
                self._note()
            if left_s() <= 0:
                self.save()
                return False
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                self.save()
                saved_s = time.monotonic()
        self._note()
        return True

    def _note(self) -> None:
        if not self._recent:
            return
        loss = float(torch.stack(self._recent).mean())
        self._recent = []
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss is {loss} at step {self.number}: lower adam_lr in benchmarks/story/scale.py")
        tokens = self.number * self.scale.batch_rows * self.scale.row_tokens
        point = {"s": round(self.seconds, 1), "step": self.number, "tokens": tokens, "loss": round(loss, 4)}
        self.curve.append(point)
        if len(self.curve) % 10 == 1:
            print(f"[target] {point}, {tokens / self.seconds:,.0f} tokens/s", flush=True)

    def save(self) -> None:
        """Keep everything that going on needs, whole or not at all."""
        self._note()
        state = {
            "model": self.model.state_dict(),
            "optimizers": [one.state_dict() for one in self.optimizers],
            "schedules": [{"last_epoch": one.last_epoch} for one in self.schedules],
            "number": self.number,
            "seconds": self.seconds,
            "curve": self.curve,
        }
        partial = self.folder / "checkpoint.partial"
        torch.save(state, partial)
        partial.replace(self.folder / "checkpoint.pt")

    def restore(self) -> None:
        """Go on behind the last checkpoint, where there is one."""
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, weights_only=True, map_location=self.device)
        self.model.load_state_dict(state["model"])
        for one, found in zip(self.optimizers, state["optimizers"], strict=True):
            one.load_state_dict(found)
        for one, found in zip(self.schedules, state["schedules"], strict=True):
            one.last_epoch = found["last_epoch"]
        self.number, self.spent_s, self.curve = state["number"], state["seconds"], state["curve"]
        self._begun_s = time.monotonic()


def held_out_loss(model: Any, rows_RT: np.ndarray, device: str) -> float:
    """Give the mean cross entropy of text that the target never saw, in nats a token."""
    losses = []
    with torch.inference_mode(), torch.autocast(device.split(":", maxsplit=1)[0], dtype=torch.bfloat16):
        for start in range(0, min(len(rows_RT), 128), 16):
            ids = torch.from_numpy(rows_RT[start : start + 16].astype(np.int64)).to(device)
            logits = model(ids[:, :-1], use_cache=False).logits.float()
            losses.append(float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())))
    return sum(losses) / max(len(losses), 1)


def save_model(model: Any, scale: Scale, data: Path, folder: Path, *, llama: bool) -> None:
    """Write the target as a Hugging Face folder that SGLang loads, its weights in bfloat16."""
    partial = afresh(folder.with_name(f"{folder.name}.partial"))
    plain = copy.deepcopy(model).cpu().to(torch.bfloat16)
    plain.save_pretrained(partial)
    for path in (data / "tokenizer").iterdir():
        (partial / path.name).write_bytes(path.read_bytes())
    if not llama:
        config = json.loads((partial / "config.json").read_text(encoding="utf-8"))
        text = json.dumps({**config, **keys_for_sglang(scale)}, indent=2)
        (partial / "config.json").write_text(text + "\n", encoding="utf-8")
    afresh(folder)
    partial.rename(folder)


def check_written(folder: Path, rows_RT: np.ndarray) -> dict[str, float]:
    """Read the written model as anybody does: its loss, with the rotary settings that SGLang wants, and `dense_error`.

    That is the largest difference of a logit between experts all at once and transformers' own forward, in float32.
    """
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    written = {"written_loss": round(held_out_loss(model, rows_RT, "cpu"), 4)}
    if not mixtures(model):
        return written
    ids = torch.from_numpy(rows_RT[:1].astype(np.int64))
    with torch.inference_mode():
        own = model(ids).logits
        compute_densely(model)
        return {**written, "dense_error": float((model(ids).logits - own).abs().max())}


def expert_shares(model: Any) -> list[float]:
    """Give the smallest and the largest bias of an expert's choice: how hard the load had to be evened out."""
    biases = [float(value) for mixture in mixtures(model) for value in mixture.gate.e_score_correction_bias]
    return [round(min(biases), 4), round(max(biases), 4)] if biases else []


def train_target(
    scale: Scale, data: Path, folder: Path, *, device: str, llama: bool, left_s: Callable[[], float]
) -> Any:
    """Train, or go on, until the target is written; with half of the rows at once where memory does not do.

    Returns:
        The figures; None when the time was over before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    note = folder / "batch-rows"
    while True:
        rows = int(note.read_text(encoding="utf-8")) if note.exists() else scale.batch_rows
        try:
            return _train_target(
                replace(scale, batch_rows=rows), data, folder, device=device, llama=llama, left_s=left_s
            )
        except torch.OutOfMemoryError:
            if rows <= 2 or not left_s() > 0:
                raise
            print(f"[target] {rows} rows at once are too many", flush=True)
            note.write_text(str(rows // 2), encoding="utf-8")
            (folder / "checkpoint.pt").unlink(missing_ok=True)  # its steps were of other sizes
        gc.collect()
        torch.cuda.empty_cache()


def _train_target(
    scale: Scale, data: Path, folder: Path, *, device: str, llama: bool, left_s: Callable[[], float]
) -> Any:
    model = make_model(scale, llama=llama)
    training = Pretraining(scale, folder, model, device)
    training.restore()
    rows = np.load(data / "rows.npy", mmap_mode="r")
    if not training.run(rows, left_s):
        return None
    unseen = np.load(data / "held-out-rows.npy", mmap_mode="r")
    model.eval()
    tokens = training.number * scale.batch_rows * scale.row_tokens
    figures = {
        "weights": sum(weight.numel() for weight in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "hidden_size": model.config.hidden_size,
        "batch_rows": scale.batch_rows,
        "steps": training.number,
        "tokens": tokens,
        "epochs": round(tokens / rows.size, 2),
        "seconds": round(training.seconds, 1),
        "tokens_per_s": round(tokens / training.seconds),
        "loss": training.curve[-1]["loss"],
        "held_out_loss": round(held_out_loss(model, unseen, device), 4),
        "expert_bias": expert_shares(model),
        "curve": training.curve[:: max(1, len(training.curve) // 60)],
    }
    save_model(model, scale, data, folder / "model", llama=llama)
    few = unseen[:2]
    figures |= {"trained_loss": round(held_out_loss(model, few, device), 4)}
    try:
        figures |= check_written(folder / "model", few)
    except Exception as error:  # it is written, and minutes of training are not done again for a check
        figures |= {"check_failed": f"{type(error).__name__}: {error}"[:500]}
    (folder / "checkpoint.pt").unlink(missing_ok=True)
    return figures
