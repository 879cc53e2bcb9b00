"""How many blocks of a planned pool there are once its tensors lie in whole segments of the caching allocator.

::

    plan      | tensor | tensor | tensor |                    bytes of KV, divided by the block's
    segments  | tensor | tensor |..| tensor |........|        each tensor padded and rounded, segments whole
"""

from __future__ import annotations

from collections import Counter

from hbmtwin.allocators.caching.sizes import NPU_PAD, allocation_size, round_size
from hbmtwin.sim.layer_groups import BlockPool


def placed_blocks(pool: BlockPool, num_blocks: int, kv_bytes: int) -> int:
    """The most blocks, at most *num_blocks*, whose tensors' segments fit in *kv_bytes*.

    On the safe side: a segment that several tensors share is taken to hold them and nothing else. O(blocks that fall
    away, times the kinds of tensors).
    """
    block_tensors = Counter(pool.block_tensors).items()
    for blocks in range(num_blocks, 0, -1):
        if sum(count * _segment_share(blocks * size) for size, count in block_tensors) <= kv_bytes:
            return blocks
    return 0


def _segment_share(size: int) -> int:
    """Bytes of segments that a tensor of *size* takes, with the pad of torch_npu; 0 for none."""
    if size == 0:
        return 0
    rounded = round_size(size, NPU_PAD)
    segment = allocation_size(rounded)
    return segment // (segment // rounded)
