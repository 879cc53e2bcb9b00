"""Every KV policy on every legal arena under random traffic with little memory: Hypothesis plays scheduler.

Beside the policy runs the simplest model there is, computed tokens of each sequence and of each parked session, and
before a leap a copy of the policy, which goes the same way in single steps. The setups are those of ``conftest.py``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hbmtwin.allocators.buffers import Buffers, BufferStore
from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.contiguous_config import ContiguousConfig
from hbmtwin.allocators.contract import DeviceAllocator, KVPolicy
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Tag
from hbmtwin.allocators.virtual import VirtualPolicy

MAX_MODEL_LEN = 128
LITTLE = 2 << 20
"""Room for about three of the longest sequences."""
LENGTHS = st.one_of(st.integers(1, MAX_MODEL_LEN - 8), st.integers(60, MAX_MODEL_LEN - 8))
SESSIONS = st.integers(0, 5)
Plan = list[tuple[KVSequence, int]]


class Traffic(RuleBasedStateMachine):
    """What a scheduler and an engine may do to any policy; one policy a run."""

    def __init__(self, policy: KVPolicy, may_refuse_to_abort: bool) -> None:
        super().__init__()
        self.policy: Any = policy
        self.may_refuse_to_abort = may_refuse_to_abort
        self.token_bytes = policy.layout.token_bytes
        self.idle, self.idle_bytes = policy.usage(), self.kv_bytes()
        self.running: list[KVSequence] = []
        self.parked: dict[int, KVSequence] = {}
        """The sequence whose history each session left, as it was at its end."""
        self.next_id = 0

    # -- what a server does ------------------------------------------------------------------------------------------

    @rule(
        session=SESSIONS,
        length=LENGTHS,
        shared=st.sampled_from([0, 5, 40]),
        goes_on=st.sampled_from([True, True, False]),
        chunk=st.sampled_from([3, 30, MAX_MODEL_LEN]),
        lookahead=st.sampled_from([0, 0, 2]),
    )
    def admit(self, session: int, length: int, shared: int, goes_on: bool, chunk: int, lookahead: int) -> None:
        """A turn that goes on with its session's history, or has its first *shared* tokens in common with others."""
        if any(s.session == session for s in self.running):
            return
        s = self.newcomer(session, length, min(length, shared))
        history = self.parked.get(session)
        if goes_on and history is not None and history.num_computed_tokens + length < MAX_MODEL_LEN:
            s = self.next_turn(history, length)
        hit = self.policy.lookup(s)
        assert 0 <= hit < s.num_tokens
        assert hit <= (history.num_computed_tokens if history else 0)
        if goes_on and history is not None and s.num_tokens > length:
            assert hit == history.num_computed_tokens, "the whole history, whatever was dropped of it"
        new = min(chunk, s.num_tokens - hit)
        answer = self.policy.reserve(
            s, new, hit=hit, lookahead=lookahead, admitting=True, others_running=bool(self.running)
        )
        if isinstance(answer, Refused):
            assert answer.need_bytes > answer.free_bytes
            assert answer.reason
            self.policy.abort_step()
            self.forget_lost_histories()
            return
        assert answer == Granted(hit)
        self.parked.pop(session, None)
        s.num_computed_tokens = hit
        self.running.append(s)
        if not self.carried_out([(s, new)]) and s in self.running:
            self.running.remove(s)
            if hit and history is not None:
                self.parked[session] = history

    @precondition(lambda self: self.running)
    @rule(
        times=st.sampled_from([1, 4, 16]), chunk=st.sampled_from([1, 30]), taken=st.sampled_from([0, 0, 0, 4 * LITTLE])
    )
    def steps(self, times: int, chunk: int, taken: int) -> None:
        """All that run go on by a token or by a chunk of their prompt; others may take memory in between."""
        for _ in range(times):
            if self.running:
                self.step(chunk, taken)

    def step(self, chunk: int, taken: int) -> None:
        plan: Plan = []
        while len(plan) < len(self.running):
            s = self.running[len(plan)]
            new = min(chunk, s.num_tokens - s.num_computed_tokens)
            if s.num_tokens >= MAX_MODEL_LEN:
                self.release(s, Release.FINISH)
            elif isinstance(self.policy.reserve(s, new, others_running=True), Granted):
                plan.append((s, new))
            else:
                self.release(self.running[-1], Release.PREEMPT)
        self.carried_out(plan, taken)

    @precondition(lambda self: self.running)
    @rule(limit=st.integers(0, 40))
    def leap(self, limit: int) -> None:
        """So many further steps at once of all that decode, beside a copy that takes them one by one."""
        decoding = [s for s in self.running if s.num_computed_tokens + 1 == s.num_tokens]
        limit = min([limit, *(MAX_MODEL_LEN - s.num_tokens for s in decoding)])
        k = self.policy.horizon(decoding, limit)
        assert 0 <= k <= limit
        twin, in_steps = copy.deepcopy((self.policy, decoding))
        operations: list[str] = []
        for policy in (self.policy, twin):
            policy.arena.observer = lambda op, *rest: operations.append(op)
        self.policy.advance(decoding, k)
        for s in decoding:
            s.num_computed_tokens += k
            s.num_tokens += k
        for _ in range(k):
            for s in in_steps:
                assert isinstance(twin.reserve(s, 1, others_running=len(in_steps) > 1), Granted)
            self.grow(twin, self.policy.layout.num_layers)
            twin.end_step()
            for s in in_steps:
                s.num_computed_tokens += 1
                s.num_tokens += 1
        self.policy.arena.observer = None
        assert operations == [], "certain to succeed without asking the arena"
        assert self.policy.usage() == twin.usage()
        assert list(self.policy.walk()) == list(twin.walk())
        assert [self.policy.block_ids(s) for s in decoding] == [twin.block_ids(s) for s in in_steps]
        assert self.policy.horizon(decoding, 50) == twin.horizon(in_steps, 50)

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), why=st.sampled_from([*Release, Release.PARK, Release.PARK]))
    def end(self, index: int, why: Release) -> None:
        self.release(self.running[index % len(self.running)], why)

    @rule(session=SESSIONS)
    def end_session(self, session: int) -> None:
        if all(s.session != session for s in self.running):
            self.policy.release(self.newcomer(session, 1, 1), Release.DROP)
            self.parked.pop(session, None)

    @rule(
        layers=st.integers(0, 5),
        length=LENGTHS,
        session=SESSIONS,
        chunk=st.sampled_from([3, MAX_MODEL_LEN]),
    )
    def abort(self, layers: int, length: int, session: int, chunk: int) -> None:
        """Plan a step with a newcomer, who may adopt a history; carry out a part of it, and take it back."""
        before = self.seen()
        for s in self.running:
            if s.num_tokens < MAX_MODEL_LEN:
                self.policy.reserve(s, min(chunk, s.num_tokens - s.num_computed_tokens))
        history = self.parked.get(session)
        late = self.next_turn(history, 8) if history is not None else self.newcomer(99, length, 0)
        hit = self.policy.lookup(late)
        self.policy.reserve(late, min(chunk, late.num_tokens - hit), hit=hit, admitting=True)
        if history is not None and not hit:
            self.parked.pop(session)  # one token is no use to a turn of two, and it is gone by then
        try:
            self.grow(self.policy, layers)
        except OutOfMemory:
            self.policy.check()
        if self.took_back([*self.running, late]):
            self.same_but_for_cached_memory(before)

    # -- what holds after each of them -------------------------------------------------------------------------------

    @invariant()
    def the_books_close(self) -> None:
        self.policy.check()
        self.policy.arena.check()
        usage = self.policy.usage()
        kept, dropped = self.kept(self.running)
        assert (usage.token, usage.dropped) == (kept, dropped)
        assert usage.parked == self.kept(self.parked.values())[0]
        assert usage.parked_sessions == len(self.parked)
        assert min(usage) >= 0
        assert usage.unfilled >= 0
        assert usage.growth_copy == 0
        assert self.kv_bytes() == usage.held + usage.growth_copy + usage.cached + usage.pool

    @invariant()
    def the_walk_agrees(self) -> None:
        usage, blocks = self.policy.usage(), list(self.policy.walk())
        assert sum(block.size for block in blocks) == self.kv_bytes()
        assert sum(block.size for block in blocks if block.state in ("running", "parked")) == usage.held
        for s in self.running:
            tokens = sum(block.token_bytes for block in blocks if (block.owner, block.state) == (s.id, "running"))
            assert tokens == self.policy.kept(s.num_computed_tokens) * self.token_bytes
        ids = [block for s in self.running for block in self.policy.block_ids(s)]
        assert len(ids) == len(set(ids)), "no block has two owners"

    def teardown(self) -> None:
        for s in list(self.running):
            self.release(s, Release.FINISH)
        for session in list(self.parked):
            self.end_session(session)
        left = self.policy.usage()
        assert left._replace(pool=self.idle.pool) == self.idle
        assert self.kv_bytes() - self.idle_bytes == left.pool - self.idle.pool

    # -- the same for all --------------------------------------------------------------------------------------------

    def kv_bytes(self) -> int:
        return self.policy.arena.usage().requested_by_tag[Tag.KV]

    def kept(self, sequences: Iterable[KVSequence]) -> tuple[int, int]:
        """Bytes of the computed tokens that are held, and of those that were dropped."""
        computed = [s.num_computed_tokens for s in sequences]
        held = sum(map(self.policy.kept, computed))
        return held * self.token_bytes, (sum(computed) - held) * self.token_bytes

    def newcomer(self, session: int, length: int, shared: int) -> KVSequence:
        spans = ((f"session {session}", 0, shared), (f"turn {self.next_id}", 0, MAX_MODEL_LEN - shared))
        self.next_id += 1
        return KVSequence(self.next_id, session, 0, length, MAX_MODEL_LEN, spans=spans)

    def next_turn(self, history: KVSequence, length: int) -> KVSequence:
        """One whose prompt is all that *history* has computed, and *length* tokens more."""
        self.next_id += 1
        tokens = history.num_computed_tokens + length
        return KVSequence(self.next_id, history.session, 0, tokens, MAX_MODEL_LEN, spans=history.spans)

    def grow(self, policy: Any, layers: int) -> None:
        for layer in range(min(layers, policy.layout.num_layers)):
            policy.grow_layer(layer)

    def carried_out(self, plan: Plan, taken: int = 0) -> bool:
        """Whether memory carried the plan while other processes had *taken* so many bytes of the device."""
        self.policy.arena.driver.set_tenants(taken)
        try:
            self.grow(self.policy, self.policy.layout.num_layers)
        except OutOfMemory as error:
            self.judge(error.facts, plan)
            self.took_back(self.running)
            return False
        finally:
            self.policy.arena.driver.set_tenants(0)
        self.policy.end_step()
        for s, new in plan:
            s.num_computed_tokens += new
            s.num_tokens += s.num_computed_tokens == s.num_tokens
        self.forget_lost_histories()
        return True

    def judge(self, facts: OomFacts, plan: Plan) -> None:
        self.policy.check()
        assert facts.owner in {s.id for s, _ in plan}
        assert facts.owner_bytes == sum(b.size for b in self.policy.walk() if b.owner == facts.owner)
        assert min(facts.growth_copy_bytes, facts.unfilled_bytes, facts.parked_bytes) >= 0
        assert facts.growth_copy_bytes + facts.unfilled_bytes + facts.parked_bytes <= self.kv_bytes()

    def took_back(self, sequences: list[KVSequence]) -> bool:
        """Abort the step; where a concatenation has begun, drop all that ran instead, as a dying process does."""
        try:
            self.policy.abort_step()
        except RuntimeError:
            assert self.may_refuse_to_abort
            for s in sequences:
                self.policy.check()
                self.policy.release(s, Release.DROP)
                self.parked.pop(s.session, None)
            self.policy.end_step()
            self.running = []
            self.forget_lost_histories()
            return False
        self.forget_lost_histories()
        return True

    def seen(self) -> tuple[Any, ...]:
        """What an aborted step leaves as it was."""
        tokens = {s.id: 0 for s in self.running}
        for block in self.policy.walk():
            if block.owner in tokens and block.state == "running":
                tokens[block.owner] += block.token_bytes
        return self.policy.usage(), tokens, [self.policy.block_ids(s) for s in self.running]

    def same_but_for_cached_memory(self, before: tuple[Any, ...]) -> None:
        """To make room, a policy may have given up pages that nobody needs, and parked histories."""
        after = self.seen()
        assert after[1:] == before[1:]
        assert after[0]._replace(held=0, pool=0, parked=0, parked_sessions=0) == before[0]._replace(
            held=0, pool=0, parked=0, parked_sessions=0
        )
        for name in ("held", "parked", "parked_sessions"):
            assert getattr(after[0], name) <= getattr(before[0], name)
        assert after[0].held + after[0].pool <= before[0].held + before[0].pool

    def forget_lost_histories(self) -> None:
        """Where memory was short, a policy may have dropped parked histories: those that it finds no longer."""
        for session, history in list(self.parked.items()):
            found = self.policy.lookup(self.next_turn(history, 1))
            assert found in (0, history.num_computed_tokens), "all of it or nothing"
            if not found:
                del self.parked[session]

    def release(self, s: KVSequence, why: Release) -> None:
        self.running.remove(s)
        self.policy.release(s, why)
        if why in (Release.FINISH, Release.DROP):
            self.parked.pop(s.session, None)
        elif why is Release.PARK and "park" in self.policy.offers:
            self.parked.pop(s.session, None)
            self.parked[s.session] = s


def drive(make: Callable[[], KVPolicy], may_refuse_to_abort: bool, examples: int, **more: Any) -> None:
    run_state_machine_as_test(
        lambda: Traffic(make(), may_refuse_to_abort),
        settings=settings(
            max_examples=examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


def test_whatever_a_server_does(kv_setup: Any, kv_setups: list[Any]) -> None:
    siblings = sum(setup.policy == kv_setup.policy for setup in kv_setups)
    drive(lambda: kv_setup.make(LITTLE), kv_setup.may_refuse_to_abort, examples=max(12, 150 // siblings))


# Planted bugs, all of them with a check of their own that says nothing


class LeaksAHistory(ContiguousPolicy):
    """A next turn without a hit forgets the parked buffers instead of freeing them."""

    def reserve(self, s: KVSequence, new: int, *, hit: int = 0, **more: int) -> Granted | Refused:
        if s.session in self._histories and not hit:
            self._histories.unpark(s.session)
        return super().reserve(s, new, hit=hit, **more)


class KeepsOldCopies(ContiguousPolicy):
    """The last old copy of a step outlives it."""

    def end_step(self) -> None:
        del self._store._old[-1:]
        super().end_step()


class AbortsWithoutTheBooks(ContiguousPolicy):
    """An aborted step leaves its tokens counted."""

    def abort_step(self) -> None:
        tokens = self._store.filled_tokens
        super().abort_step()
        self._store.filled_tokens = tokens


class ForgetsHalfAConcatenation(ContiguousPolicy):
    """K was replaced, V was not: the books miss K."""

    class Store(BufferStore):
        def _regrown(self, buffers: Buffers, first: int, handles: Sequence[int], added_bytes: int) -> None:
            super()._regrown(buffers, first, handles, added_bytes)
            if len(handles) == 1:
                self.held_bytes -= added_bytes

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: ContiguousConfig) -> None:
        super().__init__(layout, arena, config)
        self._store = self.Store(layout, arena, config.tensors, config.copy_scope)


class SaysThatItKeepsAll(ContiguousPolicy):
    """Retention drops tokens, and ``kept`` denies it."""

    def kept(self, tokens: int) -> int:
        return tokens


class ForgetsWhatItDropped(ContiguousPolicy):
    """What retention drops is not counted."""

    def usage(self) -> Any:
        return super().usage()._replace(dropped=0)


class LosesABlock(PagedPolicy):
    """A freed sequence that ends on a block boundary loses its last block."""

    def release(self, s: KVSequence, why: Release) -> None:
        table = self._tables.get(s.id)
        if table and table.tokens % self.config.block_size == 0:
            table.blocks.pop()
        super().release(s, why)


class LeaksABlockOnAbort(PagedPolicy):
    """An aborted step keeps the last of the blocks that it had taken."""

    def abort_step(self) -> None:
        free = len(self._free)
        super().abort_step()
        if len(self._free) > free:
            self._free.popleft()


class SharesABlock(PagedPolicy):
    """A leap gives the same block to two sequences."""

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        head = self._free[0] if self._free else None
        super().advance(decoding, k)
        if head is not None and len(self._tables) > 1 and (not self._free or self._free[0] != head):
            self._free.appendleft(head)


class LeapsInTheWrongOrder(PagedPolicy):
    """A leap hands blocks out sequence by sequence, not step by step."""

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        for s in decoding:
            super().advance([s], k)


class PromisesOneStepTooMany(VirtualPolicy):
    """The horizon reaches past the last page."""

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        return min(limit, super().horizon(decoding, limit) + 1)


class LeavesPagesMapped(VirtualPolicy):
    """What an aborted step had mapped stays with its sequences."""

    def abort_step(self) -> None:
        self._store._fresh.clear()
        super().abort_step()


@pytest.mark.parametrize(
    ("bug", "options"),
    [
        (LeaksAHistory, {"growth": "exact", "copy_scope": "step"}),
        (KeepsOldCopies, {"growth": "exact", "copy_scope": "step"}),
        (AbortsWithoutTheBooks, {"growth": "static"}),
        # Memory must end between K and V, so there is little of it.
        (ForgetsHalfAConcatenation, {"growth": "exact", "memory_bytes": LITTLE // 4}),
        (SaysThatItKeepsAll, {"growth": "doubling", "retention": "truncate(40)"}),
        (ForgetsWhatItDropped, {"growth": "exact", "retention": "sliding_window(40)"}),
        (LosesABlock, {}),
        (LeaksABlockOnAbort, {}),
        (SharesABlock, {"block_size": 4}),
        (LeapsInTheWrongOrder, {"block_size": 4}),
        (PromisesOneStepTooMany, {}),
        (LeavesPagesMapped, {}),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_planted_bug_is_noticed(bug: type[KVPolicy], options: dict[str, Any], kv_setup_of: Any) -> None:
    class Hidden(bug):
        def check(self) -> None:
            pass

    memory_bytes = options.get("memory_bytes", LITTLE)
    given = {name: value for name, value in options.items() if name != "memory_bytes"}
    setup = kv_setup_of(bug.name, "direct" if bug.name == "virtual" else "pooled", "k and v", given)
    may_refuse = bug.name == "contiguous" and given.get("copy_scope", "tensor") == "tensor"
    with pytest.raises(AssertionError):
        drive(
            lambda: setup.make(memory_bytes, Hidden),
            may_refuse,
            examples=300,
            phases=[Phase.generate],
            database=None,
            derandomize=True,
        )
