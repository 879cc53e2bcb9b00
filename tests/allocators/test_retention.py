"""Retention rules alone: how they are written, and what they hold of how many tokens."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.retention import (
    RETENTIONS,
    Forget,
    Full,
    Retention,
    SinkRecent,
    SlidingWindow,
    Truncate,
    retention_rule,
)

# How they are written


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("full", Full()),
        ("truncate(4096)", Truncate(4096)),
        ("forget(4096, 1024)", Forget(4096, 1024)),
        ("sliding_window(2048)", SlidingWindow(2048)),
        ("sink_recent(4, 128)", SinkRecent(4, 128)),
        ("  forget ( 4096,1024 )  ", Forget(4096, 1024)),
    ],
)
def test_a_rule_is_read_from_its_text(text: str, rule: Retention) -> None:
    assert retention_rule(text) == rule


def test_a_rule_says_what_it_is_read_from() -> None:
    texts = ["full", "truncate(4096)", "forget(4096, 1024)", "sliding_window(2048)", "sink_recent(4, 128)"]
    assert [str(retention_rule(text)) for text in texts] == texts


def test_signatures_name_the_numbers() -> None:
    assert [rule.signature() for rule in RETENTIONS.values()] == [
        "full",
        "truncate(n)",
        "forget(over, drop)",
        "sliding_window(window)",
        "sink_recent(sinks, recent)",
    ]


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("sliding_windw(2048)", r"no retention; write one of full, .*; did you mean sliding_window\(window\)\?"),
        ("", "'' is no retention; write one of full, truncate"),
        ("truncate 4096", "no retention; write one of full, truncate"),
        ("forget(4096, 1024", "no retention; write one of full, truncate"),
        ("truncate", r"'truncate': write truncate\(n\), each number a whole number of tokens"),
        ("truncate()", r"write truncate\(n\)"),
        ("truncate(4, 096)", r"write truncate\(n\)"),
        ("sliding_window(\N{ARABIC-INDIC DIGIT THREE})", r"write sliding_window\(window\)"),
        ("truncate(4e3)", r"write truncate\(n\)"),
        ("truncate(-1)", r"write truncate\(n\)"),
        ("forget(4096)", r"write forget\(over, drop\)"),
        ("full(1)", "'full\\(1\\)': write full, each"),
        ("truncate(0)", r"truncate\(n\): n must be at least 1, not 0"),
        ("forget(4, 5)", r"forget\(over, drop\): drop must be from 1 to 4, not 5"),
        ("forget(4, 0)", "drop must be from 1 to 4, not 0"),
        ("forget(0, 0)", "over must be at least 1, not 0"),
        ("sliding_window(0)", "window must be at least 1, not 0"),
        ("sink_recent(0, 128)", "sinks must be at least 1, not 0"),
        ("sink_recent(4, 0)", "recent must be at least 1, not 0"),
    ],
)
def test_text_that_is_no_rule_is_refused_with_the_cure(text: str, cure: str) -> None:
    with pytest.raises(ValueError, match=cure):
        retention_rule(text)


# What they hold


@pytest.mark.parametrize(
    ("rule", "held"),
    [
        (Full(), {0: 0, 1: 1, 4096: 4096, 10**9: 10**9}),
        (Truncate(4096), {0: 0, 4095: 4095, 4096: 4096, 4097: 4096, 9000: 4096}),
        (Forget(4096, 1024), {0: 0, 4096: 4096, 4097: 3073, 5120: 4096, 5121: 3073, 6144: 4096}),
        (Forget(4, 4), {4: 4, 5: 1, 8: 4, 9: 1}),
        (Forget(4, 1), {4: 4, 5: 4, 9: 4}),
        (SlidingWindow(2048), {0: 0, 2047: 2047, 2048: 2048, 2049: 2048, 9000: 2048}),
        (SinkRecent(4, 128), {0: 0, 3: 3, 131: 131, 132: 132, 133: 132, 9000: 132}),
    ],
    ids=str,
)
def test_what_is_held_of_how_many_tokens(rule: Retention, held: dict[int, int]) -> None:
    assert {tokens: rule.kept(tokens) for tokens in held} == held


def test_the_most_that_is_ever_held() -> None:
    rules = [Full(), Truncate(4096), Forget(4096, 1024), SlidingWindow(2048), SinkRecent(4, 128)]
    assert [rule.bound for rule in rules] == [None, 4096, 4096, 2048, 132]
    assert [rule.moves for rule in rules] == [False, True, True, False, False]


SMALL = st.integers(1, 12)
RULES = st.one_of(
    st.just(Full()),
    st.builds(Truncate, SMALL),
    st.tuples(SMALL, SMALL).map(lambda pair: Forget(max(pair), min(pair))),
    st.builds(SlidingWindow, SMALL),
    st.builds(SinkRecent, SMALL, SMALL),
)


def positions(rule: Retention, tokens: int) -> set[int]:
    """Which tokens are held, found by taking them one at a time as the rule is told in words."""
    held: list[int] = []
    for position in range(tokens):
        held.append(position)
        match rule:
            case Truncate() | SlidingWindow() if len(held) > rule.bound:
                del held[0]
            case Forget(over, drop) if len(held) > over:
                del held[:drop]
            case SinkRecent(sinks, recent) if len(held) > sinks + recent:
                del held[sinks]
            case _:
                pass
    return set(held)


def assert_as_told(rule: Retention, before: int, after: int) -> None:
    held_before, held_after = positions(rule, before), positions(rule, after)
    assert rule.kept(after) == len(held_after)
    assert rule.staying(before, after) == len(held_before & held_after)


@given(RULES, st.integers(0, 40), st.integers(0, 40))
def test_the_formulas_are_the_rules_told_in_words(rule: Retention, before: int, further: int) -> None:
    assert_as_told(rule, before, before + further)


@given(RULES, st.integers(0, 200))
def test_nothing_is_dropped_up_to_the_bound_and_never_more_is_held(rule: Retention, tokens: int) -> None:
    if rule.bound is None or tokens <= rule.bound:
        assert rule.kept(tokens) == tokens
    else:
        assert 0 < rule.kept(tokens) <= rule.bound


def test_a_drop_that_comes_one_step_late_is_noticed() -> None:
    @dataclass(frozen=True, slots=True)
    class DropsLate(Forget):
        def kept(self, tokens: int) -> int:
            return tokens if tokens == self.over + 1 else Forget.kept(self, tokens)

    assert_as_told(DropsLate(8, 3), 4, 8)
    with pytest.raises(AssertionError):
        assert_as_told(DropsLate(8, 3), 8, 9)


def test_sinks_that_are_not_counted_as_staying_are_noticed() -> None:
    @dataclass(frozen=True, slots=True)
    class LosesTheSinks(SinkRecent):
        def staying(self, before: int, after: int) -> int:
            return Retention.staying(self, before, after)

    assert_as_told(LosesTheSinks(2, 6), 4, 8)
    with pytest.raises(AssertionError):
        assert_as_told(LosesTheSinks(2, 6), 4, 12)
