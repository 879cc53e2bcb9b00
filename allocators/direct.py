"""A driver call for every tensor, as code makes them that calls ``aclrtMalloc`` or ``cudaMalloc`` itself.

::

    driver   | tensor |r| tensor |r|   gap   | tensor |   range without memory  | page | page |            |
                       r: rounding, up to whole units of the driver

Nothing is cached: what is reserved is what is allocated. Bytes at the driver do not fragment, so a request fails when
they are short, and for no other reason; the price is time. Memory can also be taken page by page, each put behind an
address of a range that was reserved before (the feature ``pages``).

**Waiting.** Every ``free`` counts as one synchronisation of the device. ``cuMemFree`` may synchronise by itself (CUDA
driver API). ``aclrtFree`` is documented not to (CANN 8.0): memory that kernels may still use has to be waited for
first, which ``aclrtFreeWithDevSync`` does in the same call; torch_npu, too, waits for the device before it releases.
That a server pays the wait is certain, how long it takes is the device's ``sync_ns``. A page's ``free`` counts none:
vAttention unmaps without waiting, from sequences that have ended.

Complexity: malloc and reserve_range O(gaps of the address space), free, map_page and release_range O(log n),
usage O(1).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from hbmtwin.allocators.base import BlockAllocator
from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.driver import ALLOC_UNIT
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.records import Block, Segment, Tag
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import ALLOCATED_BYTES, ALLOCATION, LARGE, REQUESTED_BYTES, RESERVED_BYTES, SEGMENT


@dataclass(frozen=True, slots=True)
class DirectConfig:
    """Settings of :class:`DirectAllocator`."""

    limit_bytes: int | None = None
    """Cap on what is taken from the driver; None is no cap."""

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise ValueError(f"limit_bytes must not be negative, but is {self.limit_bytes}")


class DirectBlock:
    """What the driver gave for one request."""

    __slots__ = ("address", "owner", "page", "requested", "size", "stream", "tag")

    def __init__(self, address: int, size: int, stream: int, page: int | None = None) -> None:
        self.address = address
        self.size = size
        self.stream = stream
        self.page = page
        """The driver's handle of the physical memory, where that was mapped into a range."""
        self.requested = 0
        self.tag = Tag.ACTIVATION
        self.owner = -1


@device_allocators.register("direct")
class DirectAllocator(BlockAllocator[DirectBlock]):
    """No cache: one driver call for each tensor, one to give it back, and pages behind ranges of addresses.

    In the statistics each tensor is a segment of the large pool; pages are mapped memory, as in expandable segments,
    and no segments.
    """

    Config = DirectConfig
    name: ClassVar[str] = "direct"
    features: ClassVar[frozenset[str]] = frozenset({"pages", "statistics"})

    def __init__(self, driver: Driver, config: DirectConfig) -> None:
        super().__init__(driver)
        self.config = config

    def empty_cache(self) -> None:
        """Nothing to give back: there is no cache."""
        if self.observer is not None:
            self.observer("empty_cache", -1, 0, 0, "", None, -1)

    # -- ranges and pages ------------------------------------------------------------------------------------------

    @property
    def page_bytes(self) -> int:
        """The driver's granularity."""
        return self.driver.page_bytes

    @property
    def free_bytes(self) -> int:
        """Free at the driver, and allowed by the cap. O(1)."""
        free, capacity = self.driver.mem_info()
        limit = capacity if self.config.limit_bytes is None else self.config.limit_bytes
        return max(0, min(free, limit - self.grid.total(RESERVED_BYTES)))

    def reserve_range(self, size: int) -> int:
        """Return the address of a new range without memory: one driver call."""
        self.work.driver_calls += 1
        return self.driver.reserve(size)

    def release_range(self, addr: int) -> None:
        """Give a range back: one driver call. Raise KeyError or ValueError as the driver does."""
        self.work.driver_calls += 1
        self.driver.release_range(addr)

    def map_page(self, addr: int, size: int, *, tag: Tag, owner: int = -1) -> int:
        """Put *size* bytes of new memory behind *addr*, and return their handle: two driver calls, create and map.

        CUDA takes a third one to allow access, which is not counted. Raise OutOfMemory with the facts when there are no
        such bytes, ValueError as the driver does; either leaves everything as it was, but for the number used up.
        """
        handle = self._next_handle
        self._next_handle = handle + 1
        if self.observer is not None:
            self.observer("malloc", handle, size, 0, "", tag, owner)
        page = None
        if self._within_cap(size):
            self.work.driver_calls += 1
            page = self.driver.create(size)
        if page is None:
            raise self._out_of_memory(size, 0, tag, owner)
        self.work.driver_calls += 1
        try:
            self.driver.map(addr, page)
        except ValueError:
            self.driver.destroy(page)
            raise
        block = DirectBlock(addr, size, 0, page)
        block.requested = size
        block.tag = tag
        block.owner = owner
        self._live[handle] = block
        self._requested_by_tag[tag] += size
        self.work.mapped_bytes += size
        self.grid.segment_map(LARGE, size)
        self.grid.malloc(LARGE, size, size)
        return handle

    # -- place and give back ---------------------------------------------------------------------------------------

    def _place(self, size: int, stream: int, tag: Tag, owner: int) -> DirectBlock:
        rounded = _rounded(size)
        address = None
        if self._within_cap(rounded):
            self.work.driver_calls += 1
            address = self.driver.alloc(size)
        if address is None:
            raise self._out_of_memory(size, stream, tag, owner)
        self.grid.segment_alloc(LARGE, rounded)
        self.grid.malloc(LARGE, rounded, size)
        return DirectBlock(address, rounded, stream)

    def _give_back(self, block: DirectBlock) -> None:
        self.grid.free(LARGE, block.size, block.requested)
        if block.page is None:
            self.work.syncs += 1
            self.work.driver_calls += 1
            self.driver.free(block.address)
            self.grid.segment_free(LARGE, block.size)
        else:
            self.work.driver_calls += 2
            self.driver.destroy(self.driver.unmap(block.address))
            self.grid.segment_unmap(LARGE, block.size)

    def _within_cap(self, size: int) -> bool:
        limit = self.config.limit_bytes
        return limit is None or self.grid.total(RESERVED_BYTES) + size <= limit

    # -- what is there ---------------------------------------------------------------------------------------------

    def walk(self) -> Iterator[Segment]:
        """Each tensor and each page as a segment of its own, in address order. O(n log n)."""
        for block in sorted(self._live.values(), key=lambda block: block.address):
            view = Block(block.address, block.size, block.requested, "active_allocated", block.tag, block.owner)
            yield Segment(
                block.address, block.size, "large", block.stream, (view,), is_expandable=block.page is not None
            )

    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(n log n)."""
        segments = list(self.walk())
        assert all(a.address + a.size <= b.address for a, b in pairwise(segments)), "overlap"
        row = [0] * len(self.grid.current[LARGE])
        for block in self._live.values():
            assert block.size == (_rounded(block.requested) if block.page is None else block.requested), "rounding"
            row[ALLOCATED_BYTES] += block.size
            row[REQUESTED_BYTES] += block.requested
        row[ALLOCATION] = len(self._live)
        row[SEGMENT] = sum(not segment.is_expandable for segment in segments)
        row[RESERVED_BYTES] = sum(segment.size for segment in segments)
        assert self.grid.current[LARGE] == row, "books"
        assert self.config.limit_bytes is None or row[RESERVED_BYTES] <= self.config.limit_bytes, "more than the cap"
        self._check_tags()

    def _largest_free(self) -> int:
        return 0

    # -- facts of a failure ----------------------------------------------------------------------------------------

    def _out_of_memory(self, size: int, stream: int, tag: Tag, owner: int) -> OutOfMemory:
        self.grid.num_ooms += 1
        reserved = self.grid.total(RESERVED_BYTES)
        capacity, free = self.driver.capacity_bytes, self.free_bytes
        limit = self.config.limit_bytes
        return OutOfMemory(
            OomFacts(
                allocator=self.name,
                asked_bytes=size,
                need_bytes=_rounded(size),
                tag=tag,
                owner=owner,
                stream=stream,
                capacity_bytes=capacity,
                limit_bytes=capacity if limit is None else min(capacity, limit),
                reserved_bytes=reserved,
                allocated_bytes=self.grid.total(ALLOCATED_BYTES),
                requested_bytes=self.grid.total(REQUESTED_BYTES),
                largest_free_bytes=free,
                cached_free_bytes=0,
                driver_free_bytes=free,
                weights_bytes=self._weights_bytes(),
                owner_bytes=self._owner_bytes(owner),
                tenants_bytes=self.driver.tenants_bytes,
            )
        )


def _rounded(size: int) -> int:
    return -(-size // ALLOC_UNIT) * ALLOC_UNIT
