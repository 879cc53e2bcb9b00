"""Blocks with reference counts and, in vLLM's old engine (v0), one block for each content.

::

    block            references, key or none
    free             plain: 7 3 0 ...             nobody's, without a key; taken first, from the left
                     evictor: 5 2 ...             nobody's, with a key; taken only when plain is empty
    key -> block     k0: 5    k1: 2               one block for each key: an equal one gives its own up

The evictor takes the block that was used least recently; of those used last in the same step the one with the longest
prefix, so that a chain of blocks is eaten from its end. Sources: vLLM's ``core/block/naive_block.py``,
``prefix_caching_block.py`` and ``core/evictor.py`` before its v1 engine. There the plain free list is an unordered set
(later a queue); here it is a queue, so counts are v0's and ids are not.

Every verb is O(1), taking from the evictor O(log(blocks)).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

from hbmtwin.allocators.block_keys import NO_KEY, BlockKeys


class SharedBlocks:
    """References and keys of the blocks of one pool, ids 0 to ``num_blocks - 1``."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.refs = [0] * num_blocks
        self.key_of = [NO_KEY] * num_blocks
        self.block_of: dict[int, int] = {}
        self.keys = BlockKeys(block_size)
        self.entries = 0
        """References of all blocks together."""
        self._plain = deque(range(num_blocks))
        self._idle: dict[int, int] = {}
        """Blocks in the evictor: the number of the entry of the heap that is valid for each."""
        self._heap: list[tuple[int, int, int, int]] = []
        """Last use, minus the blocks of its prefix, number of the entry, block."""
        self._last_entry = 0

    @property
    def free(self) -> int:
        """Blocks that nobody refers to, those with a key included."""
        return len(self._plain) + len(self._idle)

    @property
    def cached(self) -> int:
        """Blocks that nobody refers to and that keep a key."""
        return len(self._idle)

    @property
    def held(self) -> int:
        """Blocks that somebody refers to."""
        return len(self.refs) - self.free

    def take(self) -> int:
        """A free block for one sequence; from the evictor it loses its key. Raise IndexError if none is free."""
        block = self._plain.popleft() if self._plain else self._evict()
        self.refs[block] = 1
        self.entries += 1
        return block

    def share(self, block: int) -> bool:
        """One reference more; True if others refer to it, False if it came out of the evictor."""
        others = self.refs[block] > 0
        if not others:
            del self._idle[block]
        self.refs[block] += 1
        self.entries += 1
        return others

    def drop(self, block: int, last_use: int, prefix_blocks: int) -> bool:
        """One reference less; True if others still refer to it, else it goes to the plain list or the evictor.

        *prefix_blocks* are the blocks of the prefix that it ends.
        """
        self.refs[block] -= 1
        self.entries -= 1
        if self.refs[block]:
            return True
        if self.key_of[block] == NO_KEY:
            self._plain.append(block)
        else:
            self._last_entry += 1
            self._idle[block] = self._last_entry
            heappush(self._heap, (last_use, -prefix_blocks, self._last_entry, block))
        return False

    def put_back(self, blocks: Sequence[int]) -> None:
        """Undo :meth:`take` of blocks without a key, in the order in which they were taken."""
        for block in blocks:
            assert self.refs[block] == 1
            assert self.key_of[block] == NO_KEY
            self.refs[block] = 0
        self.entries -= len(blocks)
        self._plain.extendleft(reversed(blocks))

    def register(self, block: int, key: int) -> None:
        """A full block of a sequence gets its key, which no other block has."""
        self.key_of[block] = key
        self.block_of[key] = block
        self.keys.use(key)

    def unregister(self, block: int) -> None:
        """Take the key of a block away that is not in the evictor."""
        key, self.key_of[block] = self.key_of[block], NO_KEY
        del self.block_of[key]
        self.keys.unuse(key)

    def _evict(self) -> int:
        while self._heap:
            _, _, entry, block = heappop(self._heap)
            if self._idle.get(block) == entry:
                del self._idle[block]
                self.unregister(block)
                return block
        raise IndexError("no block is free")

    def keyed_blocks(self) -> Sequence[int]:
        """Those that carry a key, held or not. O(keys)."""
        return [*self.block_of.values()]

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Assert that every block is in one place, and that references are the entries of *tables*. O(blocks)."""
        counted = [0] * len(self.refs)
        for table in tables:
            for block in table:
                counted[block] += 1
        assert counted == self.refs
        assert self.entries == sum(counted)
        assert sorted([*self._plain, *self._idle]) == [block for block, refs in enumerate(self.refs) if not refs]
        assert self.block_of == {key: block for block, key in enumerate(self.key_of) if key != NO_KEY}
        assert all(self.key_of[block] == NO_KEY for block in self._plain)
        assert all(self.key_of[block] != NO_KEY for block in self._idle)
