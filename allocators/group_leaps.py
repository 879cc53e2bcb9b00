"""Leaps over decode steps: only those steps of a sequence are carried out in which its tables change.

::

    sequence 0   tokens 13   quiet to 15        step  1  2  3  4  5  6  7
    sequence 1   tokens 10   quiet to 14        seq 0       x           x      x: takes, forgets or registers
                                                seq 1             x
                                                order  (3, 0)  (5, 1)  (7, 0)  as in single steps

A trial runs the same steps ahead of the batch, on copies of the tables that change, to see which of them have the
blocks they need. What it has tried once holds until the batch is over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from heapq import heapify, heappop, heappush, heapreplace

from hbmtwin.allocators.decode_batch import Batch
from hbmtwin.allocators.group_managers import NEVER
from hbmtwin.allocators.group_pool import GroupPool, Held
from hbmtwin.allocators.records import KVSequence

PROMISED = -1
"""Stands in a trial's table for a block that would be taken: nobody shares it."""


class Calendar:
    """Of each coming step the places of sequences whose tables may change in it."""

    __slots__ = ("due", "pending")

    def __init__(self) -> None:
        self.due: dict[int, list[int]] = {}
        self.pending: list[int] = []
        """A heap of the steps."""

    def enter(self, step: int, place: int) -> None:
        """O(log(steps))."""
        places = self.due.get(step)
        if places is None:
            self.due[step] = [place]
            heappush(self.pending, step)
        else:
            places.append(place)

    def turn(self, end: int) -> int:
        """The next step up to *end*, or NEVER; it is pending no more."""
        return heappop(self.pending) if self.pending and self.pending[0] <= end else NEVER


class GroupBatch(Batch[Held]):
    """A batch over several groups. Making it is O(sequences), and so is the first question of each kind; then a
    question is O(block size) at most, and a step what changes in it."""

    __slots__ = ("_bends", "_pool", "_releases", "_takes", "_trial", "calendar", "cap", "lag")

    def __init__(
        self, pool: GroupPool, decoding: Sequence[KVSequence], held: Sequence[Held], cap: int = NEVER, *, lag: int = 0
    ) -> None:
        """Sequences grow to *cap* tokens and no further. Their last *lag* computed tokens are under way, and not known,
        when a step is planned: what these read is not given back, and has no key."""
        super().__init__(decoding, held)
        self.cap = cap
        self.lag = lag
        self._pool = pool
        self.calendar = Calendar()
        due = self.calendar.due
        for place, h in enumerate(held):
            step = max(h.quiet - h.tokens, 0) + 1
            if step in due:
                due[step].append(place)
            else:
                due[step] = [place]
        self.calendar.pending = sorted(due)
        self._trial: Trial | None = None
        self._takes: list[tuple[int, int, list[tuple[int, int]]]] | None = None
        """Of each kind of groups its block size, how many groups there are, and of each step, in order, how many
        sequences take their next block in it: they take another every block size steps."""
        self._releases: list[tuple[int, int]] | None = None
        """A heap of (step, place): no later one gives its next block back."""
        self._bends: list[int] | None = None
        """Steps in which somebody reaches the longest window, the next one last."""

    @property
    def before(self) -> int:
        """Steps that the sequences' ``tokens`` know of."""
        return self.step - self.lead

    # -- questions ---------------------------------------------------------------------------------------------------

    def fitting(self, limit: int) -> int:
        """How many further steps, at most *limit*, have their blocks, those given back in between among them.

        O(block size * kinds of groups) when blocks are plenty, else O(changes of the steps not tried before).
        """
        end, trial = self.step + limit, self._trial
        if trial is None or (trial.reached < end and not trial.stopped):
            if self.cap == NEVER and self._need(end) <= self._pool.num_free:
                return limit
            if trial is None:
                trial = self._trial = Trial(self, self._pool)
            trial.run(end)
        return min(limit, trial.reached - self.step)

    def _need(self, end: int) -> int:
        """Blocks that are taken up to a step, none of them given back."""
        if self._takes is None:
            self._takes, first = [], self.before + 1
            for manager, index, groups in self._pool.kinds:
                away = Counter([manager.next_take(h.tables[index]) - h.tokens for h in self.tables.values()])
                self._takes.append((manager.size, groups, [(first + steps, away[steps]) for steps in sorted(away)]))
        need, now = 0, self.step
        for size, groups, coming in self._takes:
            taken = 0
            for step, count in coming:
                if step > end:
                    break
                taken += count * ((end - step) // size - max((now - step) // size, -1))
            need += groups * taken
        return need

    def unseen(self, limit: int) -> int:
        """How many further steps, at most *limit*, give nothing back. O(1), and O(log(sequences)) for each release
        since it was asked last."""
        if not self.tables:
            return limit
        first = self.before + 1
        if self._releases is None:
            self._releases = [(h.releases - h.tokens + first, place) for place, h in self.tables.items()]
            heapify(self._releases)
        step, place = self._releases[0]
        while (now := self.tables[place].releases - self.tables[place].tokens + first) > step:
            heapreplace(self._releases, (now, place))
            step, place = self._releases[0]
        return max(0, min(limit, step - 1 - self.step))

    def unbent(self, bound: int, limit: int) -> int:
        """How many further steps, at most *limit*, until somebody has *bound* tokens. O(1) amortised."""
        if self._bends is None:
            self._bends = sorted({bound - h.tokens + self.before for h in self.tables.values()}, reverse=True)
        while self._bends and self._bends[-1] <= self.step:
            self._bends.pop()
        return min(limit, self._bends[-1] - self.step) if self._bends else limit

    # -- going on ----------------------------------------------------------------------------------------------------

    def go(self, steps: int) -> None:
        """Carry out *steps*, which must fit. O(log(steps) + groups) for each change."""
        pool, calendar, end = self._pool, self.calendar, self.step + steps
        if self._trial is not None and self._trial.reached < end:
            self._trial = None
        while (step := calendar.turn(end)) != NEVER:
            for place in sorted(calendar.due.pop(step)):
                h = self.tables[place]
                start = h.tokens - self.before
                computed = start + step - 1
                if computed > self.cap:
                    continue
                tokens = min(computed + 1, self.cap)
                pool.forget(h, computed - self.lag)
                pool.grow(h, tokens, tokens)
                pool.register(self.decoding[place], h, tokens - self.lag)
                calendar.enter(max(h.quiet - start, step) + 1, place)
        self.went(steps)

    def fold(self) -> None:
        """As in any batch; who is at the cap stays there."""
        super().fold()
        if self.longest > self.cap:
            for h in self.tables.values():
                h.tokens = min(h.tokens, self.cap)


class Trial:
    """Steps ahead of a batch, on copies of tables; only free blocks and references are counted.

    A table is copied when it first changes: so far the batch's own has not changed either, nor has any reference to a
    block that nobody has given up yet.
    """

    def __init__(self, batch: GroupBatch, pool: GroupPool) -> None:
        self.reached = batch.step
        self.stopped = False
        """Whether the step behind lacks a block."""
        self._batch = batch
        self._pool = pool
        self._refs = pool.cache.refs
        self._free = pool.num_free
        self._calendar = Calendar()
        self._calendar.pending = list(batch.calendar.pending)
        self._held: dict[int, Held] = {}
        self._left: dict[int, int] = {}
        """References that are left to a block which somebody has given up."""

    def run(self, end: int) -> None:
        """Go on to step *end*, or to the one before the first that lacks a block. O(changes * groups)."""
        calendar, batch = self._calendar, self._batch
        while not self.stopped and (step := calendar.turn(end)) != NEVER:
            places = calendar.due.pop(step, [])
            places += [place for place in batch.calendar.due.get(step, ()) if place not in self._held]
            for place in sorted(places):
                start = batch.tables[place].tokens - batch.before
                if start + step - 1 > batch.cap:
                    continue
                quiet = self._step(place, start + step - 1)
                if quiet is None:
                    self.stopped, end = True, step - 1
                    break
                calendar.enter(max(quiet - start, step) + 1, place)
        self.reached = max(self.reached, end)

    def _step(self, place: int, computed: int) -> int | None:
        """One token of one sequence: how far its tables are quiet now; None if its blocks are not free."""
        held = self._held.get(place)
        if held is None:
            held = self._held[place] = copied(self._batch.tables[place])
        managers = self._pool.managers
        done = computed - self._batch.lag
        if done >= held.releases:
            for manager, table in zip(managers, held.tables, strict=True):
                for blocks in manager.forget(table, done):
                    self._give_back(blocks)
        tokens = min(computed + 1, self._batch.cap)
        if tokens > held.takes:
            need, required = 0, [manager.required(tokens, tokens) for manager in managers]
            for manager, index, groups in self._pool.kinds:
                need += groups * manager.new_blocks(held.tables[index], required[index], 0, computed)
            if need > self._free:
                return None
            for manager, table, places in zip(managers, held.tables, required, strict=True):
                if places > len(table.blocks):
                    manager.grow(table, places, self._take)
        self._pool.settle(held)
        return held.quiet

    def _take(self) -> int:
        self._free -= 1
        return PROMISED

    def _give_back(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            if block != PROMISED:
                left = self._left[block] = self._left.get(block, self._refs[block]) - 1
                if left:
                    continue
            self._free += 1


def copied(held: Held) -> Held:
    """Tables to try things on; nobody registers their blocks."""
    copy = Held(len(held.tables))
    for table, mine in zip(held.tables, copy.tables, strict=True):
        mine.blocks = list(table.blocks)
        mine.keyed, mine.skipped, mine.grown, mine.previous = table.keyed, table.skipped, table.grown, table.previous
    copy.takes, copy.releases, copy.next_key = held.takes, held.releases, NEVER
    return copy
