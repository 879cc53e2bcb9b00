"""Contiguous KV that drops tokens: what is held, moved, overwritten and copied, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.buffers import Buffers, BufferStore
from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.contiguous_config import ContiguousConfig
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, KVUsage, Refused, Release, Span, Work

TINY = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256)
"""512 bytes a token and tensor, 2,048 bytes a token."""
LLAMA_7B = KVLayout(num_layers=32, num_kv_heads=32, head_dim=128)
TOKEN = 2048
MIB = 1 << 20


def policy_of(
    retention: str, cls: type[ContiguousPolicy] = ContiguousPolicy, layout: KVLayout = TINY, **settings: Any
) -> ContiguousPolicy:
    arena = PooledAllocator(HbmDriver(1 << 36), PooledConfig(limit_bytes=1 << 35))
    arena.take_work()
    return cls(layout, arena, ContiguousConfig(**{"max_model_len": 4096, "retention": retention} | settings))


def sequence(id: int, tokens: int) -> KVSequence:
    return KVSequence(id=id, session=id, turn=0, num_tokens=tokens, max_tokens=10_000)


def compute(policy: ContiguousPolicy, s: KVSequence, new: int) -> None:
    """Reserve and carry out *new* tokens, without the end of the step."""
    policy.reserve(s, new, admitting=s.num_computed_tokens == 0)
    for layer in range(policy.layout.num_layers):
        policy.grow_layer(layer)


def step(policy: ContiguousPolicy, s: KVSequence, new: int | None = None) -> None:
    """Compute *new* tokens (none given: all that the sequence lacks), and sample one behind the last."""
    new = s.num_tokens - s.num_computed_tokens if new is None else new
    compute(policy, s, new)
    policy.end_step()
    s.num_computed_tokens += new
    s.num_tokens += s.num_computed_tokens == s.num_tokens


def books(**more: int) -> KVUsage:
    empty = {"token": 0, "parked": 0, "held": 0, "growth_copy": 0, "cached": 0, "pool": 0, "table": 0}
    return KVUsage(**empty | more)


def watch(policy: ContiguousPolicy) -> list[tuple[str, int]]:
    """A list that the arena's operations will go to, with their sizes."""
    operations: list[tuple[str, int]] = []
    policy.arena.observer = lambda op, id, size, *rest: operations.append((op, size))
    return operations


def copied(policy: ContiguousPolicy) -> int:
    return policy.take_work().plus(policy.arena.take_work()).copied_bytes


# Claims


@pytest.mark.parametrize("tensors", ["per_layer", "merged"])
def test_claim_a4_truncating_at_4096_is_a_flat_line_of_two_gib(tensors: str) -> None:
    policy = policy_of("truncate(4096)", layout=LLAMA_7B, tensors=tensors)
    s = sequence(1, 4090)
    step(policy, s)
    held_mib, dropped = [], []
    for _ in range(10):
        step(policy, s)
        held_mib.append(policy.usage().held / MIB)
        dropped.append(policy.usage().dropped // LLAMA_7B.token_bytes)
    assert held_mib == [2045.5, 2046, 2046.5, 2047, 2047.5, 2048, 2048, 2048, 2048, 2048]
    assert dropped == [0, 0, 0, 0, 0, 0, 1, 2, 3, 4]
    policy.check()


def test_claim_a5_sinks_and_recent_are_132_tokens_for_ever() -> None:
    policy = policy_of("sink_recent(4, 128)", layout=LLAMA_7B)
    s = sequence(1, 100)
    step(policy, s)
    curve = []
    for _ in range(100):
        step(policy, s)
        curve.append(policy.usage().held)
    assert curve == [min(tokens, 132) * 524_288 for tokens in range(101, 201)]
    assert policy.usage() == books(token=69_206_016, held=69_206_016, dropped=68 * 524_288)


def test_claim_b6_forgetting_is_a_saw_tooth_between_3073_and_4096() -> None:
    policy = policy_of("forget(4096, 1024)", growth="doubling", tensors="merged")
    s = sequence(1, 4095)
    step(policy, s)
    curve = []
    for _ in range(2100):
        step(policy, s)
        curve.append(policy.usage().token // TOKEN)
    assert curve[:3] == [4096, 3073, 3074]
    assert curve == [4096, *range(3073, 4097), *range(3073, 4097), *range(3073, 3124)]
    assert policy.usage() == books(token=3123 * TOKEN, held=4096 * TOKEN, dropped=3072 * TOKEN)


def test_claim_c11_a_ring_of_2048_does_nothing_once_it_is_full() -> None:
    policy = policy_of("sliding_window(2048)", growth="doubling", tensors="merged", copy_scope="step")
    s = sequence(1, 2000)
    step(policy, s)
    assert policy.horizon([s], 10**6) == 48
    while s.num_computed_tokens < 2048:
        step(policy, s)
    operations = watch(policy)
    assert policy.horizon([s], 10**6) == 10**6
    policy.advance([s], 500_000)
    s.num_computed_tokens += 500_000
    s.num_tokens += 500_000
    step(policy, s)
    assert policy.usage() == books(token=2048 * TOKEN, held=2048 * TOKEN, dropped=500_001 * TOKEN)
    assert operations == []
    assert policy.take_work() == Work()
    policy.check()


# Tokens that move


def test_where_growth_concatenates_every_drop_makes_the_tensors_anew_at_equal_size() -> None:
    policy = policy_of("truncate(10)")
    s = sequence(1, 10)
    step(policy, s)
    operations = watch(policy)
    copied(policy)
    step(policy, s)
    assert operations == [("malloc", 5120), ("free", 0)] * 4
    assert copied(policy) == 10 * TOKEN
    assert policy.usage() == books(token=10 * TOKEN, held=10 * TOKEN, dropped=TOKEN)


def test_where_growth_concatenates_forgetting_makes_the_tensors_smaller() -> None:
    policy = policy_of("forget(8, 3)")
    s = sequence(1, 8)
    step(policy, s)
    operations = watch(policy)
    copied(policy)
    step(policy, s)
    assert operations == [("malloc", 6 * 512), ("free", 0)] * 4
    assert copied(policy) == 6 * TOKEN
    assert policy.usage() == books(token=6 * TOKEN, held=6 * TOKEN, dropped=3 * TOKEN)
    step(policy, s)
    assert policy.usage() == books(token=7 * TOKEN, held=7 * TOKEN, dropped=3 * TOKEN)


def test_with_step_scope_the_larger_old_copies_live_until_the_step_ends() -> None:
    policy = policy_of("forget(8, 3)", copy_scope="step")
    s = sequence(1, 8)
    step(policy, s)
    policy.reserve(s, 1)
    policy.grow_layer(0)
    policy.check()
    assert policy.usage() == books(token=5 * TOKEN, held=7 * TOKEN, growth_copy=4 * TOKEN, dropped=3 * TOKEN)
    policy.grow_layer(1)
    assert policy.usage() == books(token=6 * TOKEN, held=6 * TOKEN, growth_copy=8 * TOKEN, dropped=3 * TOKEN)
    policy.check()
    policy.end_step()
    assert policy.usage() == books(token=6 * TOKEN, held=6 * TOKEN, dropped=3 * TOKEN)
    assert policy.take_work() == Work(copied_bytes=5 * TOKEN)


@pytest.mark.parametrize("tensors", ["per_layer", "merged"])
@pytest.mark.parametrize("copy_scope", ["tensor", "step"])
def test_where_there_is_room_to_spare_what_stays_is_moved_to_the_front(tensors: str, copy_scope: str) -> None:
    policy = policy_of("truncate(10)", growth="step", step_tokens=16, tensors=tensors, copy_scope=copy_scope)
    s = sequence(1, 10)
    step(policy, s)
    operations = watch(policy)
    step(policy, s)
    assert operations == []
    assert policy.take_work() == Work(copied_bytes=9 * TOKEN)
    assert policy.usage() == books(token=10 * TOKEN, held=16 * TOKEN, dropped=TOKEN)
    assert policy.arena.take_work().copied_bytes == 0
    policy.check()


def test_a_move_is_made_layer_by_layer() -> None:
    policy = policy_of("truncate(10)", growth="static")
    s = sequence(1, 10)
    step(policy, s)
    policy.reserve(s, 1)
    assert policy.take_work() == Work()
    policy.grow_layer(0)
    assert policy.take_work() == Work(copied_bytes=9 * 1024)
    with pytest.raises(RuntimeError, match="end_step came before grow_layer"):
        policy.end_step()
    policy.grow_layer(1)
    assert policy.take_work() == Work(copied_bytes=9 * 1024)
    policy.end_step()


def test_between_two_drops_nothing_is_moved() -> None:
    policy = policy_of("forget(8, 3)", growth="doubling", initial_tokens=8)
    s = sequence(1, 8)
    moved, horizons = [], []
    for _ in range(8):
        step(policy, s)
        moved.append(copied(policy) // TOKEN)
        horizons.append(policy.horizon([s], 100))
    assert moved == [0, 5, 0, 0, 5, 0, 0, 5]
    assert horizons == [0, 2, 1, 0, 2, 1, 0, 2]
    assert policy.usage().held == 8 * TOKEN


def test_a_chunk_that_takes_the_place_of_all_moves_nothing() -> None:
    policy = policy_of("truncate(10)", growth="static")
    s = sequence(1, 30)
    step(policy, s, 10)
    step(policy, s, 20)
    assert copied(policy) == 0
    assert policy.usage() == books(token=10 * TOKEN, held=10 * TOKEN, dropped=20 * TOKEN)


# Rings


def test_a_concatenated_ring_grows_to_its_bound_and_never_again() -> None:
    policy = policy_of("sliding_window(12)")
    s = sequence(1, 10)
    step(policy, s)
    operations = watch(policy)
    per_step = []
    for _ in range(5):
        operations.clear()
        step(policy, s)
        per_step.append(len(operations))
    assert per_step == [8, 8, 0, 0, 0]
    assert policy.usage() == books(token=12 * TOKEN, held=12 * TOKEN, dropped=3 * TOKEN)


@pytest.mark.parametrize(("growth", "held"), [("static", 100), ("doubling", 100), ("step", 100), ("exact", 70)])
def test_no_growth_rule_makes_a_ring_larger_than_its_bound(growth: str, held: int) -> None:
    policy = policy_of("sliding_window(100)", growth=growth)
    step(policy, sequence(1, 70))
    assert policy.usage() == books(token=70 * TOKEN, held=held * TOKEN)


@pytest.mark.parametrize(("growth", "held"), [("static", 100), ("doubling", 128), ("step", 256), ("exact", 100)])
def test_code_that_moves_tokens_knows_the_longest_it_holds_only_where_growth_is_static(growth: str, held: int) -> None:
    policy = policy_of("truncate(100)", growth=growth)
    step(policy, sequence(1, 110))
    assert policy.usage() == books(token=100 * TOKEN, held=held * TOKEN, dropped=10 * TOKEN)


@pytest.mark.parametrize("retention", ["sliding_window(100)", "sink_recent(4, 96)"])
def test_a_ring_that_grows_and_drops_in_one_step_copies_what_stays(retention: str) -> None:
    policy = policy_of(retention, growth="doubling", tensors="merged", copy_scope="step")
    s = sequence(1, 140)
    step(policy, s, 60)
    assert policy.usage() == books(token=60 * TOKEN, held=64 * TOKEN)
    step(policy, s, 80)
    assert policy.take_work() == Work(copied_bytes=20 * TOKEN)
    assert policy.usage() == books(token=100 * TOKEN, held=100 * TOKEN, dropped=40 * TOKEN)
    policy.check()


def test_a_leap_stops_where_a_ring_is_full_and_goes_on_from_there() -> None:
    policy = policy_of("sliding_window(100)", growth="static")
    a, b = sequence(1, 90), sequence(2, 95)
    for s in (a, b):
        step(policy, s)
    assert policy.horizon([a, b], 1000) == 5
    policy.advance([a, b], 5)
    assert policy.horizon([b], 1000) == 1000
    assert policy.horizon([a, b], 1000) == 5
    policy.advance([a, b], 5)
    assert policy.usage() == books(token=200 * TOKEN, held=200 * TOKEN, dropped=5 * TOKEN)
    policy.check()


# Prompts


@pytest.mark.parametrize("retention", ["truncate(100)", "forget(100, 30)", "sliding_window(100)", "sink_recent(4, 96)"])
def test_a_prompt_over_the_bound_has_slots_only_for_what_is_held(retention: str) -> None:
    policy = policy_of(retention)
    s = sequence(1, 245)
    held = []
    for new in (64, 64, 64, 53):
        step(policy, s, new)
        held.append(policy.usage().held // TOKEN)
        policy.check()
    assert held == ([64, 98, 72, 95] if retention == "forget(100, 30)" else [64, 100, 100, 100])
    assert policy.usage().dropped == (245 - held[-1]) * TOKEN


def test_hybrid_takes_the_prompt_at_once_and_what_retention_holds_of_it() -> None:
    policy = policy_of("truncate(100)", growth="hybrid", decode_growth="doubling")
    short, long = sequence(1, 70), sequence(2, 300)
    step(policy, short, 50)
    assert policy.usage() == books(token=50 * TOKEN, held=70 * TOKEN)
    step(policy, short)
    copied(policy)
    step(policy, short)
    assert policy.usage() == books(token=71 * TOKEN, held=128 * TOKEN)
    assert copied(policy) == 70 * TOKEN
    policy.release(short, Release.FINISH)
    step(policy, long, 60)
    step(policy, long)
    assert policy.usage() == books(token=100 * TOKEN, held=100 * TOKEN, dropped=200 * TOKEN)
    copied(policy)
    step(policy, long)
    assert policy.usage() == books(token=100 * TOKEN, held=100 * TOKEN, dropped=201 * TOKEN)
    assert policy.take_work() == Work(copied_bytes=99 * TOKEN)


def test_what_is_held_may_be_less_than_a_sequence_and_never_more_than_max_model_len() -> None:
    policy = policy_of("sliding_window(16)", max_model_len=16)
    step(policy, sequence(1, 1000))
    assert policy.usage() == books(token=16 * TOKEN, held=16 * TOKEN, dropped=984 * TOKEN)
    with pytest.raises(ValueError, match=r"retention sliding_window\(17\) keeps more tokens than max_model_len 16"):
        policy_of("sliding_window(17)", max_model_len=16)


def test_text_that_is_no_retention_is_refused_when_the_policy_is_made() -> None:
    with pytest.raises(ValueError, match="no retention; write one of"):
        policy_of("last(100)")


def test_admission_by_reservation_reckons_with_what_is_ever_held() -> None:
    policy = policy_of("sliding_window(100)", admission="reserve", limit_bytes=250 * TOKEN)
    answers = [policy.reserve(sequence(id, 10), 10, admitting=True) for id in (1, 2, 3)]
    assert answers[:2] == [Granted(0), Granted(0)]
    assert isinstance(answers[2], Refused)
    assert (answers[2].need_bytes, answers[2].free_bytes) == (100 * TOKEN, 50 * TOKEN)


# Between turns


def turn(id: int, *spans: Span) -> KVSequence:
    tokens = sum(length for _, _, length in spans)
    return KVSequence(id=id, session=1, turn=id, num_tokens=tokens, max_tokens=10_000, spans=spans)


def run_turn(policy: ContiguousPolicy, s: KVSequence) -> int:
    """Admit a turn, compute all of it, and park it; return its hit."""
    hit = policy.lookup(s)
    policy.reserve(s, s.num_tokens - hit, hit=hit, admitting=True)
    for layer in range(TINY.num_layers):
        policy.grow_layer(layer)
    policy.end_step()
    s.num_computed_tokens = s.num_tokens
    policy.check()
    policy.release(s, Release.PARK)
    policy.check()
    return hit


@pytest.mark.parametrize("retention", ["truncate(100)", "sliding_window(100)", "sink_recent(4, 96)"])
def test_a_turn_that_goes_on_need_not_compute_the_dropped_tokens(retention: str) -> None:
    policy = policy_of(retention)
    assert run_turn(policy, turn(1, ("a", 0, 150))) == 0
    assert policy.usage() == books(parked=100 * TOKEN, held=100 * TOKEN, parked_sessions=1)
    following = turn(2, ("a", 0, 150), ("b", 0, 30))
    assert policy.reserve(following, 30, hit=policy.lookup(following), admitting=True) == Granted(150)
    for layer in range(TINY.num_layers):
        policy.grow_layer(layer)
    policy.end_step()
    assert policy.usage() == books(token=100 * TOKEN, held=100 * TOKEN, dropped=80 * TOKEN)
    policy.check()


def test_an_edited_conversation_starts_again_where_tokens_were_dropped() -> None:
    policy = policy_of("truncate(100)")
    run_turn(policy, turn(1, ("a", 0, 150)))
    assert run_turn(policy, turn(2, ("a", 0, 149), ("edit", 0, 30))) == 0
    assert policy.usage() == books(parked=100 * TOKEN, held=100 * TOKEN, parked_sessions=1)


def test_an_edited_conversation_goes_on_where_nothing_was_dropped() -> None:
    policy = policy_of("truncate(100)")
    run_turn(policy, turn(1, ("a", 0, 90)))
    assert run_turn(policy, turn(2, ("a", 0, 60), ("edit", 0, 70))) == 60
    assert policy.usage() == books(parked=100 * TOKEN, held=100 * TOKEN, parked_sessions=1)


def test_a_part_of_a_history_that_lost_tokens_cannot_be_adopted() -> None:
    policy = policy_of("truncate(100)")
    run_turn(policy, turn(1, ("a", 0, 150)))
    with pytest.raises(ValueError, match="cannot adopt 149 tokens: session 1 has 0 parked that can begin it"):
        policy.reserve(turn(2, ("a", 0, 150)), 1, hit=149, admitting=True)
    assert policy.parked_sessions() == (1,)
    policy.check()


# Any configuration

RETENTION_TEXTS = st.one_of(
    st.just("full"),
    st.integers(1, 60).map("truncate({})".format),
    st.tuples(st.integers(1, 60), st.integers(1, 60)).map(lambda pair: f"forget({max(pair)}, {min(pair)})"),
    st.integers(1, 60).map("sliding_window({})".format),
    st.tuples(st.integers(1, 8), st.integers(1, 50)).map(lambda pair: f"sink_recent({pair[0]}, {pair[1]})"),
)
CONFIGURATIONS = st.fixed_dictionaries(
    {
        "retention": RETENTION_TEXTS,
        "growth": st.sampled_from(["static", "exact", "doubling", "step", "hybrid"]),
        "decode_growth": st.sampled_from(["static", "exact", "doubling", "step"]),
        "tensors": st.sampled_from(["per_layer", "merged"]),
        "copy_scope": st.sampled_from(["tensor", "step"]),
        "initial_tokens": st.just(8),
        "step_tokens": st.just(10),
    }
)


def state(policy: ContiguousPolicy) -> tuple[object, ...]:
    return policy.usage(), list(policy.walk()), policy.arena.usage()


def assert_a_leap_equals_single_steps(cls: type[ContiguousPolicy], settings: Any, prompts: list[int]) -> None:
    leaping, stepping = policy_of(cls=cls, **settings), policy_of(cls=cls, **settings)
    in_leap, in_steps = ([sequence(id, tokens) for id, tokens in enumerate(prompts)] for _ in range(2))
    for policy, sequences in ((leaping, in_leap), (stepping, in_steps)):
        for s in sequences:
            step(policy, s)
    kept_before = [leaping.kept(s.num_computed_tokens) for s in in_leap]
    k = leaping.horizon(in_leap, 150)
    leaping.advance(in_leap, k // 2)
    leaping.advance(in_leap, k - k // 2)
    copied(stepping)
    operations = watch(stepping)
    curves = [[kept] for kept in kept_before]
    for _ in range(k):
        for s, curve in zip(in_steps, curves, strict=True):
            step(stepping, s)
            curve.append(stepping.kept(s.num_computed_tokens))
    assert operations == []
    assert copied(stepping) == 0
    assert state(leaping) == state(stepping)
    assert leaping.horizon(in_leap, 150) == stepping.horizon(in_steps, 150)
    for curve in curves:
        assert curve in ([curve[0] + rise * i for i in range(k + 1)] for rise in (0, 1)), "kept is linear in a leap"
    leaping.check()
    stepping.check()


@given(settings=CONFIGURATIONS, prompts=st.lists(st.integers(1, 130), min_size=1, max_size=3))
def test_a_leap_equals_single_steps(settings: Any, prompts: list[int]) -> None:
    assert_a_leap_equals_single_steps(ContiguousPolicy, settings, prompts)


class LeapsOverADrop(ContiguousPolicy):
    """Looks at the room in the buffer, and not at the bound of what is held."""

    def horizon(self, decoding: list[KVSequence], limit: int) -> int:
        return min([limit, *(self._running[s.id].capacity - self._running[s.id].tokens for s in decoding)])


class LeapsIntoTheRing(ContiguousPolicy):
    """Goes on over the step in which a ring becomes full, so that what is held is not linear."""

    def horizon(self, decoding: list[KVSequence], limit: int) -> int:
        return limit

    def advance(self, decoding: list[KVSequence], k: int) -> None:
        for _ in range(k):
            super().advance(decoding, 1)


class OverwritesWithoutTheBooks(ContiguousPolicy):
    """A leap of a full ring counts nothing as dropped."""

    def advance(self, decoding: list[KVSequence], k: int) -> None:
        dropped = self._store.dropped_tokens
        super().advance(decoding, k)
        self._store.dropped_tokens = dropped


@pytest.mark.parametrize(
    ("broken", "retention", "prompt"),
    [
        (LeapsOverADrop, "forget(60, 20)", 55),
        (LeapsIntoTheRing, "sliding_window(60)", 55),
        (OverwritesWithoutTheBooks, "sliding_window(60)", 60),
    ],
)
def test_a_leap_that_differs_from_its_steps_is_noticed(
    broken: type[ContiguousPolicy], retention: str, prompt: int
) -> None:
    settings = {"retention": retention, "growth": "static" if "window" in retention else "doubling"}
    assert_a_leap_equals_single_steps(ContiguousPolicy, settings, [prompt])
    with pytest.raises(AssertionError):
        assert_a_leap_equals_single_steps(broken, settings, [prompt])


def assert_what_is_held_depends_on_the_tokens_only(
    cls: type[ContiguousPolicy], settings: Any, chunks: list[int]
) -> None:
    policy, whole = policy_of(cls=cls, **settings), policy_of(cls=cls, **settings)
    total = sum(chunks)
    s, at_once = sequence(1, total), sequence(1, total)
    computed = 0
    for new in chunks:
        step(policy, s, new)
        policy.check()
        computed += new
        kept = policy.kept(computed)
        usage = policy.usage()
        assert (usage.token, usage.dropped) == (kept * TOKEN, (computed - kept) * TOKEN)
        assert usage.growth_copy == 0
    step(whole, at_once)
    assert whole.usage()[:2] == policy.usage()[:2]
    assert whole.usage().dropped == policy.usage().dropped
    if settings["growth"] == "exact":
        assert whole.usage() == policy.usage()


@given(settings=CONFIGURATIONS, chunks=st.lists(st.integers(1, 60), min_size=1, max_size=8))
def test_what_is_held_depends_on_the_tokens_only(settings: Any, chunks: list[int]) -> None:
    assert_what_is_held_depends_on_the_tokens_only(ContiguousPolicy, settings, chunks)


class KeepsTheChunk(ContiguousPolicy):
    """What a chunk brings over the bound stays until the next step."""

    class Store(BufferStore):
        def plan_drop(self, buffers: Buffers, tokens: int, dropped: int, **more: Any) -> None:
            transient = min(dropped - buffers.dropped, more["capacity"] - tokens)
            super().plan_drop(buffers, tokens + transient, dropped - transient, **more)

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: ContiguousConfig) -> None:
        super().__init__(layout, arena, config)
        self._store = self.Store(layout, arena, config.tensors, config.copy_scope)


def test_tokens_that_are_held_too_long_are_noticed() -> None:
    settings = {"retention": "truncate(20)", "growth": "doubling"}
    assert_what_is_held_depends_on_the_tokens_only(KeepsTheChunk, settings, [10, 10])
    with pytest.raises(AssertionError):
        assert_what_is_held_depends_on_the_tokens_only(KeepsTheChunk, settings, [10, 20])
