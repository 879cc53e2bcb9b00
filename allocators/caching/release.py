"""Giving cached memory back to the driver: what a request does before it fails, and what ``empty_cache`` does.

A free block that is a part of a split segment cannot go back: that is the fragmentation which torch counts as
``inactive_split``.
"""

from __future__ import annotations

from bisect import bisect_left

from hbmtwin.allocators.caching.blocks import Block, BlockPool, FreeBlocks
from hbmtwin.allocators.caching.expandable import ExpandableSegments
from hbmtwin.allocators.caching.segments import Segments
from hbmtwin.allocators.free_lists import ADDRESS_BITS
from hbmtwin.allocators.stats import UNLIMITED


def release_available_cached_blocks(segments: Segments, home: FreeBlocks, rounded: int, max_split_size: int) -> bool:
    """Release one block of the oversize range that is large enough, else the largest ones until they add up to that.

    Blocks released stay released though their sum is not enough. O(blocks released log n).
    """
    if max_split_size == UNLIMITED:
        return False
    if segments.rules.synchronizes_device:
        segments.synchronize_device()
    # PyTorch leaves expandable blocks out; torch_npu takes them for ordinary ones, and release_segment stops there.
    skips_expandable = segments.rules.flavour == "torch_cuda"
    wanted = max(rounded, max_split_size)
    i = bisect_left(home.keys, wanted << ADDRESS_BITS)
    if i < len(home.blocks) and not (skips_expandable and home.blocks[i].expandable is not None):
        segments.release_segment(home.blocks[i])
        return True
    released = 0
    for block in reversed(home.blocks[:i]):
        if released >= wanted or block.size < max_split_size:
            break
        if not (skips_expandable and block.expandable is not None):
            released += block.size
            segments.release_segment(block)
    return released >= wanted


def release_blocks(
    segments: Segments, expandable: ExpandableSegments, pool: BlockPool, *, keep_pages: bool = False
) -> None:
    """Release every free block of a pool that is a whole segment, then unmap the free pages of expandable ones.

    In order of stream, size and address. O(free blocks).
    """
    to_unmap: list[Block] = []
    for home in pool.homes():
        for block in list(home.blocks):
            if block.expandable is not None:
                to_unmap.append(block)
            elif not block.is_split:
                segments.release_segment(block)
    for block in to_unmap:
        expandable.unmap(block, keep_pages=keep_pages)
    if not keep_pages:
        expandable.destroy_cached_pages(pool)
