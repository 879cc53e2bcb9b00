"""A binary buddy system in one region taken at start: every block is a power of two, aligned to its size.

::

    driver   | ... | region of limit_bytes, never given back                                 | ... |
    trees          | 8 units                                   | 4 units             | 1    |          13 = 8 + 4 + 1
    blocks         | allocated 4          | free 2 | al. 1 | 1 | allocated 4         | free |
                     offset 0               4        6       7   8                     12

The unit is the alignment, and the smallest block (order 0). A region that is no power of two is covered by trees that
are, the largest first (one per bit of its size), so that nothing above a unit is lost, and each lies at a multiple of
its size. A request goes to the lowest block of the smallest order that has one; a larger block is halved until it is
right, the low half going on and the high half staying free. Two halves are buddies: their offsets differ in one bit,
so that the buddy is at ``offset ^ size``. A freed block merges with its buddy while that is free, and only with it:
free neighbours that are no buddies stay apart.

The buddy of a whole tree would reach past the region's end (what follows a tree is smaller than it), so it is never
free, and merging ends there by itself.

Rules: Knuth, The Art of Computer Programming 1, section 2.5, algorithms R and S, and exercise 26 for regions that are
no power of two. He takes any block of the order; the lowest one makes it deterministic. Exercise 41 is the worst case:
with requests of 1 to 2^r units (a power of two each) of which at most n are live, n a multiple of 2^r, a region of
(r + 1) * n never overflows. A block is less than twice what was asked for, or one unit.

Complexity, m orders (log2 of the region's units) and n free blocks: malloc and free O(m log n), usage O(1).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar, Final

from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Block, Tag
from hbmtwin.allocators.region import RegionAllocator, RegionBlock, check_region, free_view, live_view
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import (
    ALLOCATED_BYTES,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    LARGE,
    REQUESTED_BYTES,
)

RULE: Final = "a free run is long enough, but a buddy block is a power of two and lies at a multiple of its size"


@dataclass(frozen=True, slots=True)
class BuddyConfig:
    """Settings of :class:`BuddyAllocator`. Raises ValueError when no region can be made of them."""

    limit_bytes: int
    """Size of the region, rounded down to the alignment."""
    alignment_bytes: int = 512
    """Size of the smallest block, a power of two; larger ones are this times a power of two."""

    def __post_init__(self) -> None:
        check_region(self.limit_bytes, self.alignment_bytes)


@device_allocators.register("buddy")
class BuddyAllocator(RegionAllocator[RegionBlock]):
    """One region of the driver taken at start, halved into buddies: blocks are powers of two.

    Raises OutOfMemory at construction when the driver cannot give the region. ``allocated`` counts whole blocks, so
    that what a power of two is larger than its request shows as rounding.
    """

    Config = BuddyConfig
    name: ClassVar[str] = "buddy"
    features: ClassVar[frozenset[str]] = frozenset({"region", "statistics"})

    def __init__(self, driver: Driver, config: BuddyConfig) -> None:
        super().__init__(driver, limit_bytes=config.limit_bytes, alignment_bytes=config.alignment_bytes)
        self.config = config
        _, size = self._region
        units = size // self._unit
        # Offsets of free blocks in order, by order; bit k of the bitmap says that there are some of order k.
        self._free: list[list[int]] = [[] for _ in range(units.bit_length())]
        self._bitmap = 0
        offset = 0
        for order in reversed(range(units.bit_length())):
            if units >> order & 1:
                self._put(order, offset)
                offset += self._unit << order
        if units.bit_count() > 1:
            self.grid.inactive_split(LARGE, units.bit_count(), size)

    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(n log n)."""
        start, size = self._region
        end = start
        row = [len(self._live), 0, 0, 1, size, 0, 0]
        blocks = list(self._views())
        for block in blocks:
            assert block.address == end, f"hole or overlap at {end:#x}"
            end += block.size
            order = self._order(block.size)
            assert block.size == self._unit << order, f"block at {block.address:#x} is no power of two"
            assert not (block.address - start) % block.size, f"block at {block.address:#x} is not aligned to its size"
            if block.state != "inactive":
                assert order == self._order(block.requested), f"block at {block.address:#x} is not the smallest"
                row[ALLOCATED_BYTES] += block.size
                row[REQUESTED_BYTES] += block.requested
            elif len(blocks) > 1:
                row[INACTIVE_SPLIT] += 1
                row[INACTIVE_SPLIT_BYTES] += block.size
        assert end == start + size, "blocks tile the region"
        assert self.grid.current[LARGE][: len(row)] == row, "books of the region"
        for order, offsets in enumerate(self._free):
            assert offsets == sorted(set(offsets)), f"free blocks of order {order} are in address order"
            assert bool(offsets) == bool(self._bitmap >> order & 1), f"bit {order} says whether there are blocks"
            buddies = [low for low, high in pairwise(offsets) if low ^ self._unit << order == high]
            assert not buddies, f"buddies of order {order} are both free"
        assert self._bitmap < 1 << len(self._free), "no bits beyond the largest order"
        self._check_tags()

    # -- place and give back ---------------------------------------------------------------------------------------

    def _place(self, size: int, stream: int, tag: Tag, owner: int) -> RegionBlock:
        order = self._order(size)
        fitting = self._bitmap >> order << order
        if not fitting:
            self.grid.num_ooms += 1
            raise self._refusal(size, stream, tag, owner)
        found = (fitting & -fitting).bit_length() - 1
        offset = self._free[found][0]
        self._drop(found, 0)
        block = RegionBlock(self._region[0] + offset, self._unit << order, stream)
        for half in reversed(range(order, found)):
            self._put(half, offset + (self._unit << half))
        self._count(found - order, (self._unit << found) - block.size, found, -1)
        self.grid.malloc(LARGE, block.size, size)
        return block

    def _give_back(self, block: RegionBlock) -> None:
        """Make *block* free; it and its buddy become one while the buddy is free."""
        self.grid.free(LARGE, block.size, block.requested)
        offset, size = block.address - self._region[0], block.size
        order = first = self._order(size)
        while (i := self._find(order, offset ^ size)) is not None:
            self._drop(order, i)
            offset &= ~size
            size *= 2
            order += 1
        self._put(order, offset)
        # Each merge took one buddy as large as all that had come before it.
        self._count(first - order, block.size - size, order, 1)

    def _count(self, pieces: int, pieces_bytes: int, order: int, sign: int) -> None:
        """Count free pieces that came or went with one of *order*, as split ones: that one is none if it is the region.

        One net change, so that the running sums move as torch's do.
        """
        size = self._unit << order
        if size < self._region[1]:
            pieces += sign
            pieces_bytes += sign * size
        if pieces or pieces_bytes:
            self.grid.inactive_split(LARGE, pieces, pieces_bytes)

    # -- the free lists --------------------------------------------------------------------------------------------

    def _order(self, size: int) -> int:
        """The smallest order whose blocks hold *size* bytes."""
        return (-(-size // self._unit) - 1).bit_length()

    def _put(self, order: int, offset: int) -> None:
        insort(self._free[order], offset)
        self._bitmap |= 1 << order

    def _find(self, order: int, offset: int) -> int | None:
        """Where in its list a free block of *order* at *offset* stands; None when there is none."""
        offsets = self._free[order]
        i = bisect_left(offsets, offset)
        return i if i < len(offsets) and offsets[i] == offset else None

    def _drop(self, order: int, i: int) -> None:
        del self._free[order][i]
        if not self._free[order]:
            self._bitmap &= ~(1 << order)

    # -- what is there ---------------------------------------------------------------------------------------------

    def _views(self) -> Iterator[Block]:
        start, _ = self._region
        live = [live_view(block) for block in self._live.values()]
        free = [
            free_view(start + offset, self._unit << order)
            for order, offsets in enumerate(self._free)
            for offset in offsets
        ]
        return iter(sorted([*live, *free], key=lambda block: block.address))

    def _largest_free(self) -> int:
        return self._unit << self._bitmap.bit_length() - 1 if self._bitmap else 0

    # -- facts of a failure ----------------------------------------------------------------------------------------

    def _refusal(self, size: int, stream: int, tag: Tag, owner: int) -> OutOfMemory:
        """The failure. What is needed is *size* in whole units: that it must be a power of two is this one's rule.

        So the facts tell the largest free run, neighbours that are no buddies taken together.
        """
        longest = run = 0
        for block in self._views():
            run = run + block.size if block.state == "inactive" else 0
            longest = max(longest, run)
        rule = RULE if longest >= self._rounded(size) else ""
        return OutOfMemory(replace(self._facts(size, stream, tag, owner, rule), largest_free_bytes=longest))
