"""Limits of FIA, versions 1 and 2, as its documents state them: op-plugin 517f2e7d, and the wheel of torch_npu 2.13.

::

    limit                      Q_S > 1                        Q_S = 1                             TND, or MLA
    block_size                 128..512, of 128               to 512, of 16 (16 bits), 32 (int8)  to 1024, of 16
    dtype of a paged cache     float16, bfloat16              and int8
    tokens of K and V          20,971,520                     262,144
"""

from __future__ import annotations

from functools import partial

from hbmtwin.kernels.attention.npu_asked import Asked, Rule
from hbmtwin.kernels.attention.npu_fia import FIA, FIA_V2, packs
from hbmtwin.kernels.attention.npu_rules_common import (
    CONTIGUOUS,
    GROUPS,
    HEADS,
    KV_LENGTHS,
    MASK,
    PACKED_LENGTHS,
    PAGING,
    PLAIN_LENGTHS,
    Q_LENGTHS,
    READABLE,
    SIXTEEN,
    TABLE,
)

LAYOUTS = (
    *("BSH", "BSND", "BNSD", "BNSD_BSND", "BSH_NBSD", "BSND_NBSD", "BNSD_NBSD"),
    *("TND", "TND_NTD", "NTD_TND"),
)
DIM_UNIT = {"float16": 16, "bfloat16": 16, "int8": 32, "int32": 64}
"""Of head_dim, by the key's dtype; int32 holds int4."""
PER_TOKEN_MODES = (1, 3, 4, 5)
NZ_HEADS = ((10, 1), (64, 8), (80, 8), (128, 16))
MAX_LONG_TOKENS, MAX_ONE_TOKENS, MAX_BATCH, MAX_PACKED = 20_971_520, 262_144, 65_536, 4096
ROPE_DIM = 64


def _block_wrong(a: Asked) -> bool:
    size = a.get("block_size", 0)
    if a.packed or a.rope:
        return not 16 <= size <= 1024 or size % 16 != 0
    if a.q.length > 1 and not a.nz:
        return not 128 <= size <= 512 or size % 128 != 0
    unit = 32 if a.t("key").dtype == "int8" else 16
    return not unit <= size <= 512 or size % unit != 0


def _layout_length_wrong(a: Asked) -> bool:
    layout = a.get("input_layout", "BSH")
    if layout.endswith("_NBSD"):
        return not 1 < a.q.length <= 16
    return layout == "BNSD_BSND" and a.q.length <= 1


def _mode_of(a: Asked, which: str) -> int:
    return int(a.get(f"{which}_antiquant_mode", 0))


def _modes_apart(a: Asked) -> bool:
    k, v = _mode_of(a, "key"), _mode_of(a, "value")
    return k != v and (k, v) != (0, 1)


def _scale_dtype_wrong(a: Asked, which: str) -> bool:
    scale = f"{which}_antiquant_scale"
    wanted = "float32" if _mode_of(a, which) in PER_TOKEN_MODES else a.t("query").dtype
    return a.has(scale) and a.t(scale).dtype != wanted


def _scale_shape_wrong(a: Asked, which: str) -> bool:
    wanted = {4: ("blocks", "block"), 5: ("blocks", "heads", "block")}.get(_mode_of(a, which))
    if wanted is None:
        return False
    scale = f"{which}_antiquant_scale"
    sizes = {"blocks": a.t(which).shape[0], "heads": a.kv_heads, "block": a.cache_block if a.paged else 0}
    return not a.has(scale) or a.t(scale).shape != tuple(sizes[axis] for axis in wanted)


def _no_scale(a: Asked, which: str) -> bool:
    quantised = a.t(which).dtype in ("int8", "int32") and a.t("query").dtype != "int8"
    return quantised and not a.has(f"{which}_antiquant_scale") and not a.has("antiquant_scale")


def _rope_wrong(a: Asked, which: str, of: str) -> bool:
    rope, nope = a.t(which).shape, a.t(of).shape
    return rope[-1] != ROPE_DIM or rope[:-1] != nope[:-1]


def _mla_heads_wrong(a: Asked) -> bool:
    power = 0 < a.heads <= 128 and a.heads & (a.heads - 1) == 0
    return a.rope and a.q.dim == 512 and not (power and a.kv_heads == 1)


def _nz_wrong(a: Asked) -> bool:
    last = 32 if a.t("key").dtype == "int8" else 16
    return a.nz and a.t("key").shape[4] != last


def _nz_gqa_wrong(a: Asked) -> bool:
    if not a.nz or a.rope or a.t("key").dtype != "int8":
        return False
    return not (
        a.t("query").dtype == "bfloat16"
        and a.q.dim == 128
        and 1 <= a.q.length <= 16
        and a.cache_block in (128, 512)
        and (a.heads, a.kv_heads) in NZ_HEADS
    )


def _sink_wrong(a: Asked) -> bool:
    if not a.has("learnable_sink"):
        return False
    sink = a.t("learnable_sink")
    layout = a.get("input_layout", "BSH")
    return sink.dtype != "bfloat16" or sink.shape != (a.heads,) or layout not in ("TND", "NTD_TND") or a.q.dim > 128


def _most_tokens(a: Asked) -> int:
    return max(a.kv_lens, default=0) if a.paged else a.k.length


SHAPES: tuple[Rule, ...] = (
    Rule(
        *("layout", "input_layout", lambda a: a.get("input_layout", "BSH") not in LAYOUTS),
        "one of " + ", ".join(LAYOUTS),
        "take TND for packed sequences, BSND for one query each",
    ),
    *Q_LENGTHS,
    *KV_LENGTHS,
    *READABLE,
    *CONTIGUOUS,
    *PAGING,
    *HEADS,
    *GROUPS,
    *PACKED_LENGTHS,
    *PLAIN_LENGTHS,
    Rule(
        *("layout_length", "input_layout", _layout_length_wrong),
        "BNSD_BSND is for several queries per sequence, and layouts that end in NBSD for 2 to 16, not {a.q.length}",
        "take BSND, BNSD or TND",
    ),
    Rule(
        *("query_dtype", "query", lambda a: a.t("query").dtype not in (*SIXTEEN, "int8")),
        "float16, bfloat16 or int8, not {a.given[query].dtype}",
        "compute in float16 or bfloat16",
    ),
    Rule(
        *("int4_paged", "key", lambda a: a.paged and a.t("key").dtype == "int32"),
        "int4 (in int32) is not read from blocks",
        "store the cache in int8",
    ),
    Rule(
        *("int8_paged_long", "key", lambda a: a.paged and not a.nz and a.t("key").dtype == "int8" and a.q.length > 1),
        "int8 is read from blocks for one query per sequence only",
        "keep the cache in float16 or bfloat16, or prefill from the new tokens' own K and V",
    ),
    Rule(
        *("key_dtype", "key", lambda a: a.t("key").dtype not in DIM_UNIT),
        "float16, bfloat16, int8 or int4 in int32, not {a.given[key].dtype}",
        "store the cache in the query's dtype or in int8",
    ),
    Rule(
        *("head_dim", "query", lambda a: a.q.dim > 512 or a.q.dim % DIM_UNIT[a.t("key").dtype] != 0),
        "heads of at most 512, in multiples of 16 (16 bits), 32 (int8), 64 (int4), not {a.q.dim}",
        "pad the head",
    ),
    Rule(
        *("batch", "query", lambda a: a.q.batch > MAX_BATCH),
        "at most 65,536 sequences",
        "split the batch",
    ),
    Rule(
        *("packed_batch", "actual_seq_lengths", lambda a: a.packed and a.q.batch > MAX_PACKED),
        "at most 4,096 sequences in layout TND",
        "split the batch",
    ),
    Rule(
        *("tokens", "key", lambda a: _most_tokens(a) > (MAX_ONE_TOKENS if a.q.length == 1 else MAX_LONG_TOKENS)),
        "at most 262,144 tokens for one query per sequence, and 20,971,520 for several",
        "shorten the sequence",
    ),
    Rule(
        *("block_size", "block_size", lambda a: a.paged and _block_wrong(a)),
        "TND and MLA: multiples of 16 up to 1024; several queries per sequence: 128, 256, 384, 512; one: multiples "
        "of 16 (int8: of 32) up to 512",
        "use 128",
    ),
    *TABLE,
)
VALUES: tuple[Rule, ...] = (
    Rule(
        *("cache_layout", "key", lambda a: a.paged and len(a.t("key").shape) == 4 and a.layout not in ("BNSD", "TND")),
        "a cache (blocks, Nkv, block, D) is for queries in BNSD and TND",
        "give it as (blocks, block, H)",
    ),
    Rule(
        *("sparse_mode", "sparse_mode", lambda a: a.get("sparse_mode", 0) not in _modes_allowed(a)),
        "0 to 4; version 2 has 9 besides, with rope",
        "take 3 for causal attention, 4 for a window",
    ),
    *MASK,
    Rule(
        *("modes_known", "key_antiquant_mode", lambda a: not 0 <= _mode_of(a, "key") <= 5),
        "0 to 5",
        "take 4 for a scale per token in blocks, 5 for one per token and head",
    ),
    Rule(
        *("modes_alike", "value_antiquant_mode", _modes_apart),
        "the same as the key's, or 1 beside its 0",
        "quantise both alike",
    ),
    Rule(
        *("modes_long", "key_antiquant_mode", lambda a: a.q.length > 1 and _mode_of(a, "key") >= 2),
        "2 to 5 are for one query per sequence",
        "take 0 or 1",
    ),
    *(
        rule
        for which in ("key", "value")
        for rule in (
            Rule(
                *(f"{which}_scale", f"{which}_antiquant_scale", partial(_no_scale, which=which)),
                "a quantised cache needs one",
                "give the scales",
            ),
            Rule(
                f"{which}_scale_dtype",
                f"{which}_antiquant_scale",
                partial(_scale_dtype_wrong, which=which),
                "float32 where it is per token (modes 1, 3, 4, 5), else the query's dtype",
                "convert it",
            ),
            Rule(
                f"{which}_scale_shape",
                f"{which}_antiquant_scale",
                partial(_scale_shape_wrong, which=which),
                "(blocks, block_size) in mode 4, (blocks, Nkv, block_size) in mode 5",
                "keep the scales beside the cache, in the same blocks",
            ),
        )
    ),
    Rule(
        *("rope_both", "key_rope", lambda a: a.has("query_rope") != a.has("key_rope")),
        "query_rope and key_rope go together",
        "give both",
    ),
    Rule(
        *(
            "packed_dim",
            "query",
            lambda a: a.packed and not a.rope and not packs(a.q.dim, a.v.dim, grouped=_grouped(a)),
        ),
        "layout TND takes heads of 128, of 192 with 128 or 192 for the value, and of 64 without groups; not {a.q.dim}",
        "take layout BNSD, or npu_fusion_attention",
    ),
    Rule(
        *("mla_dim", "query", lambda a: a.rope and a.q.dim not in (512, 128)),
        "with rope a head is 512 + 64 or 128 + 64, not {a.q.dim}",
        "take another op",
    ),
    Rule(
        *("mla_query_rope", "query_rope", lambda a: a.rope and _rope_wrong(a, "query_rope", "query")),
        "64 elements a head, otherwise the shape of query",
        "split the rotary part off",
    ),
    Rule(
        *("mla_key_rope", "key_rope", lambda a: a.rope and _rope_wrong(a, "key_rope", "key")),
        "64 elements a head, otherwise the shape of key",
        "split the rotary part off",
    ),
    Rule(
        *("mla_heads", "num_heads", _mla_heads_wrong),
        "a latent of 512 is read by 1, 2, 4 .. 128 query heads and one KV head",
        "pad the query heads to a power of two",
    ),
    Rule(*("nz_shape", "key", _nz_wrong), "an NZ cache ends in 16 (int8: 32) elements", "cast it by npu_format_cast"),
    Rule(
        *("inner_precise", "inner_precise", lambda a: a.get("inner_precise", 0) not in (0, 1, 2, 3)),
        "0 to 3",
        "take 0",
    ),
    Rule(
        *("inner_precise_one", "inner_precise", lambda a: a.q.length == 1 and a.get("inner_precise", 0) > 1),
        "0 or 1 for one query per sequence",
        "take 0",
    ),
    Rule(
        *("inner_precise_bf16", "inner_precise", lambda a: a.packed and a.get("inner_precise", 0) != 0 and _bf16(a)),
        "0 for bfloat16 in layout TND",
        "take 0",
    ),
)


def _modes_allowed(a: Asked) -> tuple[int, ...]:
    return (0, 1, 2, 3, 4, 9) if a.op == FIA_V2 and a.rope else (0, 1, 2, 3, 4)


def _grouped(a: Asked) -> bool:
    return a.heads != a.kv_heads


def _bf16(a: Asked) -> bool:
    return a.t("query").dtype == "bfloat16"


RULES: dict[str, tuple[Rule, ...]] = {
    FIA: (
        *SHAPES,
        *VALUES,
        Rule(
            *("mla_lse", "softmax_lse_flag", lambda a: a.rope and a.q.dim == 512 and bool(a.get("softmax_lse_flag"))),
            "version 1 gives none for a latent of 512",
            "take npu_fused_infer_attention_score_v2",
        ),
    ),
    FIA_V2: (
        *SHAPES,
        *VALUES,
        Rule(
            *("nz_int8", "key", _nz_gqa_wrong),
            "int8 in NZ blocks takes bfloat16 queries, heads of 128, 1 to 16 queries, blocks of 128 or 512, and query "
            "and KV heads (10, 1), (64, 8), (80, 8), (128, 16)",
            "take ND blocks with one query per sequence",
        ),
        Rule(
            *("sink", "learnable_sink", _sink_wrong),
            "bfloat16, one for each query head, layout TND or NTD_TND, heads of at most 128",
            "leave it out",
        ),
    ),
}
