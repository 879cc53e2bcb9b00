"""Paged KV with prefix caching, in examples: the worked table of specs/paged-kv.md section 2, then single rules."""

from __future__ import annotations

import pytest

from hbmtwin.allocators.block_keys import BlockKeys
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.prefix_cache import CacheEvent, PrefixStats
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Span
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
TOKEN = 4


def policy_of(num_blocks: int = 8, block_size: int = 4, **settings: object) -> PagedPolicy:
    arena = PooledAllocator(HbmDriver(1 << 20), PooledConfig(limit_bytes=1 << 20))
    base = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": 4096, "enable_prefix_caching": True}
    return PagedPolicy(TINY, arena, PagedConfig(**base | settings))


def sequence(id: int, *prompt: Span) -> KVSequence:
    tokens = sum(length for _, _, length in prompt)
    return KVSequence(id, id, 0, tokens, 4096, spans=(*prompt, (f"output {id}", 0, 1000)))


def admit(policy: PagedPolicy, s: KVSequence, **more: bool) -> tuple[int, tuple[int, ...]]:
    hit = policy.lookup(s)
    assert policy.reserve(s, s.num_tokens - hit, hit=hit, admitting=True, **more) == Granted(hit)
    policy.end_step()
    s.num_computed_tokens, s.num_tokens = s.num_tokens, s.num_tokens + 1
    return hit, policy.block_ids(s)


def decode(policy: PagedPolicy, s: KVSequence, steps: int) -> tuple[int, ...]:
    for _ in range(steps):
        assert policy.reserve(s, 1, others_running=True) == Granted()
        policy.end_step()
        s.num_computed_tokens += 1
        s.num_tokens += 1
    return policy.block_ids(s)


def queue(policy: PagedPolicy) -> list[int]:
    policy.check()
    return list(policy._free)


def test_the_worked_table_of_the_specification() -> None:
    policy = policy_of()
    a, b = sequence(1, ("a", 0, 10)), sequence(2, ("a", 0, 8), ("b", 0, 3))
    assert queue(policy) == [1, 2, 3, 4, 5, 6, 7]
    assert admit(policy, a) == (0, (1, 2, 3))
    assert queue(policy) == [4, 5, 6, 7]
    assert admit(policy, b) == (8, (1, 2, 4))
    assert queue(policy) == [5, 6, 7]
    assert decode(policy, a, 3) == (1, 2, 3, 5)
    assert queue(policy) == [6, 7]
    policy.release(a, Release.FINISH)
    assert queue(policy) == [5, 6, 7, 3]
    policy.release(b, Release.FINISH)
    assert queue(policy) == [4, 5, 6, 7, 3, 2, 1]
    assert admit(policy, sequence(3, ("a", 0, 8))) == (4, (1, 4))
    assert queue(policy) == [5, 6, 7, 3, 2]
    assert admit(policy, sequence(4, ("d", 0, 12))) == (0, (5, 6, 7))
    assert queue(policy) == [3, 2]


def test_a_prompt_of_whole_blocks_computes_its_last_block_again() -> None:
    policy = policy_of()
    assert admit(policy, sequence(1, ("a", 0, 8))) == (0, (1, 2))
    assert admit(policy, sequence(2, ("a", 0, 8))) == (4, (1, 3))
    assert admit(policy, sequence(3, ("a", 0, 9))) == (8, (1, 2, 4))


def test_two_equal_requests_share_in_one_step() -> None:
    policy = policy_of()
    a, b = sequence(1, ("a", 0, 9)), sequence(2, ("a", 0, 9))
    assert policy.reserve(a, 9, admitting=True) == Granted()
    assert policy.lookup(b) == 8
    assert policy.reserve(b, 1, hit=8, admitting=True) == Granted(8)
    assert policy.block_ids(b) == (1, 2, 4)
    assert policy.usage()[:3] == (10 * TOKEN, 0, 16 * TOKEN)
    assert (policy.usage().shared, policy.usage().table) == (8 * TOKEN, 6 * 4)
    policy.abort_step()
    assert queue(policy) == [1, 2, 3, 4, 5, 6, 7]
    assert policy.lookup(b) == 0


def test_of_two_blocks_with_one_key_the_second_serves_when_the_first_is_evicted() -> None:
    policy = policy_of(num_blocks=4)
    a, b, c = sequence(1, ("a", 0, 4)), sequence(2, ("a", 0, 4)), sequence(3, ("c", 0, 8))
    assert admit(policy, a) == (0, (1,))
    assert admit(policy, b) == (0, (2,))
    policy.release(a, Release.FINISH)
    assert queue(policy) == [3, 1]
    assert admit(policy, c) == (0, (3, 1))
    policy.release(c, Release.FINISH)
    assert admit(policy, sequence(4, ("a", 0, 5)))[1][0] == 2


def test_a_chunked_prefill_registers_what_its_chunks_fill() -> None:
    policy = policy_of()
    admit(policy, sequence(1, ("a", 0, 5)))
    s, other = sequence(2, ("a", 0, 14)), sequence(3, ("a", 0, 14))
    assert policy.reserve(s, 5, hit=4, admitting=True) == Granted(4)
    assert policy.lookup(other) == 8
    policy.end_step()
    s.num_computed_tokens = 9
    assert policy.reserve(s, 5) == Granted()
    assert policy.lookup(other) == 12


def test_a_hit_on_a_free_block_takes_a_free_block_and_the_watermark_counts_only_beside_others() -> None:
    policy = policy_of(num_blocks=4, watermark=0.3)
    a, b = sequence(1, ("a", 0, 9)), sequence(2, ("a", 0, 12))
    admit(policy, a)
    policy.release(a, Release.FINISH)
    assert isinstance(policy.reserve(b, 4, hit=8, admitting=True, others_running=True), Refused)
    assert queue(policy) == [3, 2, 1]
    assert policy.reserve(b, 4, hit=8, admitting=True) == Granted(8)


def test_the_whole_sequence_must_fit_though_its_first_chunk_would() -> None:
    s = sequence(1, ("a", 0, 29))
    assert isinstance(policy_of().reserve(s, 4, admitting=True), Refused)
    assert policy_of(reserve_full_sequence=False).reserve(s, 4, admitting=True) == Granted()


def test_a_preempted_sequence_hits_its_own_blocks() -> None:
    policy = policy_of()
    s = sequence(1, ("a", 0, 6))
    admit(policy, s)
    decode(policy, s, 3)
    policy.release(s, Release.PREEMPT)
    s.num_computed_tokens = 0
    assert admit(policy, s) == (8, (1, 2, 3))


def test_a_shared_prefix_is_freed_by_whoever_leaves_last() -> None:
    for first in (0, 1):
        policy = policy_of()
        both = [sequence(1, ("a", 0, 8), ("x", 0, 1)), sequence(2, ("a", 0, 8), ("y", 0, 1))]
        for s in both:
            admit(policy, s)
        policy.release(both[first], Release.FINISH)
        assert queue(policy) == [3 + first, 5, 6, 7]
        policy.release(both[1 - first], Release.FINISH)
        assert queue(policy) == [4 - first, 3 + first, 5, 6, 7, 2, 1]


def test_one_usable_block_and_one_token_a_block() -> None:
    policy = policy_of(num_blocks=2, block_size=1)
    s = sequence(1, ("a", 0, 1))
    assert admit(policy, s) == (0, (1,))
    policy.release(s, Release.FINISH)
    assert policy.lookup(sequence(2, ("a", 0, 1))) == 0
    assert policy.lookup(sequence(3, ("a", 0, 2))) == 1
    assert [block.state for block in policy.walk()] == ["free", "cached"]
    assert isinstance(policy.reserve(sequence(4, ("a", 0, 2)), 1, hit=1, admitting=True), Refused)


def test_caching_off_finds_nothing_and_frees_to_the_tail() -> None:
    policy = policy_of(enable_prefix_caching=False)
    s = sequence(1, ("a", 0, 6))
    admit(policy, s)
    policy.release(s, Release.FINISH)
    assert queue(policy) == [3, 4, 5, 6, 7, 2, 1]
    assert policy.lookup(s) == 0
    assert policy.reset_prefix_cache()


def test_the_cache_is_reset_only_when_nobody_holds_a_block() -> None:
    policy = policy_of()
    s = sequence(1, ("a", 0, 6))
    admit(policy, s)
    assert not policy.reset_prefix_cache()
    policy.release(s, Release.FINISH)
    assert (policy.usage().cached, policy.usage().pool) == (4 * TOKEN, 28 * TOKEN)
    assert policy.reset_prefix_cache()
    assert policy.usage().cached == 0
    assert queue(policy) == [2, 3, 4, 5, 6, 7, 1]
    assert len(policy._cache.keys) == 0


def test_a_hit_that_was_not_promised_is_refused() -> None:
    policy = policy_of()
    admit(policy, sequence(1, ("a", 0, 9)))
    with pytest.raises(ValueError, match="sequence 2 cannot adopt 12 tokens: 2 blocks of 4 tokens hold its prefix"):
        policy.reserve(sequence(2, ("a", 0, 16)), 4, hit=12, admitting=True)


def test_keys_depend_on_tokens_and_not_on_how_spans_are_cut_and_go_when_nobody_needs_them() -> None:
    keys = BlockKeys(4)
    whole = list(keys.of(sequence(1, ("a", 0, 8)), 2))
    assert list(keys.of(sequence(2, ("a", 0, 3), ("a", 3, 0), ("a", 3, 5)), 2)) == whole
    assert keys.of(sequence(3, ("a", 4, 4)), 1)[0] not in whole
    for id in (1, 2, 3):
        keys.forget(id)
    assert len(keys) == 0


# What a server's log would say of it


def test_the_events_of_the_worked_table() -> None:
    policy = policy_of()
    seen: list[CacheEvent] = []
    policy.on_cache_event = seen.append

    def said() -> list[tuple[object, ...]]:
        events = [(e.action, e.key, e.parent, e.block) for e in seen]
        seen.clear()
        return events

    a, b, c, d, e = (
        sequence(1, ("a", 0, 10)),
        sequence(2, ("a", 0, 8), ("b", 0, 3)),
        sequence(3, ("a", 0, 8)),
        sequence(4, ("d", 0, 12)),
        sequence(5, ("e", 0, 5)),
    )
    admit(policy, a)
    assert said() == [("stored", 0, -1, 1), ("stored", 1, 0, 2)]
    admit(policy, b)
    assert said() == [], "what is found is not stored again"
    decode(policy, a, 3)
    assert said() == [("stored", 2, 1, 3)]
    policy.release(a, Release.FINISH)
    policy.release(b, Release.FINISH)
    assert said() == [], "what is freed is there still"
    admit(policy, c)
    assert said() == [("stored", 1, 0, 4)], "block 2 has that key too"
    admit(policy, d)
    assert said() == [("stored", 3, -1, 5), ("stored", 4, 3, 6), ("stored", 5, 4, 7)]
    admit(policy, e)
    assert said() == [("removed", 2, -1, 3), ("removed", 1, -1, 2), ("stored", 6, -1, 3)]
    assert not policy.reset_prefix_cache()
    for s in (c, d, e):
        policy.release(s, Release.FINISH)
    assert said() == []
    assert policy.reset_prefix_cache()
    assert said() == [("cleared", -1, -1, -1)]


def test_a_leap_tells_the_events_of_its_steps_in_their_order() -> None:
    """In the second step and in the sixth a fills a block, and b, behind it, takes one that was c's."""
    told = []
    for leaps in (True, False):
        policy = policy_of(num_blocks=8)
        a, b, c = sequence(1, ("a", 0, 6)), sequence(2, ("b", 0, 7)), sequence(3, ("c", 0, 12))
        admit(policy, c)
        policy.release(c, Release.FINISH)
        both = [a, b]
        for s in both:
            admit(policy, s)
        seen: list[CacheEvent] = []
        policy.on_cache_event = seen.append
        if leaps:
            policy.advance(both, policy.horizon(both, 99))
        else:
            for _ in range(6):
                for s in both:
                    decode(policy, s, 1)
        told.append([(event.action, event.block) for event in seen])
        assert policy.block_ids(b) == (6, 7, 3, 1)
    assert told[0] == [
        ("stored", 7),
        ("stored", 5),
        ("removed", 3),
        ("removed", 2),
        ("stored", 3),
        ("stored", 2),
        ("removed", 1),
    ]
    assert told[0] == told[1]


def test_nobody_hears_of_a_pool_without_a_cache() -> None:
    policy = policy_of(enable_prefix_caching=False)
    policy.on_cache_event = pytest.fail
    admit(policy, sequence(1, ("a", 0, 9)))
    assert policy.on_cache_event is None
    assert policy.prefix_stats() == PrefixStats()


def test_an_admission_counts_once_and_one_after_preemption_apart() -> None:
    policy = policy_of(num_blocks=6)
    a, b = sequence(1, ("a", 0, 9)), sequence(2, ("a", 0, 8), ("b", 0, 5))
    admit(policy, a)
    assert policy.prefix_stats() == PrefixStats(requests=1, queries=9)
    hit = policy.lookup(b)
    assert isinstance(policy.reserve(b, 99, hit=hit, admitting=True), Refused)
    assert policy.prefix_stats() == PrefixStats(requests=1, queries=9), "looked up and not admitted"
    assert admit(policy, b)[0] == 8
    assert policy.prefix_stats() == PrefixStats(requests=2, queries=9 + 13, hits=8)
    policy.release(a, Release.PREEMPT)
    a.num_computed_tokens = 0
    assert admit(policy, a)[0] == 8
    assert policy.prefix_stats() == PrefixStats(2, 22, 8, 1, 10, 8)
    policy.release(a, Release.FINISH)
    policy.release(b, Release.FINISH)
    again = sequence(1, ("a", 0, 9))
    assert policy.reserve(again, 1, hit=policy.lookup(again), admitting=True) == Granted(8)
    assert policy.prefix_stats() == PrefixStats(3, 31, 16, 1, 10, 8), "the next of that number is a new one"
    policy.abort_step()
    assert policy.prefix_stats() == PrefixStats(2, 22, 8, 1, 10, 8), "nobody was admitted"


# Older releases


def test_the_worked_table_before_bare_blocks_went_first() -> None:
    policy = policy_of(version="0.22")
    a, b = sequence(1, ("a", 0, 10)), sequence(2, ("a", 0, 8), ("b", 0, 3))
    assert admit(policy, a) == (0, (1, 2, 3))
    assert admit(policy, b) == (8, (1, 2, 4))
    assert decode(policy, a, 3) == (1, 2, 3, 5)
    policy.release(a, Release.FINISH)
    assert queue(policy) == [6, 7, 5, 3]
    policy.release(b, Release.FINISH)
    assert queue(policy) == [6, 7, 5, 3, 4, 2, 1]
    assert admit(policy, sequence(3, ("a", 0, 8))) == (4, (1, 6))
    assert queue(policy) == [7, 5, 3, 4, 2]
    assert admit(policy, sequence(4, ("d", 0, 12))) == (0, (7, 5, 3))
    assert queue(policy) == [4, 2]


def test_an_aborted_step_gives_back_to_the_head_in_every_release() -> None:
    policy = policy_of(version="0.18")
    admit(policy, sequence(1, ("a", 0, 9)))
    late = sequence(2, ("a", 0, 8), ("b", 0, 9))
    assert policy.reserve(late, 9, hit=policy.lookup(late), admitting=True) == Granted(8)
    policy.abort_step()
    assert queue(policy) == [4, 5, 6, 7]


def test_every_look_up_counts_in_older_releases() -> None:
    policy = policy_of(version="0.22", num_blocks=5)
    a, b = sequence(1, ("a", 0, 9)), sequence(2, ("a", 0, 8), ("b", 0, 9))
    admit(policy, a)
    for tries in (1, 2, 3):
        hit = policy.lookup(b)
        assert isinstance(policy.reserve(b, 9, hit=hit, admitting=True), Refused)
        policy.abort_step()
        assert policy.prefix_stats() == PrefixStats(1 + tries, 9 + 17 * tries, 8 * tries)
    policy.release(a, Release.PREEMPT)
    a.num_computed_tokens = 0
    policy.lookup(a)
    assert policy.prefix_stats()[3:] == (1, 10, 8)


# Keys


def test_who_is_looked_up_and_never_admitted_leaves_no_keys() -> None:
    policy = policy_of(num_blocks=4)
    for id in range(50):
        s = sequence(id, ("shared", 0, 8), (f"own {id}", 0, 40))
        assert policy.lookup(s) == 0
        assert isinstance(policy.reserve(s, 48, admitting=True), Refused)
        policy.release(s, Release.DROP)
    assert len(policy._cache.keys) == 0
    s = sequence(99, ("shared", 0, 6))
    admit(policy, s)
    policy.release(s, Release.PREEMPT)
    policy.release(s, Release.DROP)
    assert len(policy._cache.keys) == 1, "that of the block which is cached still"
    assert policy._cache.keys._chains == {}


@pytest.mark.parametrize("oom", ["preempt", "reject"])
def test_no_chain_of_keys_outlives_a_run(oom: str) -> None:
    """Requests are preempted, rejected in mid-run, and refused though they are alone: each is released in the end."""
    scenario = Scenario.load(
        preset="paged",
        overrides=[
            "kv_cache.enable_prefix_caching=true",
            f"memory.oom={oom}",
            "engine.max_model_len=4096",
            "engine.gpu_memory_utilization=0.6",
            "workload.users=24",
            "workload.num_prompts=60",
            "workload.prompt_tokens=700",
            "workload.output_tokens=900",
            "session.turns=2",
            "kv_cache.block_size=16",
        ],
    )
    twin = Twin(scenario)
    result = twin.run()
    assert result.summary["preemptions"] if oom == "preempt" else result.summary["requests_rejected"]
    assert twin.kv._cache.keys._chains == {}
    assert twin.kv.reset_prefix_cache()
    assert len(twin.kv._cache.keys) == 0
