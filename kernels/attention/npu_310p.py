"""Calls for Ascend 310P: ``npu_prompt_flash_attention`` (PFA), ``npu_incre_flash_attention`` (IFA), float16 only.

::

    builder      op    query           key, value                       mask
    prompt       PFA   (1, N, S, D)    (1, N, Skv, D), heads repeated   (S, Skv) bool, whole, sparse mode 0
    incre        IFA   (B, 1, N, D)    (B, S, Nkv, D)                   none, or (B, 1, 1, S)
    incre_paged  IFA   (B, 1, N, D)    (blocks, block, H)               the same

PFA of a 310P has no grouped queries, no sparse mode but 0, no lengths, and no table of blocks: sequences go one by one,
K and V are repeated for every query head, and a cache is gathered first. The splitfuse op of ATB would read blocks;
its mask has a format of its own that none of our sources describes, so it is not called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hbmtwin.kernels.attention.npu_call import ALL_TOKENS, NpuCall, full_mask, window_mask
from hbmtwin.kernels.attention.npu_fia import flat

if TYPE_CHECKING:
    from torch import Tensor

PFA, IFA = "npu_prompt_flash_attention", "npu_incre_flash_attention"


def prompt(q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int = 0) -> NpuCall:
    """Causal attention of one sequence: q (S, N, D), k and v (Skv, Nkv, D)."""
    heads, q_len, kv_len = q.shape[1], q.shape[0], k.shape[0]
    arguments = {
        "query": _batch_of_one(q),
        "key": _batch_of_one(k.repeat_interleave(heads // k.shape[1], dim=1)),
        "value": _batch_of_one(v.repeat_interleave(heads // v.shape[1], dim=1)),
        "atten_mask": full_mask(q_len, kv_len, window, q.device),
        "num_heads": heads,
        "scale_value": scale,
        # The one other value that a 310P takes; with 0, which is the default, a later chunk would lose its own keys.
        "next_tokens": 0 if q_len == kv_len else ALL_TOKENS,
        "input_layout": "BNSD",
    }
    return NpuCall(PFA, arguments, (1, heads, q_len, v.shape[2]))


def incre(q: Tensor, k: Tensor, v: Tensor, *, kv_lens: Sequence[int], scale: float, window: int = 0) -> NpuCall:
    """One query per sequence over padded keys: q (B, N, D), k (B, S, Nkv, D)."""
    arguments = _incre(q, k, v, k.shape[2], kv_lens, scale) | _last(kv_lens, k.shape[1], window, q.device)
    return NpuCall(IFA, arguments, (q.shape[0], 1, *q.shape[1:]))


def incre_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    context_lens: Sequence[int],
    scale: float,
    window: int = 0,
) -> NpuCall:
    """One query per sequence over blocks, q (B, N, D)."""
    block = k_cache.shape[1]
    arguments = _incre(q, flat(k_cache), flat(v_cache), k_cache.shape[2], context_lens, scale) | {
        "block_table": block_table,
        "block_size": block,
    }
    arguments |= _last(context_lens, block_table.shape[1] * block, window, q.device)
    return NpuCall(IFA, arguments, (q.shape[0], 1, *q.shape[1:]))


def gathered(cache: Tensor, blocks: Tensor, length: int) -> Tensor:
    """The first *length* tokens of a sequence's *blocks*, (length, Nkv, D). A copy of O(length)."""
    count = -(-length // cache.shape[1])
    return cache.index_select(0, blocks[:count]).flatten(0, 1)[:length]


def _batch_of_one(x: Tensor) -> Tensor:
    """(S, N, D) as (1, N, S, D)."""
    return x.transpose(0, 1).unsqueeze(0).contiguous()


def _last(kv_lens: Sequence[int], columns: int, window: int, device: Any) -> dict[str, Any]:
    return {"atten_mask": window_mask(kv_lens, columns, window, device)} if window else {}


def _incre(q: Tensor, k: Tensor, v: Tensor, kv_heads: int, kv_lens: Sequence[int], scale: float) -> dict[str, Any]:
    return {
        "query": q.unsqueeze(1),
        "key": k,
        "value": v,
        "actual_seq_lengths": list(kv_lens),
        "num_heads": q.shape[1],
        "num_key_value_heads": kv_heads,
        "scale_value": scale,
        "input_layout": "BSND",
    }
