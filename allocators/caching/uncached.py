"""Caching off (``PYTORCH_NO_NPU_MEMORY_CACHING=1``): each tensor is a driver call of its own.

It is freed at once, after the device has stopped; none of the statistics move, and snapshots show nothing.
"""

from __future__ import annotations

from hbmtwin.allocators.caching.blocks import ALLOCATED, Block, BlockPool
from hbmtwin.allocators.caching.segments import Segments
from hbmtwin.allocators.driver import ALLOC_UNIT
from hbmtwin.allocators.stats import LARGE


class UncachedBlocks:
    """Blocks that are whole driver allocations."""

    def __init__(self, segments: Segments) -> None:
        self._s = segments
        self._pool = BlockPool(LARGE)

    def malloc(self, size: int, stream: int) -> Block | None:
        """A block of *size* bytes and the pad, in whole units of the driver; None where the driver refuses."""
        size = -(-(size + self._s.rules.pad) // ALLOC_UNIT) * ALLOC_UNIT
        self._s.work.driver_calls += 1
        address = self._s.driver.alloc(size)
        return None if address is None else Block(address, size, self._pool.home(stream), ALLOCATED)

    def free(self, block: Block) -> None:
        """Give a block back to the driver."""
        self._s.synchronize_device()
        self._s.work.driver_calls += 1
        self._s.driver.free(block.address)
