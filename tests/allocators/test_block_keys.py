"""Keys of blocks against the tokens themselves, and what of a session's last turn the next one goes on from."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.allocators import block_keys
from hbmtwin.allocators.block_keys import NO_KEY, BlockKeys
from hbmtwin.allocators.records import KVSequence, Span

Token = tuple[str | int, int]


def sequence(id: int, spans: tuple[Span, ...], session: int = 0) -> KVSequence:
    length = sum(length for _, _, length in spans)
    return KVSequence(id=id, session=session, turn=0, num_tokens=length, max_tokens=length, spans=spans)


def prefixes(spans: tuple[Span, ...], size: int) -> list[tuple[Token, ...]]:
    """The tokens up to the end of each full block, one by one."""
    tokens = [(stream, start + i) for stream, start, length in spans for i in range(length)]
    return [tuple(tokens[: (i + 1) * size]) for i in range(len(tokens) // size)]


spans_of = st.lists(
    st.tuples(st.sampled_from(["a", "b", 7]), st.sampled_from([0, 0, 3, 8]), st.integers(0, 9)), max_size=5
).map(tuple)
"""Few streams and starts, so that prefixes meet, pieces touch, and some are empty."""


@settings(max_examples=300)
@given(st.integers(1, 5), st.lists(st.tuples(spans_of, st.integers(0, 12)), min_size=1, max_size=8))
def test_keys_are_equal_where_the_tokens_before_are(size: int, asked: list[tuple[tuple[Span, ...], int]]) -> None:
    keys = BlockKeys(size)
    key_of: dict[tuple[Token, ...], int] = {}
    for id, (spans, count) in enumerate(asked):
        whole = prefixes(spans, size)
        for limit in range(0, count + 1, 3):  # a part of them first
            keys.of(sequence(id, spans, session=id % 2), limit)
        found = keys.of(sequence(id, spans, session=id % 2), count)
        assert min(len(whole), count) <= len(found) <= len(whole)
        for place, (prefix, key) in enumerate(zip(whole, found, strict=False)):
            assert key_of.setdefault(prefix, key) == key
            assert keys.parent(key) == (found[place - 1] if place else NO_KEY)
        assert len(set(key_of.values())) == len(key_of)
        assert len(keys) == len(set(key_of.values()))
    for id in range(len(asked)):
        keys.forget(id)
    assert len(keys) == 0


Turns = list[tuple[tuple[Span, ...], tuple[Span, ...], bool, int]]


def converse(keys: BlockKeys, turns: Turns) -> None:
    """Turns that go on from the one before or start anew; some of their blocks stay, as in a cache, and their keys
    must be those that tokens which were forgotten and came again would get."""
    size = keys.block_size
    history: tuple[Span, ...] = ()
    kept: dict[tuple[Token, ...], int] = {}
    for id, (said, answer, goes_on, stay) in enumerate(turns):
        spans = (*(history if goes_on else ()), *said, *answer)
        whole = prefixes(spans, size)
        found = list(keys.of(sequence(id, spans), len(whole)))
        assert len(found) == len(whole)
        for prefix, key in zip(whole, found, strict=True):
            assert kept.get(prefix, key) == key
            assert (key in kept.values()) == (prefix in kept)
        for prefix, key in list(zip(whole, found, strict=True))[:stay]:
            if prefix not in kept:
                keys.use(key)
                kept[prefix] = key
        keys.forget(id)
        assert len(keys) == len(kept)
        if id % 3 == 2:  # the oldest content loses its blocks, the end of a prefix first
            for prefix in sorted(kept, key=len, reverse=True)[:4]:
                keys.unuse(kept.pop(prefix))
        history = spans
    for prefix in sorted(kept, key=len, reverse=True):
        keys.unuse(kept.pop(prefix))
    assert len(keys) == 0


turns_of = st.lists(st.tuples(spans_of, spans_of, st.booleans(), st.integers(0, 12)), min_size=1, max_size=10)


@settings(max_examples=300)
@given(st.integers(1, 4), turns_of)
def test_a_next_turn_goes_on_from_keys_that_are_known_still(size: int, turns: Turns) -> None:
    converse(BlockKeys(size), turns)


def test_a_next_turn_makes_no_key_of_its_history_again(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = BlockKeys(4)
    turns = [("user 0", 0, 10), ("answer 0", 0, 10), ("user 1", 0, 10)]
    for key in keys.of(sequence(0, tuple(turns[:2])), 5):
        keys.use(key)
    keys.forget(0)
    made: list[Any] = []
    monkeypatch.setattr(BlockKeys, "_intern", lambda self, made_of: made.append(made_of) or len(made) + 100)
    keys._uses.update({101: 1, 102: 1})
    keys._made_of[101] = (4, "user 1", 0)
    assert list(keys.of(sequence(1, tuple(turns)), 7)) == [0, 1, 2, 3, 4, 101, 102]
    assert made == [(4, "user 1", 0), (101, "user 1", 4)]


def test_sessions_that_never_go_on_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_keys, "ENDED_CHAINS", 3)
    keys = BlockKeys(4)
    for session in range(10):
        keys.use(keys.of(sequence(session, (("a", 0, 8),), session), 2)[-1])
        keys.forget(session)
    assert list(keys._ended) == [7, 8, 9]


# Planted bugs


class TrustsAnEndedChain(BlockKeys):
    """Does not ask whether the tokens are the same."""

    def _start(self, s: KVSequence) -> Any:
        if s.session in self._ended:
            self._ended[s.session].spans = ()
        return super()._start(s)


class GoesOnFromDroppedKeys(BlockKeys):
    """Keeps a chain whose last key nobody needs any more."""

    def _start(self, s: KVSequence) -> Any:
        chain = self._ended.get(s.session)
        if chain is not None and chain.keys[-1] not in self._uses and s.spans[: len(chain.spans)] == chain.spans:
            return self._ended.pop(s.session)
        return super()._start(s)


class HoldsNoKey(BlockKeys):
    """A sequence that goes on from another does not hold the key it begins with."""

    def _start(self, s: KVSequence) -> Any:
        chain = super()._start(s)
        if chain.keys:
            self._uses[chain.keys[-1]] -= 1
        return chain


@pytest.mark.parametrize("broken", [TrustsAnEndedChain, GoesOnFromDroppedKeys, HoldsNoKey])
def test_a_planted_bug_is_noticed(broken: type[BlockKeys]) -> None:
    long, other = (("a", 0, 9),), (("b", 0, 9),)
    turns: Turns = [(long, long, True, 4), (other, (), False, 3), (long, other, True, 6), (other, long, True, 2)] * 5
    converse(BlockKeys(4), turns)
    with pytest.raises((AssertionError, KeyError)):
        converse(broken(4), turns)
