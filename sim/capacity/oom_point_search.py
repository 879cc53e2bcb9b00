"""Searches that ask for runs a few at a time, so that many of them share the processes of one machine.

::

    a search yields what it wants to know     [0, 24]
    and is sent the answers                   {0: False, 24: True}
    until it returns what it found            FirstFailure(place=13, monotone=True)

Bisection finds where runs begin to fail only if more is never better. That is not assumed: each search asks beside and
beyond its answer as well, and where one of these answers speaks against it, it says so and goes through everything.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from typing import NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
Q = TypeVar("Q", bound=Hashable)
R = TypeVar("R")

FAR_APART = (1, 8, 32)
"""How far beyond a smallest size it is asked whether larger ones do as well, in units."""


class FirstFailure(NamedTuple):
    """The first of a row of growing loads at which a run fails; None if it fails at none that was asked for."""

    place: int | None
    monotone: bool
    """Whether every answer was that of one edge; if not, all loads were asked for."""


class SmallestSize(NamedTuple):
    """The smallest size at which a run holds, and so did every larger one that was asked for; None: none up to most."""

    units: int | None
    monotone: bool
    """Whether no larger size failed than one that held."""


Search = Generator[list[Q], Mapping[Q, bool], R]


def first_failure(count: int) -> Search[int, FirstFailure]:
    """Find the first of *count* loads that fails, in about log2(count) + 7 runs where there is one edge.

    Asked are both ends, then the middle of what is open; then the neighbours of the edge, the middles of both sides,
    and the quarters of the whole.
    """
    failed: dict[int, bool] = {}
    failed.update((yield sorted({0, count - 1})))
    low, high = (-1, 0) if failed[0] else (0, count - 1 if failed[count - 1] else count)
    while high - low > 1 and high < count:
        middle = (low + high) // 2
        failed.update((yield [middle]))
        low, high = (low, middle) if failed[middle] else (middle, high)
    beside = {low - 1, high + 1, low // 2, (high + count - 1) // 2, count // 4, count // 2, 3 * count // 4}
    if checks := sorted(i for i in beside if 0 <= i < count and i not in failed):
        failed.update((yield checks))
    monotone = all(fails == (i >= high) for i, fails in failed.items())
    if not monotone:
        if rest := [i for i in range(count) if i not in failed]:
            failed.update((yield rest))
        high = min(i for i, fails in failed.items() if fails)
    return FirstFailure(high if high < count else None, monotone)


def smallest_size(guess: int, most: int) -> Search[int, SmallestSize]:
    """Find the smallest size up to *most* units that holds, in about log2(answer) + 4 runs where there is one edge.

    Doubles *guess* until it holds, bisects, and asks for a few larger sizes. One of those that fails moves the search
    above it: what is returned held, and so did all larger sizes that were asked for.
    """
    held: dict[int, bool] = {}
    low, size = 0, max(1, min(guess, most))
    while True:
        while not (above := [s for s, holds in held.items() if holds and s > low]):
            if low >= most:
                return SmallestSize(None, _one_edge(held))
            size = max(size, low + 1)
            held.update((yield [size]))
            low, size = (low, size) if held[size] else (size, min(most, 2 * size))
        high = min(above)
        while high - low > 1:
            middle = (low + high) // 2
            held.update((yield [middle]))
            low, high = (low, middle) if held[middle] else (middle, high)
        if checks := [high + d for d in FAR_APART if high + d <= most and high + d not in held]:
            held.update((yield checks))
        low = max((s for s, holds in held.items() if not holds), default=0)
        if low < high:
            return SmallestSize(high, _one_edge(held))
        size = low + 1


def _one_edge(held: Mapping[int, bool]) -> bool:
    holding = [size for size, holds in held.items() if holds]
    return not holding or all(holds for size, holds in held.items() if size > min(holding))


def in_rounds(
    searches: Mapping[K, Search[Q, R]], answer: Callable[[Sequence[tuple[K, Q]]], Mapping[tuple[K, Q], bool | None]]
) -> dict[K, R | None]:
    """Run searches to their ends side by side; *answer* is asked for what all of them want at once.

    Where it does not know (None: the run ended in an error), that search finds nothing: None.
    """
    found: dict[K, R | None] = {}
    wanted: dict[K, list[Q]] = {}
    for name, search in searches.items():
        _step(name, search, None, wanted, found)
    while wanted:
        questions = [(name, question) for name, asked in wanted.items() for question in asked]
        answers = answer(questions)
        asking, wanted = wanted, {}
        for name, asked in asking.items():
            known = {question: answers[name, question] for question in asked}
            sure = {question: yes for question, yes in known.items() if yes is not None}
            if len(sure) < len(known):
                searches[name].close()
                found[name] = None
            else:
                _step(name, searches[name], sure, wanted, found)
    return {name: found[name] for name in searches}


def _step(
    name: K, search: Search[Q, R], known: Mapping[Q, bool] | None, wanted: dict[K, list[Q]], found: dict[K, R | None]
) -> None:
    try:
        wanted[name] = next(search) if known is None else search.send(known)
    except StopIteration as end:
        found[name] = end.value
