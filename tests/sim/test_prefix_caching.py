"""Whole runs with a prefix cache: what later turns find, books that close over shared blocks, leaps equal to steps."""

from __future__ import annotations

import pytest

from hbmtwin.sim.books import Row
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

BLOCK = 16
WHOLE = "scheduler.max_num_batched_tokens=8192"
"""All prompts in one step."""


def scenario(*overrides: str, seed: int = 0) -> Scenario:
    return Scenario.load(
        preset="paged",
        seed=seed,
        overrides=[
            "engine.max_model_len=2048",
            f"kv_cache.block_size={BLOCK}",
            "kv_cache.enable_prefix_caching=true",
            "session.between_turns=prefix_cache",
            *overrides,
        ],
    )


def test_a_turn_finds_the_whole_blocks_of_its_history_but_for_the_last_token() -> None:
    """Turns of 100 + 100 tokens. The last sampled token is not computed in its turn: after turn n, 200 n - 1 tokens are
    in memory, of which whole blocks of 16 can be found, in a pool that is never short."""
    one = ("workload.users=1", "workload.num_prompts=4", "workload.prompt_tokens=100", "workload.output_tokens=100")
    result = Twin(scenario(*one, "workload.system_prompt_tokens=0", "session.turns=4", "session.think_time_s=1")).run()
    found = result.requests.sort_values("turn")
    assert found["prompt_tokens"].tolist() == [100, 300, 500, 700]
    assert found["cached_tokens"].tolist() == [0, 192, 384, 592]
    assert [tokens // BLOCK * BLOCK for tokens in (199, 399, 599)] == [192, 384, 592]


def test_a_shared_prefix_is_in_memory_once() -> None:
    """Eight requests of 320 tokens, of which 256 are the same system prompt: 16 blocks that all of them refer to."""
    same = ("workload.num_prompts=8", "workload.request_rate=inf", "workload.prompt_tokens=64", WHOLE)
    settings = (*same, "workload.system_prompt_tokens=256", "workload.output_tokens=40", "session.turns=1")
    shared = Twin(scenario(*settings)).run()
    alone = Twin(scenario(*settings, "kv_cache.enable_prefix_caching=false", "session.between_turns=drop")).run()
    token = 512 * 1024
    assert alone.timeline["kv_tokens"].max() - shared.timeline["kv_tokens"].max() == 7 * 256 * token
    assert shared.requests["cached_tokens"].tolist() == [0] + [256] * 7
    assert set(shared.timeline[list(Row._fields)].sum(axis=1)) == {shared.summary["capacity_bytes"]}
    assert shared.timeline["kv_cached"].iloc[-1] > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("oom", ["preempt", "reject", "stop"])
def test_leaps_leave_the_rows_of_single_steps(seed: int, oom: str) -> None:
    """Chats on a pool that holds a few of them, so that blocks are evicted and found again, and some are preempted."""
    tight = scenario(
        f"engine.gpu_memory_utilization={0.475 + 0.008 * seed}",
        "engine.max_model_len=1024",
        "workload.num_prompts=24",
        f"workload.request_rate={(0.5, 5, 50)[seed % 3]}",
        'workload.prompt_tokens={distribution="uniform",low=1,high=200}',
        'workload.output_tokens={distribution="uniform",low=1,high=120}',
        "workload.system_prompt_tokens=48",
        "session.turns=3",
        "session.think_time_s=0.5",
        f"scheduler.max_num_batched_tokens={(64, 2048)[seed % 2]}",
        "results.interval_s=0.3",
        f"memory.oom={oom}",
        seed=seed,
    )
    leaps, steps = Twin(tight).run(), Twin(tight).run(step_mode=True)
    for table in ("timeline", "requests", "checkpoints"):
        assert getattr(leaps, table).equals(getattr(steps, table)), table
    assert leaps.summary == steps.summary
    assert leaps.requests["cached_tokens"].sum() > 0
