"""Copies of a store whose states are wrong in one way and whose manifests claim to be sound, as they come in practice.

    layers-shifted   auxiliary states of the layer after the one that is named
    pre-norm-final   the final state before the final norm
    rows-shifted     every state one row late
    transformers     the right states, computed by transformers instead of the server

and of the sound states, other choices of what is learned from:

    sound            the same again
    prompts-only     the prompts alone, every token of them to be learned
    half, quarter    fewer of the samples; those held out stay
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from hsdump.arrays import StateArray
from hsdump.draft.split import is_held_out
from hsdump.samples import TokenSample
from hsdump.store import Manifest, Store, StoredSample, StoreWriter

COMPUTED = ("layers-shifted", "pre-norm-final", "transformers")
"""Kinds for which the target itself reads all samples again."""

STORED = ("sound", "rows-shifted", "prompts-only", "half", "quarter")
SHARES = {"half": 2, "quarter": 4}

States = list[StateArray]


class Reader:
    """The target in transformers, its states as bfloat16 bits."""

    def __init__(self, target: Path, device: str) -> None:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16)
        self._model = model.to(device).eval()
        self._device = device
        self._last: list[torch.Tensor] = []
        self._model.model.norm.register_forward_pre_hook(lambda _module, inputs: self._last.append(inputs[0]))

    def read(self, sample: StoredSample) -> tuple[Callable[[int], StateArray], StateArray, StateArray]:
        """Give the output of each layer by its index, and the final state after and before the norm."""
        self._last.clear()
        ids = torch.from_numpy(sample.input_ids.copy())[None].to(self._device)
        with torch.inference_mode():
            found = self._model.model(ids, output_hidden_states=True, use_cache=False)
        return (
            lambda layer: bits(found.hidden_states[layer][0]),
            bits(found.last_hidden_state[0]),
            bits(self._last[0][0]),
        )


def bits(state: torch.Tensor) -> StateArray:
    found: StateArray = state.to(torch.bfloat16).cpu().contiguous().view(torch.int16).numpy().view(np.uint16)
    return found


def make(store: Path, target: Path, folders: dict[str, Path], *, device: str = "cpu", held_out: float = 0.0) -> None:
    """Write copies of a store, one for each kind, all in one pass over its samples.

    Args:
        folders: where each kind goes; none of them exists.
        held_out: share that stays whole where a kind takes fewer samples.
    """
    reader = Reader(target, device) if any(kind in COMPUTED for kind in folders) else None
    with Store(store) as opened, ExitStack() as stack:
        writers = {kind: stack.enter_context(StoreWriter.open(path, opened.manifest)) for kind, path in folders.items()}
        learned = 0
        for sample in opened:
            states = [np.array(state) for state in sample.states.values()]
            made = computed(reader, sample, opened.manifest) if reader is not None else {}
            apart = is_held_out(sample.key, held_out)
            for kind, writer in writers.items():
                found = made.get(kind) or stored(kind, sample, states)
                if kind in SHARES and not apart and learned % SHARES[kind]:
                    continue
                if found is not None and not (kind == "prompts-only" and apart):
                    writer.add(*found)
            learned += not apart
        for writer in writers.values():
            writer.commit()


def computed(reader: Reader, sample: StoredSample, manifest: Manifest) -> dict[str, tuple[TokenSample, States]]:
    layer, final, before = reader.read(sample)
    own = [np.array(state) for state in sample.states.values()]
    layers = manifest.shape.layers
    kinds = {
        "layers-shifted": [*(layer(number + 1) for number in layers), own[-1]],
        "pre-norm-final": [*own[:-1], before],
        "transformers": [*(layer(number) for number in layers), final],
    }
    same = token_sample(sample, slice(None), sample.loss_mask.copy())
    return {kind: (same, states) for kind, states in kinds.items()}


def stored(kind: str, sample: StoredSample, states: States) -> tuple[TokenSample, States] | None:
    """Make a kind's sample from the stored states; None: this sample has no part in it."""
    if kind == "prompts-only":
        prompt = int(np.argmax(sample.loss_mask > 0))
        rows = slice(0, prompt)
        mask = np.ones(prompt, dtype=np.uint8)
        return (token_sample(sample, rows, mask), [state[rows].copy() for state in states]) if prompt > 3 else None
    moved = [np.roll(state, 1, axis=0) for state in states] if kind == "rows-shifted" else states
    return token_sample(sample, slice(None), sample.loss_mask.copy()), moved


def token_sample(sample: StoredSample, rows: slice, mask: np.ndarray) -> TokenSample:
    return TokenSample.make(sample.source, sample.input_ids[rows].copy(), mask)


def some_of(store: Path, out: Path, number: int) -> int:
    """Copy the first samples of a store; give how many there were."""
    with Store(store) as opened, StoreWriter.open(out, opened.manifest) as writer:
        copied = 0
        for sample in first(opened, number):
            writer.add(token_sample(sample, slice(None), sample.loss_mask.copy()), list(sample.states.values()))
            copied += 1
        writer.commit()
    return copied


def first(samples: Store, number: int) -> Iterator[StoredSample]:
    for place in range(min(number, len(samples))):
        yield samples[place]
