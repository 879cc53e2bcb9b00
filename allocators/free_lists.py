"""Blocks that know their address neighbours, and the two orders in which free ones are kept.

Both orders are a sorted list of integers beside a list of blocks at the same places. With the few thousand free
blocks that a device has at most, a bisection and a move of some kilobytes cost less than any tree made of Python
objects.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final, Generic, Protocol, TypeVar

from hbmtwin.allocators.records import Tag

ADDRESS_BITS: Final = 48
"""Sort key of a block by size: ``size << ADDRESS_BITS | address``."""


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

    blocks: list[LinkedBlock]

    def take(self, size: int) -> LinkedBlock | None:
        """Remove and return the block for *size* bytes, or None when no block is large enough."""
        ...

    def put(self, block: LinkedBlock) -> None:
        """Add a free block."""
        ...

    def drop(self, block: LinkedBlock) -> None:
        """Remove this block."""
        ...

    def largest(self) -> int:
        """Size of the largest block, 0 when there is none."""
        ...

    def check(self) -> None:
        """Assert the order."""
        ...


class BySize(Generic[BlockT]):
    """Best fit: the smallest block that is large enough, the lowest address among equals. All verbs O(log n)."""

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
        key = block.size << ADDRESS_BITS | block.address
        i = bisect_left(self.keys, key)
        self.keys.insert(i, key)
        self.blocks.insert(i, block)

    def drop(self, block: BlockT) -> None:
        """Remove this block."""
        i = bisect_left(self.keys, block.size << ADDRESS_BITS | block.address)
        del self.keys[i]
        del self.blocks[i]

    def largest(self) -> int:
        """Size of the largest block, 0 when there is none."""
        return self.blocks[-1].size if self.blocks else 0

    def check(self) -> None:
        """Assert the order. O(n)."""
        assert self.keys == [b.size << ADDRESS_BITS | b.address for b in self.blocks], "keys belong to their blocks"
        assert self.keys == sorted(set(self.keys)), "free blocks are ordered by size and address"


class ByAddress:
    """First fit: the lowest address that is large enough. ``take`` and ``largest`` O(n), the others O(log n)."""

    __slots__ = ("blocks", "keys")

    def __init__(self) -> None:
        self.keys: list[int] = []
        self.blocks: list[LinkedBlock] = []

    def take(self, size: int) -> LinkedBlock | None:
        """Remove and return the first fit for *size* bytes, or None when no block is large enough."""
        for i, block in enumerate(self.blocks):
            if block.size >= size:
                del self.keys[i]
                del self.blocks[i]
                return block
        return None

    def put(self, block: LinkedBlock) -> None:
        """Add a free block."""
        i = bisect_left(self.keys, block.address)
        self.keys.insert(i, block.address)
        self.blocks.insert(i, block)

    def drop(self, block: LinkedBlock) -> None:
        """Remove this block."""
        i = bisect_left(self.keys, block.address)
        del self.keys[i]
        del self.blocks[i]

    def largest(self) -> int:
        """Size of the largest block, 0 when there is none."""
        return max((block.size for block in self.blocks), default=0)

    def check(self) -> None:
        """Assert the order. O(n)."""
        assert self.keys == [b.address for b in self.blocks], "keys belong to their blocks"
        assert self.keys == sorted(set(self.keys)), "free blocks are ordered by address"
