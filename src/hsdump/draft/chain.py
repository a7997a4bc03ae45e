"""Speculative decoding in this process: a target of transformers, our drafter, token by token as an engine does it.

Each round the drafter continues from the last accepted token, the target reads the draft in one forward, and keeps the
longest part that it would have said itself plus one token of its own (the bonus). Greedy output therefore equals the
target's own, which `Walk.lossless` checks instead of believing it.

Letters: T = tokens, H = hidden size, V = target vocabulary, K = draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hsdump.draft.model import Drafter


@dataclass(kw_only=True, slots=True)
class Walk:
    """One prompt's decoding."""

    prompt: list[int]
    category: str = ""
    plain: list[int] = field(default_factory=list)
    """What the target says alone."""

    output: list[int] = field(default_factory=list)
    drafts: int = 0
    accepted: list[int] = field(default_factory=list)
    """[draft tokens] rounds in which the token at this place was taken."""

    near_tie: float | None = None
    """Where the outputs part: by how much the target preferred its first choice to its second there, in logits."""

    @property
    def lossless(self) -> bool:
        return self.output == self.plain


class TargetRunner:
    """A causal language model with a cache, which also gives the states that the drafter reads."""

    def __init__(self, model: Any, layers: Sequence[int], stop: Sequence[int]) -> None:
        """Args:
        model: a transformers model in eval mode.
        layers: in hsdump's meaning.
        stop: tokens that end an answer.
        """
        self.model, self.layers, self.stop = model, list(layers), frozenset(stop)

    def fresh_cache(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def forward(self, ids: Sequence[int], cache: Any) -> tuple[Tensor, Tensor]:
        """Give logits [T, V] and auxiliary states [T, L*H] of these tokens, after those in the cache."""
        tokens = torch.tensor([list(ids)], device=self.model.device)
        out = self.model(tokens, past_key_values=cache, use_cache=True, output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer][0] for layer in self.layers], dim=-1)
        return out.logits[0].float(), aux

    def plain(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Decode greedily, one token a forward."""
        cache, out = self.fresh_cache(), []
        logits, _ = self.forward(prompt, cache)
        for _ in range(new_tokens):
            out.append(int(logits[-1].argmax()))
            if out[-1] in self.stop or len(out) == new_tokens:
                break
            logits, _ = self.forward(out[-1:], cache)
        return out


class DraftRunner:
    """A drafter with the keys and values of what it has read; those of its own guesses are forgotten after a round."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.position = 0

    def read(self, ids: Sequence[int], aux_TH: Tensor) -> Tensor:
        """Take in tokens with the states before them, for good. Gives the last one's state [1, H] before the norm."""
        hidden = self.drafter.fuse(aux_TH)
        out, self.keys, self.values = self._layer(list(ids), hidden, self.keys, self.values, self.position)
        self.position += len(ids)
        return out[-1:]

    def draft(
        self, state_1H: Tensor, tokens: int, temperature: float, generator: Any
    ) -> tuple[list[int], list[Tensor]]:
        """Guess the next tokens. Gives target ids, and for sampling the distribution [K] of each."""
        keys, values, position = self.keys, self.values, self.position
        guesses: list[int] = []
        chances: list[Tensor] = []
        for step in range(tokens):
            logits = self.drafter.lm_head(self.drafter.norm(state_1H))[0].float()
            if temperature > 0:
                chances.append(torch.softmax(logits / temperature, dim=-1))
                choice = torch.multinomial(chances[-1], 1, generator=generator)
            else:
                choice = logits.argmax(keepdim=True)
            guesses.append(int(self.drafter.target_ids(choice)))
            if step + 1 < tokens:
                state_1H, keys, values = self._layer(guesses[-1:], state_1H, keys, values, position + step)
        return guesses, chances

    def _layer(
        self, ids: list[int], hidden_TH: Tensor, keys: Tensor | None, values: Tensor | None, start: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        drafter = self.drafter
        layer = drafter.layers[0]
        tokens = torch.tensor(ids, device=hidden_TH.device)
        rope = drafter.rope(torch.arange(start, start + len(ids), device=hidden_TH.device))
        wide = layer.wide(drafter.embed_tokens(tokens).to(hidden_TH.dtype), hidden_TH)
        q, k, v = layer.self_attn.project(wide, rope)
        keys = k if keys is None else torch.cat([keys, k], dim=1)
        values = v if values is None else torch.cat([values, v], dim=1)
        total, new = keys.shape[1], len(ids)
        mask = torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
        out = torch.nn.functional.scaled_dot_product_attention(
            q[None], keys[None], values[None], attn_mask=mask, enable_gqa=q.shape[0] != keys.shape[0]
        )[0]
        return layer.finish(hidden_TH, out), keys, values


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoding:
    """How to decode."""

    new_tokens: int = 128
    draft_tokens: int = 3
    temperature: float = 0.0
    """0 for greedy; otherwise both sample, and a guess is taken with probability min(1, p/q)."""

    seed: int = 0


def walk(target: TargetRunner, drafter: Drafter, walked: Walk, how: Decoding) -> Walk:
    """Decode one prompt with drafts and count what was taken."""
    draft_tokens, temperature, new_tokens = how.draft_tokens, how.temperature, how.new_tokens
    generator = torch.Generator(device=target.model.device).manual_seed(how.seed)
    with torch.inference_mode():
        cache, runner = target.fresh_cache(), DraftRunner(drafter)
        logits, aux = target.forward(walked.prompt, cache)
        token = _pick(logits[-1], temperature, generator)
        walked.output, walked.accepted = [token], [0] * draft_tokens
        read, states = [*walked.prompt[1:], token], aux
        while len(walked.output) < new_tokens and token not in target.stop:
            guesses, chances = runner.draft(runner.read(read, states), draft_tokens, temperature, generator)
            logits, aux = target.forward([token, *guesses], cache)
            taken, token = _judge(logits, guesses, chances, drafter, temperature, generator)
            stop = next((place for place, guess in enumerate(guesses[:taken]) if guess in target.stop), None)
            # What an engine counts: the draft as far as it was taken, even where the answer ends within it.
            walked.drafts += 1
            for place in range(taken):
                walked.accepted[place] += 1
            kept = guesses[:taken] if stop is None else guesses[: stop + 1]
            walked.output += kept if stop is not None else [*kept, token]
            if stop is not None:
                break
            if taken < draft_tokens:
                cache.crop(taken - draft_tokens)  # forget what was not taken
            read, states = [*kept, token], aux[: taken + 1]
    walked.output = walked.output[:new_tokens]
    return walked


def _judge(
    logits: Tensor, guesses: list[int], chances: list[Tensor], drafter: Drafter, temperature: float, generator: Any
) -> tuple[int, int]:
    """Give how many guesses are taken, and the token that comes behind them."""
    for place, guess in enumerate(guesses):
        if temperature <= 0:
            own = int(logits[place].argmax())
            if own != guess:
                return place, own
            continue
        p_V = torch.softmax(logits[place] / temperature, dim=-1)
        q_V = torch.zeros_like(p_V).index_put((drafter.d2t + torch.arange(len(drafter.d2t)),), chances[place])
        if float(torch.rand((), generator=generator)) >= float(p_V[guess] / q_V[guess].clamp_min(1e-20)):
            left = (p_V - q_V).clamp_min(0)
            return place, int(torch.multinomial(left if float(left.sum()) > 0 else p_V, 1, generator=generator))
    return len(guesses), _pick(logits[len(guesses)], temperature, generator)


def _pick(logits_V: Tensor, temperature: float, generator: Any) -> int:
    if temperature <= 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, dim=-1), 1, generator=generator))
