"""Measured lengths: exact quantiles, mass points with both edges, and the same number from one draw and from many."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import WorkloadError
from hbmtwin.workloads.learned.measured import Measured, measured

LENGTHS = st.lists(st.integers(1, 10**6), min_size=1, max_size=300)
EVEN = (np.arange(100_000) + 0.5) / 100_000


def exact_quantile(lengths: list[int], p: float) -> int:
    """The least length that at least the share *p* of all do not pass; the next one where it is just reached."""
    ordered = sorted(lengths)
    return ordered[min(int(p * len(ordered) + 1e-9), len(ordered) - 1)]


@given(LENGTHS)
def test_the_hundredths_are_exact(lengths: list[int]) -> None:
    table = measured(lengths, [1.0] * len(lengths))
    for p in (0.05, 0.25, 0.5, 0.75, 0.9, 0.99):
        # A draw at the knot itself takes the last of those that share it.
        near = {exact_quantile(lengths, p), exact_quantile(lengths, p - 1e-7), exact_quantile(lengths, p + 1e-6)}
        drawn = table.at(p)
        assert min(near) <= drawn <= max(near)


@given(LENGTHS)
def test_one_draw_is_as_many(lengths: list[int]) -> None:
    table = measured(lengths, [1.0] * len(lengths))
    u = np.array([1e-12, 0.001, 0.3, 0.5, 0.75, 0.9973, 1 - 2.0**-53])
    assert table.at_many(u).tolist() == [table.at(float(x)) for x in u]
    assert min(lengths) <= int(table.at_many(u).min()) <= int(table.at_many(u).max()) <= max(lengths)


def test_mass_points_keep_their_share() -> None:
    """A quarter is 100, a third of the rest 400, and nothing lies between 401 and 999."""
    lengths = [100] * 250 + [400] * 250 + list(range(101, 351)) + list(range(1000, 1250))
    drawn = measured(lengths, [1] * 1000).at_many(EVEN)
    assert np.mean(drawn == 100) == pytest.approx(0.25, abs=0.002)
    assert np.mean(drawn == 400) == pytest.approx(0.25, abs=0.002)
    assert not np.any((drawn > 400) & (drawn < 1000))
    assert float(drawn.mean()) == pytest.approx(np.mean(lengths), rel=0.002)


def test_weights_count_and_need_not_sum_to_one() -> None:
    drawn = measured([7, 3, 7, 9], [1.0, 5.0, 2.0, 0.0]).at_many(EVEN)
    assert set(drawn.tolist()) == {3, 7}
    assert np.mean(drawn == 3) == pytest.approx(5 / 8, abs=1e-4)


def test_a_worked_table() -> None:
    table = Measured((0.0, 0.2, 0.2, 1.0), (10, 20, 100, 200))
    assert [table.at(u) for u in (0.1, 0.19999, 0.2, 0.6)] == [15, 20, 100, 150]


@pytest.mark.parametrize(
    ("probabilities", "tokens", "said"),
    [
        ((0.0, 1.0), (1,), "as many tokens as probabilities"),
        ((0.0,), (1,), "two or more, not 1 and 1"),
        ((0.1, 1.0), (1, 2), "rise from 0 to 1"),
        ((0.0, 0.9), (1, 2), "rise from 0 to 1"),
        ((0.0, 0.6, 0.5, 1.0), (1, 2, 3, 4), "rise from 0 to 1"),
        ((0.0, float("nan"), 1.0), (1, 2, 3), "rise from 0 to 1"),
        ((0.0, 1.0), (2, 1), "must not fall"),
        ((0.0, 1.0), (0, 1), "from 1 to 2\\^40"),
        ((0.0, 1.0), (1, 2**40 + 1), "from 1 to 2\\^40"),
    ],
)
def test_tables_that_are_none(probabilities: tuple[float, ...], tokens: tuple[int, ...], said: str) -> None:
    with pytest.raises(WorkloadError, match=said):
        Measured(probabilities, tokens)


def test_nothing_to_measure() -> None:
    with pytest.raises(WorkloadError, match="no length occurs"):
        measured([5], [0.0])
