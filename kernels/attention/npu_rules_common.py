"""Limits that several attention ops share: lengths, tables of blocks, caches, heads, masks.

::

    lengths        ints of the host; cumulative where packed and not in blocks, plain elsewhere
    block_table    int32, (batch, blocks of the longest), ids of blocks that there are
    caches         contiguous, of one shape, below 2^31 elements each
    mask           True leaves out; 2048 x 2048 for the compressed sparse modes 2, 3, 4

An op does not check most of these: it reads wild memory, or attends to something else.
"""

from __future__ import annotations

from functools import partial

from hbmtwin.kernels.attention.npu_asked import Asked, Rule, host_ints, rising
from hbmtwin.kernels.attention.npu_call import COMPRESSED_MASK
from hbmtwin.kernels.attention.npu_fia import FIA, FIA_V2

SIXTEEN = ("float16", "bfloat16")
MASKS = ("bool", "int8", "uint8")
COMPRESSED_MODES = (2, 3, 4)
MAX_H, MAX_ELEMENTS = 65_535, 2**31
MAX_QUERIES_PER_KV, MAX_HEADS = 64, 256
Q_LENS, KV_LENS = "actual_seq_lengths", "actual_seq_lengths_kv"
HOW_CUMULATIVE = "give [2, 4, 7] for lengths 2, 2, 3"


def mode(a: Asked) -> int:
    """sparse_mode, and 0 where one query per sequence makes the op ignore it."""
    return 0 if ignores_mode(a) else int(a.get("sparse_mode", 0))


def ignores_mode(a: Asked) -> bool:
    """Whether the op ignores sparse_mode: FIA, one query per sequence, no rope."""
    return a.op in (FIA, FIA_V2) and a.q.length == 1 and not a.packed and not a.rope


def not_contiguous(a: Asked, name: str) -> bool:
    """Whether that tensor has gaps."""
    return not a.t(name).contiguous


def _not_ints(a: Asked, lens: str) -> bool:
    return not host_ints(a.get(lens, []))


def _negative(a: Asked, lens: str) -> bool:
    return any(length < 0 for length in a.get(lens, []))


def _packs_not(a: Asked, lens: str, tokens: int) -> bool:
    given = a.get(lens, [])
    return not rising(given) or (given[-1] if given else 0) != tokens


def _table_short(a: Asked) -> bool:
    return any(length > a.columns * a.cache_block for length in a.kv_lens)


def _cache_small(a: Asked) -> bool:
    return a.t("key").shape[0] < a.blocks_needed


def _bad_ids(a: Asked) -> bool:
    """Of blocks in use: what stands behind them in a row is not read."""
    values = a.t("block_table").values
    if values is None:
        return False
    blocks = a.t("key").shape[0]
    for row, length in enumerate(a.kv_lens):
        start = row * a.columns
        used = values[start : start + -(-length // a.cache_block)]
        if any(not 0 <= block < blocks for block in used):
            return True
    return False


def _compressed(a: Asked) -> bool:
    shape = a.t("atten_mask").shape
    return shape[-2:] == (COMPRESSED_MASK, COMPRESSED_MASK) and all(axis == 1 for axis in shape[:-2])


Q_LENGTHS: tuple[Rule, ...] = (
    Rule("q_lens_host", Q_LENS, lambda a: _not_ints(a, Q_LENS), "a list of ints on the host", "call tolist()"),
    Rule("q_lens_negative", Q_LENS, lambda a: _negative(a, Q_LENS), "a length is negative", "give 0 and more"),
    Rule(
        *("q_lens_missing", Q_LENS, lambda a: a.packed and not a.has(Q_LENS)),
        "layout {a.layout} needs the lengths of the queries",
        HOW_CUMULATIVE,
    ),
)
KV_LENGTHS: tuple[Rule, ...] = (
    Rule("kv_lens_host", KV_LENS, lambda a: _not_ints(a, KV_LENS), "a list of ints on the host", "call tolist()"),
    Rule("kv_lens_negative", KV_LENS, lambda a: _negative(a, KV_LENS), "a length is negative", "give 0 and more"),
    Rule(
        *("kv_lens_missing", KV_LENS, lambda a: (a.packed or a.paged) and not a.has(KV_LENS)),
        "layout TND and paging need the lengths of the keys",
        "give a list of ints: cumulative without paging, plain with it",
    ),
)
READABLE: tuple[Rule, ...] = (
    Rule(
        *("query_rank", "query", lambda a: not a.readable("query")),
        "shape {a.given[query].shape} is not one of layout {a.layout}",
        "bring it into that layout, or name its own",
    ),
    Rule(
        *("key_rank", "key", lambda a: not a.readable("key")),
        "shape {a.given[key].shape} is not one of layout {a.layout}, nor a cache with a block table",
        "give (blocks, block, H) with a block table, else the layout of query",
    ),
    Rule(
        *("value_rank", "value", lambda a: not a.readable("value")),
        "shape {a.given[value].shape} is not one of layout {a.layout}, nor a cache with a block table",
        "give (blocks, block, H) with a block table, else the layout of query",
    ),
)
PACKED_LENGTHS: tuple[Rule, ...] = (
    Rule(
        *("q_lens_cumulative", Q_LENS, lambda a: a.packed and _packs_not(a, Q_LENS, a.q.tokens)),
        "cumulative and never falling, the last being the {a.q.tokens} tokens of query",
        HOW_CUMULATIVE,
    ),
    Rule(
        *("kv_lens_cumulative", KV_LENS, lambda a: a.packed and not a.paged and _packs_not(a, KV_LENS, a.k.tokens)),
        "without paging cumulative and never falling, the last being the {a.k.tokens} tokens of key",
        HOW_CUMULATIVE,
    ),
)
PLAIN_LENGTHS: tuple[Rule, ...] = (
    Rule(
        *("kv_lens_count", KV_LENS, lambda a: a.has(KV_LENS) and len(a.kv_lens) not in (1, a.q.batch)),
        "one for each of {a.q.batch} sequences",
        "give as many as there are",
    ),
    Rule(
        *("kv_lens_fit", KV_LENS, lambda a: not a.paged and not a.packed and max(a.kv_lens, default=0) > a.k.length),
        "plain lengths, at most the {a.k.length} tokens of a row of key",
        "give the length of each sequence, not the sum so far",
    ),
)
PAGING: tuple[Rule, ...] = (
    Rule(
        *("table_dtype", "block_table", lambda a: a.paged and a.t("block_table").dtype != "int32"),
        "int32, not {a.given[block_table].dtype}",
        "call to(torch.int32)",
    ),
    Rule(
        *("table_device", "block_table", lambda a: a.paged and a.t("block_table").device != a.t("query").device),
        "on the device",
        "call to('npu')",
    ),
    Rule(
        *("table_rank", "block_table", lambda a: a.paged and len(a.t("block_table").shape) != 2),
        "(batch, blocks of the longest sequence), not {a.given[block_table].shape}",
        "give one row per sequence",
    ),
    Rule(
        *("caches_alike", "value", lambda a: a.paged and not a.rope and a.t("key").shape != a.t("value").shape),
        "caches of one shape, and key's is {a.given[key].shape}",
        "give both caches the same shape",
    ),
    Rule(
        *("cache_elements", "key", lambda a: a.paged and a.t("key").elements >= MAX_ELEMENTS),
        "a cache of fewer than 2^31 elements",
        "take fewer blocks",
    ),
    Rule(
        *("cache_h", "key", lambda a: a.paged and len(a.t("key").shape) == 3 and a.t("key").shape[2] > MAX_H),
        "heads times head size at most 65,535 in a cache (blocks, block, H)",
        "give it as (blocks, Nkv, block, D) with a query in BNSD",
    ),
)
TABLE: tuple[Rule, ...] = (
    Rule(
        *("table_rows", "block_table", lambda a: a.paged and a.t("block_table").shape[0] != a.q.batch),
        "one row for each of {a.q.batch} sequences",
        "give as many rows as lengths",
    ),
    Rule(
        *("block_size_is", "block_size", lambda a: a.paged and a.get("block_size", 0) != a.cache_block),
        "{a.cache_block}, as the cache's shape says",
        "give the cache's",
    ),
    Rule(
        *("kv_lens_plain", KV_LENS, lambda a: a.paged and _table_short(a)),
        "with paging plain lengths, each at most the {a.columns} blocks of {a.cache_block} of a row of block_table",
        "give the length of each sequence, not the sum so far, or a table with more columns",
    ),
    Rule(
        *("cache_blocks", "key", lambda a: a.paged and _cache_small(a)),
        "{a.blocks_needed} blocks are in use and the cache has fewer",
        "give the whole cache",
    ),
    Rule(
        *("table_ids", "block_table", lambda a: a.paged and _bad_ids(a)),
        "ids of blocks from 0 to one below those of the cache; the kernel would read wild memory",
        "look at how the table is filled",
    ),
)
CONTIGUOUS: tuple[Rule, ...] = tuple(
    Rule(
        *(f"{name}_contiguous", name, partial(not_contiguous, name=name)),
        "contiguous",
        "call contiguous()",
    )
    for name in ("query", "key", "value")
)
HEADS: tuple[Rule, ...] = (
    Rule(
        *("heads_are", "num_heads", lambda a: a.q.heads != a.heads),
        "{a.q.heads}, as the shape of query says",
        "give the number of query heads",
    ),
    Rule(
        *("kv_heads_are", "num_key_value_heads", lambda a: a.k.heads != a.kv_heads),
        "{a.k.heads}, as the shape of key says",
        "give the number of KV heads",
    ),
    Rule(
        *("heads_divide", "num_key_value_heads", lambda a: a.heads % a.kv_heads != 0),
        "a divisor of the {a.heads} query heads, not {a.kv_heads}",
        "repeat or drop KV heads",
    ),
)
GROUPS: tuple[Rule, ...] = (
    Rule(
        *("group_size", "num_key_value_heads", lambda a: not a.rope and a.heads // a.kv_heads > MAX_QUERIES_PER_KV),
        "at most 64 query heads for each KV head, but with rope",
        "repeat KV heads",
    ),
    Rule(*("max_heads", "num_heads", lambda a: a.heads > MAX_HEADS), "at most 256", "split the heads over two calls"),
)
MASK: tuple[Rule, ...] = (
    Rule(
        *("mask_dtype", "atten_mask", lambda a: a.has("atten_mask") and a.t("atten_mask").dtype not in MASKS),
        "bool, int8 or uint8, not {a.given[atten_mask].dtype}",
        "make it bool, True where a query does not look",
    ),
    Rule(
        *("mask_missing", "atten_mask", lambda a: mode(a) in COMPRESSED_MODES and not a.has("atten_mask")),
        "without one the op attends to everything, whatever sparse_mode says",
        "give the 2048 x 2048 mask, True above the diagonal",
    ),
    Rule(
        *("mask_compressed", "atten_mask", lambda a: mode(a) in COMPRESSED_MODES and not _compressed(a)),
        "sparse modes 2, 3 and 4 take one of 2048 x 2048, not {a.given[atten_mask].shape}",
        "give the 2048 x 2048 mask, True above the diagonal",
    ),
)
