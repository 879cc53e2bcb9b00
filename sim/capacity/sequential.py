"""Whether runs hold often enough, decided after as few of them as that takes.

::

    survive 0.95, error 0.004 a side        runs    8   16   32   64  117  176 ...     looks
                                            yes     -    -    -    -   0    1          at most so many failed
                                            no      4    5    8   12  17   22          at least so many failed

After each look the count is held to an exact binomial bound (:mod:`hbmtwin.sim.capacity.confidence`): "yes" where the
lower bound is at least *survive*, "no" where the upper one is below it. Who looks often is wrong more often than each
look says, so the bounds' error is made smaller until the whole sequence is wrong with at most the error that was given:
computed, not bounded, by adding up all ways in which counts come to a boundary when the truth lies exactly on
*survive*, where either mistake is the most likely. The same level at each look is Pocock's rule (S. J. Pocock, Group
sequential methods in the design and analysis of clinical trials, Biometrika 64 (1977), 191-199); exact for counts as in
C. Jennison, B. W. Turnbull, Group Sequential Methods (2000), chapter 12.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import lru_cache
from math import comb, lgamma

import numpy as np
import numpy.typing as npt

from hbmtwin.sim.capacity.confidence import at_least, least_trials

FIRST_LOOK = 8
_LEVELS = tuple(0.97**i for i in range(120))
"""Shares of the error that a look may have, from all of it down to a fortieth."""
NEGLIGIBLE = 1e-30
"""A probability that adds nothing to an error."""
NEVER = -1


class TooFewSeeds(ValueError):
    """So few runs that even if all hold nothing is shown: how many it takes."""

    def __init__(self, most: int, least: int) -> None:
        super().__init__(most, least)
        self.most, self.least = most, least

    def __str__(self) -> str:
        return f"{self.most} runs that all hold show too little; at least {self.least} are needed"


@dataclass(frozen=True, slots=True)
class SequentialRule:
    """When runs are counted, and with how many failures it is decided there."""

    survive: float
    error: float
    """Of either mistake, over all looks together."""
    looks: tuple[int, ...]
    """Runs after which is counted, ascending."""
    yes: tuple[int, ...]
    """At most so many failures at each look: often enough; NEVER where no count shows it yet."""
    no: tuple[int, ...]
    """At least so many: not often enough."""

    def decided(self, failures: int, trials: int) -> bool | None:
        """What that count shows; None: nothing yet. Raise ValueError where there is no look."""
        place = self.looks.index(trials)
        if failures <= self.yes[place]:
            return True
        return False if failures >= self.no[place] else None

    def next_look(self, trials: int) -> int | None:
        """Runs at the next look; None after the last."""
        return next((look for look in self.looks if look > trials), None)

    @property
    def least_for_yes(self) -> int:
        """Runs that it takes to say yes if none fails."""
        return next(look for look, failures in zip(self.looks, self.yes, strict=True) if failures > NEVER)


@lru_cache(maxsize=64)
def sequential_rule(survive: float, error: float, most: int) -> SequentialRule:
    """The rule with *error* on either side and at most that many runs. O(most x looks) a level that is tried.

    Raise TooFewSeeds where even *most* runs without a failure show nothing, ValueError for what makes no sense.
    """
    if not 0 < survive < 1 or not 0 < error < 0.5:
        raise ValueError(f"survive is above 0 and below 1, error above 0 and below 0.5: not {survive:g}, {error:g}")
    if most < (least := least_trials(survive, error)):
        raise TooFewSeeds(most, least)
    for share in _LEVELS:
        first = least_trials(survive, error * share)
        if first > most:
            break
        looks = _looks(first, most)
        yes = tuple(_most_failures(look, survive, error * share) for look in looks)
        if crossing(looks, yes, survive, upward=False) <= error:
            break
    else:  # pragma: no cover - a fortieth of the error is below any number of looks that fits into a search
        raise ValueError(f"no level of a look keeps the error of {len(looks)} looks below {error:g}")
    if first > most:  # one look, at the end, for yes
        looks = _looks(most, most)
        yes = (*[NEVER] * (len(looks) - 1), _most_failures(most, survive, error))
    for share in _LEVELS:
        no = tuple(_fewest_failures(look, survive, error * share) for look in looks)
        if crossing(looks, no, survive, upward=True) <= error:
            break
    return SequentialRule(survive, error, looks, yes, no)


def crossing(looks: tuple[int, ...], bounds: tuple[int, ...], survive: float, *, upward: bool) -> float:
    """The probability that failures come to one of *bounds* when a run holds with probability *survive*.

    *upward*: that there are at least so many; else at most. Over all paths, without counts that are rarer than
    NEGLIGIBLE: O(last look) in numpy.
    """
    alive: npt.NDArray[np.float64] = np.ones(1)
    fewest = 0  # failures that alive[0] stands for
    crossed, before = 0.0, 0
    for look, bound in zip(looks, bounds, strict=True):
        few, weights = _without_tails(_binomial(look - before, 1 - survive))
        alive, fewest = np.convolve(alive, weights), fewest + few
        place = max(0, bound - fewest if upward else bound + 1 - fewest)
        cut = alive[place:] if upward else alive[:place]
        crossed += float(cut.sum())
        cut[:] = 0
        few, alive = _without_tails(alive)
        fewest, before = fewest + few, look
    return crossed


def _without_tails(weights: npt.NDArray[np.float64]) -> tuple[int, npt.NDArray[np.float64]]:
    """The part between the first and the last that is not negligible, and where it begins."""
    (places,) = np.nonzero(weights > NEGLIGIBLE)
    if not len(places):
        return 0, np.zeros(1)
    return int(places[0]), weights[places[0] : places[-1] + 1]


def _binomial(trials: int, probability: float) -> npt.NDArray[np.float64]:
    k = np.arange(trials + 1)
    if trials < 60:
        choices = np.array([comb(trials, i) for i in range(trials + 1)], dtype=np.float64)
        weights: npt.NDArray[np.float64] = choices * probability**k * (1 - probability) ** (trials - k)
        return weights
    logs = np.array([lgamma(trials + 1) - lgamma(i + 1) - lgamma(trials - i + 1) for i in range(trials + 1)])
    exact: npt.NDArray[np.float64] = np.exp(logs + k * np.log(probability) + (trials - k) * np.log1p(-probability))
    return exact


def _looks(first: int, most: int) -> tuple[int, ...]:
    """Doublings from FIRST_LOOK up to the first look that can say yes, then steps of a half, then the last."""
    looks = []
    look = FIRST_LOOK
    while look < first / 1.5:
        looks.append(look)
        look *= 2
    look = first
    while look * 1.25 < most:
        looks.append(look)
        look = look * 3 // 2 + 1
    return (*looks, most)


def _most_failures(trials: int, survive: float, error: float) -> int:
    """The most failures with which the lower bound is at least *survive*: so few are as rare as *error* where it is."""
    return bisect_right(range(trials), error, key=lambda failures: at_least(trials - failures, trials, survive)) - 1


def _fewest_failures(trials: int, survive: float, error: float) -> int:
    """The fewest failures with which the upper bound is below *survive*; one more than all runs where none is."""
    return bisect_right(range(trials + 1), -error, key=lambda failures: -at_least(failures, trials, 1 - survive))
