"""What every registered KV policy promises, on every arena that offers what it requires.

A new policy is held to all of this by being registered (it keeps its arena as ``arena``); settings that its ``Config``
has no default for, and variants worth testing apart, go into ``KV_SETTINGS``.
"""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from itertools import product
from typing import NamedTuple

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, KVUsage, Refused, Release, Tag, Work
from hbmtwin.allocators.registry import device_allocators, kv_policies

LAYOUT = KVLayout(num_layers=3, num_kv_heads=2, head_dim=64)
"""256 bytes a token and tensor, 1,536 bytes a token."""
MIB = 1 << 20
DEVICE_BYTES = 256 * MIB

KV_SETTINGS: dict[str, list[dict[str, object]]] = {
    "contiguous": [
        {"max_model_len": 512, "growth": growth, "tensors": tensors, "copy_scope": scope}
        for growth, tensors, scope in product(
            ("static", "exact", "doubling"), ("per_layer", "merged"), ("tensor", "step")
        )
    ],
    "paged": [{"max_model_len": 512, "num_blocks": 60, "block_size": size} for size in (16, 128)],
    "virtual": [{"max_model_len": 512, "page_bytes": size} for size in (8192, 2 * MIB)],
}


class Setup(NamedTuple):
    policy: str
    settings: dict[str, object]
    arena: str

    def make(self) -> KVPolicy:
        arena_class, policy_class = device_allocators.get(self.arena), kv_policies.get(self.policy)
        driver = HbmDriver(DEVICE_BYTES, page_bytes=8192)
        arena = arena_class(driver, arena_class.Config(limit_bytes=DEVICE_BYTES))
        return policy_class(LAYOUT, arena, policy_class.Config(**self.settings))


SETUPS = [
    Setup(policy_name, settings, arena_name)
    for (policy_name, policy_class), (arena_name, arena_class) in product(kv_policies, device_allocators)
    if policy_class.requires <= arena_class.features
    for settings in KV_SETTINGS.get(policy_name, [{"max_model_len": 512}])
]


def label(setup: Setup) -> str:
    return "-".join([setup.policy, *map(str, setup.settings.values()), setup.arena])


@pytest.fixture(params=SETUPS, ids=label)
def policy(request: pytest.FixtureRequest) -> KVPolicy:
    return request.param.make()


def sequence(id: int, tokens: int) -> KVSequence:
    return KVSequence(
        id=id, session=id, turn=0, num_tokens=tokens, max_tokens=tokens + 100, spans=((f"s{id}", 0, tokens),)
    )


def grow(policy: KVPolicy) -> None:
    for layer in range(LAYOUT.num_layers):
        policy.grow_layer(layer)


def step(policy: KVPolicy, *sequences: KVSequence) -> None:
    """One whole step as an engine does it: each sequence computes all that it lacks, and samples a token."""
    for s in sequences:
        admitting = s.num_computed_tokens == 0
        answer = policy.reserve(s, s.num_tokens - s.num_computed_tokens, admitting=admitting, others_running=True)
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
    assert policy.arena.usage().requested_by_tag[Tag.KV] == sum(block.size for block in blocks)


def kv_bytes(policy: KVPolicy) -> int:
    return policy.arena.usage().requested_by_tag[Tag.KV]


def as_seen(s: KVSequence) -> tuple[object, ...]:
    return tuple(getattr(s, field.name) for field in fields(s))


# What a policy is


@pytest.mark.parametrize(("name", "cls"), list(kv_policies), ids=kv_policies.names())
def test_a_policy_says_what_it_is(name: str, cls: type[KVPolicy]) -> None:
    assert cls.name == name
    assert isinstance(cls.requires, frozenset)
    assert is_dataclass(cls.Config)
    assert cls.Config.__dataclass_params__.frozen
    assert (cls.__doc__ or "").strip()


def test_a_policy_has_every_verb_of_the_contract(policy: KVPolicy) -> None:
    verbs = [verb for verb, value in vars(KVPolicy).items() if callable(value) and not verb.startswith("_")]
    assert len(verbs) == 17
    assert [verb for verb in verbs if not callable(getattr(policy, verb, None))] == []


# Room for tokens


def test_the_books_count_every_computed_token(policy: KVPolicy) -> None:
    a, b = sequence(1, 100), sequence(2, 37)
    step(policy, a)
    assert policy.usage().token == 100 * LAYOUT.token_bytes
    step(policy, a, b)
    step(policy, b, a)
    assert policy.usage().token == (102 + 38) * LAYOUT.token_bytes
    assert policy.usage().held >= 140 * LAYOUT.token_bytes


def test_a_prompt_may_come_in_chunks(policy: KVPolicy) -> None:
    s = sequence(1, 200)
    for computed, new in ((0, 64), (64, 64), (128, 72)):
        s.num_computed_tokens = computed
        assert policy.reserve(s, new, admitting=computed == 0) == Granted(0)
        grow(policy)
        policy.end_step()
        assert policy.usage().token == (computed + new) * LAYOUT.token_bytes
        check(policy)


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


def test_lookup_promises_less_than_the_whole_and_pins_nothing(policy: KVPolicy) -> None:
    s = sequence(1, 100)
    assert policy.lookup(s) == 0
    step(policy, s)
    policy.release(s, Release.PARK)
    usage = policy.usage()
    following = sequence(1, 90)
    assert 0 <= policy.lookup(following) <= 89
    assert policy.lookup(following) == policy.lookup(following)
    assert policy.usage() == usage


def test_a_hit_is_adopted_and_counts_as_computed(policy: KVPolicy) -> None:
    s = sequence(1, 100)
    step(policy, s)
    policy.release(s, Release.PARK)
    following = sequence(1, 150)
    following.id = 2
    hit = policy.lookup(following)
    assert policy.reserve(following, 150 - hit, hit=hit, admitting=True) == Granted(hit)
    grow(policy)
    policy.end_step()
    assert policy.usage().token == 150 * LAYOUT.token_bytes
    assert policy.usage().parked == 0
    check(policy)


# Giving back


@pytest.mark.parametrize("why", [Release.FINISH, Release.PREEMPT, Release.DROP])
def test_a_released_sequence_leaves_nothing(policy: KVPolicy, why: Release) -> None:
    idle, bytes_before = policy.usage(), kv_bytes(policy)
    a, b = sequence(1, 100), sequence(2, 300)
    step(policy, a, b)
    step(policy, a, b)
    policy.release(a, why)
    check(policy)
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
    assert policy.usage().token == 101 * LAYOUT.token_bytes


# A step that is not carried out


def test_reservations_are_given_back(policy: KVPolicy) -> None:
    a, late = sequence(1, 128), sequence(2, 200)
    step(policy, a)
    before = (policy.usage(), list(policy.walk()), policy.block_ids(a))
    policy.reserve(a, 1)
    policy.reserve(late, 200, admitting=True)
    policy.abort_step()
    assert (policy.usage(), list(policy.walk()), policy.block_ids(a)) == before
    check(policy)
    step(policy, a, late)


def test_a_new_sequence_is_given_back_in_the_middle_of_its_growth(policy: KVPolicy) -> None:
    idle = policy.usage()
    policy.reserve(sequence(1, 200), 200, admitting=True)
    policy.grow_layer(0)
    policy.abort_step()
    check(policy)
    assert policy.usage() == idle


# Leaps


@pytest.mark.parametrize("setup", SETUPS, ids=label)
def test_a_leap_equals_single_steps(setup: Setup) -> None:
    leaping, stepping = setup.make(), setup.make()
    in_leap, in_steps = ([sequence(1, 100), sequence(2, 120), sequence(3, 7)] for _ in range(2))
    step(leaping, *in_leap)
    step(stepping, *in_steps)
    leaping.take_work()
    k = leaping.horizon(in_leap, 200)
    assert 0 <= k <= 200
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


def test_the_horizon_keeps_its_limit_and_its_books(policy: KVPolicy) -> None:
    s = sequence(1, 100)
    step(policy, s)
    usage = policy.usage()
    assert policy.horizon([s], 0) == 0
    assert policy.horizon([s], 3) <= 3
    assert policy.horizon([], 7) == 7
    policy.advance([s], 0)
    assert policy.usage() == usage


def test_a_leap_over_the_horizon_is_refused(policy: KVPolicy) -> None:
    batch = [sequence(id, 10) for id in range(1, 41)]
    admitted = []
    for s in batch:
        if isinstance(policy.reserve(s, 10, admitting=True), Granted):
            admitted.append(s)
            s.num_computed_tokens = 10
    grow(policy)
    policy.end_step()
    horizon = policy.horizon(admitted, 600)
    assert horizon <= 502, "there is no room for more than max_model_len"
    usage = policy.usage()
    with pytest.raises(ValueError, match="over the horizon"):
        policy.advance(admitted, horizon + 1)
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
    usage = policy.usage()
    for answer in (policy.fork(a, b), policy.swap_out(a)):
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


def test_the_table_of_setups_is_not_empty() -> None:
    assert {setup.policy for setup in SETUPS} == {name for name, _ in kv_policies}
    assert {"caching", "pooled"} <= {setup.arena for setup in SETUPS}
