"""Limits of ``npu_fusion_attention``, of prompt flash attention (PFA) and of incremental flash attention (IFA).

::

    limit         fusion                    PFA: A2, A3 / 310P                IFA: A2, A3 / 310P
    dtype         float32, float16, bf16    float16, bf16, int8 / float16     float16, bf16 / float16
    head size     768, key as query         512                               512
    batch         2 Mi, TND 2 Ki            65,536 or 128 / 128               65,535 / 256
    tokens        1 Mi                      20,971,520 / 65,535               262,144 / 65,536
    heads         any multiple, 256         64 a KV head / no groups          64 a KV head
"""

from __future__ import annotations

from hbmtwin.kernels.attention.npu_310p import IFA, PFA
from hbmtwin.kernels.attention.npu_asked import Asked, Rule
from hbmtwin.kernels.attention.npu_call import ALL_TOKENS
from hbmtwin.kernels.attention.npu_fia import FUSION
from hbmtwin.kernels.attention.npu_rules_common import (
    CONTIGUOUS,
    GROUPS,
    HEADS,
    KV_LENGTHS,
    MASK,
    MAX_HEADS,
    PACKED_LENGTHS,
    PAGING,
    PLAIN_LENGTHS,
    Q_LENGTHS,
    READABLE,
    SIXTEEN,
    TABLE,
)

KI, MI = 1024, 1024 * 1024
SINK_CANN, SOFTMAX_LAYOUT_CANN = (8, 5, 0), (8, 3, 0)


def _older(a: Asked, argument: str, cann: tuple[int, ...]) -> bool:
    return a.has(argument) and a.cann is not None and a.cann < cann


def _on_310p(a: Asked) -> bool:
    return a.family == "310p"


def _layout(*names: str) -> Rule:
    return Rule(
        *("layout", "input_layout", lambda a: a.get("input_layout", "BSH") not in names),
        "one of " + ", ".join(names),
        "take one of these",
    )


def _pfa_batch(a: Asked) -> bool:
    unaligned = a.q.dim * a.element_bytes % 32 != 0
    return a.q.batch > (128 if _on_310p(a) or unaligned else 65_536)


def _ifa_scale_wrong(a: Asked) -> bool:
    if not a.has("antiquant_scale"):
        return a.t("key").dtype == "int8"
    scale, heads, dim = a.t("antiquant_scale"), a.kv_heads, a.k.dim
    shapes = ((2, heads, 1, dim), (2, heads * dim), (2, heads, dim))
    return scale.dtype != a.t("query").dtype or scale.shape not in shapes


def _ifa_block_wrong(a: Asked) -> bool:
    size, unit = a.get("block_size", 0), 32 if a.t("key").dtype == "int8" else 16
    return bool(size < unit or size % unit != 0)


RULES: dict[str, tuple[Rule, ...]] = {
    FUSION: (
        _layout("BSH", "SBH", "BSND", "BNSD", "TND"),
        *Q_LENGTHS,
        *KV_LENGTHS,
        *READABLE,
        *CONTIGUOUS,
        HEADS[0],
        HEADS[2],
        *PACKED_LENGTHS,
        *PLAIN_LENGTHS,
        Rule(
            *("dtype", "query", lambda a: a.t("query").dtype not in (*SIXTEEN, "float32")),
            "float16, bfloat16 or float32, not {a.given[query].dtype}",
            "compute in one of these",
        ),
        Rule(
            *("dtypes_alike", "key", lambda a: len({a.t(name).dtype for name in ("query", "key", "value")}) > 1),
            "query, key and value of one dtype",
            "convert them",
        ),
        Rule(*("head_dim", "query", lambda a: a.q.dim > 768), "heads of at most 768, not {a.q.dim}", "split the head"),
        Rule(*("key_dim", "key", lambda a: a.k.dim != a.q.dim), "heads of {a.q.dim}, as query", "pad one of the two"),
        Rule(
            *("value_dim", "value", lambda a: a.v.dim > a.k.dim),
            "heads of at most the key's {a.k.dim}",
            "pad the key and the query",
        ),
        Rule(*("max_heads", "num_heads", lambda a: a.heads > MAX_HEADS), "at most 256", "split the heads"),
        Rule(
            *("batch", "query", lambda a: a.q.batch > (2 * KI if a.packed else 2 * MI)),
            "at most 2 Mi sequences, 2 Ki in layout TND",
            "split the batch",
        ),
        Rule(
            *("tokens", "query", lambda a: max(a.q.length, a.k.length, a.q.tokens if a.packed else 0) > MI),
            "at most 1 Mi tokens a sequence, and in layout TND in all",
            "split the batch",
        ),
        Rule(*("sparse_mode", "sparse_mode", lambda a: a.get("sparse_mode", 0) not in range(9)), "0 to 8", "take 3"),
        *MASK,
        Rule(
            *("sink_cann", "sink", lambda a: _older(a, "sink", SINK_CANN)),
            "since CANN 8.5.0 and TorchNPU 7.3.0",
            "leave it out, or install a newer CANN",
        ),
        Rule(
            "softmax_layout_cann",
            "softmax_layout",
            lambda a: _older(a, "softmax_layout", SOFTMAX_LAYOUT_CANN),
            "since CANN 8.3.RC1 and TorchNPU 7.2.0",
            "leave it out, or install a newer CANN",
        ),
    ),
    PFA: (
        _layout("BSH", "BSND", "BNSD", "BNSD_BSND", "TND"),
        Rule(
            *("layout_310p", "input_layout", lambda a: _on_310p(a) and a.packed),
            "TND is for Atlas A2 and A3",
            "take BNSD, one sequence a call",
        ),
        *Q_LENGTHS,
        *KV_LENGTHS,
        *READABLE,
        *CONTIGUOUS,
        Rule(
            *("groups_310p", "num_key_value_heads", lambda a: _on_310p(a) and a.get("num_key_value_heads", 0) != 0),
            "a 310P has no grouped queries",
            "repeat K and V for every query head and leave the argument out",
        ),
        *HEADS,
        *GROUPS,
        *PACKED_LENGTHS,
        *PLAIN_LENGTHS,
        Rule(
            *("dtype_310p", "query", lambda a: _on_310p(a) and a.t("query").dtype != "float16"),
            "float16 on a 310P, not {a.given[query].dtype}",
            "compute in float16",
        ),
        Rule(
            *("dtype", "query", lambda a: a.t("query").dtype not in (*SIXTEEN, "int8")),
            "float16, bfloat16 or int8, not {a.given[query].dtype}",
            "compute in one of these",
        ),
        Rule(*("head_dim", "query", lambda a: a.q.dim > 512), "heads of at most 512, not {a.q.dim}", "split the head"),
        Rule(
            *("h", "query", lambda a: a.layout in ("BSH", "BSND") and a.q.heads * a.q.dim >= 65_535),
            "heads times head size below 65,535 in layouts BSH and BSND",
            "take BNSD",
        ),
        Rule(
            *("batch", "query", _pfa_batch),
            "at most 65,536 sequences; 128 on a 310P, and where a head is no multiple of 32 bytes",
            "split the batch",
        ),
        Rule(
            *("tokens", "key", lambda a: max(a.q.length, a.k.length) > (65_535 if _on_310p(a) else 20_971_520)),
            "at most 20,971,520 tokens, 65,535 on a 310P",
            "shorten the sequence",
        ),
        Rule(
            *("mode_310p", "sparse_mode", lambda a: _on_310p(a) and a.get("sparse_mode", 0) != 0),
            "0 on a 310P",
            "give the whole mask",
        ),
        Rule(
            *("next_310p", "next_tokens", lambda a: _on_310p(a) and a.get("next_tokens", 0) not in (0, ALL_TOKENS)),
            "0 or 2147483647 on a 310P",
            "give the whole mask",
        ),
        Rule(*("sparse_mode", "sparse_mode", lambda a: a.get("sparse_mode", 0) not in range(5)), "0 to 4", "take 3"),
        *MASK,
    ),
    IFA: (
        _layout("BSH", "BNSD", "BSND"),
        *KV_LENGTHS,
        *READABLE,
        Rule(
            *("one_query", "query", lambda a: a.q.length != 1),
            "one query per sequence, not {a.q.length}",
            "take prompt flash attention for several",
        ),
        *CONTIGUOUS,
        *PAGING,
        *HEADS,
        *GROUPS,
        *PLAIN_LENGTHS,
        Rule(
            *("dtype_310p", "query", lambda a: _on_310p(a) and a.t("query").dtype != "float16"),
            "float16 on a 310P, not {a.given[query].dtype}",
            "compute in float16",
        ),
        Rule(*("head_dim", "query", lambda a: a.q.dim > 512), "heads of at most 512, not {a.q.dim}", "split the head"),
        Rule(
            *("batch", "query", lambda a: a.q.batch > (256 if _on_310p(a) else 65_535)),
            "at most 65,535 sequences, 256 on a 310P",
            "split the batch",
        ),
        Rule(
            *("tokens", "key", lambda a: _ifa_tokens(a) > (65_536 if _on_310p(a) else 262_144)),
            "at most 262,144 tokens, 65,536 on a 310P",
            "shorten the sequence",
        ),
        Rule(
            *("block_size", "block_size", lambda a: a.paged and _ifa_block_wrong(a)),
            "a multiple of 16, of 32 for int8",
            "use 128",
        ),
        *TABLE,
        Rule(
            *("cache_layout", "key", lambda a: a.paged and len(a.t("key").shape) == 4 and a.layout != "BNSD"),
            "a cache (blocks, Nkv, block, D) is for queries in BNSD",
            "give it as (blocks, block, H)",
        ),
        Rule(
            *("scale", "antiquant_scale", _ifa_scale_wrong),
            "int8 needs one of (2, Nkv, 1, D), (2, H) or (2, Nkv, D) in the query's dtype",
            "give K's and V's scales in one tensor",
        ),
        Rule(
            *("mask_dtype", "atten_mask", MASK[0].broken),
            MASK[0].text,
            MASK[0].cure,
        ),
    ),
}


def _ifa_tokens(a: Asked) -> int:
    return max(a.kv_lens, default=0) if a.paged else a.k.length
