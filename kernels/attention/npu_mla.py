"""Multi-head latent attention (MLA) on Atlas A2 and A3 by FIA with ``query_rope`` and ``key_rope``.

::

    prompt    q (T, N, 128) + rope (T, N, 64)      k (Tkv, N, 128) + rope (Tkv, N, 64), v (Tkv, N, 128): heads expanded
    latent    q (B, N, 512) + rope (B, N, 64)      one latent for K and V (blocks, block, 1, 512) + rope (.., 64)
    write     latent (tokens, 1, 512), rope (tokens, 1, 64) to the two caches, by one scatter

In ``latent`` the up-projection of K is already in the query, and what comes out is still to be multiplied by V's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hbmtwin.kernels.attention.npu_cache import scatter
from hbmtwin.kernels.attention.npu_call import NpuCall, cumulative
from hbmtwin.kernels.attention.npu_fia import FIA, causal, flat

if TYPE_CHECKING:
    from torch import Tensor


def prompt(
    q: Tensor,
    q_rope: Tensor,
    k: Tensor,
    k_rope: Tensor,
    v: Tensor,
    *,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
    mask: Tensor,
) -> NpuCall:
    """Packed prefill with expanded heads; the result is (T, N, 128)."""
    arguments = {
        "query": q,
        "key": k,
        "value": v,
        "query_rope": q_rope,
        "key_rope": k_rope,
        "num_heads": q.shape[1],
        "num_key_value_heads": k.shape[1],
        "input_layout": "TND",
        "actual_seq_lengths": cumulative(q_lens),
        "actual_seq_lengths_kv": cumulative(kv_lens),
        "scale": scale,
        **causal(mask),
    }
    return NpuCall(FIA, arguments, (*q.shape[:2], v.shape[2]))


def latent(
    q: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    rope_cache: Tensor,
    *,
    block_table: Tensor,
    context_lens: Sequence[int],
    scale: float,
) -> NpuCall:
    """One query per sequence over latent blocks; the result is (B, 1, N, 512)."""
    cache = flat(latent_cache)
    arguments = {
        "query": q.unsqueeze(1),
        "key": cache,
        "value": cache,
        "query_rope": q_rope.unsqueeze(1),
        "key_rope": flat(rope_cache),
        "num_heads": q.shape[1],
        "num_key_value_heads": 1,
        "input_layout": "BSND",
        "actual_seq_lengths_kv": list(context_lens),
        "block_table": block_table,
        "block_size": latent_cache.shape[1],
        "scale": scale,
    }
    return NpuCall(FIA, arguments, (q.shape[0], 1, *q.shape[1:]))


def write(latents: Tensor, ropes: Tensor, latent_cache: Tensor, rope_cache: Tensor, slots: Tensor) -> NpuCall:
    """Write both parts of new tokens."""
    return scatter(latents, ropes, latent_cache, rope_cache, slots)
