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
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import ALLOCATED_BYTES, LARGE, REQUESTED_BYTES, RESERVED_BYTES

Fit = Literal["best", "first"]
_FITS: dict[Fit, type[BySize] | type[ByAddress]] = {"best": BySize, "first": ByAddress}


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
class PooledAllocator(BlockAllocator):
    """One region of the driver taken at start, a linked free list inside: best or first fit.

    Raises OutOfMemory at construction when the driver cannot give the region. In the statistics the region is one
    segment of the large pool.
    """

    Config = PooledConfig
    name: ClassVar[str] = "pooled"
    features: ClassVar[frozenset[str]] = frozenset({"region", "statistics"})
    pool_names: ClassVar[tuple[str, str]] = ("region", "region")

    def __init__(self, driver: Driver, config: PooledConfig) -> None:
        super().__init__(driver)
        self.config = config
        self._free: FreeList = _FITS[config.fit]()
        size = config.limit_bytes // config.alignment * config.alignment
        self._driver_calls += 1
        address = driver.alloc(size)
        if address is None:
            raise OutOfMemory(self._facts(size, 0, None, -1))
        self._segments[address] = size
        self.grid.segment_alloc(LARGE, size)
        self._free.put(LinkedBlock(address, size, LARGE, 0))

    def empty_cache(self) -> None:
        """Nothing to give back: the region stays."""
        if self.observer is not None:
            self.observer("empty_cache", -1, 0, 0, "", None, -1)

    def _place(self, size: int, stream: int) -> LinkedBlock | None:
        rounded = self._rounded(size)
        block = self._free.take(rounded)
        if block is None:
            self.grid.num_ooms += 1
            return None
        if block.size > rounded:
            return self._cut(block, rounded, self._free)
        if block.prev is not None or block.next is not None:
            self.grid.inactive_split(LARGE, -1, -block.size)
        return block

    def _free_list(self, block: LinkedBlock) -> FreeList:
        return self._free

    def _free_lists(self) -> Iterator[FreeList]:
        yield self._free

    def _rounded(self, size: int) -> int:
        unit = self.config.alignment
        return -(-size // unit) * unit

    def _facts(self, size: int, stream: int, tag: Tag | None, owner: int) -> OomFacts:
        reserved = self.grid.total(RESERVED_BYTES)
        allocated = self.grid.total(ALLOCATED_BYTES)
        free, capacity = self.driver.mem_info()
        # The region is all this arena may have: the driver counts only while there is no region yet.
        driver_free = 0 if self._segments else free
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
