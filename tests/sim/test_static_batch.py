"""Static batches, step by step: who shares a batch, which slots are padding, and a naive second model.

A log line says what a step computed in running order (``A10`` ten tokens of A, pads included), who was admitted
(``+A``), rejected (``!A why``), how many of the step's tokens are padding (``p5``), and who was answered at its end
(``A.``). Where memory ran out, ``|A`` says for whom, and then who gave way.
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
from hbmtwin.allocators.records import KVLayout, Release
from hbmtwin.sim.scheduler import Entry, Fail, Failed, Finished, Plan, SchedulerConfig
from hbmtwin.sim.schedulers.static_batch import StaticBatchScheduler
from hbmtwin.workloads.records import Request, user_stream

NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2**14)
"""64 KiB a token: 32 tokens fit 2 MiB."""


def request(
    id: int, prompt: int, output: int, max_tokens: int | None = None, session: int | None = None, turn: int = 0
) -> Request:
    session = id if session is None else session
    return Request(
        id=id,
        session=session,
        turn=turn,
        arrival_ns=0,
        prompt_tokens=prompt,
        output_tokens=output,
        max_tokens=output if max_tokens is None else max_tokens,
        spans=((user_stream(session, 0), 0, prompt),),
    )


def answer_of(r: Request) -> int:
    return min(r.output_tokens, r.max_tokens)


def buffers(room: int, growth: str = "exact", longest: int = 64, admission: str = "none") -> ContiguousPolicy:
    """Buffers for *room* tokens in all, whose old copies live until a step's end."""
    limit = room * LAYOUT.token_bytes
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=limit))
    config = ContiguousConfig(
        max_model_len=longest,
        growth=growth,
        tensors="merged",
        copy_scope="step",
        admission=admission,
        limit_bytes=limit,
    )
    return ContiguousPolicy(LAYOUT, arena, config)


class Server:
    """A scheduler of static batches over contiguous buffers, driven one step at a time; every step is checked."""

    def __init__(
        self, kv: KVPolicy | None = None, scheduler: type[StaticBatchScheduler] = StaticBatchScheduler, **config: object
    ) -> None:
        settings = {"max_model_len": 64, "max_num_seqs": 8, "max_num_batched_tokens": 1, "oom": "preempt", **config}
        self.scheduler = scheduler(SchedulerConfig(**settings))
        self.kv = kv or buffers(4096)
        self.count = 0

    def add(self, *lengths: tuple[int, ...]) -> Server:
        for length in lengths:
            self.scheduler.add(request(self.count, *length), 0)
            self.count += 1
        return self

    def step(self) -> str:
        plan = self.scheduler.schedule(self.kv)
        log = [f"!{NAMES[r.id]} {why}" for r, why in plan.rejected]
        log += [f"+{NAMES[a.request.id]}" for a in plan.admitted]
        log += [f"{NAMES[s.id]}{new}" for s, new in plan.scheduled]
        log += [f"p{plan.padding_tokens}"] if plan.padding_tokens else []
        assert [s for s, new in plan.scheduled if new == 1 and s.num_computed_tokens + 1 == s.num_tokens] == (
            plan.decoding
        )
        if plan.exhausted is not None:
            log += self.fail(plan, plan.exhausted[0].id)
            self.check()
            return " ".join(log)
        try:
            self.kv.grow_layer(0)
        except OutOfMemory as error:
            log += self.fail(plan, error.facts.owner)
        else:
            self.kv.end_step()
            log += self.answers(self.scheduler.commit(plan, 1))
        self.check()
        return " ".join(log)

    def steps(self, count: int) -> list[str]:
        return [self.step() for _ in range(count)]

    def answers(self, finished: list[Finished]) -> list[str]:
        for f in finished:
            assert f.output_tokens == answer_of(f.request)
            self.kv.release(f.sequence, Release.FINISH)
        return [f"{NAMES[f.request.id % 26]}." for f in finished]

    def fail(self, plan: Plan, owner: int) -> list[str]:
        failed = self.scheduler.fail(plan, self.kv, owner, Fail(self.scheduler.config.oom))
        log = [f"|{NAMES[owner]}"]
        log += [f"-{NAMES[u.request.id]}" for u in failed.preempted]
        log += [f"!{NAMES[u.request.id]} with {u.output_tokens}" for u in failed.rejected]
        return log + self.answers(failed.finished)

    def check(self) -> None:
        self.kv.check()
        slots = self.scheduler.running_tokens + self.scheduler.padding_tokens
        assert self.kv.usage().token == slots * self.kv.layout.token_bytes
        assert min(self.scheduler.running_tokens, self.scheduler.padding_tokens) >= 0
        running = list(self.scheduler.unfinished())[: self.scheduler.num_running]
        assert not running or any(u.output_tokens < answer_of(u.request) for u in running), "nobody to wait for"

    @property
    def waiting(self) -> str:
        everyone = [NAMES[r.id] for r, _, _ in self.scheduler.unfinished()]
        assert len(everyone) == self.scheduler.num_running + self.scheduler.num_waiting
        return "".join(everyone[self.scheduler.num_running :])


# -- a padded batch --------------------------------------------------------------------------------------------------


def test_a_padded_batch_runs_until_its_longest_answer_and_is_answered_at_once() -> None:
    """A's second token is computed in the third step; in the fourth it computes a pad."""
    server = Server().add((2, 2), (5, 4), (3, 3))
    assert server.step() == "+A +B +C A5 B5 C5 p5"
    assert (server.scheduler.running_tokens, server.scheduler.padding_tokens) == (10, 5)
    assert server.steps(3) == ["A1 B1 C1", "A1 B1 C1", "A1 B1 C1 p1 A. B. C."]
    assert (server.scheduler.running_tokens, server.scheduler.padding_tokens) == (0, 0)
    assert not server.scheduler.has_work


def test_an_early_end_pads_on() -> None:
    server = Server().add((4, 1), (4, 6))
    assert server.steps(6) == ["+A +B A4 B4", "A1 B1", *["A1 B1 p1"] * 3, "A1 B1 p1 A. B."]


def test_nobody_joins_a_batch_that_runs() -> None:
    server = Server(max_num_seqs=2).add((3, 3))
    assert server.step() == "+A A3"
    server.add((4, 1), (4, 1), (1, 1))
    assert server.steps(4) == ["A1", "A1 A.", "+B +C B4 C4 B. C.", "+D D1 D."]


def test_the_whole_batch_is_prefilled_in_one_step() -> None:
    assert Server(max_num_batched_tokens=4).add((40, 1), (30, 1)).step() == "+A +B A40 B40 p10 A. B."


def test_a_batch_ends_before_a_request_that_would_take_it_past_max_model_len() -> None:
    """A and B: 10 + 4. With C it would be 10 + 8. D may come with C, though it would have fitted the first batch."""
    server = Server(max_model_len=16).add((4, 4), (10, 2), (2, 8), (2, 1))
    assert server.step() == "+A +B A10 B10 p6"
    assert server.waiting == "CD"
    assert server.steps(4) == ["A1 B1", "A1 B1", "A1 B1 p1 A. B.", "+C +D C2 D2"]


def test_the_server_knows_what_a_request_may_generate_and_not_what_it_will() -> None:
    server = Server(max_model_len=16).add((4, 1, 8), (10, 1, 2))
    assert server.steps(2) == ["+A A4 A.", "+B B10 B."]


def test_what_would_pass_max_model_len_alone_is_rejected() -> None:
    server = Server(max_model_len=16).add((4, 13), (4, 12))
    assert server.scheduler.num_waiting == 1
    assert server.step() == "!A max_model_len +B B4"


def test_a_policy_sees_pads_as_tokens_and_the_batchs_longest_answer_as_the_limit() -> None:
    server = Server().add((2, 2), (5, 4, 9))
    server.step()
    sequences = [s for _, s, _ in server.scheduler.unfinished()]
    assert [(s.num_tokens, s.num_computed_tokens, s.max_tokens) for s in sequences] == [(6, 5, 14)] * 2
    assert [u.output_tokens for u in server.scheduler.unfinished()] == [1, 1]
    server.steps(2)
    assert [u.output_tokens for u in server.scheduler.unfinished()] == [2, 3]


# -- who shares a batch ----------------------------------------------------------------------------------------------


def test_sorted_takes_the_shortest_prompts_first_and_equal_ones_in_the_order_of_their_arrival() -> None:
    server = Server(batching="sorted", max_num_seqs=3).add((5, 1), (2, 1), (9, 1), (2, 1), (5, 1))
    assert server.waiting == "BDAEC"
    assert server.steps(2) == ["+B +D +A B5 D5 A5 p6 B. D. A.", "+E +C E9 C9 p4 E. C."]


def test_sorted_lets_a_late_short_prompt_pass() -> None:
    server = Server(batching="sorted", max_num_seqs=1).add((5, 2), (6, 1))
    assert server.step() == "+A A5"
    server.add((1, 1))
    assert server.steps(3) == ["A1 A.", "+C C1 C.", "+B B6 B."]


def test_a_batch_holds_one_bucket_and_the_oldest_request_says_which() -> None:
    server = Server(batching="buckets", bucket_tokens=4).add((4, 1), (5, 1), (3, 1), (8, 1), (9, 1), (1, 1))
    assert server.waiting == "ABCDEF"
    assert server.step() == "+A +C +F A4 C4 F4 p4 A. C. F."
    server.add((2, 1))
    assert server.steps(3) == ["+B +D B8 D8 p3 B. D.", "+E E9 E.", "+G G2 G."]


def test_a_full_bucket_is_cut_at_max_num_seqs() -> None:
    server = Server(batching="buckets", bucket_tokens=4, max_num_seqs=2).add((1, 1), (9, 1), (2, 1), (3, 1))
    assert server.steps(3) == ["+A +C A2 C2 p1 A. C.", "+B B9 B.", "+D D3 D."]


def test_variable_lengths_need_no_padding_and_each_ends_by_itself() -> None:
    server = Server(batching="variable", max_num_seqs=2).add((2, 2), (5, 4), (3, 1))
    assert server.steps(5) == ["+A +B A2 B5", "A1 B1 A.", "B1", "B1 B.", "+C C3 C."]


def test_variable_batches_are_not_cut_at_the_length_of_their_longest() -> None:
    assert Server(batching="variable", max_model_len=16).add((4, 12), (14, 2)).step() == "+A +B A4 B14"


def test_lengths_in_turn_waste_half_of_a_padded_batch_and_nothing_of_the_others() -> None:
    """Claims B5 and C7 in tokens: sixteen prompts of 10 and 50 in turn, four a batch, one token of output."""
    lengths = [(10, 1), (50, 1)] * 8
    wasted = {}
    for batching in ("padded", "sorted", "buckets", "variable"):
        server = Server(batching=batching, bucket_tokens=16, max_num_seqs=4).add(*lengths)
        logs = server.steps(4)
        assert not server.scheduler.has_work
        wasted[batching] = sum(int(word[1:]) for log in logs for word in log.split() if word[0] == "p")
    assert wasted == {"padded": 8 * 40, "sorted": 0, "buckets": 0, "variable": 0}


# -- what is in memory already ----------------------------------------------------------------------------------------


def serve_two_turns(batching: str) -> list[str]:
    """A's turn of 5 tokens is parked; then B, the session's next turn, whose prompt begins with those, beside C."""
    server = Server(batching=batching)
    server.scheduler.add(request(0, 5, 1, session=7), 0)
    plan = server.scheduler.schedule(server.kv)
    server.kv.grow_layer(0)
    server.kv.end_step()
    [f] = server.scheduler.commit(plan, 1)
    server.kv.release(f.sequence, Release.PARK)
    server.scheduler.add(request(1, 9, 2, session=7, turn=1), 0)
    server.scheduler.add(request(2, 6, 1), 0)
    return server.steps(2)


def test_a_variable_batch_goes_on_from_a_parked_history() -> None:
    assert serve_two_turns("variable") == ["+B +C B4 C6 C.", "B1 B."]


def test_a_padded_batch_looks_nothing_up() -> None:
    assert serve_two_turns("padded") == ["+B +C B9 C9 p3", "B1 C1 B. C."]


# -- when memory is short ------------------------------------------------------------------------------------------


def test_a_batch_takes_as_many_as_are_granted() -> None:
    """A server that reserves: three of 4 + 4 tokens in 24; a fourth waits."""
    server = Server(buffers(24 + 8, admission="reserve"), max_num_seqs=8).add(*[(4, 4)] * 5)
    assert server.step() == "+A +B +C +D A4 B4 C4 D4"
    assert server.waiting == "E"


def test_a_long_one_that_makes_all_of_them_too_long_waits() -> None:
    """Four of 4 + 4 tokens take 32; with E each takes 12 + 4, and only two are granted."""
    server = Server(buffers(32, admission="reserve")).add(*[(4, 4)] * 4, (12, 4))
    assert server.step() == "+A +B +C +D A4 B4 C4 D4"
    server = Server(buffers(32, admission="reserve")).add((12, 4), *[(4, 4)] * 4)
    assert server.step() == "+A +B A12 B12 p8"
    assert server.waiting == "CDE"
    server = Server(buffers(32, admission="reserve")).add((4, 4), (25, 4), (4, 4))
    assert server.step() == "+A A4"  # two of 25 + 4 are too much, and the order is kept


def test_one_that_is_refused_alone_is_rejected() -> None:
    server = Server(buffers(32, admission="reserve")).add((4, 1), (30, 4), (4, 1))
    assert server.steps(2) == ["+A A4 A.", "!B kv_capacity +C C4 C."]


@pytest.mark.parametrize("oom", ["reject", "preempt"])
@pytest.mark.parametrize("batching", ["padded", "variable"])
def test_a_batch_that_does_not_fit_is_begun_anew_with_fewer(batching: str, oom: str) -> None:
    """Two sequences of 16 tokens have room."""
    kv = buffers(32, "static", longest=16)
    server = Server(kv, batching=batching, oom=oom, max_model_len=16).add(*[(4, 2)] * 4)
    assert server.steps(6) == [
        "+A +B +C +D A4 B4 C4 D4 |C",
        "+A +B +C A4 B4 C4 |C",
        "+A +B A4 B4",
        "A1 B1 A. B.",
        "+C +D C4 D4",
        "C1 D1 C. D.",
    ]


def test_complete_answers_leave_before_anybody_is_preempted() -> None:
    """Two of 8 tokens beside their copies of 9 pass 32; one has room. A has been complete since the second step."""
    server = Server(buffers(32), oom="preempt").add((4, 2), (4, 6))
    assert server.steps(5) == ["+A +B A4 B4", "A1 B1", "A1 B1", "A1 B1 p1", "A1 B1 p1 |B A."]
    assert server.steps(2) == ["B1", "B1 B."]


def test_where_the_last_incomplete_one_is_rejected_the_batch_is_over() -> None:
    server = Server(buffers(32), oom="reject").add((4, 2), (4, 6))
    assert server.steps(5) == ["+A +B A4 B4", "A1 B1", "A1 B1", "A1 B1 p1", "A1 B1 p1 |B !B with 4 A."]
    assert not server.scheduler.has_work


def test_a_preempted_one_keeps_its_tokens_and_pads_to_another_batch() -> None:
    """B comes back with the four tokens that it had: 8 in all, to which the newcomer C is padded."""
    server = Server(buffers(32), oom="preempt").add((4, 6), (4, 6))
    server.steps(4)
    server.add((3, 1))
    assert server.steps(3) == ["A1 B1 |B -B", "A1", "A1 A."]
    assert server.waiting == "BC"
    assert server.steps(3) == ["+B +C B8 C8 p5", "B1 C1 |C C.", "B1 B."]


def test_a_preempted_one_moves_to_the_bucket_of_its_new_length() -> None:
    server = Server(buffers(32), oom="preempt", batching="buckets", bucket_tokens=4).add((4, 6), (4, 6))
    server.steps(4)
    server.add((3, 1), (7, 1))
    server.steps(3)
    assert server.steps(4) == ["+B +D B8 D8 p1", "B1 D1 |D D.", "B1 B.", "+C C3 C."]


@pytest.mark.parametrize("oom", ["reject", "preempt"])
def test_a_sequence_that_is_alone_and_cannot_grow_is_rejected(oom: str) -> None:
    server = Server(buffers(32), oom=oom).add((15, 9))
    assert server.steps(2) == ["+A A15", "A1"]
    assert server.step() == "A1 |A !A with 2"
    assert not server.scheduler.has_work


def test_a_running_sequence_that_is_refused_is_told() -> None:
    """A pool of blocks of 4 tokens, three of them: at the thirteenth slot nothing is left."""
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 24))
    kv = PagedPolicy(LAYOUT, arena, PagedConfig(num_blocks=5, block_size=4, max_model_len=64))
    server = Server(kv, oom="stop").add((7, 9), (6, 9))
    assert server.steps(2) == ["+A +B A7 B7 p1", "A1 B1"]
    plan = server.scheduler.schedule(kv)
    assert plan.exhausted is not None
    assert (plan.exhausted[0].id, plan.exhausted[1].need_bytes) == (0, 4 * LAYOUT.token_bytes)


# -- leaps -----------------------------------------------------------------------------------------------------------


def steady(server: Server, steps: int) -> list[int]:
    found = []
    for _ in range(steps):
        plan = server.scheduler.schedule(server.kv)
        found.append(server.scheduler.steady_steps(plan))
        server.kv.grow_layer(0)
        server.kv.end_step()
        server.scheduler.commit(plan, 1)
    return found


def test_steady_steps_reach_to_the_next_one_that_pads_and_to_the_end_of_the_batch() -> None:
    """A pads from its eighth slot on (3 + 2 + 2 of them are its own, 2 pads before); B ends with its thirteenth."""
    assert steady(Server().add((3, 4), (5, 9)), 9) == [0, 3, 2, 1, 0, 3, 2, 1, 0]


def test_steady_steps_of_variable_lengths_reach_to_the_first_end() -> None:
    assert steady(Server(batching="variable").add((3, 4), (5, 9)), 9) == [0, 2, 1, 0, 4, 3, 2, 1, 0]


def test_a_first_token_is_never_inside_a_leap() -> None:
    assert steady(Server().add((1, 9), (1, 9)), 2) == [0, 7]


# -- a second model ------------------------------------------------------------------------------------------------


class NaiveBatches:
    """Rows of marks, one slot each: ``.`` a pad, ``t`` a token. One list per sequence, single steps, no shared code."""

    def __init__(self, batching: str, seqs: int, longest: int, bucket: int) -> None:
        self.batching, self.seqs, self.longest, self.bucket = batching, seqs, longest, bucket
        self.waiting: list[tuple[int, int, int, int]] = []
        self.batch: dict[int, str] = {}
        self.computed: dict[int, int] = {}
        self.output: dict[int, int] = {}
        self.got: dict[int, int] = {}

    def add(self, id: int, prompt: int, output: int, max_tokens: int) -> None:
        if prompt + max_tokens <= self.longest:
            self.waiting.append((id, prompt, min(output, max_tokens), max_tokens))

    def in_order(self) -> list[tuple[int, int, int, int]]:
        return sorted(self.waiting, key=lambda w: w[1]) if self.batching == "sorted" else list(self.waiting)

    def next_batch(self) -> list[tuple[int, int, int, int]]:
        candidates = self.in_order()
        if self.batching == "buckets":
            edges = range(1, self.longest + 1, self.bucket)
            [edge] = [e for e in edges if e <= candidates[0][1] < e + self.bucket]
            candidates = [w for w in candidates if edge <= w[1] < edge + self.bucket]
        chosen = candidates[: self.seqs]
        if self.batching != "variable":
            while max(w[1] for w in chosen) + max(w[3] for w in chosen) > self.longest:
                chosen.pop()
        return chosen

    def step(self) -> tuple[list[tuple[int, int]], int, list[int]]:
        """What each computes, how many pads that are in all, who is answered."""
        if not self.batch and not self.waiting:
            return [], 0, []
        if not self.batch:
            chosen = self.next_batch()
            self.waiting = [w for w in self.waiting if w not in chosen]
            longest = 0 if self.batching == "variable" else max(w[1] for w in chosen)
            for id, prompt, output, _ in chosen:
                self.batch[id] = "." * (longest - prompt) + "t" * prompt
                self.computed[id], self.output[id], self.got[id] = 0, output, 0
        scheduled, pads = [], 0
        for id, row in self.batch.items():
            new = row[self.computed[id] :]
            scheduled.append((id, len(new)))
            pads += new.count(".")
            self.computed[id] = len(row)
            if self.got[id] < self.output[id]:
                self.got[id] += 1
                self.batch[id] += "t"
            else:
                self.batch[id] += "."
        over = [id for id in self.batch if self.got[id] == self.output[id]]
        if self.batching != "variable" and len(over) < len(self.batch):
            return scheduled, pads, []
        for id in over:
            del self.batch[id]
        return scheduled, pads, over


def compare(seed: int, steps: int, scheduler: type[StaticBatchScheduler]) -> dict[str, int]:
    """Random traffic through both, leaps included; asserts equality after each and returns how often what happened."""
    draw = random.Random(seed)
    batching = draw.choice(["padded", "sorted", "buckets", "variable"])
    seqs, bucket = draw.choice([1, 3, 6]), draw.choice([1, 5, 16])
    kv = buffers(4096, "static", longest=28)
    server = Server(kv, scheduler, batching=batching, max_num_seqs=seqs, max_model_len=28, bucket_tokens=bucket)
    ours, naive = server.scheduler, NaiveBatches(batching, seqs, 28, bucket)
    happened = {"steps": 0, "leaps": 0, "pads": 0, "answers": 0}
    id = 0
    while happened["steps"] < steps:
        while draw.random() < 0.4 and len(naive.waiting) < 9:
            prompt, output = draw.randint(1, 20), draw.randint(1, 12)
            max_tokens = output + draw.randint(-1, 4) or 1
            ours.add(request(id, prompt, output, max_tokens), 0)
            naive.add(id, prompt, output, max_tokens)
            id += 1
        plan = ours.schedule(kv)
        kv.grow_layer(0)
        kv.end_step()
        k = 1
        if plan.scheduled and draw.random() < 0.7 and (further := ours.steady_steps(plan)):
            k += draw.randint(0, kv.horizon(plan.decoding, further))
        scheduled = [(s.id, new) for s, new in plan.scheduled]
        kv.advance(plan.decoding, k - 1)
        finished = ours.commit(plan, k)
        server.answers(finished)
        expected = [naive.step() for _ in range(k)]
        told = (scheduled, plan.padding_tokens)
        assert expected == [(*told, [])] * (k - 1) + [(*told, [f.request.id for f in finished])]
        server.check()
        marks = [row[: naive.computed[id]] for id, row in naive.batch.items()]
        assert ours.running_tokens == sum(row.count("t") for row in marks)
        assert ours.padding_tokens == sum(row.count(".") for row in marks)
        unfinished = list(ours.unfinished())
        assert [u.request.id for u in unfinished] == [*naive.batch, *(w[0] for w in naive.in_order())]
        assert [u.output_tokens for u in unfinished[: len(naive.batch)]] == [naive.got[id] for id in naive.batch]
        happened["steps"] += k
        happened["leaps"] += k > 1
        happened["pads"] += k * plan.padding_tokens
        happened["answers"] += len(finished)
    return happened


def compare_all(scheduler: type[StaticBatchScheduler] = StaticBatchScheduler) -> dict[str, int]:
    totals = {"steps": 0, "leaps": 0, "pads": 0, "answers": 0}
    for seed in range(40):
        for what, count in compare(seed, 150, scheduler).items():
            totals[what] += count
    return totals


def test_a_naive_second_model_agrees_slot_by_slot() -> None:
    totals = compare_all()
    assert totals["steps"] >= 6000
    assert totals["leaps"] > 800
    assert totals["pads"] > 5000
    assert totals["answers"] > 1500


class JoinsARunningBatch(StaticBatchScheduler):
    def schedule(self, kv: KVPolicy) -> Plan:
        plan = super().schedule(kv)
        if not plan.admitted and len(self._running) < self.config.max_num_seqs:
            self._begin(plan, kv)
        return plan


class AnswersEachAtItsEnd(StaticBatchScheduler):
    def _waits_for_others(self, ended: object) -> bool:
        return False


class ForgetsThePads(StaticBatchScheduler):
    def _go_on(self, plan: Plan, kv: KVPolicy) -> None:
        super()._go_on(plan, kv)
        plan.padding_tokens = 0


class CallsTheLastTokenAPad(StaticBatchScheduler):
    def _go_on(self, plan: Plan, kv: KVPolicy) -> None:
        super()._go_on(plan, kv)
        if self._padded:
            plan.padding_tokens = len(self._ended())


class LeapsOverAnEnd(StaticBatchScheduler):
    def steady_steps(self, p: Plan) -> int:
        ends = [e.padding + e.final_tokens - e.sequence.num_tokens - 1 for e in self._running]
        return 0 if p.admitted else max(ends)


class LeapsOneStepTooMany(StaticBatchScheduler):
    def steady_steps(self, p: Plan) -> int:
        honest = super().steady_steps(p)
        return honest and honest + 1


class TurnsTheQueueRound(StaticBatchScheduler):
    def _enqueue(self, entry: Entry) -> None:
        self._requeue(entry)


class TakesTheNextBucketToo(StaticBatchScheduler):
    def _cut(self, most: int) -> list[Entry]:
        batch = super()._cut(most)
        return batch + super()._cut(most - len(batch)) if 0 < len(batch) < most else batch


class IgnoresTheLongestAnswer(StaticBatchScheduler):
    def _wait(self, entry: Entry, place: int) -> None:
        super()._wait(entry, place)
        entry.sequence.max_tokens = entry.sequence.num_tokens + 1


@pytest.mark.parametrize(
    "planted",
    [
        JoinsARunningBatch,
        AnswersEachAtItsEnd,
        ForgetsThePads,
        CallsTheLastTokenAPad,
        LeapsOverAnEnd,
        LeapsOneStepTooMany,
        TurnsTheQueueRound,
        TakesTheNextBucketToo,
        IgnoresTheLongestAnswer,
    ],
    ids=lambda c: c.__name__,
)
def test_planted_bugs_are_caught(planted: type[StaticBatchScheduler]) -> None:
    with pytest.raises(AssertionError):
        compare_all(planted)


# -- nobody gets lost ------------------------------------------------------------------------------------------------


def serve(seed: int, scheduler: type[StaticBatchScheduler]) -> dict[str, int]:
    """Random requests on few tokens' room, to the end; returns how often what happened."""
    draw = random.Random(seed)
    kv = buffers(
        draw.choice([32, 64, 128]),
        draw.choice(["exact", "doubling", "static"]),
        longest=32,
        admission=draw.choice(["none", "reserve"]),
    )
    server = Server(
        kv,
        scheduler,
        max_model_len=32,
        oom=draw.choice(["reject", "preempt"]),
        batching=draw.choice(["padded", "sorted", "buckets", "variable"]),
        bucket_tokens=5,
    )
    left = [(draw.randint(1, 20), draw.randint(1, 12)) for _ in range(16)]
    happened = {"|": 0, "-": 0, "!": 0, ".": 0}
    steps = 0
    while left or server.scheduler.has_work:
        if left and (draw.random() < 0.5 or not server.scheduler.has_work):
            server.add(left.pop())
        log = server.step()
        for mark in happened:
            happened[mark] += log.count(mark)
        steps += 1
        assert steps < 1500, "no progress"
    assert happened["!"] + happened["."] == 16
    assert (server.scheduler.running_tokens, server.scheduler.padding_tokens) == (0, 0)
    assert kv.usage().held == 0
    return happened


def serve_all(scheduler: type[StaticBatchScheduler] = StaticBatchScheduler) -> dict[str, int]:
    totals = {"|": 0, "-": 0, "!": 0, ".": 0}
    for seed in range(80):
        for what, count in serve(seed, scheduler).items():
            totals[what] += count
    return totals


def test_every_request_gets_its_end_however_often_memory_runs_out() -> None:
    totals = serve_all()
    assert totals["|"] > 300
    assert totals["-"] > 30
    assert totals["!"] > 50
    assert totals["."] > 900


class LosesCompleteAnswers(StaticBatchScheduler):
    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        failed = super().fail(p, kv, owner, how)
        for f in failed.finished:
            kv.release(f.sequence, Release.DROP)
        return failed._replace(finished=[])


class WaitsForNobody(StaticBatchScheduler):
    """After a rejection it goes on with a batch in which all are complete."""

    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        if how is Fail.REJECT:
            return super(StaticBatchScheduler, self).fail(p, kv, owner, how)
        return super().fail(p, kv, owner, how)


class KeepsPadsInTheQueue(StaticBatchScheduler):
    def _requeue(self, entry: Entry) -> None:
        padded = entry.sequence.num_tokens
        super()._requeue(entry)
        entry.sequence.num_tokens = padded


class BeginsAnewWithAll(StaticBatchScheduler):
    def fail(self, p: Plan, kv: KVPolicy, owner: int, how: Fail) -> Failed:
        failed = super().fail(p, kv, owner, how)
        self._most_running = self.config.max_num_seqs
        return failed


@pytest.mark.parametrize(
    "planted",
    [LosesCompleteAnswers, WaitsForNobody, KeepsPadsInTheQueue, BeginsAnewWithAll],
    ids=lambda c: c.__name__,
)
def test_bugs_planted_in_the_end_of_a_failed_step_are_caught(planted: type[StaticBatchScheduler]) -> None:
    with pytest.raises(AssertionError):
        serve_all(planted)
