"""What all device allocators share: handles, books by tag, regrow, work and statistics.

A policy on top writes where a request goes (:meth:`BlockAllocator._place`), what becomes of a block that its caller
gives back (:meth:`BlockAllocator._give_back`), its free lists, and what it shows of itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from hbmtwin.allocators.contract import Driver, Observer
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import NO_WORK, AllocatorUsage, Segment, Tag, Work
from hbmtwin.allocators.stats import (
    ACTIVE_BYTES,
    ALLOCATED_BYTES,
    REQUESTED_BYTES,
    RESERVED_BYTES,
    UNLIMITED,
    Counters,
    StatsGrid,
)


class Placed(Protocol):
    """What the books must know of a block in use."""

    address: int
    size: int
    stream: int
    requested: int
    tag: Tag
    owner: int


PlacedT = TypeVar("PlacedT", bound=Placed)


class WorkMeter:
    """Counts the work of memory management until it is taken."""

    __slots__ = ("copied_bytes", "driver_calls", "mapped_bytes", "syncs")

    def __init__(self) -> None:
        self.driver_calls = 0
        """A refused call is a call."""
        self.syncs = 0
        self.mapped_bytes = 0
        self.copied_bytes = 0

    def take(self) -> Work:
        """The account so far; a new one starts."""
        if not (self.driver_calls or self.syncs or self.mapped_bytes or self.copied_bytes):
            return NO_WORK
        work = Work(self.driver_calls, self.syncs, self.mapped_bytes, self.copied_bytes)
        self.driver_calls = self.syncs = self.mapped_bytes = self.copied_bytes = 0
        return work


class BlockAllocator(ABC, Generic[PlacedT]):
    """Hands out blocks of a driver's memory. Complexity is the policy's; the books are kept incrementally."""

    name: ClassVar[str]
    features: ClassVar[frozenset[str]]

    def __init__(self, driver: Driver, *, max_split_size: int = UNLIMITED) -> None:
        self.driver = driver
        self.observer: Observer | None = None
        self.grid = StatsGrid(max_split_size)
        self.work = WorkMeter()
        self._live: dict[int, PlacedT] = {}
        self._next_handle = 0
        self._requested_by_tag = [0] * len(Tag)

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
        block = self._place(size, stream, tag, owner)
        block.requested = size
        block.tag = tag
        block.owner = owner
        self._live[handle] = block
        self._requested_by_tag[tag] += size
        return handle

    def free(self, handle: int) -> None:
        """Give a handle back. Raise KeyError if it is not live."""
        if handle not in self._live:
            raise KeyError(f"handle {handle} is not live")
        if self.observer is not None:
            self.observer("free", handle, 0, 0, "", None, -1)
        block = self._live.pop(handle)
        self._requested_by_tag[block.tag] -= block.requested
        self._give_back(block)

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
                self.work.copied_bytes += min(size, old.requested)
                self.free(handle)
        except OutOfMemory as failure:
            raise failure.after(done) from None
        return done

    def address(self, handle: int) -> int:
        """Address of a live handle. Raise KeyError if it is not live."""
        return self._live[handle].address

    def take_work(self) -> Work:
        """Return the work since the last call, and start a new account. A refused driver call is a call."""
        return self.work.take()

    # -- books -----------------------------------------------------------------------------------------------------

    def usage(self) -> AllocatorUsage:
        """The books, kept incrementally. O(number of tags and free lists)."""
        grid = self.grid
        largest = self._largest_free()
        allocated = grid.total(ALLOCATED_BYTES)
        return AllocatorUsage(
            reserved=grid.total(RESERVED_BYTES),
            allocated=allocated,
            requested=grid.total(REQUESTED_BYTES),
            pending=grid.total(ACTIVE_BYTES) - allocated,
            pool_free=largest if "region" in self.features else 0,
            largest_free=largest,
            requested_by_tag=tuple(self._requested_by_tag),
        )

    def stats(self) -> dict[str, int]:
        """Statistics under torch's flat keys, ``allocated_bytes.all.current`` and so on, sorted."""
        return self.grid.to_dict()

    def counters(self) -> Counters:
        """What is there and what was freed so far, for :meth:`repeat`. O(1)."""
        return self.grid.counters()

    def repeat(self, before: Counters, times: int) -> None:
        """Count what was taken and given back since *before* *times* times more, without doing it. O(1).

        Raise ValueError unless as much is there as then.
        """
        if self.grid.counters().current != before.current:
            raise ValueError("what has changed the allocator cannot be repeated by counting")
        self.grid.repeat(before, times)

    def reset_peak_memory_stats(self) -> None:
        """Set every peak to the current value."""
        if self.observer is not None:
            self.observer("reset_peak", -1, 0, 0, "", None, -1)
        self.grid.reset_peak()

    def reset_accumulated_memory_stats(self) -> None:
        """Set the running sums ``allocated`` and ``freed`` and the plain counters to 0."""
        if self.observer is not None:
            self.observer("reset_accumulated", -1, 0, 0, "", None, -1)
        self.grid.reset_accumulated()

    # Both are counted only for the facts of a failure, so that nothing is paid for them before. O(live blocks).

    def _owner_bytes(self, owner: int) -> int:
        if owner < 0:
            return 0
        return sum(block.size for block in self._live.values() if block.owner == owner)

    def _weights_bytes(self) -> int:
        return sum(block.size for block in self._live.values() if block.tag is Tag.WEIGHT)

    def _check_tags(self) -> None:
        by_tag = [sum(block.requested for block in self._live.values() if block.tag == tag) for tag in Tag]
        assert self._requested_by_tag == by_tag, "bytes by tag"

    # -- what a policy writes --------------------------------------------------------------------------------------

    @abstractmethod
    def empty_cache(self) -> None:
        """Give unused cached memory back to the driver, as ``torch.npu.empty_cache`` does."""

    @abstractmethod
    def walk(self) -> Iterator[Segment]:
        """Segments in address order, each with its blocks. O(n log n)."""

    @abstractmethod
    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(n log n)."""

    @abstractmethod
    def _place(self, size: int, stream: int, tag: Tag, owner: int) -> PlacedT:
        """A block for *size* bytes, cut to measure and counted in the grid. Raise OutOfMemory when there is no room."""

    @abstractmethod
    def _give_back(self, block: PlacedT) -> None:
        """Its caller is done with *block*: count it, and make it free now or when its streams are done."""

    @abstractmethod
    def _largest_free(self) -> int:
        """Size of the largest free block, 0 when there is none."""
