"""The drafter: three states of the target and a token's embedding in, a distribution over the draft vocabulary out.

Letters: T = tokens of a packed batch, H = hidden size, L = auxiliary layers, K = draft vocabulary, V = target
vocabulary, Q = query heads, N = key/value heads, D = head width.

Names of the weights are those that SGLang, vLLM and speculators use (`layers.0.` where SGLang also says `midlayer.`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hsdump.draft.attention import Causal, ttt_attention
from hsdump.draft.config import DrafterConfig
from hsdump.draft.vocab import DraftVocab


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Inputs:
    """A packed batch as the drafter reads it: row t pairs a token with the target's states of the token before it."""

    input_ids: Tensor
    """int64 [T] token t+1 of the document."""

    aux: Tensor
    """[T, L*H] auxiliary states of token t, ascending layers side by side."""

    position_ids: Tensor
    """int64 [T]"""

    document_ids: Tensor
    """int64 [T]"""

    lengths: Tensor
    """int64 [documents], on the CPU."""


class Attention(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Reads the embedding and the state side by side: its inputs are 2H wide."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        wide = 2 * config.hidden_size
        self.q_proj = nn.Linear(wide, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(wide, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(wide, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, config.hidden_size, bias=False)

    def project(self, wide_T2H: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Give q [Q, T, D], k and v [N, T, D], the first two rotated to their positions."""
        total = len(wide_T2H)
        q = self.q_proj(wide_T2H).view(total, self.heads, self.dim).transpose(0, 1)
        k = self.k_proj(wide_T2H).view(total, self.kv_heads, self.dim).transpose(0, 1)
        v = self.v_proj(wide_T2H).view(total, self.kv_heads, self.dim).transpose(0, 1)
        return _rotate(q, *rope), _rotate(k, *rope), v


class Mlp(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """Llama's."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.RMSNorm):  # type: ignore[misc]  # torch is Any to mypy
    """An RMS norm of its input's precision. With the float32 weight beside a bfloat16 input torch has no kernel of its
    own and takes a dozen; engines round the weight as well when they load it.
    """

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class DraftLayer(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """The one decoder layer. Its residual is the state as it came in, not its norm."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = Norm(hidden, eps=eps)
        self.hidden_norm = Norm(hidden, eps=eps)
        self.post_attention_layernorm = Norm(hidden, eps=eps)
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)

    def wide(self, embeds_TH: Tensor, hidden_TH: Tensor) -> Tensor:
        """[T, 2H] what the attention reads."""
        normed_TH = self.hidden_norm(hidden_TH)
        return torch.cat([self.input_layernorm(embeds_TH).to(normed_TH.dtype), normed_TH], dim=-1)

    def finish(self, hidden_TH: Tensor, attended_QTD: Tensor) -> Tensor:
        """Go from the attention's output to the layer's."""
        flat = attended_QTD.transpose(0, 1).reshape(len(hidden_TH), -1)
        hidden_TH = hidden_TH + self.self_attn.o_proj(flat)
        return hidden_TH + self.mlp(self.post_attention_layernorm(hidden_TH))


class Drafter(nn.Module):  # type: ignore[misc]  # torch is Any to mypy
    """EAGLE-3's drafter with one Llama layer."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DrafterConfig, vocab: DraftVocab) -> None:
        super().__init__()
        assert vocab.size == config.draft_vocab_size, "the config belongs to another vocabulary"
        assert vocab.target_size == config.vocab_size, "the config belongs to another target"
        hidden = config.hidden_size
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.embed_tokens.weight.requires_grad_(config.own_embeddings)
        self.fc = nn.Linear(len(config.layers) * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([DraftLayer(config)])
        self.norm = Norm(hidden, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.from_numpy(vocab.d2t.copy()))
        self.register_buffer("t2d", torch.from_numpy(vocab.t2d.copy()))
        self.rotary = _rotary(config)

    @property
    def vocab(self) -> DraftVocab:
        """The mapping that the weights were made for."""
        return DraftVocab(d2t=self.d2t.cpu().numpy(), t2d=self.t2d.cpu().numpy())

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Translate draft ids into the target's."""
        return draft_ids + self.d2t[draft_ids]

    def fuse(self, aux: Tensor) -> Tensor:
        """[T, H] one state of the target's three."""
        return self.fc(aux.to(self.fc.weight.dtype))

    def rope(self, position_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, D] of positions."""
        cos, sin = self.rotary(self.norm.weight, position_ids_T[None])
        return cos[0], sin[0]

    def unroll(self, inputs: Inputs, steps: int, causal: Causal) -> Iterator[Tensor]:
        """Draft from every position at once, fed with the tokens that really came.

        Yields:
            [T, H] the normed state of step k, from which `lm_head` drafts the token k places after the next one. Rows
            whose token lies beyond the document are there too and mean nothing.
        """
        layer = self.layers[0]
        hidden, ids = self.fuse(inputs.aux), inputs.input_ids
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for step in range(steps):
            rope = self.rope(inputs.position_ids + step)
            q, k, v = layer.self_attn.project(layer.wide(self.embed_tokens(ids).to(hidden.dtype), hidden), rope)
            keys.append(k)
            values.append(v)
            hidden = layer.finish(hidden, ttt_attention(q, keys, values, causal))
            yield self.norm(hidden)
            # The next step reads the next token; past the end there is none, and any will do.
            ids = torch.cat([ids[1:], ids.new_zeros(1)])


def _rotary(config: DrafterConfig) -> Any:
    """Transformers' own rotary embedding, which knows every scaling that a target may have."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    return LlamaRotaryEmbedding(config.llama())


def _rotate(x_NTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    half = x_NTD.shape[-1] // 2
    turned = torch.cat([-x_NTD[..., half:], x_NTD[..., :half]], dim=-1)
    return x_NTD * cos_TD.to(x_NTD.dtype) + turned * sin_TD.to(x_NTD.dtype)


def init_drafter(drafter: Drafter, head_KH: Any, embeddings_VH: Any, seed: int) -> None:
    """Begin from scratch: the target's embeddings, the target's head of the draft vocabulary, small random layers.

    The highest auxiliary state goes through `fc` as it is: what the head reads then has a state's size from the start.

    Args:
        head_KH: float32 rows of the target's head, or None.
        embeddings_VH: float32 [V, H]
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in drafter.named_parameters():
            if weight.ndim == 2 and name not in {"embed_tokens.weight", "lm_head.weight"}:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
        hidden = drafter.config.hidden_size
        drafter.fc.weight[:, -hidden:] += torch.eye(hidden)
        drafter.embed_tokens.weight.copy_(torch.from_numpy(np.ascontiguousarray(embeddings_VH)))
        drafter.lm_head.weight.copy_(torch.from_numpy(np.ascontiguousarray(head_KH)))
