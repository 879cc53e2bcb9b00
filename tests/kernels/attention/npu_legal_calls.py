"""Legal calls of the NPU ops, without torch, and cases of rules that several ops share."""

from __future__ import annotations

from typing import Any, NamedTuple

from hbmtwin.kernels.attention.npu_asked import TensorArg as T

V1 = "npu_fused_infer_attention_score"
V2 = f"{V1}_v2"
FUSION, PFA, IFA = "npu_fusion_attention", "npu_prompt_flash_attention", "npu_incre_flash_attention"
SCATTER, RESHAPE, ATB = "npu_scatter_pa_kv_cache", "_npu_reshape_and_cache", "_npu_paged_attention"
LATENT, RMSNORM = "npu_multi_head_latent_attention", "npu_kv_rmsnorm_rope_cache"
QUANTIZE, DYNAMIC = "npu_quantize", "npu_dynamic_quant"
F16, BF16, I8, I32, I64, F32 = "float16", "bfloat16", "int8", "int32", "int64", "float32"


def f16(*shape: int) -> T:
    return T(shape, F16)


MASK = T((2048, 2048), "bool")
TABLE = T((2, 6), I32)
GONE = object()
"""As a change: the argument is left out."""


def alike(shape: tuple[int, ...], dtype: str = F16) -> dict[str, Any]:
    return {"key": T(shape, dtype), "value": T(shape, dtype)}


def qkv(q: tuple[int, ...], kv: tuple[int, ...], dtype: str = F16) -> dict[str, Any]:
    return {"query": T(q, dtype)} | alike(kv, dtype)


HEADS = {"num_heads": 8, "num_key_value_heads": 2}
CAUSAL = {"atten_mask": MASK, "sparse_mode": 3}
PACKED = {
    **qkv((12, 8, 128), (14, 2, 128)),
    **HEADS,
    **CAUSAL,
    "input_layout": "TND",
    "actual_seq_lengths": [5, 12],
    "actual_seq_lengths_kv": [5, 14],
}
BLOCKS = {"block_table": TABLE, "block_size": 128, "actual_seq_lengths_kv": [200, 700]}
PACKED_PAGED = PACKED | qkv((12, 8, 128), (16, 128, 256)) | BLOCKS
ONE = {**qkv((2, 1, 8, 128), (2, 700, 2, 128)), **HEADS, "input_layout": "BSND", "actual_seq_lengths_kv": [200, 700]}
ONE_PAGED = ONE | alike((16, 128, 256)) | BLOCKS
LONG = {**qkv((2, 8, 5, 128), (2, 2, 7, 128)), **HEADS, **CAUSAL, "input_layout": "BNSD"}
LONG_PAGED = LONG | alike((16, 128, 256)) | BLOCKS
INT8 = ONE_PAGED | alike((16, 128, 256), I8)
SCALES = {
    "key_antiquant_scale": T((16, 128), F32),
    "value_antiquant_scale": T((16, 128), F32),
    "key_antiquant_mode": 4,
    "value_antiquant_mode": 4,
}
QUANTISED = INT8 | SCALES
PER_CHANNEL = {
    "key_antiquant_scale": f16(1, 256),
    "value_antiquant_scale": f16(1, 256),
    "key_antiquant_mode": 0,
    "value_antiquant_mode": 0,
}
MLA = {
    **qkv((2, 1, 16, 512), (16, 128, 512)),
    **BLOCKS,
    "num_heads": 16,
    "num_key_value_heads": 1,
    "input_layout": "BSND",
    "query_rope": f16(2, 1, 16, 64),
    "key_rope": f16(16, 128, 64),
}
MLA_LONG = {
    **qkv((12, 16, 128), (14, 16, 128)),
    **CAUSAL,
    "query_rope": f16(12, 16, 64),
    "key_rope": f16(14, 16, 64),
    "num_heads": 16,
    "input_layout": "TND",
    "actual_seq_lengths": [5, 12],
    "actual_seq_lengths_kv": [5, 14],
}
NZ = {
    "query": T((2, 1, 64, 128), BF16),
    **alike((16, 8, 4, 128, 32), I8),
    **BLOCKS,
    **SCALES,
    "key_antiquant_scale": T((16, 8, 128), F32),
    "value_antiquant_scale": T((16, 8, 128), F32),
    "key_antiquant_mode": 5,
    "value_antiquant_mode": 5,
    "num_heads": 64,
    "num_key_value_heads": 8,
    "input_layout": "BSND",
}
FUSED = {name: value for name, value in PACKED.items() if name != "num_key_value_heads"}
PROMPT = {
    **qkv((1, 8, 5, 128), (1, 8, 7, 128)),
    "num_heads": 8,
    "input_layout": "BNSD",
    "atten_mask": T((5, 7), "bool"),
}
NEW = {"key": f16(9, 2, 128), "value": f16(9, 2, 128)}
CACHES = {"key_cache": f16(16, 128, 2, 128), "value_cache": f16(16, 128, 2, 128)}
SCATTERED = {**NEW, **CACHES, "slot_mapping": T((9,), I64), "cache_mode": "Norm"}
NZ_CACHES = {"key_cache": f16(16, 16, 128, 16), "value_cache": f16(16, 16, 128, 16), "cache_mode": "PA_NZ"}
RESHAPED = {**NEW, **CACHES, "slot_indices": T((9,), I32)}
BY_ATB = {
    "query": f16(2, 8, 128),
    **CACHES,
    "num_kv_heads": 2,
    "num_heads": 8,
    "scale_value": 0.1,
    "block_table": TABLE,
    "context_lens": T((2,), I32, "cpu"),
    "out": f16(2, 8, 128),
}
LATENTS = {
    "q_nope": f16(2, 16, 512),
    "q_rope": f16(2, 16, 64),
    "ctkv": f16(16, 128, 1, 512),
    "k_rope": f16(16, 128, 1, 64),
    "block_tables": TABLE,
    "context_lens": [1] * 8192,
    "q_headnum": 16,
    "qk_scale": 0.1,
    "kv_headnum": 1,
}
NORMED = {
    "kv": f16(2, 1, 9, 576),
    "gamma": f16(512),
    "cos": f16(2, 1, 9, 64),
    "sin": f16(2, 1, 9, 64),
    "index": T((2, 9), I64),
    "k_cache": f16(16, 128, 1, 64),
    "ckv_cache": f16(16, 128, 1, 512),
    "cache_mode": "PA",
}
QUANTIZED = {"input": f16(9, 256), "scales": T((256,), F32), "zero_points": None, "dtype": "torch.qint8", "axis": 1}


class Case(NamedTuple):
    """One rule of one op, with a call that breaks it and one that just does not."""

    op: str
    key: str
    base: dict[str, Any]
    illegal: dict[str, Any]
    legal: dict[str, Any]
    further: dict[str, Any]
    """Of check_call: family, known values, the version of CANN."""
    legal_further: dict[str, Any]


def case(
    op: str,
    key: str,
    base: dict[str, Any],
    illegal: dict[str, Any],
    legal: dict[str, Any] | None = None,
    *,
    legally: dict[str, Any] | None = None,
    **further: Any,
) -> Case:
    return Case(op, key, base, illegal, legal or {}, further, further if legally is None else legally)


def lengths(op: str, base: dict[str, Any]) -> list[Case]:
    """Of packed queries and keys."""
    return [
        case(op, "q_lens_host", base, {"actual_seq_lengths": T((2,), I64)}),
        case(op, "kv_lens_host", base, {"actual_seq_lengths_kv": T((2,), I64)}),
        case(op, "q_lens_negative", base, {"actual_seq_lengths": [-1, 12]}, {"actual_seq_lengths": [0, 12]}),
        case(op, "kv_lens_negative", base, {"actual_seq_lengths_kv": [-1, 14]}, {"actual_seq_lengths_kv": [0, 14]}),
        case(op, "q_lens_missing", base, {"actual_seq_lengths": GONE}),
        case(op, "kv_lens_missing", base, {"actual_seq_lengths_kv": GONE}),
        case(op, "q_lens_cumulative", base, {"actual_seq_lengths": [5, 7]}, {"actual_seq_lengths": [7, 12]}),
        case(op, "q_lens_cumulative", base, {"actual_seq_lengths": [13, 12]}, {"actual_seq_lengths": [12, 12]}),
        case(op, "kv_lens_cumulative", base, {"actual_seq_lengths_kv": [5, 9]}, {"actual_seq_lengths_kv": [9, 14]}),
        case(op, "kv_lens_count", base, {"actual_seq_lengths_kv": [5, 7, 14]}),
    ]


def ranks(op: str, base: dict[str, Any]) -> list[Case]:
    shape = base["query"].shape
    folded = T((*shape[:-2], shape[-2] * shape[-1]), F16)
    return [
        case(op, "query_rank", base, {"query": folded}),
        case(op, "key_rank", base, {"key": folded}),
        case(op, "value_rank", base, {"value": folded}),
        *(
            case(op, f"{name}_contiguous", base, {name: base[name]._replace(contiguous=False)})
            for name in ("query", "key", "value")
        ),
    ]


def heads(op: str, base: dict[str, Any], *, groups: bool = True) -> list[Case]:
    """*base* has 8 query heads and 2 of KV in one of the layouts with an axis for each."""
    axis = 2 if base["input_layout"] == "BSND" else 1

    def of(count: int, name: str = "query") -> T:
        shape = list(base[name].shape)
        shape[axis] = count
        return T(tuple(shape), F16)

    def both(count: int) -> dict[str, Any]:
        return {"key": of(count, "key"), "value": of(count, "value")}

    def grouped(query: int, kv: int) -> dict[str, Any]:
        return {"query": of(query), "num_heads": query, "num_key_value_heads": kv} | both(kv)

    cases = [case(op, "heads_are", base, {"num_heads": 4}, {"num_heads": 4, "query": of(4)})]
    if not groups:
        return [*cases, case(op, "heads_divide", base, both(3), both(4))]
    return [
        *cases,
        case(op, "kv_heads_are", base, {"num_key_value_heads": 4}, {"num_key_value_heads": 4} | both(4)),
        case(op, "heads_divide", base, grouped(8, 3), grouped(8, 4)),
        case(op, "group_size", base, grouped(130, 2), grouped(128, 2)),
        case(op, "max_heads", base, grouped(257, 257), grouped(256, 128)),
    ]


def paging(op: str, base: dict[str, Any]) -> list[Case]:
    """*base* has 16 blocks of 128 tokens with 2 heads of 128, two rows of 6 columns, lengths 200 and 700."""
    ids = [3, 1, -1, -1, -1, -1, 0, 2, 4, 5, 6, 15]
    return [
        case(op, "table_dtype", base, {"block_table": T((2, 6), I64)}),
        case(op, "table_device", base, {"block_table": T((2, 6), I32, "cpu")}),
        case(op, "table_rank", base, {"block_table": T((12,), I32)}),
        case(op, "table_rows", base, {"block_table": T((3, 6), I32)}),
        case(op, "caches_alike", base, {"value": f16(17, 128, 256)}),
        case(op, "cache_elements", base, alike((65_536, 128, 256)), alike((65_535, 128, 256))),
        case(
            *(op, "cache_h", base, alike((16, 128, 65_536)) | {"query": f16(2, 1, 256, 256), "num_heads": 256}),
            alike((16, 128, 32_768)) | {"query": f16(2, 1, 128, 256), "num_heads": 128, "num_key_value_heads": 128},
        ),
        case(op, "block_size_is", base, {"block_size": 256}, {"block_size": 256} | alike((16, 256, 256))),
        case(
            *(op, "kv_lens_plain", base, {"actual_seq_lengths_kv": [200, 769]}),
            {"actual_seq_lengths_kv": [200, 768]},
        ),
        case(op, "kv_lens_plain", base, {"actual_seq_lengths_kv": [200, 900]}),
        case(op, "cache_blocks", base, alike((7, 128, 256)), alike((8, 128, 256))),
        case(
            *(op, "table_ids", base, {}),
            known={"block_table": [*ids[:-1], 16]},
            legally={"known": {"block_table": ids}},
        ),
        case(op, "table_ids", base, {}, known={"block_table": [-1, *ids[1:]]}, legally={"known": {"block_table": ids}}),
    ]


def masks(op: str, base: dict[str, Any]) -> list[Case]:
    return [
        case(op, "mask_dtype", base, {"atten_mask": f16(2048, 2048)}, {"atten_mask": T((2048, 2048), "uint8")}),
        case(op, "mask_missing", base, {"atten_mask": GONE}, {"atten_mask": GONE, "sparse_mode": 0}),
        *(
            case(
                *(op, "mask_compressed", base, {"atten_mask": T((12, 14), "bool"), "sparse_mode": mode}),
                {"atten_mask": T((1, 1, 2048, 2048), "bool"), "sparse_mode": mode},
            )
            for mode in (2, 3, 4)
        ),
    ]


def sequences(count: int) -> dict[str, Any]:
    sums = list(range(1, count + 1))
    return qkv((count, 8, 128), (count, 2, 128)) | {"actual_seq_lengths": sums, "actual_seq_lengths_kv": sums}
