"""Blocks, and the pools in which free ones wait.

Every default pool and every private pool comes twice, small and large. Inside a pool free blocks are ordered by stream,
size and address; since no rule but the release of everything looks past one stream, each stream has a list of its own::

    BlockPool (small | large, default or private)
        stream 0   FreeBlocks   free, by size and address    unmapped, by address
        stream 1   FreeBlocks   ...
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Final

from hbmtwin.allocators.free_lists import ADDRESS_BITS, BySize
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.stats import LARGE, SMALL

if TYPE_CHECKING:
    from hbmtwin.allocators.caching.expandable import ExpandableSegment
    from hbmtwin.allocators.caching.hash_order import HashOrder
    from hbmtwin.allocators.caching.private_pools import PrivatePool

# States of a block. Torch keeps a flag ``allocated``, a flag ``mapped`` and a count of events; neighbours merge if both
# are in the same of the last two states.
ALLOCATED: Final = 0
WAITING: Final = 1
"""Freed by its caller, and in use by some stream."""
FREE: Final = 2
UNMAPPED: Final = 3
"""A range of an expandable segment without memory behind it."""

STREAMS_PER_POOL: Final = 32
"""Torch makes so many streams per device and then hands them out again."""


class Block:
    """A range inside a segment, linked with its neighbours in address order."""

    __slots__ = (
        "address",
        "age_base",
        "event_count",
        "expandable",
        "home",
        "next",
        "owner",
        "prev",
        "requested",
        "size",
        "state",
        "stream",
        "stream_uses",
        "tag",
    )

    def __init__(
        self, address: int, size: int, home: FreeBlocks, state: int, expandable: ExpandableSegment | None = None
    ) -> None:
        self.address = address
        self.size = size
        self.home = home
        self.stream = home.stream
        self.state = state
        self.expandable = expandable
        """The expandable segment that it lies in."""
        self.prev: Block | None = None
        self.next: Block | None = None
        self.stream_uses: HashOrder | None = None
        """Ids of the streams that were recorded; None is the empty set of a new block."""
        self.event_count = 0
        self.age_base = 0
        # Of the last caller: a block that becomes free keeps them, as a snapshot shows.
        self.requested = 0
        self.tag = Tag.ACTIVATION
        self.owner = -1

    @property
    def is_split(self) -> bool:
        """Whether it is a part of its segment only."""
        return self.prev is not None or self.next is not None


class FreeBlocks(BySize[Block]):
    """The free blocks of one pool and stream, and the unmapped ranges of their expandable segments."""

    __slots__ = ("kind", "pool", "stream", "unmapped")

    def __init__(self, pool: BlockPool, stream: int) -> None:
        super().__init__()
        self.pool = pool
        self.kind = pool.kind
        self.stream = stream
        self.unmapped: list[Block] = []
        """In address order."""

    def put(self, block: Block) -> None:
        """Add a free block; its age starts at 0. O(log n)."""
        block.age_base = self.pool.searches
        key = block.size << ADDRESS_BITS | block.address
        i = bisect_left(self.keys, key)
        self.keys.insert(i, key)
        self.blocks.insert(i, block)

    def put_unmapped(self, block: Block) -> None:
        """Add an unmapped range. O(n)."""
        insort(self.unmapped, block, key=_address)

    def check(self) -> None:
        """Assert both orders. O(n)."""
        super().check()
        addresses = [block.address for block in self.unmapped]
        assert addresses == sorted(set(addresses)), "unmapped ranges are ordered by address"


class BlockPool:
    """Free blocks of one kind (:data:`~hbmtwin.allocators.stats.SMALL` or LARGE), of the default or a private pool."""

    __slots__ = ("_homes", "cached_pages", "kind", "private", "searches", "streams")

    def __init__(self, kind: int, private: PrivatePool | None = None) -> None:
        self.kind = kind
        self.private = private
        self.streams: dict[int, FreeBlocks] = {}
        """By stream; a stream that torch hands out a second time under another number shares its list."""
        self._homes: list[FreeBlocks] = []
        self.searches = 0
        """Searches while garbage collection is on: the age of a free block is how many it has seen."""
        self.cached_pages: list[int] = []
        """Physical pages that ``empty_virt_addr_cache`` took from behind addresses and kept."""

    def home(self, stream: int) -> FreeBlocks:
        """The list of a stream, made at its first use."""
        known = self.streams.get(stream)
        if known is None:
            same = same_stream(stream)
            if same == stream:
                known = FreeBlocks(self, stream)
                insort(self._homes, known, key=_stream)
            else:
                known = self.home(same)
            self.streams[stream] = known
        return known

    def homes(self) -> Iterator[FreeBlocks]:
        """The lists of all streams, in stream order."""
        return iter(self._homes)

    @property
    def pool_id(self) -> int:
        """n of a private pool that torch calls (0, n), 0 for a default pool."""
        return 0 if self.private is None else self.private.number


class PoolPair:
    """The small and the large pool that serve a request together."""

    def __init__(self, private: PrivatePool | None = None) -> None:
        self.small = BlockPool(SMALL, private)
        self.large = BlockPool(LARGE, private)

    def homes(self) -> Iterator[FreeBlocks]:
        """The lists of both pools and all streams, the large pool first."""
        return chain(self.large.homes(), self.small.homes())


def same_stream(stream: int) -> int:
    """The first number of the stream that torch hands out as number *stream*: 33 is 1 again."""
    return stream if stream <= STREAMS_PER_POOL else (stream - 1) % STREAMS_PER_POOL + 1


def _address(block: Block) -> int:
    return block.address


def _stream(home: FreeBlocks) -> int:
    return home.stream
