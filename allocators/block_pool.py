"""The free blocks of a pool without a prefix cache: taken at the head, given back at the tail.

::

    free   head -> 4 5 6 7 3 2 1 <- tail      block 0 is the null block: never handed out, never free

The verbs are those of :class:`~hbmtwin.allocators.prefix_cache.PrefixCache`, which keeps more for its blocks: a policy
need not ask which of both it has. vLLM's ``BlockPool`` with ``enable_caching=False``. Every verb is O(blocks it names).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks of which each belongs to one sequence or to nobody."""

    def __init__(self, num_blocks: int) -> None:
        self.cached = self.shared = 0
        """Free blocks that carry a key, and references beside the first one of each block: none."""
        self.num_blocks = num_blocks
        self.free = deque(range(1, num_blocks))

    def take(self) -> int:
        """The head of the queue. Raise IndexError if there is none."""
        return self.free.popleft()

    def take_many(self, count: int) -> list[int]:
        """So many from the head, in order; none for less than one."""
        popleft = self.free.popleft
        return [popleft() for _ in range(count)]

    def put_back(self, blocks: Iterable[int]) -> None:
        """To the tail, in this order."""
        self.free.extend(blocks)

    def take_back(self, blocks: Sequence[int]) -> None:
        """Undo that a step took them: to the head, in this order."""
        self.free.extendleft(reversed(blocks))

    def clear(self) -> bool:
        """There are no keys to drop; whether every block is free."""
        return len(self.free) == self.num_blocks - 1

    def keyed_blocks(self) -> Sequence[int]:
        """Those that carry a key: none does."""
        return ()

    def check(self, tables: Iterable[tuple[Sequence[int], int]]) -> None:
        """Assert that every block but the null one is in one table or in the queue. O(blocks * log)."""
        held = [block for table, _ in tables for block in table]
        assert sorted([*held, *self.free]) == list(range(1, self.num_blocks))
