"""Tokens that were computed again: by hand, and against a count of every token position of every step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from hbmtwin.allocators.records import KVSequence
from hbmtwin.sim.recompute import RecomputeCounter
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

from .legal_scenarios import legal_scenarios

S = 10**9


def sequence(computed: int = 0, lost: int = 0) -> KVSequence:
    return KVSequence(0, 0, 0, 1200, 1300, num_computed_tokens=computed, lost_tokens=lost)


def test_the_example_of_the_module() -> None:
    books = RecomputeCounter()
    books.admitted(sequence(), 0, 0, 0)
    books.preempted(sequence(lost=1000), S, 0)
    books.admitted(sequence(lost=1000), 896, 2 * S, 896)
    assert books.recomputed_tokens == 104
    assert books.computed_tokens(896) == 1000
    books.preempted(sequence(lost=1016), 3 * S, 0)
    assert books.computed_tokens(0) == 1120
    books.admitted(sequence(lost=1016), 0, 4 * S, 0)
    books.ended(sequence(computed=1200), 1201, 5 * S, 0)
    assert books.summary(0) == {
        "computed_tokens": 2320,
        "recomputed_tokens": 1120,
        "recomputed_share": 1120 / 2320,
        "thrashing": None,
    }


def test_what_was_swapped_out_is_not_lost() -> None:
    books = RecomputeCounter()
    books.admitted(sequence(), 0, 0, 0)
    books.preempted(sequence(computed=1000, lost=700), S, 0)
    books.ended(sequence(computed=1200), 1201, 2 * S, 0)
    assert (books.computed_tokens(0), books.recomputed_tokens) == (1200, 0)


def test_a_run_without_a_step_has_no_share() -> None:
    assert RecomputeCounter().summary(0)["recomputed_share"] is None


def test_one_that_leaves_before_it_is_back_has_not_computed_all_again() -> None:
    """1,000 tokens, then 300 of them, then with 896 found: 300 and 104 are computed again."""
    books = RecomputeCounter()
    books.admitted(sequence(), 0, 0, 0)
    books.preempted(sequence(lost=1000), S, 0)
    books.admitted(sequence(lost=1000), 0, 2 * S, 0)
    assert books.recomputed_tokens == 1000
    assert books.summary(300, [sequence(computed=300, lost=1000)])["recomputed_tokens"] == 300
    books.preempted(sequence(lost=300), 3 * S, 0)
    assert books.recomputed_tokens == 300
    books.admitted(sequence(lost=300), 896, 4 * S, 896)
    books.ended(sequence(computed=1200), 1201, 5 * S, 0)
    assert (books.recomputed_tokens, books.computed_tokens(0)) == (404, 1604)


@pytest.mark.parametrize(("returns", "found"), [(9, 0), (10, 1)])
def test_a_minute_of_few_returns_is_no_verdict(returns: int, found: int) -> None:
    books = RecomputeCounter()
    for n in range(returns):
        books.preempted(sequence(lost=1000), n * S, 0)
        books.admitted(sequence(lost=1000), 0, n * S, 0)
    thrashing = books.summary(0)["thrashing"]
    assert (thrashing is not None) == bool(found)


def test_minutes_are_judged_one_by_one() -> None:
    """In the second minute 50 of 250 tokens are computed again, in the fourth 100 of 200, in the fifth 300 of 400."""
    books = RecomputeCounter()
    for minute, lost, losses, tokens in ((1, 50, 1, 200), (3, 100, 1, 100), (4, 100, 3, 100)):
        for n in range(10):
            at = (60 * minute + n) * S
            for _ in range(losses):
                books.preempted(sequence(lost=lost), at, 0)
                books.admitted(sequence(lost=lost), 0, at, 0)
            books.ended(sequence(computed=tokens), 300, at, 0)
    assert books.recomputed_tokens == 4500
    assert books.summary(0)["thrashing"] == {"minutes": 2, "first_s": 180, "worst_s": 240, "worst_share": 0.75}


# -- whole runs --------------------------------------------------------------------------------------------------------


def counted(result: Result) -> tuple[int, int]:
    """Tokens computed, and those that their request had had before, computed or found, told from the steps."""
    assert result.steps is not None
    computed = again = 0
    had: Counter[int] = Counter()
    """By id: the positions before this one."""
    for row in result.steps[["repeat", "seq_ids", "new_tokens", "context_tokens"]].itertuples(index=False):
        for id, new, context in zip(row.seq_ids, row.new_tokens, row.context_tokens, strict=True):
            places = range(context, context + new + row.repeat - 1)
            computed += len(places)
            again += sum(place < had[id] for place in places)
            had[id] = max(had[id], places.stop)
    return computed, again


SHORT = (
    *("engine.max_model_len=1024", "results.steps=true", "workload.num_prompts=24", "workload.request_rate=20"),
    *("workload.prompt_tokens={distribution='uniform', low=40, high=300}", "session.turns=1"),
    *("workload.output_tokens={distribution='uniform', low=20, high=400}", "workload.system_prompt_tokens=0"),
    *("kv_cache.block_size=16", "kv_cache.options={num_blocks=100}"),
)


@pytest.mark.parametrize(
    "overrides",
    [
        ("kv_cache.enable_prefix_caching=false",),
        ("kv_cache.enable_prefix_caching=true",),
        ("kv_cache.version=0.18", "kv_cache.enable_prefix_caching=false", "scheduler.max_num_batched_tokens=64"),
        ("scheduler.scheduling_policy=priority", "workload.priorities=[1, 1]"),
        ("scheduler.policy=prefill_first",),
        ("scheduler.policy=max_utilization",),
        ("kv_cache.version=v0", "scheduler.policy=vllm_v0"),
        ("kv_cache.policy=radix", "scheduler.policy=sglang", "scheduler.schedule_conservativeness=0"),
    ],
    ids=["vllm", "prefix", "chunks", "priority", "prefill_first", "max_utilization", "v0", "sglang"],
)
def test_recomputed_tokens_are_positions_that_were_computed_before(overrides: tuple[str, ...]) -> None:
    result = Twin(Scenario.load(preset="paged", overrides=[*SHORT, *overrides])).run()
    s = result.summary
    assert s["requests_completed"] == 24
    assert s["preemptions"] >= 3
    computed, again = counted(result)
    assert (s["computed_tokens"], s["recomputed_tokens"]) == (computed, again)
    assert again > 0


def test_those_who_are_rejected_while_they_run_have_computed_too() -> None:
    """v0 swaps, and the host has no room for it."""
    swaps = ("kv_cache.version=v0", "scheduler.policy=vllm_v0", "scheduler.preemption_mode=swap")
    overrides = [*SHORT, *swaps, "kv_cache.swap_space_bytes=0"]
    result = Twin(Scenario.load(preset="paged", overrides=overrides)).run()
    assert result.summary["requests_rejected"]["swap_space"] > 0
    assert (result.summary["computed_tokens"], result.summary["recomputed_tokens"]) == counted(result)


def test_every_legal_scenario_adds_up() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=45, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(legal_scenarios())
    def adds_up(scenario: Scenario) -> None:
        if scenario.scheduler.policy == "static_batch":  # its steps count pads as well
            return
        keys: dict[str, Any] = scenario.model_dump()
        keys["results"]["steps"] = True
        result = Twin(Scenario.model_validate(keys)).run()
        s = result.summary
        if s["oom"] is not None:  # the step in which it died was taken, and counts nowhere
            return
        assert (s["computed_tokens"], s["recomputed_tokens"]) == counted(result)
        seen["run"] += 1
        seen["again"] += s["recomputed_tokens"] > 0

    adds_up()
    assert seen["run"] >= 15
    assert seen["again"]  # how many depends on what Hypothesis draws, and that on what is imported


def test_a_count_that_takes_what_is_found_again_for_computed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RecomputeCounter.admitted
    monkeypatch.setattr(RecomputeCounter, "admitted", lambda books, s, hit, *when: honest(books, s, 0, *when))
    test_recomputed_tokens_are_positions_that_were_computed_before(("kv_cache.enable_prefix_caching=false",))
    with pytest.raises(AssertionError):
        test_recomputed_tokens_are_positions_that_were_computed_before(("kv_cache.enable_prefix_caching=true",))
