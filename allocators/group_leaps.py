"""Leaps over decode steps: only those steps of a sequence are carried out in which its tables change.

::

    sequence 0   tokens 13   quiet to 15        step  1  2  3  4  5  6  7
    sequence 1   tokens 10   quiet to 14        seq 0       x           x      x: takes, forgets or registers
                                                seq 1             x
                                                order  (3, 0)  (5, 1)  (7, 0)  as in single steps

A trial runs the same steps on copies of the tables, to count how many of them have the blocks they need.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heapreplace

from hbmtwin.allocators.group_managers import GroupManager, GroupTable

PROMISED = -1
"""Stands in a trial's table for a block that would be taken: nobody shares it."""


def run_steps(
    starts: Sequence[tuple[int, int]], limit: int, longest: int, step: Callable[[int, int], int | None]
) -> int:
    """Call ``step(place, computed tokens)`` wherever tables may change within *limit* steps, by (step, place).

    *starts* are tokens and quiet tokens of each sequence: in step j, from 1, ``tokens + j - 1`` are computed, and up to
    *longest*. A step returns how long it is quiet now, or None if it cannot be carried out. Returns the steps that can.
    O(sequences + changes * log(sequences)).
    """
    queue = [(max(quiet - tokens, 0) + 1, place) for place, (tokens, quiet) in enumerate(starts)]
    queue = [(at, place) for at, place in queue if at <= limit]
    heapify(queue)
    while queue:
        at, place = queue[0]
        tokens = starts[place][0]
        computed = tokens + at - 1
        if computed > longest:
            heappop(queue)
            continue
        quiet = step(place, computed)
        if quiet is None:
            return at - 1
        following = max(quiet - tokens, at) + 1
        if following <= limit:
            heapreplace(queue, (following, place))
        else:
            heappop(queue)
    return limit


def copied(table: GroupTable) -> GroupTable:
    """A table to try things on."""
    copy = GroupTable()
    copy.blocks = list(table.blocks)
    copy.keyed, copy.skipped, copy.grown, copy.previous = table.keyed, table.skipped, table.grown, table.previous
    return copy


class Trial:
    """Decode steps on copies of tables; only free blocks and references are counted."""

    def __init__(
        self,
        managers: Sequence[GroupManager],
        refs: Sequence[int],
        free: int,
        tables: Sequence[Sequence[GroupTable]],
        longest: int,
    ) -> None:
        self._managers = managers
        self._refs = refs
        self._free = free
        self._tables = [[copied(table) for table in each] for each in tables]
        self._longest = longest
        self._given_up: dict[int, int] = {}
        """References to a block that were given up."""

    def step(self, place: int, computed: int) -> int | None:
        """One token of one sequence; None if its blocks are not free."""
        tables = self._tables[place]
        for manager, table in zip(self._managers, tables, strict=True):
            for blocks in manager.forget(table, computed):
                self._give_back(blocks)
        tokens = min(computed + 1, self._longest)
        required = [manager.required(tokens, tokens) for manager in self._managers]
        needed = zip(self._managers, tables, required, strict=True)
        if sum(manager.new_blocks(table, places, 0, computed) for manager, table, places in needed) > self._free:
            return None
        for manager, table, places in zip(self._managers, tables, required, strict=True):
            if places > len(table.blocks):
                manager.grow(table, places, self._take)
        return min([manager.next_change(table) for manager, table in zip(self._managers, tables, strict=True)])

    def _take(self) -> int:
        self._free -= 1
        return PROMISED

    def _give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block == PROMISED:
                self._free += 1
                continue
            self._given_up[block] = self._given_up.get(block, 0) + 1
            self._free += self._given_up[block] == self._refs[block]
