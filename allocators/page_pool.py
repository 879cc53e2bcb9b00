"""Where pages of SGLang's token pool come from and go: a free list, and behind it the leaves of a radix tree.

::

    page 0        a dummy that takes the writes of padding: never handed out, never free
    free list     head -> 1 2 3 ...; pages are taken at the head; freed ones go to the tail where a page is one token,
                  else in front of the list, those of one call in table order
    free group    what ends at a step's end waits until the next step begins, and is freed in one call
    radix tree    when the list runs short, leaves that nobody locks are evicted, each in a call of its own

The rules are SGLang 0.5.23's (``TokenToKVPoolAllocator``, ``PagedTokenToKVPoolAllocator``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.pool_policy import PoolPolicy
from hbmtwin.allocators.radix_config import RadixConfig
from hbmtwin.allocators.radix_tree import RadixTree
from hbmtwin.allocators.records import KVLayout


class PagePool(PoolPolicy):
    """A pool whose pages are free, in a radix tree, or a sequence's own; a policy on top keeps the last."""

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: RadixConfig) -> None:
        super().__init__(layout, arena, config.num_blocks, layout.block_tensors(config.block_size))
        self.config = config
        self._tree = RadixTree(config.block_size, config.eviction_policy)
        """Empty for ever without prefix caching."""
        self._free = deque(range(1, config.num_blocks))
        self._ended: list[int] = []
        """Freed at the last step's end and after it, in one call (SGLang's free group): the next step finds them."""

    def _room(self) -> int:
        """Pages that can be had: free ones, and all that could be evicted."""
        return len(self._free) + len(self._ended) + self._tree.evictable

    def _take(self, count: int) -> list[int]:
        """The first *count* of the list; the tree gives what is short of them."""
        if count > len(self._free):
            self._evict_for(count)
        pop = self._free.popleft
        return [pop() for _ in range(count)]

    def _end_group(self) -> None:
        self._put(self._ended)
        self._ended = []

    def _evict_for(self, count: int) -> None:
        """Evict leaves, each its own call of free, until *count* pages are free or nothing is left to evict."""
        for pages in self._tree.evict(count - len(self._free)):
            self._put(pages)

    def _put(self, pages: Sequence[int]) -> None:
        """One call of free, in table order."""
        if self.config.block_size == 1:
            self._free.extend(pages)
        else:
            self._free.extendleft(reversed(pages))
