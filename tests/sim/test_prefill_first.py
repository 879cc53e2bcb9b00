"""Prompts in steps of their own: literal logs on a tiny pool, then whole runs in leaps and in steps.

A log line: ``+A`` admitted, ``A:10`` ten tokens of A, ``-A`` gave way, ``!A why`` rejected, ``A.`` ended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVLayout
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.scheduler import Plan, SchedulerConfig
from hbmtwin.sim.schedulers.prefill_first import PrefillFirstScheduler
from hbmtwin.sim.schedulers.vllm import VllmScheduler

from .legal_scenarios import TINY as TINY_MODELS
from .legal_scenarios import differences, per_step
from .step_server import StepServer

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
NAMES = "ABCDEFGH"


class Server(StepServer):
    """The scheduler over *blocks* blocks of 4 tokens besides the null one, one step at a time."""

    def __init__(self, blocks: int, **config: Any) -> None:
        settings = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, **config}
        scheduler = PrefillFirstScheduler(SchedulerConfig(**settings))
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        kv = PagedPolicy(TINY, arena, PagedConfig(num_blocks=blocks + 1, block_size=4, max_model_len=64))
        super().__init__(scheduler, kv)


def test_a_prompt_interrupts_all_decodes() -> None:
    server = Server(20).add(3, 9)
    assert server.steps(2) == ["+A A:3", "A:1"]
    server.add(18, 2).add(5, 2)
    assert server.steps(3) == ["+B +C B:18 C:5", "A:1 B:1 C:1 B. C.", "A:1"]


def test_prompts_are_whole_and_share_the_budget() -> None:
    server = Server(20, max_num_batched_tokens=10).add(6, 2).add(5, 2).add(4, 2)
    assert server.steps(3) == ["+A A:6", "+B +C B:5 C:4", "A:1 B:1 C:1 A. B. C."]


def test_no_more_than_max_num_seqs_run() -> None:
    server = Server(20, max_num_seqs=2).add(2, 2).add(2, 3).add(2, 2)
    assert server.steps(4) == ["+A +B A:2 B:2", "A:1 B:1 A.", "+C C:2", "B:1 C:1 B. C."]


def test_the_head_of_the_queue_blocks_those_behind_it() -> None:
    """Four blocks: A holds two, B needs three, C would fit."""
    server = Server(4).add(5, 3).add(9, 1).add(1, 1)
    assert server.steps(3) == ["+A A:5", "A:1", "A:1 A."]
    assert server.waiting == "B C"
    assert server.step() == "+B +C B:9 C:1 B. C."


def test_the_last_admitted_gives_way_and_comes_back_in_a_step_of_its_own() -> None:
    """Five blocks: A and B hold two each, C one. When A and B need a third, C goes, then B; B has 9 tokens, and waits
    in front of C until A has ended."""
    server = Server(5).add(7, 3).add(7, 3).add(4, 4)
    assert server.steps(2) == ["+A +B +C A:7 B:7 C:4", "-C A:1 B:1"]
    assert server.waiting == "C"
    assert server.steps(2) == ["-B A:1 A.", "+B +C B:9 C:5 B."]
    assert server.steps(3) == ["C:1", "C:1 C.", ""]


def test_what_can_never_run_is_rejected() -> None:
    assert Server(3).add(13, 1).add(2, 1).step() == "!A kv_capacity +B B:2 B."
    assert Server(3).add(60, 5).add(2, 1).step() == "!A max_model_len +B B:2 B."


# -- whole runs ------------------------------------------------------------------------------------------------------


def scenario(*overrides: str, seed: int = 0) -> Scenario:
    fixed = ("scheduler.policy=prefill_first", "kv_cache.block_size=16", "session.turns=1", "results.interval_s=0.3")
    sizes = ("engine.max_model_len=1024", "engine.gpu_memory_utilization=0.46", "workload.num_prompts=16")
    lengths = (
        'workload.prompt_tokens={distribution="uniform",low=1,high=300}',
        'workload.output_tokens={distribution="uniform",low=1,high=250}',
    )
    rate = (f"workload.request_rate={(4, 50)[seed % 2]}", f"scheduler.max_num_seqs={(256, 5)[seed % 3 == 2]}")
    return Scenario.load(seed=seed, overrides=[*fixed, *sizes, *lengths, *rate, *overrides])


RUNS = {
    "paged": (),
    "cache": ("kv_cache.enable_prefix_caching=true", "session.turns=2", "session.think_time_s=0.1"),
    "0.22": ("kv_cache.version=0.22", "kv_cache.enable_prefix_caching=true"),
    "radix": ("kv_cache.policy=radix", "kv_cache.enable_prefix_caching=true", "session.turns=2"),
    "contiguous": ("kv_cache.policy=contiguous", "kv_cache.copy_scope=step", "memory.oom=preempt"),
}


@pytest.mark.parametrize("name", RUNS)
def test_leaps_equal_steps(name: str) -> None:
    preemptions = 0
    for seed in range(3):
        run = scenario(*RUNS[name], seed=seed)
        leaps, steps = Twin(run).run(), Twin(run).run(step_mode=True)
        assert differences(leaps, steps) == []
        assert leaps.summary["requests_completed"] >= 3
        assert set(leaps.requests["status"]) <= {"completed", "rejected"}
        preemptions += leaps.summary["preemptions"]
    assert preemptions > 0


def mixed_steps() -> tuple[int, int]:
    """Steps of a run with prompts and decodes, and with prompts."""
    twin = Twin(scenario(seed=1))
    scheduler: Any = twin.scheduler
    plans: list[Plan] = []
    honest: Callable[..., Plan] = scheduler.schedule

    def noted(kv: PagedPolicy) -> Plan:
        plans.append(honest(kv))
        return plans[-1]

    scheduler.schedule = noted
    twin.run(step_mode=True)
    with_prompts = [p for p in plans if p.admitted]
    return sum(len(p.everyone()) != len(p.admitted) for p in with_prompts), len(with_prompts)


def test_no_step_has_prompts_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    mixed, prompts = mixed_steps()
    assert mixed == 0
    assert prompts > 5
    monkeypatch.setattr(PrefillFirstScheduler, "schedule", VllmScheduler.schedule)
    assert mixed_steps()[0] > 0, "a planted order of steps is noticed"


def test_a_leap_over_an_end_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    run = scenario(seed=1)
    steps = Twin(run).run(step_mode=True)
    honest = PrefillFirstScheduler.steady_steps
    monkeypatch.setattr(PrefillFirstScheduler, "steady_steps", lambda self, p: honest(self, p) and honest(self, p) + 1)
    assert "requests" in differences(Twin(run).run(), steps)


def test_prompts_are_not_cut_where_states_are_kept_at_the_ends_of_chunks() -> None:
    with pytest.raises(ScenarioError, match=r"kv_cache\.mamba_cache_mode: align ends chunks"):
        Twin(
            scenario(
                "model.name=granite-4.0-h-micro",
                "kv_cache.enable_prefix_caching=true",
                "kv_cache.mamba_cache_mode=align",
                "engine.gpu_memory_utilization=0.9",
            )
        )


def test_blocks_that_a_step_of_decodes_gave_back_are_seen_by_the_queue_in_the_next() -> None:
    """Layers with a window of 40 tokens and blocks of 64: the first block of those that run goes in the step behind
    64 + 39 tokens, and the prompt that waits for it runs in the next, not at the end of a leap."""
    window = {
        "model.name": str(TINY_MODELS / "plain.json"),
        "engine.max_model_len": 256,
        "kv_cache.policy": "paged",
        "kv_cache.block_size": 64,
        "kv_cache.retention": "sliding_window(40)",
        "kv_cache.options": {"num_blocks": 6},
        "scheduler.policy": "prefill_first",
        "workload.num_prompts": 3,
        "workload.request_rate": float("inf"),
        "workload.prompt_tokens": 100,
        "workload.output_tokens": 60,
        "workload.system_prompt_tokens": 0,
        "session.turns": 1,
        "results.steps": True,
    }
    run = Scenario.of(window)
    leaps, steps = Twin(run).run(), Twin(run).run(step_mode=True)
    assert differences(leaps, steps) == []
    rows = [(context, new) for _, _, _, _, new, context, _ in per_step(leaps.steps) or []]
    assert rows[4:7] == [([103, 103], [1, 1]), ([0], [100]), ([104, 104, 100], [1, 1, 1])]
