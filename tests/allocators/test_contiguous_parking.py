"""Between turns: parked histories, how much of one a next turn finds, and that none leaks."""

from __future__ import annotations

import pytest

from hbmtwin.allocators.contiguous import ContiguousPolicy
from hbmtwin.allocators.contiguous_config import ContiguousConfig
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVLayout, KVSequence, Release, Span, Tag

TINY = KVLayout(num_layers=2, num_kv_heads=1, head_dim=256)
LLAMA_7B = KVLayout(num_layers=32, num_kv_heads=32, head_dim=128)
TOKEN = 2048
MIB = 1 << 20


def policy_of(layout: KVLayout = TINY, **settings: object) -> ContiguousPolicy:
    arena = PooledAllocator(HbmDriver(1 << 36), PooledConfig(limit_bytes=1 << 35))
    return ContiguousPolicy(layout, arena, ContiguousConfig(**{"max_model_len": 4096} | settings))


def turn(id: int, spans: tuple[Span, ...], session: int = 1) -> KVSequence:
    tokens = sum(length for _, _, length in spans)
    return KVSequence(id=id, session=session, turn=id, num_tokens=tokens, max_tokens=4096, spans=spans)


def compute(policy: ContiguousPolicy, s: KVSequence) -> int:
    """Admit a sequence and compute all its tokens; return its hit."""
    hit = policy.lookup(s)
    policy.reserve(s, s.num_tokens - hit, hit=hit, admitting=True)
    for layer in range(policy.layout.num_layers):
        policy.grow_layer(layer)
    policy.end_step()
    s.num_computed_tokens = s.num_tokens
    return hit


def parked(policy: ContiguousPolicy, s: KVSequence) -> KVSequence:
    compute(policy, s)
    policy.release(s, Release.PARK)
    return s


# Parking and adopting


def test_a_parked_history_keeps_its_buffers_and_is_no_longer_running() -> None:
    policy = policy_of()
    parked(policy, turn(1, (("a", 0, 10),)))
    assert [(b.state, b.size, b.token_bytes) for b in policy.walk()] == [("parked", 5120, 5120)] * 4
    assert (policy.usage().token, policy.usage().parked, policy.usage().held) == (0, 10 * TOKEN, 10 * TOKEN)
    policy.check()


def test_the_next_turn_adopts_the_buffers_and_computes_only_what_is_new() -> None:
    policy = policy_of()
    parked(policy, turn(1, (("a", 0, 10),)))
    policy.arena.take_work()
    assert compute(policy, turn(2, (("a", 0, 10), ("b", 0, 5)))) == 10
    assert policy.arena.take_work().copied_bytes == 10 * TOKEN
    assert (policy.usage().token, policy.usage().parked, policy.usage().held) == (15 * TOKEN, 0, 15 * TOKEN)
    assert {b.owner for b in policy.walk()} == {2}
    policy.check()


def test_lookup_pins_nothing_and_finds_only_its_own_session() -> None:
    policy = policy_of()
    parked(policy, turn(1, (("a", 0, 10),)))
    assert policy.lookup(turn(2, (("a", 0, 15),))) == 10
    assert policy.lookup(turn(2, (("a", 0, 15),))) == 10
    assert policy.lookup(turn(3, (("a", 0, 15),), session=2)) == 0


def test_a_prompt_that_is_all_there_recomputes_its_last_token() -> None:
    policy = policy_of()
    parked(policy, turn(1, (("a", 0, 10),)))
    assert policy.lookup(turn(2, (("a", 0, 10),))) == 9


def test_what_is_found_ends_where_the_conversation_went_another_way() -> None:
    policy = policy_of()
    parked(policy, turn(1, (("system", 0, 6), ("a", 0, 10))))
    edited = turn(2, (("system", 0, 6), ("a", 0, 4), ("edit", 0, 20)))
    assert compute(policy, edited) == 10
    assert policy.usage().token == 30 * TOKEN
    policy.check()


def test_only_computed_tokens_are_found_though_the_spans_say_more() -> None:
    policy = policy_of()
    s = turn(1, (("a", 0, 10), ("answer", 0, 40)))
    s.num_tokens = 11
    compute(policy, s)
    s.num_computed_tokens = 11
    policy.release(s, Release.PARK)
    assert policy.lookup(turn(2, (("a", 0, 10), ("answer", 0, 40), ("b", 0, 5)))) == 11


def test_a_hit_that_is_not_parked_is_refused_and_changes_nothing() -> None:
    policy = policy_of()
    parked(policy, turn(1, (("a", 0, 10),)))
    with pytest.raises(ValueError, match="sequence 2 cannot adopt 11 tokens: session 1 has 10 parked"):
        policy.reserve(turn(2, (("a", 0, 15),)), 4, hit=11, admitting=True)
    assert policy.usage().parked == 10 * TOKEN
    policy.check()


def test_buffers_with_room_are_adopted_with_it() -> None:
    policy = policy_of(growth="doubling", tensors="merged", copy_scope="step")
    parked(policy, turn(1, (("a", 0, 70),)))
    following = turn(2, (("a", 0, 70), ("b", 0, 30)))
    compute(policy, following)
    assert policy.take_work().copied_bytes == 0
    assert policy.horizon([following], 1000) == 28


# No history leaks


def kv_bytes(policy: ContiguousPolicy) -> int:
    policy.check()
    return policy.arena.usage().requested_by_tag[Tag.KV]


def test_a_next_turn_without_a_hit_frees_the_old_history() -> None:
    policy = policy_of()
    parked(policy, turn(1, (("a", 0, 10),)))
    compute(policy, turn(2, (("other", 0, 7),)))
    assert policy.parked_sessions() == ()
    assert kv_bytes(policy) == 7 * TOKEN


@pytest.mark.parametrize("why", [Release.FINISH, Release.DROP])
def test_the_end_of_a_session_frees_what_it_parked(why: Release) -> None:
    policy = policy_of()
    parked(policy, turn(1, (("a", 0, 10),)))
    policy.release(turn(2, (("a", 0, 15),)), why)
    assert kv_bytes(policy) == 0


def test_a_preempted_stranger_leaves_a_history_alone() -> None:
    policy = policy_of()
    parked(policy, turn(1, (("a", 0, 10),)))
    policy.release(turn(2, (("a", 0, 15),)), Release.PREEMPT)
    assert kv_bytes(policy) == 10 * TOKEN


def test_parking_again_frees_the_older_history() -> None:
    policy = policy_of()
    first, second = turn(1, (("a", 0, 10),)), turn(2, (("b", 0, 20),))
    compute(policy, first)
    compute(policy, second)
    policy.release(first, Release.PARK)
    policy.release(second, Release.PARK)
    assert kv_bytes(policy) == 20 * TOKEN
    assert policy.lookup(turn(3, (("b", 0, 30),))) == 20


def test_nothing_can_be_parked_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="sequence 1 holds no KV that could be parked"):
        policy_of().release(turn(1, (("a", 0, 10),)), Release.PARK)


def test_a_server_may_drop_the_least_recently_parked() -> None:
    policy = policy_of()
    for session in (1, 2, 3):
        parked(policy, turn(session, (("a", 0, 10),), session=session))
    parked(policy, turn(4, (("a", 0, 20),), session=1))
    assert policy.parked_sessions() == (2, 3, 1)
    policy.drop_parked(policy.parked_sessions()[0])
    assert policy.parked_sessions() == (3, 1)
    assert kv_bytes(policy) == 30 * TOKEN
    with pytest.raises(KeyError):
        policy.drop_parked(2)


# Claims


@pytest.mark.parametrize("tensors", ["per_layer", "merged"])
def test_claim_a3_ten_tokens_a_turn(tensors: str) -> None:
    policy = policy_of(LLAMA_7B, tensors=tensors)
    mib_after = {}
    for number in range(1, 101):
        parked(policy, turn(number, (("chat", 0, 10 * number),)))
        mib_after[number] = policy.usage().parked // MIB
    assert [mib_after[number] for number in (1, 2, 20, 100)] == [5, 10, 100, 500]
    assert kv_bytes(policy) == 500 * MIB


def test_claim_b2_history_after_two_turns() -> None:
    # The last token of an answer is known to the client, and its KV is computed with the next turn only.
    policy = policy_of()
    history: tuple[Span, ...] = ()
    lengths, hits = [], []
    for number, (prompt, answer) in enumerate([(50, 200), (30, 150)]):
        s = turn(number, (*history, (f"in{number}", 0, prompt)))
        hits.append(compute(policy, s))
        for _ in range(answer - 1):
            s.num_tokens += 1
            policy.reserve(s, 1)
            policy.grow_layer(0)
            policy.grow_layer(1)
            policy.end_step()
            s.num_computed_tokens += 1
        history = (*s.spans, (f"out{number}", 0, answer))
        s.num_tokens, s.spans = s.num_tokens + 1, history
        policy.release(s, Release.PARK)
        lengths.append(s.num_tokens)
    assert lengths == [250, 430]
    assert hits == [0, 249]
    assert policy.usage().parked == 429 * TOKEN
