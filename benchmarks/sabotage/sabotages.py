"""What is planted on purpose: each function gives the samples of a store (or of a probe) as a broken capture would.

Letters: S = tokens of one sample, H = hidden size, I = inner size of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsdump.samples import TokenSample

LAYERS = (2, 4, 5)
NAMES = ("layer2", "layer4", "layer5", "final")
CHUNK = 64
PARTIAL_LAYER = 4


@dataclass(frozen=True, slots=True, eq=False)
class Taken:
    """One sample with every state that a capture can have: layer1 ... layer7, final; bfloat16 bits [S, H]."""

    sample: TokenSample
    states: dict[str, NDArray[np.uint16]]

    def with_states(self, **changes: NDArray[np.uint16]) -> Taken:
        return Taken(self.sample, {**self.states, **changes})


class World:
    """What sabotages draw from: other models, and torch."""

    def __init__(self, model: Path, other_model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self.other = AutoModelForCausalLM.from_pretrained(other_model, dtype=torch.bfloat16).eval()
        self.revision = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        _swap_head(torch, self.revision, self.other, layer=1, head=2)

    def bits(self, tensor: Any) -> NDArray[np.uint16]:
        result: NDArray[np.uint16] = tensor[0].contiguous().view(self.torch.int16).numpy().view(np.uint16)
        return result

    def states_by(self, model: Any, taken: Taken) -> Taken:
        """Give the states that another model computes."""
        ids = self.torch.tensor(np.array(taken.sample.input_ids))[None]
        with self.torch.no_grad():
            hidden = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        found = {name: self.bits(hidden[int(name[5:])] if name != "final" else hidden[-1]) for name in taken.states}
        return Taken(taken.sample, found)

    def pre_norm(self, taken: Taken) -> NDArray[np.uint16]:
        """Give the last layer's output before the norm."""
        seen: list[Any] = []
        handle = self.model.model.norm.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        self.states_by(self.model, taken)
        handle.remove()
        return self.bits(seen[0])

    def partial_sum(self, taken: Taken) -> NDArray[np.uint16]:
        """Give layer 4 as one of two tensor-parallel ranks would hold it before its all-reduce."""
        down = self.model.model.layers[PARTIAL_LAYER - 1].mlp.down_proj
        seen: list[Any] = []
        handle = down.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
        ids = self.torch.tensor(np.array(taken.sample.input_ids))[None]
        with self.torch.no_grad():
            hidden = self.model(ids, output_hidden_states=True, use_cache=False).hidden_states[PARTIAL_LAYER]
            half = down.weight.shape[1] // 2
            missing = seen[0][..., half:] @ down.weight[:, half:].T
        handle.remove()
        return self.bits(hidden - missing)


def _swap_head(torch: Any, model: Any, other: Any, *, layer: int, head: int) -> None:
    """Put one attention head's weights of another revision in."""
    mine, theirs = model.model.layers[layer].self_attn, other.model.layers[layer].self_attn
    size = mine.head_dim
    rows = slice(head * size, (head + 1) * size)
    with torch.no_grad():
        mine.q_proj.weight[rows] = theirs.q_proj.weight[rows]
        mine.o_proj.weight[:, rows] = theirs.o_proj.weight[:, rows]
        group = head * theirs.config.num_key_value_heads // theirs.config.num_attention_heads
        kv = slice(group * size, (group + 1) * size)
        mine.k_proj.weight[kv], mine.v_proj.weight[kv] = theirs.k_proj.weight[kv], theirs.v_proj.weight[kv]


Sabotage = Callable[[World, list[Taken]], list[Taken]]


def _shifted_ids(shift: int) -> Sabotage:
    def plant(_world: World, taken: list[Taken]) -> list[Taken]:
        return [
            one.with_states(**{f"layer{layer}": one.states[f"layer{layer + shift}"] for layer in LAYERS})
            for one in taken
        ]

    return plant


def _pre_norm(world: World, taken: list[Taken]) -> list[Taken]:
    return [one.with_states(final=world.pre_norm(one)) for one in taken]


def _rows_shifted(_world: World, taken: list[Taken]) -> list[Taken]:
    return [one.with_states(**{name: np.roll(state, 1, axis=0) for name, state in one.states.items()}) for one in taken]


def _swapped(_world: World, taken: list[Taken]) -> list[Taken]:
    """Two requests of a batch exchange their rows, as far as both have some."""
    first, second = taken[0], taken[1]
    rows = min(len(first.sample.input_ids), len(second.sample.input_ids))
    one, other = (
        a.with_states(
            **{name: np.concatenate([b.states[name][:rows], state[rows:]]) for name, state in a.states.items()}
        )
        for a, b in ((first, second), (second, first))
    )
    return [one, other, *taken[2:]]


def _last_chunk_missing(_world: World, taken: list[Taken]) -> list[Taken]:
    def cut(one: Taken) -> Taken:
        keep = max(len(one.sample.input_ids) - CHUNK, 0)
        return one.with_states(
            **{name: np.concatenate([state[:keep], np.zeros_like(state[keep:])]) for name, state in one.states.items()}
        )

    return [cut(taken[0]), *taken[1:]]


def _first_chunk_missing(_world: World, taken: list[Taken]) -> list[Taken]:
    """A prefix hit: only the rows behind it were computed and lie at the front; the rest is an older request's."""
    older = taken[1]

    def shift(one: Taken) -> Taken:
        lead = min(CHUNK, len(one.sample.input_ids) // 2)
        changed = {}
        for name, state in one.states.items():
            tail = np.resize(older.states[name], (lead, state.shape[1]))
            changed[name] = np.concatenate([state[lead:], tail])
        return one.with_states(**changed)

    return [shift(taken[0]), *taken[1:]]


def _duplicated(_world: World, taken: list[Taken]) -> list[Taken]:
    return [one.with_states(layer4=one.states["layer2"]) for one in taken]


def _other_order(_world: World, taken: list[Taken]) -> list[Taken]:
    return [
        one.with_states(layer2=one.states["layer5"], layer4=one.states["layer2"], layer5=one.states["layer4"])
        for one in taken
    ]


def _through_fp16(_world: World, taken: list[Taken]) -> list[Taken]:
    def rounded(state: NDArray[np.uint16]) -> NDArray[np.uint16]:
        wide = (state.astype(np.uint32) << 16).view(np.float32).astype(np.float16).astype(np.float32)
        return (wide.view(np.uint32) >> 16).astype(np.uint16)

    return [one.with_states(**{name: rounded(state) for name, state in one.states.items()}) for one in taken]


def _other_head(world: World, taken: list[Taken]) -> list[Taken]:
    return [world.states_by(world.revision, one) for one in taken]


def _partial_sum(world: World, taken: list[Taken]) -> list[Taken]:
    return [one.with_states(layer4=world.partial_sum(one)) for one in taken]


def _stale_rows(_world: World, taken: list[Taken]) -> list[Taken]:
    """A buffer that was not overwritten: 16 rows of one request are an earlier one's."""
    older = taken[1].states
    rows = min(16, *(len(one.sample.input_ids) // 2 for one in taken[:2]))
    changed = {}
    for name, state in taken[0].states.items():
        changed[name] = np.concatenate([older[name][:rows], state[rows:]])
    return [taken[0].with_states(**changed), *taken[1:]]


def _one_percent(world: World, taken: list[Taken]) -> list[Taken]:
    bad = set(range(0, len(taken), 100))
    return [world.states_by(world.other, one) if at in bad else one for at, one in enumerate(taken)]


OF_STATES: dict[str, Sabotage] = {
    "layer ids +1": _shifted_ids(1),
    "layer ids -1": _shifted_ids(-1),
    "final state pre-norm": _pre_norm,
    "rows shifted by one": _rows_shifted,
    "two requests' rows swapped": _swapped,
    "last chunk missing": _last_chunk_missing,
    "first chunk missing (prefix hit)": _first_chunk_missing,
    "one layer duplicated": _duplicated,
    "layers in another order": _other_order,
    "bf16 rounded to fp16 and back": _through_fp16,
    "one head of another checkpoint revision": _other_head,
    "partial sum of one TP rank": _partial_sum,
    "stale rows of an earlier request": _stale_rows,
    "1 % of samples from another model": _one_percent,
}


def other_template(conversation: list[dict[str, str]]) -> Iterator[tuple[str, bool]]:
    """Write a conversation as another template would: (text, whether the assistant wrote it)."""
    for turn in conversation:
        yield f"### {turn['role'].title()}:\n", False
        yield turn["content"] + "\n\n", turn["role"] == "assistant"


def shifted_tokenizer(sample: TokenSample, vocab_size: int) -> TokenSample:
    """Tokens of a tokenizer revision that has one more token in front of the ordinary ones."""
    ids = np.array(sample.input_ids)
    moved = np.where(ids >= 3, np.minimum(ids + 1, vocab_size - 2), ids)
    return TokenSample.make(sample.source, moved, np.array(sample.loss_mask))
