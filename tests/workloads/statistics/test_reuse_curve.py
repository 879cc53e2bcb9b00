"""The ideal prefix cache: a golden table of a real trace, a naive model, and chains of our own requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import Arrivals, Conversations, Fixed, OpenLoop, WorkloadError
from hbmtwin.workloads.block_chain import block_chain
from hbmtwin.workloads.formats.mooncake import mooncake_chains
from hbmtwin.workloads.formats.traces import open_trace
from hbmtwin.workloads.statistics.reuse_curve import ReuseCurve, reuse_curve, reuse_hits

Play = Callable[..., list[Any]]
Chains = Sequence[Sequence[int]]

MOONCAKE = Path(__file__).resolve().parents[4] / "shared" / "traces" / "mooncake_fast25_conversation.jsonl.gz"
needs_mooncake = pytest.mark.skipif(not MOONCAKE.exists(), reason="the Mooncake trace is not beside this checkout")
SIZES = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, None)

CAPACITIES = st.lists(st.none() | st.integers(0, 12), min_size=1, max_size=4)
ANY_CHAINS = st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=15)
"""Ids may stand anywhere, and twice in one chain: no prefixes, but the rule has an answer."""


def prefixes(words: list[str]) -> list[list[str]]:
    """Chains as they are meant: an id is all that was said up to it."""
    return [[word[: end + 1] for end in range(len(word))] for word in words]


PREFIX_CHAINS = st.lists(st.text("ab", max_size=6), max_size=15).map(prefixes)


def model_hits(chains: Chains, capacity: int | None, last_to_first: bool, evict_first: bool = False) -> int:
    """The rule in a plain list, least recent first, word by word."""
    cache: list[int] = []
    hits = 0

    def evict() -> None:
        while capacity is not None and len(cache) > capacity:
            del cache[0]

    for chain in chains:
        for block in chain:
            if block not in cache:
                break
            hits += 1
        if evict_first:
            evict()
        for block in list(chain)[::-1] if last_to_first else chain:
            if block in cache:
                cache.remove(block)
            cache.append(block)
        if not evict_first:
            evict()
    return hits


def assert_hits_are_the_models(hits: Sequence[int], chains: Chains, capacities: Sequence[int | None]) -> None:
    assert list(hits) == [model_hits(chains, capacity, last_to_first=True) for capacity in capacities]


@needs_mooncake
@pytest.mark.parametrize(
    ("last_to_first", "hits"),
    [
        (True, (12_847, 15_665, 32_260, 61_046, 83_035, 102_290, 104_924, 105_710)),
        (False, (12_831, 15_487, 31_840, 60_921, 82_939, 102_290, 104_924, 105_710)),
    ],
)
def test_the_golden_table_of_the_mooncake_conversations(last_to_first: bool, hits: tuple[int, ...]) -> None:
    curve = reuse_curve(mooncake_chains(MOONCAKE), SIZES, last_to_first=last_to_first)
    assert curve == ReuseCurve(capacities=SIZES, hits=hits, references=288_500, distinct=182_790)


@needs_mooncake
def test_the_golden_table_from_the_tokens_of_the_requests() -> None:
    """By another way: the ids of blocks are made anew from what the requests say, partial blocks included."""
    requests = list(open_trace(MOONCAKE).recorded())
    chains = (block_chain(r.spans, 512, partial=True) for r in requests)
    curve = reuse_curve(chains, [1_000, None])
    assert curve == ReuseCurve(capacities=(1_000, None), hits=(12_847, 105_710), references=288_500, distinct=182_790)
    assert len(requests) == 12_031
    assert sum(r.prompt_tokens for r in requests) == 144_793_823


def test_a_chain_touched_last_to_first_loses_its_tail_and_first_to_last_its_root() -> None:
    chains = ["abcd", "xyz", "abcd"]
    assert reuse_curve(chains, [3, 5, 6, 7, None]).hits == (0, 2, 3, 4, 4)
    assert reuse_curve(chains, [3, 5, 6, 7, None], last_to_first=False).hits == (0, 0, 0, 4, 4)
    assert reuse_curve(chains, [None]) == ReuseCurve((None,), (4,), references=11, distinct=7)


def test_a_fork_costs_the_older_branch_its_tail_or_its_middle() -> None:
    assert reuse_curve(["abc", "ad", "abc"], [3]).hits == (1 + 2,)
    assert reuse_curve(["abc", "ad", "abc"], [3], last_to_first=False).hits == (1 + 1,)


def test_a_chain_longer_than_the_cache_keeps_its_root_only_last_to_first() -> None:
    assert reuse_curve(["abcd", "abcd"], [0, 1, 3, 4]).hits == (0, 1, 3, 4)
    assert reuse_curve(["abcd", "abcd"], [0, 1, 3, 4], last_to_first=False).hits == (0, 0, 0, 4)


def test_only_the_leading_run_hits() -> None:
    assert reuse_curve([[1, 2, 3], [1, 9, 3], [8, 2, 3]], [None]) == ReuseCurve((None,), (1,), 9, 5)


def test_nothing_asked_or_nothing_replayed_is_nothing() -> None:
    assert reuse_curve([], [5, None]) == ReuseCurve((5, None), (0, 0), 0, 0)
    assert reuse_curve([[], [1], []], []) == ReuseCurve((), (), 1, 1)


@given(chains=ANY_CHAINS, capacities=CAPACITIES, last_to_first=st.booleans())
def test_random_traces_hit_what_the_naive_model_hits(
    chains: list[list[int]], capacities: list[int | None], last_to_first: bool
) -> None:
    curve = reuse_curve(iter(chains), capacities, last_to_first=last_to_first)
    assert curve == ReuseCurve(
        capacities=tuple(capacities),
        hits=tuple(model_hits(chains, capacity, last_to_first) for capacity in capacities),
        references=sum(map(len, chains)),
        distinct=len({block for chain in chains for block in chain}),
    )


@given(chains=ANY_CHAINS, capacity=st.none() | st.integers(0, 12), last_to_first=st.booleans())
def test_the_hits_of_the_requests_are_the_steps_of_the_curve(
    chains: list[list[int]], capacity: int | None, last_to_first: bool
) -> None:
    totals = [model_hits(chains[:n], capacity, last_to_first) for n in range(len(chains) + 1)]
    steps = [after - before for before, after in pairwise(totals)]
    assert list(reuse_hits(chains, capacity, last_to_first=last_to_first)) == steps


TELLING = [[1, 2, 3, 4], [7, 8, 9], [1, 2, 3, 4]]


def test_the_order_of_touching_reversed_would_be_caught() -> None:
    assert_hits_are_the_models(reuse_curve(TELLING, [5]).hits, TELLING, [5])
    with pytest.raises(AssertionError):
        assert_hits_are_the_models(reuse_curve(TELLING, [5], last_to_first=False).hits, TELLING, [5])


def test_eviction_before_insertion_would_be_caught() -> None:
    with pytest.raises(AssertionError):
        assert_hits_are_the_models([model_hits(TELLING, 5, last_to_first=True, evict_first=True)], TELLING, [5])


@given(chains=ANY_CHAINS, last_to_first=st.booleans())
def test_a_larger_cache_never_hits_less_in_either_order(chains: list[list[int]], last_to_first: bool) -> None:
    hits = reuse_curve(chains, [*range(12), None], last_to_first=last_to_first).hits
    assert list(hits) == sorted(hits)


@given(chains=PREFIX_CHAINS)
def test_where_ids_are_prefixes_last_to_first_never_hits_less(chains: list[list[str]]) -> None:
    capacities = [*range(20), None]
    better = reuse_curve(chains, capacities)
    worse = reuse_curve(chains, capacities, last_to_first=False)
    assert all(b >= w for b, w in zip(better.hits, worse.hits, strict=True))
    # With no end and whole prefixes, all but the first use of each id hits, whatever the order.
    assert better.hits[-1] == worse.hits[-1] == better.references - better.distinct


def test_where_ids_are_no_prefixes_first_to_last_may_hit_more() -> None:
    chains = [[1, 2], [2]]
    assert reuse_curve(chains, [1]).hits == (0,)
    assert reuse_curve(chains, [1], last_to_first=False).hits == (1,)


def test_a_negative_capacity_is_refused() -> None:
    with pytest.raises(WorkloadError) as error:
        reuse_curve([[1]], [5, -1])
    assert str(error.value) == "a capacity is a number of blocks, at least 0, or None for no end, not -1"


def test_equal_turns_climb_the_ladder_of_one_half_two_thirds_three_quarters(play: Play) -> None:
    # Turn r's prompt is 64 r tokens and r - 1 tokens of answers: exactly 4 r whole blocks, 4 (r - 1) of them known.
    conversations = Conversations(prompt_tokens=Fixed(64), output_tokens=Fixed(1), turns=Fixed(6))
    served = play(OpenLoop(conversations, Arrivals(1.0), num_prompts=6), 10**9)
    chains = [block_chain(request.spans, 16) for request, _ in served]
    assert [len(chain) for chain in chains] == [4, 8, 12, 16, 20, 24]
    ample = list(reuse_hits(chains, None))
    assert ample == [0, 4, 8, 12, 16, 20]
    assert [hits / len(chain) for hits, chain in zip(ample, chains, strict=True)] == [
        *(0, 1 / 2, 2 / 3, 3 / 4, 4 / 5, 5 / 6)
    ]
    # The ladder ends where the capacity does.
    assert list(reuse_hits(chains, 10)) == [0, 4, 8, 10, 10, 10]


def test_a_chain_has_an_id_for_each_whole_block() -> None:
    spans = (("system", 0, 20), ("user/0/0", 0, 30))
    assert [len(block_chain(spans, size)) for size in (1, 16, 25, 50, 51)] == [50, 3, 2, 1, 0]
    assert block_chain((), 16) == []
    assert len(set(block_chain(spans, 1))) == 50


def test_the_tokens_behind_the_last_whole_block_have_an_id_where_it_is_asked_for() -> None:
    one, other, longer = (("a", 0, 21),), (("a", 0, 16), ("b", 0, 5)), (("a", 0, 22),)
    chains = [block_chain(spans, 16, partial=True) for spans in (one, other, longer, (("a", 0, 32),), ())]
    assert [len(chain) for chain in chains] == [2, 2, 2, 2, 0]
    assert {chain[0] for chain in chains if chain} == set(block_chain(one, 16))
    assert len({chain[1] for chain in chains if chain}) == 4  # of 5 tokens, 5 others, 6 and all 16
    assert block_chain((("a", 0, 9), ("a", 9, 12)), 16, partial=True) == chains[0]


def test_equal_tokens_however_cut_have_equal_ids() -> None:
    whole = block_chain((("a", 0, 40), ("b", 3, 24)), 16)
    cut = block_chain(
        (("a", 0, 5), ("a", 5, 0), ("a", 5, 27), ("c", 9, 0), ("a", 32, 8), ("b", 3, 8), ("b", 11, 16)), 16
    )
    assert whole == cut
    assert len(whole) == 4


def test_an_id_names_all_tokens_before_it() -> None:
    one = block_chain((("a", 0, 16), ("same", 0, 16)), 16)
    other = block_chain((("b", 0, 16), ("same", 0, 16)), 16)
    assert one[1] != other[1]
    assert block_chain((("same", 0, 16),), 16)[0] not in one
    assert block_chain(((1, 0, 16),), 16) != block_chain((("1", 0, 16),), 16)
    assert block_chain((("a", 0, 16),), 16) != block_chain((("a", 1, 16),), 16)


def test_ids_are_the_same_in_every_process() -> None:
    assert block_chain((("system", 0, 16),), 16)[0].hex() == "8738828f93c9e17d0d2134a8c4272f26"


@given(
    left=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.integers(0, 5)), max_size=6),
    right=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.integers(0, 5)), max_size=6),
    common=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.integers(0, 5)), max_size=4),
    block_size=st.integers(1, 5),
)
def test_two_prompts_share_exactly_the_ids_of_their_common_whole_blocks(
    left: list[Any], right: list[Any], common: list[Any], block_size: int
) -> None:
    def tokens(spans: list[Any]) -> list[tuple[str, int]]:
        return [(stream, start + i) for stream, start, length in spans for i in range(length)]

    one, other = tokens(common + left), tokens(common + right)
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    chains = [block_chain(tuple(common + rest), block_size) for rest in (left, right)]
    assert [len(chain) for chain in chains] == [len(one) // block_size, len(other) // block_size]
    equal = [a == b for a, b in zip(*chains, strict=False)]
    assert equal == [i < shared // block_size for i in range(len(equal))]


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(WorkloadError) as error:
        block_chain((("a", 0, 16),), 0)
    assert str(error.value) == "a block has at least 1 token, not 0"
