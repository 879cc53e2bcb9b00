"""An offset that only rises through one region taken at start, as the simplest pool managers have it.

::

    driver   | ... | region of limit_bytes, never given back                      | ... |
                   | live | dead | live | live | dead | never used                |
                                                      ^ offset

A request is rounded up to the alignment and lies at the offset, which moves behind it; it fails when less than that is
left above the offset. A free only counts: the bytes are dead, and no request ever gets them again (the feature
``monotonic``). What is dead stays visible:

- in the books, ``pool_free`` is what lies above the offset, all that a request can still get, and dead bytes are the
  rest of what is reserved and not live (external);
- in the statistics, dead runs are the inactive split blocks;
- in the facts of a failure, dead bytes count as cached and free, and neighbouring ones as one run; where such a run
  would have been large enough, ``rule`` says that it is never reused, and the cause is ``allocator_rule``.

Complexity: malloc, free and usage O(1), walk O(live blocks * log).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, Final

from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import AllocatorUsage, Block, Tag
from hbmtwin.allocators.region import RegionAllocator, RegionBlock, check_region, free_view, live_view
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import (
    ALLOCATED_BYTES,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    LARGE,
    REQUESTED_BYTES,
)

RULE: Final = "a free run is large enough, but the offset only rises: freed bytes are never given again"


@dataclass(frozen=True, slots=True)
class BumpConfig:
    """Settings of :class:`BumpAllocator`. Raises ValueError when no region can be made of them."""

    limit_bytes: int
    """Size of the region, rounded down to the alignment."""
    alignment_bytes: int = 512
    """Unit of sizes, and of addresses counted from the region's start; a power of two."""

    def __post_init__(self) -> None:
        check_region(self.limit_bytes, self.alignment_bytes)


@device_allocators.register("bump")
class BumpAllocator(RegionAllocator[RegionBlock]):
    """One region of the driver taken at start, an offset inside that only rises: nothing freed is ever reused.

    Raises OutOfMemory at construction when the driver cannot give the region.
    """

    Config = BumpConfig
    name: ClassVar[str] = "bump"
    features: ClassVar[frozenset[str]] = frozenset({"monotonic", "region", "statistics"})

    def __init__(self, driver: Driver, config: BumpConfig) -> None:
        super().__init__(driver, limit_bytes=config.limit_bytes, alignment_bytes=config.alignment_bytes)
        self.config = config
        address, size = self._region
        self._offset = address
        """Address of the next block."""
        self._end = address + size
        # Dead runs, merged: end by start, and start by end. They only grow.
        self._dead: dict[int, int] = {}
        self._dead_to: dict[int, int] = {}
        self._largest_dead = 0

    def usage(self) -> AllocatorUsage:
        """The books, kept incrementally; the largest free run may be a dead one, which ``pool_free`` is not. O(1)."""
        return super().usage()._replace(pool_free=self._end - self._offset)

    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(n log n)."""
        start, size = self._region
        row = [len(self._live), 0, 0, 1, size, 0, 0]
        dead = {}
        end = start
        for block in self._blocks():
            assert block.address >= end, f"overlap at {block.address:#x}"
            if block.address > end:
                dead[end] = block.address
            end = block.address + block.size
            assert block.size == self._rounded(block.requested), f"block at {block.address:#x}: size"
            row[ALLOCATED_BYTES] += block.size
            row[REQUESTED_BYTES] += block.requested
        assert end <= self._offset <= self._end, "blocks lie below the offset, and that in the region"
        if end < self._offset:
            dead[end] = self._offset
        assert self._dead == dead, "what is not live below the offset is dead"
        assert self._dead_to == {end: start for start, end in dead.items()}, "dead runs by their ends"
        sizes = [end - start for start, end in dead.items()]
        assert self._largest_dead == max(sizes, default=0), "largest dead run"
        row[INACTIVE_SPLIT] = len(dead)
        row[INACTIVE_SPLIT_BYTES] = sum(sizes)
        assert self.grid.current[LARGE][: len(row)] == row, "books of the region"
        self._check_tags()

    # -- place and give back ---------------------------------------------------------------------------------------

    def _place(self, size: int, stream: int, tag: Tag, owner: int) -> RegionBlock:
        rounded = self._rounded(size)
        if rounded > self._end - self._offset:
            self.grid.num_ooms += 1
            rule = RULE if rounded <= self._largest_free() else ""
            raise OutOfMemory(self._facts(size, stream, tag, owner, rule))
        block = RegionBlock(self._offset, rounded, stream)
        self._offset += rounded
        self.grid.malloc(LARGE, rounded, size)
        return block

    def _give_back(self, block: RegionBlock) -> None:
        """Count *block* as dead; dead neighbours are one run."""
        self.grid.free(LARGE, block.size, block.requested)
        runs = len(self._dead)
        end = block.address + block.size
        start = self._dead_to.pop(block.address, block.address)
        end = self._dead.pop(end, end)
        self._dead[start] = end
        self._dead_to[end] = start
        self._largest_dead = max(self._largest_dead, end - start)
        self.grid.inactive_split(LARGE, len(self._dead) - runs, block.size)

    # -- what is there ---------------------------------------------------------------------------------------------

    def _blocks(self) -> list[RegionBlock]:
        """Live blocks in address order."""
        return sorted(self._live.values(), key=attrgetter("address"))

    def _views(self) -> Iterator[Block]:
        end = self._region[0]
        for block in self._blocks():
            if block.address > end:
                yield free_view(end, block.address - end)
            yield live_view(block)
            end = block.address + block.size
        if self._end > end:
            yield free_view(end, self._end - end)

    def _largest_free(self) -> int:
        # The last run may begin below the offset, with dead bytes, and reaches to the region's end.
        last = self._dead_to.get(self._offset, self._offset)
        return max(self._largest_dead, self._end - last)
