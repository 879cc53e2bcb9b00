"""Contiguous KV: what a step allocates, copies and keeps, to the byte."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.contiguous_config import ContiguousConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, KVUsage, Refused, Release, Tag, Work

TINY = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256)
"""512 bytes a token and tensor (the pool's unit, so that nothing is rounded), 2,048 bytes a token."""
MIB = 1 << 20


def policy_of(cls: type[ContiguousPolicy] = ContiguousPolicy, **settings: object) -> ContiguousPolicy:
    arena = PooledAllocator(HbmDriver(64 * MIB), PooledConfig(limit_bytes=64 * MIB))
    arena.take_work()
    return cls(TINY, arena, ContiguousConfig(**{"max_model_len": 4096} | settings))


def sequence(id: int, tokens: int) -> KVSequence:
    return KVSequence(id=id, session=id, turn=0, num_tokens=tokens, max_tokens=4096)


def grow(policy: ContiguousPolicy) -> None:
    for layer in range(TINY.num_layers):
        policy.grow_layer(layer)


def step(policy: ContiguousPolicy, *sequences: KVSequence) -> None:
    """Compute all that each sequence lacks, and sample a token."""
    for s in sequences:
        answer = policy.reserve(s, s.num_tokens - s.num_computed_tokens, admitting=s.num_computed_tokens == 0)
        assert answer == Granted(0)
    grow(policy)
    policy.end_step()
    for s in sequences:
        s.num_computed_tokens = s.num_tokens
        s.num_tokens += 1


def books(**more: int) -> KVUsage:
    empty = {"token": 0, "parked": 0, "held": 0, "growth_copy": 0, "cached": 0, "pool": 0, "table": 0}
    return KVUsage(**empty | more)


# Buffers


def test_per_layer_keeps_k_and_v_of_each_layer_apart() -> None:
    policy = policy_of()
    step(policy, sequence(7, 10))
    assert [(b.size, b.token_bytes, b.state, b.owner) for b in policy.walk()] == [(5120, 5120, "running", 7)] * 4
    assert policy.usage() == books(token=20_480, held=20_480)


def test_merged_keeps_one_buffer_a_sequence() -> None:
    policy = policy_of(tensors="merged")
    step(policy, sequence(7, 10), sequence(8, 3))
    assert [(b.size, b.owner) for b in policy.walk()] == [(20_480, 7), (6_144, 8)]


def test_buffers_are_made_layer_by_layer_in_running_order() -> None:
    policy = policy_of()
    asked: list[tuple[int, int]] = []
    policy.arena.observer = lambda op, id, size, stream, arg, tag, owner: asked.append((owner, size))
    policy.reserve(sequence(1, 4), 4, admitting=True)
    policy.reserve(sequence(2, 6), 6, admitting=True)
    assert asked == []
    policy.grow_layer(0)
    assert asked == [(1, 2048), (1, 2048), (2, 3072), (2, 3072)]
    policy.grow_layer(1)
    assert asked[4:] == [(1, 2048), (1, 2048), (2, 3072), (2, 3072)]


def test_static_makes_the_longest_sequence_and_never_grows() -> None:
    policy = policy_of(growth="static", max_model_len=100)
    s = sequence(1, 10)
    step(policy, s)
    for _ in range(3):
        step(policy, s)
    assert policy.usage() == books(token=13 * 2048, held=100 * 2048)
    assert policy.usage().unfilled == 87 * 2048
    assert policy.take_work().plus(policy.arena.take_work()) == Work()


def test_a_prompt_in_chunks_grows_by_chunks() -> None:
    policy = policy_of()
    s = sequence(1, 300)
    for computed, new in ((0, 128), (128, 128), (256, 44)):
        s.num_computed_tokens = computed
        policy.reserve(s, new, admitting=computed == 0)
        grow(policy)
        policy.end_step()
        assert policy.usage().held == (computed + new) * 2048
    assert policy.arena.take_work().copied_bytes == (128 + 256) * 2048


def test_lookahead_makes_room_but_is_no_token() -> None:
    policy = policy_of()
    s = sequence(1, 10)
    policy.reserve(s, 10, lookahead=5, admitting=True)
    grow(policy)
    policy.end_step()
    assert policy.usage() == books(token=10 * 2048, held=15 * 2048)


def test_nothing_grows_past_the_longest_sequence() -> None:
    policy = policy_of(max_model_len=16)
    s = sequence(1, 20)
    policy.reserve(s, 20, lookahead=5, admitting=True)
    grow(policy)
    policy.end_step()
    assert policy.usage() == books(token=16 * 2048, held=16 * 2048)


# Growing by concatenation


def test_exact_growth_replaces_every_tensor_at_every_step() -> None:
    policy = policy_of()
    s = sequence(1, 10)
    step(policy, s)
    operations: list[str] = []
    policy.arena.observer = lambda op, *rest: operations.append(op)
    step(policy, s)
    assert operations == ["malloc", "free"] * 4
    assert policy.usage() == books(token=11 * 2048, held=11 * 2048)


def test_the_arena_counts_what_a_concatenation_copies() -> None:
    policy = policy_of()
    s = sequence(1, 10)
    step(policy, s)
    assert policy.arena.take_work().copied_bytes == 0
    step(policy, s)
    step(policy, s)
    assert policy.arena.take_work().copied_bytes == (10 + 11) * 2048
    assert policy.take_work() == Work()


# Doubling with old copies that live until the step ends


@pytest.mark.parametrize(("prompt", "old", "new"), [(64, 131_072, 262_144), (128, 262_144, 524_288)])
def test_behind_a_power_of_two_old_and_new_buffers_live_together(prompt: int, old: int, new: int) -> None:
    policy = policy_of(growth="doubling", tensors="merged", copy_scope="step")
    s = sequence(1, prompt)
    step(policy, s)
    assert policy.usage() == books(token=old, held=old)
    policy.reserve(s, 1)
    assert policy.usage() == books(token=old, held=old)
    grow(policy)
    assert policy.usage() == books(token=old + 2048, held=new, growth_copy=old)
    assert policy.arena.usage().requested_by_tag[Tag.KV] == old + new
    assert [(b.size, b.token_bytes, b.state) for b in policy.walk()] == [
        (old, 0, "growth_copy"),
        (new, old + 2048, "running"),
    ]
    policy.end_step()
    assert policy.usage() == books(token=old + 2048, held=new)
    assert policy.arena.usage().requested_by_tag[Tag.KV] == new
    assert policy.take_work() == Work(copied_bytes=old)
    assert policy.take_work() == Work()
    assert policy.arena.take_work().copied_bytes == 0


def test_doubling_copies_nothing_between_two_jumps() -> None:
    policy = policy_of(growth="doubling", tensors="merged", copy_scope="step")
    s = sequence(1, 65)
    step(policy, s)
    for _ in range(63):
        step(policy, s)
    assert policy.usage() == books(token=128 * 2048, held=128 * 2048)
    assert policy.take_work() == Work()
    step(policy, s)
    assert policy.take_work() == Work(copied_bytes=128 * 2048)


def test_step_scope_keeps_the_old_copies_of_all_layers() -> None:
    policy = policy_of(copy_scope="step")
    s = sequence(1, 10)
    step(policy, s)
    policy.reserve(s, 1)
    policy.grow_layer(0)
    assert policy.usage() == books(token=20_480, held=21_504, growth_copy=10_240)
    policy.check()
    policy.grow_layer(1)
    assert policy.usage() == books(token=22_528, held=22_528, growth_copy=20_480)
    policy.end_step()
    assert policy.take_work() == Work(copied_bytes=20_480)


def test_tensor_scope_keeps_no_old_copy() -> None:
    policy = policy_of(growth="doubling", tensors="merged")
    s = sequence(1, 64)
    step(policy, s)
    policy.reserve(s, 1)
    grow(policy)
    assert policy.usage() == books(token=65 * 2048, held=128 * 2048)
    assert policy.arena.take_work().copied_bytes == 64 * 2048


# Leaps


def test_the_horizon_is_the_room_of_the_fullest_buffer() -> None:
    policy = policy_of(growth="doubling")
    a, b = sequence(1, 100), sequence(2, 50)
    step(policy, a, b)
    assert policy.horizon([a, b], 1000) == 14
    assert policy.horizon([a], 1000) == 28
    assert policy.horizon([a], 5) == 5
    assert policy.horizon([], 9) == 9


def test_exact_growth_never_leaps() -> None:
    policy = policy_of()
    s = sequence(1, 100)
    step(policy, s)
    assert policy.horizon([s], 1000) == 0


def test_a_leap_over_the_horizon_is_refused_and_changes_nothing() -> None:
    policy = policy_of(growth="doubling")
    s = sequence(1, 100)
    step(policy, s)
    before = policy.usage()
    with pytest.raises(ValueError, match="29 steps are over the horizon of 28"):
        policy.advance([s], 29)
    assert policy.usage() == before


def assert_a_leap_equals_single_steps(
    cls: type[ContiguousPolicy], settings: dict[str, str], prompts: list[int]
) -> None:
    leaping, stepping = policy_of(cls, **settings), policy_of(cls, **settings)
    in_leap = [sequence(id, tokens) for id, tokens in enumerate(prompts)]
    in_steps = [sequence(id, tokens) for id, tokens in enumerate(prompts)]
    step(leaping, *in_leap)
    step(stepping, *in_steps)
    k = leaping.horizon(in_leap, 300)
    leaping.advance(in_leap, k)
    operations: list[str] = []
    stepping.arena.observer = lambda op, *rest: operations.append(op)
    for _ in range(k):
        step(stepping, *in_steps)
    assert operations == []
    assert leaping.usage() == stepping.usage()
    assert list(leaping.walk()) == list(stepping.walk())
    assert leaping.horizon(in_leap, 300) == stepping.horizon(in_steps, 300)
    leaping.check()
    stepping.check()


LEAPS = st.fixed_dictionaries(
    {
        "growth": st.sampled_from(["static", "exact", "doubling"]),
        "tensors": st.sampled_from(["per_layer", "merged"]),
        "copy_scope": st.sampled_from(["tensor", "step"]),
    }
)


@given(settings=LEAPS, prompts=st.lists(st.integers(1, 600), min_size=1, max_size=5))
def test_a_leap_equals_single_steps(settings: dict[str, str], prompts: list[int]) -> None:
    assert_a_leap_equals_single_steps(ContiguousPolicy, settings, prompts)


class LeapsTooFar(ContiguousPolicy):
    """Lets the step that must copy into the leap."""

    def horizon(self, decoding: list[KVSequence], limit: int) -> int:
        return min(limit, super().horizon(decoding, limit) + 1)


class ForgetsItsBooks(ContiguousPolicy):
    """Moves the sequences on, and not the sum over them."""

    def advance(self, decoding: list[KVSequence], k: int) -> None:
        super().advance(decoding, k)
        self._store.filled_tokens -= k * len(decoding)


@pytest.mark.parametrize("broken", [LeapsTooFar, ForgetsItsBooks])
def test_a_leap_that_differs_from_its_steps_is_noticed(broken: type[ContiguousPolicy]) -> None:
    with pytest.raises(AssertionError):
        assert_a_leap_equals_single_steps(broken, {"growth": "doubling"}, [100, 50])


# Order of calls


def test_a_step_cannot_end_before_it_was_carried_out() -> None:
    policy = policy_of()
    policy.reserve(sequence(1, 4), 4, admitting=True)
    with pytest.raises(RuntimeError, match="end_step came before grow_layer of all 2 layers"):
        policy.end_step()


def test_a_layer_cannot_be_left_out() -> None:
    policy = policy_of()
    policy.reserve(sequence(1, 4), 4, admitting=True)
    with pytest.raises(RuntimeError, match=r"grow_layer\(1\) came out of order: 0 layers are done"):
        policy.grow_layer(1)


def test_a_leap_cannot_start_from_a_step_that_was_not_carried_out() -> None:
    policy = policy_of(growth="static")
    s = sequence(1, 4)
    policy.reserve(s, 4, admitting=True)
    with pytest.raises(RuntimeError, match="advance came before"):
        policy.advance([s], 1)


def test_a_sequence_released_in_the_middle_of_a_step_leaves_it() -> None:
    policy = policy_of(copy_scope="step")
    a, b = sequence(1, 10), sequence(2, 20)
    step(policy, a, b)
    policy.reserve(a, 1)
    policy.reserve(b, 1)
    policy.grow_layer(0)
    policy.release(b, Release.PREEMPT)
    policy.check()
    policy.grow_layer(1)
    policy.end_step()
    policy.check()
    assert policy.usage() == books(token=11 * 2048, held=11 * 2048)


def test_a_preempted_sequence_starts_again_from_nothing() -> None:
    policy = policy_of()
    s = sequence(1, 10)
    step(policy, s)
    policy.release(s, Release.PREEMPT)
    assert policy.usage() == books()
    s.num_computed_tokens = 0
    step(policy, s)
    assert policy.usage() == books(token=11 * 2048, held=11 * 2048)


# Settings and refusals


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="tensors must be one of per_layer, merged, not 'both'"):
        ContiguousConfig(max_model_len=16, tensors="both")
    with pytest.raises(ValueError, match="max_model_len must be at least 1, not 0"):
        ContiguousConfig(max_model_len=0)
    with pytest.raises(ValueError, match="needs limit_bytes"):
        ContiguousConfig(max_model_len=16, admission="reserve")


def test_sharing_and_swapping_are_refused_with_a_reason() -> None:
    policy = policy_of()
    a, b = sequence(1, 4), sequence(2, 4)
    answers = (policy.fork(a, b), policy.swap_out(a), policy.swap_in(a))
    assert all(isinstance(answer, Refused) and answer.reason for answer in answers)


def reserving(limit_tokens: int, **settings: object) -> ContiguousPolicy:
    return policy_of(admission="reserve", limit_bytes=limit_tokens * 2048, **settings)


def test_admission_by_reservation_counts_every_running_sequence_at_its_full_length() -> None:
    policy = reserving(250)
    first = KVSequence(id=1, session=1, turn=0, num_tokens=10, max_tokens=150)
    second = KVSequence(id=2, session=2, turn=0, num_tokens=10, max_tokens=101)
    third = KVSequence(id=3, session=3, turn=0, num_tokens=10, max_tokens=100)
    step(policy, first)
    assert policy.reserve(second, 10, admitting=True) == Refused(
        101 * 2048, 100 * 2048, "the running sequences at their full length leave too little"
    )
    assert policy.usage() == books(token=10 * 2048, held=10 * 2048)
    step(policy, third)
    policy.release(first, Release.FINISH)
    assert policy.reserve(second, 10, admitting=True) == Granted(0)


def test_admission_by_reservation_reckons_with_the_growth_rule() -> None:
    policy = reserving(255, growth="doubling")
    s = KVSequence(id=1, session=1, turn=0, num_tokens=10, max_tokens=129)
    answer = policy.reserve(s, 10, admitting=True)
    assert isinstance(answer, Refused)
    assert (answer.need_bytes, answer.free_bytes) == (256 * 2048, 255 * 2048)


def test_admission_by_reservation_frees_parked_histories_least_recent_first_but_not_the_own_one() -> None:
    policy = reserving(250)
    for session in (1, 2, 3):
        s = KVSequence(session, session, 0, num_tokens=60, max_tokens=60, spans=((f"user {session}", 0, 60),))
        step(policy, s)
        policy.release(s, Release.PARK)
    own = KVSequence(id=4, session=1, turn=1, num_tokens=70, max_tokens=100, spans=(("user 1", 0, 70),))
    assert policy.reserve(own, 10, hit=policy.lookup(own), admitting=True) == Granted(60)
    assert policy.parked_sessions() == (2, 3)
    other = KVSequence(id=5, session=9, turn=0, num_tokens=10, max_tokens=90)
    assert policy.reserve(other, 10, admitting=True) == Granted()
    assert policy.parked_sessions() == (3,)
    too_long = KVSequence(id=6, session=8, turn=0, num_tokens=10, max_tokens=61)
    assert isinstance(policy.reserve(too_long, 10, admitting=True), Refused)
    assert policy.parked_sessions() == (3,)


def test_a_step_that_planned_twice_for_a_new_sequence_is_undone_wholly() -> None:
    policy = policy_of(copy_scope="step")
    a = sequence(1, 8)
    policy.reserve(a, 4, admitting=True)
    policy.reserve(a, 8)
    policy.grow_layer(0)
    assert policy.usage() == books(held=8192)
    policy.abort_step()
    policy.check()
    assert policy.usage() == books()


def test_a_sequence_that_had_no_token_yet_has_none_after_an_undone_step() -> None:
    policy = policy_of(copy_scope="step")
    a = sequence(1, 8)
    policy.reserve(a, 0, admitting=True)
    grow(policy)
    policy.end_step()
    policy.reserve(a, 8)
    grow(policy)
    policy.abort_step()
    policy.check()
    assert policy.usage() == books()
    step(policy, a)
    assert policy.usage() == books(token=16_384, held=16_384)
