"""The training itself: batches in, steps, validations, checkpoints; the same weights whether it was killed or not.

Source: EAGLE-3 (arXiv 2503.01840). Letters: T = tokens, H = hidden size.
"""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from hsdump.draft.acceptance import Acceptance, measure
from hsdump.draft.ahead import Ahead
from hsdump.draft.checkpoints import OPTIMIZER, WEIGHTS, State, load_tensors, save_step, trained
from hsdump.draft.data import Batch, Side, align
from hsdump.draft.model import Drafter
from hsdump.draft.optimizer import Optimizer
from hsdump.draft.options import TrainOptions
from hsdump.draft.progress import Progress, gpu_gib, step_rows
from hsdump.draft.ranks import Ranks, put, spread, whole
from hsdump.draft.target import Target
from hsdump.draft.unrolled import Unrolled, make_causal, step_counts
from hsdump.errors import InputError, UsageError
from hsdump.torch import TokenBudgetSampler, make_loader


@dataclass(kw_only=True, slots=True)
class Trainer:
    """One training on this rank."""

    drafter: Drafter
    target: Target
    options: TrainOptions
    ranks: Ranks
    learn: Side
    validate_on: Side
    out: Path
    state: State = field(default_factory=State)
    quiet: bool = False
    _module: Any = None
    _optimizer: Any = None
    _validation: list[tuple[Batch, Tensor]] = field(default_factory=list)
    _sampler: Any = None
    _waited_s: float = 0.0

    def prepare(self, resume_from: Path | None) -> None:
        """Move everything to the device, wrap it, and go back to where a checkpoint was.

        Raises:
            InputError: no sample to learn from, or a damaged checkpoint.
            UsageError: options that do not go together.
        """
        options, device = self.options, self.ranks.device
        if options.fsdp and options.optimizer == "muon":
            raise UsageError("--optimizer muon needs whole matrices, which --fsdp cuts up", "leave one of them out")
        if not len(self.learn):
            raise InputError(
                f"{self.learn.store.path} has no sample to learn from", "lower --held-out, or capture more"
            )
        bf16 = options.precision == "bf16" or (options.precision == "auto" and device.type == "cuda")
        head = torch.from_numpy(self.target.head_rows(self.drafter.vocab.target_ids))
        head = head.to(device, torch.bfloat16 if bf16 and device.type == "cuda" else torch.float32)
        unrolled = Unrolled(
            self.drafter, head, steps=options.ttt_steps, decay=options.step_decay, loss=options.loss
        ).to(device)
        self._module = spread(unrolled, self.ranks, fsdp=options.fsdp)
        named = trained(self.drafter)
        self._optimizer = Optimizer(named, options.optimizer, lr=options.lr, weight_decay=options.weight_decay)
        self._sampler = TokenBudgetSampler(
            self.learn.lengths,
            tokens=options.tokens,
            seed=options.seed,
            rank=self.ranks.rank,
            world_size=self.ranks.world,
            skip_longer=options.skip_longer,
        )
        if resume_from is not None:
            self._restore(resume_from)

    @property
    def total_steps(self) -> int:
        """Optimizer steps from the first to the last."""
        batches = sum(len(self._sampler.batches(epoch)) for epoch in range(self.options.epochs))
        steps = max(1, batches // self.options.accumulate)
        return min(steps, self.options.max_steps or steps)

    def run(self) -> State:
        """Train to the end, or to where nothing gets better any more."""
        total, state = self.total_steps, self.state
        if state.finished:
            return state
        progress = None
        if self.ranks.first:
            progress = Progress(
                self.out,
                steps=self.options.ttt_steps,
                total=total,
                after=state.step,
                quiet=self.quiet,
                tensorboard=self.options.tensorboard,
            )
        try:
            self._loop(total, progress)
        finally:
            if progress is not None:
                progress.close()
        return state

    def _loop(self, total: int, progress: Progress | None) -> None:
        with closing(self._batches()) as batches:
            self._steps(batches, total, progress)

    def _steps(self, batches: Iterator[Batch], total: int, progress: Progress | None) -> None:
        state, options = self.state, self.options
        while state.step < total and not state.finished:
            began_s, self._waited_s = time.monotonic(), 0.0
            row, tokens = self._step(batches, total)
            seconds = time.monotonic() - began_s
            last = state.step == total
            if progress is not None and (state.step % options.log_every == 0 or last or state.step == 1):
                row |= {"tokens_per_s": tokens / seconds, "wait_share": self._waited_s / seconds}
                progress.row(row)
            better = False
            if len(self.validate_on) and (state.step % options.validate_every == 0 or last):
                better = self._validate(progress)
                if options.patience and state.worse >= options.patience:
                    state.finished = f"no better acceptance in {state.worse} validations"
            if last:
                state.finished = state.finished or "all steps done"
            if better or last or state.finished or state.step % options.save_every == 0:
                self._save(best=better or not len(self.validate_on))

    def _batches(self) -> Generator[Batch]:
        """Give batches for ever, from where the state is."""
        state = self.state
        names = tuple(f"layer{layer}" for layer in self.drafter.config.layers)
        cuda = self.ranks.device.type == "cuda"
        self._sampler.load_state_dict({**self._sampler.state_dict(), "epoch": state.epoch, "step": state.batch})
        loader = make_loader(
            self.learn,  # type: ignore[arg-type]  # a data set like the one it wraps
            self._sampler,
            states=(*names, "final"),
            workers=self.options.workers,
            pin_memory=cuda,
        )
        made: Iterator[tuple[int, int, Batch]] = self._aligned(loader, state.epoch, state.batch)
        with ExitStack() as stack:
            if self.options.workers:  # else this thread reads the store itself
                made = ahead = Ahead(made, self.ranks.device, lambda one: one[2].tensors())
                stack.callback(ahead.close)
            while True:
                waited_from_s = time.monotonic()
                epoch, number, batch = next(made)
                self._waited_s += time.monotonic() - waited_from_s
                # Before it is learned from: a checkpoint is written behind the step that does.
                state.epoch, state.batch = epoch, number
                yield batch

    def _aligned(self, loader: DataLoader[Any], epoch: int, number: int) -> Iterator[tuple[int, int, Batch]]:
        """Give epoch, number of batches in it and batch, for ever."""
        while True:
            for packed in loader:
                number += 1
                yield epoch, number, align(packed, self.drafter.config.layers, self.ranks.device)
            epoch, number = epoch + 1, 0
            self._sampler.set_epoch(epoch)

    def _step(self, batches: Iterator[Batch], total: int) -> tuple[dict[str, Any], int]:
        """Learn from `accumulate` batches and change the weights once."""
        options, state = self.options, self.state
        lr = options.lr * _share(state.step, total, options)
        sums = torch.zeros(options.ttt_steps, 3)
        loss_sum = torch.zeros(())
        tokens = 0
        for number in range(options.accumulate):
            batch = next(batches)
            last = number == options.accumulate - 1
            with nullcontext() if last else self._no_sync():
                loss, figures = self._backward(batch)
            sums += figures
            loss_sum += loss
            tokens += len(batch.inputs.input_ids)
        norm = torch.nn.utils.clip_grad_norm_([w for _, w in trained(self.drafter)], options.clip)
        self._optimizer.step(lr)
        state.step += 1
        counted = self.ranks.sum(torch.tensor([tokens], device=self.ranks.device))
        state.tokens += int(counted)
        lost, right, counts = sums.T.tolist()
        row = {
            "step": state.step,
            "epoch": state.epoch,
            "tokens": state.tokens,
            "loss": float(loss_sum) / options.accumulate,
            "lr": lr,
            "grad_norm": float(whole(norm)),
            "gpu_gib": gpu_gib(self.ranks.device),
            **step_rows(lost, right, counts),
        }
        if not math.isfinite(row["loss"]) or not math.isfinite(row["grad_norm"]):
            what = f"step {state.step}: loss {row['loss']}, gradient {row['grad_norm']}"
            raise InputError(what, "verify the store (hsdump verify), or lower --lr; the last checkpoint is sound")
        return row, int(counted)

    def _backward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        options = self.options
        counts = self.ranks.sum(step_counts(batch, options.ttt_steps))
        with self._autocast():
            loss, sums = self._module(batch, make_causal(batch.inputs, options.attention), counts / self.ranks.world)
        (loss / options.accumulate).backward()
        figures = self.ranks.sum(torch.cat([sums, counts[:, None] / self.ranks.world], dim=1))
        shown = self.ranks.sum(loss.detach().clone()) / self.ranks.world
        return shown.cpu(), figures.cpu()

    def _autocast(self) -> AbstractContextManager[Any]:
        device, precision = self.ranks.device.type, self.options.precision
        on = precision == "bf16" or (precision == "auto" and device == "cuda")
        context: AbstractContextManager[Any] = torch.autocast(device, dtype=torch.bfloat16, enabled=on)
        return context

    def _no_sync(self) -> AbstractContextManager[Any]:
        if hasattr(self._module, "no_sync"):
            context: AbstractContextManager[Any] = self._module.no_sync()
            return context
        return nullcontext()

    def _validate(self, progress: Progress | None) -> bool:
        """Measure acceptance on the held-out side; tell whether it was never better."""
        state, options = self.state, self.options
        if not self._validation:
            self._validation = list(self._validation_batches())
        counted = Acceptance()
        for batch, truth in self._validation:
            with self._autocast():
                counted.add(*measure(self.drafter, batch, truth, options.ttt_steps, options.attention))
        summed = self.ranks.sum(torch.tensor([counted.starts, counted.right], device=self.ranks.device)).tolist()
        found = Acceptance(summed[0], summed[1])
        length = found.length(options.eval_tokens)
        better = length > state.best
        state.worse = 0 if better else state.worse + 1
        if better:
            state.best, state.best_step = length, state.step
        state.validation = {"step": state.step, "length": length, "conditional": found.conditional}
        if progress is not None:
            rates = {f"val_right_{step}": rate for step, rate in enumerate(found.conditional)}
            progress.row({"step": state.step, "epoch": state.epoch, "val_length": length, **rates})
        return better

    def _validation_batches(self) -> Iterator[tuple[Batch, Tensor]]:
        sampler = TokenBudgetSampler(
            self.validate_on.lengths,
            tokens=max(self.options.tokens, int(self.validate_on.lengths.max())),
            seed=0,
            rank=self.ranks.rank,
            world_size=self.ranks.world,
        )
        names = tuple(f"layer{layer}" for layer in self.drafter.config.layers)
        loader = make_loader(
            self.validate_on,  # type: ignore[arg-type]  # a data set like the one it wraps
            sampler,
            states=(*names, "final"),
            workers=0,
        )
        for packed in loader:
            batch = align(packed, self.drafter.config.layers, self.ranks.device)
            yield batch, self.target.first_choices(batch.final)

    def _save(self, *, best: bool) -> None:
        weights = {name: whole(weight) for name, weight in trained(self.drafter)}
        moments = self._optimizer.moments(whole)
        if self.ranks.first:
            save_step(self.out, self.state, weights, moments, best=best)
        self.ranks.barrier()

    def _restore(self, place: Path) -> None:
        weights, moments = load_tensors(place / WEIGHTS), load_tensors(place / OPTIMIZER)
        for name, weight in trained(self.drafter):
            put(weight, weights[name])
        self._optimizer.restore(moments, self.state.step, put)


def _share(step: int, total: int, options: TrainOptions) -> float:
    """Share of the learning rate: up over the warm-up, then down a cosine."""
    if step < options.warmup:
        return (step + 1) / options.warmup
    gone = min((step - options.warmup) / max(total - options.warmup, 1), 1.0)
    return options.min_lr_share + (1 - options.min_lr_share) * 0.5 * (1 + math.cos(math.pi * gone))
