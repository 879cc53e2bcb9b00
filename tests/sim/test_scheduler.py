"""Continuous batching, step by step: literal logs on a tiny pool, and a naive second model on random traffic.

A log line says what a step computed in running order (``A10`` ten tokens of A), who was admitted (``+A``), preempted
(``-A``), rejected (``!A why``) or could not go on (``?A``), and who ended with it (``A.``). Where memory ran out under
way, ``|A`` says for whom, and then who was preempted or rejected.
"""

from __future__ import annotations

import random

import pytest

from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.contiguous_config import ContiguousConfig
from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVLayout, KVSequence, Refused, Release
from hbmtwin.sim.scheduler import Entry, Fail, Failed, Finished, Plan, SchedulerConfig
from hbmtwin.sim.schedulers.vllm import VllmScheduler
from hbmtwin.workloads.records import Request, user_stream

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
MERGED = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2**14)
"""64 KiB a token: 32 tokens fit 2 MiB."""
NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def request(id: int, prompt: int, output: int, max_tokens: int | None = None) -> Request:
    return Request(
        id=id,
        session=id,
        turn=0,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output if max_tokens is None else max_tokens,
        spans=((user_stream(id, 0), 0, prompt),),
    )


def pool_of_blocks(blocks: int, longest: int, watermark: float) -> PagedPolicy:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    config = PagedConfig(num_blocks=blocks + 1, block_size=4, max_model_len=longest, watermark=watermark)
    return PagedPolicy(TINY, arena, config)


def buffers(room: int, growth: str, longest: int = 64) -> ContiguousPolicy:
    """Buffers for *room* tokens in all, whose old copies live until a step's end."""
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=room * MERGED.token_bytes))
    config = ContiguousConfig(
        max_model_len=longest, growth=growth, initial_tokens=4, tensors="merged", copy_scope="step"
    )
    return ContiguousPolicy(MERGED, arena, config)


class Server:
    """A scheduler, by default over a pool of blocks of 4 tokens, driven one step at a time; every step is checked."""

    def __init__(
        self,
        *,
        blocks: int = 0,
        kv: ContiguousPolicy | None = None,
        scheduler: type[VllmScheduler] = VllmScheduler,
        watermark: float = 0.0,
        **config: object,
    ) -> None:
        settings = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 16, "oom": "preempt", **config}
        self.scheduler = scheduler(SchedulerConfig(**settings))
        self.kv: KVPolicy = kv or pool_of_blocks(blocks, self.scheduler.config.max_model_len, watermark)
        self.token_bytes = self.kv.layout.token_bytes
        self.id_of: dict[int, int] = {}

    def add(self, *lengths: tuple[int, int], max_tokens: int | None = None) -> Server:
        for prompt, output in lengths:
            id = len(self.id_of) + len(self.scheduler._rejected)
            self.scheduler.add(request(id, prompt, output, max_tokens), 0)
            self.id_of = {s.id: r.id for r, s, _ in self.scheduler.unfinished()} | self.id_of
        return self

    def name(self, s: KVSequence) -> str:
        return NAMES[self.id_of[s.id]]

    def plan(self) -> Plan:
        return self.scheduler.schedule(self.kv)

    def told(self, plan: Plan) -> list[str]:
        log = [f"-{self.name(s)}" for s in plan.preempted]
        log += [f"!{NAMES[r.id]} {why}" for r, why in plan.rejected]
        log += [f"+{self.name(a.sequence)}" for a in plan.admitted]
        log += [f"{self.name(s)}{new}" for s, new in plan.everyone()]
        if plan.exhausted is not None:
            log.append(f"?{self.name(plan.exhausted[0])}")
        return log

    def step(self) -> str:
        plan = self.plan()
        log = self.told(plan)
        assert [s for s, new in plan.everyone() if s.num_computed_tokens + 1 == s.num_tokens] == list(plan.decodes)
        if plan.exhausted is None:
            try:
                self.kv.grow_layer(0)
            except OutOfMemory as error:
                log += self.fail(plan, error.facts.owner)
            else:
                self.kv.end_step()
                for f in self.scheduler.commit(plan, 1):
                    self.kv.release(f.sequence, Release.FINISH)
                    log.append(f"{self.name(f.sequence)}.")
            self.check()
        return " ".join(log)

    def fail(self, plan: Plan, owner: int) -> list[str]:
        failed = self.scheduler.fail(plan, self.kv, owner, Fail(self.scheduler.config.oom))
        assert failed.finished == []
        log = [f"|{NAMES[owner]}"]
        log += [f"-{self.name(u.sequence)}" for u in failed.preempted]
        return log + [f"!{self.name(u.sequence)} with {u.output_tokens}" for u in failed.rejected]

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def check(self) -> None:
        self.kv.check()
        assert self.kv.usage().token == self.scheduler.running_tokens * self.token_bytes

    @property
    def waiting(self) -> str:
        everyone = [self.name(s) for _, s, _ in self.scheduler.unfinished()]
        return "".join(everyone[self.scheduler.num_running :])


# -- order and budgets ---------------------------------------------------------------------------------------------


def test_a_prompt_then_a_token_a_step_until_the_end() -> None:
    assert Server(blocks=10).add((3, 4)).steps(5) == ["+A A3", "A1", "A1", "A1 A.", ""]


def test_one_token_of_output_ends_with_the_prompt() -> None:
    assert Server(blocks=10).add((3, 1), (1, 2)).steps(2) == ["+A +B A3 B1 A.", "B1 B."]


def test_decodes_come_before_prompts_and_prompts_in_chunks() -> None:
    server = Server(blocks=20, max_num_batched_tokens=8).add((3, 9))
    assert server.step() == "+A A3"
    server.add((18, 2))
    assert server.steps(4) == ["+B A1 B7", "A1 B7", "A1 B4", "A1 B1 B."]


def test_two_prompts_share_the_budget_in_the_order_of_their_arrival() -> None:
    server = Server(blocks=20, max_num_batched_tokens=8).add((5, 3), (5, 3), (5, 3))
    assert server.steps(3) == ["+A +B A5 B3", "+C A1 B2 C5", "A1 B1 C1 A."]


def test_more_running_than_tokens_a_step_serves_the_first_admitted() -> None:
    server = Server(blocks=20, max_num_batched_tokens=2).add((1, 3), (1, 3), (1, 3))
    assert server.steps(5) == ["+A +B A1 B1", "A1 B1", "A1 B1 A. B.", "+C C1", "C1"]


def test_no_more_than_max_num_seqs_run() -> None:
    server = Server(blocks=20, max_num_seqs=2).add((2, 2), (2, 3), (2, 2), (2, 1))
    assert server.steps(4) == ["+A +B A2 B2", "A1 B1 A.", "+C B1 C2 B.", "+D C1 D2 C. D."]


def test_the_head_of_the_queue_blocks_those_behind_it() -> None:
    """Four blocks: A holds two, B needs three, C would fit."""
    server = Server(blocks=4).add((5, 4), (9, 1), (1, 1))
    assert server.steps(4) == ["+A A5", "A1", "A1", "A1 A."]
    assert server.waiting == "BC"
    assert server.step() == "+B +C B9 C1 B. C."


def test_a_prompt_in_chunks_is_admitted_only_if_all_of_it_fits() -> None:
    server = Server(blocks=4, max_num_batched_tokens=4).add((4, 9), (13, 1))
    assert server.steps(2) == ["+A A4", "A1"]
    assert server.waiting == "B"


def test_the_watermark_stays_free_while_others_run() -> None:
    """int(0.25 * 5) = 1 block of the five that count the null block."""
    server = Server(blocks=4, watermark=0.25).add((8, 5), (8, 1))
    assert server.steps(2) == ["+A A8", "A1"]
    assert Server(blocks=4, watermark=0.25).add((16, 1)).step() == "+A A16 A."


# -- when memory is short ------------------------------------------------------------------------------------------


def test_the_last_admitted_is_preempted_and_goes_to_the_front_of_the_queue() -> None:
    """Six blocks, three sequences of two; A's ninth token takes C's. No admission in the step that preempted."""
    server = Server(blocks=6, max_num_seqs=3, max_num_batched_tokens=32).add((7, 6), (7, 6), (7, 6), (1, 1))
    assert server.step() == "+A +B +C A7 B7 C7"
    assert server.step() == "A1 B1 C1"
    assert server.step() == "-C A1 B1"
    assert server.waiting == "CD"
    assert server.step() == "A1 B1"  # C needs three blocks again, and blocks D
    assert server.steps(2) == ["A1 B1", "A1 B1 A. B."]
    assert server.steps(4) == ["+C +D C9 D1 D.", "C1", "C1", "C1 C."]  # its two tokens were kept, and computed anew


def test_preempted_ones_return_in_the_order_of_their_admission() -> None:
    """A takes the last block, B F's and C E's; D has nobody behind it left."""
    server = Server(blocks=7, max_num_batched_tokens=32).add((4, 12), (4, 9), (4, 9), (4, 9), (4, 9), (4, 9))
    assert server.step() == "+A +B +C +D +E +F A4 B4 C4 D4 E4 F4"
    assert server.step() == "-F -E -D A1 B1 C1"
    assert server.waiting == "DEF"


def test_a_sequence_that_is_last_preempts_itself() -> None:
    server = Server(blocks=3).add((4, 5), (4, 5))
    assert server.step() == "+A +B A4 B4"
    assert server.step() == "-B A1"
    assert server.waiting == "B"
    assert server.steps(4) == ["A1", "A1", "A1 A.", "+B B5"]


def test_a_sequence_alone_that_cannot_grow_is_rejected_in_the_next_step() -> None:
    server = Server(blocks=2).add((8, 3))
    assert server.steps(3) == ["+A A8", "-A", "!A kv_capacity"]
    assert not server.scheduler.has_work


def test_what_can_never_fit_is_rejected_when_nothing_else_runs() -> None:
    server = Server(blocks=3).add((4, 2), (13, 1), (4, 1))
    assert server.steps(2) == ["+A A4", "A1 A."]
    assert server.step() == "!B kv_capacity +C C4 C."


def test_what_would_pass_max_model_len_is_rejected_at_once() -> None:
    server = Server(blocks=20, max_model_len=16).add((12, 4), (12, 5))
    server.scheduler.add(request(2, 2, 1, max_tokens=15), 0)  # the server knows max_tokens, not the truth
    assert server.scheduler.num_waiting == 1
    assert server.step() == "!B max_model_len !C max_model_len +A A12"
    assert server.step() == "A1"


def test_an_answer_is_cut_at_max_tokens() -> None:
    assert Server(blocks=20).add((3, 9), max_tokens=2).steps(2) == ["+A A3", "A1 A."]


@pytest.mark.parametrize("oom", ["stop", "reject"])
def test_a_server_that_does_not_preempt_says_who_cannot_go_on(oom: str) -> None:
    server = Server(blocks=5, oom=oom, max_num_batched_tokens=32).add((7, 5), (8, 5), (1, 9))
    assert server.step() == "+A +B +C A7 B8 C1"
    plan = server.plan()
    assert server.told(plan) == ["A1", "?B"]
    assert plan.exhausted is not None
    assert plan.exhausted[1] == Refused(16, 0, "not enough free blocks")
    assert server.scheduler.num_running == 3


# -- a step that is not carried out ----------------------------------------------------------------------------------


def test_reject_undoes_the_step_and_drops_the_owner() -> None:
    server = Server(blocks=5, oom="reject", max_num_batched_tokens=32).add((7, 5), (8, 5), (1, 9))
    server.step()
    before = {s.id: server.kv.block_ids(s) for _, s, _ in server.scheduler.unfinished()}
    plan = server.plan()
    assert plan.exhausted is not None
    failed = server.scheduler.fail(plan, server.kv, plan.exhausted[0].id, Fail.REJECT)
    server.check()
    assert [(u.request.id, u.sequence.num_tokens, u.output_tokens) for u in failed.rejected] == [(1, 9, 1)]
    assert (failed.preempted, failed.finished) == ([], [])
    assert server.scheduler.running_tokens == 7 + 1
    for _, s, _ in server.scheduler.unfinished():
        assert server.kv.block_ids(s) == before[s.id]
    assert server.steps(2) == ["A1 C1", "A1 C1"]


def test_those_who_came_with_a_step_that_failed_wait_again_and_nobody_gives_way() -> None:
    server = Server(blocks=20, max_num_batched_tokens=32).add((8, 3), (8, 5))
    server.step()
    server.add((4, 2), (4, 2))
    free = server.kv.usage().pool
    plan = server.plan()
    assert server.told(plan) == ["+C", "+D", "A1", "B1", "C4", "D4"]
    owner = plan.everyone()[0][0].id
    assert server.scheduler.fail(plan, server.kv, owner, Fail.PREEMPT) == ([], [], [])
    server.check()
    assert server.scheduler.running_tokens == 16
    assert server.kv.usage().pool == free
    assert server.waiting == "CD"
    assert server.steps(3) == ["A1 B1", "A1 B1 A.", "+C +D B1 C4 D4"]  # nobody comes until somebody has ended


def test_preempt_undoes_the_step_and_preempts_the_last_admitted() -> None:
    server = Server(blocks=20, max_num_batched_tokens=32).add((8, 3), (8, 5), (8, 5))
    server.step()
    server.add((4, 2))
    server.scheduler.config = SchedulerConfig(64, max_num_batched_tokens=3)  # no room for newcomers in this step
    plan = server.plan()
    failed = server.scheduler.fail(plan, server.kv, plan.everyone()[0][0].id, Fail.PREEMPT)
    server.check()
    assert [(u.request.id, u.output_tokens) for u in failed.preempted] == [(2, 1)]
    assert (failed.rejected, failed.finished) == ([], [])
    assert server.scheduler.running_tokens == 16
    assert server.waiting == "CD"
    server.scheduler.config = SchedulerConfig(64, max_num_batched_tokens=32)
    assert server.steps(3) == ["A1 B1", "A1 B1 A.", "+C +D B1 C9 D4"]


def test_a_sequence_that_is_alone_is_rejected_even_where_others_would_be_preempted() -> None:
    server = Server(blocks=20).add((8, 5), (4, 2))
    server.scheduler.config = SchedulerConfig(64, max_num_batched_tokens=8)
    server.step()
    server.scheduler.config = SchedulerConfig(64, max_num_batched_tokens=1)
    plan = server.plan()
    assert server.told(plan) == ["A1"]
    failed = server.scheduler.fail(plan, server.kv, 0, Fail.PREEMPT)
    assert [(u.request.id, u.output_tokens) for u in failed.rejected] == [(0, 1)]
    server.scheduler.config = SchedulerConfig(64)
    assert server.steps(2) == ["+B B4", "B1 B."]


@pytest.mark.parametrize("how", Fail)
def test_of_newcomers_only_fewer_come_again_until_one_is_alone(how: Fail) -> None:
    server = Server(blocks=20, max_num_batched_tokens=64).add(*[(4, 2)] * 8)
    for count in (8, 7, 6, 5, 4, 3, 2):
        plan = server.plan()
        assert len(plan.admitted) == count
        assert server.scheduler.fail(plan, server.kv, plan.admitted[0].sequence.id, how) == ([], [], [])
        server.check()
        assert (server.scheduler.num_running, server.scheduler.running_tokens, server.waiting) == (0, 0, "ABCDEFGH")
    failed = server.scheduler.fail(server.plan(), server.kv, 0, how)
    assert [(u.request.id, u.output_tokens) for u in failed.rejected] == [(0, 0)]
    assert server.step() == "+B +C +D +E +F +G +H B4 C4 D4 E4 F4 G4 H4"  # memory came free: all may come


# -- buffers, whose shortage shows when the step is under way ----------------------------------------------------------


def static_of_16(**config: object) -> Server:
    """Room for two sequences."""
    return Server(kv=buffers(32, "static", longest=16), max_model_len=16, **config)


@pytest.mark.parametrize("oom", ["reject", "preempt"])
def test_newcomers_without_room_wait_until_somebody_has_ended(oom: str) -> None:
    server = static_of_16(oom=oom).add((4, 3))
    assert server.step() == "+A A4"
    server.add((4, 2), (4, 2))
    assert server.step() == "+B +C A1 B4 C4 |C"
    assert server.waiting == "BC"
    assert server.steps(4) == ["A1", "A1 A.", "+B +C B4 C4", "B1 C1 B. C."]


@pytest.mark.parametrize("oom", ["reject", "preempt"])
def test_a_burst_that_does_not_fit_comes_in_smaller_numbers(oom: str) -> None:
    server = static_of_16(oom=oom).add(*[(4, 2)] * 4)
    assert server.steps(5) == [
        "+A +B +C +D A4 B4 C4 D4 |C",
        "+A +B +C A4 B4 C4 |C",
        "+A +B A4 B4",
        "A1 B1 A. B.",
        "+C +D C4 D4",
    ]


def growing_past_the_room(oom: str) -> Server:
    """Of 32 tokens A takes 4, B 8 and C 16, when A needs 8 beside its 4."""
    server = Server(kv=buffers(32, "doubling"), oom=oom, max_num_batched_tokens=32).add((3, 4), (4, 4), (10, 3))
    assert server.steps(2) == ["+A +B +C A3 B4 C10", "A1 B1 C1"]
    return server


def test_the_last_admitted_is_preempted_for_one_that_grows_and_returns_when_somebody_has_ended() -> None:
    server = growing_past_the_room("preempt")
    assert server.step() == "A1 B1 C1 |A -C"
    assert server.steps(3) == ["A1 B1", "A1 B1 A. B.", "+C C12 C."]  # its two tokens were kept


def test_one_that_grows_without_room_is_rejected_with_what_it_has() -> None:
    server = growing_past_the_room("reject")
    assert server.step() == "A1 B1 C1 |A !A with 2"
    assert server.steps(2) == ["B1 C1 C.", "B1 B."]


@pytest.mark.parametrize("oom", ["reject", "preempt"])
def test_what_never_fits_is_rejected_when_it_is_alone(oom: str) -> None:
    """20 tokens beside their copy of 21 pass 32; so do 33 tokens."""
    server = Server(kv=buffers(32, "exact"), oom=oom, max_num_batched_tokens=64).add((20, 3), (33, 3), (4, 2))
    assert server.steps(6) == [
        "+A +B +C A20 B33 C4 |B",
        "+A +B A20 B33 |B",
        "+A A20",
        "A1 |A !A with 1",
        "+B +C B33 C4 |B",
        "+B B33 |B !B with 0",
    ]
    assert server.steps(2) == ["+C C4", "C1 C."]


def turn(id: int, session: int, number: int, prompt: int, output: int) -> Request:
    """A turn whose prompt continues the session's: the user's stream alone, so that all of a history is found."""
    spans = ((user_stream(session, 0), 0, prompt),)
    return Request(id, session, number, 0, prompt, output, output, spans)


def test_a_history_adopted_by_an_admission_that_is_undone_is_found_again() -> None:
    server = static_of_16(oom="preempt")
    scheduler, kv = server.scheduler, server.kv
    scheduler.add(turn(0, 7, 0, 5, 1), 0)
    plan = server.plan()
    kv.grow_layer(0)
    kv.end_step()
    [ended] = scheduler.commit(plan, 1)
    kv.release(ended.sequence, Release.PARK)
    scheduler.add(turn(1, 8, 0, 4, 3), 0)
    scheduler.add(turn(2, 7, 1, 9, 2), 0)
    scheduler.add(turn(3, 9, 0, 4, 2), 0)
    server.id_of = {1: 1, 2: 2, 3: 3}

    def parked() -> int:
        return kv.usage().parked // MERGED.token_bytes

    assert parked() == 5
    assert server.step() == "+B +C +D B4 C4 D4 |D"
    assert parked() == 5
    assert server.step() == "+B +C B4 C4"  # five of the nine were found
    assert parked() == 0
    assert scheduler.running_tokens == 4 + 9
    assert server.steps(3) == ["B1 C1 C.", "+D B1 D4 B.", "D1 D."]


def serve(seed: int, scheduler: type[VllmScheduler] = VllmScheduler) -> dict[str, int]:
    """Random requests on few tokens' room, to the end; returns how often what happened. No request may get lost."""
    draw = random.Random(seed)
    growth, oom = draw.choice(["exact", "doubling", "static"]), draw.choice(["reject", "preempt"])
    server = Server(
        kv=buffers(draw.choice([32, 64, 128]), growth, longest=32),
        scheduler=scheduler,
        oom=oom,
        max_model_len=32,
        max_num_batched_tokens=draw.choice([7, 64]),
    )
    requests = [request(id, draw.randint(1, 20), draw.randint(1, 12)) for id in range(16)]
    server.id_of = {r.id: r.id for r in requests}
    happened = {"failed": 0, "-": 0, "!": 0, ".": 0}
    steps = 0
    while requests or server.scheduler.has_work:
        if requests and (draw.random() < 0.5 or not server.scheduler.has_work):
            server.scheduler.add(requests.pop(0), 0)
        log = server.step()
        happened["failed"] += "|" in log
        for mark in "-!.":
            happened[mark] += log.count(mark)
        steps += 1
        assert steps < 1000, "no progress"
    assert happened["!"] + happened["."] == 16
    assert server.kv.usage().held == server.kv.usage().parked == 0
    return happened


def serve_all(scheduler: type[VllmScheduler] = VllmScheduler) -> dict[str, int]:
    totals = {"failed": 0, "-": 0, "!": 0, ".": 0}
    for seed in range(60):
        for what, count in serve(seed, scheduler).items():
            totals[what] += count
    return totals


def test_every_request_gets_its_end_however_often_memory_runs_out() -> None:
    totals = serve_all()
    assert totals["failed"] > 500
    assert totals["-"] > 100
    assert totals["!"] > 20
    assert totals["."] > 700


class AdmitsAtOnceAfterAFailure(VllmScheduler):
    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        failed = super().fail(p, kv, owner, how)
        self._most_running = self.config.max_num_seqs
        return failed


class NeverAdmitsAgain(VllmScheduler):
    def _finish(self, ended: list[Entry]) -> list[Finished]:
        most = self._most_running
        finished = super()._finish(ended)
        self._most_running = 0 if most < self.config.max_num_seqs else most
        return finished


class CountsWhatWasUndone(VllmScheduler):
    def _uncount(self, entry: Entry) -> None:
        if entry.sequence.num_tokens > entry.request.prompt_tokens:
            super()._uncount(entry)


class LosesTheNewcomers(VllmScheduler):
    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        failed = super().fail(p, kv, owner, how)
        if failed == ([], [], []):
            self._waiting.popleft()
        return failed


@pytest.mark.parametrize(
    "planted",
    [AdmitsAtOnceAfterAFailure, NeverAdmitsAgain, CountsWhatWasUndone, LosesTheNewcomers],
    ids=lambda c: c.__name__,
)
def test_bugs_planted_in_the_end_of_a_failed_step_are_caught(planted: type[VllmScheduler]) -> None:
    with pytest.raises(AssertionError):
        serve_all(planted)


# -- leaps -----------------------------------------------------------------------------------------------------------


def test_steady_steps_count_further_steps_until_the_first_ends() -> None:
    server = Server(blocks=20).add((4, 9), (4, 6))
    steady = []
    for _ in range(4):
        plan = server.plan()
        steady.append(server.scheduler.steady_steps(plan))
        server.kv.end_step()
        server.scheduler.commit(plan, 1)
    assert steady == [0, 4, 3, 2]  # the prompts; then B has five tokens to come, this one and four


def test_a_first_token_is_never_inside_a_leap() -> None:
    """A prompt of one token looks like a decode, but the time of its token is a result."""
    server = Server(blocks=20).add((1, 9))
    plan = server.plan()
    assert [s.id for s in plan.decodes] == [0]
    assert server.scheduler.steady_steps(plan) == 0


def test_a_leap_commits_as_many_single_steps_do() -> None:
    one, many = (Server(blocks=20).add((4, 9), (6, 6)) for _ in range(2))
    one.step()
    many.step()
    logs = one.steps(5)
    plan = many.plan()
    k = 1 + many.scheduler.steady_steps(plan)
    assert k == 5
    many.kv.end_step()
    many.kv.advance(plan.decodes, k - 1)
    for f in many.scheduler.commit(plan, k):
        many.kv.release(f.sequence, Release.FINISH)
    many.check()
    assert logs == ["A1 B1"] * 4 + ["A1 B1 B."]
    states = [[(s.num_tokens, s.num_computed_tokens) for _, s, _ in x.scheduler.unfinished()] for x in (one, many)]
    assert states[0] == states[1] == [(10, 9)]


# -- a second model ------------------------------------------------------------------------------------------------


class NaiveServer:
    """Section 3 of specs/paged-kv.md for one group without a cache, in lists and single steps; no shared code."""

    def __init__(self, blocks: int, size: int, seqs: int, batched: int, longest: int, watermark: float) -> None:
        self.free = list(range(1, blocks))
        self.kept_free = int(watermark * blocks)
        self.size, self.seqs, self.batched, self.longest = size, seqs, batched, longest
        self.running: list[int] = []
        self.waiting: list[int] = []
        self.table: dict[int, list[int]] = {}
        self.total: dict[int, int] = {}
        self.computed: dict[int, int] = {}
        self.end: dict[int, int] = {}

    def add(self, id: int, prompt: int, output: int) -> None:
        if prompt + output <= self.longest:
            self.waiting.append(id)
            self.table[id], self.total[id], self.computed[id], self.end[id] = [], prompt, 0, prompt + output

    def room(self, id: int, tokens: int, spare: int) -> bool:
        missing = -(-tokens // self.size) - len(self.table[id])
        return missing + spare <= len(self.free)

    def take(self, id: int, tokens: int) -> None:
        while len(self.table[id]) * self.size < tokens:
            self.table[id].append(self.free.pop(0))

    def give_back(self, id: int) -> None:
        while self.table[id]:
            self.free.append(self.table[id].pop())

    def step(self) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        scheduled: list[tuple[int, int]] = []
        preempted: list[int] = []
        rejected: list[int] = []
        budget = self.batched
        for id in list(self.running):
            if budget == 0:
                break
            if id in preempted:
                continue
            new = min(self.total[id] - self.computed[id], budget, self.longest - 1 - self.computed[id])
            while id in self.running and not self.room(id, self.computed[id] + new, 0):
                victim = self.running.pop()
                self.give_back(victim)
                self.computed[victim] = 0
                self.waiting.insert(0, victim)
                preempted.append(victim)
            if id not in self.running:
                break
            self.take(id, self.computed[id] + new)
            scheduled.append((id, new))
            budget -= new
        while self.waiting and not preempted and budget > 0 and len(self.running) < self.seqs:
            id = self.waiting[0]
            new = min(self.total[id], budget)
            if not self.room(id, self.total[id], self.kept_free if self.running else 0):
                if self.running:
                    break
                rejected.append(self.waiting.pop(0))
                continue
            self.running.append(self.waiting.pop(0))
            self.take(id, new)
            scheduled.append((id, new))
            budget -= new
        for id, new in scheduled:
            self.computed[id] += new
            if self.computed[id] == self.total[id]:
                self.total[id] += 1
                if self.total[id] == self.end[id]:
                    self.running.remove(id)
                    self.give_back(id)
        return scheduled, preempted, rejected


def compare(seed: int, steps: int, scheduler: type[VllmScheduler] = VllmScheduler) -> dict[str, int]:
    """Random traffic through both, leaps included; asserts equality after each and returns how often what happened."""
    draw = random.Random(seed)
    blocks, seqs, batched = draw.choice([6, 12, 30]), draw.choice([1, 3, 10]), draw.choice([3, 10, 40])
    watermark = draw.choice([0.0, 0.1])
    server = Server(
        blocks=blocks - 1,
        scheduler=scheduler,
        watermark=watermark,
        max_model_len=32,
        max_num_seqs=seqs,
        max_num_batched_tokens=batched,
    )
    kv, ours = server.kv, server.scheduler
    naive = NaiveServer(blocks, 4, seqs, batched, 32, watermark)
    happened = {"preempted": 0, "rejected": 0, "leaps": 0, "steps": 0}
    next_id = 0
    while happened["steps"] < steps:
        while draw.random() < 0.3 and len(naive.waiting) < 6:
            prompt, output = draw.randint(1, 24), draw.randint(1, 12)
            ours.add(request(next_id, prompt, output), 0)
            naive.add(next_id, prompt, output)
            next_id += 1
        plan = ours.schedule(kv)
        kv.end_step()
        k = 1
        if draw.random() < 0.5 and (steady := ours.steady_steps(plan)):
            k += draw.randint(0, kv.horizon(plan.decodes, steady))
        scheduled = [(s.session, new) for s, new in plan.everyone()]
        preempted = [s.session for s in plan.preempted]
        kv.advance(plan.decodes, k - 1)
        for f in ours.commit(plan, k):
            kv.release(f.sequence, Release.FINISH)
        expected = [naive.step() for _ in range(k)]
        rejected = [r.id for r, why in plan.rejected if why == "kv_capacity"]
        assert expected == [(scheduled, preempted, rejected)] + [(scheduled, [], [])] * (k - 1)
        sequences = [s for _, s, _ in ours.unfinished()]
        assert [s.session for s in sequences] == naive.running + naive.waiting
        assert ours.num_running == len(naive.running)
        for s in sequences:
            assert (s.num_tokens, s.num_computed_tokens) == (naive.total[s.session], naive.computed[s.session])
            assert list(kv.block_ids(s)) == naive.table[s.session]
        assert list(kv._free) == naive.free
        server.check()
        happened["steps"] += k
        happened["leaps"] += k > 1
        happened["preempted"] += len(preempted)
        happened["rejected"] += len(rejected)
    return happened


def compare_all(scheduler: type[VllmScheduler] = VllmScheduler) -> dict[str, int]:
    totals = {"preempted": 0, "rejected": 0, "leaps": 0, "steps": 0}
    for seed in range(24):
        for what, count in compare(seed, 250, scheduler).items():
            totals[what] += count
    return totals


def test_a_naive_second_model_agrees_step_by_step_and_block_by_block() -> None:
    totals = compare_all()
    assert totals["steps"] >= 6000
    assert totals["preempted"] > 100
    assert totals["rejected"] > 10
    assert totals["leaps"] > 100


class PreemptsToTheBack(VllmScheduler):
    def _requeue(self, entry: Entry) -> None:
        self._waiting.append(entry)


class AdmitsAfterPreempting(VllmScheduler):
    def schedule(self, kv: PagedPolicy) -> Plan:
        plan = super().schedule(kv)
        if plan.preempted:
            budget = self.config.max_num_batched_tokens - plan.tokens
            self._admit(plan, kv, budget)
        return plan


class SkipsTheHead(VllmScheduler):
    def schedule(self, kv: PagedPolicy) -> Plan:
        plan = super().schedule(kv)
        if len(self._waiting) > 1 and not plan.admitted and not plan.preempted:
            self._waiting.rotate(-1)
        return plan


class CountsOneStepTooMany(VllmScheduler):
    def steady_steps(self, p: Plan) -> int:
        honest = super().steady_steps(p)
        return honest and honest + 1


@pytest.mark.parametrize(
    "planted", [PreemptsToTheBack, AdmitsAfterPreempting, SkipsTheHead, CountsOneStepTooMany], ids=lambda c: c.__name__
)
def test_planted_bugs_are_caught(planted: type[VllmScheduler]) -> None:
    with pytest.raises(AssertionError):
        compare_all(planted)
