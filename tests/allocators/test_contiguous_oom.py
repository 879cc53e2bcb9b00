"""Contiguous KV when memory ends: what has been done, what the record says, and what can be taken back."""

from __future__ import annotations

import pytest

from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.contiguous_config import ContiguousConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import Cause, OutOfMemory, classify
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVLayout, KVSequence, KVUsage, Release, Tag, Work

TINY = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256)
"""512 bytes a token and tensor, 2,048 bytes a token."""
TOKEN = 2048


def policy_of(region_bytes: int, **settings: object) -> ContiguousPolicy:
    arena = PooledAllocator(HbmDriver(64 << 20), PooledConfig(limit_bytes=region_bytes))
    arena.take_work()
    return ContiguousPolicy(TINY, arena, ContiguousConfig(**{"max_model_len": 4096} | settings))


def sequence(id: int, tokens: int, session: int | None = None) -> KVSequence:
    return KVSequence(
        id=id,
        session=id if session is None else session,
        turn=0,
        num_tokens=tokens,
        max_tokens=4096,
        spans=(("text", 0, tokens),),
    )


def reserve(policy: ContiguousPolicy, *sequences: KVSequence) -> None:
    for s in sequences:
        new = s.num_tokens - s.num_computed_tokens
        hit = policy.lookup(s) if s.num_computed_tokens == 0 else 0
        policy.reserve(s, new - hit, hit=hit, admitting=s.num_computed_tokens == 0)


def grow(policy: ContiguousPolicy) -> None:
    for layer in range(TINY.num_layers):
        policy.grow_layer(layer)


def step(policy: ContiguousPolicy, *sequences: KVSequence) -> None:
    reserve(policy, *sequences)
    grow(policy)
    policy.end_step()
    for s in sequences:
        s.num_computed_tokens = s.num_tokens
        s.num_tokens += 1


def state(policy: ContiguousPolicy) -> tuple[object, ...]:
    """All that an aborted step must leave as it was."""
    return (policy.usage(), list(policy.walk()), policy.parked_sessions(), policy.arena.usage())


# Out of memory in the middle of a growth


def test_a_concatenation_that_fails_at_its_second_tensor_closes_its_books() -> None:
    # Region: four tensors of 10 tokens and room for one of 11. K moves there; the hole it leaves is too small for V.
    policy = policy_of(4 * 5120 + 5632)
    s = sequence(1, 10)
    step(policy, s)
    reserve(policy, s)
    with pytest.raises(OutOfMemory) as caught:
        policy.grow_layer(0)
    policy.check()
    assert policy.usage() == KVUsage(10 * TOKEN, 0, 5632 + 3 * 5120, 0, 0, 0, 0)
    assert [(b.size, b.token_bytes) for b in policy.walk()] == [(5120, 5120)] * 3 + [(5632, 5120)]
    facts = caught.value.facts
    assert (facts.asked_bytes, facts.tag, facts.owner) == (5632, Tag.KV, 1)
    assert facts.owner_bytes == 5632 + 3 * 5120
    assert facts.growth_copy_bytes == 5120
    assert facts.unfilled_bytes == 512
    assert policy.arena.take_work().copied_bytes == 5120


def test_a_concatenation_that_fails_in_a_later_layer_closes_its_books() -> None:
    policy = policy_of(4 * 5120 + 2 * 5632)
    s = sequence(1, 10)
    step(policy, s)
    reserve(policy, s)
    policy.grow_layer(0)
    policy.arena.malloc(2 * 5120, tag=Tag.WORKSPACE)
    with pytest.raises(OutOfMemory):
        policy.grow_layer(1)
    policy.check()
    assert policy.usage() == KVUsage(10 * TOKEN, 0, 2 * 5632 + 2 * 5120, 0, 0, 0, 0)
    policy.release(s, Release.DROP)
    policy.check()
    assert policy.arena.usage().requested_by_tag[Tag.KV] == 0


def test_a_new_sequence_that_fails_in_the_middle_closes_its_books() -> None:
    policy = policy_of(3 * 5120)
    s = sequence(1, 10)
    reserve(policy, s)
    policy.grow_layer(0)
    with pytest.raises(OutOfMemory) as caught:
        policy.grow_layer(1)
    policy.check()
    assert policy.usage() == KVUsage(0, 0, 3 * 5120, 0, 0, 0, 0)
    assert (caught.value.facts.owner_bytes, caught.value.facts.growth_copy_bytes) == (3 * 5120, 0)


def test_doubling_dies_of_its_growth_copy() -> None:
    # Six units of 64 tokens: two buffers of two units, and two units free. The third jump asks for four.
    unit = 64 * TOKEN
    policy = policy_of(6 * unit, growth="doubling", tensors="merged", copy_scope="step")
    a, b = sequence(1, 128), sequence(2, 100)
    step(policy, a, b)
    reserve(policy, a, b)
    with pytest.raises(OutOfMemory) as caught:
        policy.grow_layer(0)
    facts = caught.value.facts
    assert facts.need_bytes == 4 * unit
    assert facts.free_bytes == 2 * unit
    assert facts.growth_copy_bytes == 2 * unit
    assert facts.unfilled_bytes == 27 * TOKEN
    assert classify(facts) is Cause.GROWTH_COPY
    policy.check()


def test_old_copies_of_others_and_the_buffer_to_be_replaced_are_both_growth_copy() -> None:
    unit = 64 * TOKEN
    policy = policy_of(5 * unit, growth="doubling", tensors="merged", copy_scope="step")
    a, b = sequence(1, 64), sequence(2, 64)
    step(policy, a, b)
    reserve(policy, a, b)
    with pytest.raises(OutOfMemory) as caught:
        policy.grow_layer(0)
    assert policy.usage().growth_copy == unit
    assert caught.value.facts.growth_copy_bytes == 2 * unit
    policy.check()


def test_the_record_names_the_sequence_that_asked_though_the_arena_knows_an_older_one() -> None:
    policy = policy_of(4 * 5120 + 5120)
    s = sequence(1, 10, session=5)
    step(policy, s)
    policy.release(s, Release.PARK)
    s = sequence(2, 40, session=5)
    reserve(policy, s)
    with pytest.raises(OutOfMemory) as caught:
        policy.grow_layer(0)
    assert caught.value.facts.owner == 2
    assert caught.value.facts.owner_bytes == 4 * 5120


# Taking a step back


def test_a_half_grown_concatenation_cannot_be_taken_back() -> None:
    policy = policy_of(4 * 5120 + 5632)
    s = sequence(1, 10)
    step(policy, s)
    reserve(policy, s)
    with pytest.raises(OutOfMemory):
        policy.grow_layer(0)
    before = state(policy)
    with pytest.raises(RuntimeError, match=r'only memory\.oom = "stop" is legal'):
        policy.abort_step()
    assert state(policy) == before


def test_a_concatenation_that_has_not_begun_can_be_taken_back() -> None:
    policy = policy_of(4 * 5120 + 512)
    s = sequence(1, 10)
    step(policy, s)
    before = state(policy)
    reserve(policy, s)
    with pytest.raises(OutOfMemory):
        policy.grow_layer(0)
    policy.abort_step()
    assert state(policy)[:3] == before[:3]
    policy.check()


@pytest.mark.parametrize("tensors", ["per_layer", "merged"])
@pytest.mark.parametrize("layers", [0, 1, 2])
def test_step_scope_takes_everything_back(tensors: str, layers: int) -> None:
    policy = policy_of(1 << 20, tensors=tensors, copy_scope="step")
    a, b, late = sequence(1, 10), sequence(2, 20), sequence(3, 30)
    step(policy, a, b)
    before = state(policy)
    reserve(policy, a, b, late)
    for layer in range(layers):
        policy.grow_layer(layer)
    policy.abort_step()
    assert state(policy) == before
    policy.check()
    step(policy, a, b, late)
    policy.check()
    assert policy.usage() == KVUsage(62 * TOKEN, 0, 62 * TOKEN, 0, 0, 0, 0)


def test_step_scope_takes_back_what_was_done_before_memory_ended() -> None:
    policy = policy_of(8 * 5120 + 2 * 5632 + 512, copy_scope="step")
    a, b = sequence(1, 10), sequence(2, 10)
    step(policy, a, b)
    before = state(policy)
    reserve(policy, a, b)
    with pytest.raises(OutOfMemory):
        policy.grow_layer(0)
    policy.check()
    policy.abort_step()
    assert state(policy)[:3] == before[:3]
    assert policy.take_work() == Work(copied_bytes=2 * 5120)
    policy.check()


def test_a_sequence_admitted_in_the_step_is_gone_and_others_keep_their_room() -> None:
    policy = policy_of(6 * 64 * TOKEN, growth="static", max_model_len=256)
    a, late = sequence(1, 10), sequence(2, 10)
    step(policy, a)
    before = state(policy)
    reserve(policy, a, late)
    policy.grow_layer(0)
    with pytest.raises(OutOfMemory):
        policy.grow_layer(1)
    policy.abort_step()
    assert state(policy)[:3] == before[:3]
    assert policy.usage().token == 10 * TOKEN
    step(policy, a)
    policy.check()


def test_an_adopted_history_is_parked_again() -> None:
    policy = policy_of(1 << 20, copy_scope="step")
    s = sequence(1, 10, session=5)
    step(policy, s)
    policy.release(s, Release.PARK)
    before = state(policy)
    following = sequence(2, 25, session=5)
    reserve(policy, following)
    assert policy.usage().parked == 0
    grow(policy)
    policy.abort_step()
    assert policy.usage() == before[0]
    assert policy.parked_sessions() == (5,)
    assert policy.lookup(following) == 10
    policy.check()


def test_after_the_step_has_ended_there_is_nothing_to_take_back() -> None:
    policy = policy_of(1 << 20, copy_scope="step")
    s = sequence(1, 10)
    step(policy, s)
    before = state(policy)
    policy.abort_step()
    assert state(policy) == before
