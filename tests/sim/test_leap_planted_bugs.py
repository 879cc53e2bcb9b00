"""Bugs planted in every place that a leap's length or its rows come from: the shared scenarios must show each.

A number beside a bug is that of the first of the fixed scenarios that shows it; they are tried from there on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.allocators.paged_groups import PagedGroupsPolicy
from hbmtwin.allocators.paged_v0 import PagedV0Policy
from hbmtwin.allocators.radix import RadixPolicy
from hbmtwin.allocators.virtual import VirtualPolicy
from hbmtwin.kernels.step_times import StepTimes
from hbmtwin.sim import engine
from hbmtwin.sim.forward import Forward
from hbmtwin.sim.leap import Leap
from hbmtwin.sim.recorder import Recorder
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.schedulers.guaranteed_no_evict import GuaranteedNoEvictScheduler
from hbmtwin.sim.schedulers.max_utilization import MaxUtilizationScheduler
from hbmtwin.sim.schedulers.prefill_first import PrefillFirstScheduler
from hbmtwin.sim.schedulers.sglang import NewTokenRatio, SglangScheduler
from hbmtwin.sim.schedulers.static_batch import StaticBatchScheduler
from hbmtwin.sim.schedulers.vllm import VllmScheduler
from hbmtwin.sim.schedulers.vllm_v0 import VllmV0Scheduler

from .legal_scenarios import differences, numbered

Patch = pytest.MonkeyPatch


def found_by_scenarios(first: int, **given: str) -> list[str]:
    """What a planted bug shows in fixed scenarios from the *first* on: tables that differ, or an exception's name."""
    for seed in range(first, first + 60):
        scenario = Scenario.of(numbered(seed, **given))
        try:
            found = differences(Twin(scenario).run(), Twin(scenario).run(step_mode=True))
        except (ArithmeticError, AssertionError, LookupError, RuntimeError, ValueError) as error:
            return [type(error).__name__]
        if found:
            return found
    return []


@pytest.mark.parametrize(
    ("policy", "kind", "first"),
    [
        (PagedPolicy, "paged", 15),
        (PagedGroupsPolicy, "windows", 15),
        (PagedGroupsPolicy, "states", 15),
        (PagedV0Policy, "v0", 11),
        (RadixPolicy, "radix", 11),
        (ContiguousPolicy, "contiguous", 3),
        (VirtualPolicy, "virtual", 13),
    ],
)
def test_a_horizon_that_promises_one_step_too_many(monkeypatch: Patch, policy: Any, kind: str, first: int) -> None:
    honest = policy.horizon
    monkeypatch.setattr(policy, "horizon", lambda self, d, limit: min(limit, honest(self, d, limit) + 1))
    assert found_by_scenarios(first, kind=kind)


@pytest.mark.parametrize(
    ("scheduler", "kind", "first"),
    [
        (VllmScheduler, "paged", 7),
        (PrefillFirstScheduler, "paged", 7),
        (GuaranteedNoEvictScheduler, "paged", 7),
        (MaxUtilizationScheduler, "paged", 7),
        (VllmV0Scheduler, "v0", 3),
        (SglangScheduler, "radix", 3),
        (StaticBatchScheduler, "contiguous", 15),
    ],
)
def test_a_plan_that_holds_for_one_step_less(monkeypatch: Patch, scheduler: Any, kind: str, first: int) -> None:
    honest = scheduler.steady_steps
    monkeypatch.setattr(scheduler, "steady_steps", lambda self, p: (steady := honest(self, p)) and steady + 1)
    assert found_by_scenarios(first, kind=kind, scheduler=scheduler.name)


@pytest.mark.parametrize(
    ("scheduler", "kind", "first"),
    [(PrefillFirstScheduler, "windows", 15), (VllmV0Scheduler, "v0", 16), (SglangScheduler, "radix", 24)],
)
def test_a_scheduler_that_forgets_who_waits(monkeypatch: Patch, scheduler: Any, kind: str, first: int) -> None:
    """With the steps of continuous batching, whose look at the queue comes last in a step."""
    monkeypatch.setattr(scheduler, "steady_steps", VllmScheduler.steady_steps)
    assert found_by_scenarios(first, kind=kind, scheduler=scheduler.name)


def test_blocks_that_come_back_unseen_by_who_waits(monkeypatch: Patch) -> None:
    monkeypatch.setattr(PagedGroupsPolicy, "steps_unseen", lambda self, decoding, limit: limit)
    assert found_by_scenarios(15, kind="windows", scheduler="vllm")


def test_a_ratio_that_falls_once_a_leap(monkeypatch: Patch) -> None:
    honest = NewTokenRatio.fall
    monkeypatch.setattr(NewTokenRatio, "fall", lambda self, steps: honest(self, 1))
    assert found_by_scenarios(11, kind="radix", scheduler="sglang")


def rows_changed(change: Callable[[int, int], tuple[int, int]]) -> Callable[..., Any]:
    honest = Leap.rows_within
    return lambda self, tick, interval: (change(*row) for row in honest(self, tick, interval))


def cut_one_step_too_late(self: Leap, time_ns: float) -> Leap:
    before = self.steps
    HONEST_CUT(self, time_ns)
    self.steps += self.steps < before
    return self


HONEST_CUT, HONEST_NS, HONEST_ROW = Leap.cut_at, StepTimes.total_ns, Recorder.leap
WRONG: dict[str, tuple[Any, str, Any, int]] = {
    "a row with the memory of the step before": (
        *(Leap, "rows_within", rows_changed(lambda step, at: (max(1, step - 1), at)), 7),
    ),
    "a row a nanosecond late": (Leap, "rows_within", rows_changed(lambda step, at: (step, at + 1)), 3),
    "no rows within a leap": (Leap, "rows_within", lambda self, tick, interval: iter(()), 3),
    "a nanosecond too long": (StepTimes, "total_ns", lambda self, k: HONEST_NS(self, k) + (k > 1), 3),
    "an arrival does not cut it": (Leap, "cut_at", lambda self, time_ns: self, 3),
    "an arrival cuts it a step too late": (Leap, "cut_at", cut_one_step_too_late, 3),
    "ends of steps one too late": (
        Recorder,
        "leap",
        lambda self, start, ns, k, scheduled, gone, end_of: HONEST_ROW(
            self, start, ns, k, scheduled, gone, lambda step: end_of(min(k, step + 1))
        ),
        13,
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_leap_that_is_wrong(monkeypatch: Patch, name: str) -> None:
    owner, attribute, wrong, first = WRONG[name]
    monkeypatch.setattr(owner, attribute, wrong)
    assert found_by_scenarios(first)


def test_a_window_that_fills_in_a_leap(monkeypatch: Patch) -> None:
    monkeypatch.setattr(engine, "steps_within_window", lambda plan, window: 2**62)
    assert found_by_scenarios(3, kind="windows")


def test_operations_counted_once(monkeypatch: Patch) -> None:
    monkeypatch.setattr(Forward, "repeated_operations", 0)
    assert found_by_scenarios(1, activations="peak")


def test_the_same_scenarios_show_nothing_where_no_bug_is_planted() -> None:
    given: list[tuple[int, dict[str, str]]] = [(seed, {}) for seed in (3, 7, 13)]
    given += [(15, {"kind": kind}) for kind in ("paged", "windows", "states")]
    given += [(11, {"kind": kind}) for kind in ("v0", "radix")]
    given += [(3, {"kind": kind}) for kind in ("contiguous", "windows")] + [(13, {"kind": "virtual"})]
    given += [(7, {"kind": "paged", "scheduler": name}) for name in ("vllm", "prefill_first", "max_utilization")]
    given += [(seed, {"kind": "radix", "scheduler": "sglang"}) for seed in (3, 11, 24)] + [(1, {"activations": "peak"})]
    given += [(15, {"kind": "windows", "scheduler": name}) for name in ("vllm", "prefill_first")]
    for seed, choices in given:
        scenario = Scenario.of(numbered(seed, **choices))
        assert differences(Twin(scenario).run(), Twin(scenario).run(step_mode=True)) == [], (seed, choices)
