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

from functools import lru_cache

from hbmtwin.allocators.caching.allocator import CachingAllocator
from hbmtwin.allocators.caching.config import CachingConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.records import Tag
from hbmtwin.kernels.records import ModelShape
from hbmtwin.kernels.weights import weight_tensors

ROOM_BYTES = 1 << 46
"""More than any rank holds: whether the weights fit is another question."""


@lru_cache(maxsize=256)
def loaded_weight_bytes(
    model: ModelShape,
    vendor: str,
    tensor_parallel_size: int = 1,
    *,
    expert_ranks: int = 1,
    data_parallel_size: int = 1,
) -> int:
    """Bytes of the blocks that the weights of one rank take in the allocator of that vendor's torch; at least their
    sum. The other arguments are those of :func:`~hbmtwin.kernels.weights.weight_tensors`.

    O(tensors), a few ms for a large model; once for each split. Raise ValueError when the model cannot be split so.
    """
    config = CachingConfig(flavour="torch_npu" if vendor == "ascend" else "torch_cuda")
    allocator = CachingAllocator(HbmDriver(ROOM_BYTES), config)
    tensors = weight_tensors(
        model, tensor_parallel_size, expert_ranks=expert_ranks, data_parallel_size=data_parallel_size
    )
    for _, size in tensors:
        if size:  # a shape of which only the KV is told has matrices without elements
            allocator.malloc(size, tag=Tag.WEIGHT)
    return allocator.stats()["allocated_bytes.all.current"]
