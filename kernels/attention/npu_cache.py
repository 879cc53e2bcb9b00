"""Calls that write to a paged cache, quantise for one, or read one by ATB.

::

    builder            op                        caches                      slots            negative slot
    scatter            npu_scatter_pa_kv_cache   (blocks, block, Nkv, D)     int32 or int64   illegal
    reshape_and_cache  _npu_reshape_and_cache    the same; ATB               int32            skipped
    dynamic_quant      npu_dynamic_quant         -> int8 and a float32 scale for each row of the last dimension
    paged_attention    _npu_paged_attention      the same; ATB, no mask, lengths int32 on the host
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hbmtwin.kernels.attention.npu_call import NpuCall

if TYPE_CHECKING:
    from torch import Tensor

SCATTER, RESHAPE_AND_CACHE = "npu_scatter_pa_kv_cache", "_npu_reshape_and_cache"
DYNAMIC_QUANT, PAGED_ATTENTION = "npu_dynamic_quant", "_npu_paged_attention"


def scatter(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> NpuCall:
    """Write (tokens, Nkv, D) to their slots; the op's own default is the NZ format, ours is ND."""
    arguments = {
        "key": k,
        "value": v,
        "key_cache": k_cache,
        "value_cache": v_cache,
        "slot_mapping": slots,
        "cache_mode": "Norm",
    }
    return NpuCall(SCATTER, arguments, ())


def reshape_and_cache(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> NpuCall:
    """The same by ATB."""
    import torch

    arguments = {
        "key": k,
        "value": v,
        "key_cache": k_cache,
        "value_cache": v_cache,
        "slot_indices": slots.to(torch.int32),
    }
    return NpuCall(RESHAPE_AND_CACHE, arguments, ())


def dynamic_quant(x: Tensor) -> NpuCall:
    """INT8 with a scale for each row, which is the op's second result: a value is int8 times scale."""
    return NpuCall(DYNAMIC_QUANT, {"input": x}, tuple(x.shape))


def paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, block_table: Tensor, context_lens: Sequence[int], scale: float
) -> NpuCall:
    """One query per sequence over blocks by ATB, q (B, N, D)."""
    import torch

    shape = (*q.shape[:2], v_cache.shape[3])
    arguments = {
        "query": q,
        "key_cache": k_cache,
        "value_cache": v_cache,
        "num_kv_heads": k_cache.shape[2],
        "num_heads": q.shape[1],
        "scale_value": scale,
        "block_table": block_table,
        "context_lens": torch.tensor(list(context_lens), dtype=torch.int32),
        "out": q.new_empty(shape),
    }
    return NpuCall(PAGED_ATTENTION, arguments, shape)
