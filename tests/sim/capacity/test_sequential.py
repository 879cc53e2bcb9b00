"""The sequential rule: worked looks, its error added up by another way and by simulation, and rules that are wrong."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.sim.capacity.confidence import at_least, least_trials, lower_bound, upper_bound
from hbmtwin.sim.capacity.sequential import NEVER, SequentialRule, TooFewSeeds, crossing, sequential_rule

ERROR = 0.05 / 12


def run_by_run(rule: SequentialRule, survive: float, verdict: bool) -> float:
    """The probability of that verdict, one run at a time: the definition, without a shortcut."""

    @cache
    def after(trials: int, failures: int) -> float:
        if trials in rule.looks:
            decided = rule.decided(failures, trials)
            if decided is not None or trials == rule.looks[-1]:
                return float(decided is verdict)
        return survive * after(trials + 1, failures) + (1 - survive) * after(trials + 1, failures + 1)

    return after(0, 0)


def simulated(rule: SequentialRule, probability: float, times: int, seed: int) -> tuple[float, float]:
    """How often the rule said yes, and no."""
    draws = np.random.default_rng(seed)
    yes = no = 0
    for _ in range(times):
        failures = np.cumsum(draws.random(rule.looks[-1]) >= probability)
        for look in rule.looks:
            decided = rule.decided(int(failures[look - 1]), look)
            if decided is not None:
                yes, no = yes + decided, no + (not decided)
                break
    return yes / times, no / times


def test_the_looks_of_the_head_of_the_module() -> None:
    rule = sequential_rule(0.95, ERROR, 300)
    assert rule.looks == (8, 16, 32, 64, 119, 179, 300)
    assert rule.yes == (NEVER, NEVER, NEVER, NEVER, 0, 1, 4)
    assert rule.no == (4, 5, 7, 11, 15, 20, 29)
    assert rule.least_for_yes == 119
    assert [rule.decided(f, 119) for f in (0, 1, 14, 15)] == [True, None, None, False]
    assert rule.next_look(0) == 8
    assert rule.next_look(119) == 179
    assert rule.next_look(300) is None


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from([0.5, 0.8, 0.9, 0.95]), st.sampled_from([0.1, 0.025, ERROR]), st.integers(1, 3), st.integers(0, 9)
)
def test_either_mistake_is_as_rare_as_it_says(survive: float, error: float, times: int, more: int) -> None:
    most = least_trials(survive, error) * times + more
    rule = sequential_rule(survive, error, most)
    assert rule.looks == tuple(sorted(set(rule.looks)))
    assert rule.looks[-1] == most
    for verdict in (True, False):
        assert run_by_run(rule, survive, verdict) <= error * (1 + 1e-9)
    assert run_by_run(rule, survive + (1 - survive) / 2, True) > run_by_run(rule, survive, True)
    for look, yes, no in zip(rule.looks, rule.yes, rule.no, strict=True):
        assert yes < no
        if yes > NEVER:
            assert lower_bound(look - yes, look, error) >= survive - 1e-12
        if no <= look:
            assert upper_bound(look - no, look, error) < survive + 1e-12


def test_the_sum_over_paths_is_that_of_single_runs() -> None:
    rule = sequential_rule(0.9, 0.02, 150)
    only_yes = replace(rule, no=tuple(look + 1 for look in rule.looks))
    only_no = replace(rule, yes=tuple(NEVER for _ in rule.looks))
    assert crossing(rule.looks, rule.yes, 0.9, upward=False) == pytest.approx(
        run_by_run(only_yes, 0.9, True), abs=1e-12
    )
    assert crossing(rule.looks, rule.no, 0.9, upward=True) == pytest.approx(run_by_run(only_no, 0.9, False), abs=1e-12)


def test_simulated_verdicts_are_as_rare() -> None:
    rule = sequential_rule(0.9, 0.05, 200)
    yes, no = simulated(rule, 0.9, 4000, seed=1)
    assert yes < 0.05 + 3 * (0.05 / 4000) ** 0.5
    assert no < 0.05 + 3 * (0.05 / 4000) ** 0.5
    assert simulated(rule, 0.99, 1000, seed=2)[0] > 0.97
    assert simulated(rule, 0.7, 1000, seed=3)[1] > 0.97


def test_a_rule_that_forgets_its_looks_is_caught() -> None:
    rule = sequential_rule(0.9, 0.05, 200)
    looks = tuple(range(10, 201, 10))
    naive = SequentialRule(
        0.9,
        0.05,
        looks,
        tuple(max((f for f in range(look) if at_least(look - f, look, 0.9) <= 0.05), default=NEVER) for look in looks),
        tuple(min(f for f in range(look + 2) if f > look or at_least(f, look, 1 - 0.9) < 0.05) for look in looks),
    )
    assert run_by_run(naive, 0.9, True) > 0.05
    assert run_by_run(naive, 0.9, False) > 0.05
    assert simulated(naive, 0.9, 1000, seed=4)[1] > 0.08
    assert run_by_run(rule, 0.9, False) <= 0.05


def test_too_few_seeds_say_how_many_it_takes() -> None:
    with pytest.raises(TooFewSeeds, match="at least 107 are needed") as raised:
        sequential_rule(0.95, ERROR, 106)
    assert (raised.value.most, raised.value.least) == (106, 107)
    rule = sequential_rule(0.95, ERROR, 107)
    assert rule.yes[-1] == 0
    assert rule.least_for_yes == 107
    assert run_by_run(rule, 0.95, True) <= ERROR


@pytest.mark.parametrize(("survive", "error"), [(1.0, 0.01), (0.0, 0.01), (0.9, 0.0), (0.9, 0.6)])
def test_what_makes_no_sense(survive: float, error: float) -> None:
    with pytest.raises(ValueError, match="survive"):
        sequential_rule(survive, error, 100)
