"""What every registered KV policy promises, on every arena that offers what it requires.

A new policy is held to all of this by being registered (it keeps its arena as ``arena``). The setups, and how they were
chosen, are in ``conftest.py``; here memory is plenty.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import Any

import pytest

from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.paged import PagedPolicy
from hbmtwin.allocators.records import Granted, KVSequence, KVUsage, Refused, Release, Tag, Work
from hbmtwin.allocators.registry import device_allocators, kv_policies

MAX_MODEL_LEN = 128
PLENTY = 32 << 20
LITTLE = 2 << 20
"""Room for about three of the longest sequences."""


@pytest.fixture
def policy(kv_setup: Any) -> KVPolicy:
    return kv_setup.make(PLENTY)


def sequence(id: int, tokens: int, session: int | None = None) -> KVSequence:
    session = id if session is None else session
    spans = ((f"s{session}", 0, tokens),)
    return KVSequence(id=id, session=session, turn=0, num_tokens=tokens, max_tokens=MAX_MODEL_LEN, spans=spans)


def grow(policy: KVPolicy) -> None:
    for layer in range(policy.layout.num_layers):
        policy.grow_layer(layer)


def compute(policy: KVPolicy, s: KVSequence, new: int, hit: int = 0) -> None:
    """Reserve *new* tokens of a sequence behind *hit* adopted ones, in the step that is under way."""
    admitting = s.num_computed_tokens == 0
    assert policy.reserve(s, new, hit=hit, admitting=admitting, others_running=True) == Granted(hit)
    s.num_computed_tokens += hit + new


def step(policy: KVPolicy, *sequences: KVSequence) -> None:
    """One whole step as an engine does it: each sequence computes all that it lacks, and samples a token."""
    planned = [(s, s.num_tokens - s.num_computed_tokens) for s in sequences]
    for s, new in planned:
        answer = policy.reserve(s, new, admitting=s.num_computed_tokens == 0, others_running=True)
        assert isinstance(answer, Granted)
    grow(policy)
    policy.end_step()
    for s in sequences:
        s.num_computed_tokens = s.num_tokens
        s.num_tokens += 1
    check(policy)


def check(policy: KVPolicy) -> None:
    """The books against the walk, and the policy's bytes against what its arena knows."""
    policy.check()
    policy.arena.check()
    usage = policy.usage()
    assert min(usage) >= 0
    assert usage.unfilled >= 0
    blocks = list(policy.walk())
    assert blocks == sorted(blocks, key=lambda block: block.address)
    assert sum(block.size for block in blocks) == usage.held + usage.growth_copy + usage.cached + usage.pool
    assert sum(block.token_bytes for block in blocks) == usage.token + usage.parked
    assert kv_bytes(policy) == sum(block.size for block in blocks)


def kv_bytes(policy: KVPolicy) -> int:
    return policy.arena.usage().requested_by_tag[Tag.KV]


def check_tokens(policy: KVPolicy, *running: KVSequence) -> None:
    """The books count what is kept of each running sequence, and what was dropped."""
    usage, token_bytes = policy.usage(), policy.layout.token_bytes
    computed = [s.num_computed_tokens for s in running]
    kept = [policy.kept(tokens) for tokens in computed]
    assert usage.token == sum(kept) * token_bytes
    assert usage.dropped == (sum(computed) - sum(kept)) * token_bytes
    assert usage.held - usage.parked >= usage.token
    for s, tokens in zip(running, kept, strict=True):
        in_walk = [block.token_bytes for block in policy.walk() if (block.owner, block.state) == (s.id, "running")]
        assert sum(in_walk) == tokens * token_bytes


def as_seen(s: KVSequence) -> tuple[object, ...]:
    return tuple(getattr(s, field.name) for field in fields(s))


# What a policy is


@pytest.mark.parametrize(("name", "cls"), list(kv_policies), ids=kv_policies.names())
def test_a_policy_says_what_it_is(name: str, cls: type[KVPolicy]) -> None:
    assert cls.name == name
    assert isinstance(cls.requires, frozenset)
    assert cls.offers <= {"one_piece", "park", "plan_ahead", "preempt", "prefix_cache", "reject"}
    assert is_dataclass(cls.Config)
    assert cls.Config.__dataclass_params__.frozen
    assert "max_model_len" in {field.name for field in fields(cls.Config)}
    assert (cls.__doc__ or "").strip().partition("\n\n")[0].endswith("."), "the catalog prints its first paragraph"


def test_a_policy_has_every_verb_of_the_contract(policy: KVPolicy) -> None:
    verbs = [verb for verb, value in vars(KVPolicy).items() if callable(value) and not verb.startswith("_")]
    assert len(verbs) == 17
    assert [verb for verb in verbs if not callable(getattr(policy, verb, None))] == []


# Room for tokens


def test_the_books_count_every_computed_token(policy: KVPolicy) -> None:
    a, b = sequence(1, 60), sequence(2, 37)
    step(policy, a)
    check_tokens(policy, a)
    step(policy, a, b)
    check_tokens(policy, a, b)
    step(policy, b, a)
    check_tokens(policy, a, b)
    assert (a.num_computed_tokens, b.num_computed_tokens) == (62, 38)


def test_a_prompt_may_come_in_chunks(policy: KVPolicy) -> None:
    s = sequence(1, 110)
    for new in (40, 1, 40, 29):
        compute(policy, s, new)
        grow(policy)
        policy.end_step()
        check(policy)
        check_tokens(policy, s)


def test_lookahead_asks_for_room_and_counts_no_tokens(policy: KVPolicy) -> None:
    s = sequence(1, 20)
    assert policy.reserve(s, 20, lookahead=5, admitting=True) == Granted(0)
    grow(policy)
    policy.end_step()
    s.num_computed_tokens = 20
    check(policy)
    check_tokens(policy, s)
    assert policy.usage().held >= 25 * policy.layout.token_bytes


def test_what_is_kept_is_never_more_than_there_is(policy: KVPolicy) -> None:
    kept = [policy.kept(tokens) for tokens in range(3 * MAX_MODEL_LEN)]
    assert kept[:2] == [0, 1], "the token just computed is held"
    assert all(1 <= held <= tokens for tokens, held in enumerate(kept) if tokens)
    assert all(after <= before + 1 for before, after in pairwise(kept))
    assert kept == [policy.kept(tokens) for tokens in range(3 * MAX_MODEL_LEN)]


def test_only_the_scheduler_writes_a_sequence(policy: KVPolicy) -> None:
    s = sequence(1, 100)
    before = as_seen(s)
    policy.lookup(s)
    policy.reserve(s, 100, admitting=True)
    grow(policy)
    policy.end_step()
    policy.advance([s], policy.horizon([s], 10))
    policy.block_ids(s)
    policy.release(s, Release.PREEMPT)
    assert as_seen(s) == before


# Between turns


def test_lookup_promises_less_than_the_whole_and_pins_nothing(policy: KVPolicy) -> None:
    s = sequence(1, 100)
    assert policy.lookup(s) == 0
    step(policy, s)
    policy.release(s, Release.PARK)
    usage = policy.usage()
    following = sequence(2, 90, session=1)
    assert 0 <= policy.lookup(following) <= 89
    assert policy.lookup(following) == policy.lookup(following)
    assert policy.usage() == usage
    assert policy.lookup(sequence(3, 90)) == 0, "another session"


def test_what_is_parked_is_found_by_its_next_turn_where_the_policy_offers_that(policy: KVPolicy) -> None:
    s = sequence(1, 50)
    step(policy, s)
    policy.release(s, Release.PARK)
    check(policy)
    kept = policy.kept(50) * policy.layout.token_bytes
    offers = "park" in policy.offers
    assert (policy.usage().parked, policy.usage().parked_sessions) == ((kept, 1) if offers else (0, 0))
    assert (policy.usage().token, policy.usage().dropped) == (0, 0)
    following = sequence(2, 90, session=1)
    hit = policy.lookup(following)
    assert hit == (50 if offers else 0)
    compute(policy, following, 90 - hit, hit)
    grow(policy)
    policy.end_step()
    assert (policy.usage().parked, policy.usage().parked_sessions) == (0, 0)
    check(policy)
    check_tokens(policy, following)


def test_a_parked_history_waits_while_others_come_and_go(policy: KVPolicy) -> None:
    s, other = sequence(1, 50), sequence(2, 60)
    step(policy, s)
    policy.release(s, Release.PARK)
    parked, hit = policy.usage().parked, policy.lookup(sequence(3, 90, session=1))
    step(policy, other)
    step(policy, other)
    policy.release(other, Release.FINISH)
    assert (policy.usage().parked, policy.lookup(sequence(3, 90, session=1))) == (parked, hit)
    check(policy)


def test_tokens_that_nobody_parked_cannot_be_adopted(policy: KVPolicy) -> None:
    with pytest.raises(ValueError, match="cannot adopt 7 tokens"):
        policy.reserve(sequence(1, 50), 43, hit=7, admitting=True)


# Giving back


@pytest.mark.parametrize("why", [Release.FINISH, Release.PREEMPT, Release.DROP])
def test_a_released_sequence_leaves_nothing(policy: KVPolicy, why: Release) -> None:
    idle, bytes_before = policy.usage(), kv_bytes(policy)
    a, b = sequence(1, 50), sequence(2, 100)
    step(policy, a, b)
    step(policy, a, b)
    policy.release(a, why)
    check(policy)
    check_tokens(policy, b)
    policy.release(b, why)
    check(policy)
    left = policy.usage()
    assert left._replace(pool=idle.pool) == idle, "but for memory that the next sequence finds"
    assert kv_bytes(policy) - bytes_before == left.pool - idle.pool
    assert policy.block_ids(a) == ()


def test_a_session_that_ends_after_parking_leaves_nothing(policy: KVPolicy) -> None:
    idle = policy.usage()
    s = sequence(1, 100)
    step(policy, s)
    policy.release(s, Release.PARK)
    check(policy)
    policy.release(s, Release.DROP)
    check(policy)
    assert policy.usage()._replace(pool=idle.pool) == idle


def test_releasing_what_is_not_there(policy: KVPolicy) -> None:
    usage = policy.usage()
    policy.release(sequence(1, 10), Release.FINISH)
    policy.release(sequence(1, 10), Release.PREEMPT)
    policy.release(sequence(1, 10), Release.DROP)
    with pytest.raises(KeyError):
        policy.release(sequence(1, 10), Release.PARK)
    assert policy.usage() == usage


def test_a_preempted_sequence_can_start_again(policy: KVPolicy) -> None:
    s = sequence(1, 100)
    step(policy, s)
    policy.release(s, Release.PREEMPT)
    s.num_computed_tokens = 0
    step(policy, s)
    check_tokens(policy, s)


# A step that is not carried out


def test_reservations_are_given_back(policy: KVPolicy) -> None:
    a, late = sequence(1, 64), sequence(2, 100)
    step(policy, a)
    before = (policy.usage(), list(policy.walk()), policy.block_ids(a))
    policy.reserve(a, 1)
    policy.reserve(late, 100, admitting=True)
    policy.abort_step()
    assert (policy.usage(), list(policy.walk()), policy.block_ids(a)) == before
    check(policy)
    step(policy, a, late)
    check_tokens(policy, a, late)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_a_new_sequence_is_given_back_in_the_middle_of_its_growth(policy: KVPolicy, layers: int) -> None:
    idle = policy.usage()
    policy.reserve(sequence(1, 100), 100, admitting=True)
    for layer in range(layers):
        policy.grow_layer(layer)
    policy.abort_step()
    check(policy)
    assert policy.usage() == idle


def test_an_adopted_history_is_parked_again(policy: KVPolicy) -> None:
    s, following = sequence(1, 50), sequence(2, 90, session=1)
    step(policy, s)
    policy.release(s, Release.PARK)
    before, hit = policy.usage(), policy.lookup(following)
    policy.reserve(following, 90 - hit, hit=hit, admitting=True)
    policy.abort_step()
    check(policy)
    assert policy.usage() == before
    assert policy.lookup(following) == hit


# Leaps


def test_a_leap_equals_single_steps(kv_setup: Any) -> None:
    leaping, stepping = kv_setup.make(PLENTY), kv_setup.make(PLENTY)
    in_leap, in_steps = ([sequence(1, 50), sequence(2, 60), sequence(3, 7)] for _ in range(2))
    step(leaping, *in_leap)
    step(stepping, *in_steps)
    leaping.take_work()
    k = leaping.horizon(in_leap, 60)
    assert 0 <= k <= 60
    leaping.advance(in_leap, k // 3)
    leaping.advance(in_leap, k - k // 3)
    stepping.take_work()
    stepping.arena.take_work()
    for _ in range(k):
        step(stepping, *in_steps)
    assert stepping.take_work().plus(stepping.arena.take_work()) == Work()
    assert leaping.usage() == stepping.usage()
    assert list(leaping.walk()) == list(stepping.walk())
    assert [leaping.block_ids(s) for s in in_leap] == [stepping.block_ids(s) for s in in_steps]
    check(leaping)
    check_tokens(leaping, *in_steps)


def test_within_a_horizon_what_is_kept_rises_by_the_same_in_each_step(policy: KVPolicy) -> None:
    s = sequence(1, 30)
    for _ in range(40):
        step(policy, s)
        tokens = s.num_computed_tokens
        rises = [policy.kept(tokens + i + 1) - policy.kept(tokens + i) for i in range(policy.horizon([s], 50))]
        assert rises in ([0] * len(rises), [1] * len(rises))


def test_the_horizon_keeps_its_limit_and_its_books(policy: KVPolicy) -> None:
    s = sequence(1, 100)
    step(policy, s)
    usage = policy.usage()
    assert policy.horizon([s], 0) == 0
    assert policy.horizon([s], 3) <= 3
    assert policy.horizon([], 7) == 7
    policy.advance([s], 0)
    assert policy.usage() == usage


def test_a_leap_over_the_horizon_is_refused(kv_setup: Any) -> None:
    policy = kv_setup.make(LITTLE)
    full: list[KVSequence] = []
    for s in [sequence(id, 10) for id in range(1, 400)]:
        try:
            if isinstance(policy.reserve(s, 10, admitting=True), Refused):
                break
            grow(policy)
        except OutOfMemory:
            policy.abort_step()
            break
        policy.end_step()
        full.append(s)
        s.num_computed_tokens = 10
    assert 2 <= len(full) < 399, "memory is full"
    horizon, usage = policy.horizon(full, 10_000), policy.usage()
    if horizon < 10_000:  # some go on for ever: a ring, and what grows without asking anybody
        with pytest.raises(ValueError, match="over the horizon"):
            policy.advance(full, horizon + 1)
    assert policy.usage() == usage
    check(policy)


# Work, and what a policy may refuse


def test_work_is_told_once(policy: KVPolicy) -> None:
    s = sequence(1, 64)
    step(policy, s)
    step(policy, s)
    policy.take_work()
    assert policy.take_work() == Work()


def test_forking_and_swapping_answer_with_a_value(policy: KVPolicy) -> None:
    a, b = sequence(1, 64), sequence(2, 64)
    step(policy, a)
    for verb, sequences in ((policy.fork, (a, b)), (policy.swap_out, (a,)), (policy.swap_in, (a,))):
        usage = policy.usage()
        answer = verb(*sequences)
        if isinstance(answer, Refused):
            assert answer.reason
            assert policy.usage() == usage
    check(policy)


def test_the_same_calls_lead_to_the_same_state(policy: KVPolicy) -> None:
    twin = copy.deepcopy(policy)
    states: list[tuple[KVUsage, object]] = []
    for each in (policy, twin):
        a, b = sequence(1, 100), sequence(2, 37)
        step(each, a)
        step(each, a, b)
        each.release(a, Release.FINISH)
        step(each, b)
        states.append((each.usage(), list(each.walk())))
    assert states[0] == states[1]


# The setups, and the tests themselves


def test_every_legal_pair_of_policy_and_arena_has_setups(kv_setups: list[Any]) -> None:
    legal = {
        (policy, arena)
        for policy, policy_class in kv_policies
        for arena, arena_class in device_allocators
        if policy_class.requires <= arena_class.features
    }
    assert {(setup.policy, setup.arena) for setup in kv_setups} == legal
    assert {policy for policy, _ in legal} == set(kv_policies.names()), "each policy has an arena"


def test_every_two_settings_meet_in_a_setup(kv_setups: list[Any]) -> None:
    rows = [{"arena": s.arena, "layout": s.layout_name, **s.settings} for s in kv_setups if s.policy == "contiguous"]
    growths = {row["growth"] for row in rows}
    assert len(growths) == 5
    arenas, layouts = device_allocators.names(), 3
    together = {(row["growth"], row.get("decode_growth"), row["arena"]) for row in rows}
    assert len(together) == 8 * len(arenas)
    assert len({(row["growth"], row.get("decode_growth"), row["retention"]) for row in rows}) == 8 * 5
    assert len({(row["arena"], row["layout"]) for row in rows}) == len(arenas) * layouts
    assert len({(row["tensors"], row["copy_scope"], row["admission"]) for row in rows}) >= 4
    assert len({(row["retention"], row["copy_scope"]) for row in rows}) == 5 * 2
    assert len(rows) < 8 * len(arenas) + 12


class KeepsItsBlocks(PagedPolicy):
    """An aborted step forgets its reservations, and never gives their blocks back."""

    def abort_step(self) -> None:
        for owner in self._step:
            self._tokens -= self._tables.pop(owner).tokens
        self._step.clear()


class KeepsAll(PagedPolicy):
    """It says that it keeps half of a sequence, and keeps all of it."""

    def kept(self, tokens: int) -> int:
        return (tokens + 1) // 2


class CountsLookahead(PagedPolicy):
    """Room for speculation counts as tokens."""

    def reserve(self, s: KVSequence, new: int, *, lookahead: int = 0, **more: Any) -> Granted | Refused:
        return super().reserve(s, new + lookahead, **more)


class LeapsTooFar(PagedPolicy):
    """Advancing misses a token."""

    def advance(self, decoding: Any, k: int) -> None:
        super().advance(decoding, max(0, k - 1))


@pytest.mark.parametrize(
    ("bug", "test"),
    [
        (KeepsItsBlocks, test_a_new_sequence_is_given_back_in_the_middle_of_its_growth),
        (KeepsAll, test_the_books_count_every_computed_token),
        (CountsLookahead, test_lookahead_asks_for_room_and_counts_no_tokens),
    ],
)
def test_a_planted_bug_is_noticed(bug: type[PagedPolicy], test: Callable[..., None], kv_setup_of: Any) -> None:
    class Hidden(bug):
        """Whose own check says nothing."""

        def check(self) -> None:
            pass

    policy = kv_setup_of("paged", "pooled", "k and v", {}).make(PLENTY, Hidden)
    more = {"layers": 1} if "layers" in test.__code__.co_varnames else {}
    with pytest.raises(AssertionError):
        test(policy, **more)


def test_a_planted_leap_is_noticed(kv_setup_of: Any) -> None:
    class OneLeaps(kv_setup_of):
        """The first instance misses a token, the second goes step by step."""

        made = 0

        def make(self, memory_bytes: int, cls: Any = None) -> Any:
            type(self).made += 1
            return super().make(memory_bytes, LeapsTooFar if self.made == 1 else None)

    with pytest.raises(AssertionError):
        test_a_leap_equals_single_steps(OneLeaps("paged", "pooled", "k and v", {}))
