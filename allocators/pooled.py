"""One region taken at start, cut into blocks that are linked in address order; free ones are found by a fit.

::

    driver   | ... | region of limit_bytes, never given back                      | ... |
                   | allocated | free | allocated | free | free (deferred only)   |

A request is rounded up to the alignment and goes to the free block that the fit chooses:

- ``best``: the smallest that is large enough, the lowest address among equals;
- ``first``: the lowest address that is large enough;
- ``next``: as first, but the search goes on where the last one ended, round and round;
- ``worst``: the largest, the lowest address among equals.

The request takes the low end of the block, and what is over stays a free block. Under ``immediate`` coalescing a freed
block merges with free neighbours at once, so that the largest free run is always known. Under ``deferred`` it stays
apart, where the next request of its size may find it whole; only when a request finds no room are all free neighbours
merged, in one pass, and the search is made once more. ``empty_cache`` makes that pass as well.

Complexity, n free blocks: malloc and free O(log n) by best and worst fit, and O(RUN + n / RUN) by first and next fit
(RUN is 64); the pass that merges O(n log n), at most once between two frees; usage O(1) by best and worst fit,
O(n / RUN) by first and next fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, Literal

from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.free_lists import ByAddress, BySize, FreeList, LargestFirst, LinkedBlock, NextFit
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Block, Tag
from hbmtwin.allocators.region import RegionAllocator, check_region, free_view, live_view
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import ALLOCATED_BYTES, INACTIVE_SPLIT, INACTIVE_SPLIT_BYTES, LARGE, REQUESTED_BYTES

Fit = Literal["best", "first", "next", "worst"]
Coalescing = Literal["immediate", "deferred"]
_FITS: dict[Fit, type[BySize[LinkedBlock]] | type[ByAddress]] = {
    "best": BySize,
    "first": ByAddress,
    "next": NextFit,
    "worst": LargestFirst,
}
_COALESCING: tuple[Coalescing, ...] = ("immediate", "deferred")


@dataclass(frozen=True, slots=True)
class PooledConfig:
    """Settings of :class:`PooledAllocator`. Raises ValueError for values that it cannot have."""

    limit_bytes: int
    """Size of the region, rounded down to the alignment."""
    fit: Fit = "best"
    coalescing: Coalescing = "immediate"
    """When free neighbours merge: at once, or when a request finds no room."""
    alignment_bytes: int = 512
    """Unit of sizes, and of addresses counted from the region's start; a power of two."""

    def __post_init__(self) -> None:
        if self.fit not in _FITS:
            raise ValueError(f"fit must be one of {', '.join(_FITS)}, not {self.fit!r}")
        if self.coalescing not in _COALESCING:
            raise ValueError(f"coalescing must be one of {', '.join(_COALESCING)}, not {self.coalescing!r}")
        check_region(self.limit_bytes, self.alignment_bytes)


@device_allocators.register("pooled")
class PooledAllocator(RegionAllocator[LinkedBlock]):
    """One region of the driver taken at start, a free list inside: best, first, next or worst fit.

    Raises OutOfMemory at construction when the driver cannot give the region. The largest free block of
    :meth:`usage` is that of the list as it stands; where merging is deferred, neighbours may make up a larger run, and
    the facts of a failure are those after the pass that merges.
    """

    Config = PooledConfig
    name: ClassVar[str] = "pooled"
    features: ClassVar[frozenset[str]] = frozenset({"region", "statistics"})

    def __init__(self, driver: Driver, config: PooledConfig) -> None:
        super().__init__(driver, limit_bytes=config.limit_bytes, alignment_bytes=config.alignment_bytes)
        self.config = config
        self._free: FreeList = _FITS[config.fit]()
        self._free.put(LinkedBlock(*self._region))
        self._deferred = config.coalescing == "deferred"
        self._unmerged = False
        """Whether there may be free neighbours."""

    def empty_cache(self) -> None:
        """Merge free neighbours; there is nothing to give back, the region stays. O(n log n)."""
        super().empty_cache()
        if self._unmerged:
            self._merge_all()

    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(n log n)."""
        live = set(map(id, self._live.values()))
        free = set(map(id, self._free.blocks))
        end, size = self._region
        row = [len(live), 0, 0, 1, size, 0, 0]
        blocks = self._blocks()
        for block, after in zip(blocks, [*blocks[1:], None], strict=True):
            assert block.next is after, f"links at {block.address:#x}"
            assert block.address == end, f"hole or overlap at {end:#x}"
            assert block.size > 0, f"block at {block.address:#x} is empty"
            end += block.size
            assert block.allocated == (id(block) in live), f"block at {block.address:#x}: live or not"
            assert block.allocated != (id(block) in free), f"block at {block.address:#x}: free or not"
            if block.allocated:
                row[ALLOCATED_BYTES] += block.size
                row[REQUESTED_BYTES] += block.requested
            elif len(blocks) > 1:
                row[INACTIVE_SPLIT] += 1
                row[INACTIVE_SPLIT_BYTES] += block.size
            if after is not None:
                assert after.prev is block, f"links at {block.address:#x}"
                merged = block.allocated or after.allocated
                assert merged or self._unmerged, f"free neighbours at {block.address:#x}"
        assert end == self._region[0] + size, "blocks tile the region"
        assert self._deferred or not self._unmerged, "immediate coalescing leaves nothing to merge"
        assert len(blocks) == len(live) + len(free), "every block is in the region"
        assert self.grid.current[LARGE][: len(row)] == row, "books of the region"
        self._free.check()
        self._check_tags()

    # -- place and give back ---------------------------------------------------------------------------------------

    def _place(self, size: int, stream: int, tag: Tag, owner: int) -> LinkedBlock:
        rounded = self._rounded(size)
        block = self._free.take(rounded)
        if block is None and self._unmerged:
            self._merge_all()
            block = self._free.take(rounded)
        if block is None:
            self.grid.num_ooms += 1
            raise OutOfMemory(self._facts(size, stream, tag, owner))
        if block.size > rounded:
            block = self._cut(block, rounded)
        elif block.prev is not None or block.next is not None:
            self.grid.inactive_split(LARGE, -1, -block.size)
        block.allocated = True
        block.stream = stream
        self.grid.malloc(LARGE, block.size, size)
        return block

    def _cut(self, block: LinkedBlock, size: int) -> LinkedBlock:
        """Split the low *size* bytes off *block*, whose rest is free. Return the new, low block."""
        low = LinkedBlock(block.address, size)
        before = block.prev
        was_split = before is not None or block.next is not None
        if before is not None:
            before.next = low
            low.prev = before
        low.next = block
        block.prev = low
        block.address += size
        block.size -= size
        self._free.put(block)
        if was_split:
            self.grid.inactive_split(LARGE, 0, -size)
        else:
            self.grid.inactive_split(LARGE, 1, block.size)
        return low

    def _give_back(self, block: LinkedBlock) -> None:
        """Make *block* free, and merge it with free neighbours now or later."""
        block.allocated = False
        self.grid.free(LARGE, block.size, block.requested)
        if self._deferred:
            self._keep_apart(block)
        else:
            self._absorb_neighbours(block)

    def _keep_apart(self, block: LinkedBlock) -> None:
        before, after = block.prev, block.next
        self._free.put(block)
        if before is not None or after is not None:
            self.grid.inactive_split(LARGE, 1, block.size)
        if (before is not None and not before.allocated) or (after is not None and not after.allocated):
            self._unmerged = True

    def _absorb_neighbours(self, block: LinkedBlock) -> None:
        count = gained = 0
        before = block.prev
        if before is not None and not before.allocated:
            self._free.drop(before)
            count -= 1
            gained -= before.size
            block.address = before.address
            block.size += before.size
            block.prev = before = before.prev
            if before is not None:
                before.next = block
        after = block.next
        if after is not None and not after.allocated:
            self._free.drop(after)
            count -= 1
            gained -= after.size
            block.size += after.size
            block.next = after = after.next
            if after is not None:
                after.prev = block
        if before is not None or after is not None:
            count += 1
            gained += block.size
        self._free.put(block)
        # One net change, so that the running sums move as torch's do.
        if count or gained:
            self.grid.inactive_split(LARGE, count, gained)

    def _merge_all(self) -> None:
        """Merge every run of free neighbours into the lowest block of it."""
        count = 0
        merged = []
        for block in sorted(self._free.blocks, key=attrgetter("address")):
            before = block.prev
            if before is None or before.allocated:
                merged.append(block)
                continue
            count -= 1
            before.size += block.size
            before.next = after = block.next
            if after is not None:
                after.prev = before
        self._free.fill(merged)
        self._unmerged = False
        if self.grid.current[LARGE][ALLOCATED_BYTES]:
            self.grid.inactive_split(LARGE, count, 0)
        else:  # the region is whole again
            self.grid.inactive_split(LARGE, count - 1, -merged[0].size)

    # -- what is there ---------------------------------------------------------------------------------------------

    def _blocks(self) -> list[LinkedBlock]:
        """All blocks in address order."""
        return sorted([*self._live.values(), *self._free.blocks], key=attrgetter("address"))

    def _views(self) -> Iterator[Block]:
        for block in self._blocks():
            yield live_view(block) if block.allocated else free_view(block.address, block.size)

    def _largest_free(self) -> int:
        return self._free.largest()
