"""Paged KV: vLLM's block manager with prefix caching off, told in examples."""

from __future__ import annotations

import copy

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, KVUsage, Refused, Release, Tag, Work

TINY = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256)
"""512 bytes a token and tensor, 2,048 bytes a token."""
TOKEN = 2048


def policy_of(num_blocks: int = 8, block_size: int = 4, **settings: object) -> PagedPolicy:
    arena = PooledAllocator(HbmDriver(64 << 20), PooledConfig(limit_bytes=64 << 20))
    config = PagedConfig(**{"num_blocks": num_blocks, "block_size": block_size, "max_model_len": 4096} | settings)
    return PagedPolicy(TINY, arena, config)


def sequence(id: int, tokens: int, most: int = 4096) -> KVSequence:
    return KVSequence(id=id, session=id, turn=0, num_tokens=tokens, max_tokens=most)


def admit(policy: PagedPolicy, s: KVSequence, **more: bool) -> tuple[int, ...]:
    assert policy.reserve(s, s.num_tokens, admitting=True, **more) == Granted(0)
    policy.end_step()
    s.num_computed_tokens, s.num_tokens = s.num_tokens, s.num_tokens + 1
    return policy.block_ids(s)


def decode(policy: PagedPolicy, s: KVSequence, steps: int = 1) -> tuple[int, ...]:
    for _ in range(steps):
        assert policy.reserve(s, 1, others_running=True) == Granted(0)
        policy.end_step()
        s.num_computed_tokens += 1
        s.num_tokens += 1
    return policy.block_ids(s)


def queue(policy: PagedPolicy) -> list[int]:
    """The free queue from its head: what one sequence would get that took all of it."""
    twin, probe = copy.deepcopy(policy), sequence(-1, 0)
    taken: list[int] = []
    while isinstance(twin.reserve(probe, len(taken) * policy.config.block_size + 1), Granted):
        taken = list(twin.block_ids(probe))
    return taken


# The worked example of specs/paged-kv.md section 2, with caching off


def test_blocks_come_from_the_head_and_go_back_to_the_tail_last_one_first() -> None:
    policy = policy_of()
    assert queue(policy) == [1, 2, 3, 4, 5, 6, 7]
    a, b = sequence(1, 10), sequence(2, 11)
    assert admit(policy, a) == (1, 2, 3)
    assert admit(policy, b) == (4, 5, 6)
    assert queue(policy) == [7]
    assert decode(policy, a, 2) == (1, 2, 3)
    assert decode(policy, a) == (1, 2, 3, 7)
    assert queue(policy) == []
    policy.release(a, Release.FINISH)
    assert queue(policy) == [7, 3, 2, 1]
    policy.release(b, Release.FINISH)
    assert queue(policy) == [7, 3, 2, 1, 6, 5, 4]
    assert admit(policy, sequence(3, 8)) == (7, 3)
    assert admit(policy, sequence(4, 12)) == (2, 1, 6)
    assert queue(policy) == [5, 4]
    policy.check()


def test_the_null_block_is_never_handed_out() -> None:
    policy = policy_of(num_blocks=2)
    assert admit(policy, sequence(1, 4)) == (1,)
    assert isinstance(policy.reserve(sequence(2, 1), 1, admitting=True), Refused)


def test_a_pool_of_the_null_block_alone_serves_nobody() -> None:
    policy = policy_of(num_blocks=1)
    assert isinstance(policy.reserve(sequence(1, 1), 1, admitting=True), Refused)
    assert (policy.usage().held, queue(policy)) == (0, [])
    policy.check()


def test_a_decode_step_takes_a_block_only_when_the_last_one_is_full() -> None:
    policy = policy_of()
    s = sequence(1, 1)
    admit(policy, s)
    blocks_at = [len(decode(policy, s)) for _ in range(8)]
    assert blocks_at == [1, 1, 1, 2, 2, 2, 2, 3]


def test_a_preempted_sequence_gives_all_back_and_starts_again() -> None:
    policy = policy_of()
    s = sequence(1, 6)
    admit(policy, s)
    policy.release(s, Release.PREEMPT)
    assert policy.block_ids(s) == ()
    assert queue(policy) == [3, 4, 5, 6, 7, 2, 1]
    s.num_computed_tokens = 0
    assert admit(policy, s) == (3, 4)
    assert policy.usage().token == 7 * TOKEN


# What refuses, and what it leaves


def state(policy: PagedPolicy) -> tuple[object, ...]:
    return (policy.usage(), list(policy.walk()), queue(policy))


def test_a_refusal_says_how_much_and_changes_nothing() -> None:
    policy = policy_of()
    a, b = sequence(1, 17), sequence(2, 12)
    admit(policy, a)
    before = state(policy)
    assert policy.reserve(b, 12, admitting=True) == Refused(
        3 * 4 * TOKEN, 2 * 4 * TOKEN, "the whole prompt does not fit"
    )
    assert policy.reserve(a, 12) == Refused(3 * 4 * TOKEN, 2 * 4 * TOKEN, "not enough free blocks")
    assert state(policy) == before


def test_a_first_chunk_is_admitted_only_if_the_whole_prompt_fits() -> None:
    s = sequence(1, 29)
    assert isinstance(policy_of().reserve(s, 4, admitting=True), Refused)
    assert policy_of(reserve_full_sequence=False).reserve(s, 4, admitting=True) == Granted(0)
    assert policy_of(max_model_len=28).reserve(s, 4, admitting=True) == Granted(0)


@pytest.mark.parametrize(("version", "whole"), [("0.18", False), ("0.22", True), ("0.27", True)])
def test_each_version_has_its_gate_unless_it_is_set(version: str, whole: bool) -> None:
    s = sequence(1, 29)
    for switch, refused in ((None, whole), (True, True), (False, False)):
        policy = policy_of(version=version, reserve_full_sequence=switch)
        assert isinstance(policy.reserve(s, 4, admitting=True), Refused) == refused


def test_full_lengths_are_counted_beside_those_that_run() -> None:
    """TensorRT-LLM's GUARANTEED_NO_EVICT: 9 blocks; a may come to hold 4 of them, b 5, and then there is none left."""
    policy = policy_of(num_blocks=10, admission="reserve")
    a, b, c = sequence(1, 3, 16), sequence(2, 3, 17), sequence(3, 1, 1)
    admit(policy, a)
    assert policy.reserve(sequence(4, 3, 21), 3, admitting=True, others_running=True) == Refused(
        6 * 4 * TOKEN, 5 * 4 * TOKEN, "its full length does not fit beside those of running sequences"
    )
    admit(policy, b)
    assert policy.usage().held == 2 * 4 * TOKEN
    assert isinstance(policy.reserve(c, 1, admitting=True), Refused)
    decode(policy, b, 13)
    policy.advance([a], 12)
    assert len(policy.block_ids(a) + policy.block_ids(b)) == 4 + 4
    assert isinstance(policy.reserve(c, 1, admitting=True), Refused), "what was promised may have been taken"
    policy.release(a, Release.FINISH)
    assert admit(policy, c) == (9,)


def test_a_full_length_ends_at_the_longest_and_counts_drafts() -> None:
    policy = policy_of(num_blocks=6, max_model_len=20, admission="reserve")
    assert policy.reserve(sequence(1, 3, 1000), 3, admitting=True) == Granted()
    policy.abort_step()
    policy = policy_of(num_blocks=6, admission="reserve")
    assert isinstance(policy.reserve(sequence(1, 3, 20), 3, lookahead=1, admitting=True), Refused)
    assert policy.reserve(sequence(1, 3, 19), 3, lookahead=1, admitting=True) == Granted()


def test_the_last_admitted_give_way_until_there_is_room_and_at_last_the_one_that_asks() -> None:
    policy = policy_of(num_blocks=4)
    running = [sequence(id, 4) for id in (1, 2, 3)]
    for s in running:
        admit(policy, s)
    a = running[0]
    gave_way = []
    for _ in range(9):
        while isinstance(policy.reserve(a, 1), Refused):
            victim = running.pop()
            gave_way.append(victim.id)
            policy.release(victim, Release.PREEMPT)
            if victim is a:
                break
        policy.end_step()
        a.num_computed_tokens += 1
    assert gave_way == [3, 2, 1]
    assert queue(policy) == [2, 3, 1]


def test_the_watermark_stays_free_while_others_run() -> None:
    policy = policy_of(num_blocks=8, watermark=0.3)
    s = sequence(1, 21)
    assert policy.reserve(s, 21, admitting=True, others_running=True) == Refused(
        6 * 4 * TOKEN, 5 * 4 * TOKEN, "the whole prompt does not fit"
    )
    assert policy.reserve(s, 21, admitting=True) == Granted(0)
    admit(policy, running := sequence(2, 4))
    policy.release(s, Release.FINISH)
    admit(policy, sequence(3, 12), others_running=True)
    assert decode(policy, running, 9) == (7, 3, 2, 1)
    assert queue(policy) == []


def test_lookahead_takes_blocks_and_counts_no_tokens() -> None:
    policy = policy_of()
    s = sequence(1, 4)
    policy.reserve(s, 4, lookahead=1, admitting=True)
    assert policy.block_ids(s) == (1, 2)
    assert (policy.usage().token, policy.usage().held) == (4 * TOKEN, 8 * TOKEN)


def test_no_block_is_taken_past_the_longest_sequence() -> None:
    policy = policy_of(max_model_len=8)
    s = sequence(1, 7)
    policy.reserve(s, 7, lookahead=5, admitting=True)
    assert policy.block_ids(s) == (1, 2)


def test_a_hit_cannot_be_adopted() -> None:
    policy = policy_of()
    assert policy.lookup(sequence(1, 100)) == 0
    with pytest.raises(ValueError, match="cannot adopt 4 tokens: this pool has no prefix cache"):
        policy.reserve(sequence(1, 8), 4, hit=4, admitting=True)


# Leaps


def test_the_horizon_crosses_block_boundaries() -> None:
    policy = policy_of()
    a, b = sequence(1, 6), sequence(2, 3)
    admit(policy, a)
    admit(policy, b)
    # Free: 4 blocks. a takes one at its 3rd and 7th further step, b at its 2nd, 6th and 10th: the 5th at step 10.
    assert policy.horizon([a, b], 100) == 9
    assert policy.horizon([a, b], 8) == 8
    assert policy.horizon([a], 100) == 18
    assert policy.horizon([], 5) == 5


def test_a_leap_hands_out_blocks_step_by_step_in_running_order() -> None:
    policy = policy_of()
    a, b = sequence(1, 6), sequence(2, 3)
    admit(policy, a)
    admit(policy, b)
    policy.advance([a, b], 9)
    assert policy.block_ids(a) == (1, 2, 5, 7)
    assert policy.block_ids(b) == (3, 4, 6)
    policy.check()


def test_a_leap_over_the_horizon_is_refused_and_changes_nothing() -> None:
    policy = policy_of()
    a = sequence(1, 6)
    admit(policy, a)
    before = state(policy)
    with pytest.raises(ValueError, match="23 steps need 6 blocks and 5 are free: over the horizon"):
        policy.advance([a], 23)
    assert state(policy) == before


# Taking a step back


def test_an_aborted_step_leaves_blocks_queue_and_books_as_they_were() -> None:
    policy = policy_of(num_blocks=10)
    a, b, late = sequence(1, 8), sequence(2, 4), sequence(3, 9)
    admit(policy, a)
    admit(policy, b)
    before = state(policy)
    policy.reserve(a, 1)
    policy.reserve(b, 1)
    policy.reserve(late, 9, admitting=True)
    policy.abort_step()
    assert state(policy) == before
    policy.check()


def test_a_step_that_has_ended_stands() -> None:
    policy = policy_of()
    a = sequence(1, 8)
    admit(policy, a)
    before = state(policy)
    policy.abort_step()
    assert state(policy) == before


def test_a_sequence_released_in_the_middle_of_a_step_stays_released() -> None:
    policy = policy_of()
    a, b = sequence(1, 8), sequence(2, 4)
    admit(policy, a)
    admit(policy, b)
    policy.reserve(a, 1)
    policy.release(b, Release.PREEMPT)
    policy.abort_step()
    assert queue(policy) == [4, 5, 6, 7, 3]
    policy.check()


# Memory and books


def test_the_pool_is_taken_once_from_the_arena() -> None:
    policy = policy_of(num_blocks=16, block_size=128)
    blocks = [block for segment in policy.arena.walk() for block in segment.blocks if block.tag is Tag.KV]
    assert [block.requested for block in blocks] == [16 * 128 * 512] * 4
    operations: list[str] = []
    policy.arena.observer = lambda op, *rest: operations.append(op)
    s = sequence(1, 1000)
    admit(policy, s)
    policy.grow_layer(0)
    policy.release(s, Release.FINISH)
    assert operations == []
    assert policy.take_work() == Work()


def test_a_pool_that_does_not_fit_leaves_nothing_behind() -> None:
    arena = PooledAllocator(HbmDriver(64 << 20), PooledConfig(limit_bytes=1 << 20))
    with pytest.raises(OutOfMemory):
        PagedPolicy(TINY, arena, PagedConfig(num_blocks=1000, block_size=1, max_model_len=100))
    assert arena.usage().requested == 0


def test_every_byte_of_the_pool_has_a_place() -> None:
    policy = policy_of()
    admit(policy, sequence(5, 6))
    assert policy.usage() == KVUsage(
        token=6 * TOKEN, parked=0, held=8 * TOKEN, growth_copy=0, cached=0, pool=24 * TOKEN, table=8
    )
    assert policy.usage().unfilled == 2 * TOKEN
    assert [(b.address, b.token_bytes, b.state, b.owner) for b in list(policy.walk())[:4]] == [
        (0, 0, "free", -1),
        (8192, 4 * TOKEN, "running", 5),
        (16_384, 2 * TOKEN, "running", 5),
        (24_576, 0, "free", -1),
    ]


def test_parking_frees_since_nothing_would_be_found_again() -> None:
    policy = policy_of()
    s = sequence(1, 6)
    admit(policy, s)
    policy.release(s, Release.PARK)
    assert (policy.usage().held, policy.usage().parked) == (0, 0)
    with pytest.raises(KeyError, match="sequence 1 holds no KV that could be parked"):
        policy.release(s, Release.PARK)


def test_sharing_and_swapping_are_refused_with_a_reason() -> None:
    policy = policy_of()
    a, b = sequence(1, 4), sequence(2, 4)
    answers = (policy.fork(a, b), policy.swap_out(a), policy.swap_in(a))
    assert all(isinstance(answer, Refused) and answer.reason for answer in answers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1, not 0"),
        ({"block_size": 0}, "block_size must be at least 1, not 0"),
        ({"max_model_len": 0}, "max_model_len must be at least 1, not 0"),
        ({"watermark": 1.0}, "watermark must be from 0 to below 1, not 1.0"),
        ({"watermark": 0.1, "version": "0.22"}, r"watermark must be 0 with version 0\.22: it came with 0\.27"),
        ({"version": "0.19"}, r"version must be one of 0\.18, 0\.22, 0\.27, not '0\.19'"),
        ({"admission": "hope"}, "admission must be one of none, reserve, not 'hope'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_of(**settings)
