"""SGLang's CPU kernels for EAGLE decoding in plain torch, a request at a time.

With them the real server, started with `--attention-backend intel_amx`, decodes with a real drafter where there is
neither a GPU nor AMX. Arguments are those of SGLang 0.5.23's calls (srt/layers/attention/intel_amx_backend.py,
kernels/ops/speculative/); results are written into the tensors that they name.

Letters: B = requests, N = tokens of a request's tree (its root, which is verified already, included), T = rows of the
batch, Q and K = heads, D = head size, S = slots of the cache.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

NOTHING = -1


def install() -> None:
    """Put the attention where SGLang's backend looks for it."""
    namespace: Any = torch.ops.sgl_kernel
    namespace.decode_attention_cpu = _decode_attention
    namespace.extend_attention_cpu = _extend_attention


def _attend(query_TQD: Tensor, keys_SKD: Tensor, values_SKD: Tensor, mask_TS: Tensor | None, scale: float) -> Tensor:
    query, keys, values = (tensor.transpose(0, 1)[None] for tensor in (query_TQD, keys_SKD, values_SKD))
    attended = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask_TS, scale=scale, enable_gqa=True
    )
    return attended[0].transpose(0, 1)


def _decode_attention(  # noqa: PLR0917 - SGLang's call
    query_BQD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    _key_scale: float,
    _value_scale: float,
    out_BQD: Tensor,
    new_keys: Tensor | None,
    new_values: Tensor | None,
    new_slots: Tensor,
    _scratch: Tensor,
    slots_of: Tensor,
    rows: Tensor,
    lengths: Tensor,
    scale: float,
    *_unused: object,
) -> None:
    """One token of each request; unlike the extension it also stores the new keys and values."""
    if new_keys is not None and new_values is not None:
        keys_SKD[new_slots] = new_keys.view(-1, *keys_SKD.shape[1:])
        values_SKD[new_slots] = new_values.view(-1, *values_SKD.shape[1:])
    for place, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        slots = slots_of[row, :length].long()
        out_BQD[place] = _attend(query_BQD[place : place + 1], keys_SKD[slots], values_SKD[slots], None, scale)[0]


def _extend_attention(  # noqa: PLR0917 - SGLang's call
    query_TQD: Tensor,
    _new_keys: Tensor,
    _new_values: Tensor,
    out_TQD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    _key_scale: float,
    _value_scale: float,
    slots_of: Tensor,
    rows: Tensor,
    lengths: Tensor,
    new_lengths: Tensor,
    starts: Tensor,
    _longest: int,
    scale: float,
    _logit_cap: float,
    _is_cross: bool,
    _window: int,
    _encoder_lengths: Tensor | None,
    _sinks: Tensor | None,
    tree_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """New tokens of each request see all old ones, and of each other those before them or, in a tree, their ancestors.

    Args:
        lengths: [B], new tokens included.
        tree_mask: bool [B * N * N], where each request has N new tokens.
    """
    trees = None if tree_mask is None else tree_mask.view(len(rows), int(new_lengths[0]), -1)
    for place, row in enumerate(rows.tolist()):
        length, new, start = int(lengths[place]), int(new_lengths[place]), int(starts[place])
        among = torch.ones(new, new, dtype=torch.bool)
        among = trees[place].bool() if trees is not None else among.tril() if is_causal else among
        mask = torch.cat([torch.ones(new, length - new, dtype=torch.bool), among], dim=1)
        slots, part = slots_of[row, :length].long(), slice(start, start + new)
        out_TQD[part] = _attend(query_TQD[part], keys_SKD[slots], values_SKD[slots], mask, scale)


def copy_all_layer_kv_cache_cpu(addresses: Tensor, row_bytes: Tensor, targets: Tensor, sources: Tensor) -> None:
    """Move slots within each buffer of the cache: all are read before any is written.

    Args:
        addresses: of the buffers, with `row_bytes` bytes a slot each.
    """
    for address, size in zip(addresses.tolist(), row_bytes.tolist(), strict=True):
        rows = [ctypes.string_at(address + source * size, size) for source in sources.tolist()]
        for target, row in zip(targets.tolist(), rows, strict=True):
            ctypes.memmove(address + target * size, row, size)


def build_draft_decode_metadata_cpu(
    slots_of: Tensor, rows: Tensor, lengths: Tensor, topk: int, num_steps: int, width: int
) -> Tensor:
    """Give each branch of a draft its own row of slots: the request's, then `num_steps` of those behind."""
    table = torch.zeros(len(rows) * topk, width, dtype=slots_of.dtype)
    for place, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        for branch in range(topk):
            first = length + branch * num_steps
            mine = table[place * topk + branch]
            mine[:length] = slots_of[row, :length]
            mine[length : length + num_steps] = slots_of[row, first : first + num_steps]
    return table


def assign_draft_cache_locs_contiguous_cpu(
    rows: Tensor, slots_of: Tensor, lengths: Tensor, out: Tensor, _width: int, topk: int, num_steps: int
) -> None:
    count = topk * num_steps
    assign_extend_cache_locs_cpu(rows, slots_of, lengths, lengths + count, out, _width)


def assign_extend_cache_locs_cpu(
    rows: Tensor, slots_of: Tensor, starts: Tensor, ends: Tensor, out: Tensor, _width: int
) -> None:
    """Copy each request's slots from `starts` to `ends`, one request after the other."""
    bounds = zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True)
    packed = torch.cat([slots_of[row, start:end] for row, start, end in bounds])
    out.view(-1)[: len(packed)] = packed.to(out.dtype)


def assign_req_to_token_pool_cpu(
    rows: Tensor, slots_of: Tensor, starts: Tensor, ends: Tensor, packed: Tensor, _width: int
) -> None:
    """The other way: note each request's new slots, from `starts` to `ends`."""
    done = 0
    for row, start, end in zip(rows.tolist(), starts.tolist(), ends.tolist(), strict=True):
        slots_of[row, start:end] = packed[done : done + end - start].to(slots_of.dtype)
        done += end - start


def fill_bonus_tokens_cpu(accepted: Tensor, lengths: Tensor, bonus: Tensor, width: int) -> None:
    """The last accepted token of each request."""
    last = torch.arange(len(lengths)) * width + lengths.long() - 1
    bonus.view(-1)[: len(lengths)] = accepted.view(-1)[last].to(bonus.dtype)


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, slots: Tensor, out: Tensor) -> None:
    """The slots of what was accepted, packed."""
    chosen = accept_index.view(-1)
    packed = slots[chosen[chosen > NOTHING].long()]
    out.view(-1)[: len(packed)] = packed.to(out.dtype)


def build_tree_kernel_efficient_cpu(  # noqa: PLR0917 - SGLang's call
    parents: Tensor,
    selected: Tensor,
    lengths: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrieve_index: Tensor,
    next_token: Tensor,
    next_sibling: Tensor,
    topk: int,
    _num_steps: int,
    num_tokens: int,
    _mask_mode: int,
) -> None:
    """Write each request's tree of drafts: who may see whom, at which position, and the way from child to child.

    A draft is named by its place among all that the drafter proposed: place // topk, where it is not 0, is the place in
    `parents` of the name of the draft it follows. The mask is SGLang's for a CPU, among the tree's tokens only.

    Args:
        parents: [B, names of drafts that were followed], the first for the root.
        selected: [B, N - 1], names of those that are to be verified, ascending.
        tree_mask: bool [B * N * N].
        positions: [B * N].
        next_token: [B, N], a token's first child, -1 where there is none.
        next_sibling: [B, N], the next child of the same parent.
    """
    mask = tree_mask.view(-1)[: len(lengths) * num_tokens**2].view(len(lengths), num_tokens, num_tokens)
    mask.zero_()
    for place, length in enumerate(lengths.tolist()):
        names = selected[place].tolist()
        above = [NOTHING]
        for name in names:
            group = name // topk
            above.append(0 if group == 0 else names.index(int(parents[place, group])) + 1)
        retrieve_index[place] = torch.arange(num_tokens) + place * num_tokens
        for token in reversed(range(num_tokens)):
            depth, ancestor = 0, token
            mask[place, token, token] = True
            while above[ancestor] != NOTHING:
                ancestor = above[ancestor]
                mask[place, token, ancestor] = True
                depth += 1
            positions.view(-1)[place * num_tokens + token] = length + depth
            if token:
                next_sibling[place, token] = next_token[place, above[token]]
                next_token[place, above[token]] = token


def verify_tree_greedy_cpu(
    *,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """Follow the target's own choices down each tree, as far as drafts agree with them.

    Args:
        predicts: [T], written where a token was accepted: the target's choice after it.
        accept_index: [B, most accepted], the accepted tokens' places in the batch, the root first.
        accept_token_num: [B], drafts accepted: without the root.
    """
    choices = target_predict.view(-1).tolist()
    for place in range(len(candidates)):
        token, accepted = 0, [int(retrive_index[place, 0])]
        while len(accepted) < accept_index.shape[1]:
            token = int(retrive_next_token[place, token])
            while token != NOTHING and int(candidates[place, token]) != choices[accepted[-1]]:
                token = int(retrive_next_sibling[place, token])
            if token == NOTHING:
                break
            accepted.append(int(retrive_index[place, token]))
        for number, index in enumerate(accepted):
            accept_index[place, number] = index
            predicts[index] = choices[index]
        accept_token_num[place] = len(accepted) - 1
