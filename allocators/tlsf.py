"""Two-level segregated fit in one region taken at start: a free block is found by two looks at bitmaps.

::

    driver   | ... | region of limit_bytes, never given back                                 | ... |
    blocks         | allocated | free 6 | allocated   | free 5 | allocated | free 23         |      linked by address

    first level: powers of two     bitmap   ...  2^4   2^3   2^2  ...        lists of free blocks of units
    second level: equal parts of      2^4   |16 18 20 22 24 26 28 30|        23 lies in 22..23
    each (8 here, J = 3)              2^2   |4 .. 5 .. 6 .. 7 ..    |        5 and 6 have lists of their own

A block of *size* bytes lies in list (fl, sl): fl = floor(log2(size)), sl = the next J bits of the size
(:func:`mapping_insert`). A request is rounded up to the unit, then to the first size of the next list
(:func:`mapping_search`), so that **any** block of that list or a later one fits and none is looked at twice: good fit.
The lists are last in, first out. The block found is cut to the rounded size, its low part is taken and what is over
stays free; a freed block merges with both free neighbours at once.

Rules: Masmano, Ripoll, Crespo, Real, "TLSF: a new dynamic memory allocator for real-time systems", ECRTS 2004, as
implemented by its authors (TLSF 2.4.6), who put and take at the head of a list, and whose search hands the rounded
size back: the block has that size, and so returns to a list that serves the same request again. (In later
implementations, Conte's for one, the block is cut to the size asked for.) Left out is what a device's memory does not
have: headers inside blocks, and so their smallest size; here it is one unit. 2^5 lists per power of two are theirs.

The price of the search: at most a 2^J-th of the request (3.1 % at 32 lists) is rounding, and a request may be refused
although a free block is large enough, but never by more than that part.

Complexity: malloc and free O(1), usage O(blocks in the highest list).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.free_lists import LinkedBlock
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Block, Tag
from hbmtwin.allocators.region import RegionAllocator, check_region, free_view, live_view
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import (
    ALLOCATED_BYTES,
    INACTIVE_SPLIT,
    INACTIVE_SPLIT_BYTES,
    LARGE,
    REQUESTED_BYTES,
)

MOST_LOG2: Final = 8
"""More than 256 lists per power of two would be more lists than blocks."""
RULE: Final = "a free block is large enough, but the search starts at the next list up, whose blocks all fit (good fit)"


def mapping_insert(size: int, log2: int) -> tuple[int, int]:
    """The list ``(fl, sl)`` of a free block of *size* bytes, with 2^log2 lists per power of two. O(1)."""
    fl = size.bit_length() - 1
    return fl, (size << log2 >> fl) - (1 << log2)


def mapping_search(size: int, log2: int) -> tuple[int, int, int]:
    """*size* rounded up to the first size of a list, and that list: ``(rounded, fl, sl)``. O(1)."""
    width = 1 << max(0, size.bit_length() - 1 - log2)
    rounded = -(-size // width) * width
    return rounded, *mapping_insert(rounded, log2)


@dataclass(frozen=True, slots=True)
class TlsfConfig:
    """Settings of :class:`TlsfAllocator`. Raises ValueError when no region can be made of them."""

    limit_bytes: int
    """Size of the region, rounded down to the alignment."""
    alignment_bytes: int = 512
    """Unit of sizes, and of addresses counted from the region's start; a power of two."""
    second_level_log2: int = 5
    """Log2 of the lists per power of two: J of the mapping; 5 is that of the authors' implementation."""

    def __post_init__(self) -> None:
        check_region(self.limit_bytes, self.alignment_bytes)
        if not 0 <= self.second_level_log2 <= MOST_LOG2:
            raise ValueError(f"second_level_log2 must be from 0 to {MOST_LOG2}, not {self.second_level_log2}")


@device_allocators.register("tlsf")
class TlsfAllocator(RegionAllocator[LinkedBlock]):
    """One region of the driver taken at start, two-level segregated lists inside: good fit in constant time.

    Raises OutOfMemory at construction when the driver cannot give the region. ``allocated`` counts the rounded sizes.
    """

    Config = TlsfConfig
    name: ClassVar[str] = "tlsf"
    features: ClassVar[frozenset[str]] = frozenset({"region", "statistics"})

    def __init__(self, driver: Driver, config: TlsfConfig) -> None:
        super().__init__(driver, limit_bytes=config.limit_bytes, alignment_bytes=config.alignment_bytes)
        self.config = config
        address, size = self._region
        self._log2 = config.second_level_log2
        # By first and second level; a dictionary by address is a list from whose middle a block is dropped in O(1).
        levels = range(size.bit_length())
        self._lists: list[list[dict[int, LinkedBlock]]] = [[{} for _ in range(1 << self._log2)] for _ in levels]
        self._first_bitmap = 0
        self._second_bitmaps = [0 for _ in levels]
        # The block at the region's start: a cut leaves the low part its block, and a merge too, so it is always this.
        self._start = LinkedBlock(address, size)
        self._insert(self._start)

    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(n)."""
        live = set(map(id, self._live.values()))
        free = {id(block): block for lists in self._lists for blocks in lists for block in blocks.values()}
        address, size = self._region
        row = [len(live), 0, 0, 1, size, 0, 0]
        end, before = address, None
        for block in self._blocks():
            assert block.prev is before, f"links at {block.address:#x}"
            assert block.address == end, f"hole or overlap at {end:#x}"
            assert block.size > 0, f"block at {block.address:#x} is empty"
            assert not block.size % self._unit, f"block at {block.address:#x} is no whole number of units"
            assert block.allocated == (id(block) in live), f"block at {block.address:#x}: live or not"
            assert block.allocated != (id(block) in free), f"block at {block.address:#x}: free or not"
            if block.allocated:
                rounded, _, _ = mapping_search(self._rounded(block.requested), self._log2)
                assert block.size == rounded, f"block at {block.address:#x} is not cut to the rounded size"
                row[ALLOCATED_BYTES] += block.size
                row[REQUESTED_BYTES] += block.requested
            else:
                assert before is None or before.allocated, f"free neighbours at {block.address:#x}"
                count, bytes_ = _split_piece(block)
                row[INACTIVE_SPLIT] += count
                row[INACTIVE_SPLIT_BYTES] += bytes_
            end += block.size
            before = block
        assert end == address + size, "blocks tile the region"
        assert sum(1 for _ in self._blocks()) == len(live) + len(free), "every block is in the region"
        assert self.grid.current[LARGE][: len(row)] == row, "books of the region"
        for fl, lists in enumerate(self._lists):
            for sl, blocks in enumerate(lists):
                assert bool(blocks) == bool(self._second_bitmaps[fl] >> sl & 1), f"bit ({fl}, {sl})"
                for at, block in blocks.items():
                    assert at == block.address, f"block at {at:#x} has moved"
                    assert (fl, sl) == mapping_insert(block.size, self._log2), f"block at {at:#x}: wrong list"
            assert self._second_bitmaps[fl] < 1 << len(lists), f"no bits beyond the lists of level {fl}"
            assert bool(self._second_bitmaps[fl]) == bool(self._first_bitmap >> fl & 1), f"bit {fl}"
        assert self._first_bitmap < 1 << len(self._lists), "no bits beyond the highest level"
        self._check_tags()

    # -- place and give back ---------------------------------------------------------------------------------------

    def _place(self, size: int, stream: int, tag: Tag, owner: int) -> LinkedBlock:
        rounded, fl, sl = mapping_search(self._rounded(size), self._log2)
        block = self._take(fl, sl)
        if block is None:
            self.grid.num_ooms += 1
            rule = RULE if self._largest_free() >= self._rounded(size) else ""
            raise OutOfMemory(self._facts(size, stream, tag, owner, rule))
        was, was_bytes = _split_piece(block)
        rest, rest_bytes = 0, block.size - rounded
        if rest_bytes:
            rest = 1
            self._insert(_cut(block, rounded))
        # One net change, so that the running sums move as torch's do.
        if rest != was or rest_bytes != was_bytes:
            self.grid.inactive_split(LARGE, rest - was, rest_bytes - was_bytes)
        block.allocated = True
        block.stream = stream
        self.grid.malloc(LARGE, block.size, size)
        return block

    def _give_back(self, block: LinkedBlock) -> None:
        """Make *block* free; it and its free neighbours become one."""
        block.allocated = False
        self.grid.free(LARGE, block.size, block.requested)
        count = gained = 0
        after, before = block.next, block.prev
        if after is not None and not after.allocated:
            self._remove(after)
            count -= 1
            gained -= after.size
            _absorb_next(block)
        if before is not None and not before.allocated:
            self._remove(before)
            count -= 1
            gained -= before.size
            _absorb_next(before)
            block = before
        self._insert(block)
        more, more_bytes = _split_piece(block)
        if count + more or gained + more_bytes:
            self.grid.inactive_split(LARGE, count + more, gained + more_bytes)

    # -- the lists and their bitmaps -------------------------------------------------------------------------------

    def _take(self, fl: int, sl: int) -> LinkedBlock | None:
        """Remove and return the newest block of the first list that has one, from (fl, sl) on; None if none has."""
        if fl >= len(self._lists):
            return None
        lists = self._second_bitmaps[fl] >> sl << sl
        if not lists:
            levels = self._first_bitmap >> fl + 1 << fl + 1
            if not levels:
                return None
            fl = _lowest_bit(levels)
            lists = self._second_bitmaps[fl]
        sl = _lowest_bit(lists)
        _, block = self._lists[fl][sl].popitem()
        self._removed(fl, sl)
        return block

    def _insert(self, block: LinkedBlock) -> None:
        fl, sl = mapping_insert(block.size, self._log2)
        self._lists[fl][sl][block.address] = block
        self._second_bitmaps[fl] |= 1 << sl
        self._first_bitmap |= 1 << fl

    def _remove(self, block: LinkedBlock) -> None:
        fl, sl = mapping_insert(block.size, self._log2)
        del self._lists[fl][sl][block.address]
        self._removed(fl, sl)

    def _removed(self, fl: int, sl: int) -> None:
        """A block has left list (fl, sl): clear the bits of what is empty now."""
        if not self._lists[fl][sl]:
            self._second_bitmaps[fl] &= ~(1 << sl)
            if not self._second_bitmaps[fl]:
                self._first_bitmap &= ~(1 << fl)

    # -- what is there ---------------------------------------------------------------------------------------------

    def _blocks(self) -> Iterator[LinkedBlock]:
        """All blocks in address order, along their links."""
        block: LinkedBlock | None = self._start
        while block is not None:
            yield block
            block = block.next

    def _views(self) -> Iterator[Block]:
        for block in self._blocks():
            yield live_view(block) if block.allocated else free_view(block.address, block.size)

    def _largest_free(self) -> int:
        if not self._first_bitmap:
            return 0
        fl = self._first_bitmap.bit_length() - 1
        sl = self._second_bitmaps[fl].bit_length() - 1
        return max(block.size for block in self._lists[fl][sl].values())


def _lowest_bit(bits: int) -> int:
    """Number of the lowest bit that is set: find first set."""
    return (bits & -bits).bit_length() - 1


def _cut(block: LinkedBlock, size: int) -> LinkedBlock:
    """Leave *block* its low *size* bytes; return a new block of the rest, linked behind it."""
    rest = LinkedBlock(block.address + size, block.size - size)
    rest.prev = block
    rest.next = block.next
    if rest.next is not None:
        rest.next.prev = rest
    block.next = rest
    block.size = size
    return rest


def _absorb_next(block: LinkedBlock) -> None:
    """Make *block* and the block behind it one."""
    gone = block.next
    assert gone is not None, "the last block has nothing behind it"
    block.size += gone.size
    block.next = gone.next
    if block.next is not None:
        block.next.prev = block


def _split_piece(block: LinkedBlock) -> tuple[int, int]:
    """What *block*, free, is in the statistics: one split piece and its bytes, nothing if it is the region."""
    return (0, 0) if block.prev is None and block.next is None else (1, block.size)
