"""What the allocators that live in one region share: the range taken at start, its unit, and the facts of a failure.

::

    driver   | ... | region of limit_bytes, never given back                      | ... |

How the region is cut is the policy's. Complexity: taking the region is one call of the driver.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator

from hbmtwin.allocators.base import BlockAllocator, Placed, PlacedT
from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.records import Block, Segment, Tag
from hbmtwin.allocators.stats import ALLOCATED_BYTES, LARGE, REQUESTED_BYTES, RESERVED_BYTES


def check_region(limit_bytes: int, alignment_bytes: int) -> None:
    """Raise ValueError unless a region of *limit_bytes* in units of *alignment_bytes* can be made."""
    if alignment_bytes < 1 or alignment_bytes & (alignment_bytes - 1):
        raise ValueError(f"alignment_bytes must be a power of two, not {alignment_bytes}; 512 is torch's unit")
    if limit_bytes < alignment_bytes:
        raise ValueError(f"limit_bytes must be at least alignment_bytes, {alignment_bytes}, not {limit_bytes}")


class RegionBlock:
    """A block in use that needs to know no neighbours."""

    __slots__ = ("address", "owner", "requested", "size", "stream", "tag")

    def __init__(self, address: int, size: int, stream: int) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        # The caller's, filled when the block is handed out.
        self.requested = 0
        self.tag = Tag.ACTIVATION
        self.owner = -1


class RegionAllocator(BlockAllocator[PlacedT]):
    """One range of the driver, taken at start and kept; sizes and offsets in it are multiples of the alignment.

    *limit_bytes* is rounded down to the alignment. Raises OutOfMemory at construction when the driver cannot give the
    region. In the statistics the region is one segment of the large pool.
    """

    def __init__(self, driver: Driver, *, limit_bytes: int, alignment_bytes: int) -> None:
        super().__init__(driver)
        self._limit_bytes = limit_bytes
        self._unit = alignment_bytes
        size = limit_bytes // alignment_bytes * alignment_bytes
        self.work.driver_calls += 1
        address = driver.alloc(size)
        if address is None:
            raise OutOfMemory(self._facts(size, 0, None, -1))
        self._region = (address, size)
        self.grid.segment_alloc(LARGE, size)

    def empty_cache(self) -> None:
        """Nothing to give back: the region stays. O(1)."""
        if self.observer is not None:
            self.observer("empty_cache", -1, 0, 0, "", None, -1)

    def walk(self) -> Iterator[Segment]:
        """The region as one segment, with its blocks. O(n log n)."""
        address, size = self._region
        yield Segment(address, size, "region", 0, tuple(self._views()))

    @abstractmethod
    def _views(self) -> Iterator[Block]:
        """What lies in the region, in address order and without gaps."""

    def _rounded(self, size: int) -> int:
        unit = self._unit
        return -(-size // unit) * unit

    def _facts(self, size: int, stream: int, tag: Tag | None, owner: int, rule: str = "") -> OomFacts:
        """What this arena knows of a request that it cannot serve, or of its region that the driver cannot give."""
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
            limit_bytes=min(capacity, self._limit_bytes),
            reserved_bytes=reserved,
            allocated_bytes=allocated,
            requested_bytes=self.grid.total(REQUESTED_BYTES),
            largest_free_bytes=self._largest_free() if reserved else driver_free,
            cached_free_bytes=reserved - allocated,
            driver_free_bytes=driver_free,
            rule=rule,
            weights_bytes=self._weights_bytes(),
            owner_bytes=self._owner_bytes(owner),
            tenants_bytes=self.driver.tenants_bytes,
        )


def live_view(block: Placed) -> Block:
    """A block in use, as :meth:`RegionAllocator.walk` shows it."""
    return Block(block.address, block.size, block.requested, "active_allocated", block.tag, block.owner)


def free_view(address: int, size: int) -> Block:
    """A free run, as :meth:`RegionAllocator.walk` shows it."""
    return Block(address, size, 0, "inactive", None, -1)
