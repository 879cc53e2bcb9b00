"""What loading the weights leaves allocated on a rank, as the engine's boot log says it.

::

    log:  Model loading took 14.25 GiB            Qwen2.5-7B in 16 bit
    14.19 GiB                                     its tensors
     0.06 GiB                                     the caching allocator's blocks: gate_up_proj has 259 MiB, its block
                                                  260, as a rest of at most 1 MiB is never split off

The log reads torch's ``memory_allocated``, which counts blocks. So the tensors are given to the allocator of the twin,
one by one as the engine makes them.
"""

from __future__ import annotations

from collections.abc import Iterable

from hbmtwin.allocators.caching.allocator import CachingAllocator
from hbmtwin.allocators.caching.config import CachingConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.records import Tag

ROOM_BYTES = 1 << 46
"""More than any rank holds: whether the weights fit is another question."""


def loaded_bytes(tensors: Iterable[tuple[str, int]], vendor: str) -> int:
    """Bytes of the blocks that *tensors*, ``(name, bytes)`` in turn, take in the allocator of that vendor's torch.

    At least their sum. O(tensors x log tensors): a few ms for a large model.
    """
    config = CachingConfig(flavour="torch_npu" if vendor == "ascend" else "torch_cuda")
    allocator = CachingAllocator(HbmDriver(ROOM_BYTES), config)
    for _, size in tensors:
        allocator.malloc(size, tag=Tag.WEIGHT)
    return allocator.stats()["allocated_bytes.all.current"]
