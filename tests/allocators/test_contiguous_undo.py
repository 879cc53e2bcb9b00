"""A step that a server takes back (``memory.oom`` = reject or preempt): memory is as it was before it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.contiguous_config import ContiguousConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVDtype, KVLayout, KVSequence, KVUsage, Release, Span, Work

TINY = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256)
"""512 bytes a token and tensor, 2,048 bytes a token."""
UNEVEN = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256, dtype=KVDtype(8, "token"), v_dtype=KVDtype(16))
"""K 256 bytes a token, V 512, the scale of K 4."""
TOKEN = 2048


def policy_of(
    cls: type[ContiguousPolicy] = ContiguousPolicy,
    layout: KVLayout = TINY,
    region_bytes: int = 1 << 26,
    **settings: Any,
) -> ContiguousPolicy:
    arena = PooledAllocator(HbmDriver(1 << 27), PooledConfig(limit_bytes=region_bytes))
    arena.take_work()
    return cls(layout, arena, ContiguousConfig(**{"max_model_len": 256} | settings))


def sequence(id: int, *spans: Span, session: int | None = None) -> KVSequence:
    tokens = sum(length for _, _, length in spans)
    return KVSequence(id, id if session is None else session, 0, num_tokens=tokens, max_tokens=256, spans=spans)


def reserve(policy: ContiguousPolicy, s: KVSequence, most: int = 1000) -> None:
    """Plan what the sequence lacks, at most so many tokens; a newcomer goes on from what it finds."""
    admitting = s.num_computed_tokens == 0
    hit = policy.lookup(s) if admitting else 0
    new = min(most, s.num_tokens - s.num_computed_tokens - hit)
    assert policy.reserve(s, new, hit=hit, admitting=admitting) == Granted(hit)


def grow(policy: ContiguousPolicy, layers: int | None = None) -> None:
    for layer in range(policy.layout.num_layers if layers is None else layers):
        policy.grow_layer(layer)


def step(policy: ContiguousPolicy, *sequences: KVSequence) -> None:
    for s in sequences:
        reserve(policy, s)
    grow(policy)
    policy.end_step()
    for s in sequences:
        s.num_computed_tokens = s.num_tokens
        s.num_tokens += 1
    policy.check()


def parked(policy: ContiguousPolicy, s: KVSequence) -> None:
    step(policy, s)
    policy.release(s, Release.PARK)


def state(policy: ContiguousPolicy) -> tuple[object, ...]:
    """All that an aborted step must leave as it was."""
    return policy.usage(), list(policy.walk()), sorted(policy.parked_sessions()), policy.arena.usage()


def test_a_server_may_park_reject_and_preempt() -> None:
    assert ContiguousPolicy.offers == {"one_piece", "park", "reject", "preempt"}


# Drops


def test_tensors_that_were_made_anew_for_a_drop_are_given_back() -> None:
    policy, s = policy_of(retention="forget(8, 3)", copy_scope="step"), sequence(1, ("a", 0, 8))
    step(policy, s)
    before = state(policy)
    reserve(policy, s)
    grow(policy)
    assert policy.usage() == KVUsage(6 * TOKEN, 0, 6 * TOKEN, 8 * TOKEN, 0, 0, 0, dropped=3 * TOKEN)
    policy.abort_step()
    assert state(policy) == before
    assert policy.take_work() == Work(copied_bytes=5 * TOKEN)
    step(policy, s)
    assert policy.usage() == KVUsage(6 * TOKEN, 0, 6 * TOKEN, 0, 0, 0, 0, dropped=3 * TOKEN)


@pytest.mark.parametrize("copy_scope", ["tensor", "step"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_move_in_place_is_taken_back_in_the_books_and_stays_counted_as_work(copy_scope: str, layers: int) -> None:
    policy = policy_of(retention="truncate(10)", growth="static", copy_scope=copy_scope)
    s = sequence(1, ("a", 0, 10))
    step(policy, s)
    before = state(policy)
    reserve(policy, s)
    grow(policy, layers)
    policy.abort_step()
    assert state(policy) == before
    assert policy.take_work() == Work(copied_bytes=layers * 9 * TOKEN // 2)
    step(policy, s)
    assert policy.take_work() == Work(copied_bytes=9 * TOKEN)


def test_a_concatenation_that_has_begun_to_drop_cannot_be_taken_back() -> None:
    policy, s = policy_of(retention="truncate(10)"), sequence(1, ("a", 0, 10))
    step(policy, s)
    reserve(policy, s)
    grow(policy, 1)
    before = state(policy)
    with pytest.raises(RuntimeError, match=r'only memory\.oom = "stop" is legal'):
        policy.abort_step()
    assert state(policy) == before
    policy.check()


def test_a_full_ring_that_was_written_over_counts_as_before() -> None:
    policy, s = policy_of(retention="sliding_window(10)", growth="static"), sequence(1, ("a", 0, 15))
    step(policy, s)
    before = state(policy)
    reserve(policy, s)
    assert policy.usage().dropped == 6 * TOKEN
    policy.abort_step()
    assert state(policy) == before
    assert policy.usage().dropped == 5 * TOKEN


# Newcomers and histories


@pytest.mark.parametrize("growth", ["static", "exact", "doubling", "step", "hybrid"])
def test_newcomers_alone_can_be_taken_back_under_any_growth_and_copy_scope(growth: str) -> None:
    policy = policy_of(growth=growth)
    before = state(policy)
    for id in (1, 2):
        reserve(policy, sequence(id, ("a", 0, 100)))
    grow(policy, 1)
    policy.abort_step()
    assert state(policy) == before


@pytest.mark.parametrize("retention", ["full", "truncate(40)", "sliding_window(40)"])
def test_an_adopted_history_is_parked_again_as_it_was(retention: str) -> None:
    policy = policy_of(retention=retention, copy_scope="step")
    parked(policy, sequence(1, ("a", 0, 60), session=5))
    before = state(policy)
    following = sequence(2, ("a", 0, 60), ("b", 0, 30), session=5)
    reserve(policy, following)
    grow(policy)
    assert policy.usage().parked == 0
    policy.abort_step()
    assert state(policy) == before
    assert policy.lookup(following) == 60
    step(policy, following)


def test_a_history_that_was_of_no_use_is_gone_and_will_not_be_missed() -> None:
    policy = policy_of(copy_scope="step")
    parked(policy, sequence(1, ("a", 0, 60), session=5))
    other = sequence(2, ("b", 0, 30), session=5)
    reserve(policy, other)
    policy.abort_step()
    assert not any(policy.usage())
    assert policy.lookup(other) == 0
    step(policy, other)


# Preempted sequences


@pytest.mark.parametrize("retention", ["full", "truncate(40)", "forget(40, 7)", "sink_recent(4, 36)"])
def test_a_preempted_sequence_leaves_nothing_and_computes_all_again(retention: str) -> None:
    policy = policy_of(retention=retention, copy_scope="step")
    parked(policy, sequence(1, ("a", 0, 60), session=5))
    s = sequence(2, ("a", 0, 60), ("b", 0, 30), session=5)
    step(policy, s)
    held = policy.usage()
    policy.release(s, Release.PREEMPT)
    assert not any(policy.usage())
    policy.check()
    s.num_computed_tokens, s.num_tokens = 0, 90
    assert policy.lookup(s) == 0
    step(policy, s)
    assert policy.usage() == held


def test_preempting_one_that_never_ran_leaves_the_history_of_its_session() -> None:
    policy = policy_of(copy_scope="step")
    parked(policy, sequence(1, ("a", 0, 60), session=5))
    waiting = sequence(2, ("a", 0, 60), ("b", 0, 30), session=5)
    policy.release(waiting, Release.PREEMPT)
    assert policy.lookup(waiting) == 60


def test_one_admitted_in_the_failed_step_keeps_its_history_when_another_is_preempted() -> None:
    # What a server does when memory ends: take the step back, preempt one that ran before, and plan again.
    policy = policy_of(region_bytes=270 * TOKEN, growth="exact", copy_scope="step")
    parked(policy, sequence(1, ("a", 0, 60), session=5))
    running = sequence(2, ("c", 0, 100))
    step(policy, running)
    following = sequence(3, ("a", 0, 60), ("b", 0, 10), session=5)
    reserve(policy, running)
    reserve(policy, following)
    with pytest.raises(OutOfMemory):
        grow(policy)
    policy.check()
    policy.abort_step()
    policy.release(running, Release.PREEMPT)
    assert policy.lookup(following) == 60
    step(policy, following)
    assert policy.usage() == KVUsage(70 * TOKEN, 0, 70 * TOKEN, 0, 0, 0, 0)


# Any step

RETENTIONS = st.one_of(
    st.just("full"),
    st.integers(5, 60).map("truncate({})".format),
    st.tuples(st.integers(5, 60), st.integers(1, 5)).map(lambda pair: f"forget({pair[0]}, {pair[1]})"),
    st.integers(5, 60).map("sliding_window({})".format),
    st.integers(5, 50).map("sink_recent(4, {})".format),
)
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "retention": RETENTIONS,
        "growth": st.sampled_from(["static", "exact", "doubling", "step", "hybrid"]),
        "tensors": st.sampled_from(["per_layer", "merged"]),
        "copy_scope": st.just("step"),
        "initial_tokens": st.just(8),
        "step_tokens": st.just(10),
    }
)
STEPS = st.tuples(
    st.lists(st.integers(1, 80), min_size=1, max_size=3),  # prompts of those that run
    st.integers(0, 30),  # tokens that each decodes before
    st.integers(1, 80),  # a history, and how much of it the next turn goes on from
    st.integers(0, 80),
    st.integers(1, 60),  # the next turn's own prompt
    st.integers(0, 2),  # layers that grow before the step is taken back
)


def assert_an_undone_step_leaves_no_trace(
    cls: type[ContiguousPolicy], layout: KVLayout, settings: Any, drawn: Any
) -> None:
    prompts, decoded, history, common, prompt, layers = drawn
    policy = policy_of(cls, layout, **settings)
    parked(policy, sequence(90, ("h", 0, history), session=9))
    running = [sequence(id, (f"s{id}", 0, tokens)) for id, tokens in enumerate(prompts)]
    for _ in range(1 + decoded):
        step(policy, *running)
    usable = policy.lookup(sequence(91, ("h", 0, min(common, history)), ("n", 0, prompt), session=9))
    before = state(policy)
    horizon = policy.horizon(running, 100)
    for s in running:
        reserve(policy, s)
    reserve(policy, sequence(91, ("h", 0, min(common, history)), ("n", 0, prompt), session=9))
    reserve(policy, sequence(92, ("m", 0, prompt)))
    grow(policy, layers)
    policy.check()
    policy.abort_step()
    policy.check()
    if usable:
        assert state(policy) == before
    else:  # the history was of no use, and was freed
        running_only = [block for block in before[1] if block.state == "running"]
        assert list(policy.walk()) == running_only
        assert policy.usage() == before[0]._replace(
            parked=0, parked_sessions=0, held=sum(block.size for block in running_only)
        )
    assert policy.horizon(running, 100) == horizon
    step(policy, *running)


@given(layout=st.sampled_from([TINY, UNEVEN]), settings=CONFIGURATIONS, drawn=STEPS)
def test_an_undone_step_leaves_no_trace(layout: KVLayout, settings: Any, drawn: Any) -> None:
    assert_an_undone_step_leaves_no_trace(ContiguousPolicy, layout, settings, drawn)


class ForgetsWhatWasDropped(ContiguousPolicy):
    """Takes back tokens and buffers, and not what was dropped."""

    def abort_step(self) -> None:
        dropped = {buffers: buffers.dropped for buffers in self._running.values()}
        super().abort_step()
        for buffers in self._running.values():
            self._store.fill(buffers, buffers.filled, dropped[buffers])


class KeepsTheNewOwner(ContiguousPolicy):
    """A history that is parked again belongs to the turn that did not come about."""

    def abort_step(self) -> None:
        owners = {history.buffers: id for id, (_, history) in self._admitted.items() if history is not None}
        super().abort_step()
        for buffers, owner in owners.items():
            buffers.owner = owner


class KeepsTheNewSize(ContiguousPolicy):
    """Gives back the buffers of newcomers, and lets the others have what the step made for them."""

    def abort_step(self) -> None:
        if not self._store._queue:
            self._store._old.clear()
        super().abort_step()


@pytest.mark.parametrize("broken", [ForgetsWhatWasDropped, KeepsTheNewOwner, KeepsTheNewSize])
def test_an_undone_step_that_leaves_a_trace_is_noticed(broken: type[ContiguousPolicy]) -> None:
    settings = {"retention": "truncate(40)", "growth": "exact", "copy_scope": "step"}
    drawn = ([45], 3, 30, 30, 20, 2)
    assert_an_undone_step_leaves_no_trace(ContiguousPolicy, TINY, settings, drawn)
    with pytest.raises(AssertionError):
        assert_an_undone_step_leaves_no_trace(broken, TINY, settings, drawn)
