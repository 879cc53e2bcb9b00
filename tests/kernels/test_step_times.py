"""Times of steps in a row: totals against brute force, and the step that reaches a time against one by one."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hbmtwin.kernels.fixed_point import TICKS_PER_NS
from hbmtwin.kernels.step_times import StepTimes

NS = TICKS_PER_NS
times = st.tuples(
    st.integers(NS, 50 * NS),
    st.one_of(st.integers(0, 50 * NS), st.integers(0, 1 << 50)),
    st.one_of(st.just(0), st.integers(0, 2 * NS), st.integers(0, 1 << 40)),
)
"""Floor, start and rise: from a few ns a step, where rounding is most of it, to a second."""


def brute(t: tuple[int, int, int], k: int) -> int:
    floor, start, rise = t
    return sum(max(floor, start + rise * i) // NS for i in range(k))


def bisected(times: StepTimes, dt_ns: int) -> int:
    """The smallest k that reaches, found by halving."""
    low, high = 1, max(1, dt_ns)
    while low < high:
        middle = (low + high) // 2
        if times.total_ns(middle) >= dt_ns:
            high = middle
        else:
            low = middle + 1
    return low


@given(times, st.integers(0, 200))
def test_the_total_is_the_sum_of_the_steps(t: tuple[int, int, int], k: int) -> None:
    assert StepTimes(*t).total_ns(k) == brute(t, k)


def test_the_step_where_the_line_crosses_belongs_to_the_rising_part() -> None:
    times = StepTimes(10 * NS, 4 * NS, 3 * NS)
    assert [times.total_ns(k) for k in range(6)] == [0, 10, 20, 30, 43, 59]
    assert times.first_ns == 10
    assert [times.reaching(dt)[0] for dt in (-3, 0, 10, 11, 30, 31, 43, 44, 59)] == [1, 1, 1, 2, 3, 4, 4, 5, 5]


@given(times, st.integers(-5, 6000))
def test_the_step_that_reaches_a_time_is_the_first_one_by_one(t: tuple[int, int, int], dt_ns: int) -> None:
    floor, start, rise = t
    k, total_ns = 1, max(floor, start) // NS
    while total_ns < dt_ns:
        total_ns += max(floor, start + rise * k) // NS
        k += 1
    assert StepTimes(*t).reaching(dt_ns) == (k, total_ns)


@given(times, st.one_of(st.integers(-5, 10**6), st.integers(-5, 10**13), st.integers(0, 10**19)))
@example((NS, 2 * NS - 1, 1), 10**13)  # half of the line's time is rounded away for the first million steps
@example((NS, 0, 1), 10**19)
@example((NS, 1 << 50, 1 << 40), 10**30)
def test_the_step_that_reaches_a_time_is_the_one_that_halving_finds(t: tuple[int, int, int], dt_ns: int) -> None:
    times = StepTimes(*t)
    k, total_ns = times.reaching(dt_ns)
    assert k == bisected(times, dt_ns)
    assert total_ns == times.total_ns(k)


@given(times, st.integers(1, 10**6))
def test_a_step_that_ends_at_the_time_reaches_it_and_a_nanosecond_later_the_next_one(
    t: tuple[int, int, int], k: int
) -> None:
    times = StepTimes(*t)
    end_ns = times.total_ns(k)
    assert times.reaching(end_ns) == (k, end_ns)
    assert times.reaching(end_ns + 1) == (k + 1, times.total_ns(k + 1))


def test_the_line_without_its_roundings_would_name_another_step() -> None:
    """So the correction behind the guess is needed, in both directions."""
    floor, start, rise = NS, NS + NS // 2, NS // 8
    exact = [StepTimes(floor, start, rise).reaching(dt)[0] for dt in range(1, 200)]
    line = [next(k for k in range(1, 999) if k * start + rise * k * (k - 1) // 2 >= dt * NS) for dt in range(1, 200)]
    assert exact != line
    assert all(a >= b for a, b in zip(exact, line, strict=True))


@pytest.mark.parametrize("t", [(0, NS - 1, 0), (NS, NS, -1), (0, 0, NS)])
def test_steps_without_time_or_that_get_shorter_are_refused(t: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 ns and its time never falls"):
        StepTimes(*t)


def test_a_negative_number_of_steps_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 0 steps, not -1"):
        StepTimes(NS, NS).total_ns(-1)
