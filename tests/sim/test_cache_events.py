"""Events and counts of the prefix cache in a result: as many as vLLM would report, and the books agree with them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError

CHATS = (
    "engine.max_model_len=1024",
    "kv_cache.block_size=16",
    "kv_cache.enable_prefix_caching=true",
    "session.between_turns=prefix_cache",
    "engine.gpu_memory_utilization=0.475",
    "workload.num_prompts=24",
    "workload.request_rate=5",
    'workload.prompt_tokens={distribution="uniform",low=1,high=200}',
    'workload.output_tokens={distribution="uniform",low=1,high=120}',
    "workload.system_prompt_tokens=48",
    "session.turns=3",
    "session.think_time_s=0.5",
)


def chats(*overrides: str) -> Scenario:
    return Scenario.load(preset="paged", overrides=[*CHATS, *overrides])


def test_events_tell_which_keys_are_in_the_pool() -> None:
    twin = Twin(chats("results.cache_events=true"))
    result = twin.run()
    events = result.cache_events
    assert events is not None
    assert list(events.columns) == ["time_ns", "action", "key", "parent", "block", "group"]
    counts = Counter(events["action"])
    assert counts["stored"] > counts["removed"] > 0
    keyed: dict[int, int] = {}
    seen: set[int] = set()
    for event in events.itertuples():
        if event.action == "stored":
            assert event.block not in keyed
            assert event.parent == -1 or event.parent in seen
            keyed[int(event.block)] = int(event.key)
            seen.add(int(event.key))
        else:
            assert keyed.pop(int(event.block)) == event.key
    cached_bytes = int(result.timeline["kv_cached"].iloc[-1])
    assert cached_bytes == len(keyed) * 16 * twin.layout.token_bytes > 0  # nobody runs at the end
    assert events["time_ns"].is_monotonic_increasing


def test_events_do_not_change_the_run_and_are_not_kept_unasked(tmp_path: Path) -> None:
    told, silent = Twin(chats("results.cache_events=true")).run(), Twin(chats()).run()
    assert told.timeline.equals(silent.timeline)
    assert silent.cache_events is None
    told.save(tmp_path / "out")
    again = Result.load(tmp_path / "out")
    assert again.cache_events is not None
    assert again.cache_events.equals(told.cache_events)


def test_the_counts_are_those_of_the_requests() -> None:
    result = Twin(chats()).run()
    counted = result.summary["prefix_cache"]
    admitted = result.requests[result.requests["scheduled_ns"] >= 0]
    assert counted["requests"] == len(admitted) == result.summary["requests_completed"] > 0
    assert counted["queries"] == admitted["prompt_tokens"].sum()
    assert counted["hits"] == admitted["cached_tokens"].sum() > 0
    assert counted["hit_rate"] == counted["hits"] / counted["queries"]
    assert counted["preempted_requests"] == result.summary["preemptions"] > 0
    older = Twin(chats("kv_cache.version='0.22'")).run().summary["prefix_cache"]
    assert older["requests"] > counted["requests"]  # refused ones, each time they were looked up


@pytest.mark.parametrize("release", ["0.18", "0.22", "0.27"])
def test_leaps_count_what_single_steps_count(release: str) -> None:
    """Before 0.27 a request that waits is counted at every step at which it is looked up and refused."""
    short = chats(f"kv_cache.version='{release}'", "workload.request_rate=50", "workload.num_prompts=30")
    leaps, steps = Twin(short).run(), Twin(short).run(step_mode=True)
    assert leaps.summary == steps.summary
    assert leaps.timeline["waiting"].max() > 2
    assert leaps.summary["prefix_cache"]["requests"] > (30 if release != "0.27" else 20)


def test_without_a_prefix_cache_there_is_neither() -> None:
    off = ("kv_cache.enable_prefix_caching=false", "session.between_turns=drop")
    assert Twin(chats(*off)).run().summary["prefix_cache"] is None
    with pytest.raises(ScenarioError) as refused:
        Twin(Scenario.load(preset="doubling", overrides=["results.cache_events=true"]))
    assert str(refused.value) == (
        "results.cache_events: contiguous reports none; leave it false, or use kv_cache.policy = 'paged' of 0.27, 0.22 "
        "or 0.18 with kv_cache.enable_prefix_caching = true"
    )
