"""What ``vllm`` can be told: priorities, bounded chunks and whole prompts, as literal logs of test_scheduler's server.

``A10`` computes ten tokens of A, ``+A`` is admitted, ``-A`` preempted, ``!A why`` rejected, ``A.`` has ended.
"""

from __future__ import annotations

import pytest

from hbmtwin.allocators.records import KVSequence
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.scheduler import Entry, Fail, Plan, SchedulerConfig
from hbmtwin.sim.schedulers.priority_queue import PriorityQueue
from hbmtwin.sim.schedulers.vllm import _take_back

from .test_scheduler import Server, buffers, request


class Ranked(Server):
    """Whose requests have priorities."""

    def __init__(self, **config: object) -> None:
        super().__init__(scheduling_policy="priority", **config)

    def rank(self, priority: int, prompt: int, output: int, arrival: int = 0) -> Ranked:
        id = len(self.id_of)
        self.scheduler.add(request(id, prompt, output)._replace(priority=priority, arrival_ns=arrival), arrival)
        self.id_of[id] = id
        return self


# -- priorities ----------------------------------------------------------------------------------------------------


def test_the_smallest_priority_is_admitted_first_and_then_the_earliest() -> None:
    server = Ranked(blocks=20, max_num_seqs=1).rank(2, 3, 1, 1).rank(1, 3, 1, 2).rank(1, 3, 1, 3).rank(0, 3, 1, 9)
    assert server.waiting == "DBCA"
    assert server.steps(4) == ["+D D3 D.", "+B B3 B.", "+C C3 C.", "+A A3 A."]


def test_in_order_of_arrival_priorities_do_not_matter() -> None:
    server = Server(blocks=20, max_num_seqs=1)
    for id, priority in enumerate((2, 0)):
        server.scheduler.add(request(id, 3, 1)._replace(priority=priority), 0)
        server.id_of[id] = id
    assert server.steps(2) == ["+A A3 A.", "+B B3 B."]


def test_the_largest_priority_gives_way_wherever_it_runs() -> None:
    """Six blocks, two each. When all need a third, B of priority 5 gives way to A, though C was admitted last."""
    server = Ranked(blocks=6, max_num_batched_tokens=32).rank(0, 7, 6).rank(5, 7, 6, 1)
    assert server.step() == "+A +B A7 B7"
    server.rank(1, 7, 6, 2)
    assert server.steps(3) == ["+C A1 B1 C7", "-B A1 C1", "A1 C1"]
    assert server.waiting == "B"


def test_of_equal_priorities_the_latest_gives_way() -> None:
    server = Ranked(blocks=6, max_num_batched_tokens=32).rank(0, 7, 6, 4).rank(0, 7, 6, 9)
    assert server.step() == "+A +B A7 B7"
    server.rank(0, 7, 6, 5)
    assert server.steps(2) == ["+C A1 B1 C7", "-B A1 C1"]


def test_one_that_gives_way_waits_behind_those_that_go_first() -> None:
    server = Ranked(blocks=4, max_num_seqs=2).rank(3, 7, 6).rank(1, 7, 6)
    assert server.steps(2) == ["+B +A B7 A7", "B1 A1"]
    server.rank(2, 1, 1)
    assert server.step() == "-A B1"
    assert server.waiting == "CA"


def test_tokens_of_one_that_was_scheduled_already_return_to_the_budget() -> None:
    """Six tokens a step, four a request. In the eighth A has taken its eighth block of the eleven when B needs a third:
    A gives way, and its four tokens go to B and C."""
    server = Ranked(blocks=11, max_num_batched_tokens=6, long_prefill_token_threshold=4).rank(9, 44, 2)
    assert server.step() == "+A A4"
    server.rank(1, 4, 20, 1)
    assert server.steps(2) == ["+B A4 B2", "A4 B2"]
    server.rank(2, 12, 5, 2)
    assert server.steps(5) == ["+C A4 B1 C1", "A4 B1 C1", "A4 B1 C1", "A4 B1 C1", "-A B1 C4"]
    assert server.waiting == "A"


def test_a_victim_may_be_the_one_that_asks() -> None:
    server = Ranked(blocks=4).rank(7, 7, 6).rank(1, 7, 6, 1)
    assert server.steps(3) == ["+B +A B7 A7", "B1 A1", "-A B1"]
    assert server.waiting == "A"


def test_a_step_that_fails_under_way_preempts_by_priority_as_well() -> None:
    """Of 32 tokens' room A takes 4, B 8 and C 16, when A needs 8 beside its 4: B has the largest priority."""
    server = Ranked(kv=buffers(32, "doubling"), max_num_batched_tokens=32).rank(0, 3, 4).rank(8, 4, 4).rank(8, 10, 3)
    assert server.steps(2) == ["+A +B +C A3 B4 C10", "A1 B1 C1"]
    plan = server.plan()
    failed = server.scheduler.fail(plan, server.kv, 0, Fail.PREEMPT)
    assert [server.name(u.sequence) for u in failed.preempted] == ["B"]
    assert server.waiting == "B"


def test_the_queue_is_sorted_whichever_end_it_is_given_to() -> None:
    queue = PriorityQueue()
    server = Server(blocks=4)
    for id, (priority, arrival) in enumerate([(1, 5), (0, 9), (1, 5), (1, 4), (0, 9)]):
        r = request(id, 1, 1)._replace(priority=priority, arrival_ns=arrival)
        server.scheduler.add(r, 0)
        entry: Entry = server.scheduler._entries[id]
        (queue.append if id % 2 else queue.appendleft)(entry)
    assert [entry.request.id for entry in queue] == [1, 4, 3, 0, 2]


# -- chunks --------------------------------------------------------------------------------------------------------


def test_no_request_computes_more_than_the_threshold_in_a_step() -> None:
    server = Server(blocks=20, long_prefill_token_threshold=4).add((10, 2), (6, 1), (3, 2))
    assert server.steps(4) == ["+A +B +C A4 B4 C3", "A4 B2 C1 B. C.", "A2", "A1 A."]


def test_without_chunks_a_prompt_over_what_is_left_of_the_budget_stops_admission() -> None:
    server = Server(blocks=30, max_num_batched_tokens=16, enable_chunked_prefill=False).add((10, 3), (7, 1), (1, 1))
    assert server.steps(3) == ["+A A10", "+B +C A1 B7 C1 B. C.", "A1 A."]


def test_the_threshold_is_applied_before_a_prompt_is_found_too_long() -> None:
    config = {"enable_chunked_prefill": False, "long_prefill_token_threshold": 5}
    server = Server(blocks=30, max_num_batched_tokens=16, **config).add((10, 3), (12, 1))
    assert server.steps(3) == ["+A +B A5 B5", "A5 B5", "A1 B2 B."]


def test_without_chunks_a_prompt_over_the_whole_budget_is_rejected_when_nothing_runs() -> None:
    server = Server(blocks=30, max_num_batched_tokens=8, enable_chunked_prefill=False).add((4, 2), (9, 1), (2, 1))
    assert server.steps(3) == ["+A A4", "A1 A.", "!B max_num_batched_tokens +C C2 C."]
    assert not server.scheduler.has_work


def test_nothing_is_computed_past_the_end_of_the_model() -> None:
    """Nor at its last position, whose token has nowhere to be sampled to: drafts would lead there."""
    server = Server(blocks=30, max_model_len=16).add((8, 8), (2, 2))
    server.step()
    first = next(server.scheduler.unfinished()).sequence
    server.scheduler._break_up()  # drafts are no matter of a group
    first.num_tokens = 24
    plan = server.plan()
    assert server.told(plan) == ["A7", "B1"]  # 16 - 8 - 1
    server.kv.end_step()
    server.scheduler.commit(plan, 1)
    assert server.told(server.plan()) == []


# -- in a scenario -------------------------------------------------------------------------------------------------


def pressed(*settings: str) -> Scenario:
    """A pool for a few of thirty requests that come at once."""
    return Scenario.load(
        overrides=[
            "engine.max_model_len=512",
            "engine.gpu_memory_utilization=0.47",
            "kv_cache.block_size=16",
            "workload.request_rate=200",
            "workload.num_prompts=30",
            "workload.prompt_tokens=200",
            "workload.output_tokens=150",
            "workload.system_prompt_tokens=0",
            "session.turns=1",
            *settings,
        ]
    )


PRIORITY = ("scheduler.scheduling_policy=priority", "workload.priorities=[0.2, 0.8]")


def test_those_that_go_first_wait_less() -> None:
    twin = Twin(pressed(*PRIORITY))
    ranks = {r.id: r.priority for r in twin.source.open()}
    table = twin.run().requests
    waited = (table["scheduled_ns"] - table["arrival_ns"]).groupby(table["id"].map(ranks)).mean()
    assert sorted(ranks.values()).count(0) == 4
    assert waited[0] * 3 < waited[1]


@pytest.mark.parametrize(
    "settings",
    [
        PRIORITY,
        ("scheduler.enable_chunked_prefill=false", "scheduler.max_num_batched_tokens=64"),
        ("scheduler.long_prefill_token_threshold=50", "scheduler.max_num_batched_tokens=128"),
        (*PRIORITY, "scheduler.long_prefill_token_threshold=70", "kv_cache.enable_prefix_caching=true"),
    ],
)
def test_leaps_leave_the_rows_of_single_steps(settings: tuple[str, ...]) -> None:
    leaps, steps = (Twin(pressed(*settings)).run(step_mode=one) for one in (False, True))
    assert leaps.summary == steps.summary
    assert leaps.timeline.equals(steps.timeline)
    assert leaps.requests.equals(steps.requests)
    assert leaps.summary["preemptions"] > 3
    assert leaps.summary["requests_completed"] == 30


def test_without_chunks_a_step_has_room_for_the_longest_request() -> None:
    twin = Twin(pressed("scheduler.enable_chunked_prefill=false", "scheduler.max_num_batched_tokens=64"))
    assert twin.scheduler.config == SchedulerConfig(512, 256, 512, enable_chunked_prefill=False)
    assert (
        "scheduler.max_num_batched_tokens = 64 is raised to max_model_len, 512, for scheduler.enable_chunked_prefill "
        "is false"
    ) in twin.run().summary["notes"]
    assert Twin(pressed("scheduler.max_num_batched_tokens=64")).scheduler.config.max_num_batched_tokens == 64


@pytest.mark.parametrize(
    "others", [("scheduler.policy=vllm_v0", "kv_cache.version=v0"), ("scheduler.policy=prefill_first",)]
)
def test_other_schedulers_are_not_touched(others: tuple[str, ...]) -> None:
    given = (*PRIORITY, "scheduler.long_prefill_token_threshold=9", "scheduler.enable_chunked_prefill=false")
    told, plain = (Twin(pressed(*others, *settings)).run() for settings in (given, ()))
    assert told.requests.drop(columns="priority").equals(plain.requests.drop(columns="priority"))


@pytest.mark.parametrize("weights", ["[0.0]", "[-1]", "[]", "[1e10]"])
def test_weights_that_make_no_sense_are_refused_by_key(weights: str) -> None:
    with pytest.raises(ScenarioError, match=r"^workload\.priorities"):
        Twin(pressed("scheduler.scheduling_policy=priority", f"workload.priorities={weights}"))


KV = {
    "paged": (),
    "paged, prefix cache": ("kv_cache.enable_prefix_caching=true",),
    "paged, 0.18": ("kv_cache.version=0.18", "kv_cache.enable_prefix_caching=true"),
    "radix": ("kv_cache.policy=radix", "kv_cache.enable_prefix_caching=true"),
    "virtual": ("kv_cache.policy=virtual", "memory.kv_arena=direct", "memory.oom=preempt"),
    "groups": ("model.name=gemma-3-1b", "engine.gpu_memory_utilization=0.082"),
}


@pytest.mark.parametrize("kv", KV.values(), ids=KV.keys())
def test_one_that_was_scheduled_may_give_way_under_every_policy(
    kv: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room is given back in the step that granted it; books are closed at every row, and leaps are steps."""
    taken: list[int] = []

    def spy(plan: Plan, s: KVSequence) -> int:
        taken.append(_take_back(plan, s))
        return taken[-1]

    monkeypatch.setattr("hbmtwin.sim.schedulers.vllm._take_back", spy)
    chunks = "scheduler.long_prefill_token_threshold=50"
    settings = (*PRIORITY, "workload.priorities=[1, 1, 1]", chunks, *kv)
    leaps, steps = (Twin(pressed(*settings)).run(step_mode=one) for one in (False, True))
    assert leaps.summary == steps.summary
    assert leaps.timeline.equals(steps.timeline)
    assert leaps.requests.equals(steps.requests)
    assert leaps.summary["preemptions"] > 3
    assert any(taken), "no victim had been scheduled"
