"""Exact sums of floors: against brute force, and against the wrong ways to take them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.fixed_point import TICKS_PER_NS, floor_sum, ticks

coefficient = st.integers(0, 1 << 70)


@given(n=st.integers(0, 300), modulus=st.integers(1, 1 << 40), slope=coefficient, start=coefficient)
def test_floor_sum_is_the_sum_of_the_floors(n: int, modulus: int, slope: int, start: int) -> None:
    assert floor_sum(n, modulus, slope, start) == sum((start + slope * i) // modulus for i in range(n))


def test_floor_sum_of_a_million_steps_splits_into_two_halves() -> None:
    whole = floor_sum(1_000_000, TICKS_PER_NS, 123_457, 89)
    first = floor_sum(400_000, TICKS_PER_NS, 123_457, 89)
    rest = floor_sum(600_000, TICKS_PER_NS, 123_457, 89 + 123_457 * 400_000)
    assert whole == first + rest == 58_868_326_260


def test_ticks_keep_six_digits_of_a_nanosecond() -> None:
    assert ticks(1.0) == 1_048_576
    assert ticks(0.0016) == 1_678


@pytest.mark.parametrize("ns", [-1.0, float("inf"), float("nan")])
def test_a_time_that_is_no_time_is_refused(ns: float) -> None:
    with pytest.raises(ValueError, match="finite number from 0"):
        ticks(ns)
