"""KV policies under random traffic with little memory: Hypothesis plays scheduler, ``check`` is the judge.

Beside the policy runs the simplest model there is: tokens per running sequence and per parked session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.buffers import Buffers, BufferStore
from hbmtwin.allocators.caching.allocator import CachingAllocator, CachingConfig
from hbmtwin.allocators.contiguous import ContiguousConfig, ContiguousPolicy
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Tag

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=1024)
"""2 KiB a token and tensor, 8 KiB a token."""
KV_BYTES = 2 << 20
"""256 tokens: less than three of the longest sequences."""
MAX_MODEL_LEN = 96
LENGTHS = st.integers(1, MAX_MODEL_LEN - 8)


def contiguous(
    cls: type[ContiguousPolicy] = ContiguousPolicy, kv_bytes: int = KV_BYTES, **options: str
) -> ContiguousPolicy:
    arena = PooledAllocator(HbmDriver(kv_bytes), PooledConfig(limit_bytes=kv_bytes))
    return cls(LAYOUT, arena, ContiguousConfig(max_model_len=MAX_MODEL_LEN, initial_tokens=16, **options))


def contiguous_over_caching(**options: str) -> ContiguousPolicy:
    arena = CachingAllocator(HbmDriver(2 * KV_BYTES), CachingConfig(limit_bytes=KV_BYTES))
    return ContiguousPolicy(LAYOUT, arena, ContiguousConfig(max_model_len=MAX_MODEL_LEN, **options))


def paged(cls: type[PagedPolicy] = PagedPolicy, **options: float) -> PagedPolicy:
    arena = PooledAllocator(HbmDriver(KV_BYTES), PooledConfig(limit_bytes=KV_BYTES))
    return cls(LAYOUT, arena, PagedConfig(max_model_len=MAX_MODEL_LEN, **options))


class Traffic(RuleBasedStateMachine):
    """What a scheduler and an engine may do to any policy; one policy a run."""

    def __init__(self, policy: ContiguousPolicy | PagedPolicy) -> None:
        super().__init__()
        self.policy = policy
        self.running: list[KVSequence] = []
        self.parked: dict[int, int] = {}
        self.next_id = 0

    @rule(
        session=st.integers(0, 3),
        length=LENGTHS,
        shared=st.sampled_from([0, 5, 40]),
        lookahead=st.sampled_from([0, 0, 2]),
    )
    def admit(self, session: int, length: int, shared: int, lookahead: int) -> None:
        """A turn that has its first *shared* tokens in common with the other turns of its session."""
        if any(s.session == session for s in self.running):
            return
        s = self.newcomer(session, length, min(length, shared))
        hit = self.policy.lookup(s)
        assert hit <= min(length - 1, self.parked.get(session, 0))
        answer = self.policy.reserve(
            s, length - hit, hit=hit, lookahead=lookahead, admitting=True, others_running=bool(self.running)
        )
        if isinstance(answer, Refused):
            assert answer.need_bytes > answer.free_bytes
            return
        history = self.parked.pop(session, 0)
        s.num_computed_tokens = hit
        self.running.append(s)
        if not self.carried_out([(s, length - hit)]) and s in self.running:
            self.running.remove(s)
            if hit:
                self.parked[session] = history

    @precondition(lambda self: self.running)
    @rule()
    def decode(self) -> None:
        plan: list[tuple[KVSequence, int]] = []
        while len(plan) < len(self.running):
            s = self.running[len(plan)]
            if s.num_tokens >= MAX_MODEL_LEN:
                self.release(s, Release.FINISH)
            elif isinstance(self.policy.reserve(s, 1, others_running=True), Granted):
                plan.append((s, 1))
            else:
                self.release(self.running[-1], Release.PREEMPT)
        self.carried_out(plan)

    @precondition(lambda self: self.running)
    @rule(limit=st.integers(0, 40))
    def leap(self, limit: int) -> None:
        limit = min(limit, MAX_MODEL_LEN - max(s.num_tokens for s in self.running))
        if limit < 0:
            return
        k = self.policy.horizon(self.running, limit)
        operations: list[str] = []
        self.policy.arena.observer = lambda op, *rest: operations.append(op)
        self.policy.advance(self.running, k)
        self.policy.arena.observer = None
        assert operations == []
        for s in self.running:
            s.num_computed_tokens += k
            s.num_tokens += k

    @precondition(lambda self: self.running)
    @rule(index=st.integers(0, 9), why=st.sampled_from(Release))
    def end(self, index: int, why: Release) -> None:
        self.release(self.running[index % len(self.running)], why)

    @rule(session=st.integers(0, 3))
    def end_session(self, session: int) -> None:
        if all(s.session != session for s in self.running):
            self.policy.release(self.newcomer(session, 1, 1), Release.DROP)
            self.parked.pop(session, None)

    @rule(layers=st.integers(0, LAYOUT.num_layers), length=LENGTHS)
    def abort(self, layers: int, length: int) -> None:
        """Plan a step with a newcomer, carry out a part of it, take it back."""
        before = (self.policy.usage(), list(self.policy.walk()))
        for s in self.running:
            if s.num_tokens < MAX_MODEL_LEN:
                self.policy.reserve(s, 1)
        late = self.newcomer(99, length, 0)
        self.policy.reserve(late, length, admitting=True)
        try:
            for layer in range(layers):
                self.policy.grow_layer(layer)
        except OutOfMemory:
            self.policy.check()
        if self.took_back([*self.running, late]):
            assert (self.policy.usage(), list(self.policy.walk())) == before

    @invariant()
    def the_books_close(self) -> None:
        self.policy.check()
        self.policy.arena.check()
        usage = self.policy.usage()
        assert usage.token == sum(s.num_computed_tokens for s in self.running) * LAYOUT.token_bytes
        assert usage.parked == sum(self.parked.values()) * LAYOUT.token_bytes
        assert min(usage) >= 0
        assert usage.unfilled >= 0
        assert usage.parked_sessions == len(self.parked)
        in_arena = self.policy.arena.usage().requested_by_tag[Tag.KV]
        assert in_arena == usage.held + usage.growth_copy + usage.cached + usage.pool
        assert usage.growth_copy == 0

    def teardown(self) -> None:
        for s in list(self.running):
            self.release(s, Release.FINISH)
        for session in list(self.parked):
            self.end_session(session)
        assert not any(self.policy.usage()._replace(pool=0))

    def newcomer(self, session: int, length: int, shared: int) -> KVSequence:
        spans = ((f"session {session}", 0, shared), (f"turn {self.next_id}", 0, length - shared))
        self.next_id += 1
        return KVSequence(self.next_id, session, 0, length, MAX_MODEL_LEN, spans=spans)

    def carried_out(self, plan: list[tuple[KVSequence, int]]) -> bool:
        try:
            for layer in range(LAYOUT.num_layers):
                self.policy.grow_layer(layer)
        except OutOfMemory as error:
            self.judge(error.facts, plan)
            self.took_back(self.running)
            return False
        self.policy.end_step()
        for s, new in plan:
            s.num_computed_tokens += new
            s.num_tokens += 1
        return True

    def judge(self, facts: OomFacts, plan: list[tuple[KVSequence, int]]) -> None:
        self.policy.check()
        assert facts.owner in {s.id for s, _ in plan}
        assert facts.owner_bytes == sum(b.size for b in self.policy.walk() if b.owner == facts.owner)
        assert min(facts.growth_copy_bytes, facts.unfilled_bytes, facts.parked_bytes) >= 0

    def took_back(self, sequences: list[KVSequence]) -> bool:
        """Abort the step; where a concatenation has begun, drop all that ran instead, as a dying process does."""
        try:
            self.policy.abort_step()
        except RuntimeError:
            for s in sequences:
                self.policy.check()
                self.policy.release(s, Release.DROP)
                self.parked.pop(s.session, None)
            self.policy.end_step()
            self.running = []
            return False
        return True

    def release(self, s: KVSequence, why: Release) -> None:
        self.running.remove(s)
        self.policy.release(s, why)
        if why in (Release.FINISH, Release.DROP):
            self.parked.pop(s.session, None)
        elif why is Release.PARK and self.policy.name == "contiguous":
            self.parked[s.session] = s.num_computed_tokens


def drive(make: Callable[[], ContiguousPolicy | PagedPolicy], examples: int = 30, **more: object) -> None:
    run_state_machine_as_test(
        lambda: Traffic(make()),
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            **more,
        ),
    )


@pytest.mark.parametrize("copy_scope", ["tensor", "step"])
@pytest.mark.parametrize("tensors", ["per_layer", "merged"])
@pytest.mark.parametrize("growth", ["static", "exact", "doubling"])
def test_contiguous(growth: str, tensors: str, copy_scope: str) -> None:
    drive(lambda: contiguous(growth=growth, tensors=tensors, copy_scope=copy_scope))


@pytest.mark.parametrize(("growth", "copy_scope"), [("exact", "tensor"), ("doubling", "step")])
def test_contiguous_over_a_caching_allocator(growth: str, copy_scope: str) -> None:
    drive(lambda: contiguous_over_caching(growth=growth, copy_scope=copy_scope))


@pytest.mark.parametrize(("num_blocks", "block_size", "watermark"), [(15, 16, 0.0), (100, 2, 0.1)])
def test_paged(num_blocks: int, block_size: int, watermark: float) -> None:
    drive(lambda: paged(num_blocks=num_blocks, block_size=block_size, watermark=watermark))


# Planted bugs


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


class LosesABlock(PagedPolicy):
    """A freed sequence that ends on a block boundary loses its last block."""

    def release(self, s: KVSequence, why: Release) -> None:
        table = self._tables.get(s.id)
        if table and table.tokens % self.config.block_size == 0:
            table.blocks.pop()
        super().release(s, why)


@pytest.mark.parametrize(
    "make",
    [
        lambda: contiguous(LeaksAHistory, growth="exact", copy_scope="step"),
        lambda: contiguous(KeepsOldCopies, growth="exact", copy_scope="step"),
        lambda: contiguous(AbortsWithoutTheBooks, growth="static"),
        # Memory must end between K and V, so there is little of it.
        lambda: contiguous(ForgetsHalfAConcatenation, kv_bytes=KV_BYTES // 8, growth="exact"),
        lambda: paged(LosesABlock, num_blocks=15, block_size=16),
    ],
    ids=[
        "leaks a history",
        "keeps old copies",
        "aborts without the books",
        "forgets half a concatenation",
        "loses a block",
    ],
)
def test_a_planted_bug_is_noticed(make: Callable[[], ContiguousPolicy | PagedPolicy]) -> None:
    with pytest.raises(AssertionError):
        drive(make, examples=300, phases=[Phase.generate], database=None, derandomize=True)
