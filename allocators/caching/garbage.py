"""Garbage collection: old free segments are released before the driver is asked for more.

It needs a cap and a threshold, and runs only when a request missed the cache. The age of a free block is how many
searches its pool has seen since the block came into it.
"""

from __future__ import annotations

from hbmtwin.allocators.caching.blocks import Block, BlockPool
from hbmtwin.allocators.caching.segments import Segments


def collect_garbage(segments: Segments, large_pool: BlockPool, limit_bytes: int) -> None:
    """Release whole free segments of the default large pool, the oldest first, until at most *limit_bytes* are held.

    A pass releases all that are at least as old as the average of what is left, and does not stop at the limit.
    O(free blocks x passes).
    """
    held = segments.total_allocated_memory
    if held <= limit_bytes:
        return
    target = held - limit_bytes
    # PyTorch counts expandable blocks in the average and does not release them; torch_npu refuses the two together.
    candidates = [block for home in large_pool.homes() for block in home.blocks if not block.is_split]
    total_age = sum(_age(block, large_pool) for block in candidates)
    if not candidates:
        return
    if segments.rules.synchronizes_device:
        segments.synchronize_device()
    reclaimed, released = 0, True
    while reclaimed < target and released and candidates:
        threshold = total_age / len(candidates)
        left = []
        for block in candidates:
            if block.expandable is None and _age(block, large_pool) >= threshold:
                reclaimed += block.size
                total_age -= _age(block, large_pool)
                segments.release_segment(block)
            else:
                left.append(block)
        released = len(left) < len(candidates)
        candidates = left


def _age(block: Block, pool: BlockPool) -> int:
    return pool.searches - block.age_base
