"""How many operations a second the device allocators do on the traffic of a naive KV cache.

64 sequences of 32 layers append one token at a time: per layer K and V, each replaced by a tensor one token larger
(``regrow``: malloc, copy, free); finished sequences leave and new ones come. Run:
``python benchmarks/allocator_ops.py``; one operation is one malloc or one free.
"""

from __future__ import annotations

import random
import time

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Tag

GIB = 1 << 30
TOKEN_BYTES = 8192
TENSORS = 64
SEQUENCES = 64
STEPS = 30


def appends(allocator: DeviceAllocator) -> tuple[int, float]:
    """Run the traffic; return operations and seconds."""
    chance = random.Random(7)
    sequences: list[tuple[int, list[int]]] = []
    operations = 0
    start = time.perf_counter()
    for step in range(STEPS):
        while len(sequences) < SEQUENCES:
            tokens = chance.randint(16, 400)
            handles = [allocator.malloc(tokens * TOKEN_BYTES, tag=Tag.KV, owner=step) for _ in range(TENSORS)]
            sequences.append((tokens, handles))
            operations += TENSORS
        alive = []
        for tokens, handles in sequences:
            if chance.random() < 0.02:
                for handle in handles:
                    allocator.free(handle)
                operations += TENSORS
            else:
                alive.append((tokens + 1, allocator.regrow(handles, (tokens + 1) * TOKEN_BYTES)))
                operations += 2 * TENSORS
        sequences = alive
    return operations, time.perf_counter() - start


def main() -> None:
    """Print one line per allocator."""
    cases: dict[str, DeviceAllocator] = {
        "caching, torch_npu": CachingAllocator(HbmDriver(64 * GIB), CachingConfig(flavour="torch_npu")),
        "caching, torch_cuda": CachingAllocator(HbmDriver(64 * GIB), CachingConfig(flavour="torch_cuda")),
        "pooled, best fit": PooledAllocator(HbmDriver(64 * GIB), PooledConfig(60 * GIB, fit="best")),
        "pooled, first fit": PooledAllocator(HbmDriver(64 * GIB), PooledConfig(60 * GIB, fit="first")),
    }
    for name, allocator in cases.items():
        operations, seconds = appends(allocator)
        free = sum(block.state == "inactive" for segment in allocator.walk() for block in segment.blocks)
        print(f"{name:20} {operations / seconds:9,.0f} ops/s   {operations:,} ops, {free:,} free blocks at the end")


if __name__ == "__main__":
    main()
