"""One region taken at start, cut into blocks that are linked in address order.

::

    driver   | ... | region of limit_bytes, never given back                      | ... |
                   | allocated | free | allocated | free                          |

A request is rounded up to the alignment and goes to the best fit (smallest block that is large enough, lowest address
among equals) or the first fit (lowest address that is large enough). What is over stays a free block; a freed block
merges with free neighbours at once, so that the largest free run is always known.

Complexity, n free blocks: malloc O(log n) by best fit and O(n) by first fit, free O(log n), usage O(1) by best fit and
O(n) by first fit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from hbmtwin.allocators.base import BlockAllocator
from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.free_lists import ByAddress, BySize, FreeList, LinkedBlock
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.records import Block, Segment, Tag
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import (
    ALLOCATED_BYTES,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    LARGE,
    REQUESTED_BYTES,
    RESERVED_BYTES,
)

Fit = Literal["best", "first"]
_FITS: dict[Fit, type[BySize[LinkedBlock]] | type[ByAddress]] = {"best": BySize, "first": ByAddress}


@dataclass(frozen=True, slots=True)
class PooledConfig:
    """Settings of :class:`PooledAllocator`."""

    limit_bytes: int
    """Size of the region, rounded down to the alignment."""
    fit: Fit = "best"
    alignment: int = 512
    """Unit of sizes, and of addresses counted from the region's start; a power of two."""

    def __post_init__(self) -> None:
        if self.fit not in _FITS:
            raise ValueError(f"fit must be one of {', '.join(_FITS)}, not {self.fit!r}")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"alignment must be a power of two, not {self.alignment}")
        if self.limit_bytes < self.alignment:
            raise ValueError(f"limit_bytes must be at least the alignment {self.alignment}, not {self.limit_bytes}")


@device_allocators.register("pooled")
class PooledAllocator(BlockAllocator[LinkedBlock]):
    """One region of the driver taken at start, a linked free list inside: best or first fit.

    Raises OutOfMemory at construction when the driver cannot give the region. In the statistics the region is one
    segment of the large pool.
    """

    Config = PooledConfig
    name: ClassVar[str] = "pooled"
    features: ClassVar[frozenset[str]] = frozenset({"region", "statistics"})

    def __init__(self, driver: Driver, config: PooledConfig) -> None:
        super().__init__(driver)
        self.config = config
        self._free: FreeList = _FITS[config.fit]()
        size = config.limit_bytes // config.alignment * config.alignment
        self.work.driver_calls += 1
        address = driver.alloc(size)
        self._region = (address or 0, size)
        if address is None:
            raise OutOfMemory(self._facts(size, 0, None, -1))
        self.grid.segment_alloc(LARGE, size)
        self._free.put(LinkedBlock(address, size))

    def empty_cache(self) -> None:
        """Nothing to give back: the region stays."""
        if self.observer is not None:
            self.observer("empty_cache", -1, 0, 0, "", None, -1)

    def walk(self) -> Iterator[Segment]:
        """The region as one segment, with its blocks. O(n log n)."""
        address, size = self._region
        yield Segment(address, size, "region", 0, tuple(_view(block) for block in self._blocks()))

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
                assert block.allocated or after.allocated, f"free neighbours at {block.address:#x}"
        assert end == self._region[0] + size, "blocks tile the region"
        assert len(blocks) == len(live) + len(free), "every block is in the region"
        assert self.grid.current[LARGE][: len(row)] == row, "books of the region"
        self._free.check()
        self._check_tags()

    # -- place and give back ---------------------------------------------------------------------------------------

    def _place(self, size: int, stream: int, tag: Tag, owner: int) -> LinkedBlock:
        rounded = self._rounded(size)
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
        """Make *block* free; it absorbs its free neighbours."""
        block.allocated = False
        self.grid.free(LARGE, block.size, block.requested)
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

    # -- what is there ---------------------------------------------------------------------------------------------

    def _blocks(self) -> list[LinkedBlock]:
        """All blocks in address order."""
        return sorted([*self._live.values(), *self._free.blocks], key=lambda block: block.address)

    def _largest_free(self) -> int:
        return self._free.largest()

    def _rounded(self, size: int) -> int:
        unit = self.config.alignment
        return -(-size // unit) * unit

    def _facts(self, size: int, stream: int, tag: Tag | None, owner: int) -> OomFacts:
        reserved = self.grid.total(RESERVED_BYTES)
        allocated = self.grid.total(ALLOCATED_BYTES)
        free, capacity = self.driver.mem_info()
        # The region is all this arena may have: the driver counts only while there is no region yet.
        driver_free = 0 if reserved else free
        return OomFacts(
            allocator=self.name,
            asked_bytes=size,
            need_bytes=self._rounded(size),
            tag=tag,
            owner=owner,
            stream=stream,
            capacity_bytes=capacity,
            limit_bytes=min(capacity, self.config.limit_bytes),
            reserved_bytes=reserved,
            allocated_bytes=allocated,
            requested_bytes=self.grid.total(REQUESTED_BYTES),
            largest_free_bytes=max(driver_free, self._free.largest()),
            cached_free_bytes=reserved - allocated,
            driver_free_bytes=driver_free,
            weights_bytes=self._weights_bytes(),
            owner_bytes=self._owner_bytes(owner),
            tenants_bytes=self.driver.tenants_bytes,
        )


def _view(block: LinkedBlock) -> Block:
    if block.allocated:
        return Block(block.address, block.size, block.requested, "active_allocated", block.tag, block.owner)
    return Block(block.address, block.size, 0, "inactive", None, -1)
