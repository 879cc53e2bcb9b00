"""A leap's times: where an event cuts it, and which of its steps want rows, against lists of all ends."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.fixed_point import TICKS_PER_NS
from hbmtwin.kernels.records import BatchShape
from hbmtwin.kernels.step_times import StepTimes
from hbmtwin.sim.leap import Leap

DECODE = BatchShape(decode_count=1)


class Cost:
    """Steps of the given start and rise in ticks, none shorter than 40 ns."""

    basis = "for tests"

    def __init__(self, start: int, rise: int) -> None:
        self.start, self.rise = start, rise

    def steps(self, b: BatchShape) -> StepTimes:
        return StepTimes(40 * TICKS_PER_NS, self.start, self.rise)

    def work_ns(self, *, driver_calls: int, syncs: int, copied_bytes: int, swapped_bytes: int) -> int:
        raise AssertionError("a leap does no work of memory management")


def ends(cost: Cost, start_ns: int, steps: int) -> list[int]:
    lasts = (max(40 * TICKS_PER_NS, cost.start + cost.rise * i) // TICKS_PER_NS for i in range(steps))
    return list(accumulate(lasts, initial=start_ns))


costs = st.builds(Cost, st.integers(0, 100 * TICKS_PER_NS), st.integers(0, 3 * TICKS_PER_NS))


@given(costs, st.integers(0, 1000), st.integers(1, 60), st.one_of(st.integers(0, 6000), st.just(float("inf"))))
def test_an_event_cuts_at_the_first_step_that_ends_with_it_or_later(
    cost: Cost, start_ns: int, steps: int, time_ns: float
) -> None:
    all_ends = ends(cost, start_ns, steps)
    wanted = next((k for k in range(1, steps + 1) if all_ends[k] >= time_ns), steps)
    leap = Leap(cost, DECODE, start_ns, steps, True).cut_at(time_ns)
    assert (leap.steps, leap.end_of(leap.steps)) == (wanted, all_ends[wanted])
    assert [leap.end_of(k) for k in range(1, wanted + 1)] == all_ends[1 : wanted + 1]


@given(costs, st.integers(0, 1000), st.integers(1, 60), st.booleans(), st.integers(1, 500), st.integers(1, 700))
def test_rows_stand_after_a_change_and_after_each_tick(
    cost: Cost, start_ns: int, steps: int, changed: bool, until_tick_ns: int, interval_ns: int
) -> None:
    all_ends = ends(cost, start_ns, steps)
    next_tick_ns, wanted = start_ns + until_tick_ns, []
    for step in range(1, steps):
        if all_ends[step] >= next_tick_ns or (changed and step == 1):
            wanted.append((step, all_ends[step]))
            next_tick_ns = (all_ends[step] // interval_ns + 1) * interval_ns
    leap = Leap(cost, DECODE, start_ns, steps, changed)
    assert list(leap.rows_within(start_ns + until_tick_ns, interval_ns)) == wanted


def test_a_batch_that_prefills_is_not_repeated() -> None:
    cost, prefill = Cost(0, 0), BatchShape(prefill=((100, 0),))
    assert Leap(cost, prefill, 5, 1, True).end_of(1) == 45
    with pytest.raises(ValueError, match="cannot be repeated 2 times"):
        Leap(cost, prefill, 5, 2, True)
