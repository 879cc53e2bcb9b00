"""What every attention kernel may believe of its arguments: held before an op is called, since ops believe anything.

::

    layout      rank and dtype of each tensor, on the kernels' device, contiguous       q (tokens, N, D), ...
    heads       N a multiple of Nkv; K as wide as Q; K and V alike but for their width
    lengths     ints of the host, at least 1, one per sequence; they add up to the tokens of the tensor, kv >= q
    blocks      block_size a multiple of 16; ids of the table that are read lie in the cache, and cover the context;
                no block has new tokens of two sequences (sharing what was written before is what prefixes do)
    slots       in the caches, none twice
    INT8 KV     a float32 scale per token, or per token and head, for both caches; none otherwise

Limits of one device's ops (which head_dim, ratio, block sizes) are not here: those of an NPU stand beside their calls.
Ids and slots are read from the device, which waits for it: check before a measurement, not in it. Tensors on torch's
``meta`` device have no values, so those are not read. Knows no torch: asks tensors for shape, dtype and device.

Complexity: O(1) a tensor, O(blocks in use) a table, O(tokens) slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

FLOATS: Final = ("float16", "bfloat16", "float32")
TABLE_DTYPES: Final = ("int32",)
SLOT_DTYPES: Final = ("int32", "int64")
BLOCK_SIZE_UNIT: Final = 16
"""Paged ops of every device (FIA, ATB, FlashAttention as vLLM builds it) want multiples of this or of more."""


class KernelArgumentError(ValueError):
    """An argument that no kernel may be called with."""

    def __init__(self, argument: str, problem: str) -> None:
        super().__init__(f"{argument}: {problem}")
        self.argument = argument
        """Its name in :class:`~.interface.AttentionKernels`, or in the op."""


def check_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    q_lens: Sequence[int],
    kv_lens: Sequence[int],
    scale: float,
    window: int = 0,
    device: str,
) -> None:
    """Packed causal attention. Raises KernelArgumentError."""
    check_query(q, device)
    for argument, tensor in (("k", k), ("v", v)):
        check_tensor(argument, tensor, "(tokens, num_kv_heads, head_dim)", (dtype_of(q),), device)
    _check_heads(q, k, v, "k", "v")
    check_lens("q_lens", q_lens)
    check_lens("kv_lens", kv_lens, batch=len(q_lens))
    _check_total("q_lens", q_lens, "q", q)
    _check_total("kv_lens", kv_lens, "k", k)
    _check_causal("kv_lens", q_lens, kv_lens)
    check_scale(scale)
    check_window(window)


def check_decode(
    q: Tensor, k: Tensor, v: Tensor, *, kv_lens: Sequence[int], scale: float, window: int = 0, device: str
) -> None:
    """Padded attention of one token per sequence. Raises KernelArgumentError."""
    check_query(q, device)
    for argument, tensor in (("k", k), ("v", v)):
        check_tensor(argument, tensor, "(batch, padded tokens, num_kv_heads, head_dim)", (dtype_of(q),), device)
    _check_heads(q, k, v, "k", "v")
    check_lens("kv_lens", kv_lens)
    for argument, tensor in (("q", q), ("k", k)):
        if tensor.shape[0] != len(kv_lens):
            raise KernelArgumentError(
                argument,
                f"has {tensor.shape[0]} rows for {len(kv_lens)} kv_lens; decode takes one row per sequence",
            )
    for i, length in enumerate(kv_lens):
        if length > k.shape[1]:
            raise KernelArgumentError(
                "kv_lens",
                f"kv_lens[{i}] is {length}, but k has {k.shape[1]} tokens a row; lengths do not count padding",
            )
    check_scale(scale)
    check_window(window)


def check_paged_prefill(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    block_table: Tensor,
    q_lens: Sequence[int],
    context_lens: Sequence[int],
    scale: float,
    window: int = 0,
    device: str,
) -> None:
    """Packed causal attention over blocks. Raises KernelArgumentError."""
    check_query(q, device)
    check_caches(k_cache, v_cache, (dtype_of(q),), device)
    _check_heads(q, k_cache, v_cache, "k_cache", "v_cache")
    check_lens("q_lens", q_lens)
    check_lens("context_lens", context_lens, batch=len(q_lens))
    _check_total("q_lens", q_lens, "q", q)
    _check_causal("context_lens", q_lens, context_lens)
    check_block_table(block_table, k_cache, q_lens, context_lens, device)
    check_scale(scale)
    check_window(window)


def check_paged_decode(
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
    device: str,
) -> None:
    """Attention of one token per sequence over blocks, of q's dtype or INT8. Raises KernelArgumentError."""
    check_query(q, device)
    check_caches(k_cache, v_cache, (dtype_of(q), "int8"), device)
    _check_heads(q, k_cache, v_cache, "k_cache", "v_cache")
    check_kv_scales(k_cache, k_scale, v_scale, device)
    check_lens("context_lens", context_lens)
    if q.shape[0] != len(context_lens):
        raise KernelArgumentError(
            "q", f"has {q.shape[0]} tokens for {len(context_lens)} context_lens; decode takes one token per sequence"
        )
    check_block_table(block_table, k_cache, [1] * len(context_lens), context_lens, device)
    check_scale(scale)
    check_window(window)


def check_write_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *, slots: Tensor, device: str) -> None:
    """New keys and values to slots of the caches. Raises KernelArgumentError."""
    check_caches(k_cache, v_cache, (*FLOATS, "int8"), device)
    for argument, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        check_tensor(argument, new, "(tokens, num_kv_heads, head_dim)", (dtype_of(cache),), device)
        if new.shape[1:] != cache.shape[2:]:
            raise KernelArgumentError(
                argument,
                f"has (num_kv_heads, head_dim) {tuple(new.shape[1:])}; give its cache's, {tuple(cache.shape[2:])}",
            )
    if k.shape[0] != v.shape[0]:
        raise KernelArgumentError("v", f"has {v.shape[0]} tokens, but k has {k.shape[0]}; give V of the same tokens")
    check_slots(slots, k.shape[0], k_cache, device)


def check_query(q: Tensor, device: str) -> None:
    """Packed queries, (tokens, num_heads, head_dim). Raises KernelArgumentError."""
    check_tensor("q", q, "(tokens, num_heads, head_dim)", FLOATS, device)


def check_tensor(argument: str, tensor: Any, layout: str, dtypes: Sequence[str], device: str) -> None:
    """One tensor: a dimension for each name of *layout*, none empty, one of *dtypes*, on *device*, contiguous.

    Raises KernelArgumentError.
    """
    if not hasattr(tensor, "is_contiguous"):
        raise KernelArgumentError(argument, f"is a {type(tensor).__name__}; give a torch tensor {layout}")
    if len(tensor.shape) != layout.rstrip(",)").count(",") + 1:
        raise KernelArgumentError(argument, f"has {len(tensor.shape)} dimensions {tuple(tensor.shape)}; give {layout}")
    if 0 in tensor.shape:
        raise KernelArgumentError(argument, f"is empty, {tuple(tensor.shape)}; leave out a call that has nothing to do")
    if dtype_of(tensor) not in dtypes:
        raise KernelArgumentError(argument, f"is {dtype_of(tensor)}; give {' or '.join(dtypes)}")
    if tensor.device.type not in (device, "meta"):
        raise KernelArgumentError(
            argument, f"is on {tensor.device.type}, the kernels run on {device}; move it with .to({device!r})"
        )
    if not tensor.is_contiguous():
        raise KernelArgumentError(
            argument,
            f"is not contiguous, strides {tuple(tensor.stride())}; call .contiguous() before, not in the kernel",
        )


def check_caches(k_cache: Tensor, v_cache: Tensor, dtypes: Sequence[str], device: str) -> None:
    """Two caches with blocks of one size. Raises KernelArgumentError."""
    layout = "(blocks, block_size, num_kv_heads, head_dim)"
    check_tensor("k_cache", k_cache, layout, dtypes, device)
    check_tensor("v_cache", v_cache, layout, (dtype_of(k_cache),), device)
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise KernelArgumentError(
            "v_cache",
            f"has (blocks, block_size, num_kv_heads) {tuple(v_cache.shape[:3])}, but k_cache has "
            f"{tuple(k_cache.shape[:3])}; make both of one size",
        )
    if k_cache.shape[1] % BLOCK_SIZE_UNIT:
        raise KernelArgumentError(
            "k_cache", f"has a block_size of {k_cache.shape[1]}; give a multiple of {BLOCK_SIZE_UNIT}, as 16, 32 or 128"
        )


def check_kv_scales(k_cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, device: str) -> None:
    """Scales for caches of INT8, and for no others. Raises KernelArgumentError."""
    blocks, block_size, num_kv_heads = k_cache.shape[:3]
    for argument, scales in (("k_scale", k_scale), ("v_scale", v_scale)):
        if dtype_of(k_cache) != "int8":
            if scales is not None:
                raise KernelArgumentError(argument, f"is given, but the caches are {dtype_of(k_cache)}; leave it out")
            continue
        if scales is None:
            raise KernelArgumentError(argument, "is missing; an INT8 cache is nothing without its scales")
        per_head = len(scales.shape) == 3
        layout = "(blocks, num_kv_heads, block_size)" if per_head else "(blocks, block_size)"
        check_tensor(argument, scales, layout, ("float32",), device)
        wanted = (blocks, num_kv_heads, block_size) if per_head else (blocks, block_size)
        if tuple(scales.shape) != wanted:
            raise KernelArgumentError(argument, f"is {tuple(scales.shape)}; for this cache {layout} is {wanted}")
    if k_scale is not None and v_scale is not None and len(k_scale.shape) != len(v_scale.shape):
        raise KernelArgumentError(
            "v_scale", "is not of k_scale's kind; give both per token, or both per token and head"
        )


def check_lens(argument: str, lens: Sequence[int], *, batch: int | None = None) -> None:
    """Lengths: ints of the host, at least 1, *batch* of them. Raises KernelArgumentError."""
    if not isinstance(lens, (list, tuple)):
        raise KernelArgumentError(argument, f"is a {type(lens).__name__}; give a list of ints (.tolist() makes one)")
    if not lens:
        raise KernelArgumentError(argument, "is empty; give the length of each sequence")
    for i, length in enumerate(lens):
        if isinstance(length, bool) or not isinstance(length, int):
            raise KernelArgumentError(
                argument, f"{argument}[{i}] is {length!r}, a {type(length).__name__}; give an int"
            )
        if length < 1:
            raise KernelArgumentError(argument, f"{argument}[{i}] is {length}; a sequence has at least 1 token")
    if batch is not None and len(lens) != batch:
        raise KernelArgumentError(argument, f"has {len(lens)} lengths for {batch} sequences; give one for each")


def check_block_table(
    block_table: Tensor, cache: Tensor, q_lens: Sequence[int], context_lens: Sequence[int], device: str
) -> None:
    """A row of block ids per sequence. Ids after its context are not looked at. Raises KernelArgumentError."""
    check_tensor("block_table", block_table, "(batch, blocks of the longest)", TABLE_DTYPES, device)
    num_blocks, block_size = cache.shape[:2]
    rows, columns = block_table.shape
    if rows != len(context_lens):
        raise KernelArgumentError(
            "block_table", f"has {rows} rows for {len(context_lens)} sequences; give one for each"
        )
    for i, length in enumerate(context_lens):
        if length > columns * block_size:
            raise KernelArgumentError(
                "block_table",
                f"has {columns} columns of {block_size} tokens, but context_lens[{i}] is {length}; "
                f"give at least {-(-length // block_size)} columns",
            )
    if block_table.device.type == "meta":
        return
    writer: dict[int, int] = {}
    lens = zip(q_lens, context_lens, strict=True)
    for i, (row, (q_len, length)) in enumerate(zip(block_table.tolist(), lens, strict=True)):
        first_new = (length - q_len) // block_size
        for column, block in enumerate(islice(row, -(-length // block_size))):
            if not 0 <= block < num_blocks:
                raise KernelArgumentError(
                    "block_table",
                    f"block_table[{i}, {column}] is {block}, outside the cache's blocks 0..{num_blocks - 1}; "
                    "a kernel would read memory that is not the cache's",
                )
            if column >= first_new and writer.setdefault(block, i) != i:
                raise KernelArgumentError(
                    "block_table",
                    f"block {block} holds new tokens of sequences {writer[block]} and {i}; give each its own block",
                )


def check_slots(slots: Tensor, tokens: int, cache: Tensor, device: str) -> None:
    """A slot for each new token, none twice. Raises KernelArgumentError."""
    check_tensor("slots", slots, "(tokens,)", SLOT_DTYPES, device)
    if slots.shape[0] != tokens:
        raise KernelArgumentError("slots", f"has {slots.shape[0]} slots for {tokens} tokens; give one for each")
    if slots.device.type == "meta":
        return
    num_slots = cache.shape[0] * cache.shape[1]
    token_of: dict[int, int] = {}
    for i, slot in enumerate(slots.tolist()):
        if not 0 <= slot < num_slots:
            raise KernelArgumentError(
                "slots",
                f"slots[{i}] is {slot}, outside 0..{num_slots - 1}; a slot is block * block_size + offset, and padding "
                "tokens are left out",
            )
        if token_of.setdefault(slot, i) != i:
            raise KernelArgumentError(
                "slots", f"slots[{token_of[slot]}] and slots[{i}] are both {slot}; which one stays is chance"
            )


def check_scale(scale: float) -> None:
    """What scores are multiplied with. Raises KernelArgumentError."""
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise KernelArgumentError("scale", f"is a {type(scale).__name__}; give a float, as head_dim ** -0.5")
    if not math.isfinite(scale) or scale <= 0:
        raise KernelArgumentError("scale", f"is {scale}; give a finite number above 0, as head_dim ** -0.5")


def check_window(window: int) -> None:
    """Keys that a query sees, its own among them; 0 is all. Raises KernelArgumentError."""
    if isinstance(window, bool) or not isinstance(window, int):
        raise KernelArgumentError("window", f"is a {type(window).__name__}; give an int, 0 for none")
    if window < 0:
        raise KernelArgumentError("window", f"is {window}; give 0 for no window, or the keys that a query sees")


def dtype_of(tensor: Tensor) -> str:
    """torch's name of its dtype, without ``torch.``."""
    return str(tensor.dtype).removeprefix("torch.")


def _check_heads(q: Tensor, k: Tensor, v: Tensor, k_name: str, v_name: str) -> None:
    """Of q (..., N, D) and k, v (..., Nkv, D or Dv)."""
    num_heads, num_kv_heads = q.shape[-2], k.shape[-2]
    if num_heads % num_kv_heads:
        raise KernelArgumentError(
            k_name,
            f"has {num_kv_heads} KV heads, which do not divide q's {num_heads}; heads of q share KV heads evenly",
        )
    if k.shape[-1] != q.shape[-1]:
        raise KernelArgumentError(k_name, f"has head_dim {k.shape[-1]}, but q has {q.shape[-1]}; give K as wide as Q")
    if v.shape[:-1] != k.shape[:-1]:
        raise KernelArgumentError(
            v_name,
            f"is {tuple(v.shape)}, but {k_name} is {tuple(k.shape)}; give V of the same tokens and heads",
        )


def _check_total(lens_name: str, lens: Sequence[int], argument: str, tensor: Tensor) -> None:
    if sum(lens) != tensor.shape[0]:
        raise KernelArgumentError(
            lens_name,
            f"add up to {sum(lens)}, but {argument} has {tensor.shape[0]} tokens; give plain lengths, not sums",
        )


def _check_causal(argument: str, q_lens: Sequence[int], kv_lens: Sequence[int]) -> None:
    for i, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
        if kv_len < q_len:
            raise KernelArgumentError(
                argument,
                f"{argument}[{i}] is {kv_len}, less than its q_len of {q_len}; it counts the new tokens too",
            )
