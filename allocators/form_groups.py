"""How the layers of a model become groups with pages of one size, as vLLM's ``get_kv_cache_groups`` forms them.

::

    layers      f w w w w w f w w w w w        f: full, 2,048 bytes a token; w: window, 1,024 bytes a token
    pages       16 tokens of f = 32 KiB        so a block of w has 32 tokens: its page is as large
    buckets     f: 2 layers   w: 10 layers     a group is as long as the smallest: 2, hence 1 + 5 groups
    groups      0: f0 f6   1: w1 w7   2: w2 w8   ...   layer i of a bucket goes to its group i mod 5

Releases read: vLLM 0.27 (``kv_cache_utils``), and vllm-ascend for its own block size of models with Mamba layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm
from typing import NamedTuple

from hbmtwin.allocators.kv_groups import Grouping, KVGroup, LayerKV, MambaMode

ASCEND_BLOCK = 128
"""Tokens that the paged kernels of A2 and A3 take as a block."""


class _Page(NamedTuple):
    """A layer as it is grouped: what is equal shares a bucket."""

    group: KVGroup
    """Of this layer alone."""
    bytes: int


def form_groups(
    layers: Sequence[LayerKV],
    *,
    block_size: int,
    max_model_len: int,
    enable_prefix_caching: bool,
    mamba_mode: MambaMode = "none",
    mamba_chunk: int = 1,
    kernel_block_size: int = 16,
    speculative_blocks: int = 0,
    strided_pages: bool = False,
    ascend: bool = False,
) -> Grouping:
    """The groups of a model whose layers are these, in the order of the model. O(layers).

    *block_size* is that of attention; beside Mamba layers it is raised until its page holds a state, in steps of
    *kernel_block_size*. Without prefix caching Mamba's mode is ``none``; with it, ``none`` becomes ``align``, since
    whether a model can do ``all`` is not known here (there *mamba_chunk*, tokens of the model's own chunk, divides the
    block too). *strided_pages*: the attention backend reads pages with a gap behind, so that smaller ones may be
    padded. *ascend*: the rules of vllm-ascend for Mamba layers.
    Raise ValueError, which says what to change, where vLLM would not start.
    """
    if not layers:
        raise ValueError("a model without layers that keep KV has no groups")
    attention = [layer for layer in layers if layer.kind != "mamba"]
    states = [layer for layer in layers if layer.kind == "mamba"]
    mode: MambaMode = "none"
    if enable_prefix_caching:
        mode = "align" if mamba_mode == "none" else mamba_mode
    least_page = 0
    if attention and states:
        if ascend:
            block_size, least_page = _ascend_block(attention, states)
        else:
            unit = lcm(kernel_block_size, mamba_chunk) if mode == "all" else kernel_block_size
            most, token_bytes = max(s.state_bytes for s in states), max(layer.token_bytes for layer in attention)
            block_size = max(block_size, unit * -(-most // (unit * token_bytes)))
    by_block = mode == "align" or (mode == "all" and not ascend)
    state = KVGroup(
        kind="mamba",
        block_size=block_size if by_block else max_model_len,
        mamba_mode=mode,
        speculative_blocks=speculative_blocks,
    )
    pages = []
    for layer in layers:
        if layer.kind == "mamba":
            pages.append(_Page(replace(state, state_bytes=layer.state_bytes), layer.state_bytes))
        else:
            group = KVGroup(kind=layer.kind, block_size=block_size, token_bytes=layer.token_bytes, window=layer.window)
            pages.append(_Page(group, block_size * layer.token_bytes))
    if len({(page.group.kind, page.group.window) for page in pages}) == 1:
        return _one_type(pages)
    return _grouped(_equal_pages(pages, least_page, strided_pages or bool(least_page)))


def _ascend_block(attention: Sequence[LayerKV], states: Sequence[LayerKV]) -> tuple[int, int]:
    """Block size and page of a model with Mamba layers on Ascend, whose cache tensors must be contiguous.

    The state of the recurrence lies where K lies of a block, exactly; the convolution's comes behind K and V.
    """
    k_bytes, token_bytes = attention[0].k_bytes, attention[0].token_bytes
    conv_bytes = states[0].conv_bytes
    recurrent_bytes = states[0].state_bytes - conv_bytes
    if not k_bytes:
        raise ValueError("on Ascend, attention beside Mamba layers needs to know its K: give the layers' k_bytes")
    block_size = ASCEND_BLOCK * -(-recurrent_bytes // (ASCEND_BLOCK * k_bytes))
    if k_bytes * block_size != recurrent_bytes:
        raise ValueError(
            f"vllm-ascend refuses this model: a recurrent state of {recurrent_bytes} bytes must fill the K of a block, "
            f"and {block_size} tokens of {k_bytes} bytes are {k_bytes * block_size}; change tensor_parallel_size or "
            "the state's dtype, so that they are equal"
        )
    return block_size, block_size * token_bytes + conv_bytes


def _one_type(pages: Sequence[_Page]) -> Grouping:
    """All layers in one group. Where their sizes differ, they count as one layer of all bytes."""
    if len(set(pages)) == 1:
        page = pages[0]
        return Grouping(
            groups=(replace(page.group, num_layers=len(pages)),), group_length=len(pages), page_bytes=page.bytes
        )
    group = replace(
        pages[0].group,
        token_bytes=sum(page.group.token_bytes for page in pages),
        state_bytes=sum(page.group.state_bytes for page in pages),
    )
    return Grouping(groups=(group,), group_length=1, page_bytes=sum(page.bytes for page in pages))


def _equal_pages(pages: Sequence[_Page], least: int, padded: bool) -> list[_Page]:
    """Pages of the size of the largest: more tokens a block where that divides evenly, states padded."""
    largest = max(least, *(page.bytes for page in pages))
    equal = []
    for page in pages:
        group = page.group
        if group.kind != "mamba" and page.bytes != largest:
            if largest % page.bytes == 0:
                group = replace(group, block_size=group.block_size * (largest // page.bytes))
            elif not padded:
                raise ValueError(
                    f"pages cannot be made equal: {group.block_size} tokens of a {group.kind} layer are {page.bytes} "
                    f"bytes, which do not divide the largest page of {largest}; choose dtypes or head sizes that "
                    "divide, a backend that reads strided pages, or disable_hybrid_kv_cache_manager"
                )
        equal.append(_Page(group, largest))
    return equal


def _grouped(pages: Sequence[_Page]) -> Grouping:
    """Buckets of equal layers cut to groups of one length; missing layers are padding."""
    buckets: dict[_Page, int] = {}
    for page in pages:
        buckets[page] = buckets.get(page, 0) + 1
    length, most = min(buckets.values()), max(buckets.values())
    if most < 1.5 * length:
        length = most
    groups = []
    for page, layers in buckets.items():
        count = -(-layers // length)
        groups += [replace(page.group, num_layers=len(range(index, layers, count))) for index in range(count)]
    return Grouping(groups=tuple(groups), group_length=length, page_bytes=pages[0].bytes)
