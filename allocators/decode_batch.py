"""Sequences that decode together: in which step who takes a block, without asking each of them.

::

    block size 4          slots left   takes a block in step
    A  | 1 1 1 1 | 1 1 . . |   2        3, 7, 11, ...        takes   2: [B, D]   3: [A]   5: [C]
    B  | 1 1 1 . |             1        2, 6, 10, ...                one list for each slot of a block that somebody
    C  | 1 1 1 1 | . . . . |   4        5, 9, 13, ...                is at; who has taken goes on block_size steps later
    D  | 1 1 1 1 | 1 1 1 . |   1        2, 6, 10, ...

With prefix caching, blocks that fill up, and get their key, stand in lists of the same kind.
Making a batch is O(sequences); then :meth:`DecodeBatch.need` is O(block_size), and going on costs what it takes. One
more sequence, or one less, is O(log(block_size)). What is known of a batch besides, and kept while the same list or
group is asked for again, is :class:`Batch`, for all block pools.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from hbmtwin.allocators.records import KVSequence

NEVER = 1 << 62
NOWHERE = -1
"""The place of a table that is in no batch."""


class BlockTable:
    """The blocks of one sequence, how many of them got a key, and its tokens: the target of the last reserve, lookahead
    not included (less the ``lead`` of its batch)."""

    __slots__ = ("blocks", "keyed", "next_key", "place", "promised", "quiet", "sequence", "tokens")

    def __init__(self, sequence: KVSequence, next_key: int, promised: int) -> None:
        self.sequence = sequence
        self.place = NOWHERE
        """In the batch."""
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
        quiet = len(self.blocks) * block_size
        if quiet >= self.next_key:
            quiet = self.next_key - 1
        self.quiet = quiet if quiet < longest else longest

    def check(self, block_size: int, longest: int) -> None:
        """Assert that its tokens have room, and what is derived from its blocks and keys."""
        assert 0 <= self.tokens <= len(self.blocks) * block_size
        assert self.next_key in (NEVER, (self.keyed + 1) * block_size)
        assert self.quiet == min(len(self.blocks) * block_size, self.next_key - 1, longest)
        assert len(self.blocks) <= self.promised
        assert self.keyed * block_size <= self.tokens


class CountsTokens(Protocol):
    """What a sequence holds."""

    tokens: int
    """Those that it has slots for (less the ``lead`` of its batch)."""


Table = TypeVar("Table", bound=CountsTokens)


class Batch(Generic[Table]):
    """Sequences that gain a token each in every step, in running order; their tables hear of it when it is over."""

    __slots__ = ("decoding", "lead", "longest", "step", "tables")

    def __init__(self, decoding: Sequence[KVSequence], tables: Iterable[Table]) -> None:
        self.decoding = decoding
        """The very list or group that it was made for: as long as nothing else happens, the same one means the same
        batch."""
        self.tables = dict(enumerate(tables))
        """By place: a smaller one is before a larger one in running order."""
        self.step = 0
        """Steps since it was made."""
        self.lead = 0
        """Steps that the tables' ``tokens`` do not know of yet."""
        self.longest = self._longest()
        """Tokens of the longest sequence, the lead included."""

    def went(self, steps: int) -> None:
        """So many steps more are over. O(1)."""
        self.step += steps
        self.lead += steps
        self.longest += steps

    def fold(self) -> None:
        """Tell the tables of the steps that they do not know of. O(sequences), O(1) if there are none."""
        if self.lead:
            lead, self.lead = self.lead, 0
            for table in self.tables.values():
                table.tokens += lead

    def _longest(self) -> int:
        return max([table.tokens for table in self.tables.values()], default=-self.lead) + self.lead


class DecodeBatch(Batch[Table]):
    """A batch over blocks of one size that nobody gives back, and which get their keys when they are full."""

    __slots__ = ("_fills", "_next_place", "_pending", "_takes", "block_size")

    def __init__(
        self,
        decoding: Sequence[KVSequence],
        tables: Sequence[Table],
        num_blocks: Sequence[int],
        block_size: int,
        next_keys: Sequence[int] = (),
    ) -> None:
        """*num_blocks* and *next_keys* of each table; without the latter no block ever gets a key."""
        super().__init__(decoding, tables)
        self.block_size = block_size
        self._next_place = len(tables)
        self._takes: dict[int, list[int]] = {}
        """Of each coming step the places of tables that take a block in it."""
        self._fills: dict[int, list[int]] = {}
        takes, fills = self._takes, self._fills
        for place, (table, held) in enumerate(zip(tables, num_blocks, strict=True)):
            due = held * block_size - table.tokens + 1
            if due in takes:
                takes[due].append(place)
            else:
                takes[due] = [place]
        for place, next_key in enumerate(next_keys):
            if next_key != NEVER:
                fills.setdefault(next_key - tables[place].tokens, []).append(place)
        self._pending = list(takes.keys() | fills.keys())
        """A heap of the steps in which something is due; of some, perhaps, in which nothing is any more."""
        heapify(self._pending)

    def join(self, table: Table, num_blocks: int, next_key: int = NEVER) -> int:
        """One more sequence, behind all others; returns its place. O(log(block_size))."""
        place, now = self._next_place, self.step - table.tokens
        self._next_place += 1
        self.longest = max(self.longest, table.tokens)
        table.tokens -= self.lead
        self.tables[place] = table
        self._add(self._takes, now + num_blocks * self.block_size + 1, place)
        if next_key != NEVER:
            self._add(self._fills, now + next_key, place)
        return place

    def leave(self, place: int, num_blocks: int, next_key: int = NEVER) -> None:
        """One less; its table hears of the steps that are over. O(sequences / block_size), and O(sequences) for the
        longest."""
        table = self.tables.pop(place)
        table.tokens += self.lead
        now = self.step - table.tokens
        _remove(self._takes, now + num_blocks * self.block_size + 1, place)
        if next_key != NEVER:
            _remove(self._fills, now + next_key, place)
        if table.tokens == self.longest:
            self.longest = self._longest()

    def _add(self, due: dict[int, list[int]], step: int, place: int) -> None:
        if step in due:
            due[step].append(place)
        else:
            due[step] = [place]
            heappush(self._pending, step)

    @property
    def takes_always(self) -> bool:
        """Whether each of them takes a block in every step, and no block gets a key. O(1)."""
        return self.block_size == 1 and len(self._takes) == 1 and self.step + 1 in self._takes and not self._fills

    def need_now(self) -> int:
        """Blocks that the next step takes. O(1)."""
        return len(self._takes.get(self.step + 1, ()))

    def need(self, steps: int) -> int:
        """Blocks that the next *steps* take. O(block_size)."""
        end, size = self.step + steps, self.block_size
        return sum([len(places) * ((end - due) // size + 1) for due, places in self._takes.items() if due <= end])

    def horizon(self, free: int, limit: int) -> int:
        """The most steps, at most *limit*, for which *free* blocks are enough. O(block_size * log(block_size))."""
        size, count, step = self.block_size, len(self.tables), self.step
        # Between as many steps as fit if no slot is free now and if the last blocks may stay unfilled.
        low = free // count * size
        slots = sum([len(places) * (due - 1 - step) for due, places in self._takes.items()])
        high = min(limit, (free * size + slots) // count)
        return low + bisect_right(range(low + 1, high + 1), free, key=self.need)

    def go(self, steps: int) -> Sequence[tuple[int, bool]]:
        """Go on by *steps*; what is due in them as (place, whether a block fills up, else one is taken), by step and by
        running order, taken before filled. O(log(block_size)) each."""
        self.step += steps
        self.lead += steps
        self.longest += steps
        pending, end = self._pending, self.step
        if not pending or pending[0] > end:
            return ()
        size, takes, fills = self.block_size, self._takes, self._fills
        done: list[tuple[int, bool]] = []
        while pending and pending[0] <= end:
            step = heappop(pending)
            if step not in takes and step not in fills:
                continue  # who was due has left
            again = step + size
            if again not in takes and again not in fills:
                heappush(pending, again)
            due = [(place, False) for place in _moved(takes, step, again)]
            if fills:
                due += [(place, True) for place in _moved(fills, step, again)]
            if len(due) > 1:
                due.sort()
            done += due
        return done

    def pass_over(self, steps: int) -> None:
        """Go on by *steps* in which each takes a block (:attr:`takes_always`): who goes on knows what is due. O(1)."""
        places = self._takes.pop(self.step + 1)
        self.went(steps)
        self._takes[self.step + 1] = places
        self._pending = [self.step + 1]


def _moved(due: dict[int, list[int]], step: int, again: int) -> list[int]:
    """Who is due in *step*, and is due *again* from now on."""
    places = due.pop(step, [])
    if again in due:
        due[again] += places
    elif places:
        due[again] = places
    return places


def _remove(due: dict[int, list[int]], step: int, place: int) -> None:
    """Nobody of that place is due in *step* any more."""
    places = due[step]
    if len(places) == 1:
        del due[step]
    else:
        places.remove(place)
