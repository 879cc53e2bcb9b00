"""SGLang's scheduler: literal logs on a tiny pool, its ratio in figures, then whole runs in leaps and in steps.

A log line: ``+A`` admitted, ``A:10`` ten tokens of A, ``-A`` retracted, ``!A why`` rejected, ``A.`` ended.
"""

from __future__ import annotations

from collections.abc import Callable
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
from hbmtwin.sim.schedulers import sglang
from hbmtwin.sim.schedulers.sglang import NewTokenRatio, SglangScheduler

from .step_server import StepServer

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
NAMES = "ABCDEFGH"


class Server(StepServer):
    """The scheduler over a pool of *pages* pages beside the dummy, one step at a time."""

    def __init__(self, pages: int, *, page: int = 1, tree: bool = False, **config: Any) -> None:
        settings = {"max_model_len": 9999, "max_num_seqs": 8, "max_num_batched_tokens": 32, **config}
        scheduler = SglangScheduler(SchedulerConfig(**settings))
        arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
        pool = RadixConfig(num_blocks=pages + 1, max_model_len=9999, block_size=page, enable_prefix_caching=tree)
        kv = RadixPolicy(TINY, arena, pool)
        super().__init__(scheduler, kv)

    @property
    def ratio(self) -> float:
        return self.scheduler.new_token_ratio.value


# -- the order of a step ---------------------------------------------------------------------------------------------


def test_a_step_is_of_prefills_or_of_decodes() -> None:
    server = Server(200).add(3, 9)
    assert server.steps(2) == ["+A A:3", "A:1"]
    server.add(18, 2).add(5, 2)
    assert server.steps(3) == ["+B +C B:18 C:5", "A:1 B:1 C:1 B. C.", "A:1"]


def test_one_prompt_is_half_way_and_goes_on_first() -> None:
    """Chunks of 32 at whole pages of 4; C's last chunk of 10 is charged as 12, and leaves 20 of its step to D."""
    server = Server(100, page=4).add(6, 9).add(20, 1).add(46, 2).add(30, 2)
    assert server.step() == "+A +B +C A:6 B:20 C:4 B."
    assert server.step() == "C:32"
    assert server.step() == "+D C:10 D:20"
    assert server.steps(2) == ["D:10", "A:1 C:1 D:1 C. D."]


def test_nobody_decodes_while_a_prompt_is_half_way() -> None:
    server = Server(200).add(3, 9)
    server.step()
    server.add(80, 2)
    assert server.steps(4) == ["+B B:32", "B:32", "B:16", "A:1 B:1 B."]


def test_no_more_than_max_num_seqs_run() -> None:
    server = Server(200, max_num_seqs=2).add(2, 2).add(2, 3).add(2, 2)
    assert server.steps(4) == ["+A +B A:2 B:2", "A:1 B:1 A.", "+C C:2", "B:1 C:1 B. C."]


# -- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slots", "admitted"), [(21, ""), (22, "+A A:10")])
def test_the_estimate_must_be_less_than_what_is_available(slots: int, admitted: str) -> None:
    """10 tokens, 10 to come and a page of 1 make 21: less than 22 slots, but not than 21."""
    assert Server(slots).add(10, 10).step() == (admitted or "!A kv_capacity")


@pytest.mark.parametrize(("slots", "admitted"), [(4107, ""), (4108, "+A A:10")])
def test_no_more_than_4096_tokens_are_expected_of_one(slots: int, admitted: str) -> None:
    assert Server(slots).add(10, 5, 9000).step() == (admitted or "!A kv_capacity")


def test_a_newcomer_counts_in_full_and_one_that_runs_by_the_ratio() -> None:
    """A of 10 + 100 and 1 page: of 200 slots 190 are left, 101 promised. B needs 10 + 78 + 1 = 89 < 89: no. Once A runs
    it counts with 0.7 x 99 = 69.3: 190 - 69.3 = 120.7 > 89. But nobody asks before somebody ends."""
    both = Server(200).add(10, 100).add(10, 78)
    assert both.step() == "+A A:10"
    assert both.waiting == "B"
    assert both.step() == "A:1"
    later = Server(200).add(10, 100)
    later.step()
    later.add(10, 109)
    assert later.step() == "+B B:10", "10 + 109 + 1 < 190 - 69.3"
    again = Server(200).add(10, 100)
    again.step()
    again.add(10, 110)
    assert again.step() == "A:1", "121 > 120.7"


def test_a_page_is_kept_for_each_and_tokens_are_rounded_to_pages() -> None:
    """Pages of 4. A takes 3 of 12 pages, for 9 tokens; 36 slots are left, 4 + 5 promised, so 27 for B."""
    assert Server(12, page=4).add(9, 5).add(9, 13).step() == "+A +B A:9 B:9", "9 + 13 + 4 < 27"
    assert Server(12, page=4).add(9, 5).add(9, 14).step() == "+A A:9"


def test_its_own_prefix_is_not_available_to_one_that_would_lock_it() -> None:
    """30 slots, of which the tree has 13; B finds 10 of them, and has 20 others for 2 + 16 + 1 = 19, or 20 tokens."""
    for output, line in ((16, "+B B:2"), (17, "!B kv_capacity")):
        server = Server(30, tree=True).add(10, 4, session=0)
        assert server.steps(4)[-1] == "A:1 A."
        server.add(12, output, session=0)
        assert server.step() == line


def test_one_that_would_not_fit_in_the_empty_pool_is_rejected_while_others_run() -> None:
    """With 100 slots, 50 + 49 + 1 is one too many; 50 + 48 + 1 waits for A."""
    server = Server(100).add(10, 20).add(50, 49).add(5, 5)
    assert server.step() == "!B kv_capacity +A +C A:10 C:5"
    server = Server(100).add(10, 60).add(50, 48).add(5, 5)
    assert server.steps(2) == ["+A A:10", "A:1"]
    assert server.waiting == "B C"


def test_after_a_refusal_nobody_is_asked_until_somebody_ends() -> None:
    """C, which would fit, comes when B waits at the head; both are asked again when A has ended."""
    server = Server(60).add(10, 3).add(10, 40)
    assert server.steps(2) == ["+A A:10", "A:1"]
    server.add(2, 2)
    assert server.steps(3) == ["A:1 A.", "+B +C B:10 C:2", "B:1 C:1 C."]


# -- the ratio -------------------------------------------------------------------------------------------------------


def test_the_ratio_falls_with_decode_steps_to_a_seventh_and_is_whole_again_when_idle() -> None:
    ratio = NewTokenRatio(1.0)
    assert (ratio.init, ratio.min) == (0.7, pytest.approx(0.098))
    ratio.fall(300)
    assert ratio.value == pytest.approx((0.7 + 0.098) / 2)
    ratio.fall(301)
    assert ratio.value == ratio.min
    assert NewTokenRatio(9.0).init == 1.0
    server = Server(50).add(3, 4)
    server.steps(3)
    assert server.ratio == pytest.approx(0.7 - 2 * 0.602 / 600), "a step of prefills does not count"
    server.step()
    assert server.ratio == 0.7


# -- retraction ------------------------------------------------------------------------------------------------------


def two(**config: Any) -> Server:
    """A of 6 and B of 5 tokens on 100 slots, each in a step of its own, with 70 tokens to come; 89 slots are left."""
    server = Server(100, **{"schedule_conservativeness": 0.01} | config)
    assert [server.add(prompt, 70).step() for prompt in (6, 5)] == ["+A A:6", "+B B:5"]
    return server


def test_among_equals_the_longest_prompt_goes_to_the_end_of_the_queue() -> None:
    server = two()
    assert server.steps(44) == ["A:1 B:1"] * 44
    server.add(89, 9)
    assert server.step() == "-A B:1", "one slot is left for two, and each has generated 45"
    assert server.waiting == "C A"
    assert server.kv.usage().held == 50 * TINY.token_bytes


def test_a_retraction_sets_the_ratio_from_what_those_that_stay_have_generated() -> None:
    server = two()
    server.steps(45)
    assert server.ratio == (45 + 20) / (70 + 1)
    assert server.step() == "B:1", "A needs 51 + 25 + 1 slots, and 50 are left"
    assert server.ratio == pytest.approx(65 / 71 - (0.007 - 0.14 * 0.007) / 600)


def test_the_one_that_has_generated_least_goes() -> None:
    """A generates 3 tokens before B comes: its prompt is longer, and it stays."""
    server = Server(40, schedule_conservativeness=0.0).add(9, 20)
    assert server.steps(3) == ["+A A:9", "A:1", "A:1"]
    server.add(4, 20)
    assert server.steps(13) == ["+B B:4", *["A:1 B:1"] * 12]
    assert server.step() == "-B A:1", "of 40 slots 39 are taken"


def test_of_those_that_are_alike_the_last_admitted_goes() -> None:
    """Thirteen pages of 4 tokens: A, B and C have filled four each, and one page is left for three."""
    server = Server(13, page=4, schedule_conservativeness=0.0)
    assert [server.add(8, 20).step() for _ in range(3)] == ["+A A:8", "+B B:8", "+C C:8"]
    assert server.steps(8) == ["A:1 B:1 C:1"] * 8
    assert server.step() == "-C A:1 B:1"


def test_the_last_one_is_aborted_if_it_has_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "CLIP_MAX_NEW_TOKENS", 8)
    server = Server(20).add(5, 90).add(5, 3)
    assert server.steps(16) == ["+A A:5", *["A:1"] * 15]
    assert server.steps(2) == ["!A kv_capacity", "+B B:5"]


@pytest.mark.parametrize("oom", ["stop", "reject"])
def test_a_server_that_does_not_preempt_says_who_cannot_go_on(oom: str) -> None:
    server = two(oom=oom)
    server.steps(44)
    assert server.step() == "A:1 ?B"


def test_other_policies_are_refused() -> None:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    policy = PagedPolicy(TINY, arena, PagedConfig(num_blocks=9, max_model_len=64))
    with pytest.raises(TypeError, match="the scheduler sglang needs the policy radix, not PagedPolicy"):
        SglangScheduler(SchedulerConfig(64)).schedule(policy)
    with pytest.raises(
        ScenarioError, match=r"scheduler\.policy: 'sglang' counts the slots of SGLang's pool, which paged"
    ):
        Twin(Scenario.load(overrides=["scheduler.policy=sglang"]))
    with pytest.raises(ScenarioError, match="sglang cuts prompts at whole pages; use a multiple of 128, not 100"):
        Twin(scenario("kv_cache.block_size=128", "scheduler.max_num_batched_tokens=100"))


# -- whole runs ------------------------------------------------------------------------------------------------------


def scenario(*overrides: str, page: int = 16, seed: int = 0) -> Scenario:
    """Chats on a pool that holds a few of them."""
    return Scenario.load(
        seed=seed,
        overrides=[
            "scheduler.policy=sglang",
            "kv_cache.policy=radix",
            f"kv_cache.block_size={page}",
            "engine.gpu_memory_utilization=0.46",
            "engine.max_model_len=1024",
            "workload.num_prompts=20",
            "workload.request_rate=50",
            'workload.prompt_tokens={distribution="uniform",low=1,high=120}',
            'workload.output_tokens={distribution="uniform",low=1,high=300}',
            "workload.system_prompt_tokens=48",
            "session.turns=2",
            "session.think_time_s=0.1",
            f"scheduler.max_num_batched_tokens={(2048, 64)[seed % 2]}",
            f"scheduler.schedule_conservativeness={(0.0, 0.3)[seed % 2]}",
            "results.interval_s=0.3",
            *overrides,
        ],
    )


CACHING = ("kv_cache.enable_prefix_caching=true", "session.between_turns=prefix_cache")


def differences(leaps: Result, steps: Result) -> list[str]:
    names = [n for n in ("timeline", "requests", "checkpoints") if not getattr(leaps, n).equals(getattr(steps, n))]
    return names if leaps.summary == steps.summary else [*names, "summary"]


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("more", [CACHING, ()], ids=["tree", "no tree"])
def test_leaps_equal_steps(page: int, more: tuple[str, ...]) -> None:
    preemptions = waited = 0
    for seed in range(3):
        run = scenario(*more, page=page, seed=seed)
        leaps, steps = Twin(run).run(), Twin(run).run(step_mode=True)
        assert differences(leaps, steps) == []
        preemptions += leaps.summary["preemptions"]
        waited += (leaps.timeline["waiting"] > 0).sum()
    assert preemptions >= 2
    assert waited >= 20


@pytest.mark.parametrize("oom", ["stop", "reject"])
def test_leaps_equal_steps_where_nobody_is_retracted(oom: str) -> None:
    run = scenario(*CACHING, f"memory.oom={oom}", seed=1)
    assert differences(Twin(run).run(), Twin(run).run(step_mode=True)) == []


def test_leaps_equal_steps_where_activations_run_out() -> None:
    run = scenario("memory.activations=per_layer", "memory.activation_bytes=1MiB", seed=1)
    assert differences(Twin(run).run(), Twin(run).run(step_mode=True)) == []


def one_at_a_time(self: NewTokenRatio, steps: int) -> None:
    """A leap counts as one step."""
    FALL(self, 1)


def never_full(self: SglangScheduler, plan: Plan, kv: RadixPolicy) -> None:
    """Who waits is asked in every step: then the falling ratio decides when a leap must end."""
    self._full = False
    PREFILL(self, plan, kv)


def one_step_more(self: SglangScheduler, p: Plan) -> int:
    """A leap over the end of a request."""
    return HONEST(self, p) and HONEST(self, p) + 1


FALL, PREFILL, HONEST = NewTokenRatio.fall, SglangScheduler._prefill, SglangScheduler.steady_steps


def expecting_much() -> Scenario:
    """A pool for 2,600 tokens, and three requests of 100 + 1,500: the second would fit once the ratio has fallen."""
    lengths = ("workload.prompt_tokens=100", "workload.output_tokens=1500", "workload.system_prompt_tokens=0")
    sizes = ("engine.max_model_len=2048", "engine.gpu_memory_utilization=0.48", "workload.num_prompts=3")
    more = ("session.turns=1", "scheduler.schedule_conservativeness=1.0", "scheduler.max_num_batched_tokens=2048")
    return scenario(*lengths, *sizes, *more, page=1)


def test_who_was_refused_waits_for_an_end_though_the_ratio_falls() -> None:
    leaps, steps = Twin(expecting_much()).run(), Twin(expecting_much()).run(step_mode=True)
    assert differences(leaps, steps) == []
    rows = leaps.requests.sort_values("id")
    assert rows["scheduled_ns"][1] == rows["end_ns"][0]


@pytest.mark.parametrize(
    ("cls", "verb", "bug"),
    [
        (NewTokenRatio, "fall", one_at_a_time),
        (SglangScheduler, "_prefill", never_full),
        (SglangScheduler, "steady_steps", one_step_more),
    ],
)
def test_a_planted_leap_is_noticed(
    cls: type, verb: str, bug: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, verb, bug)
    runs = [expecting_much(), scenario(*CACHING, seed=1), scenario(*CACHING, page=1, seed=1), scenario(seed=3)]
    assert any(differences(Twin(run).run(), Twin(run).run(step_mode=True)) for run in runs)
