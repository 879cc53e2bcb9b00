"""vLLM's old scheduler (v0): literal logs on a tiny pool, then whole runs in leaps and in steps.

A log line reads as in ``test_scheduler.py``: ``+A`` admitted, ``A10`` ten tokens of A, ``-A`` gave way, ``!A why``
rejected, ``A.`` ended. Samples of one prompt are ``A0 A1 ...``; ``(A0)`` tells of a fork that computes nothing.
"""

from __future__ import annotations

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.paged_v0 import PagedV0Config, PagedV0Policy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVLayout, KVSequence, Refused, Release
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim import catalog
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.scheduler import Fail, SchedulerConfig
from hbmtwin.sim.schedulers.vllm_v0 import VllmV0Scheduler
from hbmtwin.workloads.records import Request, user_stream

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
BLOCK = 4 * TINY.token_bytes
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def pool(blocks: int, **settings: object) -> PagedV0Policy:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    config = {"num_blocks": blocks, "block_size": 4, "max_model_len": 64, "watermark": 0.0} | settings
    return PagedV0Policy(TINY, arena, PagedV0Config(**config))


class Server:
    """The scheduler over a pool of blocks of 4 tokens, one step at a time; every step is checked."""

    def __init__(self, blocks: int, *, kv: dict[str, object] | None = None, **config: object) -> None:
        settings = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 32, **config}
        self.scheduler = VllmV0Scheduler(SchedulerConfig(**settings))
        self.kv = pool(blocks, **(kv or {}))
        self.sessions = 0
        self.names: dict[int, str] = {}

    def add(self, *lengths: tuple[int, int], samples: int = 1) -> Server:
        for prompt, output in lengths:
            session = self.sessions
            self.sessions += 1
            for sample in range(samples):
                id = len(self.names)
                self.names[id] = NAMES[session] + (str(sample) if samples > 1 else "")
                spans = ((user_stream(session, 0), 0, prompt),)
                r = Request(id, session, 0, 0, prompt, output, output, spans, sample=sample)
                self.scheduler.add(r, 0)
        return self

    def name(self, s: KVSequence) -> str:
        return self.names[s.id]

    def step(self) -> str:
        plan = self.scheduler.schedule(self.kv)
        log = [f"-{self.name(s)}" for s in plan.preempted]
        log += [f"!{self.names[r.id]} {why}" for r, why in plan.rejected]
        log += [f"+{self.name(a.sequence)}" for a in plan.admitted]
        log += [f"{self.name(s)}:{new}" for s, new in plan.scheduled]
        log += [f"({self.name(s)})" for s in plan.forked]
        if plan.exhausted is not None:
            return " ".join([*log, f"?{self.name(plan.exhausted[0])}"])
        self.kv.end_step()
        for f in self.scheduler.commit(plan, 1):
            self.kv.release(f.sequence, Release.FINISH)
            log.append(f"{self.name(f.sequence)}.")
        self.check()
        return " ".join(log)

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def check(self) -> None:
        self.kv.check()
        usage = self.kv.usage()
        assert usage.token + usage.shared == self.scheduler.running_tokens * TINY.token_bytes

    @property
    def waiting(self) -> str:
        everyone = [self.name(s) for _, s, _ in self.scheduler.unfinished()]
        return " ".join(everyone[self.scheduler.num_running :])


# -- the order of a step ---------------------------------------------------------------------------------------------


def test_a_prompt_then_a_token_a_step() -> None:
    assert Server(10).add((3, 3)).steps(4) == ["+A A:3", "A:1", "A:1 A.", ""]


def test_a_step_with_prompts_has_no_decodes() -> None:
    server = Server(20).add((3, 9))
    assert server.steps(2) == ["+A A:3", "A:1"]
    server.add((18, 2))
    assert server.steps(3) == ["+B B:18", "A:1 B:1 B.", "A:1"]


def test_prompts_share_the_budget_whole_and_in_order() -> None:
    server = Server(20, max_num_batched_tokens=10).add((6, 2), (5, 2), (4, 2))
    assert server.steps(3) == ["+A A:6", "+B +C B:5 C:4", "A:1 B:1 C:1 A. B. C."]


def test_no_more_than_max_num_seqs_run() -> None:
    server = Server(20, max_num_seqs=2).add((2, 2), (2, 3), (2, 2))
    assert server.steps(4) == ["+A +B A:2 B:2", "A:1 B:1 A.", "+C C:2", "B:1 C:1 B. C."]


def test_the_head_of_the_queue_blocks_those_behind_it() -> None:
    """Four blocks: A holds two, B needs three, C would fit."""
    server = Server(4).add((5, 3), (9, 1), (1, 1))
    assert server.steps(3) == ["+A A:5", "A:1", "A:1 A."]
    assert server.waiting == "B C"
    assert server.step() == "+B +C B:9 C:1 B. C."


def test_the_watermark_counts_at_admission_even_alone() -> None:
    """int(0.2 * 10) = 2 of 10 blocks: prompts of up to 8 blocks come in."""
    assert Server(10, kv={"watermark": 0.2}).add((32, 1)).step() == "+A A:32 A."
    server = Server(10, kv={"watermark": 0.2}, max_num_batched_tokens=64).add((33, 1), (1, 1))
    assert server.step() == "!A kv_capacity +B B:1 B."


def test_a_prompt_over_the_budget_is_rejected() -> None:
    server = Server(20, max_num_batched_tokens=8).add((9, 1), (8, 1))
    assert server.step() == "!A max_num_batched_tokens +B B:8 B."


# -- when memory is short --------------------------------------------------------------------------------------------


def test_the_last_is_recomputed_from_the_front_of_the_queue() -> None:
    """Six blocks, three requests of two: in the middle of a block A needs a free one, so that C gives way, comes back
    at once, and gives way again; then A is in the middle of its third block, and B gives way, too."""
    server = Server(6).add((7, 6), (7, 6), (7, 6))
    assert server.steps(2) == ["+A +B +C A:7 B:7 C:7", "-C A:1 B:1"]
    assert server.waiting == "C"
    assert server.steps(3) == ["+C C:8", "-C A:1 B:1", "-B A:1"]
    assert server.waiting == "B C"


def test_one_that_is_alone_in_a_full_pool_gives_way_to_itself() -> None:
    server = Server(3).add((12, 3))
    assert server.steps(3) == ["+A A:12", "-A", "!A kv_capacity"]


def test_no_newcomers_while_somebody_is_swapped_out() -> None:
    server = Server(6, preemption_mode="swap").add((7, 4), (7, 4), (7, 4))
    assert server.steps(2) == ["+A +B +C A:7 B:7 C:7", "-C A:1 B:1"]
    server.add((1, 1))
    assert server.waiting == "C D"
    assert (server.kv.swapped_blocks, server.kv.take_work().swapped_bytes) == (2, 2 * BLOCK)
    assert server.steps(2) == ["A:1 B:1", "-B A:1 A."], "D would have fit"
    assert server.waiting == "C B D"
    assert server.steps(4) == ["C:1 B:1 B.", "+D D:1 D.", "C:1", "C:1 C."]


def test_a_return_keeps_what_was_computed_and_costs_both_ways() -> None:
    server = Server(4, preemption_mode="swap").add((7, 4), (7, 4))
    assert server.steps(2) == ["+A +B A:7 B:7", "-B A:1"]
    assert server.kv.take_work().swapped_bytes == 2 * BLOCK
    assert server.steps(2) == ["A:1", "A:1 A."], "two blocks of B, and one is free"
    assert server.step() == "B:1"
    assert (server.kv.take_work().swapped_bytes, server.kv.swapped_blocks) == (2 * BLOCK, 0)
    assert server.steps(2) == ["B:1", "B:1 B."]


def test_the_way_back_leaves_the_watermark_free() -> None:
    """int(0.4 * 5) = 2: with two blocks and a third that it touches next, B comes back to an empty pool only."""
    server = Server(5, kv={"watermark": 0.4}, preemption_mode="swap").add((4, 9), (4, 9))
    assert server.steps(6) == ["+A +B A:4 B:4", *["A:1 B:1"] * 4, "-B A:1"]
    assert server.steps(4) == ["A:1", "A:1", "A:1 A.", "B:1"]


def test_a_host_without_room_rejects_where_v0_would_end() -> None:
    server = Server(4, kv={"swap_space_bytes": BLOCK}, preemption_mode="swap").add((7, 4), (7, 4))
    assert server.step() == "+A +B A:7 B:7"
    assert server.steps(2) == ["!B swap_space A:1", "A:1"]


@pytest.mark.parametrize("oom", ["stop", "reject"])
def test_a_server_that_does_not_preempt_says_who_cannot_go_on(oom: str) -> None:
    server = Server(4, oom=oom).add((7, 4), (7, 4))
    assert server.step() == "+A +B A:7 B:7"
    assert server.step() == "?A"
    assert server.scheduler.num_running == 2


def test_reject_drops_the_owner() -> None:
    server = Server(4, oom="reject").add((7, 4), (7, 4))
    server.step()
    plan = server.scheduler.schedule(server.kv)
    assert plan.exhausted is not None
    assert isinstance(plan.exhausted[1], Refused)
    failed = server.scheduler.fail(plan, server.kv, plan.exhausted[0].id, Fail.REJECT)
    server.check()
    assert [u.request.id for u in failed.rejected] == [0]
    assert server.step() == "B:1"


# -- samples ---------------------------------------------------------------------------------------------------------


def test_samples_compute_their_prompt_once_and_then_decode_together() -> None:
    server = Server(12).add((10, 4), samples=3)
    assert server.step() == "+A0 +A1 +A2 A0:10 (A1) (A2)"
    assert server.kv.usage().held == 3 * BLOCK
    assert server.step() == "A0:1 A1:1 A2:1"
    assert server.kv.take_work().copied_bytes == 2 * BLOCK
    assert server.kv.usage().held == (2 + 3) * BLOCK
    assert server.steps(2) == ["A0:1 A1:1 A2:1", "A0:1 A1:1 A2:1 A0. A1. A2."]


def test_samples_of_one_token_end_with_their_prompt() -> None:
    assert Server(12).add((10, 1), samples=3).step() == "+A0 +A1 +A2 A0:10 (A1) (A2) A0. A1. A2."


def test_samples_count_each_among_max_num_seqs() -> None:
    server = Server(30, max_num_seqs=4).add((2, 2), samples=3).add((2, 2), samples=2)
    assert server.step() == "+A0 +A1 +A2 A0:2 (A1) (A2)"
    assert server.waiting == "B0 B1"
    assert Server(30, max_num_seqs=2).add((2, 2), samples=3).step() == " ".join(f"!A{i} max_num_seqs" for i in range(3))


def test_samples_give_way_together_by_swapping_and_lose_what_they_shared() -> None:
    """Nine blocks: A and B hold four each, two shared ones and two of their own; the ninth is one too few for A."""
    server = Server(9).add((10, 7), samples=2).add((10, 7), samples=2)
    assert server.steps(2) == ["+A0 +A1 +B0 +B1 A0:10 B0:10 (A1) (B1)", "A0:1 A1:1 B0:1 B1:1"]
    assert server.kv.usage().held == 8 * BLOCK
    assert server.step() == "-B0 -B1 A0:1 A1:1"
    assert (server.kv.swapped_blocks, server.waiting) == (6, "B0 B1")
    assert server.steps(4) == ["A0:1 A1:1"] * 3 + ["A0:1 A1:1 A0. A1."], "five are free at first, B needs six now"
    assert server.step() == "B0:1 B1:1"
    assert (server.kv.usage().held, server.kv.usage().shared) == (6 * BLOCK, 0)


def test_a_single_sample_that_is_left_is_recomputed() -> None:
    server = Server(6).add((4, 9))
    server.add((6, 2), samples=2)
    server.scheduler._waiting[2].final_tokens = 15  # the second sample goes on
    assert server.steps(2) == ["+A +B0 +B1 A:4 B0:6 (B1)", "A:1 B0:1 B1:1 B0."]
    assert server.steps(4) == [*["A:1 B1:1"] * 3, "-B1 A:1"]
    assert (server.waiting, server.kv.swapped_blocks) == ("B1", 0)


def test_recomputing_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="v0 recomputes single sequences only"):
        Server(5, preemption_mode="recompute").add((6, 2), samples=2)


def test_other_policies_are_refused() -> None:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    policy = PagedPolicy(TINY, arena, PagedConfig(num_blocks=9, max_model_len=64))
    with pytest.raises(TypeError, match="the scheduler vllm_v0 needs the policy paged_v0, not PagedPolicy"):
        VllmV0Scheduler(SchedulerConfig(64)).schedule(policy)


# -- whole runs ------------------------------------------------------------------------------------------------------


def scenario(*overrides: str) -> Scenario:
    fixed = ("kv_cache.version=v0", "scheduler.policy=vllm_v0", "kv_cache.block_size=16", "session.turns=1")
    sizes = ("engine.max_model_len=1024", "workload.request_rate=20", "workload.num_prompts=16")
    lengths = ("workload.prompt_tokens=200", "workload.output_tokens=150", "workload.system_prompt_tokens=7")
    return Scenario.load(overrides=[*fixed, *sizes, *lengths, "engine.gpu_memory_utilization=0.46", *overrides])


def differences(leaps: Result, steps: Result) -> list[str]:
    names = [n for n in ("timeline", "requests", "checkpoints") if not getattr(leaps, n).equals(getattr(steps, n))]
    return names if leaps.summary == steps.summary else [*names, "summary"]


RUNS = {
    "recompute": (),
    "swap": ("scheduler.preemption_mode=swap",),
    "samples": ("workload.samples=3",),
    "samples and cache": ("workload.samples=2", "kv_cache.enable_prefix_caching=true"),
    "cache": ("kv_cache.enable_prefix_caching=true", "scheduler.preemption_mode=swap"),
    "little host memory": ("workload.samples=3", "kv_cache.swap_space_bytes=512MiB"),
}


@pytest.mark.parametrize("name", RUNS)
def test_leaps_equal_steps_with_swaps_and_forks(name: str) -> None:
    leaps, steps = Twin(scenario(*RUNS[name])).run(), Twin(scenario(*RUNS[name])).run(step_mode=True)
    assert differences(leaps, steps) == []
    assert leaps.summary["preemptions"] > 0
    samples = scenario(*RUNS[name]).workload.samples
    assert len(leaps.requests) == 16 * samples
    assert sorted(set(leaps.requests["sample"])) == list(range(samples))
    rejected = leaps.summary["requests_rejected"]
    assert ("swap_space" in rejected) == (name == "little host memory")
    assert leaps.summary["requests_completed"] == 16 * samples - sum(rejected.values())


def test_a_leap_over_a_copy_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Twin(scenario("workload.samples=3")).run(step_mode=True)
    honest = PagedV0Policy.horizon
    monkeypatch.setattr(PagedV0Policy, "horizon", lambda self, d, limit: min(limit, honest(self, d, limit) + 1))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        assert differences(Twin(scenario("workload.samples=3")).run(), steps) == []


def test_samples_get_their_first_token_with_the_prompt_and_are_found_whole() -> None:
    result = Twin(scenario("workload.samples=4", "workload.num_prompts=1")).run()
    rows = result.requests.sort_values("id")
    assert rows["first_token_ns"].nunique() == rows["scheduled_ns"].nunique() == 1
    assert list(rows["cached_tokens"]) == [0, 207, 207, 207]
    assert list(rows["output_tokens"]) == [150] * 4


def test_swapping_takes_the_time_of_the_link_to_the_host() -> None:
    swaps = Twin(scenario("scheduler.preemption_mode=swap", "results.steps=true"))
    free = Twin(scenario("scheduler.preemption_mode=swap", "results.steps=true"))
    moved = 0

    def for_nothing(*, driver_calls: int, syncs: int, copied_bytes: int, swapped_bytes: int) -> int:
        nonlocal moved
        moved += swapped_bytes
        return 0

    free.cost.work_ns = for_nothing
    assert free.run().summary["makespan_s"] < swaps.run().summary["makespan_s"]
    assert moved > 0


@pytest.mark.parametrize("name", catalog.devices())
def test_every_device_of_the_catalog_has_a_link_to_swap_over(name: str) -> None:
    device = catalog.device(name)
    cost = RooflineCost(catalog.model("llama-2-7b"), device, kv_token_bytes=1 << 19)
    second = cost.work_ns(driver_calls=0, syncs=0, copied_bytes=0, swapped_bytes=int(device.host_bandwidth_bytes_per_s))
    assert second == pytest.approx(10**9, rel=1e-4)
