"""Limits of ops that write a cache, quantise for one, or read one by ATB.

::

    op                               what it takes
    npu_scatter_pa_kv_cache          contiguous, one dtype for all four, slots in the cache and unique, ND in "Norm"
    _npu_reshape_and_cache           int32 slots, unique; a negative one is skipped
    _npu_paged_attention             int32 table on the device, int32 lengths on the host
    npu_multi_head_latent_attention  blocks of at most 128, at most 8,192 sequences
    npu_kv_rmsnorm_rope_cache        kv (B, 1, S, 512 + 64), int64 index
    npu_quantize, npu_dynamic_quant  int8, and int4 of which a row is a multiple of 8
"""

from __future__ import annotations

from functools import partial

from hbmtwin.kernels.attention.npu_asked import BYTES, Asked, Rule
from hbmtwin.kernels.attention.npu_cache import DYNAMIC_QUANT, PAGED_ATTENTION, RESHAPE_AND_CACHE, SCATTER
from hbmtwin.kernels.attention.npu_rules_common import not_contiguous

LATENT_ATTENTION, RMSNORM_ROPE_CACHE, QUANTIZE = (
    "npu_multi_head_latent_attention",
    "npu_kv_rmsnorm_rope_cache",
    "npu_quantize",
)
FOUR = ("key", "value", "key_cache", "value_cache")
RMSNORM_MODES = ("Norm", "PA", "PA_BNSD", "PA_NZ", "PA_BLK_BNSD", "PA_BLK_NZ")
QUANTIZED = ("qint8", "quint8", "qint32", "int32")
NZ_BYTES = 32


def _norm(a: Asked) -> bool:
    return bool(a.get("cache_mode", "PA_NZ") != "PA_NZ")


def _norm_wrong(a: Asked, new: str, cache: str) -> bool:
    return _norm(a) and (len(a.t(cache).shape) != 4 or a.t(cache).shape[2:] != a.t(new).shape[1:])


def _nz_wrong(a: Asked, new: str, cache: str) -> bool:
    if _norm(a):
        return False
    tensor, shape = a.t(new), a.t(cache).shape
    last = NZ_BYTES // BYTES[tensor.dtype]
    width = tensor.shape[1] * tensor.shape[2]
    return len(shape) != 4 or shape[3] != last or shape[1] * last != width


def _slots_of(a: Asked) -> int:
    shape = a.t("key_cache").shape
    return shape[0] * (shape[1] if _norm(a) or a.op == RESHAPE_AND_CACHE else shape[2])


def _outside(values: tuple[int, ...] | None, low: bool, top: int) -> bool:
    return values is not None and any(slot >= top or (low and slot < 0) for slot in values)


def _twice(values: tuple[int, ...] | None) -> bool:
    used = [slot for slot in values or () if slot >= 0]
    return len(set(used)) < len(used)


def _dtype_name(a: Asked, argument: str) -> str:
    return str(a.get(argument)).removeprefix("torch.")


ALIKE = Rule(
    *("dtypes_alike", "key", lambda a: len({a.t(name).dtype for name in FOUR}) > 1),
    "one dtype for keys, values and both caches",
    "convert or quantise the new tokens first",
)
SAME_TOKENS = Rule(
    *("tokens_alike", "value", lambda a: a.t("key").shape[:2] != a.t("value").shape[:2]),
    "tokens and heads of key",
    "give V of the same tokens",
)
RANK = Rule(
    *("rank", "key", lambda a: len(a.t("key").shape) != 3 or len(a.t("value").shape) != 3),
    "(tokens, Nkv, D), not {a.given[key].shape}",
    "bring it into that shape",
)

RULES: dict[str, tuple[Rule, ...]] = {
    SCATTER: (
        RANK,
        *(
            Rule(
                *(f"{name}_contiguous", name, partial(not_contiguous, name=name)),
                "contiguous",
                "call contiguous() before, on what stays",
            )
            for name in FOUR
        ),
        ALIKE,
        SAME_TOKENS,
        Rule(
            *("cache_mode", "cache_mode", lambda a: a.get("cache_mode", "PA_NZ") not in ("PA_NZ", "Norm")),
            "Norm or PA_NZ, which is the default",
            "give Norm for caches (blocks, block, Nkv, D)",
        ),
        *(
            rule
            for new, cache in (("key", "key_cache"), ("value", "value_cache"))
            for rule in (
                Rule(
                    f"{cache}_norm",
                    cache,
                    partial(_norm_wrong, new=new, cache=cache),
                    "(blocks, block, Nkv, D) with the heads of what is written",
                    "give the cache in that shape",
                ),
                Rule(
                    f"{cache}_nz",
                    cache,
                    partial(_nz_wrong, new=new, cache=cache),
                    "in mode PA_NZ (blocks, Nkv * D / last, block, last), last being 32 bytes",
                    "give cache_mode='Norm' for an ND cache",
                ),
            )
        ),
        Rule(
            *("slots_dtype", "slot_mapping", lambda a: a.t("slot_mapping").dtype not in ("int32", "int64")),
            "int32 or int64, not {a.given[slot_mapping].dtype}",
            "convert it",
        ),
        Rule(
            *("slots_count", "slot_mapping", lambda a: a.t("slot_mapping").shape != a.t("key").shape[:1]),
            "one slot for each of {a.given[key].shape[0]} tokens",
            "leave the padding out of both",
        ),
        Rule(
            *("slots_range", "slot_mapping", lambda a: _outside(a.t("slot_mapping").values, True, _slots_of(a))),
            "from 0 to one below blocks times block size; a negative slot is not skipped here",
            "leave the padding out, or take _npu_reshape_and_cache",
        ),
        Rule(
            *("slots_unique", "slot_mapping", lambda a: _twice(a.t("slot_mapping").values)),
            "no slot twice",
            "look at how slots are given out",
        ),
    ),
    RESHAPE_AND_CACHE: (
        RANK,
        ALIKE,
        SAME_TOKENS,
        Rule(
            *("slots_dtype", "slot_indices", lambda a: a.t("slot_indices").dtype != "int32"),
            "int32, not {a.given[slot_indices].dtype}",
            "call to(torch.int32)",
        ),
        Rule(
            *("slots_count", "slot_indices", lambda a: a.t("slot_indices").shape != a.t("key").shape[:1]),
            "one slot for each of {a.given[key].shape[0]} tokens",
            "give -1 for padding",
        ),
        Rule(
            *("slots_range", "slot_indices", lambda a: _outside(a.t("slot_indices").values, False, _slots_of(a))),
            "below blocks times block size",
            "look at how slots are given out",
        ),
        Rule(
            *("slots_unique", "slot_indices", lambda a: _twice(a.t("slot_indices").values)),
            "no slot twice, but negative ones, which are skipped",
            "look at how slots are given out",
        ),
    ),
    PAGED_ATTENTION: (
        Rule(
            *("rank", "query", lambda a: len(a.t("query").shape) != 3),
            "(tokens, N, D), not {a.given[query].shape}",
            "bring it into that shape",
        ),
        Rule(
            *("cache_rank", "key_cache", lambda a: len(a.t("key_cache").shape) != 4),
            "(blocks, block, Nkv, D), not {a.given[key_cache].shape}",
            "bring it into that shape",
        ),
        Rule(
            *("kv_heads", "num_kv_heads", lambda a: a.t("key_cache").shape[2] != a.get("num_kv_heads")),
            "{a.given[key_cache].shape[2]}, as the cache's shape says",
            "give the number of KV heads",
        ),
        Rule(
            *("heads", "num_heads", lambda a: a.t("query").shape[1] != a.get("num_heads")),
            "{a.given[query].shape[1]}, as the query's shape says",
            "give the number of query heads",
        ),
        Rule(
            *("table_dtype", "block_table", lambda a: a.t("block_table").dtype != "int32"),
            "int32, not {a.given[block_table].dtype}",
            "call to(torch.int32)",
        ),
        Rule(
            *("table_device", "block_table", lambda a: a.t("block_table").device != a.t("query").device),
            "on the device",
            "call to('npu')",
        ),
        Rule(
            *("lens_dtype", "context_lens", lambda a: a.t("context_lens").dtype != "int32"),
            "int32, not {a.given[context_lens].dtype}",
            "call to(torch.int32)",
        ),
        Rule(
            *("lens_host", "context_lens", lambda a: a.t("context_lens").device != "cpu"),
            "on the host, where block_table is on the device",
            "call cpu()",
        ),
    ),
    LATENT_ATTENTION: (
        Rule(
            *("block_size", "ctkv", lambda a: a.t("ctkv").shape[1] > 128),
            "blocks of at most 128 tokens, not {a.given[ctkv].shape[1]}",
            "use 128",
        ),
        Rule(
            *("batch", "q_nope", lambda a: len(a.get("context_lens", [])) > 8192),
            "at most 8,192 sequences",
            "split the batch",
        ),
    ),
    RMSNORM_ROPE_CACHE: (
        Rule(
            *("kv", "kv", lambda a: len(a.t("kv").shape) != 4 or a.t("kv").shape[1] != 1 or a.t("kv").shape[3] != 576),
            "(B, 1, S, 576), not {a.given[kv].shape}",
            "bring it into that shape",
        ),
        Rule(*("gamma", "gamma", lambda a: a.t("gamma").shape != (512,)), "512 elements", "norm the latent part only"),
        Rule(
            *("rope", "cos", lambda a: a.t("cos").shape[-1] != 64 or a.t("sin").shape[-1] != 64),
            "64 elements in cos and sin",
            "rotate the last 64 only",
        ),
        Rule(
            *("index_dtype", "index", lambda a: a.t("index").dtype != "int64"),
            "int64, not {a.given[index].dtype}",
            "call to(torch.int64)",
        ),
        Rule(
            *("cache_mode", "cache_mode", lambda a: a.get("cache_mode", "Norm") not in RMSNORM_MODES),
            "one of " + ", ".join(RMSNORM_MODES),
            "take PA for blocks",
        ),
        Rule(
            *("k_scale", "k_rope_scale", lambda a: a.t("k_cache").dtype == "int8" and not a.has("k_rope_scale")),
            "an int8 cache needs one",
            "give it",
        ),
        Rule(
            *("c_scale", "c_kv_scale", lambda a: a.t("ckv_cache").dtype == "int8" and not a.has("c_kv_scale")),
            "an int8 cache needs one",
            "give it",
        ),
    ),
    QUANTIZE: (
        Rule(
            *("div_mode", "div_mode", lambda a: a.get("div_mode", True) and _dtype_name(a, "dtype") == "quint4x2"),
            "False for quint4x2",
            "give div_mode=False",
        ),
        Rule(
            *("dtype", "dtype", lambda a: _dtype_name(a, "dtype") not in (*QUANTIZED, "quint4x2")),
            "qint8, quint8, int32 or quint4x2",
            "take torch.qint8",
        ),
        Rule(
            *("packs", "input", lambda a: _dtype_name(a, "dtype") == "quint4x2" and a.t("input").shape[-1] % 8 != 0),
            "a last dimension that is a multiple of 8 for quint4x2: eight go in one int32",
            "pad it",
        ),
    ),
    DYNAMIC_QUANT: (
        Rule(
            *("dtype", "dst_type", lambda a: _dtype_name(a, "dst_type") not in ("None", "int8", "quint4x2")),
            "int8 or quint4x2",
            "leave it out for int8",
        ),
        Rule(
            *("input_dtype", "input", lambda a: a.t("input").dtype not in ("float16", "bfloat16")),
            "float16 or bfloat16, not {a.given[input].dtype}",
            "convert it",
        ),
    ),
}
