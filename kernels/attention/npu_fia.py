"""Calls of the fused inference attention (FIA, versions 1 and 2) and of ``npu_fusion_attention``: Atlas A2 and A3.

::

    builder       layout  query         key, value             lengths of q, kv        mask
    packed        TND     (T, N, D)     (Tkv, Nkv, D)          cumulative, cumulative  2048, mode 3 or 4
    packed_paged  TND     (T, N, D)     (blocks, block, H)     cumulative, plain       2048, mode 3 or 4
    padded        BNSD    (B, N, S, D)  (B, Nkv, Skv, D)       plain, plain            2048, mode 3 or 4
    padded_paged  BNSD    (B, N, S, D)  (blocks, block, H)     plain, plain            2048, mode 3 or 4
    one           BSND    (B, 1, N, D)  (B, S, Nkv, D)         none, plain             none, or (B, 1, 1, S)
    one_paged     BSND    (B, 1, N, D)  (blocks, block, H)     none, plain             none, or (B, 1, 1, S)

A window of w keys, the query's own among them, is sparse mode 4 with pre_tokens = w - 1 and next_tokens = 0: a key j is
left out where j < i - pre_tokens (examples in torch_npu's own documents of the op). Of one query per sequence the
ops ignore sparse_mode, so a window there is a mask of the scores' size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hbmtwin.kernels.attention.npu_call import NpuCall, cumulative, window_mask

if TYPE_CHECKING:
    from torch import Tensor

FIA, FIA_V2, FUSION = (
    "npu_fused_infer_attention_score",
    "npu_fused_infer_attention_score_v2",
    "npu_fusion_attention",
)
IN_V2 = {
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "softmax_lse_flag": "return_softmax_lse",
    "key_antiquant_scale": "dequant_scale_key",
    "key_antiquant_offset": "dequant_offset_key",
    "value_antiquant_scale": "dequant_scale_value",
    "value_antiquant_offset": "dequant_offset_value",
    "key_antiquant_mode": "key_quant_mode",
    "value_antiquant_mode": "value_quant_mode",
    "quant_scale2": "quant_scale_out",
    "quant_offset2": "quant_offset_out",
}
"""How version 2 calls an argument of version 1; others keep their names."""
PER_TOKEN_PAGED, PER_TOKEN_HEAD_PAGED = 4, 5
"""Antiquant modes: scales (blocks, block_size), and (blocks, Nkv, block_size)."""


def packs(head_dim: int, v_head_dim: int, *, grouped: bool) -> bool:
    """Whether FIA takes heads of that size in layout TND."""
    if (head_dim, v_head_dim) in ((128, 128), (192, 128), (192, 192)):
        return True
    return (head_dim, v_head_dim) == (64, 64) and not grouped


def packed(
    q: Tensor, k: Tensor, v: Tensor, *, q_lens: Sequence[int], kv_lens: Sequence[int], scale: float, **causal: Any
) -> NpuCall:
    """Prefill without a cache; *causal* is that of :func:`causal`."""
    return _fia(
        *(q, k, v, "TND", q.shape[1], k.shape[1], (*q.shape[:2], v.shape[2])),
        actual_seq_lengths=cumulative(q_lens),
        actual_seq_lengths_kv=cumulative(kv_lens),
        scale=scale,
        **causal,
    )


def packed_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    **causal: Any,
) -> NpuCall:
    """Prefill or decode over blocks: lengths of the query are cumulative, those of the cache plain."""
    return _fia(
        *(q, flat(k_cache), flat(v_cache), "TND", q.shape[1], k_cache.shape[2], (*q.shape[:2], v_cache.shape[3])),
        actual_seq_lengths=cumulative(q_lens),
        actual_seq_lengths_kv=list(context_lens),
        block_table=block_table,
        block_size=k_cache.shape[1],
        scale=scale,
        **causal,
    )


def padded(q: Tensor, k: Tensor, v: Tensor, *, scale: float, **causal: Any) -> NpuCall:
    """Sequences of equal lengths, each of the three (B, heads, S, D)."""
    batch, heads, q_len, _ = q.shape
    return _fia(
        *(q, k, v, "BNSD", heads, k.shape[1], (batch, heads, q_len, v.shape[3])),
        actual_seq_lengths=[q_len] * batch,
        actual_seq_lengths_kv=[k.shape[2]] * batch,
        scale=scale,
        **causal,
    )


def padded_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    context_lens: Sequence[int],
    scale: float,
    **causal: Any,
) -> NpuCall:
    """Queries (B, N, S, D) of equal lengths over blocks."""
    batch, heads, q_len, _ = q.shape
    return _fia(
        *(q, flat(k_cache), flat(v_cache), "BNSD", heads, k_cache.shape[2], (batch, heads, q_len, v_cache.shape[3])),
        actual_seq_lengths=[q_len] * batch,
        actual_seq_lengths_kv=list(context_lens),
        block_table=block_table,
        block_size=k_cache.shape[1],
        scale=scale,
        **causal,
    )


def one(q: Tensor, k: Tensor, v: Tensor, *, kv_lens: Sequence[int], scale: float, window: int = 0) -> NpuCall:
    """One query per sequence over padded keys: q (B, N, D), k (B, S, Nkv, D)."""
    return _fia(
        *(q.unsqueeze(1), k, v, "BSND", q.shape[1], k.shape[2], (q.shape[0], 1, q.shape[1], v.shape[3])),
        actual_seq_lengths_kv=list(kv_lens),
        scale=scale,
        **_last(kv_lens, k.shape[1], window, q.device),
    )


def one_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    context_lens: Sequence[int],
    scale: float,
    window: int = 0,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> NpuCall:
    """One query per sequence over blocks, q (B, N, D); INT8 caches with their scales."""
    block, shape = k_cache.shape[1], (q.shape[0], 1, q.shape[1], v_cache.shape[3])
    quantised: dict[str, Any] = {}
    if k_scale is not None:
        mode = PER_TOKEN_PAGED if k_scale.ndim == 2 else PER_TOKEN_HEAD_PAGED
        quantised = {
            "key_antiquant_scale": k_scale,
            "value_antiquant_scale": v_scale,
            "key_antiquant_mode": mode,
            "value_antiquant_mode": mode,
        }
    return _fia(
        q.unsqueeze(1),
        flat(k_cache),
        flat(v_cache),
        "BSND",
        q.shape[1],
        k_cache.shape[2],
        shape,
        actual_seq_lengths_kv=list(context_lens),
        block_table=block_table,
        block_size=block,
        scale=scale,
        **quantised,
        **_last(context_lens, block_table.shape[1] * block, window, q.device),
    )


def fusion(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
    mask: Tensor,
    window: int = 0,
) -> NpuCall:
    """Prefill by the training op, any head size up to 768. ``tockens`` is how the op spells it."""
    band = {"sparse_mode": 4, "pre_tockens": window - 1, "next_tockens": 0} if window else {"sparse_mode": 3}
    arguments = {
        "query": q,
        "key": k,
        "value": v,
        "head_num": q.shape[1],
        "input_layout": "TND",
        "atten_mask": mask,
        "scale": scale,
        "actual_seq_qlen": cumulative(q_lens),
        "actual_seq_kvlen": cumulative(kv_lens),
        **band,
    }
    return NpuCall(FUSION, arguments, (*q.shape[:2], v.shape[2]))


def causal(mask: Tensor, window: int = 0) -> dict[str, Any]:
    """Arguments of a right-aligned causal mask, of its last *window* keys where there is one."""
    if window:
        return {"atten_mask": mask, "sparse_mode": 4, "pre_tokens": window - 1, "next_tokens": 0}
    return {"atten_mask": mask, "sparse_mode": 3}


def as_v2(call: NpuCall) -> NpuCall:
    """The same call of version 2."""
    return NpuCall(FIA_V2, {IN_V2.get(name, name): value for name, value in call.arguments.items()}, call.shape)


def flat(cache: Tensor) -> Tensor:
    """A cache (blocks, block, Nkv, D) as (blocks, block, H), without a copy."""
    return cache.view(cache.shape[0], cache.shape[1], -1)


def _last(kv_lens: Sequence[int], columns: int, window: int, device: Any) -> dict[str, Any]:
    return {"atten_mask": window_mask(kv_lens, columns, window, device)} if window else {}


def _fia(
    q: Tensor, k: Tensor, v: Tensor, layout: str, heads: int, kv_heads: int, shape: tuple[int, ...], **further: Any
) -> NpuCall:
    arguments = {
        "query": q,
        "key": k,
        "value": v,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "input_layout": layout,
        **further,
    }
    return NpuCall(FIA, arguments, shape)
