"""The last of a row of loads, each harder than the one before, at which runs hold often enough.

::

    load       0   1   2   3   4   5   6   7   8   9        seeds
    scouts     o       o           o       x                 the same few at each load: where about it is
    counted                    yes     ?  no                  others, until it is decided, or all are used
    checks         o       o                       x         the scouts again, well below and well above
                               |-------|                     the answer: yes up to load 6, no from 8 on

What scouts found decides nothing, only where counting begins; the counted runs have seeds of their own, so that none
is used to choose the place where it then counts as evidence. At most :data:`MOST_COUNTED` loads are counted, each with
that part of the error: both ends of the interval are then right at once, whatever the loads between do.

That more load is never better is not assumed: loads of which one, by its bounds, holds less often than a harder one are
told. One that lies below the answer is counted like the others, and if it fails, only what lies below it is answered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hbmtwin.sim.capacity.confidence import lower_bound, upper_bound
from hbmtwin.sim.capacity.sequential import SequentialRule

MOST_COUNTED = 12
"""Loads that may be counted. The error is divided by it, of which the runs needed grow with the logarithm."""
CHECK_ERROR = 0.01
"""Of a bound in a check of order: two loads are told as out of order where both bounds say so."""
BELOW, ABOVE = (0.25, 0.5, 0.75, 0.9), (1.1, 1.5, 2.0)
"""Where order is checked: parts of the last load that holds, and of the first that does not."""

Ask = Callable[[Sequence[tuple[int, int]]], Mapping[tuple[int, int], bool]]
"""Whether runs hold, by the number of the load and of the draw. May be asked for a run again."""


class Count(NamedTuple):
    """What was seen at one load."""

    failures: int
    trials: int
    decided: bool | None = None
    """By the sequential rule; None: not decided, or not counted."""

    @property
    def held(self) -> int:
        """Runs that held."""
        return self.trials - self.failures


class OutOfOrder(NamedTuple):
    """Two loads of which the easier one holds less often."""

    easier: int
    harder: int


@dataclass(frozen=True, slots=True)
class Found:
    """The answer of a search, in numbers of loads."""

    yes: int | None
    """The last load that was shown to hold often enough; None: none was."""
    no: int | None
    """The first that was shown not to; None: none was, up to the last."""
    scouted: Mapping[int, Count]
    counted: Mapping[int, Count]
    out_of_order: tuple[OutOfOrder, ...]
    gave_up: bool
    """Whether loads between were left uncounted because as many as may be were counted."""


@dataclass(slots=True)
class CapacitySearch:
    """One search. *count* loads, *scouts* draws (from 0 on) at each that is scouted, the rule's draws behind them."""

    count: int
    ask: Ask
    rule: SequentialRule
    scouts: int
    guess: int = 0
    """Where scouting begins."""
    most_counted: int = MOST_COUNTED
    scouted: dict[int, Count] = field(default_factory=dict)
    counted: dict[int, Count] = field(default_factory=dict)

    def run(self) -> Found:
        """Search. About (2 log2(count) + 7) x scouts runs, and what the rule takes at each load that is counted."""
        start = max(0, self.scout(self.count))
        while True:
            gave_up = self._count(start)
            yes, no = self._ends()
            self._check(yes, no)
            bad = out_of_order({**self.scouted, **self.counted}, self.rule.survive)
            doubtful = [p.easier for p in bad if yes is not None and p.easier < yes and p.easier not in self.counted]
            if doubtful and not gave_up:
                start = min(doubtful)  # counted as all others: the check was right, or it was chance
                continue
            if doubtful:
                yes = max((y for y, c in self.counted.items() if c.decided and y < min(doubtful)), default=None)
            return Found(yes, no, self.scouted, self.counted, bad, gave_up)

    def scout(self, limit: int) -> int:
        """The last load below *limit* at which no more scouts fail than may; -1 if there is none."""
        place, step = min(self.guess, limit - 1), 1
        low, high = -1, limit
        if self._scouts_hold(place):
            low = place
            while low < limit - 1 and high == limit:
                place, step = min(limit - 1, low + step), 2 * step
                low, high = (place, high) if self._scouts_hold(place) else (low, place)
        else:
            high = place
            while high > 0 and low < 0:
                place, step = max(0, high - step), 2 * step
                low, high = (place, high) if self._scouts_hold(place) else (low, place)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._scouts_hold(middle) else (low, middle)
        return low

    def _scouts_hold(self, load: int) -> bool:
        allowed = int((1 - self.rule.survive) * self.scouts + 1e-9)
        return self._scout(load).failures <= allowed

    def _scout(self, load: int) -> Count:
        if load not in self.scouted:
            runs = [(load, draw) for draw in range(self.scouts)]
            held = self.ask(runs)
            self.scouted[load] = Count(sum(not held[run] for run in runs), self.scouts)
        return self.scouted[load]

    def _count(self, start: int) -> bool:
        """Count loads from *start* on until nothing is open between yes and no. Return whether it gave up."""
        step, load = 1, start
        while True:
            if load not in self.counted:
                if len(self.counted) >= self.most_counted:
                    return True
                self.counted[load] = self._decide(load)
            following = self._next(step)
            if following is None:
                return False
            load, step = following, step * 2

    def _decide(self, load: int) -> Count:
        failures = trials = 0
        while (look := self.rule.next_look(trials)) is not None:
            runs = [(load, self.scouts + draw) for draw in range(trials, look)]
            held = self.ask(runs)
            failures, trials = failures + sum(not held[run] for run in runs), look
            decided = self.rule.decided(failures, trials)
            if decided is not None:
                return Count(failures, trials, decided)
        return Count(failures, trials)

    def _next(self, step: int) -> int | None:
        """What is counted next: outwards until a yes and a no are there, then the middle of what is open."""
        yes, no = self._ends()
        first = min(load for load in self.counted)
        last = max(load for load in self.counted)
        if yes is None and first > 0:
            return max(0, first - step)
        if no is None and last < self.count - 1:
            return min(self.count - 1, last + step)
        low, high = -1 if yes is None else yes, self.count if no is None else no
        marks = [low, *(load for load in sorted(self.counted) if low < load < high), high]
        for below, above in ((marks[0], marks[1]), (marks[-2], marks[-1])):
            if above - below > 1:
                return (below + above) // 2
        return None

    def _ends(self) -> tuple[int | None, int | None]:
        """The last yes below the first no, and that no."""
        no = min((load for load, count in self.counted.items() if count.decided is False), default=None)
        yes = max(
            (load for load, count in self.counted.items() if count.decided and (no is None or load < no)), default=None
        )
        return yes, no

    def _check(self, yes: int | None, no: int | None) -> None:
        below = [int(part * yes) for part in BELOW] if yes is not None else []
        above = [max(no + 1, int(part * no)) for part in ABOVE] if no is not None else []
        for load in dict.fromkeys([*below, *above]):
            if 0 <= load < self.count:
                self._scout(load)


def out_of_order(counts: Mapping[int, Count], survive: float) -> tuple[OutOfOrder, ...]:
    """Loads that hold less often than a harder one, by bounds of both; for each the hardest such. O(loads ** 2)."""
    found = []
    bounds = {load: _bounds(counts[load]) for load in sorted(counts)}
    for easier, (_, most) in bounds.items():
        harder = [load for load, (least, _) in bounds.items() if load > easier and least > most]
        if harder and most < survive:
            found.append(OutOfOrder(easier, max(harder)))
    return tuple(found)


def _bounds(count: Count | None) -> tuple[float, float]:
    if count is None or count.trials == 0:
        return 0.0, 1.0
    low = lower_bound(count.held, count.trials, CHECK_ERROR)
    return low, upper_bound(count.held, count.trials, CHECK_ERROR)


def total_runs(counts: Iterable[Count]) -> int:
    """Runs behind those counts."""
    return sum(count.trials for count in counts)
