"""Searches against every answer there can be: one edge is found in few runs, and what is no edge is told."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import TypeVar

import pytest

from hbmtwin.sim.capacity.oom_point_search import (
    FAR_APART,
    FirstFailure,
    Search,
    SmallestSize,
    first_failure,
    in_rounds,
    smallest_size,
)

R = TypeVar("R")


def solve(search: Search[int, R], answer: Callable[[int], bool]) -> tuple[R, list[int]]:
    """What a search finds, and what it asked, each thing once."""
    asked: list[int] = []

    def rounds(questions: object) -> dict[tuple[str, int], bool | None]:
        assert isinstance(questions, list)
        asked.extend(q for _, q in questions)
        return {pair: answer(pair[1]) for pair in questions}

    found = in_rounds({"it": search}, rounds)["it"]
    assert found is not None
    assert len(asked) == len(set(asked))
    return found, asked


@pytest.mark.parametrize("count", range(1, 11))
def test_every_row_of_loads_is_judged_as_running_all_of_them_would(count: int) -> None:
    """Of 2**count rows: one edge is found; another row is either told, with its true first failure, or not seen."""
    for fails in product((False, True), repeat=count):
        found, asked = solve(first_failure(count), lambda i, fails=fails: fails[i])
        first = fails.index(True) if any(fails) else None
        if list(fails) == sorted(fails):
            assert found == FirstFailure(first, True)
        elif not found.monotone:
            assert found.place == first
            assert len(asked) == count
        else:  # what was asked looks like one edge, and is judged as such
            seen = [fails[i] for i in sorted(asked)]
            assert seen == sorted(seen)
            assert found.place is None or fails[found.place]


@pytest.mark.parametrize(("count", "most"), [(25, 12), (100, 15), (1000, 18)])
def test_one_edge_takes_few_runs(count: int, most: int) -> None:
    for edge in range(0, count + 1, max(1, count // 100)):
        found, asked = solve(first_failure(count), lambda i, edge=edge: i >= edge)
        assert found == FirstFailure(edge if edge < count else None, True)
        assert len(asked) <= most


def check_that_holes_are_seen(search: Callable[[int], Search[int, FirstFailure]]) -> None:
    """One load that holds beyond the edge, or fails below it, where a check looks."""
    for hole in (14, 18, 24):
        found, asked = solve(search(25), lambda i, hole=hole: i >= 13 and i != hole)
        assert found == FirstFailure(13, False)
        assert len(asked) == 25
    for bump in (6, 11):
        found, _ = solve(search(25), lambda i, bump=bump: i >= 13 or i == bump)
        assert found == FirstFailure(bump, False)


def test_a_load_that_speaks_against_the_edge_is_seen() -> None:
    check_that_holes_are_seen(first_failure)


def test_plain_bisection_would_not_see_it() -> None:
    """The planted bug: monotonicity is assumed."""

    def assuming(count: int) -> Search[int, FirstFailure]:
        low, high = -1, count
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if (yield [middle])[middle] else (middle, high)
        return FirstFailure(high, True)

    with pytest.raises(AssertionError):
        check_that_holes_are_seen(assuming)


@pytest.mark.parametrize("guess", [1, 50, 700, 5000])
def test_the_smallest_size_from_any_guess(guess: int) -> None:
    for edge in (1, 2, 3, 63, 64, 65, 700, 701, 1999, 2000, 2001):
        found, asked = solve(smallest_size(guess, 2000), lambda units, edge=edge: units >= edge)
        assert found == SmallestSize(edge if edge <= 2000 else None, True)
        assert len(asked) <= 26
        assert max(asked) <= 2000


def test_a_larger_size_that_fails_moves_the_answer_above_it() -> None:
    for hole in (101, 108, 132):
        found, _ = solve(smallest_size(50, 2000), lambda units, hole=hole: units >= 100 and units != hole)
        assert found == SmallestSize(hole + 1, False)
    assert FAR_APART == (1, 8, 32)


def test_a_run_in_error_ends_its_own_search_only() -> None:
    def answers(asked: object) -> dict[tuple[str, int], bool | None]:
        assert isinstance(asked, list)
        return {(name, i): None if name == "broken" and i not in (0, 8) else i >= 5 for name, i in asked}

    found = in_rounds({"broken": first_failure(9), "whole": first_failure(9)}, answers)
    assert found == {"broken": None, "whole": FirstFailure(5, True)}


def test_searches_ask_together() -> None:
    rounds: list[int] = []

    def answers(asked: object) -> dict[tuple[int, int], bool | None]:
        assert isinstance(asked, list)
        rounds.append(len(asked))
        return {(name, i): i >= name for name, i in asked}

    found = in_rounds({edge: first_failure(16) for edge in range(16)}, answers)
    assert found == {edge: FirstFailure(edge, True) for edge in range(16)}
    assert rounds[0] == 32
    assert len(rounds) <= 7
