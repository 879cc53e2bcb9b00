"""What the NPU kernels are asked in :mod:`hbmtwin.validation.npu_calls`: every path, on tensors without memory.

::

    case      heads      size       layout it leads to
    gqa       32 of 8    128        TND
    mha       8 of 8     64         TND
    small     14 of 2    64         BNSD, since TND takes no groups of that size
    wide      16 of 4    256        BNSD
    unequal   16 of 16   192, 128   TND
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hbmtwin.kernels.attention import npu_cache, npu_fia, npu_mla
from hbmtwin.kernels.attention.npu import NpuKernels
from hbmtwin.kernels.attention.npu_cache import PAGED_ATTENTION, RESHAPE_AND_CACHE
from hbmtwin.kernels.attention.npu_call import NpuCall, compressed_mask
from hbmtwin.kernels.attention.npu_choice import NpuChoice, choice_for
from hbmtwin.kernels.attention.npu_fia import FIA_V2, FUSION

SHAPES = {"gqa": (32, 8, 128, 128), "mha": (8, 8, 64, 64), "small": (14, 2, 64, 64), "wide": (16, 4, 256, 256)}
UNEQUAL = {"unequal": (16, 16, 192, 128)}
Q_LENS, KV_LENS = (5, 5, 1, 40, 1, 1), (5, 5, 130, 300, 9, 9)
CONTEXT = (130, 1, 256, 700)
BLOCKS, BLOCK = 16, 128
SCALE = 0.125
FAMILIES: dict[str, tuple[str, NpuChoice, str]] = {
    "a2": ("a2", choice_for("a2"), "bfloat16"),
    "a3": ("a3", choice_for("a3"), "float16"),
    "a2-v2": ("a2", NpuChoice(FIA_V2, FIA_V2, FIA_V2, FIA_V2, RESHAPE_AND_CACHE), "bfloat16"),
    "a2-fusion": ("a2", choice_for("a2")._replace(prefill=FUSION, paged_decode=PAGED_ATTENTION), "bfloat16"),
    "310p": ("310p", choice_for("310p"), "float16"),
}


def calls() -> Iterator[tuple[str, str, NpuCall]]:
    """Name of the case, family, call."""
    for name, (family, choice, dtype) in FAMILIES.items():
        kernels = NpuKernels(family, choice)
        shapes = SHAPES if family == "310p" else SHAPES | UNEQUAL
        for shape_name, shape in shapes.items():
            for window in (0, 4):
                for case, call in _attention(kernels, shape, dtype, window):
                    yield f"{name} {shape_name} window {window} {case}", family, call
        yield f"{name} write", family, kernels.write_call(*_new_and_caches(dtype), slots=_empty((9,), "int32"))
    for case, call in _latent():
        yield f"a2 mla {case}", "a2", call
    for case, call in _int8():
        yield f"a2 int8 {case}", "a2", call
        yield f"a2-v2 int8 {case}", "a2", npu_fia.as_v2(call) if call.op == npu_fia.FIA else call


def outputs() -> Iterator[str]:
    """Methods whose result on meta tensors is not (tokens, N, Dv)."""
    for name in ("a2", "a3", "a2-v2", "310p"):
        family, choice, dtype = FAMILIES[name]
        kernels = NpuKernels(family, choice)
        for shape_name, (heads, kv_heads, dim, v_dim) in SHAPES.items():
            shape = heads, kv_heads, dim, v_dim
            q, one, k, v, k_cache, v_cache, table = _tensors(shape, dtype)
            padded = _empty((len(CONTEXT), 700, kv_heads, dim), dtype)
            paged: dict[str, Any] = {"block_table": table, "context_lens": list(CONTEXT), "scale": SCALE}
            chunk = [3, 1, 200, 1]
            results = {
                "prefill": (kernels.prefill(q, k, v, q_lens=Q_LENS, kv_lens=KV_LENS, scale=SCALE), q),
                "decode": (kernels.decode(one, padded, padded, kv_lens=CONTEXT, scale=SCALE), one),
                "paged_decode": (kernels.paged_decode(one, k_cache, v_cache, **paged), one),
            }
            new = _empty((sum(chunk), heads, dim), dtype)
            results["paged_prefill"] = kernels.paged_prefill(new, k_cache, v_cache, q_lens=chunk, **paged), new
            for method, (made, of) in results.items():
                if tuple(made.shape) != (of.shape[0], heads, v_dim) or made.dtype != of.dtype:
                    yield f"{name} {shape_name} {method}: {tuple(made.shape)} {made.dtype}"
        if family != "310p":
            yield from _outputs_beside(name, kernels)


def _outputs_beside(name: str, kernels: NpuKernels) -> Iterator[str]:
    """Of what the kernels have beside the contract: MLA and writes of INT8, which must take what the ops give."""
    one, rope, latents, ropes = _latent_tensors()
    table = _empty((len(CONTEXT), 6), "int32")
    made = kernels.mla_paged_decode(
        *(one, rope, latents, ropes), block_table=table, context_lens=list(CONTEXT), scale=SCALE
    )
    if made.shape != one.shape:
        yield f"{name} mla_paged_decode: {tuple(made.shape)}"
    if kernels.choice.write == RESHAPE_AND_CACHE:  # no meta kernel
        return
    new, cache = _empty((9, 8, 128), "bfloat16"), _empty((BLOCKS, BLOCK, 8, 128), "int8")
    for scales in ((BLOCKS, BLOCK), (BLOCKS, 8, BLOCK)):
        scale = _empty(scales, "float32")
        kernels.write_kv_int8(new, new, cache, cache, scale, scale, slots=_empty((9,), "int64"))


def _attention(
    kernels: NpuKernels, shape: tuple[int, int, int, int], dtype: str, window: int
) -> Iterator[tuple[str, NpuCall]]:
    heads, kv_heads, dim, v_dim = shape
    q, one, k, v, k_cache, v_cache, table = _tensors(shape, dtype)
    causal: dict[str, Any] = {"scale": SCALE, "window": window}
    for call in kernels.prefill_calls(q, k, v, q_lens=Q_LENS, kv_lens=KV_LENS, **causal):
        yield "prefill", call
    if dim != v_dim:
        return
    paged: dict[str, Any] = {"block_table": table, "context_lens": list(CONTEXT)} | causal
    for chunk in ((3, 1, 200, 1), (1, 1, 1, 1)):
        new = _empty((sum(chunk), heads, dim), dtype)
        for call in kernels.paged_prefill_calls(new, k_cache, v_cache, q_lens=chunk, **paged):
            yield "paged prefill", call
    if not (window and kernels.choice.paged_decode == PAGED_ATTENTION):
        yield "paged decode", kernels.paged_decode_call(one, k_cache, v_cache, **paged)
    padded = _empty((len(CONTEXT), 700, kv_heads, dim), dtype)
    yield "decode", kernels.decode_call(one, padded, padded, kv_lens=list(CONTEXT), **causal)


def _latent() -> Iterator[tuple[str, NpuCall]]:
    mask = compressed_mask("meta")
    lens: dict[str, Any] = {"q_lens": [5, 7], "kv_lens": [5, 9], "scale": SCALE}
    new, rope = _empty((12, 16, 128), "bfloat16"), _empty((12, 16, 64), "bfloat16")
    keys, key_rope = _empty((14, 16, 128), "bfloat16"), _empty((14, 16, 64), "bfloat16")
    yield "prefill", npu_mla.prompt(new, rope, keys, key_rope, keys, mask=mask, **lens)
    one, one_rope, latents, ropes = _latent_tensors()
    table = _empty((len(CONTEXT), 6), "int32")
    call = npu_mla.latent(one, one_rope, latents, ropes, block_table=table, context_lens=CONTEXT, scale=SCALE)
    yield "decode", call
    yield "decode, version 2", npu_fia.as_v2(call)
    parts = _empty((9, 1, 512), "bfloat16"), _empty((9, 1, 64), "bfloat16")
    yield "write", npu_mla.write(*parts, latents, ropes, _empty((9,), "int64"))


def _latent_tensors() -> tuple[Any, Any, Any, Any]:
    """Query, its rotary part, both caches."""
    return (
        _empty((len(CONTEXT), 16, 512), "bfloat16"),
        _empty((len(CONTEXT), 16, 64), "bfloat16"),
        _empty((BLOCKS, BLOCK, 1, 512), "bfloat16"),
        _empty((BLOCKS, BLOCK, 1, 64), "bfloat16"),
    )


def _int8() -> Iterator[tuple[str, NpuCall]]:
    _, one, _, _, _, _, table = _tensors(SHAPES["gqa"], "bfloat16")
    cache = _empty((BLOCKS, BLOCK, 8, 128), "int8")
    paged: dict[str, Any] = {"block_table": table, "context_lens": list(CONTEXT), "scale": SCALE}
    for scales in ((BLOCKS, BLOCK), (BLOCKS, 8, BLOCK)):
        scale = _empty(scales, "float32")
        for window in (0, 4):
            call = npu_fia.one_paged(one, cache, cache, k_scale=scale, v_scale=scale, window=window, **paged)
            yield f"scales {scales} window {window}", call
    yield "quantise", npu_cache.dynamic_quant(_empty((9, 8, 128), "bfloat16"))
    new = _empty((9, 8, 128), "int8")
    yield "write", npu_cache.scatter(new, new, cache, cache, _empty((9,), "int64"))


def _tensors(shape: tuple[int, int, int, int], dtype: str) -> tuple[Any, ...]:
    heads, kv_heads, dim, v_dim = shape
    tokens, kv_tokens = sum(Q_LENS), sum(KV_LENS)
    return (
        _empty((tokens, heads, dim), dtype),
        _empty((len(CONTEXT), heads, dim), dtype),
        _empty((kv_tokens, kv_heads, dim), dtype),
        _empty((kv_tokens, kv_heads, v_dim), dtype),
        _empty((BLOCKS, BLOCK, kv_heads, dim), dtype),
        _empty((BLOCKS, BLOCK, kv_heads, v_dim), dtype),
        _empty((len(CONTEXT), 6), "int32"),
    )


def _new_and_caches(dtype: str) -> tuple[Any, Any, Any, Any]:
    new, cache = _empty((9, 8, 128), dtype), _empty((BLOCKS, BLOCK, 8, 128), dtype)
    return new, new, cache, cache


def _empty(shape: tuple[int, ...], dtype: str) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
