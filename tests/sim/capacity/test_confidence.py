"""Binomial bounds: worked numbers, the definition taken literally, and scipy's where it is there."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.sim.capacity.confidence import at_least, clopper_pearson, least_trials, lower_bound, upper_bound


def exact_at_least(successes: int, trials: int, probability: Fraction) -> Fraction:
    """By its definition, in fractions."""
    q = 1 - probability
    return sum(
        (comb(trials, k) * probability**k * q ** (trials - k) for k in range(max(0, successes), trials + 1)),
        Fraction(0),
    )


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.30849710781876083),  # 1 - 0.025 ** (1 / 10)
        (10, 10, 0.6915028921812392, 1.0),
        (8, 10, 0.4439045376923585, 0.9747892736731666),
        (299, 299, 0.9877384040924649, 1.0),  # 0.025 ** (1 / 299)
    ],
)
def test_worked_intervals(successes: int, trials: int, low: float, high: float) -> None:
    assert clopper_pearson(successes, trials, 0.95) == pytest.approx((low, high), abs=1e-12)


def test_intervals_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for trials in (1, 2, 7, 40, 333, 5000):
        for successes in {0, 1, trials // 3, trials // 2, trials - 1, trials}:
            for confidence in (0.5, 0.95, 0.9999):
                theirs = stats.binomtest(successes, trials).proportion_ci(confidence, "exact")
                ours = clopper_pearson(successes, trials, confidence)
                assert ours == pytest.approx((theirs.low, theirs.high), abs=1e-9)


@given(st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(-1, n + 1), st.just(n))), st.integers(0, 64))
def test_tails_are_those_of_fractions(counts: tuple[int, int], p: int) -> None:
    successes, trials = counts
    exact = exact_at_least(successes, trials, Fraction(p, 64))
    assert at_least(successes, trials, p / 64) == pytest.approx(float(exact), rel=1e-11, abs=1e-15)


@given(
    st.integers(1, 60).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))),
    st.sampled_from([0.001, 0.025, 0.2, 0.7]),
)
def test_a_bound_is_wrong_no_more_often_than_it_says(counts: tuple[int, int], error: float) -> None:
    successes, trials = counts
    low, high = lower_bound(successes, trials, error), upper_bound(successes, trials, error)
    if successes > 0:
        assert float(exact_at_least(successes, trials, Fraction(low))) <= error * (1 + 1e-9)
        assert (
            float(exact_at_least(successes, trials, Fraction(low + (1 - low) * 1e-6))) > error
        )  # and no other is better
    if successes < trials:
        assert float(1 - exact_at_least(successes + 1, trials, Fraction(high))) <= error * (1 + 1e-9)


def test_least_trials_are_the_textbook_ones() -> None:
    assert least_trials(0.95, 0.05) == 59
    assert least_trials(0.99, 0.05) == 299
    assert least_trials(0.99, 0.025) == 368
    assert least_trials(0.5, 0.5) == 1
    assert lower_bound(298, 298, 0.05) < 0.99 <= lower_bound(299, 299, 0.05)


@pytest.mark.parametrize(
    ("successes", "trials", "error"), [(1, 0, 0.1), (2, 1, 0.1), (-1, 1, 0.1), (1, 1, 0), (1, 1, 1)]
)
def test_counts_that_make_no_sense(successes: int, trials: int, error: float) -> None:
    with pytest.raises(ValueError, match=r"sense|error"):
        lower_bound(successes, trials, error)


@pytest.mark.parametrize("confidence", [0.0, 1.0, -1.0, float("nan")])
def test_a_confidence_that_makes_no_sense(confidence: float) -> None:
    with pytest.raises(ValueError, match="confidence"):
        clopper_pearson(1, 2, confidence)
    with pytest.raises(ValueError, match="probability"):
        least_trials(1.0, 0.05)
