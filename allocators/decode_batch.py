"""Sequences that decode together: in which step who takes a block, without asking each of them.

::

    block size 4          slots left   takes a block in step
    A  | 1 1 1 1 | 1 1 . . |   2        3, 7, 11, ...        takes   2: [B, D]   3: [A]   5: [C]
    B  | 1 1 1 . |             1        2, 6, 10, ...                one list for each slot of a block that somebody
    C  | 1 1 1 1 | . . . . |   4        5, 9, 13, ...                is at; who has taken goes on block_size steps later
    D  | 1 1 1 1 | 1 1 1 . |   1        2, 6, 10, ...

With prefix caching, blocks that fill up, and get their key, stand in lists of the same kind.
Making a batch is O(sequences); then :meth:`DecodeBatch.need` is O(block_size), and going on costs what it takes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from hbmtwin.allocators.records import KVSequence

NEVER = 1 << 62


class BlockTable:
    """The blocks of one sequence, how many of them got a key, and its tokens: the target of the last reserve, lookahead
    not included (less the ``lead`` of its batch)."""

    __slots__ = ("blocks", "keyed", "next_key", "promised", "quiet", "tokens")

    def __init__(self, next_key: int, promised: int) -> None:
        self.blocks: list[int] = []
        self.keyed = 0
        self.tokens = 0
        self.next_key = next_key
        """Tokens that fill the next block which gets a key; ``NEVER`` without prefix caching, and where spans end."""
        self.quiet = 0
        """Up to so many tokens neither a block nor a key is due."""
        self.promised = promised
        """Blocks that the sequence may come to hold."""

    def settle(self, block_size: int, longest: int) -> None:
        """Say anew how far it is quiet, after its blocks or keys have changed."""
        self.quiet = min(len(self.blocks) * block_size, self.next_key - 1, longest)

    def check(self, block_size: int, longest: int) -> None:
        """Assert that its tokens have room, and what is derived from its blocks and keys."""
        assert 0 <= self.tokens <= len(self.blocks) * block_size
        assert self.next_key in (NEVER, (self.keyed + 1) * block_size)
        assert self.quiet == min(len(self.blocks) * block_size, self.next_key - 1, longest)
        assert len(self.blocks) <= self.promised
        assert self.keyed * block_size <= self.tokens


class DecodeBatch:
    """Tables that gain a token each in every step, in running order."""

    __slots__ = ("_fills", "_pending", "_step", "_takes", "block_size", "decoding", "lead", "longest", "tables")

    def __init__(self, decoding: Sequence[KVSequence], tables: Sequence[BlockTable], block_size: int) -> None:
        self.decoding = decoding
        """The very list that it was made for: as long as nothing else happens, the same list means the same batch."""
        self.tables = tables
        self.block_size = block_size
        self.lead = 0
        """Steps that the tables' ``tokens`` do not know of yet."""
        self.longest = max([table.tokens for table in tables], default=0)
        """Tokens of the longest sequence, the lead included."""
        self._step = 0
        self._takes: dict[int, list[int]] = {}
        """Of each coming step the places of tables that take a block in it."""
        self._fills: dict[int, list[int]] = {}
        takes, fills = self._takes, self._fills
        for place, table in enumerate(tables):
            tokens = table.tokens
            due = len(table.blocks) * block_size - tokens + 1
            if due in takes:
                takes[due].append(place)
            else:
                takes[due] = [place]
            if table.next_key != NEVER:
                fills.setdefault(table.next_key - tokens, []).append(place)
        self._pending = list(takes.keys() | fills.keys())
        """A heap of the steps in which something is due."""
        heapify(self._pending)

    def need(self, steps: int) -> int:
        """Blocks that the next *steps* take. O(block_size)."""
        end, size = self._step + steps, self.block_size
        return sum([len(places) * ((end - due) // size + 1) for due, places in self._takes.items() if due <= end])

    def horizon(self, free: int, limit: int) -> int:
        """The most steps, at most *limit*, for which *free* blocks are enough. O(block_size * log(block_size))."""
        size, count, step = self.block_size, len(self.tables), self._step
        # Between as many steps as fit if no slot is free now and if the last blocks may stay unfilled.
        low = free // count * size
        slots = sum([len(places) * (due - 1 - step) for due, places in self._takes.items()])
        high = min(limit, (free * size + slots) // count)
        return low + bisect_right(range(low + 1, high + 1), free, key=self.need)

    def go(self, steps: int) -> Iterator[tuple[int, bool]]:
        """Go on by *steps*; what is due in them as (place, whether a block fills up, else one is taken), by step and by
        running order, taken before filled. O(log(block_size)) each. To be read to its end."""
        size, takes, fills, pending = self.block_size, self._takes, self._fills, self._pending
        end = self._step + steps
        while pending and pending[0] <= end:
            step = heappop(pending)
            again = step + size
            if again not in takes and again not in fills:
                heappush(pending, again)
            due = [2 * place for place in _moved(takes, step, again)]
            due += [2 * place + 1 for place in _moved(fills, step, again)]
            due.sort()
            for code in due:
                yield code >> 1, bool(code & 1)
        self._step = end
        self.lead += steps
        self.longest += steps

    def fold(self) -> None:
        """Tell the tables of the steps that they do not know of. O(sequences), O(1) if there are none."""
        if self.lead:
            lead, self.lead = self.lead, 0
            for table in self.tables:
                table.tokens += lead


def _moved(due: dict[int, list[int]], step: int, again: int) -> list[int]:
    """Who is due in *step*, and is due *again* from now on."""
    places = due.pop(step, [])
    if again in due:
        due[again] += places
    elif places:
        due[again] = places
    return places
