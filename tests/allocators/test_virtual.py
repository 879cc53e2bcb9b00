"""The ``virtual`` policy by worked examples: pages of Llama-2-7B counted by hand, reuse, shortage, parking."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.direct import DirectAllocator, DirectConfig
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Refused, Release, Tag, Work
from hbmtwin.allocators.virtual import VirtualConfig, VirtualPolicy

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
LLAMA_2_7B = KVLayout(num_layers=32, num_kv_heads=32, head_dim=128)
"""8 KiB a token and tensor, 64 tensors: 256 tokens a page of 2 MiB, 128 MiB for the first token."""
SMALL = KVLayout(num_layers=2, num_kv_heads=1, head_dim=64)
"""128 bytes a token and tensor, 4 tensors: 32 tokens a page of 4 KiB."""


def make(
    layout: KVLayout = LLAMA_2_7B,
    capacity: int = 16 * GIB,
    max_model_len: int = 4096,
    page_bytes: int = 2 * MIB,
    limit_bytes: int | None = None,
) -> VirtualPolicy:
    arena = DirectAllocator(HbmDriver(capacity, page_bytes=min(page_bytes, 2 * MIB)), DirectConfig())
    config = VirtualConfig(max_model_len=max_model_len, page_bytes=page_bytes, limit_bytes=limit_bytes)
    return VirtualPolicy(layout, arena, config)


def small(pages: int, max_model_len: int = 256, limit_pages: int | None = None) -> VirtualPolicy:
    """Room for so many pages of 4 KiB; four of them hold 32 tokens."""
    limit = None if limit_pages is None else limit_pages * 4096
    return make(SMALL, pages * 4096, max_model_len, 4096, limit)


def sequence(id: int, tokens: int, session: int | None = None) -> KVSequence:
    session = id if session is None else session
    return KVSequence(id, session, 0, tokens, tokens + 100, spans=((f"session {session}", 0, tokens + 100),))


def grow(policy: VirtualPolicy) -> None:
    for layer in range(policy.layout.num_layers):
        policy.grow_layer(layer)


def step(policy: VirtualPolicy, *sequences: KVSequence, hit: int = 0) -> None:
    """Each sequence computes what it lacks, and samples a token."""
    for s in sequences:
        new = s.num_tokens - s.num_computed_tokens - hit
        assert policy.reserve(s, new, hit=hit, admitting=s.num_computed_tokens == 0) == Granted(hit)
    grow(policy)
    policy.end_step()
    for s in sequences:
        s.num_computed_tokens = s.num_tokens
        s.num_tokens += 1
    policy.check()
    policy.arena.check()


def pages(policy: VirtualPolicy) -> dict[str, int]:
    """Pages by state."""
    states = [block.state for block in policy.walk()]
    return {state: states.count(state) for state in sorted(set(states))}


# How many pages


@pytest.mark.parametrize(
    ("tokens", "mapped", "held_mib"),
    [(1, 64, 128), (256, 64, 128), (257, 128, 256), (512, 128, 256), (1000, 256, 512), (4096, 1024, 2048)],
)
def test_pages_of_a_sequence_of_llama_2_7b(tokens: int, mapped: int, held_mib: int) -> None:
    policy = make()
    step(policy, sequence(1, tokens))
    assert pages(policy) == {"running": mapped}
    assert mapped == 64 * -(-tokens // 256)
    assert policy.usage().held == held_mib * MIB
    assert policy.usage().token == tokens * 524288
    assert policy.usage().unfilled == held_mib * MIB - tokens * 524288


@pytest.mark.parametrize(
    ("page_kib", "mapped", "held_mib"), [(64, 13 * 64, 52), (128, 7 * 64, 56), (256, 4 * 64, 64), (2048, 64, 128)]
)
def test_small_pages_waste_less_of_100_tokens(page_kib: int, mapped: int, held_mib: int) -> None:
    policy = make(page_bytes=page_kib * KIB)
    step(policy, sequence(1, 100))
    assert pages(policy) == {"running": mapped}
    assert policy.usage().token == 50 * MIB
    assert policy.usage().held == held_mib * MIB


def test_one_range_holds_64_tensors_at_full_length() -> None:
    policy = make()
    step(policy, sequence(1, 300))
    starts = sorted({block.address for block in policy.walk()})
    first = starts[0]
    assert [start - first for start in starts[:4]] == [0, 2 * MIB, 32 * MIB, 34 * MIB], (
        "K and V of 4,096 tokens: 32 MiB"
    )
    assert policy.arena.reserve_range(MIB) == first + 2 * GIB
    assert policy.arena.usage().reserved == 256 * MIB, "addresses cost nothing"


def test_each_page_shows_the_tokens_in_it() -> None:
    policy = small(pages=100)
    step(policy, sequence(7, 70))
    first = next(policy.walk()).address
    tensor = 8 * 4096
    """256 tokens of 128 bytes."""
    assert [(b.address - first, b.token_bytes // 128, b.state, b.owner) for b in policy.walk()] == [
        (n * tensor + place * 4096, tokens, "running", 7) for n in range(4) for place, tokens in enumerate((32, 32, 6))
    ]


def test_tensors_of_different_width_have_pages_of_their_own_number() -> None:
    policy = make(KVLayout(num_layers=1, num_kv_heads=1, head_dim=256, v_head_dim=96), 400 * KIB, 512, 4096)
    step(policy, s := sequence(1, 56))
    assert pages(policy) == {"running": 7 + 3}, "56 * 512 bytes of K, 56 * 192 of V"
    assert policy.horizon([s], 1000) == 0, "K is full; V has room for 8 more"
    step(policy, s)
    assert pages(policy) == {"running": 8 + 3}
    assert policy.horizon([s], 1000) == 7
    assert policy.usage().token == 57 * 704


def test_a_token_may_lie_across_two_pages() -> None:
    policy = make(KVLayout(num_layers=1, num_kv_heads=1, head_dim=96), 400 * KIB, 512, 4096)
    step(policy, s := sequence(1, 21))
    assert pages(policy) == {"running": 2}, "192 bytes a token: 21 are 4,032 bytes of 4,096"
    assert policy.horizon([s], 1000) == 0
    step(policy, s)
    assert pages(policy) == {"running": 4}
    assert [b.token_bytes for b in policy.walk()] == [4096, 128, 4096, 128]


def test_mla_has_one_tensor_a_layer() -> None:
    policy = make(KVLayout(num_layers=61, num_kv_heads=1, head_dim=576, v_head_dim=0))
    step(policy, sequence(1, 1821))
    assert pages(policy) == {"running": 2 * 61}, "1,152 bytes a token: 1,820.4 tokens a page"


# What it costs


def test_a_page_is_two_driver_calls_and_a_range_one() -> None:
    policy = make()
    step(policy, s := sequence(1, 256))
    assert policy.arena.take_work() == Work(driver_calls=1 + 2 * 64, mapped_bytes=128 * MIB)
    step(policy, s)
    assert policy.arena.take_work() == Work(driver_calls=2 * 64, mapped_bytes=128 * MIB)
    for _ in range(255):
        step(policy, s)
    assert s.num_computed_tokens == 512
    assert policy.arena.take_work() == Work(), "255 tokens into pages that are there"
    assert policy.take_work() == Work()


def test_pages_are_mapped_layer_by_layer_in_running_order() -> None:
    policy = small(pages=100)
    seen: list[tuple[str, int]] = []
    policy.arena.observer = lambda op, id, size, stream, arg, tag, owner: seen.append((op, owner))
    for s in (sequence(1, 33), sequence(2, 5)):
        policy.reserve(s, s.num_tokens, admitting=True)
    assert seen == []
    policy.grow_layer(0)
    assert seen == [("malloc", 1)] * 4 + [("malloc", 2)] * 2
    policy.grow_layer(1)
    policy.end_step()
    assert len(seen) == 12
    assert policy.usage().token == 38 * SMALL.token_bytes


# Deferred reclamation


def test_the_next_sequence_finds_pages_mapped() -> None:
    policy = make()
    step(policy, first := sequence(1, 1000))
    policy.release(first, Release.FINISH)
    policy.check()
    assert policy.usage().pool == 512 * MIB
    assert policy.usage().held == 0
    policy.arena.take_work()
    step(policy, second := sequence(2, 700))
    assert policy.arena.take_work() == Work(), "three of the four rows of pages are needed, and all are there"
    assert policy.usage().held == 512 * MIB, "the fourth row is surplus of the sequence that took the range"
    assert policy.usage().pool == 0
    assert {block.owner for block in policy.walk()} == {2}
    assert policy.horizon([second], 1000) == 324, "the surplus is room for decoding as well"
    policy.release(second, Release.FINISH)
    step(policy, sequence(3, 1100))
    assert policy.arena.take_work() == Work(driver_calls=2 * 64, mapped_bytes=128 * MIB), "a fifth row"


def test_the_range_with_the_fewest_pages_that_are_enough_is_taken() -> None:
    policy = small(pages=100)
    step(policy, *(ended := [sequence(1, 128), sequence(2, 33), sequence(3, 64), sequence(4, 10)]))
    for s in ended:
        policy.release(s, Release.FINISH)
    policy.arena.take_work()
    for s, held in ((sequence(5, 60), 8), (sequence(6, 33), 8), (sequence(7, 40), 16)):
        before = policy.usage().held
        step(policy, s)
        assert policy.usage().held - before == held * 4096
    assert policy.arena.take_work() == Work()
    step(policy, sequence(8, 33))
    assert policy.arena.take_work().driver_calls == 2 * 4, "none is enough: the fullest free one, with four of eight"


def test_pages_that_nobody_needs_are_mapped_elsewhere_when_memory_ends() -> None:
    policy = small(pages=40)
    step(policy, *(ended := [sequence(1, 128), sequence(2, 128)]))
    assert pages(policy) == {"running": 32}
    for s in ended:
        policy.release(s, Release.FINISH)
    assert pages(policy) == {"free": 32}
    policy.arena.take_work()
    step(policy, long := sequence(3, 224))
    assert pages(policy) == {"running": 28, "free": 12}, "12 new pages: 8 were free at the driver, 4 were reclaimed"
    assert policy.arena.take_work() == Work(driver_calls=2 * 4 + 2 * 12, mapped_bytes=12 * 4096)
    assert policy.reserve(sequence(4, 97), 97, admitting=True) == Refused(
        16 * 4096, 12 * 4096, "the whole prompt does not fit"
    )
    step(policy, sequence(4, 96))
    assert pages(policy) == {"running": 40}
    assert policy.reserve(long, 1) == Refused(4 * 4096, 0, "not enough pages")


def test_surplus_of_a_running_sequence_is_reclaimed_too() -> None:
    policy = small(pages=32)
    step(policy, first := sequence(1, 256))
    policy.release(first, Release.FINISH)
    step(policy, short := sequence(2, 10))
    assert pages(policy) == {"running": 32}
    assert policy.horizon([short], 1000) == 246
    step(policy, sequence(3, 200))
    assert pages(policy) == {"running": 32}, "4 and 28"
    assert policy.horizon([short], 1000) == 22
    assert policy.usage().token == 210 * SMALL.token_bytes


def test_memory_of_others_leaves_fewer_pages() -> None:
    policy = small(pages=10)
    other = policy.arena.malloc(5 * 4096, tag=Tag.ACTIVATION)
    assert policy.reserve(sequence(1, 33), 33, admitting=True) == Refused(
        8 * 4096, 5 * 4096, "the whole prompt does not fit"
    )
    policy.arena.free(other)
    step(policy, sequence(1, 33))


def test_a_limit_of_its_own() -> None:
    policy = small(pages=100, limit_pages=8)
    step(policy, s := sequence(1, 64))
    assert policy.reserve(s, 1) == Refused(4 * 4096, 0, "not enough pages")
    policy.release(s, Release.PREEMPT)
    step(policy, sequence(2, 64))
    assert policy.usage().held == 8 * 4096


# Refusal, and a step that is not carried out


def test_a_refusal_changes_nothing() -> None:
    policy = small(pages=10)
    step(policy, s := sequence(1, 32))
    step(policy, s)
    before = (policy.usage(), list(policy.walk()), policy.arena.take_work())
    assert before[0].held == 8 * 4096
    refused = policy.reserve(sequence(2, 1), 1, admitting=True)
    assert refused == Refused(4 * 4096, 2 * 4096, "the whole prompt does not fit")
    assert (policy.usage(), list(policy.walk())) == before[:2]
    assert policy.arena.take_work() == Work()
    policy.check()


def test_a_prompt_is_admitted_whole_though_it_comes_in_chunks() -> None:
    policy = small(pages=12)
    assert isinstance(policy.reserve(sequence(1, 97), 32, admitting=True), Refused)
    s = sequence(2, 96)
    for computed in (0, 32, 64):
        s.num_computed_tokens = computed
        assert policy.reserve(s, 32, admitting=computed == 0) == Granted()
        grow(policy)
        policy.end_step()
        assert policy.usage().held == (computed + 32) // 32 * 4 * 4096
        policy.check()


def test_an_aborted_step_unmaps_what_it_had_mapped() -> None:
    policy = small(pages=100)
    step(policy, a := sequence(1, 32), ended := sequence(2, 40))
    policy.release(ended, Release.FINISH)
    before = (policy.usage(), list(policy.walk()))
    policy.arena.take_work()
    policy.reserve(a, 1)
    policy.reserve(sequence(3, 100), 100, admitting=True)
    grow(policy)
    assert policy.usage().held == 8 * 4096 + 16 * 4096
    policy.abort_step()
    assert (policy.usage(), list(policy.walk())) == before
    assert policy.arena.take_work() == Work(driver_calls=4 * 12, mapped_bytes=12 * 4096), "mapped and unmapped"
    policy.check()
    step(policy, a)
    assert policy.usage().token == 33 * SMALL.token_bytes


def test_an_aborted_step_does_not_map_again_what_it_reclaimed() -> None:
    policy = small(pages=16)
    step(policy, ended := sequence(1, 64), a := sequence(2, 60))
    policy.release(ended, Release.FINISH)
    assert pages(policy) == {"running": 8, "free": 8}
    policy.reserve(a, 36)
    grow(policy)
    assert pages(policy) == {"running": 12, "free": 4}
    policy.abort_step()
    assert pages(policy) == {"running": 8, "free": 4}
    policy.check()


def test_memory_that_goes_elsewhere_in_mid_step_is_an_out_of_memory_with_facts() -> None:
    policy = small(pages=20)
    step(policy, a := sequence(1, 32, session=8))
    policy.release(a, Release.PARK)
    step(policy, b := sequence(2, 32))
    before = (policy.usage(), list(policy.walk()))
    assert policy.reserve(b, 40) == Granted()
    policy.grow_layer(0)
    policy.arena.malloc(6 * 4096, tag=Tag.ACTIVATION)
    with pytest.raises(OutOfMemory) as raised:
        policy.grow_layer(1)
    facts = raised.value.facts
    assert (facts.asked_bytes, facts.tag, facts.owner) == (4096, Tag.KV, 2)
    assert facts.owner_bytes == (4 + 4 + 2) * 4096, "two pages of the second layer were still there"
    assert facts.unfilled_bytes == 6 * 4096, "its new pages hold no tokens yet"
    assert facts.parked_bytes == 32 * SMALL.token_bytes
    policy.check()
    policy.abort_step()
    assert (policy.usage(), list(policy.walk())) == before
    policy.check()


def test_layers_left_out_are_errors() -> None:
    policy = small(pages=100)
    s = sequence(1, 10)
    policy.reserve(s, 10, admitting=True)
    policy.grow_layer(0)
    for verb, call in (
        ("end_step", policy.end_step),
        ("advance", lambda: policy.advance([s], 1)),
        ("parking", lambda: policy.release(s, Release.PARK)),
    ):
        with pytest.raises(RuntimeError, match=f"{verb} came before grow_layer of all 2 layers"):
            call()
    policy.abort_step()
    policy.reserve(s, 10, admitting=True)
    with pytest.raises(RuntimeError, match="the last layer grew before another: sequence 1 lacks pages"):
        policy.grow_layer(1)
    policy.abort_step()
    assert policy.usage() == small(pages=100).usage()


def test_a_sequence_may_end_in_the_middle_of_its_growth() -> None:
    policy = small(pages=100)
    policy.reserve(a := sequence(1, 10), 10, admitting=True)
    policy.reserve(b := sequence(2, 10), 10, admitting=True)
    policy.grow_layer(0)
    policy.release(a, Release.PREEMPT)
    policy.check()
    policy.grow_layer(1)
    policy.end_step()
    policy.check()
    assert pages(policy) == {"free": 2, "running": 4}
    assert policy.horizon([b], 100) == 22


# Leaps


def test_a_leap_goes_to_the_page_boundary() -> None:
    policy = make()
    step(policy, a := sequence(1, 1000), b := sequence(2, 300))
    assert policy.horizon([a, b], 10_000) == 24, "1,024 is the edge of the fourth page"
    assert policy.horizon([b], 10_000) == 212
    assert policy.horizon([a, b], 7) == 7
    policy.advance([a, b], 24)
    policy.check()
    assert policy.usage().token == 1348 * 524288
    assert policy.horizon([a, b], 10_000) == 0
    before = policy.usage()
    with pytest.raises(ValueError, match="1 steps are over the horizon of 0: a page would be missing"):
        policy.advance([a, b], 1)
    assert policy.usage() == before


def test_a_leap_ends_at_the_longest_sequence_allowed() -> None:
    policy = make(max_model_len=300)
    step(policy, a := sequence(1, 290))
    assert policy.horizon([a], 1000) == 10, "the page has room for 512"


@given(
    lengths=st.lists(st.integers(1, 200), min_size=1, max_size=4),
    ended=st.integers(0, 200),
    head_dims=st.sampled_from([(64, None), (256, 96), (576, 0), (96, None)]),
    cut=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_a_leap_is_as_many_single_steps(
    lengths: list[int], ended: int, head_dims: tuple[int, int | None], cut: int
) -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=head_dims[0], v_head_dim=head_dims[1])
    leaping = make(layout, 16 * MIB, 256, 4096)
    if ended:  # its pages are surplus of a sequence that takes its range
        step(leaping, s := sequence(99, ended))
        leaping.release(s, Release.FINISH)
    batch = [sequence(id, length) for id, length in enumerate(lengths)]
    step(leaping, *batch)
    stepping, in_steps = copy.deepcopy((leaping, batch))
    k = leaping.horizon(batch, 1000)
    leaping.advance(batch, k // cut)
    leaping.advance(batch, k - k // cut)
    leaping.check()
    stepping.arena.take_work()
    for _ in range(k):
        step(stepping, *in_steps)
    assert stepping.arena.take_work() == Work()
    assert (stepping.usage(), list(stepping.walk())) == (leaping.usage(), list(leaping.walk()))
    assert stepping._store.needed == leaping._store.needed
    longest = max(s.num_computed_tokens for s in in_steps)
    assert stepping.horizon(in_steps, 1) == 0
    if longest < 256:
        step(stepping, *in_steps)
        assert stepping.arena.take_work().mapped_bytes > 0, "the horizon is no shorter than it must be"


# Parking


def test_the_next_turn_adopts_its_history() -> None:
    policy = small(pages=100)
    step(policy, first := sequence(1, 50, session=9))
    policy.release(first, Release.PARK)
    policy.check()
    assert policy.usage()._replace(held=0) == policy.usage()._replace(held=0, parked=50 * SMALL.token_bytes)
    assert (policy.usage().parked_sessions, policy.parked_sessions()) == (1, (9,))
    assert pages(policy) == {"parked": 8}
    second = sequence(2, 80, session=9)
    assert policy.lookup(second) == 50
    policy.arena.take_work()
    step(policy, second, hit=50)
    assert policy.arena.take_work() == Work(driver_calls=2 * 4, mapped_bytes=4 * 4096)
    assert policy.usage().token == 80 * SMALL.token_bytes
    assert policy.usage().parked_sessions == 0
    assert {block.owner for block in policy.walk()} == {2}


def test_a_history_that_is_not_adopted_is_left_to_the_next_sequence() -> None:
    policy = small(pages=100)
    step(policy, first := sequence(1, 50, session=9))
    policy.release(first, Release.PARK)
    policy.arena.take_work()
    step(policy, sequence(2, 60, session=9))
    assert policy.arena.take_work() == Work(), "it takes the range that its own history had"
    assert policy.usage().parked_sessions == 0
    with pytest.raises(ValueError, match="cannot adopt 3 tokens: session 9 has 0 parked"):
        policy.reserve(sequence(3, 60, session=9), 57, hit=3)


def test_the_least_recently_parked_gives_way_before_a_sequence_is_refused() -> None:
    policy = small(pages=20)
    step(policy, *(turns := [sequence(id, 30, session=id) for id in (1, 2, 3, 4)]))
    for s in (turns[2], turns[0], turns[1]):
        policy.release(s, Release.PARK)
    assert policy.parked_sessions() == (3, 1, 2)
    step(policy, sequence(5, 33, session=5))
    assert policy.parked_sessions() == (1, 2)
    step(policy, sequence(6, 10, session=1))
    assert policy.parked_sessions() == (2,), "its own history goes in any case, and is room enough"
    for parked in ((2,), (2,), ()):
        step(policy, turns[3])
        assert policy.parked_sessions() == parked
    assert isinstance(policy.reserve(sequence(7, 1), 1, admitting=True), Refused)


def test_histories_are_not_dropped_in_vain() -> None:
    policy = small(pages=20)
    step(policy, *(turns := [sequence(id, 30, session=id) for id in (1, 2)]))
    policy.release(turns[0], Release.PARK)
    assert policy.reserve(sequence(3, 129), 129, admitting=True) == Refused(
        20 * 4096, 12 * 4096, "the whole prompt does not fit"
    )
    assert policy.parked_sessions() == (1,)


def test_an_aborted_step_parks_an_adopted_history_again() -> None:
    policy = small(pages=100)
    step(policy, first := sequence(1, 50, session=9))
    policy.release(first, Release.PARK)
    before = policy.usage()
    assert policy.reserve(sequence(2, 80, session=9), 60, hit=20, admitting=True) == Granted(20)
    policy.grow_layer(0)
    policy.abort_step()
    policy.check()
    assert policy.usage() == before
    assert policy.lookup(sequence(2, 80, session=9)) == 50


# Settings


def test_pages_must_be_what_the_driver_can_map() -> None:
    arena = DirectAllocator(HbmDriver(GIB), DirectConfig())
    for size in (64 * KIB, 3 * MIB, 0, -2 * MIB):
        with pytest.raises(ValueError, match=f"page_bytes {size} is no multiple of 2097152"):
            VirtualPolicy(SMALL, arena, VirtualConfig(max_model_len=100, page_bytes=size))
    VirtualPolicy(SMALL, arena, VirtualConfig(max_model_len=100, page_bytes=4 * MIB))


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="max_model_len must be at least 1, not 0"):
        VirtualConfig(max_model_len=0)
    with pytest.raises(ValueError, match="limit_bytes must not be negative, but is -5"):
        VirtualConfig(max_model_len=1, limit_bytes=-5)


def test_it_asks_for_pages() -> None:
    assert VirtualPolicy.requires == {"pages"}
    assert VirtualPolicy.offers == {"one_piece", "park", "preempt", "reject"}
