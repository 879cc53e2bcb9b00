"""Blocks that know their address neighbours, and the orders in which free ones are kept: one class a fit.

By size, a list is a sorted list of integers beside a list of blocks at the same places. With the few thousand free
blocks that a device has at most, a bisection and a move of some kilobytes cost less than any tree made of Python
objects. By address, where a search asks for sizes across the order, blocks stand in runs of some dozen neighbours, each
with the size of its largest.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Final, Generic, Protocol, TypeVar

from hbmtwin.allocators.records import Tag

ADDRESS_BITS: Final = 48
"""Sort key of a block by size: ``size << ADDRESS_BITS | address``."""
RUN: Final = 64
"""Most neighbours in one run of :class:`ByAddress`."""


class Sized(Protocol):
    """What a free list must know of a block."""

    address: int
    size: int


BlockT = TypeVar("BlockT", bound=Sized)


class LinkedBlock:
    """A range inside a segment, linked with its neighbours in address order."""

    __slots__ = ("address", "allocated", "next", "owner", "prev", "requested", "size", "stream", "tag")

    def __init__(self, address: int, size: int) -> None:
        self.address = address
        self.size = size
        self.stream = 0
        self.allocated = False
        self.prev: LinkedBlock | None = None
        self.next: LinkedBlock | None = None
        # Of the last caller; a block that becomes free keeps them, as torch's blocks do.
        self.requested = 0
        self.tag = Tag.ACTIVATION
        self.owner = -1


class FreeList(Protocol):
    """Free blocks in some order."""

    @property
    def blocks(self) -> Sequence[LinkedBlock]:
        """All of them, in that order. O(n) at most."""
        ...

    def take(self, size: int) -> LinkedBlock | None:
        """Remove and return the block for *size* bytes, or None when no block is large enough."""
        ...

    def put(self, block: LinkedBlock) -> None:
        """Add a free block."""
        ...

    def drop(self, block: LinkedBlock) -> None:
        """Remove this block."""
        ...

    def fill(self, blocks: Iterable[LinkedBlock]) -> None:
        """Hold these blocks, which come in address order, and no others."""
        ...

    def largest(self) -> int:
        """Size of the largest block, 0 when there is none."""
        ...

    def check(self) -> None:
        """Assert the order."""
        ...


class BySize(Generic[BlockT]):
    """Best fit: the smallest block that is large enough, the lowest address among equals.

    All verbs O(log n) comparisons and a move of at most n numbers; ``fill`` O(n log n).
    """

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.blocks: list[BlockT] = []

    def take(self, size: int) -> BlockT | None:
        """Remove and return the best fit for *size* bytes, or None when no block is large enough."""
        i = bisect_left(self.keys, size << ADDRESS_BITS)
        if i == len(self.keys):
            return None
        del self.keys[i]
        return self.blocks.pop(i)

    def put(self, block: BlockT) -> None:
        """Add a free block."""
        key = self._key(block)
        i = bisect_left(self.keys, key)
        self.keys.insert(i, key)
        self.blocks.insert(i, block)

    def drop(self, block: BlockT) -> None:
        """Remove this block."""
        i = bisect_left(self.keys, self._key(block))
        del self.keys[i]
        del self.blocks[i]

    def fill(self, blocks: Iterable[BlockT]) -> None:
        """Hold these blocks and no others."""
        self.blocks = sorted(blocks, key=self._key)
        self.keys = list(map(self._key, self.blocks))

    def largest(self) -> int:
        """Size of the largest block, 0 when there is none."""
        return self.blocks[-1].size if self.blocks else 0

    def check(self) -> None:
        """Assert the order. O(n)."""
        assert self.keys == list(map(self._key, self.blocks)), "keys belong to their blocks"
        assert self.keys == sorted(set(self.keys)), "free blocks are ordered by size and address"

    def _key(self, block: BlockT) -> int:
        return block.size << ADDRESS_BITS | block.address


class LargestFirst(BySize[LinkedBlock]):
    """Worst fit: the largest block, the lowest address among equals. Complexity as :class:`BySize`."""

    __slots__ = ()

    def take(self, size: int) -> LinkedBlock | None:
        """Remove and return the largest block, or None when even that is too small for *size* bytes."""
        if not self.blocks or self.blocks[-1].size < size:
            return None
        self.keys.pop()
        return self.blocks.pop()

    def _key(self, block: LinkedBlock) -> int:
        # Among equals the lowest address stands last, where the next one is taken.
        return (block.size + 1 << ADDRESS_BITS) - block.address


class ByAddress:
    """First fit: the lowest address that is large enough.

    All verbs O(RUN + n / RUN), where a plain list would be O(n); ``fill`` O(n).
    """

    __slots__ = ("_largest", "_runs", "_starts")

    def __init__(self) -> None:
        # At the same places: neighbours in address order, the size of their largest, and an address from which on
        # blocks belong to this run. No run is empty but the only one.
        self._runs: list[list[LinkedBlock]] = [[]]
        self._largest = [0]
        self._starts = [0]

    @property
    def blocks(self) -> list[LinkedBlock]:
        """All of them in address order. O(n)."""
        return [block for run in self._runs for block in run]

    def take(self, size: int) -> LinkedBlock | None:
        """Remove and return the first fit for *size* bytes, or None when no block is large enough."""
        for i, largest in enumerate(self._largest):
            if largest >= size:
                return self._remove(i, _first_fit(self._runs[i], size))
        return None

    def put(self, block: LinkedBlock) -> None:
        """Add a free block."""
        i = bisect_right(self._starts, block.address) - 1
        run = self._runs[i]
        run.insert(bisect_left(run, block.address, key=_address), block)
        if block.size > self._largest[i]:
            self._largest[i] = block.size
        if len(run) > RUN:
            self._halve(i)

    def drop(self, block: LinkedBlock) -> None:
        """Remove this block."""
        i = bisect_right(self._starts, block.address) - 1
        self._remove(i, bisect_left(self._runs[i], block.address, key=_address))

    def fill(self, blocks: Iterable[LinkedBlock]) -> None:
        """Hold these blocks, which come in address order, and no others."""
        ordered = list(blocks)
        self._runs = [ordered[i : i + RUN // 2] for i in range(0, len(ordered), RUN // 2)] or [[]]
        self._largest = [max(map(_size, run), default=0) for run in self._runs]
        self._starts = [0, *(run[0].address for run in self._runs[1:])]

    def largest(self) -> int:
        """Size of the largest block, 0 when there is none. O(n / RUN)."""
        return max(self._largest)

    def check(self) -> None:
        """Assert the order. O(n)."""
        addresses = list(map(_address, self.blocks))
        assert addresses == sorted(set(addresses)), "free blocks are ordered by address"
        assert len(self._runs) == len(self._largest) == len(self._starts), "a size and a start for each run"
        for run, largest, start, end in zip(
            self._runs, self._largest, self._starts, [*self._starts[1:], 1 << ADDRESS_BITS], strict=True
        ):
            assert bool(run) or len(self._runs) == 1, "no run is empty but the only one"
            assert len(run) <= RUN, "runs are short"
            assert largest == max(map(_size, run), default=0), f"largest of the run from {start:#x}"
            assert all(start <= block.address < end for block in run), f"blocks of the run from {start:#x}"

    def _remove(self, i: int, j: int) -> LinkedBlock:
        """Remove and return block *j* of run *i*."""
        run = self._runs[i]
        block = run.pop(j)
        if not run and len(self._runs) > 1:
            del self._runs[i], self._largest[i], self._starts[i]
            self._starts[0] = 0
        elif block.size == self._largest[i]:
            self._largest[i] = max(map(_size, run), default=0)
        return block

    def _halve(self, i: int) -> None:
        """Make two runs of run *i*."""
        run = self._runs[i]
        upper = run[RUN // 2 :]
        del run[RUN // 2 :]
        self._runs.insert(i + 1, upper)
        self._starts.insert(i + 1, upper[0].address)
        self._largest[i : i + 1] = [max(map(_size, run)), max(map(_size, upper))]


class NextFit(ByAddress):
    """Next fit: the first block that is large enough from where the last search ended, round and round.

    A search begins at the block in which the last piece handed out ended, or else at the next one behind; after the
    highest address it goes on at the lowest. A search that finds nothing leaves the place as it is. Complexity as
    :class:`ByAddress`.
    """

    __slots__ = ("rover",)

    def __init__(self) -> None:
        super().__init__()
        self.rover = 0
        """Address behind the last piece handed out."""

    def take(self, size: int) -> LinkedBlock | None:
        """Remove and return the next fit for *size* bytes, or None when no block is large enough."""
        i, j = self._begin()
        if (k := _first_fit(self._runs[i], size, j)) < 0:
            # Run i again at the end: what lies before j in it is the last to be seen.
            order = (*range(i + 1, len(self._runs)), *range(i + 1))
            i = next((i for i in order if self._largest[i] >= size), -1)
            if i < 0:
                return None
            k = _first_fit(self._runs[i], size)
        self.rover = self._runs[i][k].address + size
        return self._remove(i, k)

    def _begin(self) -> tuple[int, int]:
        """Run and place of the first block that ends behind the rover; the place may be behind the run's last one."""
        i = bisect_right(self._starts, self.rover) - 1
        j = bisect_right(self._runs[i], self.rover, key=_address)
        # The block before may reach over the rover, in the run before too: it may have absorbed what stood between.
        before = (i, j - 1) if j else (i - 1, len(self._runs[i - 1]) - 1)
        if before[0] >= 0 and before[1] >= 0:
            block = self._runs[before[0]][before[1]]
            if block.address + block.size > self.rover:
                return before
        return i, j


_address = attrgetter("address")
_size = attrgetter("size")


def _first_fit(run: list[LinkedBlock], size: int, start: int = 0) -> int:
    """Place of the first block from *start* on that is large enough, -1 when none is."""
    for i in range(start, len(run)):
        if run[i].size >= size:
            return i
    return -1
