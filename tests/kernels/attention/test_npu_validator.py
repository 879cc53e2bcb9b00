"""Every limit of the NPU ops: a call that breaks it is refused with op, argument, rule and cure; its neighbour is not.

The table is written from the ops' documents. Needs neither torch nor torch_npu.
"""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.kernels.attention.npu_asked import NAMES, Asked
from hbmtwin.kernels.attention.npu_asked import TensorArg as T
from hbmtwin.kernels.attention.npu_validator import RULES, broken_rule, check_call
from hbmtwin.kernels.attention.validator import KernelArgumentError

from .npu_legal_calls import (
    ATB,
    BF16,
    BY_ATB,
    CAUSAL,
    DYNAMIC,
    F16,
    F32,
    FUSED,
    FUSION,
    GONE,
    HEADS,
    I8,
    I32,
    I64,
    IFA,
    INT8,
    LATENT,
    LATENTS,
    LONG,
    LONG_PAGED,
    MLA,
    MLA_LONG,
    NORMED,
    NZ,
    NZ_CACHES,
    ONE,
    ONE_PAGED,
    PACKED,
    PACKED_PAGED,
    PER_CHANNEL,
    PFA,
    PROMPT,
    QUANTISED,
    QUANTIZE,
    QUANTIZED,
    RESHAPE,
    RESHAPED,
    RMSNORM,
    SCALES,
    SCATTER,
    SCATTERED,
    V1,
    V2,
    Case,
    alike,
    case,
    f16,
    heads,
    lengths,
    masks,
    paging,
    qkv,
    ranks,
    sequences,
)


def fia() -> list[Case]:
    op = V1
    return [
        *lengths(op, PACKED),
        *ranks(op, ONE),
        *heads(op, ONE),
        *paging(op, ONE_PAGED),
        *masks(op, PACKED),
        case(op, "layout", ONE, {"input_layout": "SBH"}),
        case(op, "kv_lens_missing", ONE_PAGED, {"actual_seq_lengths_kv": GONE}),
        case(
            *(op, "kv_lens_fit", ONE, {"actual_seq_lengths_kv": [200, 701]}),
            {"actual_seq_lengths_kv": [200, 700]},
        ),
        case(
            op,
            "layout_length",
            ONE | qkv((2, 8, 1, 128), (2, 2, 700, 128)),
            {"input_layout": "BNSD_BSND"},
            {"input_layout": "BNSD_BSND", "query": f16(2, 8, 2, 128)},
        ),
        case(
            op,
            "layout_length",
            LONG,
            {"input_layout": "BNSD_NBSD", "query": f16(2, 8, 17, 128)},
            {"input_layout": "BNSD_NBSD", "query": f16(2, 8, 16, 128)},
        ),
        case(op, "query_dtype", ONE, {"query": T((2, 1, 8, 128), F32)}, qkv((2, 1, 8, 128), (2, 700, 2, 128), BF16)),
        case(op, "int4_paged", ONE_PAGED, alike((16, 128, 32), I32)),
        case(
            *(op, "int8_paged_long", LONG_PAGED | PER_CHANNEL, alike((16, 128, 256), I8)),
            dict.fromkeys(PER_CHANNEL, GONE),
        ),
        case(
            op, "int8_paged_long", QUANTISED | PER_CHANNEL, {"query": f16(2, 2, 8, 128)}, {"query": f16(2, 1, 8, 128)}
        ),
        case(op, "key_dtype", ONE, alike((2, 700, 2, 128), F32), alike((2, 700, 2, 128), F16)),
        case(op, "head_dim", ONE, qkv((2, 1, 8, 528), (2, 700, 2, 528)), qkv((2, 1, 8, 512), (2, 700, 2, 512))),
        case(op, "head_dim", ONE, qkv((2, 1, 8, 120), (2, 700, 2, 120)), qkv((2, 1, 8, 112), (2, 700, 2, 112))),
        case(
            *(op, "head_dim", ONE | PER_CHANNEL, {"query": f16(2, 1, 8, 80)} | alike((2, 700, 2, 80), I8)),
            {"query": f16(2, 1, 8, 96)} | alike((2, 700, 2, 96), I8),
        ),
        case(
            *(op, "head_dim", ONE | PER_CHANNEL, {"query": f16(2, 1, 8, 96)} | alike((2, 700, 2, 12), I32)),
            {"query": f16(2, 1, 8, 64)} | alike((2, 700, 2, 8), I32),
        ),
        case(
            *(op, "batch", ONE, qkv((65_537, 1, 8, 128), (65_537, 700, 2, 128)) | {"actual_seq_lengths_kv": [700]}),
            qkv((65_536, 1, 8, 128), (65_536, 700, 2, 128)) | {"actual_seq_lengths_kv": [700]},
        ),
        case(
            *(op, "packed_batch", PACKED, sequences(4097)),
            sequences(4096),
        ),
        case(op, "tokens", ONE, alike((2, 262_145, 2, 128)), alike((2, 262_144, 2, 128))),
        case(op, "tokens", LONG, alike((2, 2, 20_971_521, 128)), alike((2, 2, 20_971_520, 128))),
        *block_sizes(op),
        case(
            op,
            "cache_layout",
            ONE_PAGED,
            alike((16, 2, 128, 128)),
            {**alike((16, 2, 128, 128)), "input_layout": "BNSD", "query": f16(2, 8, 1, 128)},
        ),
        case(op, "sparse_mode", LONG, {"sparse_mode": 5}, {"sparse_mode": 4}),
        case(op, "sparse_mode", MLA_LONG, {"sparse_mode": 10}, {"sparse_mode": 3}),
        case(op, "modes_known", QUANTISED, {"key_antiquant_mode": 6, "value_antiquant_mode": 6}),
        case(op, "modes_alike", QUANTISED, {"value_antiquant_mode": 5}),
        case(
            op,
            "modes_alike",
            QUANTISED | PER_CHANNEL,
            {"key_antiquant_mode": 1},
            {"value_antiquant_mode": 1, "value_antiquant_scale": T((2, 700), F32)},
        ),
        case(
            op,
            "modes_long",
            LONG | alike((2, 2, 7, 128), I8) | SCALES,
            {"key_antiquant_mode": 2, "value_antiquant_mode": 2},
            {"key_antiquant_mode": 1, "value_antiquant_mode": 1},
        ),
        *(
            one
            for which in ("key", "value")
            for one in (
                case(op, f"{which}_scale", QUANTISED | PER_CHANNEL, {f"{which}_antiquant_scale": GONE}),
                case(op, f"{which}_scale_dtype", QUANTISED, {f"{which}_antiquant_scale": f16(16, 128)}),
                case(op, f"{which}_scale_dtype", QUANTISED | PER_CHANNEL, {f"{which}_antiquant_scale": T((256,), F32)}),
                *(
                    case(op, f"{which}_scale_dtype", QUANTISED | both, {f"{which}_antiquant_scale": f16(2, 768)})
                    for both in ({"key_antiquant_mode": mode, "value_antiquant_mode": mode} for mode in (1, 3))
                ),
                case(op, f"{which}_scale_shape", QUANTISED, {f"{which}_antiquant_scale": T((128, 16), F32)}),
                case(op, f"{which}_scale_shape", NZ, {f"{which}_antiquant_scale": T((16, 128, 8), F32)}),
            )
        ),
        case(op, "key_scale_dtype", ONE | alike((2, 700, 2, 128), I8), _channel_scales(F32), _channel_scales(F16)),
        case(op, "rope_both", MLA, {"key_rope": GONE}),
        case(
            op,
            "packed_dim",
            PACKED,
            qkv((12, 8, 64), (14, 2, 64)),
            qkv((12, 8, 64), (14, 8, 64)) | {"num_key_value_heads": 8},
        ),
        case(
            op,
            "packed_dim",
            PACKED,
            qkv((12, 8, 256), (14, 2, 256)),
            {"query": f16(12, 8, 192), "key": f16(14, 2, 192)},
        ),
        case(op, "mla_dim", MLA, qkv((2, 1, 16, 256), (16, 128, 256))),
        case(op, "mla_query_rope", MLA, {"query_rope": f16(2, 1, 16, 32)}),
        case(op, "mla_key_rope", MLA, {"key_rope": f16(16, 64, 64)}),
        case(op, "mla_lse", MLA, {"softmax_lse_flag": True}, {"softmax_lse_flag": False}),
        case(op, "mla_heads", MLA, _latent_heads(24), _latent_heads(32)),
        case(op, "mla_heads", MLA, _latent_heads(256), _latent_heads(128)),
        case(op, "mla_heads", MLA, _latent_heads(6), _latent_heads(1)),
        case(op, "mla_heads", MLA, _latent_heads(5), _latent_heads(2)),
        case(op, "layout_length", LONG, _nbsd(1), _nbsd(2)),
        *(
            case(op, "sparse_mode", base, {"sparse_mode": 7}, {"sparse_mode": m})
            for base in (LONG, MLA_LONG)
            for m in range(5)
        ),
        case(
            op,
            "nz_shape",
            MLA | alike((16, 1, 16, 128, 32)),
            {"key_rope": f16(16, 1, 16, 128, 64)},
            {**alike((16, 1, 32, 128, 16)), "key_rope": f16(16, 1, 32, 128, 64)},
        ),
        case(op, "inner_precise", LONG, {"inner_precise": 4}, {"inner_precise": 3}),
        case(op, "inner_precise_one", ONE, {"inner_precise": 2}, {"inner_precise": 1}),
        case(
            op,
            "inner_precise_bf16",
            PACKED | qkv((12, 8, 128), (14, 2, 128), BF16),
            {"inner_precise": 1},
            {"inner_precise": 0},
        ),
    ]


def _nbsd(count: int) -> dict[str, Any]:
    return {"input_layout": "BNSD_NBSD", "query": f16(2, 8, count, 128)}


def _channel_scales(dtype: str) -> dict[str, Any]:
    return {"key_antiquant_scale": T((1, 256), dtype), "value_antiquant_scale": T((1, 256), dtype)}


def _latent_heads(count: int) -> dict[str, Any]:
    return {"query": f16(2, 1, count, 512), "query_rope": f16(2, 1, count, 64), "num_heads": count}


def block_sizes(op: str) -> list[Case]:
    """(of what, illegal, legal neighbours)"""
    limits: list[tuple[dict[str, Any], tuple[int, ...], tuple[int, ...]]] = [
        (LONG_PAGED, (64, 192, 640), (128, 256, 384, 512)),
        (LONG_PAGED | {"query": f16(2, 8, 2, 128)}, (64,), (128,)),
        (ONE_PAGED, (8, 24, 528), (16, 128, 512)),
        (QUANTISED | PER_CHANNEL, (16, 48, 544), (32, 128, 512)),
        (PACKED_PAGED, (8, 40, 1040), (16, 144, 1024)),
    ]
    few = {"actual_seq_lengths_kv": [5, 7]}

    def sized(base: dict[str, Any], size: int) -> dict[str, Any]:
        return alike((16, size, 256), base["key"].dtype) | {"block_size": size} | few

    return [
        case(op, "block_size", base, sized(base, wrong), sized(base, right))
        for base, illegal, legal in limits
        for wrong in illegal
        for right in legal
    ]


def second_version() -> list[Case]:
    """The same limits under the names of version 2, and its own."""
    sink = {"learnable_sink": T((8,), BF16)}
    scale = T((1, 1024), BF16)
    per_channel = PER_CHANNEL | {"key_antiquant_scale": scale, "value_antiquant_scale": scale}
    return [
        *(one._replace(op=V2) for one in fia() if one.key != "mla_lse"),
        case(V2, "sparse_mode", LONG, {"sparse_mode": 9}),
        case(V2, "sparse_mode", MLA_LONG, {"sparse_mode": 10}, {"sparse_mode": 9}),
        case(V2, "nz_int8", NZ, {"query": T((2, 1, 64, 128), F16)}),
        case(
            V2,
            "nz_int8",
            NZ,
            {"num_heads": 32, "num_key_value_heads": 8, "query": T((2, 1, 32, 128), BF16)},
            {"num_heads": 80, "query": T((2, 1, 80, 128), BF16)},
        ),
        *(
            case(V2, "nz_int8", NZ, _nz_heads(heads, kv_heads * 2), _nz_heads(heads, kv_heads))
            for heads, kv_heads in ((10, 1), (64, 8), (80, 8), (128, 16))
        ),
        case(V2, "nz_int8", NZ, _nz_block(256), _nz_block(512)),
        case(V2, "nz_int8", NZ | per_channel, _nz_queries(17), _nz_queries(16)),
        case(V2, "sink", PACKED, {"learnable_sink": T((8,), F16)}, sink),
        case(V2, "sink", PACKED, {"learnable_sink": T((2,), BF16)}, sink),
        case(V2, "sink", ONE, sink, {}),
        case(V2, "sink", PACKED | sink, {"query": f16(12, 8, 192), "key": f16(14, 2, 192)}),
    ]


def _nz_heads(heads: int, kv_heads: int) -> dict[str, Any]:
    scale = T((16, kv_heads, 128), F32)
    return {
        "query": T((2, 1, heads, 128), BF16),
        **alike((16, kv_heads, 4, 128, 32), I8),
        "key_antiquant_scale": scale,
        "value_antiquant_scale": scale,
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
    }


def _nz_queries(count: int) -> dict[str, Any]:
    return {"query": T((2, count, 64, 128), BF16)}


def _nz_block(size: int) -> dict[str, Any]:
    scale = T((16, 8, size), F32)
    few = {"block_size": size, "actual_seq_lengths_kv": [5, 7]}
    return {**alike((16, 8, 4, size, 32), I8), "key_antiquant_scale": scale, "value_antiquant_scale": scale, **few}


def fusion() -> list[Case]:
    op = FUSION
    plain = {**qkv((2, 5, 8, 128), (2, 7, 2, 128)), **CAUSAL, "num_heads": 8, "input_layout": "BSND"}
    return [
        *lengths(op, FUSED),
        *ranks(op, FUSED),
        *heads(op, FUSED, groups=False),
        *masks(op, FUSED),
        case(op, "kv_lens_fit", plain, {"actual_seq_lengths_kv": [7, 8]}, {"actual_seq_lengths_kv": [7, 7]}),
        case(op, "layout", FUSED, {"input_layout": "NTD_TND"}),
        case(op, "layout", plain, {"input_layout": "BNSD_BSND"}),
        case(op, "dtype", FUSED, qkv((12, 8, 128), (14, 2, 128), I8), qkv((12, 8, 128), (14, 2, 128), F32)),
        case(op, "dtypes_alike", FUSED, alike((14, 2, 128), BF16)),
        case(op, "head_dim", FUSED, qkv((12, 8, 769), (14, 2, 769)), qkv((12, 8, 768), (14, 2, 768))),
        case(op, "key_dim", FUSED, {"key": f16(14, 2, 192)}),
        case(op, "value_dim", FUSED, {"value": f16(14, 2, 129)}, {"value": f16(14, 2, 64)}),
        case(
            *(op, "max_heads", FUSED, qkv((12, 257, 128), (14, 1, 128)) | {"num_heads": 257}),
            qkv((12, 256, 128), (14, 1, 128)) | {"num_heads": 256},
        ),
        case(op, "batch", FUSED, sequences(2049), sequences(2048)),
        case(
            op,
            "batch",
            plain,
            qkv((2097153, 5, 8, 128), (2097153, 7, 2, 128)),
            qkv((2097152, 5, 8, 128), (2097152, 7, 2, 128)),
        ),
        case(op, "tokens", plain, alike((2, 1048577, 2, 128)), alike((2, 1048576, 2, 128))),
        case(
            *(op, "tokens", FUSED, {"query": f16(1048577, 8, 128), "actual_seq_lengths": [524288, 1048577]}),
            {"query": f16(1048576, 8, 128), "actual_seq_lengths": [524288, 1048576]},
        ),
        case(op, "sparse_mode", FUSED, {"sparse_mode": 9}, {"sparse_mode": 8}),
        case(op, "sink_cann", FUSED | {"sink": T((8,), F32)}, {}, cann=(8, 3, 0), legally={"cann": (8, 5, 0)}),
        case(
            op,
            "softmax_layout_cann",
            FUSED | {"softmax_layout": "TND"},
            {},
            cann=(8, 2, 0),
            legally={"cann": (8, 3, 0)},
        ),
    ]


def prompt() -> list[Case]:
    op = PFA
    small = {"family": "310p"}
    grouped = PROMPT | {**HEADS} | alike((1, 2, 7, 128)) | CAUSAL
    return [
        *lengths(op, PACKED),
        *ranks(op, PROMPT),
        *heads(op, grouped),
        *masks(op, PACKED),
        case(
            *(op, "kv_lens_fit", PROMPT, {"actual_seq_lengths_kv": [8]}),
            {"actual_seq_lengths_kv": [7]},
        ),
        case(op, "layout", PROMPT, {"input_layout": "BNSD_NBSD"}, {"input_layout": "BNSD_BSND"}),
        case(op, "layout_310p", PACKED, {}, family="310p", legally={}),
        case(op, "groups_310p", grouped, {}, family="310p", legally={}),
        case(
            *(op, "dtype_310p", PROMPT, qkv((1, 8, 5, 128), (1, 8, 7, 128), BF16)),
            **small,
        ),
        case(op, "dtype", PROMPT, qkv((1, 8, 5, 128), (1, 8, 7, 128), F32), qkv((1, 8, 5, 128), (1, 8, 7, 128), I8)),
        case(op, "head_dim", PROMPT, qkv((1, 8, 5, 513), (1, 8, 7, 513)), qkv((1, 8, 5, 512), (1, 8, 7, 512))),
        case(op, "h", _flat(65_535, 255), {}, _flat_change(65_280, 255)),
        case(
            *(op, "batch", PROMPT, qkv((129, 8, 5, 128), (129, 8, 7, 128))),
            qkv((128, 8, 5, 128), (128, 8, 7, 128)),
            **small,
        ),
        case(op, "batch", PROMPT, qkv((129, 8, 5, 120), (129, 8, 7, 120)), qkv((128, 8, 5, 120), (128, 8, 7, 120))),
        case(
            *(op, "batch", PROMPT, qkv((65537, 8, 5, 128), (65537, 8, 7, 128))),
            qkv((65536, 8, 5, 128), (65536, 8, 7, 128)),
        ),
        case(op, "tokens", PROMPT, alike((1, 8, 65_536, 128)), alike((1, 8, 65_535, 128)), **small),
        case(op, "tokens", PROMPT, alike((1, 8, 20_971_521, 128)), alike((1, 8, 20_971_520, 128))),
        case(op, "mode_310p", PROMPT | CAUSAL, {}, family="310p", legally={}),
        case(op, "next_310p", PROMPT, {"next_tokens": 2}, {"next_tokens": 2147483647}, **small),
        case(op, "sparse_mode", PROMPT | CAUSAL, {"sparse_mode": 5}, {"sparse_mode": 4}),
    ]


def _flat(h: int, heads: int) -> dict[str, Any]:
    return {**qkv((1, 5, h), (1, 7, h)), "num_heads": heads, "input_layout": "BSH"}


def _flat_change(h: int, heads: int) -> dict[str, Any]:
    return qkv((1, 5, h), (1, 7, h)) | {"num_heads": heads}


def incremental() -> list[Case]:
    op = IFA
    small = {"family": "310p"}
    merged = {"antiquant_scale": f16(2, 2, 128)}
    int8 = INT8 | merged
    return [
        *ranks(op, ONE),
        *heads(op, ONE),
        *paging(op, ONE_PAGED),
        case(op, "kv_lens_host", ONE, {"actual_seq_lengths_kv": T((2,), I64)}),
        case(op, "kv_lens_negative", ONE, {"actual_seq_lengths_kv": [-1, 700]}, {"actual_seq_lengths_kv": [0, 700]}),
        case(op, "kv_lens_missing", ONE_PAGED, {"actual_seq_lengths_kv": GONE}),
        case(op, "kv_lens_count", ONE, {"actual_seq_lengths_kv": [1, 2, 3]}, {"actual_seq_lengths_kv": [3]}),
        case(op, "kv_lens_fit", ONE, {"actual_seq_lengths_kv": [200, 900]}),
        case(op, "layout", ONE, {"input_layout": "TND"}),
        case(op, "one_query", ONE, {"query": f16(2, 2, 8, 128)}),
        case(op, "dtype_310p", ONE, qkv((2, 1, 8, 128), (2, 700, 2, 128), BF16), **small),
        case(op, "head_dim", ONE, qkv((2, 1, 8, 513), (2, 700, 2, 513)), qkv((2, 1, 8, 512), (2, 700, 2, 512))),
        case(
            *(op, "batch", ONE, qkv((257, 1, 8, 128), (257, 700, 2, 128)) | {"actual_seq_lengths_kv": [700]}),
            qkv((256, 1, 8, 128), (256, 700, 2, 128)) | {"actual_seq_lengths_kv": [700]},
            **small,
        ),
        case(
            *(op, "batch", ONE, qkv((65536, 1, 8, 128), (65536, 700, 2, 128)) | {"actual_seq_lengths_kv": [700]}),
            qkv((65535, 1, 8, 128), (65535, 700, 2, 128)) | {"actual_seq_lengths_kv": [700]},
        ),
        case(op, "tokens", ONE, alike((2, 65_537, 2, 128)), alike((2, 65_536, 2, 128)), **small),
        case(op, "tokens", ONE, alike((2, 262_145, 2, 128)), alike((2, 262_144, 2, 128))),
        case(op, "block_size", ONE_PAGED, _incre_blocks(24, F16), _incre_blocks(48, F16)),
        case(op, "block_size", int8, _incre_blocks(48, I8), _incre_blocks(64, I8)),
        case(
            op,
            "cache_layout",
            ONE_PAGED,
            alike((16, 2, 128, 128)),
            {**alike((16, 2, 128, 128)), "input_layout": "BNSD", "query": f16(2, 8, 1, 128)},
        ),
        case(op, "scale", int8, {"antiquant_scale": GONE}),
        case(op, "scale", int8, {"antiquant_scale": f16(2, 128)}, {"antiquant_scale": f16(2, 256)}),
        case(op, "scale", int8, {"antiquant_scale": T((2, 2, 128), F32)}, {"antiquant_scale": f16(2, 2, 1, 128)}),
        case(op, "mask_dtype", ONE, {"atten_mask": f16(2, 1, 1, 700)}, {"atten_mask": T((2, 1, 1, 700), "bool")}),
    ]


def _incre_blocks(size: int, dtype: str) -> dict[str, Any]:
    return alike((16, size, 256), dtype) | {"block_size": size, "actual_seq_lengths_kv": [5, 7]}


def caches() -> list[Case]:
    slots = list(range(9))
    return [
        case(SCATTER, "rank", SCATTERED, {"key": f16(9, 256)}),
        case(SCATTER, "dtypes_alike", SCATTERED, {"key": T((9, 2, 128), BF16)}),
        case(SCATTER, "tokens_alike", SCATTERED, {"value": f16(8, 2, 128)}),
        *(
            case(SCATTER, f"{name}_contiguous", SCATTERED, {name: SCATTERED[name]._replace(contiguous=False)})
            for name in ("key", "value", "key_cache", "value_cache")
        ),
        case(SCATTER, "cache_mode", SCATTERED, {"cache_mode": "ND"}),
        case(SCATTER, "key_cache_norm", SCATTERED, {"key_cache": f16(16, 2, 128, 64)}),
        case(SCATTER, "value_cache_norm", SCATTERED, {"value_cache": f16(16, 16, 128, 16)}),
        case(SCATTER, "key_cache_nz", SCATTERED, {"cache_mode": GONE}, NZ_CACHES),
        case(SCATTER, "value_cache_nz", SCATTERED | NZ_CACHES, {"value_cache": f16(16, 8, 128, 32)}),
        case(SCATTER, "slots_dtype", SCATTERED, {"slot_mapping": f16(9)}, {"slot_mapping": T((9,), I32)}),
        case(SCATTER, "slots_count", SCATTERED, {"slot_mapping": T((8,), I64)}),
        case(
            *(SCATTER, "slots_range", SCATTERED, {}),
            known={"slot_mapping": [*slots[:-1], 2048]},
            legally={"known": {"slot_mapping": [*slots[:-1], 2047]}},
        ),
        case(
            *(SCATTER, "slots_range", SCATTERED, {}),
            known={"slot_mapping": [-1, *slots[1:]]},
            legally={"known": {"slot_mapping": slots}},
        ),
        case(SCATTER, "slots_unique", SCATTERED, {}, known={"slot_mapping": [1, *slots[1:]]}, legally={}),
        case(SCATTER, "slots_unique", SCATTERED, {}, known={"slot_mapping": [0, 0, *slots[2:]]}, legally={}),
        case(
            *(SCATTER, "slots_range", SCATTERED | NZ_CACHES, {}),
            known={"slot_mapping": [*slots[:-1], 2048]},
            legally={"known": {"slot_mapping": [*slots[:-1], 2047]}},
        ),
        case(RESHAPE, "rank", RESHAPED, {"key": f16(9, 256)}),
        case(RESHAPE, "dtypes_alike", RESHAPED, {"key_cache": T((16, 128, 2, 128), I8)}),
        case(RESHAPE, "tokens_alike", RESHAPED, {"value": f16(8, 2, 128)}),
        case(RESHAPE, "slots_dtype", RESHAPED, {"slot_indices": T((9,), I64)}),
        case(RESHAPE, "slots_count", RESHAPED, {"slot_indices": T((8,), I32)}),
        case(
            *(RESHAPE, "slots_range", RESHAPED, {}),
            known={"slot_indices": [*slots[:-1], 2048]},
            legally={"known": {"slot_indices": [-1, -1, *slots[2:]]}},
        ),
        case(RESHAPE, "slots_unique", RESHAPED, {}, known={"slot_indices": [1, *slots[1:]]}, legally={}),
        case(ATB, "rank", BY_ATB, {"query": f16(2, 1024)}),
        case(ATB, "cache_rank", BY_ATB, {"key_cache": f16(16, 128, 256)}),
        case(ATB, "kv_heads", BY_ATB, {"num_kv_heads": 8}),
        case(ATB, "heads", BY_ATB, {"num_heads": 2}),
        case(ATB, "table_dtype", BY_ATB, {"block_table": T((2, 6), I64)}),
        case(ATB, "table_device", BY_ATB, {"block_table": T((2, 6), I32, "cpu")}),
        case(ATB, "lens_dtype", BY_ATB, {"context_lens": T((2,), I64, "cpu")}),
        case(ATB, "lens_host", BY_ATB, {"context_lens": T((2,), I32)}),
        case(LATENT, "block_size", LATENTS, {"ctkv": f16(16, 129, 1, 512)}),
        case(LATENT, "batch", LATENTS, {"context_lens": [1] * 8193}),
        case(RMSNORM, "kv", NORMED, {"kv": f16(2, 1, 9, 512)}),
        case(RMSNORM, "gamma", NORMED, {"gamma": f16(576)}),
        case(RMSNORM, "rope", NORMED, {"sin": f16(2, 1, 9, 128)}),
        case(RMSNORM, "index_dtype", NORMED, {"index": T((2, 9), I32)}),
        case(RMSNORM, "cache_mode", NORMED, {"cache_mode": "ND"}, {"cache_mode": "PA_BLK_NZ"}),
        case(
            RMSNORM,
            "k_scale",
            NORMED,
            {"k_cache": T((16, 128, 1, 64), I8)},
            {"k_cache": T((16, 128, 1, 64), I8), "k_rope_scale": T((64,), F32)},
        ),
        case(
            RMSNORM,
            "c_scale",
            NORMED,
            {"ckv_cache": T((16, 128, 1, 512), I8)},
            {"ckv_cache": T((16, 128, 1, 512), I8), "c_kv_scale": T((512,), F32)},
        ),
        case(QUANTIZE, "dtype", QUANTIZED, {"dtype": "torch.float16"}, {"dtype": "torch.quint8"}),
        case(
            QUANTIZE, "div_mode", QUANTIZED, {"dtype": "torch.quint4x2"}, {"dtype": "torch.quint4x2", "div_mode": False}
        ),
        case(QUANTIZE, "packs", QUANTIZED | {"dtype": "torch.quint4x2", "div_mode": False}, {"input": f16(9, 252)}),
        case(DYNAMIC, "dtype", {"input": f16(9, 256)}, {"dst_type": "torch.qint8"}, {"dst_type": "torch.int8"}),
        case(DYNAMIC, "input_dtype", {"input": f16(9, 256)}, {"input": T((9, 256), F32)}),
    ]


CASES = [*fia(), *second_version(), *fusion(), *prompt(), *incremental(), *caches()]


def given(one: Case, change: dict[str, Any]) -> dict[str, Any]:
    names = NAMES.get(one.op, {})
    merged = {name: value for name, value in (one.base | change).items() if value is not GONE}
    return {names.get(name, name): value for name, value in merged.items()}


@pytest.mark.parametrize("one", CASES, ids=lambda one: f"{one.op}-{one.key}")
def test_what_breaks_a_rule_is_refused_and_its_neighbour_is_not(one: Case) -> None:
    further = {"family": "a2"} | one.further
    illegal = given(one, one.illegal)
    broken = broken_rule(Asked(one.op, illegal, **further))
    assert broken is not None
    assert broken.key == one.key
    with pytest.raises(KernelArgumentError) as refused:
        check_call(one.op, illegal, **further)
    argument = NAMES.get(one.op, {}).get(broken.argument, broken.argument)
    assert refused.value.argument == argument
    assert str(refused.value).startswith(f"{argument}: {one.op}: ")
    assert str(refused.value).endswith(f"; {broken.cure}")
    check_call(one.op, given(one, one.legal), **({"family": "a2"} | one.legal_further))


def test_every_rule_of_every_op_has_a_case() -> None:
    assert {(op, rule.key) for op, rules in RULES.items() for rule in rules} == {(one.op, one.key) for one in CASES}


@pytest.mark.parametrize(
    ("op", "base", "family"),
    [(V1, ONE, "310p"), (V1, ONE, "910a"), (FUSION, FUSED, "310p"), (IFA, ONE, "910a"), (SCATTER, SCATTERED, "310p")],
)
def test_an_op_of_another_family_is_refused(op: str, base: dict[str, Any], family: str) -> None:
    one = case(op, "", base, {})
    check_call(op, given(one, {}), family="a3")
    with pytest.raises(KernelArgumentError, match=f"this is {family}; take another op, or another device"):
        check_call(op, given(one, {}), family=family)


@pytest.mark.parametrize(
    ("op", "argument"),
    [
        (V2, "query_padding_size"),
        (V2, "key_shared_prefix"),
        (V2, "antiquant_scale"),
        (V2, "dequant_scale1"),
        (PFA, "block_table"),
        (V1, "actual_seq_qlen"),
        (FUSION, "pre_tokens"),
        (V1, "sequence_lengths"),
    ],
)
def test_an_argument_that_the_op_does_not_have_is_refused(op: str, argument: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"{argument}: {op} has no such argument; it has "):
        check_call(op, {argument: 1}, family="a2")


@pytest.mark.parametrize("op", ["npu_quantize_kv_cache", "get_kv_cache_stats", "flash_attention"])
def test_an_op_that_is_none_is_refused(op: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"{op}: is no op that is known here; known are npu_fused_infer"):
        check_call(op, {}, family="a2")


def test_a_message_says_op_argument_rule_and_cure() -> None:
    with pytest.raises(KernelArgumentError) as refused:
        check_call(V1, PACKED | {"actual_seq_lengths": [5, 7]}, family="a2")
    assert str(refused.value) == (
        "actual_seq_lengths: npu_fused_infer_attention_score: cumulative and never falling, the last being the 12 "
        "tokens of query; give [2, 4, 7] for lengths 2, 2, 3"
    )


def test_fia_ignores_sparse_mode_for_one_query_and_prompt_attention_does_not() -> None:
    bare = {"sparse_mode": 3, "atten_mask": GONE}
    check_call(V1, given(case(V1, "", ONE, {}), bare), family="a2")
    one = PROMPT | qkv((1, 8, 1, 128), (1, 8, 7, 128))
    with pytest.raises(KernelArgumentError, match="atten_mask: npu_prompt_flash_attention: without one the op attends"):
        check_call(PFA, given(case(PFA, "", one, {}), bare), family="a2")
