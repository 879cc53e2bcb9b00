"""Prefixes of groups and tenants: who shares which tokens, how often, and the same bits one by one and in arrays."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import Arrivals, Conversations, Fixed, OpenLoop, Request, Uniform, WorkloadError
from hbmtwin.workloads.prefixes import PrefixBucket, Prefixes

THREE = Prefixes((PrefixBucket(Fixed(100), 2, 3.0), PrefixBucket(Uniform(10, 20), 5, 1.0), PrefixBucket(Fixed(7))))


def conversations(**keys: Any) -> Conversations:
    return Conversations(prompt_tokens=Uniform(1, 99), output_tokens=Uniform(1, 99), system_prompt_tokens=4, **keys)


def first_turns(c: Conversations, sessions: int) -> list[Request]:
    return list(OpenLoop(c, Arrivals(10.0), num_prompts=sessions).open())


def test_a_bucket_is_drawn_by_weight_and_each_prefix_in_it_as_often() -> None:
    grid = (np.arange(50_000) + 0.5) / 50_000
    shares = Counter(THREE.at_many(grid).tolist())
    assert THREE.count == 8
    assert {prefix: n / 50_000 for prefix, n in shares.items()} == pytest.approx(
        {0: 0.3, 1: 0.3, 2: 0.04, 3: 0.04, 4: 0.04, 5: 0.04, 6: 0.04, 7: 0.2}, abs=2e-4
    )


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-3, 1e3)), min_size=1, max_size=5),
    st.lists(st.floats(2.0**-53, 1 - 2.0**-53), min_size=1),
)
def test_arrays_and_scalars_draw_the_same_prefix_within_bounds(
    buckets: list[tuple[int, float]], u: list[float]
) -> None:
    prefixes = Prefixes(tuple(PrefixBucket(Fixed(1), count, weight) for count, weight in buckets))
    many = prefixes.at_many(np.array(u)).tolist()
    assert many == [prefixes.at(x) for x in u]
    assert all(0 <= prefix < prefixes.count for prefix in many)


def test_a_prompt_is_system_prompt_then_the_groups_prefix_then_new_text() -> None:
    c = conversations(prefixes=THREE, tenant=3, tenant_prompt_tokens=50)
    lengths = THREE.tokens(0).tolist()
    assert lengths[:2] == [100, 100]
    assert all(10 <= n <= 20 for n in lengths[2:7])
    seen = set()
    for r in first_turns(c, 500):
        system, own, (stream, start, length), said = r.spans
        assert (system, own, start, r.tenant) == (("system", 0, 4), ("tenant/3", 0, 50), 0, 3)
        assert length == lengths[int(str(stream).removeprefix("prefix/"))]  # one length for all who share it
        assert said[0] == f"user/{r.session}/0"
        assert r.prompt_tokens == 54 + length + said[2]
        seen.add(stream)
    assert len(seen) == 8


@pytest.mark.parametrize("keys", [{}, {"prefixes": THREE}, {"prefixes": THREE, "distinct_prompts": 37}])
def test_first_turns_are_the_same_one_by_one_and_together(keys: dict[str, Any]) -> None:
    c = conversations(**keys)
    for base in (0, 5 * 2**32):
        ids = np.arange(200, dtype=np.int64)
        together = list(c.first_turns(base + ids, ids=ids, arrivals_ns=ids * 5, has_next=ids % 2))
        fresh = conversations(**keys)
        alone = [fresh.first_turn(base + i, id=i, arrival_ns=i * 5, has_next=i % 2 > 0) for i in range(200)]
        assert together == alone


def test_prefixes_move_no_other_draw() -> None:
    plain, grouped = first_turns(conversations(), 300), first_turns(conversations(prefixes=THREE), 300)
    assert [(r.arrival_ns, r.output_tokens, r.spans[-1]) for r in plain] == [
        (r.arrival_ns, r.output_tokens, r.spans[-1]) for r in grouped
    ]


def test_distinct_prompts_come_again_with_answers_of_their_own() -> None:
    requests = first_turns(conversations(prefixes=THREE, distinct_prompts=40), 100)
    assert [r.spans for r in requests[40:80]] == [r.spans for r in requests[:40]]
    assert [r.spans for r in requests[80:]] == [r.spans for r in requests[:20]]
    assert len({r.spans for r in requests}) == 40
    assert [r.output_tokens for r in requests[40:80]] != [r.output_tokens for r in requests[:40]]
    assert [r.output_tokens for r in requests] == [r.output_tokens for r in first_turns(conversations(), 100)]


def test_later_turns_of_a_repeated_prompt_are_new() -> None:
    c = conversations(distinct_prompts=1, turns=Fixed(2))
    source = OpenLoop(c, Arrivals(10.0), num_prompts=4)
    a, b = source.open()
    assert a.spans == b.spans
    following = [c.following_turn(r, id=r.id + 1, arrival_ns=9, has_next=False).spans for r in (a, b)]
    assert [spans[-1][0] for spans in following] == ["user/0/1", "user/1/1"]
    assert [spans[-2][0] for spans in following] == ["out/0/0/0", "out/1/0/0"]


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: PrefixBucket(Fixed(1), 0), "prefix_count is from 1 to 1,000,000, not 0"),
        (lambda: PrefixBucket(Fixed(1), 1, 0), "bucket_weight is above 0 and finite, not 0"),
        (lambda: PrefixBucket(Fixed(1), 1, float("nan")), "bucket_weight is above 0 and finite, not nan"),
        (lambda: Prefixes(()), "give one bucket of prefixes or more"),
        (
            lambda: Prefixes((PrefixBucket(Fixed(1), 10**6), PrefixBucket(Fixed(1)))),
            "buckets may have 1,000,000 prefixes together, not 1,000,001",
        ),
        (lambda: conversations(tenant_prompt_tokens=-1), "tenant_prompt_tokens is from 0 to 2^40, not -1"),
        (lambda: conversations(distinct_prompts=0), "distinct_prompts is from 1 to 2^32, not 0"),
    ],
)
def test_bad_prefixes_say_what_would_do(build: Any, said: str) -> None:
    with pytest.raises(WorkloadError) as error:
        build()
    assert str(error.value) == said
