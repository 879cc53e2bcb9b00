"""Groups of layers over one pool, in examples: the worked table of specs/paged-kv.md section 6, then single rules."""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.kv_groups import Grouping, KVGroup, one_group
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.paged_groups import PagedGroupsConfig, PagedGroupsPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.prefix_cache import CacheEvent, PrefixStats
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Span, Tag

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
PAGE = 96
"""Bytes: 24 tokens of 4 bytes, more than any block here has."""


def full(block_size: int = 4) -> KVGroup:
    return KVGroup(block_size=block_size, token_bytes=4)


def window(tokens: int, block_size: int = 4, **more: int) -> KVGroup:
    return KVGroup(kind="sliding_window", window=tokens, block_size=block_size, token_bytes=4, **more)


def chunked(tokens: int, block_size: int = 4) -> KVGroup:
    return KVGroup(kind="chunked_local", window=tokens, block_size=block_size, token_bytes=4)


def mamba(mode: Any, block_size: int = 4, drafts: int = 0) -> KVGroup:
    return KVGroup(kind="mamba", mamba_mode=mode, block_size=block_size, state_bytes=80, speculative_blocks=drafts)


def policy_of(*groups: KVGroup, num_blocks: int = 20, **settings: object) -> PagedGroupsPolicy:
    arena = PooledAllocator(HbmDriver(1 << 20), PooledConfig(limit_bytes=1 << 20))
    grouping = Grouping(groups=groups, group_length=1, page_bytes=PAGE)
    base: dict[str, Any] = {"max_model_len": 4096, "enable_prefix_caching": True}
    return PagedGroupsPolicy(
        TINY, arena, PagedGroupsConfig(num_blocks=num_blocks, grouping=grouping, **base | settings)
    )


def sequence(id: int, *prompt: Span) -> KVSequence:
    tokens = sum(length for _, _, length in prompt)
    return KVSequence(id, id, 0, tokens, 4096, spans=(*prompt, (f"output {id}", 0, 1000)))


def start(policy: PagedGroupsPolicy, s: KVSequence, **more: bool) -> tuple[int, Any]:
    """Admit in a step that goes on."""
    hit = policy.lookup(s)
    answer = policy.reserve(s, s.num_tokens - hit, hit=hit, admitting=True, **more)
    policy.check()
    if isinstance(answer, Refused):
        return hit, answer
    s.num_computed_tokens, s.num_tokens = s.num_tokens, s.num_tokens + 1
    return hit, policy.tables(s)


def admit(policy: PagedGroupsPolicy, s: KVSequence, **more: bool) -> tuple[int, Any]:
    answer = start(policy, s, **more)
    policy.end_step()
    return answer


def extend(policy: PagedGroupsPolicy, s: KVSequence, new: int) -> Any:
    """A chunk of a prompt."""
    answer = policy.reserve(s, new)
    policy.check()
    policy.end_step()
    if isinstance(answer, Refused):
        return answer
    s.num_computed_tokens += new
    s.num_tokens = max(s.num_tokens, s.num_computed_tokens + 1)
    return policy.tables(s)


def decode(policy: PagedGroupsPolicy, s: KVSequence, steps: int) -> Any:
    for _ in range(steps):
        answer = extend(policy, s, 1)
    return answer


def free(policy: PagedGroupsPolicy) -> list[int]:
    return list(policy.free_queue())


# The specification's table


def test_the_worked_table_of_the_specification() -> None:
    policy = policy_of(full(), window(6))
    a, b = sequence(1, ("a", 0, 10)), sequence(2, ("a", 0, 10), ("b", 0, 5))
    assert admit(policy, a) == (0, ((1, 2, 3), (4, 5, 6)))
    assert len(free(policy)) == 13
    assert decode(policy, a, 1) == ((1, 2, 3), (0, 5, 6))
    assert (len(free(policy)), free(policy)[-1]) == (14, 4)
    assert decode(policy, a, 2) == ((1, 2, 3, 7), (0, 5, 6, 8))
    assert len(free(policy)) == 12
    assert decode(policy, a, 1) == ((1, 2, 3, 7), (0, 0, 6, 8))
    assert (len(free(policy)), free(policy)[-2:]) == (13, [4, 5])
    assert admit(policy, b) == (8, ((1, 2, 9, 10), (4, 5, 11, 12)))
    assert len(free(policy)) == 7
    policy.release(a, Release.FINISH)
    assert free(policy) == [8, 7, 13, 14, 15, 16, 17, 18, 19, 3, 6]
    assert admit(policy, sequence(3, ("a", 0, 8), ("c", 0, 1))) == (8, ((1, 2, 8), (4, 5, 7)))
    assert len(free(policy)) == 9


# Look-up


def test_a_prompt_of_whole_blocks_computes_its_last_block_again_in_every_group() -> None:
    policy = policy_of(full(), window(6))
    assert admit(policy, sequence(1, ("a", 0, 8))) == (0, ((1, 2), (3, 4)))
    assert admit(policy, sequence(2, ("a", 0, 8))) == (4, ((1, 5), (3, 6)))
    assert admit(policy, sequence(3, ("a", 0, 9))) == (8, ((1, 2, 7), (3, 4, 8)))


def test_two_equal_requests_share_in_one_step() -> None:
    policy = policy_of(full(), window(6))
    assert start(policy, sequence(1, ("a", 0, 9))) == (0, ((1, 2, 3), (4, 5, 6)))
    assert start(policy, sequence(2, ("a", 0, 9))) == (8, ((1, 2, 7), (4, 5, 8)))
    policy.abort_step()
    policy.check()
    assert free(policy) == list(range(1, 20))
    assert policy.lookup(sequence(3, ("a", 0, 9))) == 0


def test_a_window_needs_a_run_that_fills_it_and_nulls_stand_before() -> None:
    policy = policy_of(window(6), num_blocks=30)
    s = sequence(1, ("a", 0, 20))
    assert admit(policy, s) == (0, ((1, 2, 3, 4, 5),))
    assert decode(policy, s, 1) == ((0, 0, 0, 4, 5, 6),)
    policy.release(s, Release.FINISH)
    assert free(policy) == [6, *range(7, 30), 3, 2, 1, 5, 4]
    assert admit(policy, sequence(2, ("b", 0, 96)))[0] == 0
    assert free(policy) == [3, 2, 1, 5, 4]
    assert admit(policy, sequence(3, ("a", 0, 20))) == (16, ((0, 0, 3, 4, 2),))


def test_of_a_window_only_a_run_from_the_start_may_be_short() -> None:
    policy = policy_of(window(10), num_blocks=12)
    s = sequence(1, ("a", 0, 16))
    assert admit(policy, s) == (0, ((1, 2, 3, 4),))
    policy.release(s, Release.FINISH)
    assert free(policy)[-4:] == [4, 3, 2, 1]
    other = sequence(2, ("b", 0, 29))  # takes the seven that never had a key, and block 4
    admit(policy, other)
    assert policy.lookup(sequence(3, ("a", 0, 17))) == 12, "three blocks, as the window needs"
    policy.release(other, Release.FINISH)
    assert policy.tables(other) == ((),)
    middle = sequence(4, ("a", 0, 8), ("c", 0, 1))
    assert admit(policy, middle)[0] == 8, "two blocks that touch the start"


def test_a_class_has_what_all_its_groups_have() -> None:
    policy = policy_of(window(6), window(6), num_blocks=30)
    s = sequence(1, ("a", 0, 9))
    assert admit(policy, s) == (0, ((1, 2, 3), (4, 5, 6)))
    assert policy.lookup(sequence(2, ("a", 0, 9))) == 8
    policy.pool.cache.unregister(5)
    assert policy.lookup(sequence(2, ("a", 0, 9))) == 4


def test_classes_shorten_each_other_until_all_agree() -> None:
    policy = policy_of(full(), window(6), window(10), num_blocks=60)
    s = sequence(1, ("a", 0, 29))
    (one, two, three) = admit(policy, s)[1]
    assert policy.lookup(sequence(2, ("a", 0, 29))) == 28
    for place in (4, 6):
        policy.pool.cache.unregister(two[place])
    # The first window is left with places 0 1 2 3 and 5: 16 tokens. The second then finds all of its own.
    assert policy.lookup(sequence(2, ("a", 0, 29))) == 16
    policy.pool.cache.unregister(three[2])
    # Now the second has 8 tokens at most 16: places 0 and 1 touch the start. The first agrees.
    assert policy.lookup(sequence(2, ("a", 0, 29))) == 8
    assert policy.shared_boundary(sequence(2, ("a", 0, 29))) == 28, "full attention has them all"
    assert len(one) == 8


def test_full_attention_is_looked_up_first_wherever_it_stands() -> None:
    policy = policy_of(window(6), full(), num_blocks=30)
    admit(policy, sequence(1, ("a", 0, 13)))
    assert policy.lookup(sequence(2, ("a", 0, 13))) == 12
    assert policy.shared_boundary(sequence(2, ("a", 0, 13))) == 0
    policy.pool.cache.unregister(policy.tables(sequence(1))[0][2])
    policy.pool.cache.unregister(policy.tables(sequence(1))[0][1])
    assert policy.lookup(sequence(2, ("a", 0, 13))) == 4
    assert policy.shared_boundary(sequence(2, ("a", 0, 13))) == 12


def test_keys_of_a_window_with_smaller_blocks_stand_at_the_end_of_each_common_block() -> None:
    policy = policy_of(full(16), window(5), num_blocks=30)
    told: list[CacheEvent] = []
    policy.on_cache_event = told.append
    s = sequence(1, ("a", 0, 37))
    assert admit(policy, s) == (0, ((1, 2, 3), (4, 5, 6, 7, 8, 9, 10, 11, 12, 13)))
    assert [(event.group, event.block) for event in told] == [(0, 1), (0, 2), (1, 7), (1, 11)]
    policy.release(s, Release.FINISH)
    assert free(policy)[:9] == [13, 12, 10, 9, 8, 6, 5, 4, 3], "no key: each group's to the head"
    assert free(policy)[-4:] == [2, 1, 11, 7]
    assert admit(policy, sequence(2, ("a", 0, 37)))[0] == 32


def test_with_several_groups_keys_end_at_the_common_block() -> None:
    policy = policy_of(full(8), window(100), num_blocks=30)
    s = sequence(1, ("a", 0, 14))
    admit(policy, s)
    assert policy.lookup(sequence(2, ("a", 0, 15))) == 8
    assert [policy.pool.cache.key_of[block] >= 0 for block in policy.tables(s)[1]] == [True, True, False, False]
    decode(policy, s, 2)
    assert policy.lookup(sequence(2, ("a", 0, 14), ("output 1", 0, 3))) == 16


def test_a_chunk_is_hit_without_being_looked_up_beside_full_attention() -> None:
    policy = policy_of(full(), chunked(8), num_blocks=30)
    s = sequence(1, ("a", 0, 14))
    assert admit(policy, s) == (0, ((1, 2, 3, 4), (5, 6, 7, 8)))
    assert decode(policy, s, 1) == ((1, 2, 3, 4), (0, 0, 7, 8))
    assert admit(policy, sequence(2, ("a", 0, 14))) == (12, ((1, 2, 3, 9), (0, 0, 7, 10)))
    assert admit(policy, sequence(3, ("a", 0, 9))) == (8, ((1, 2, 11), (0, 0, 12))), "5 and 6 are not even touched"


# Need, and what is forgotten


def test_what_left_the_window_is_given_back_before_the_check_and_stays_so_after_a_refusal() -> None:
    policy = policy_of(full(), window(6), num_blocks=10)
    s = sequence(1, ("a", 0, 12))
    assert admit(policy, s) == (0, ((1, 2, 3), (4, 5, 6)))
    other = sequence(2, ("b", 0, 3))
    assert admit(policy, other) == (0, ((7,), (8,)))
    assert free(policy) == [9]
    assert decode(policy, s, 1) == ((1, 2, 3, 9), (0, 5, 6, 4)), "block 4 came back just in time, and lost its key"
    third = policy_of(full(), full(), window(6), num_blocks=10)
    s = sequence(1, ("a", 0, 12))
    assert admit(third, s) == (0, ((1, 2, 3), (4, 5, 6), (7, 8, 9)))
    s.num_computed_tokens = 12
    answer = third.reserve(s, 1)
    assert answer == Refused(3 * PAGE, 1 * PAGE, "not enough free blocks")
    third.check()
    assert third.tables(s) == ((1, 2, 3), (4, 5, 6), (0, 8, 9))
    third.abort_step()
    third.check()
    assert (third.tables(s)[2], free(third)) == ((0, 8, 9), [7])


def test_a_long_chunk_holds_the_window_and_the_chunk() -> None:
    policy = policy_of(window(6), enable_prefix_caching=False)
    s = sequence(1, ("a", 0, 40))
    assert policy.reserve(s, 12, admitting=True) == Granted()
    policy.end_step()
    s.num_computed_tokens = 12
    assert extend(policy, s, 16) == ((0, 2, 3, 4, 5, 6, 7),)
    assert extend(policy, s, 1) == ((0, 0, 0, 0, 0, 6, 7, 8),)
    assert free(policy) == [9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 1, 5, 4, 3, 2]


def test_the_gate_counts_of_a_window_what_it_holds_at_most() -> None:
    s = sequence(1, ("a", 0, 1000))
    assert window(6).max_blocks(4096, 16) == 7  # ceil((6 - 1 + 16) / 4) + 1
    assert chunked(8).max_blocks(4096, 16) == 6  # ceil((8 + 16) / 4)
    for groups, most in (((window(6),), 7), ((chunked(8),), 6), ((window(6), chunked(8)), 13)):
        settings: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": 16}
        answer = policy_of(*groups, num_blocks=most, **settings).reserve(s, 16, admitting=True)
        assert answer == Refused(most * PAGE, (most - 1) * PAGE, "the whole prompt does not fit")
        assert policy_of(*groups, num_blocks=most + 1, **settings).reserve(s, 16, admitting=True) == Granted()
    assert window(6).max_blocks(20, 2048) == 6, "no more than the longest request, and one"


def test_the_whole_sequence_must_fit_though_its_first_chunk_would() -> None:
    s = sequence(1, ("a", 0, 40))
    assert isinstance(policy_of(full(), full()).reserve(s, 4, admitting=True), Refused)
    assert policy_of(full(), full(), reserve_full_sequence=False).reserve(s, 4, admitting=True) == Granted()


def test_the_watermark_counts_only_beside_others_and_free_hits_count() -> None:
    policy = policy_of(full(), window(6), num_blocks=8, watermark=0.15)
    a = sequence(1, ("a", 0, 9))
    admit(policy, a)
    policy.release(a, Release.FINISH)
    b = sequence(2, ("a", 0, 12))  # 4 hits that are free, 2 blocks more, 1 of the watermark
    assert policy.reserve(b, 4, hit=8, admitting=True, others_running=True) == Granted(8)
    policy.abort_step()
    c = sequence(3, ("a", 0, 13))  # 2 blocks more than b
    assert isinstance(policy.reserve(c, 5, hit=8, admitting=True), Refused)
    tight = policy_of(full(), window(6), num_blocks=7, watermark=0.15)
    a = sequence(1, ("a", 0, 9))
    admit(tight, a)
    tight.release(a, Release.FINISH)
    assert tight.reserve(b, 4, hit=8, admitting=True, others_running=True) == Refused(
        2 * PAGE, 1 * PAGE, "the whole prompt does not fit"
    )
    assert tight.reserve(b, 4, hit=8, admitting=True) == Granted(8)


def test_of_two_blocks_with_one_key_the_second_serves_when_the_first_is_evicted() -> None:
    policy = policy_of(full(), window(6), num_blocks=7)
    a, b, c = sequence(1, ("a", 0, 4)), sequence(2, ("a", 0, 4)), sequence(3, ("c", 0, 8))
    assert admit(policy, a) == (0, ((1,), (2,)))
    assert admit(policy, b) == (0, ((3,), (4,)))
    policy.release(a, Release.FINISH)
    assert free(policy) == [5, 6, 1, 2]
    assert admit(policy, c) == (0, ((5, 6), (1, 2)))
    policy.release(c, Release.FINISH)
    assert admit(policy, sequence(4, ("a", 0, 5)))[1] == ((3, 6), (4, 5))


def test_a_preempted_sequence_hits_its_own_blocks() -> None:
    policy = policy_of(full(), window(6))
    s = sequence(1, ("a", 0, 6))
    admit(policy, s)
    decode(policy, s, 3)
    policy.release(s, Release.PREEMPT)
    s.num_computed_tokens = 0
    assert admit(policy, s) == (8, ((1, 2, 6), (3, 4, 5)))
    assert policy.prefix_stats() == PrefixStats(1, 6, 0, 1, 10, 8)


def test_a_shared_prefix_is_freed_by_whoever_leaves_last() -> None:
    for first in (0, 1):
        policy = policy_of(full(), window(6), num_blocks=10)
        both = [sequence(1, ("a", 0, 8), ("x", 0, 1)), sequence(2, ("a", 0, 8), ("y", 0, 1))]
        assert [admit(policy, s)[1] for s in both] == [((1, 2, 3), (4, 5, 6)), ((1, 2, 7), (4, 5, 8))]
        policy.release(both[first], Release.FINISH)
        assert free(policy) == [[6, 3, 9], [8, 7, 9]][first]
        policy.release(both[1 - first], Release.FINISH)
        assert free(policy) == [[8, 7, 6, 3, 9], [6, 3, 8, 7, 9]][first] + [2, 1, 5, 4]


def test_caching_off_finds_nothing_and_frees_to_the_tail() -> None:
    policy = policy_of(full(), window(6), num_blocks=9, enable_prefix_caching=False)
    s = sequence(1, ("a", 0, 6))
    admit(policy, s)
    policy.release(s, Release.FINISH)
    assert free(policy) == [5, 6, 7, 8, 2, 1, 4, 3]
    assert policy.lookup(s) == 0
    assert policy.reset_prefix_cache()


def test_one_usable_block_and_one_token_a_block() -> None:
    policy = policy_of(window(2, block_size=1), num_blocks=4)
    s = sequence(1, ("a", 0, 2))
    assert admit(policy, s) == (0, ((1, 2),))
    assert decode(policy, s, 1) == ((0, 2, 3),)
    assert decode(policy, s, 1) == ((0, 0, 3, 1),), "block 1 was the only free one, and lost its key"
    alone = policy_of(full(1), num_blocks=2)
    assert admit(alone, sequence(1, ("a", 0, 1))) == (0, ((1,),))
    assert isinstance(start(alone, sequence(2, ("b", 0, 1)))[1], Refused)


# Mamba


def test_mamba_none_holds_one_state_and_those_of_drafts() -> None:
    policy = policy_of(full(), mamba("none", 4096, drafts=2), enable_prefix_caching=False)
    s = sequence(1, ("a", 0, 6))
    assert admit(policy, s) == (0, ((1, 2), (3, 4, 5)))
    assert decode(policy, s, 20) == ((1, 2, 6, 7, 8, 9, 10), (3, 4, 5))
    assert policy.usage().state == 3 * 80


def test_mamba_all_keeps_keys_of_every_state_and_holds_the_last() -> None:
    policy = policy_of(full(), mamba("all"))
    s = sequence(1, ("a", 0, 10))
    assert admit(policy, s) == (0, ((1, 2, 3), (4, 5, 6)))
    assert decode(policy, s, 1) == ((1, 2, 3), (0, 0, 6))
    assert free(policy)[-2:] == [5, 4]
    assert admit(policy, sequence(2, ("a", 0, 10))) == (8, ((1, 2, 7), (0, 5, 8)))
    assert policy.usage().state == 3 * 80


def test_a_state_that_is_computed_in_this_step_is_not_hit_in_it() -> None:
    policy = policy_of(full(), mamba("align"))
    a, b = sequence(1, ("a", 0, 8)), sequence(2, ("a", 0, 9))
    start(policy, a)
    hit, answer = start(policy, b)
    assert (hit, answer.need_bytes, answer.reason) == (8, 21 * PAGE, "its state is computed in this step")
    policy.end_step()
    assert admit(policy, b) == (8, ((1, 2, 4), (0, 3, 5)))


def test_mamba_align_frees_a_copied_state_once_its_copy_is_computed() -> None:
    policy = policy_of(full(), mamba("align"))
    s = sequence(1, ("a", 0, 12))
    assert policy.reserve(s, 8, admitting=True) == Granted()
    policy.end_step()
    s.num_computed_tokens = 8
    assert policy.tables(s) == ((1, 2), (0, 3))
    assert extend(policy, s, 4) == ((1, 2, 4), (0, 3, 5))
    assert decode(policy, s, 1) == ((1, 2, 4, 6), (0, 0, 5, 7)), "3 was copied to 5, and 5 to 7"
    assert decode(policy, s, 3) == ((1, 2, 4, 6), (0, 0, 0, 7))
    assert free(policy)[-2:] == [3, 5]
    assert policy.lookup(sequence(2, ("a", 0, 12))) == 8


def test_mamba_align_moves_the_states_of_drafts_along() -> None:
    policy = policy_of(mamba("align", drafts=1))
    s = sequence(1, ("a", 0, 12))
    assert admit(policy, s) == (0, ((0, 0, 1, 2),))
    assert decode(policy, s, 1) == ((0, 0, 1, 2, 3),)
    assert decode(policy, s, 4) == ((0, 0, 0, 2, 3, 4),)
    long = sequence(2, ("b", 0, 20))
    assert policy.reserve(long, 8, admitting=True) == Granted()
    policy.end_step()
    long.num_computed_tokens = 8
    assert policy.tables(long) == ((0, 5, 6),)
    assert extend(policy, long, 12) == ((0, 5, 0, 0, 6, 7),)
    policy.reserve(long, 5)
    assert policy.tables(long) == ((0, 0, 0, 0, 6, 0, 7, 8),)
    policy.abort_step()
    policy.check()
    assert policy.tables(long) == ((0, 0, 0, 0, 6, 7),)
    assert extend(policy, long, 4) == ((0, 0, 0, 0, 6, 7, 8),)


def test_room_for_lookahead_is_taken_of_attention_only_in_align() -> None:
    policy = policy_of(full(), mamba("align"))
    s = sequence(1, ("a", 0, 8))
    assert policy.reserve(s, 8, lookahead=3, admitting=True) == Granted()
    assert policy.tables(s) == ((1, 2, 3), (0, 4))


# Sinks


def test_sinks_are_never_forgotten() -> None:
    policy = policy_of(window(6, sinks=5), num_blocks=30, enable_prefix_caching=False)
    s = sequence(1, ("a", 0, 30))
    admit(policy, s)
    assert decode(policy, s, 1) == ((1, 2, 0, 0, 0, 0, 7, 8),)
    assert (policy.kept(5), policy.kept(30)) == (5, 11)
    assert (policy.usage().token, policy.usage().dropped) == (15 * 4, 16 * 4)


# Steps that are not carried out, and leaps


def test_an_aborted_step_gives_back_what_it_took_and_what_was_forgotten_stays_so() -> None:
    policy = policy_of(full(), window(6))
    s, late = sequence(1, ("a", 0, 12)), sequence(2, ("a", 0, 12), ("b", 0, 9))
    admit(policy, s)
    queue, usage = free(policy), policy.usage()
    assert policy.reserve(s, 1) == Granted()
    assert policy.reserve(late, 9, hit=12, admitting=True) == Granted(12)
    policy.abort_step()
    policy.check()
    assert policy.tables(s) == ((1, 2, 3), (0, 5, 6))
    assert free(policy) == [*queue, 4]
    after = policy.usage()
    assert after.token + after.dropped == usage.token + usage.dropped == 12 * 8
    assert after.dropped == 16
    assert policy.lookup(late) == 12
    assert policy.prefix_stats() == PrefixStats(1, 12, 0)


def test_a_leap_forgets_and_takes_in_the_order_of_single_steps() -> None:
    leaping, stepping = (policy_of(full(), window(6), chunked(8), num_blocks=40) for _ in range(2))
    both = []
    for policy in (leaping, stepping):
        running = [sequence(id, ("a", 0, 4 + 3 * id)) for id in (1, 2, 3)]
        for s in running:
            admit(policy, s)
        both.append(running)
    k = leaping.horizon(both[0], 100)
    assert k == 29, "then blocks run short"
    leaping.advance(both[0], k)
    for _ in range(k):
        for s in both[1]:
            assert stepping.reserve(s, 1) == Granted()
            s.num_computed_tokens += 1
            s.num_tokens += 1
        stepping.end_step()
    assert [leaping.tables(s) for s in both[0]] == [stepping.tables(s) for s in both[1]]
    assert leaping.free_queue() == stepping.free_queue()
    assert leaping.usage() == stepping.usage()
    answers = [stepping.reserve(s, 1) for s in both[1]]
    assert [isinstance(answer, Refused) for answer in answers] == [True, False, False]
    with pytest.raises(ValueError, match="blocks are free for 0 of 1 steps: over the horizon"):
        leaping.advance(both[0], 1)


def test_a_window_alone_goes_on_for_ever_in_the_blocks_that_it_gives_back() -> None:
    policy = policy_of(window(6), num_blocks=5)
    s = sequence(1, ("a", 0, 6))
    admit(policy, s)
    assert policy.horizon([s], 1000) == 1000
    policy.advance([s], 1000)
    policy.check()
    assert policy.block_ids(s) == (3, 4)
    short = sequence(2, ("b", 0, 1))
    fresh = policy_of(window(6), num_blocks=5)
    admit(fresh, short)
    assert fresh.horizon([short], 1000) == 5, "up to the window, what is kept rises"


# Books, and what is refused


def test_the_books_of_groups() -> None:
    policy = policy_of(full(), window(6), mamba("all"), num_blocks=30)
    a, b = sequence(1, ("a", 0, 10)), sequence(2, ("a", 0, 10), ("b", 0, 4))
    admit(policy, a)
    assert policy.reserve(b, 6, hit=8, admitting=True) == Granted(8)
    assert policy.tables(b) == ((1, 2, 10, 11), (4, 5, 12, 13), (0, 8, 14, 15))
    usage = policy.usage()
    assert (usage.held, usage.pool, usage.cached) == (15 * PAGE, 15 * PAGE, 0)
    assert (usage.token, usage.shared, usage.dropped) == ((20 + 12) * 4, 16 * 4, 0)
    assert usage.state == 5 * 80
    assert usage.unfilled == 15 * PAGE - usage.token - usage.state
    assert usage.table == (3 * 3 + 3 * 4) * 4
    policy.end_step()
    a.num_computed_tokens = 10
    assert decode(policy, a, 1) == ((1, 2, 3), (0, 5, 6), (0, 0, 9))
    usage = policy.usage()
    assert usage.token + usage.shared + usage.dropped == (11 + 14) * 8
    assert (usage.dropped, usage.shared) == (4 * 4, 12 * 4)
    assert policy.block_ids(a) == (1, 2, 3, 5, 6, 9)


def test_the_pool_is_one_tensor_for_each_layer_of_a_group_and_kept_whole_or_not_at_all() -> None:
    layout = KVLayout(num_layers=3, num_kv_heads=1, head_dim=16)
    arena = PooledAllocator(HbmDriver(1 << 20), PooledConfig(limit_bytes=1 << 20))
    config = PagedGroupsConfig(num_blocks=10, max_model_len=64, grouping=one_group(layout, 4))
    PagedGroupsPolicy(layout, arena, config)
    assert arena.usage().requested_by_tag[Tag.KV] == 10 * 4 * layout.token_bytes
    assert [block.owner for segment in arena.walk() for block in segment.blocks if block.tag is Tag.KV] == [-1] * 3
    with pytest.raises(OutOfMemory):
        PagedGroupsPolicy(
            layout, arena, PagedGroupsConfig(num_blocks=2000, max_model_len=64, grouping=one_group(layout, 4))
        )
    assert arena.usage().requested_by_tag[Tag.KV] == 10 * 4 * layout.token_bytes


@pytest.mark.parametrize(
    ("groups", "settings", "message"),
    [
        ((), {}, "no group"),
        ((full(), mamba("none")), {}, "mamba_mode must be 'all' or 'align'"),
        ((full(), mamba("all")), {"enable_prefix_caching": False}, "mamba_mode must be 'none'"),
        ((window(6, sinks=4),), {}, "sinks go without prefix caching"),
        ((full(8), chunked(8)), {}, "in blocks of the common size 8 only, not 4"),
        ((full(4), mamba("align", 8)), {}, "give all groups one block_size"),
        ((full(),), {"watermark": 1.0}, "watermark"),
        ((full(),), {"num_blocks": 0}, "num_blocks must be at least 1"),
        ((full(),), {"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_what_to_do(
    groups: tuple[KVGroup, ...], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        policy_of(*groups, **settings)


def test_a_hit_that_was_not_promised_is_refused() -> None:
    policy = policy_of(full(), window(6))
    admit(policy, sequence(1, ("a", 0, 9)))
    s = sequence(2, ("a", 0, 16))
    with pytest.raises(ValueError, match="sequence 2 cannot adopt 12 tokens: 8 tokens of its prefix are held"):
        policy.reserve(s, 4, hit=12, admitting=True)
    assert policy.reserve(s, 12, hit=4, admitting=True) == Granted(4), "less than was promised is"
    with pytest.raises(ValueError, match="it has started already"):
        policy.reserve(s, 4, hit=4)
    bare = policy_of(full(), enable_prefix_caching=False)
    with pytest.raises(ValueError, match="has no prefix cache"):
        bare.reserve(s, 4, hit=4)
