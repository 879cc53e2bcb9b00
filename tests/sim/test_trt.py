"""TensorRT-LLM's two ways to admit: literal logs on a tiny pool, then whole runs in leaps and in steps.

A log line: ``+A`` admitted, ``A:10`` ten tokens of A, ``-A`` paused, ``!A why`` rejected, ``A.`` ended.
"""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.radix import RadixConfig, RadixPolicy
from hbmtwin.allocators.records import KVLayout
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.scheduler import Plan, SchedulerConfig
from hbmtwin.sim.schedulers.guaranteed_no_evict import GuaranteedNoEvictScheduler
from hbmtwin.sim.schedulers.max_utilization import MaxUtilizationScheduler
from hbmtwin.sim.schedulers.vllm import VllmScheduler

from .step_server import StepServer

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
NAMES = "ABCDEFGH"
NO_EVICT, UTILIZE = GuaranteedNoEvictScheduler, MaxUtilizationScheduler


class Server(StepServer):
    """A scheduler over *blocks* blocks of 4 tokens besides the null one, one step at a time."""

    def __init__(self, cls: type[VllmScheduler], blocks: int, *, cache: bool = False, **config: Any) -> None:
        settings = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64, **config}
        scheduler = cls(SchedulerConfig(**settings))
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        pool = PagedConfig(num_blocks=blocks + 1, block_size=4, max_model_len=64, enable_prefix_caching=cache)
        kv = PagedPolicy(TINY, arena, pool)
        super().__init__(scheduler, kv)


# -- guaranteed no evict ---------------------------------------------------------------------------------------------


def test_one_is_admitted_whose_full_length_fits_beside_all_others() -> None:
    """Eight blocks: A may come to 16 tokens, four of them, though it holds one; B to 17, a block too much."""
    assert Server(NO_EVICT, 8).add(3, 2, 13).add(3, 2, 13).step() == "+A +B A:3 B:3"
    server = Server(NO_EVICT, 8).add(3, 2, 13).add(3, 2, 14).add(1, 1)
    assert server.step() == "+A A:3"
    assert server.waiting == "B C", "C would fit, and B stops the queue"
    assert server.steps(2) == ["A:1 A.", "+B +C B:3 C:1 C."]


def test_nobody_is_ever_paused() -> None:
    server = Server(NO_EVICT, 8).add(7, 9).add(7, 9).add(7, 9)
    assert server.steps(9) == ["+A +B A:7 B:7", *["A:1 B:1"] * 7, "A:1 B:1 A. B."]
    assert server.step() == "+C C:7"


def test_a_prompt_that_is_half_way_keeps_its_room() -> None:
    """A of 20 + 4 tokens takes six of eight blocks, two of them in its first chunk of 8."""
    server = Server(NO_EVICT, 8, max_num_batched_tokens=8).add(20, 4).add(9, 1)
    assert server.steps(3) == ["+A A:8", "A:8", "A:4"]
    assert server.waiting == "B"


def test_one_whose_full_length_is_more_than_the_pool_is_rejected() -> None:
    assert Server(NO_EVICT, 4).add(3, 2, 14).add(3, 1).step() == "!A kv_capacity +B B:3 B."


@pytest.mark.parametrize("cls", [NO_EVICT, UTILIZE])
def test_one_that_can_find_what_is_just_computed_is_passed_over(cls: type[VllmScheduler]) -> None:
    """A and B are alike in 8 of 9 tokens; C is not. vLLM would let B adopt the blocks of A in the same step."""
    server = Server(cls, 20, cache=True).add(9, 3, session=0).add(9, 3, session=0).add(9, 3)
    assert server.step() == "+A +C A:9 C:9"
    assert server.waiting == "B"
    assert server.step() == ("+B A:1 C:1 B:1" if cls is NO_EVICT else "+B A:1 B:1 C:1")
    vllm = Server(VllmScheduler, 20, cache=True).add(9, 3, session=0).add(9, 3, session=0)
    assert vllm.step() == "+A +B A:9 B:1"


# -- max utilization -------------------------------------------------------------------------------------------------


def test_requests_need_room_for_a_step_only() -> None:
    server = Server(UTILIZE, 6).add(7, 9).add(7, 9).add(7, 9)
    assert server.step() == "+A +B +C A:7 B:7 C:7"


def test_the_last_started_is_paused_for_those_before_it_and_the_walk_ends_there() -> None:
    """Six blocks, two each, and each needs a third for its ninth token: C is paused, whose two are enough for A and B.
    D, which came behind it, is not asked."""
    server = Server(UTILIZE, 6).add(7, 9).add(7, 9).add(7, 9)
    assert server.steps(2) == ["+A +B +C A:7 B:7 C:7", "A:1 B:1 C:1"]
    server.add(1, 1)
    assert server.step() == "-C A:1 B:1"
    assert server.waiting == "C D"
    assert server.steps(3) == ["A:1 B:1"] * 3
    assert server.step() == "-B A:1", "13 tokens of A take a fourth block"


def test_a_newcomer_pauses_nobody_before_it() -> None:
    server = Server(UTILIZE, 4).add(9, 4)
    server.step()
    server.add(9, 2)
    assert server.step() == "A:1"
    assert server.waiting == "B"


def test_one_that_came_earlier_pauses_those_that_came_later() -> None:
    """Eight blocks, three each: B is passed over for the first of A's blocks, and C starts. What B will find is not
    subtracted from what it needs, and of two free blocks it has too few: C is paused."""
    server = Server(UTILIZE, 8, cache=True).add(9, 3, session=0).add(9, 3, session=0).add(9, 3)
    assert server.steps(2) == ["+A +C A:9 C:9", "-C +B A:1 B:1"]
    assert server.waiting == "C"
    assert server.steps(2) == ["+C A:1 B:1 C:2 A.", "B:1 C:1 B. C."]


def test_one_alone_that_outgrows_the_pool_is_paused_and_then_rejected() -> None:
    server = Server(UTILIZE, 3).add(12, 3).add(2, 1)
    assert server.steps(3) == ["+A A:12", "-A", "!A kv_capacity +B B:2 B."]


def test_no_more_than_max_num_seqs_run_of_those_that_came_first() -> None:
    server = Server(UTILIZE, 20, max_num_seqs=2).add(2, 2).add(2, 3).add(2, 2)
    assert server.steps(4) == ["+A +B A:2 B:2", "A:1 B:1 A.", "+C B:1 C:2 B.", "C:1 C."]


# -- what does not go together ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [NO_EVICT, UTILIZE])
def test_other_policies_are_refused(cls: type[VllmScheduler]) -> None:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    policy = RadixPolicy(TINY, arena, RadixConfig(num_blocks=9, max_model_len=64))
    with pytest.raises(TypeError, match=f"the scheduler {cls.name} needs the policy paged, not RadixPolicy"):
        cls(SchedulerConfig(64)).schedule(policy)
    with pytest.raises(ScenarioError, match="counts the blocks of TensorRT-LLM's pool, which radix does not have"):
        Twin(Scenario.load(overrides=[f"scheduler.policy={cls.name}", "kv_cache.policy=radix"]))
    with pytest.raises(ScenarioError, match="counts blocks by tokens, and layers with a window"):
        Twin(scenario(cls, "model.name=gemma-3-1b", "engine.gpu_memory_utilization=0.9"))


def test_a_server_that_may_not_preempt_cannot_pause() -> None:
    with pytest.raises(
        ScenarioError, match=r"memory\.oom: max_utilization pauses requests, which is not what 'stop' says"
    ):
        Twin(scenario(UTILIZE, "memory.oom=stop"))


# -- whole runs ------------------------------------------------------------------------------------------------------


def scenario(cls: type[VllmScheduler], *overrides: str, seed: int = 0) -> Scenario:
    return Scenario.load(
        seed=seed,
        overrides=[
            f"scheduler.policy={cls.name}",
            "kv_cache.block_size=16",
            "engine.gpu_memory_utilization=0.46",
            "engine.max_model_len=1024",
            "workload.num_prompts=16",
            f"workload.request_rate={(5, 50)[seed % 2]}",
            'workload.prompt_tokens={distribution="uniform",low=1,high=200}',
            'workload.output_tokens={distribution="uniform",low=1,high=250}',
            "workload.system_prompt_tokens=48",
            "session.turns=1",
            f"scheduler.max_num_batched_tokens={(2048, 64)[seed % 2]}",
            f"scheduler.max_num_seqs={(256, 256, 4)[seed % 3]}",
            "results.interval_s=0.3",
            *overrides,
        ],
    )


def differences(leaps: Result, steps: Result) -> list[str]:
    names = [n for n in ("timeline", "requests", "checkpoints") if not getattr(leaps, n).equals(getattr(steps, n))]
    return names if leaps.summary == steps.summary else [*names, "summary"]


RUNS = {
    "plain": (),
    "cache": ("kv_cache.enable_prefix_caching=true", "session.turns=2", "session.think_time_s=0.1"),
    "0.22": ("kv_cache.version=0.22", "kv_cache.enable_prefix_caching=true"),
    "samples": ("kv_cache.enable_prefix_caching=true", "workload.samples=3"),
}


@pytest.mark.parametrize("cls", [NO_EVICT, UTILIZE])
@pytest.mark.parametrize("name", RUNS)
def test_leaps_equal_steps(cls: type[VllmScheduler], name: str) -> None:
    preemptions = waited = 0
    for seed in range(2):
        run = scenario(cls, *RUNS[name], seed=seed)
        leaps, steps = Twin(run).run(), Twin(run).run(step_mode=True)
        assert differences(leaps, steps) == []
        preemptions += leaps.summary["preemptions"]
        waited += (leaps.timeline["waiting"] > 0).sum()
    assert (preemptions > 0) == (cls is UTILIZE)
    assert waited > 10


def test_leaps_equal_steps_where_activations_run_out() -> None:
    for cls in (NO_EVICT, UTILIZE):
        small = ("memory.activations=per_layer", "memory.activation_bytes=1MiB", "workload.num_prompts=5")
        run = scenario(cls, *small, seed=1)
        assert differences(Twin(run).run(), Twin(run).run(step_mode=True)) == []


def one_step_more(self: VllmScheduler, p: Plan) -> int:
    """A leap over the end of a request."""
    return HONEST(self, p) and HONEST(self, p) + 1


HONEST = MaxUtilizationScheduler.steady_steps
NARROW = ("scheduler.max_num_batched_tokens=3", "workload.prompt_tokens=9", "workload.request_rate=inf")
"""Steps that serve three of those that run; the others have room promised that they do not take."""


def test_leaps_equal_steps_where_few_of_those_that_run_are_served() -> None:
    for cls in (NO_EVICT, UTILIZE):
        run = scenario(cls, *NARROW)
        assert differences(Twin(run).run(), Twin(run).run(step_mode=True)) == []


def test_a_planted_leap_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MaxUtilizationScheduler, "steady_steps", one_step_more)
    run = scenario(UTILIZE, seed=1)
    assert differences(Twin(run).run(), Twin(run).run(step_mode=True)) != []


def test_the_walk_ends_before_the_paused_one() -> None:
    """C's pause leaves a block over, in which D would fit: it is not asked in that step."""
    server = Server(UTILIZE, 7).add(7, 9).add(7, 9).add(9, 9)
    assert server.steps(2) == ["+A +B +C A:7 B:7 C:9", "A:1 B:1 C:1"]
    server.add(1, 1)
    assert server.step() == "-C A:1 B:1"
    assert server.kv.free_blocks == 1


def test_a_gate_that_forgets_what_others_lack_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all free blocks for the rest somebody runs out of them, and is preempted."""
    honest = GuaranteedNoEvictScheduler._admit

    def all_free(self: GuaranteedNoEvictScheduler, plan: Plan, kv: PagedPolicy, budget: int) -> None:
        self._rest = kv.free_blocks
        honest(self, plan, kv, budget)

    monkeypatch.setattr(GuaranteedNoEvictScheduler, "_admit", all_free)
    assert Twin(scenario(NO_EVICT, seed=1)).run().summary["preemptions"] > 0
