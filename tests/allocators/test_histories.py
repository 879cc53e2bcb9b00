"""Parked histories alone: their order, their books, and how much of one a next turn finds."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.buffers import Buffers
from hbmtwin.allocators.histories import History, ParkedHistories, common_prefix
from hbmtwin.allocators.records import KVSequence, Span


def history(tokens: int, capacity: int, *spans: Span, dropped: int = 0) -> History:
    """Two buffers of *capacity* tokens, 8 bytes a token each, in which *tokens* are behind those *dropped*."""
    buffers = Buffers(owner=1, units=(8, 8))
    buffers.handles = [1, 2]
    buffers.tokens = buffers.filled = tokens
    buffers.dropping = buffers.dropped = dropped
    buffers.capacity = buffers.grown = capacity
    return History(buffers, spans)


def turn(session: int, *spans: Span) -> KVSequence:
    tokens = sum(length for _, _, length in spans)
    return KVSequence(id=9, session=session, turn=1, num_tokens=tokens, max_tokens=4096, spans=spans)


# Order and books


def test_histories_are_listed_least_recently_parked_first() -> None:
    parked = ParkedHistories()
    for session in (3, 1, 2):
        parked.park(session, history(10, 10))
    assert parked.sessions() == (3, 1, 2)
    parked.park(3, parked.unpark(3))
    assert parked.sessions() == (1, 2, 3)


def test_the_books_count_tokens_that_are_there_and_bytes_that_are_held() -> None:
    parked = ParkedHistories()
    parked.park(1, history(10, 16))
    parked.park(2, history(5, 8))
    assert (len(parked), parked.tokens, parked.held_bytes) == (2, 15, 384)
    assert (parked.usable(1, 99), parked.held_bytes_of(1)) == (10, 256)
    assert (parked.usable(7, 99), parked.held_bytes_of(7)) == (0, 0)
    parked.check()
    assert parked.unpark(1).tokens == 10
    assert (len(parked), parked.tokens, parked.held_bytes) == (1, 5, 128)
    assert 2 in parked
    assert 1 not in parked
    parked.check()


def test_check_notices_a_history_whose_tokens_changed_while_it_was_parked() -> None:
    parked = ParkedHistories()
    kept = history(10, 16)
    parked.park(1, kept)
    kept.buffers.filled = 9
    with pytest.raises(AssertionError):
        parked.check()


def test_a_session_has_one_history_and_a_second_is_never_lost_in_silence() -> None:
    parked = ParkedHistories()
    parked.park(1, history(10, 16))
    with pytest.raises(ValueError, match="session 1 has a parked history already"):
        parked.park(1, history(5, 8))
    assert parked.tokens == 10
    with pytest.raises(KeyError):
        parked.unpark(2)


@pytest.mark.parametrize(
    ("tokens", "spans", "found"),
    [
        (10, (("a", 0, 10), ("b", 0, 5)), 10),
        (10, (("a", 0, 10),), 9),
        (10, (("a", 0, 4), ("edit", 0, 20)), 4),
        (7, (("a", 0, 10), ("b", 0, 5)), 7),
    ],
)
def test_what_is_found_is_common_and_computed_and_leaves_a_token_to_compute(
    tokens: int, spans: tuple[Span, ...], found: int
) -> None:
    parked = ParkedHistories()
    parked.park(1, history(tokens, 16, ("a", 0, 10)))
    assert parked.lookup(turn(1, *spans)) == found
    assert parked.lookup(turn(2, *spans)) == 0
    assert parked.sessions() == (1,)


# Histories of which tokens were dropped


@pytest.mark.parametrize(
    ("spans", "found"),
    [
        ((("a", 0, 10), ("b", 0, 5)), 10),
        ((("a", 0, 9), ("b", 0, 5)), 0),
        ((("a", 0, 10),), 0),
        ((("b", 0, 20),), 0),
    ],
    ids=["goes on", "parts at the last token", "would compute the last token anew", "another conversation"],
)
def test_a_history_that_lost_tokens_is_found_whole_or_not_at_all(spans: tuple[Span, ...], found: int) -> None:
    parked = ParkedHistories()
    parked.park(1, history(4, 4, ("a", 0, 10), dropped=6))
    assert parked.lookup(turn(1, *spans)) == found


def test_the_books_count_dropped_tokens_apart() -> None:
    parked = ParkedHistories()
    parked.park(1, history(4, 4, dropped=6))
    parked.park(2, history(5, 8))
    assert (parked.tokens, parked.dropped_tokens, parked.held_bytes) == (9, 6, 192)
    assert (parked.unpark(1).computed, parked.dropped_tokens) == (10, 0)
    parked.check()


def test_check_notices_dropped_tokens_that_changed_while_they_were_parked() -> None:
    parked = ParkedHistories()
    kept = history(4, 4, dropped=6)
    parked.park(1, kept)
    kept.buffers.dropped = 5
    with pytest.raises(AssertionError):
        parked.check()


# Common prefixes


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ((), (("x", 0, 5),), 0),
        ((("x", 0, 5),), (("x", 0, 8),), 5),
        ((("x", 0, 5),), (("y", 0, 5),), 0),
        ((("x", 0, 5),), (("x", 1, 5),), 0),
        ((("x", 0, 5), ("y", 0, 5)), (("x", 0, 5), ("y", 0, 2), ("z", 0, 9)), 7),
        ((("x", 0, 5), ("y", 0, 5)), (("x", 0, 6), ("y", 0, 5)), 5),
        ((("x", 0, 3), ("x", 3, 4)), (("x", 0, 7), ("y", 0, 1)), 7),
    ],
)
def test_common_prefix(a: tuple[Span, ...], b: tuple[Span, ...], common: int) -> None:
    assert common_prefix(a, b) == common_prefix(b, a) == common


SPANS = st.lists(st.tuples(st.sampled_from("xy"), st.integers(0, 2), st.integers(1, 4)), max_size=5)


@given(SPANS, SPANS)
def test_common_prefix_is_that_of_the_tokens_themselves(a: list[Span], b: list[Span]) -> None:
    tokens_a, tokens_b = ([(x, start + i) for x, start, length in spans for i in range(length)] for spans in (a, b))
    common = 0
    while common < min(len(tokens_a), len(tokens_b)) and tokens_a[common] == tokens_b[common]:
        common += 1
    assert common_prefix(a, b) == common
