"""A server that plans a step before it has the tokens of the last one: keys follow, windows wait, members rest."""

from __future__ import annotations

from hbmtwin.allocators.contract import KeysFollow, LetsRest
from hbmtwin.allocators.decode_group import DecodeGroup
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.form_groups import Grouping
from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.paged_groups import PagedGroupsConfig, PagedGroupsPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Release

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)


def paged(blocks: int = 20) -> PagedPolicy:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    config = PagedConfig(num_blocks=blocks, max_model_len=256, block_size=4, enable_prefix_caching=True)
    return PagedPolicy(TINY, arena, config)


def sequence(id: int, tokens: int, computed: int = 0) -> KVSequence:
    return KVSequence(id, id, 0, tokens, 256, num_computed_tokens=computed, spans=(("same", 0, 256),))


def found(policy: PagedPolicy | PagedGroupsPolicy) -> int:
    """Tokens of its prefix that somebody would find who asks for 200."""
    return policy.lookup(sequence(99, 200))


def test_a_block_whose_last_token_is_not_known_gets_its_key_with_the_next_plan() -> None:
    policy = paged()
    assert isinstance(policy, KeysFollow)
    s, policy.unsampled = sequence(0, 7), set[int]()
    assert policy.reserve(s, 7, admitting=True) == Granted(0)
    assert found(policy) == 4
    # the eighth token comes from the step that is computed now, and has its slot in the one that is planned
    s.num_computed_tokens, s.num_tokens, policy.unsampled = 7, 8, {0}
    policy.reserve(s, 1)
    assert found(policy) == 4
    s.num_computed_tokens, s.num_tokens = 8, 9
    policy.reserve(s, 1)
    assert found(policy) == 8


def test_who_is_not_planned_any_more_has_its_keys_when_its_tokens_are_known() -> None:
    policy = paged()
    s, policy.unsampled = sequence(0, 7), set[int]()
    policy.reserve(s, 7, admitting=True)
    s.num_computed_tokens, s.num_tokens, policy.unsampled = 7, 8, {0}
    policy.reserve(s, 1)
    s.num_computed_tokens = 8
    policy.cache_blocks(s)
    policy.release(s, Release.FINISH)
    assert found(policy) == 8


def test_in_a_group_and_in_a_leap_keys_follow_by_a_step() -> None:
    policy, group = paged(), DecodeGroup()
    s, policy.unsampled = sequence(0, 6), set[int]()
    policy.reserve(s, 6, admitting=True)
    s.num_computed_tokens, s.num_tokens = 6, 7
    group.join(s, 200)
    assert policy.reserve_together(group)  # the slot of the seventh
    group.go(1)
    assert policy.reserve_together(group)  # of the eighth
    assert found(policy) == 4
    group.go(1)
    policy.advance(group, 1)
    assert found(policy) == 8
    policy.advance(group, 3)
    assert found(policy) == 8
    policy.advance(group, 1)
    assert found(policy) == 12
    policy.check()


def test_who_rests_keeps_its_blocks_while_the_others_go_on() -> None:
    policy, group = paged(), DecodeGroup()
    assert isinstance(policy, LetsRest)
    policy.unsampled = set()
    one, other = sequence(0, 4), KVSequence(1, 1, 0, 4, 256, spans=(("other", 0, 256),))
    for s, final in ((one, 5), (other, 50)):
        policy.reserve(s, 4, admitting=True)
        s.num_computed_tokens, s.num_tokens = 4, 5
        group.join(s, final + 1)
    assert [place for place, _ in group.places()] == [1, 2]
    assert group.places(1) == [(1, one)]
    assert policy.reserve_together(group)
    assert group.go(1) == [one]
    policy.rest(one)
    assert policy.reserve_together(group)
    assert (policy.block_ids(one), policy.block_ids(other)) == ((1, 3), (2, 4))
    assert policy.usage().token == TINY.token_bytes * (5 + 6)
    policy.check()
    policy.release(one, Release.FINISH)
    policy.check()


def test_a_window_gives_back_what_no_step_under_way_reads() -> None:
    arena = PooledAllocator(HbmDriver(1 << 30), PooledConfig(limit_bytes=1 << 30))
    group = KVGroup(kind="sliding_window", num_layers=1, block_size=4, window=5)
    grouping = Grouping(groups=(group,), page_bytes=4 * TINY.token_bytes, group_length=1)
    config = PagedGroupsConfig(grouping=grouping, num_blocks=20, max_model_len=256, max_num_batched_tokens=64)
    policy = PagedGroupsPolicy(TINY, arena, config)
    assert isinstance(policy, KeysFollow)
    s, policy.unsampled = sequence(0, 8), set[int]()
    policy.reserve(s, 8, admitting=True)
    s.num_computed_tokens, s.num_tokens, policy.under_way = 8, 9, {0: 8}
    policy.reserve(s, 1)  # without the eight under way, tokens 0 to 3 were out of reach of the ninth
    assert policy.tables(s) == ((1, 2, 3),)
    s.num_computed_tokens, s.num_tokens, policy.under_way = 9, 10, {0: 1}
    policy.reserve(s, 1)
    assert policy.tables(s) == ((0, 2, 3),)
