"""What all allocators of linked blocks share: handles, books, split, merge, walk and check.

A policy on top writes three things: where a request goes (:meth:`BlockAllocator._place`), which free list a block
belongs to (:meth:`BlockAllocator._free_list`), and what it knows when it fails (:meth:`BlockAllocator._facts`).

Inside a segment blocks tile the range, each linked to both neighbours; two free neighbours never stay apart::

    segment  | allocated | free | allocated | allocated | free            |
               <-- prev                                   next -->
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from hbmtwin.allocators.contract import Driver, Observer
from hbmtwin.allocators.free_lists import FreeList, LinkedBlock
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.records import AllocatorUsage, Block, Segment, Tag, Work
from hbmtwin.allocators.stats import (
    ALLOCATED_BYTES,
    ALLOCATION,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    LARGE,
    REQUESTED_BYTES,
    RESERVED_BYTES,
    SEGMENT,
    SMALL,
    UNLIMITED,
    StatsGrid,
)


class BlockAllocator(ABC):
    """Segments cut into linked blocks over a driver. Complexity is the policy's; the books are kept incrementally."""

    name: ClassVar[str]
    features: ClassVar[frozenset[str]]
    pool_names: ClassVar[tuple[str, str]] = ("small", "large")
    """How :meth:`walk` calls the pools, indexed by :data:`SMALL` and :data:`LARGE`."""

    def __init__(self, driver: Driver, *, max_split_size: int = UNLIMITED) -> None:
        self.driver = driver
        self.observer: Observer | None = None
        self.grid = StatsGrid(max_split_size)
        self._live: dict[int, LinkedBlock] = {}
        self._next_handle = 0
        self._requested_by_tag = [0] * len(Tag)
        self._segments: dict[int, int] = {}
        """Address and size of each range that the driver gave."""
        self._driver_calls = 0
        self._syncs = 0
        self._copied_bytes = 0

    # -- verbs -----------------------------------------------------------------------------------------------------

    def malloc(self, size: int, *, stream: int = 0, tag: Tag, owner: int = -1) -> int:
        """Return a handle of *size* bytes.

        Raise OutOfMemory with the allocator's facts when they do not fit, ValueError if *size* is below 1: torch
        answers a request for 0 bytes with a null pointer before any allocator sees it.
        """
        if size < 1:
            raise ValueError(f"{size} bytes cannot be allocated; a tensor without elements needs no memory")
        handle = self._next_handle
        self._next_handle = handle + 1
        if self.observer is not None:
            self.observer("malloc", handle, size, stream, "", tag, owner)
        block = self._place(size, stream)
        if block is None:
            raise OutOfMemory(self._facts(size, stream, tag, owner))
        block.allocated = True
        block.requested = size
        block.tag = tag
        block.owner = owner
        self._live[handle] = block
        self._requested_by_tag[tag] += size
        self.grid.malloc(block.pool, block.size, size)
        return handle

    def free(self, handle: int) -> None:
        """Give a handle back. Raise KeyError if it is not live."""
        if handle not in self._live:
            raise KeyError(f"handle {handle} is not live")
        if self.observer is not None:
            self.observer("free", handle, 0, 0, "", None, -1)
        block = self._live.pop(handle)
        block.allocated = False
        self._requested_by_tag[block.tag] -= block.requested
        self.grid.free(block.pool, block.size, block.requested)
        self._merge(block, self._free_list(block))

    def regrow(self, handles: Sequence[int], size: int) -> list[int]:
        """Replace tensors by new ones of *size* bytes, one by one: new, copy, free. Return the new handles in order.

        The copied bytes, the smaller of both sizes, go to :meth:`take_work`. On shortage raise OutOfMemory whose
        ``done`` holds the new handles of those already replaced; the others keep theirs.
        """
        done: list[int] = []
        try:
            for handle in handles:
                old = self._live[handle]
                done.append(self.malloc(size, stream=old.stream, tag=old.tag, owner=old.owner))
                self._copied_bytes += min(size, old.requested)
                self.free(handle)
        except OutOfMemory as failure:
            raise failure.after(done) from None
        return done

    def address(self, handle: int) -> int:
        """Address of a live handle. Raise KeyError if it is not live."""
        return self._live[handle].address

    def take_work(self) -> Work:
        """Return the work since the last call, and start a new account. A refused driver call is a call."""
        work = Work(self._driver_calls, self._syncs, 0, self._copied_bytes)
        self._driver_calls = self._syncs = self._copied_bytes = 0
        return work

    # -- books -----------------------------------------------------------------------------------------------------

    def usage(self) -> AllocatorUsage:
        """The books, kept incrementally. O(number of tags and free lists)."""
        grid = self.grid
        largest = max((free.largest() for free in self._free_lists()), default=0)
        return AllocatorUsage(
            reserved=grid.total(RESERVED_BYTES),
            allocated=grid.total(ALLOCATED_BYTES),
            requested=grid.total(REQUESTED_BYTES),
            pending=0,
            pool_free=largest if "region" in self.features else 0,
            largest_free=largest,
            requested_by_tag=tuple(self._requested_by_tag),
        )

    def stats(self) -> dict[str, int]:
        """Statistics under torch's flat keys, ``allocated_bytes.all.current`` and so on, sorted."""
        return self.grid.to_dict()

    def reset_peak_memory_stats(self) -> None:
        """Set every peak to the current value."""
        self.grid.reset_peak()

    def walk(self) -> Iterator[Segment]:
        """Segments in address order, each with its blocks. O(n log n)."""
        for head in self._heads():
            blocks = tuple(self._view(block) for block in _chain(head))
            yield Segment(
                head.address,
                sum(block.size for block in blocks),
                self.pool_names[head.pool],
                head.stream,
                blocks,
            )

    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(n log n)."""
        live = set(map(id, self._live.values()))
        listed = [(free, block) for free in self._free_lists() for block in free.blocks]
        seen = 0
        rows = ([0] * 7, [0] * 7)
        for head in self._heads():
            size = 0
            for block in _chain(head):
                seen += 1
                size += block.size
                after = block.next
                assert block.size > 0, f"block at {block.address:#x} is empty"
                assert block.allocated == (id(block) in live), f"block at {block.address:#x}: live or not"
                row = rows[block.pool]
                if block.allocated:
                    assert block.requested <= block.size, f"block at {block.address:#x} is too small"
                    row[ALLOCATION] += 1
                    row[ALLOCATED_BYTES] += block.size
                    row[REQUESTED_BYTES] += block.requested
                elif block.prev is not None or after is not None:
                    row[INACTIVE_SPLIT] += 1
                    row[INACTIVE_SPLIT_BYTES] += block.size
                if after is not None:
                    assert after.prev is block, f"links at {block.address:#x}"
                    assert after.address == block.address + block.size, f"hole or overlap behind {block.address:#x}"
                    assert (after.pool, after.stream) == (block.pool, block.stream), "one segment, one pool and stream"
                    assert block.allocated or after.allocated, f"free neighbours at {block.address:#x}"
            assert self._segments[head.address] == size, f"blocks tile the segment at {head.address:#x}"
            rows[head.pool][SEGMENT] += 1
            rows[head.pool][RESERVED_BYTES] += size
        assert seen == len(live) + len(listed), "every block is live or free"
        assert sum(row[SEGMENT] for row in rows) == len(self._segments), "every segment has blocks"
        for free, block in listed:
            assert not block.allocated, f"block at {block.address:#x} is allocated and listed as free"
            assert self._free_list(block) is free, f"block at {block.address:#x} is in the wrong list"
        for free in self._free_lists():
            free.check()
        for pool in (SMALL, LARGE):
            assert self.grid.current[pool][:7] == rows[pool], f"books of the {self.pool_names[pool]} pool"
        by_tag = [sum(block.requested for block in self._live.values() if block.tag == tag) for tag in Tag]
        assert self._requested_by_tag == by_tag, "bytes by tag"
        assert self.grid.total(RESERVED_BYTES) >= self.grid.total(ALLOCATED_BYTES) >= self.grid.total(REQUESTED_BYTES)

    # -- what a policy writes --------------------------------------------------------------------------------------

    @abstractmethod
    def empty_cache(self) -> None:
        """Give unused cached memory back to the driver, as ``torch.npu.empty_cache`` does."""

    @abstractmethod
    def _place(self, size: int, stream: int) -> LinkedBlock | None:
        """Take a block for *size* bytes out of the free lists, cut to measure, or None when there is no room."""

    @abstractmethod
    def _free_list(self, block: LinkedBlock) -> FreeList:
        """The list that holds *block* when it is free."""

    @abstractmethod
    def _free_lists(self) -> Iterator[FreeList]:
        """All lists."""

    @abstractmethod
    def _facts(self, size: int, stream: int, tag: Tag | None, owner: int) -> OomFacts:
        """What is known about a request that failed."""

    # -- for policies ----------------------------------------------------------------------------------------------

    def _cut(self, block: LinkedBlock, size: int, free: FreeList) -> LinkedBlock:
        """Split the low *size* bytes off *block*, whose rest goes to *free*. Return the new, low block."""
        low = LinkedBlock(block.address, size, block.pool, block.stream)
        before = block.prev
        was_split = before is not None or block.next is not None
        if before is not None:
            before.next = low
            low.prev = before
        low.next = block
        block.prev = low
        block.address += size
        block.size -= size
        free.put(block)
        if was_split:
            self.grid.inactive_split(block.pool, 0, -size)
        else:
            self.grid.inactive_split(block.pool, 1, block.size)
        return low

    def _merge(self, block: LinkedBlock, free: FreeList) -> None:
        """Let a block that became free absorb its free neighbours, and put it into *free*."""
        count = gained = 0
        before = block.prev
        if before is not None and not before.allocated:
            free.drop(before)
            count -= 1
            gained -= before.size
            block.address = before.address
            block.size += before.size
            block.prev = before = before.prev
            if before is not None:
                before.next = block
        after = block.next
        if after is not None and not after.allocated:
            free.drop(after)
            count -= 1
            gained -= after.size
            block.size += after.size
            block.next = after = after.next
            if after is not None:
                after.prev = block
        if before is not None or after is not None:
            count += 1
            gained += block.size
        free.put(block)
        # One net change, so that the running sums move as torch's do.
        if count or gained:
            self.grid.inactive_split(block.pool, count, gained)

    # Both are counted only for the facts of a failure, so that nothing is paid for them before. O(live blocks).

    def _owner_bytes(self, owner: int) -> int:
        if owner < 0:
            return 0
        return sum(block.size for block in self._live.values() if block.owner == owner)

    def _weights_bytes(self) -> int:
        return sum(block.size for block in self._live.values() if block.tag is Tag.WEIGHT)

    def _heads(self) -> list[LinkedBlock]:
        """First block of each segment, in address order."""
        heads = [block for block in self._live.values() if block.prev is None]
        heads += [block for free in self._free_lists() for block in free.blocks if block.prev is None]
        return sorted(heads, key=lambda block: block.address)

    @staticmethod
    def _view(block: LinkedBlock) -> Block:
        if block.allocated:
            return Block(block.address, block.size, block.requested, "active_allocated", block.tag, block.owner)
        return Block(block.address, block.size, 0, "inactive", None, -1)


def _chain(head: LinkedBlock) -> Iterator[LinkedBlock]:
    block: LinkedBlock | None = head
    while block is not None:
        yield block
        block = block.next
