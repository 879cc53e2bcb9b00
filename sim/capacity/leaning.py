"""How far an answer moves when one of its uncertain figures is at its low or its high end.

::

    figure                     low    answer    high     the answer with few draws, each figure alone
    kv_bandwidth_efficiency     88       96      104     <- the answer leans most on this
    non_torch_bytes             97       96       93
    all at their worse ends     71

Whoever changes no number of a run at an end cannot move the answer, and is not searched.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hbmtwin.sim.capacity.assumptions import Assumption, applied, assumptions_of
from hbmtwin.sim.capacity.capacity_search import CapacitySearch
from hbmtwin.sim.capacity.loads import Loads
from hbmtwin.sim.capacity.plan_targets import Value
from hbmtwin.sim.capacity.sequential import SequentialRule
from hbmtwin.sim.scenario import Scenario

DRAWS = 4
"""Of each value: the answers of ends are compared with each other, not with the counted one."""


class Lean(NamedTuple):
    """Answers with one figure at its ends; None: no value holds there."""

    assumption: Assumption
    low: Value | None
    high: Value | None


class Leaning(NamedTuple):
    """The answer with few draws, as it is and at the ends of what it assumes."""

    answer: Value | None
    leans: tuple[Lean, ...]
    """Those that move it, the farthest first."""
    still: tuple[Assumption, ...]
    """Those that do not."""
    worst: Value | None
    """With every figure at its worse end at once; None: no value holds, or nothing moves it."""
    draws: int

    @property
    def most(self) -> Lean | None:
        """What it leans on most."""
        return self.leans[0] if self.leans else None


def leaning_of(loads: Loads, place: int, rule: SequentialRule, folder: Path) -> Leaning:
    """Search from *place* on with each figure at each end. About 10 x draws runs for an end that moves the answer."""
    base = _answer(loads, place, rule)
    found: list[tuple[int, Lean]] = []
    still: list[Assumption] = []
    worse: dict[str, float] = {}
    for assumption in assumptions_of(loads.at(place)):  # its keys are set again at every value
        ends = dict(_ends(loads, assumption, place, base, rule, folder))
        places = [ends.get(end, base) for end in ("low", "high")]
        if all(at == base for at in places):
            still.append(assumption)
            continue
        low, high = places
        if min(places) < base:
            worse[assumption.name] = assumption.ends.low if low < high else assumption.ends.high
        span = max(abs(low - base), abs(high - base), abs(low - high))
        found.append((span, Lean(assumption, _value(loads, low), _value(loads, high))))
    found.sort(key=lambda item: (-item[0], item[1].assumption.name))
    worst = None
    if worse:
        worst = _value(loads, _answer(loads.changed(applied(loads.at(place), worse, folder)), base, rule))
    return Leaning(_value(loads, base), tuple(lean for _, lean in found), tuple(still), worst, len(loads.draws(DRAWS)))


def _ends(
    loads: Loads, assumption: Assumption, place: int, base: int, rule: SequentialRule, folder: Path
) -> Iterator[tuple[str, int]]:
    ends = assumption.ends
    for name, value in (("low", ends.low), ("high", ends.high)):
        if value == ends.value:
            continue
        changed = loads.changed(applied(loads.at(place), {assumption.name: value}, folder))
        if _same(loads, changed, place):
            continue
        yield name, _answer(changed, base, rule)


def _same(loads: Loads, changed: Loads, place: int) -> bool:
    """Whether a run does not see the change: all that it promises stands on the same numbers."""
    first, other = (dict(each.rows(place, (0,))[0]) for each in (loads, changed))
    del first["key"], other["key"]
    return first == other


def _answer(loads: Loads, guess: int, rule: SequentialRule) -> int:
    """The last place at which few draws hold; -1: none."""
    count = len(loads.target.values)
    return CapacitySearch(count, loads, rule, scouts=len(loads.draws(DRAWS)), guess=max(0, guess)).scout(count)


def _value(loads: Loads, place: int) -> Value | None:
    return None if place < 0 else loads.target.values[place]


def in_words(scenario: Scenario, assumption: Assumption) -> str:
    """``default`` or ``calibrated on <device>``."""
    return f"calibrated on {scenario.device.name}" if assumption.calibrated else "default, uncalibrated"
