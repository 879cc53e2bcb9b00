"""vLLM's old block manager (v0), rule by rule with numbers: who may come, who copies, what is swapped and evicted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.paged_v0 import AllocStatus, PagedV0Config, PagedV0Policy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Span, Work

TINY = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
TOKEN = TINY.token_bytes
BLOCK = 4 * TOKEN


def policy_of(num_blocks: int = 8, **settings: object) -> PagedV0Policy:
    arena = PooledAllocator(HbmDriver(1 << 20), PooledConfig(limit_bytes=1 << 20))
    base = {"num_blocks": num_blocks, "block_size": 4, "max_model_len": 4096, "watermark": 0.0}
    return PagedV0Policy(TINY, arena, PagedV0Config(**base | settings))


def sequence(id: int, prompt: int | Sequence[Span], *, session: int | None = None, output: str = "") -> KVSequence:
    spans = ((f"prompt {id}", 0, prompt),) if isinstance(prompt, int) else tuple(prompt)
    tokens = sum(length for _, _, length in spans)
    spans = (*spans, (output or f"output {id}", 0, 1000))
    return KVSequence(id, id if session is None else session, 0, tokens, 4096, spans=spans)


def admit(policy: PagedV0Policy, *sequences: KVSequence) -> None:
    """One step in which they all come in."""
    for s in sequences:
        hit = policy.lookup(s)
        assert policy.reserve(s, s.num_tokens - hit, hit=hit, admitting=True) == Granted(hit)
    policy.end_step()
    computed(*sequences)
    policy.check()


def computed(*sequences: KVSequence) -> None:
    for s in sequences:
        s.num_computed_tokens, s.num_tokens = s.num_tokens, s.num_tokens + 1


def decode(policy: PagedV0Policy, *sequences: KVSequence, steps: int = 1) -> None:
    for _ in range(steps):
        for s in sequences:
            assert policy.reserve(s, 1, others_running=True) == Granted()
        policy.end_step()
        computed(*sequences)
        policy.check()


def forks(policy: PagedV0Policy, prompt: int, count: int) -> list[KVSequence]:
    """Samples of one prompt after the step that computed it."""
    samples = [sequence(id, [("prompt", 0, prompt)], session=0) for id in range(count)]
    assert policy.reserve(samples[0], prompt, admitting=True) == Granted()
    for child in samples[1:]:
        assert policy.fork(samples[0], child) == Granted()
    policy.end_step()
    computed(*samples)
    policy.check()
    return samples


def free_blocks(policy: PagedV0Policy) -> int:
    return (policy.usage().pool + policy.usage().cached) // BLOCK


# -- the pool --------------------------------------------------------------------------------------------------------


def test_every_block_of_the_pool_can_be_used() -> None:
    policy, s = policy_of(8), sequence(1, 32)
    admit(policy, s)
    assert policy.block_ids(s) == (0, 1, 2, 3, 4, 5, 6, 7)
    assert free_blocks(policy) == 0


def test_the_defaults_are_those_of_v0() -> None:
    config = PagedV0Config(num_blocks=1, max_model_len=1)
    assert (config.block_size, config.watermark, config.swap_space_bytes) == (16, 0.01, 4 * 2**30)
    assert not config.enable_prefix_caching


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_blocks": 0}, "num_blocks must be at least 1, not 0"),
        ({"swap_space_bytes": -1}, "swap_space_bytes must be at least 0, not -1"),
        ({"watermark": 1.0}, "watermark must be from 0 to below 1, not 1.0"),
    ],
)
def test_settings_that_make_no_pool_are_refused(settings: dict[str, float], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PagedV0Config(**{"num_blocks": 4, "max_model_len": 8, **settings})


def test_a_pool_that_does_not_fit_leaves_nothing() -> None:
    arena = PooledAllocator(HbmDriver(1 << 20), PooledConfig(limit_bytes=1024))
    with pytest.raises(OutOfMemory):
        PagedV0Policy(TINY, arena, PagedV0Config(num_blocks=300, block_size=1, max_model_len=9))
    assert arena.usage().requested == 0


# -- admission -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "status"),
    [(72, AllocStatus.OK), (73, AllocStatus.NEVER), (80, AllocStatus.NEVER)],
)
def test_the_watermark_of_an_empty_pool(prompt: int, status: AllocStatus) -> None:
    """int(0.1 * 20) = 2 of 20 blocks: 18 blocks of 4 tokens may come in, 19 never."""
    policy = policy_of(20, watermark=0.1)
    assert policy.can_allocate(sequence(1, prompt)) is status


def test_never_and_later_can_be_told_by_what_is_needed() -> None:
    """Of 20 blocks 10 are held and 2 are the watermark: 8 blocks may come now, 18 at best."""
    policy = policy_of(20, watermark=0.1)
    admit(policy, sequence(1, 40))
    pool = 20 * BLOCK
    assert policy.can_allocate(sequence(2, 32)) is AllocStatus.OK
    for prompt, status, need in ((33, AllocStatus.LATER, 11), (72, AllocStatus.LATER, 20), (73, AllocStatus.NEVER, 21)):
        s = sequence(3, prompt)
        refused = policy.reserve(s, prompt, admitting=True)
        assert isinstance(refused, Refused)
        assert (refused.need_bytes, refused.free_bytes) == (need * BLOCK, 10 * BLOCK)
        assert policy.can_allocate(s) is status
        assert (refused.need_bytes > pool) == (status is AllocStatus.NEVER)
        assert ("never" in refused.reason) == (status is AllocStatus.NEVER)
    assert free_blocks(policy) == 10


def test_the_whole_prompt_gets_its_blocks_though_a_chunk_is_computed() -> None:
    policy, s = policy_of(), sequence(1, 30)
    assert policy.reserve(s, 5, admitting=True) == Granted()
    policy.end_step()
    assert len(policy.block_ids(s)) == 8
    assert policy.usage().token == 5 * TOKEN
    s.num_computed_tokens = 5
    assert policy.reserve(s, 25) == Granted(), "no block is touched that it has not got"
    policy.end_step()
    policy.check()
    assert policy.usage().token == 30 * TOKEN


# -- decode ----------------------------------------------------------------------------------------------------------


def test_a_request_in_the_middle_of_a_block_needs_a_free_block() -> None:
    policy, a, b = policy_of(4), sequence(1, 5), sequence(2, 8)
    admit(policy, a, b)
    assert free_blocks(policy) == 0
    assert policy.reserve(a, 1) == Refused(BLOCK, 0, "fewer blocks are free than the tokens touch")
    policy.release(b, Release.FINISH)
    decode(policy, a)
    assert len(policy.block_ids(a)) == 2, "and takes none"


def test_the_watermark_is_no_matter_of_decode() -> None:
    policy, s = policy_of(4, watermark=0.5), sequence(1, 8)
    admit(policy, s)
    decode(policy, s, steps=5)
    assert len(policy.block_ids(s)) == 4
    assert isinstance(policy.reserve(s, 1), Refused)


def test_samples_of_a_prompt_need_a_block_each_at_once() -> None:
    policy = policy_of(5)
    samples = forks(policy, 6, 4)
    assert free_blocks(policy) == 3
    refused = policy.append_refusal(samples)
    assert refused == Refused(4 * BLOCK, 3 * BLOCK, "fewer blocks are free than the samples touch")
    assert policy.append_refusal(samples[:3]) is None


# -- copy-on-write ---------------------------------------------------------------------------------------------------


def test_forks_share_all_blocks_and_the_last_one_writes_in_place() -> None:
    """A prompt of 10 in blocks of 4: two full ones stay shared, of the third all but one sample take a copy."""
    policy = policy_of(12)
    a, b, c = forks(policy, 10, 3)
    assert policy.block_ids(a) == policy.block_ids(b) == policy.block_ids(c) == (0, 1, 2)
    assert policy.usage()._replace(pool=0) == policy.usage()._replace(
        token=10 * TOKEN, held=3 * BLOCK, shared=20 * TOKEN, table=9 * 4, pool=0
    )
    assert policy.horizon([a, b, c], 9) == 0, "a copy is work"
    decode(policy, a, b, c)
    assert [policy.block_ids(s) for s in (a, b, c)] == [(0, 1, 3), (0, 1, 4), (0, 1, 2)]
    assert policy.take_work() == Work(copied_bytes=2 * BLOCK)
    assert policy.usage().held == 5 * BLOCK
    assert policy.usage().shared == 2 * 8 * TOKEN
    decode(policy, a, b, c, steps=2)
    assert policy.take_work() == Work()
    assert policy.usage().held == 8 * BLOCK, "each has a fourth"


def test_a_full_last_block_is_not_copied() -> None:
    policy = policy_of(12)
    a, b = forks(policy, 8, 2)
    assert policy.horizon([a, b], 9) == 9
    decode(policy, a, b)
    assert policy.take_work() == Work()
    assert [policy.block_ids(s) for s in (a, b)] == [(0, 1, 2), (0, 1, 3)]


def test_a_reference_that_is_given_back_leaves_the_block_to_the_others() -> None:
    policy = policy_of(12)
    a, b = forks(policy, 10, 2)
    policy.release(a, Release.FINISH)
    policy.check()
    assert free_blocks(policy) == 9
    decode(policy, b)
    assert policy.take_work() == Work()
    assert policy.block_ids(b) == (0, 1, 2)


def test_a_fork_after_some_tokens_copies_the_parents_last_block() -> None:
    policy, parent, child = policy_of(12), sequence(1, 5), sequence(2, 5)
    admit(policy, parent)
    decode(policy, parent)
    child.num_tokens, child.num_computed_tokens = parent.num_tokens, parent.num_computed_tokens
    assert policy.fork(parent, child) == Granted()
    decode(policy, child, parent)
    assert (policy.block_ids(child), policy.block_ids(parent)) == ((0, 2), (0, 1))
    assert policy.take_work().copied_bytes == BLOCK


def test_what_cannot_be_forked() -> None:
    policy, s, child = policy_of(), sequence(1, 10), sequence(2, 10)
    assert isinstance(policy.fork(s, child), Refused)
    policy.reserve(s, 4, admitting=True)
    policy.end_step()
    answer = policy.fork(s, child)
    assert answer == Refused(0, 0, "only a sequence whose whole prompt is in memory can be forked")
    with pytest.raises(ValueError, match="sequence 1 has started already and cannot be a fork of 1"):
        policy.fork(s, s)


# -- swapping --------------------------------------------------------------------------------------------------------


def test_a_round_trip_over_the_host() -> None:
    policy, s = policy_of(8, swap_space_bytes=3 * BLOCK), sequence(1, 9)
    admit(policy, s)
    assert policy.swap_out(s) == Granted()
    policy.check()
    assert policy.take_work() == Work(swapped_bytes=3 * BLOCK)
    assert (free_blocks(policy), policy.swapped_blocks, policy.block_ids(s)) == (8, 3, ())
    assert policy.usage().token == 0
    assert policy.can_swap_in([s]) is AllocStatus.OK
    assert policy.swap_in(s) == Granted()
    policy.check()
    assert policy.take_work() == Work(swapped_bytes=3 * BLOCK)
    assert (free_blocks(policy), policy.swapped_blocks, len(policy.block_ids(s))) == (5, 0, 3)
    assert policy.usage().token == 9 * TOKEN
    decode(policy, s)


def test_samples_that_were_swapped_share_no_blocks_any_more() -> None:
    policy = policy_of(12, swap_space_bytes=8 * BLOCK)
    samples = forks(policy, 10, 2)
    assert policy.can_swap_out(samples)
    for s in samples:
        policy.swap_out(s)
    assert policy.take_work().swapped_bytes == 6 * BLOCK
    for s in samples:
        policy.swap_in(s)
    policy.check()
    assert (policy.usage().held, policy.usage().shared) == (6 * BLOCK, 0)
    decode(policy, *samples)
    assert policy.take_work().copied_bytes == 0


def test_a_lack_of_host_memory_is_named() -> None:
    policy = policy_of(12, swap_space_bytes=3 * BLOCK - 1)
    a, b = sequence(1, 7), sequence(2, 9)
    admit(policy, a, b)
    assert policy.swap_out(b) == Refused(3 * BLOCK, 2 * BLOCK, "lack of CPU swap space: raise swap_space_bytes")
    assert policy.swap_out(a) == Granted()
    assert not policy.can_swap_out([b])
    policy.check()


def test_unseen_tokens_count_when_swapping() -> None:
    """8 tokens are computed in two full blocks, the ninth is sampled: a third block is touched, in either direction."""
    policy, s = policy_of(4, swap_space_bytes=2 * BLOCK), sequence(1, 8)
    admit(policy, s)
    assert policy.swap_out(s) == Refused(3 * BLOCK, 2 * BLOCK, "lack of CPU swap space: raise swap_space_bytes")
    roomy, other = policy_of(4, swap_space_bytes=3 * BLOCK), sequence(2, 5)
    admit(roomy, s2 := sequence(1, 8))
    roomy.swap_out(s2)
    assert roomy.swapped_blocks == 2
    admit(roomy, other)
    assert roomy.can_swap_in([s2]) is AllocStatus.LATER, "two blocks are free, and three are touched"


def test_swapping_in_leaves_the_watermark_free() -> None:
    policy, a, b = policy_of(10, watermark=0.2), sequence(1, 10), sequence(2, 20)
    admit(policy, a)
    policy.swap_out(a)
    admit(policy, b)
    assert policy.can_swap_in([a]) is AllocStatus.OK, "3 and 2 of 5"
    decode(policy, b)
    assert policy.can_swap_in([a]) is AllocStatus.LATER, "3 and 2 of 4"
    assert policy.swap_in(a) == Refused(5 * BLOCK, 4 * BLOCK, "the sequence does not fit on the device")
    policy.release(b, Release.FINISH)
    a.num_tokens = 36  # as samples whose blocks are not shared any more
    assert policy.can_swap_in([a]) is AllocStatus.NEVER, "9 and 2 of 10"


def test_a_swapped_sequence_that_ends_leaves_the_host() -> None:
    policy, s = policy_of(), sequence(1, 9)
    admit(policy, s)
    policy.swap_out(s)
    with pytest.raises(ValueError, match="sequence 1 is swapped out; swap it in first"):
        policy.reserve(s, 1)
    assert policy.swap_out(s) == Refused(0, 0, "the sequence holds no blocks on the device")
    policy.release(s, Release.DROP)
    assert policy.swapped_blocks == 0
    assert policy.swap_in(s) == Refused(0, 0, "the sequence is not swapped out")


def test_room_of_the_step_under_way_cannot_be_swapped_out() -> None:
    policy, s = policy_of(), sequence(1, 9)
    policy.reserve(s, 9, admitting=True)
    with pytest.raises(RuntimeError, match="part of the step that is under way"):
        policy.swap_out(s)


def test_who_comes_back_needs_new_blocks_only() -> None:
    """Its three blocks were all that was free but one, which its token touches and does not take."""
    policy, a, b = policy_of(4, swap_space_bytes=1 << 20), sequence(1, 10), sequence(2, 4)
    admit(policy, a)
    policy.swap_out(a)
    admit(policy, b)
    policy.swap_in(a)
    assert free_blocks(policy) == 0
    assert isinstance(policy.reserve(a, 1), Refused)
    assert policy.reserve(a, 1, admitting=True) == Granted()


# -- prefix caching --------------------------------------------------------------------------------------------------


def caching(num_blocks: int = 8, **settings: object) -> PagedV0Policy:
    return policy_of(num_blocks, enable_prefix_caching=True, **settings)


SYSTEM = ("system", 0, 8)


def test_full_blocks_are_found_again_and_the_last_token_is_computed() -> None:
    policy = caching()
    a, b = sequence(1, [SYSTEM, ("a", 0, 2)]), sequence(2, [SYSTEM])
    admit(policy, a)
    assert policy.lookup(b) == 4, "of 8 tokens the last one is to be computed, so its whole block"
    admit(policy, b)
    assert policy.block_ids(b) == (0, 1), "whose content is there all the same"
    assert policy.usage().shared == 8 * TOKEN


def test_equal_prompts_of_one_step_share_blocks_and_are_both_computed() -> None:
    policy = caching()
    a, b = sequence(1, [SYSTEM]), sequence(2, [SYSTEM])
    assert policy.reserve(a, 8, admitting=True) == Granted()
    assert policy.lookup(b) == 0, "nobody has computed it yet"
    assert policy.reserve(b, 8, admitting=True) == Granted()
    policy.end_step()
    assert policy.block_ids(a) == policy.block_ids(b) == (0, 1)
    assert policy.lookup(b) == 4


def test_hits_are_not_subtracted_at_admission() -> None:
    policy = caching(4)
    a, b = sequence(1, [SYSTEM]), sequence(2, [SYSTEM, ("b", 0, 4)])
    admit(policy, a)
    assert policy.can_allocate(b) is AllocStatus.LATER, "one new block, two of four are free"


def test_a_decoded_block_is_exchanged_for_the_cached_one() -> None:
    policy = caching()
    a, b = (sequence(id, [("p", 0, 6)], output="same") for id in (1, 2))
    admit(policy, a)
    admit(policy, b)
    assert (policy.block_ids(a), policy.block_ids(b)) == ((0, 1), (0, 2))
    decode(policy, a, steps=2)
    assert free_blocks(policy) == 5
    assert policy.horizon([b], 9) == 1, "the block that fills with the second token is cached, and 2 will be freed"
    decode(policy, b, steps=2)
    assert (policy.block_ids(b), free_blocks(policy)) == ((0, 1), 6)
    assert policy.usage().shared == 8 * TOKEN


def test_cached_blocks_are_taken_only_when_no_other_is_free() -> None:
    policy = caching(5)
    a, probe = sequence(1, [SYSTEM]), sequence(9, [SYSTEM, ("x", 0, 1)])
    admit(policy, a)
    policy.release(a, Release.FINISH)
    policy.check()
    assert policy.usage().cached == 2 * BLOCK
    admit(policy, sequence(2, 9))
    assert policy.lookup(probe) == 8, "three plain ones were there"
    admit(policy, sequence(3, 1))
    assert policy.lookup(probe) == 4


def test_the_evictor_takes_the_least_recently_used_and_of_those_the_longest_prefix() -> None:
    policy = caching(6)
    old, late = sequence(1, [("old", 0, 12)]), sequence(2, [("late", 0, 12)])
    admit(policy, old)
    admit(policy, late)
    policy.release(late, Release.FINISH)  # freed first, used last
    policy.release(old, Release.FINISH)

    probes = [sequence(id, [(stream, 0, 12), ("x", 0, 1)]) for id, stream in ((8, "old"), (9, "late"))]
    left = []
    for id in range(6):
        admit(policy, sequence(10 + id, 1))
        left.append(tuple(map(policy.lookup, probes)))
    assert left == [(8, 12), (4, 12), (0, 12), (0, 8), (0, 4), (0, 0)]


def test_a_swapped_sequence_finds_its_full_blocks_again() -> None:
    policy, s = caching(), sequence(1, [SYSTEM, ("a", 0, 2)])
    admit(policy, s)
    policy.swap_out(s)
    policy.check()
    assert policy.usage().cached == 2 * BLOCK
    policy.swap_in(s)
    policy.check()
    assert policy.block_ids(s)[:2] == (0, 1)
    assert policy.take_work().swapped_bytes == 6 * BLOCK, "v0 copies them nevertheless"


def test_tokens_that_are_not_cached_cannot_be_adopted() -> None:
    policy, a = caching(), sequence(1, [SYSTEM])
    admit(policy, a)
    for hit in (8, 3, -4):
        with pytest.raises(ValueError, match=f"sequence 2 cannot adopt {hit} tokens: 4 of its prefix are cached"):
            policy.reserve(sequence(2, [SYSTEM]), 1, hit=hit, admitting=True)


# -- a step that is not carried out ----------------------------------------------------------------------------------


def test_an_aborted_copy_gives_the_shared_block_back() -> None:
    policy = policy_of()
    a, b = forks(policy, 10, 2)
    before = policy.usage(), policy.block_ids(a), policy.block_ids(b)
    policy.reserve(a, 1)
    policy.reserve(b, 1)
    policy.abort_step()
    policy.check()
    assert (policy.usage(), policy.block_ids(a), policy.block_ids(b)) == before
    assert policy.take_work() == Work()
    decode(policy, a, b)
    assert policy.take_work().copied_bytes == BLOCK


def test_a_copy_whose_source_is_gone_stays() -> None:
    policy = policy_of()
    a, b = forks(policy, 10, 2)
    policy.reserve(a, 1)
    policy.release(b, Release.DROP)
    policy.abort_step()
    policy.check()
    assert policy.block_ids(a) == (0, 1, 3)
    assert policy.usage().token == 10 * TOKEN
    assert policy.take_work().copied_bytes == BLOCK


def test_newcomers_their_forks_and_their_keys_go() -> None:
    policy = caching()
    parent, child, twin = (sequence(id, [SYSTEM, ("a", 0, 2)]) for id in (1, 2, 3))
    policy.reserve(parent, 10, admitting=True)
    policy.fork(parent, child)
    policy.reserve(twin, 10, admitting=True)
    policy.abort_step()
    policy.check()
    assert free_blocks(policy) == 8
    assert policy.usage().cached == 0, "nobody has computed what they promised"
    assert policy.lookup(twin) == 0
