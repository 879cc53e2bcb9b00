"""Whole runs on SGLang's pool: what turns find, duplicates that are given back, leaps equal to steps under pressure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from hbmtwin.allocators.radix import RadixPolicy
from hbmtwin.allocators.radix_tree import RadixTree
from hbmtwin.allocators.records import KVSequence
from hbmtwin.sim.books import Row
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError

WHOLE = "scheduler.max_num_batched_tokens=8192"
"""All prompts in one step."""
CACHING = ("kv_cache.enable_prefix_caching=true", "session.between_turns=prefix_cache")


def scenario(*overrides: str, page: int = 1, seed: int = 0) -> Scenario:
    fixed = ("kv_cache.policy=radix", "engine.max_model_len=2048", f"kv_cache.block_size={page}")
    return Scenario.load(seed=seed, overrides=[*fixed, *overrides])


@pytest.fixture
def evicted(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many leaves were evicted within leaps, and how many in steps."""
    seen: Counter[str] = Counter()
    now = "step"
    evict, advance = RadixTree.evict, RadixPolicy.advance

    def counted(self: RadixTree, pages: int) -> list[list[int]]:
        freed = evict(self, pages)
        seen[now] += len(freed)
        return freed

    def marked(self: RadixPolicy, decoding: Sequence[KVSequence], k: int) -> None:
        nonlocal now
        now = "leap"
        advance(self, decoding, k)
        now = "step"

    monkeypatch.setattr(RadixTree, "evict", counted)
    monkeypatch.setattr(RadixPolicy, "advance", marked)
    return seen


def differences(leaps: Result, steps: Result) -> list[str]:
    tables = ("timeline", "requests", "checkpoints")
    return [name for name in tables if not getattr(leaps, name).equals(getattr(steps, name))] + [
        name for name in leaps.summary if leaps.summary[name] != steps.summary[name]
    ]


@pytest.mark.parametrize(("page", "found"), [(1, [0, 199, 399, 599]), (16, [0, 192, 384, 592])])
def test_a_turn_finds_its_history_but_for_the_last_token(page: int, found: list[int]) -> None:
    """Turns of 100 + 100 tokens. The last sampled token is not computed: after turn n, 200 n - 1 are in memory."""
    one = ("workload.users=1", "workload.num_prompts=4", "workload.prompt_tokens=100", "workload.output_tokens=100")
    more = ("workload.system_prompt_tokens=0", "session.turns=4", "session.think_time_s=1")
    result = Twin(scenario(*CACHING, *one, *more, page=page)).run()
    assert result.requests.sort_values("turn")["cached_tokens"].tolist() == found
    cache = result.summary["prefix_cache"]
    assert (cache["requests"], cache["queries"], cache["hits"]) == (4, 100 + 300 + 500 + 700, sum(found))


def test_without_prefix_caching_nothing_is_found_or_kept() -> None:
    one = ("workload.users=2", "workload.num_prompts=6", "workload.prompt_tokens=100", "workload.output_tokens=100")
    result = Twin(scenario(*one, "session.turns=3", page=16)).run()
    assert result.requests["cached_tokens"].sum() == 0
    assert result.timeline["kv_cached"].max() == 0
    with pytest.raises(ScenarioError, match="'paged' or 'radix' with kv_cache"):
        Twin(scenario(*one, "session.between_turns=prefix_cache"))


def test_equal_prompts_that_meet_in_a_step_are_computed_each_and_kept_once() -> None:
    """Eight requests of 320 tokens, 256 of them the same system prompt: vLLM's second would find the first's blocks in
    the step itself, here all compute it, and seven copies are given back when the step ends."""
    same = ("workload.num_prompts=8", "workload.request_rate=inf", "workload.prompt_tokens=64", WHOLE)
    settings = (*same, "workload.system_prompt_tokens=256", "workload.output_tokens=40", "session.turns=1")
    shared, alone = Twin(scenario(*CACHING, *settings)).run(), Twin(scenario(*settings)).run()
    token = 512 * 1024
    assert shared.requests["cached_tokens"].tolist() == [0] * 8
    assert alone.timeline["kv_tokens"].max() - shared.timeline["kv_tokens"].max() == 7 * 256 * token
    assert set(shared.timeline[list(Row._fields)].sum(axis=1)) == {shared.summary["capacity_bytes"]}


def tight(page: int, seed: int, oom: str, *more: str) -> Scenario:
    """Chats on a pool that holds a few of them, so that leaves are evicted, and some of those that run preempted."""
    return scenario(
        "engine.gpu_memory_utilization=0.47",
        "engine.max_model_len=1024",
        "workload.num_prompts=20",
        f"workload.request_rate={(5, 50)[seed % 2]}",
        'workload.prompt_tokens={distribution="uniform",low=1,high=120}',
        'workload.output_tokens={distribution="uniform",low=1,high=300}',
        "workload.system_prompt_tokens=48",
        "session.turns=2",
        "session.think_time_s=0.1",
        f"scheduler.max_num_batched_tokens={(2048, 64)[seed % 2]}",
        "results.interval_s=0.3",
        f"memory.oom={oom}",
        *more,
        page=page,
        seed=seed,
    )


@pytest.mark.parametrize(("page", "oom"), [(1, "preempt"), (16, "preempt"), (16, "reject"), (1, "stop")])
def test_leaps_leave_the_rows_of_single_steps(page: int, oom: str, evicted: Counter[str]) -> None:
    preemptions = hits = 0
    for seed in range(3):
        crowded = tight(page, seed, oom, *CACHING)
        leaps, steps = Twin(crowded).run(), Twin(crowded).run(step_mode=True)
        assert differences(leaps, steps) == []
        preemptions += leaps.summary["preemptions"]
        hits += leaps.requests["cached_tokens"].sum()
    assert evicted["step"] >= 5
    assert evicted["leap"] >= 3
    assert hits > 1000
    assert (preemptions >= 5) == (oom == "preempt")


@pytest.mark.parametrize("policy", ["lfu", "slru"])
def test_other_orders_of_eviction_leap_as_well(policy: str, evicted: Counter[str]) -> None:
    crowded = tight(16, 1, "preempt", *CACHING, f'kv_cache.options={{eviction_policy="{policy}"}}')
    leaps, steps = Twin(crowded).run(), Twin(crowded).run(step_mode=True)
    assert differences(leaps, steps) == []
    assert leaps.summary["preemptions"] >= 1
    assert min(evicted["step"], evicted["leap"]) >= 1


def test_without_a_tree_leaps_pass_preemptions_alike() -> None:
    crowded = tight(1, 1, "preempt")
    leaps, steps = Twin(crowded).run(), Twin(crowded).run(step_mode=True)
    assert leaps.summary["preemptions"] >= 5
    assert differences(leaps, steps) == []


def by_request(self: RadixPolicy, decoding: Sequence[KVSequence], k: int) -> None:
    """A leap hands pages out request by request, not step by step."""
    for s in decoding:
        ADVANCE(self, [s], k)


def one_step_more(self: RadixPolicy, decoding: Sequence[KVSequence], limit: int) -> int:
    """The horizon counts on a page that is locked."""
    return min(limit, HORIZON(self, decoding, limit) + 1)


ADVANCE, HORIZON = RadixPolicy.advance, RadixPolicy.horizon


@pytest.mark.parametrize(("verb", "bug"), [("advance", by_request), ("horizon", one_step_more)])
def test_a_planted_leap_is_noticed(verb: str, bug: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    crowded = tight(16, 1, "preempt", *CACHING)
    steps = Twin(crowded).run(step_mode=True)
    monkeypatch.setattr(RadixPolicy, verb, bug)
    with pytest.raises((AssertionError, ValueError, IndexError)):
        assert differences(Twin(crowded).run(), steps) == []
