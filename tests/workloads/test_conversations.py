"""What is said: a prompt is the system prompt, the whole history, and the new text, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hbmtwin.workloads import (
    Arrivals,
    ConstantTime,
    Conversations,
    Fixed,
    LogNormal,
    OpenLoop,
    Request,
    Uniform,
    WorkloadError,
    merge_spans,
    output_stream,
)
from hbmtwin.workloads.draws import FloatArray, IntArray

Play = Callable[..., list[Any]]


class Scripted:
    """Lengths in the order in which they are asked for."""

    def __init__(self, *values: int) -> None:
        self.values = iter(values)

    def at(self, u: float) -> int:
        return next(self.values)

    def at_many(self, u: FloatArray) -> IntArray:
        return np.array([next(self.values) for _ in u], dtype=np.int64)


def one_session(conversations: Conversations, turns: int, play: Play) -> list[Request]:
    source = OpenLoop(replace(conversations, turns=Fixed(turns)), Arrivals(1.0), num_prompts=turns)
    return [served.request for served in play(source, 10**9)]


def assert_each_prompt_is_the_history_and_new_text(turns: Iterable[Request]) -> None:
    """The spans of a turn begin with those of the turn before it and its whole answer, and add up."""
    last: Request | None = None
    for r in turns:
        assert sum(length for _, _, length in r.spans) == r.prompt_tokens
        assert merge_spans(r.spans) == r.spans
        if last is not None:
            history = (*last.spans, (output_stream(last.session, last.turn), 0, last.output_tokens))
            assert r.spans[: len(history)] == history
            assert r.spans[len(history) :] == ((f"user/{r.session}/{r.turn}", 0, r.spans[-1][2]),)
        last = r


def test_claim_b2_history_is_250_tokens_after_turn_1_and_430_after_turn_2(play: Play) -> None:
    conversations = Conversations(prompt_tokens=Scripted(50, 30, 1), output_tokens=Scripted(200, 150, 1))
    first, second, third = one_session(conversations, 3, play)
    assert (first.prompt_tokens, first.output_tokens) == (50, 200)
    assert (second.prompt_tokens, second.output_tokens) == (250 + 30, 150)
    assert third.prompt_tokens == 430 + 1
    assert third.spans == (
        ("user/0/0", 0, 50),
        ("out/0/0/0", 0, 200),
        ("user/0/1", 0, 30),
        ("out/0/1/0", 0, 150),
        ("user/0/2", 0, 1),
    )


def test_a_conversation_of_twenty_turns(play: Play) -> None:
    conversations = Conversations(prompt_tokens=Fixed(30), output_tokens=Fixed(150), system_prompt_tokens=100)
    turns = one_session(conversations, 20, play)
    assert [r.prompt_tokens for r in turns] == [130 + 180 * turn for turn in range(20)]
    assert turns[19].prompt_tokens == 3550
    assert [r.turn for r in turns] == list(range(20))
    assert [r.has_next for r in turns] == [True] * 19 + [False]
    assert_each_prompt_is_the_history_and_new_text(turns)


def test_a_history_that_loses_an_answer_would_be_caught(play: Play) -> None:
    conversations = Conversations(prompt_tokens=Fixed(30), output_tokens=Fixed(150))
    turns = one_session(conversations, 3, play)
    turns[1] = turns[1]._replace(prompt_tokens=60, spans=(("user/0/0", 0, 30), ("user/0/1", 0, 30)))
    with pytest.raises(AssertionError):
        assert_each_prompt_is_the_history_and_new_text(turns)


def test_random_conversations_keep_their_history(play: Play) -> None:
    conversations = Conversations(
        prompt_tokens=LogNormal(100, 1), output_tokens=Uniform(1, 300), turns=Uniform(1, 6), system_prompt_tokens=64
    )
    sessions: dict[int, list[Request]] = {}
    for r, _ in play(OpenLoop(conversations, Arrivals(2.0), num_prompts=500), 5 * 10**9):
        sessions.setdefault(r.session, []).append(r)
    assert len(sessions) > 100
    for turns in sessions.values():
        assert [r.turn for r in turns] == list(range(len(turns)))
        assert turns[0].spans == (("system", 0, 64), (f"user/{turns[0].session}/0", 0, turns[0].prompt_tokens - 64))
        assert_each_prompt_is_the_history_and_new_text(turns)


def test_first_turns_at_once_are_those_one_by_one() -> None:
    conversations = Conversations(
        seed=9, prompt_tokens=LogNormal(1155, 0.9), output_tokens=LogNormal(211, 0.8), system_prompt_tokens=7
    )
    sessions = np.arange(300)
    more = sessions % 2
    together = conversations.first_turns(sessions, ids=sessions * 3, arrivals_ns=sessions * 1000, has_next=more)
    one_by_one = [
        conversations.first_turn(session, id=session * 3, arrival_ns=session * 1000, has_next=session % 2 == 1)
        for session in range(300)
    ]
    assert list(together) == one_by_one


def test_the_server_is_told_the_answers_length_or_max_tokens_which_cuts_it(play: Play) -> None:
    conversations = Conversations(prompt_tokens=Fixed(10), output_tokens=Scripted(100, 600, 200))
    told = one_session(conversations, 3, play)
    assert [(r.output_tokens, r.max_tokens) for r in told] == [(100, 100), (600, 600), (200, 200)]
    conversations = Conversations(prompt_tokens=Fixed(10), output_tokens=Scripted(100, 600, 200), max_tokens=512)
    cut = one_session(conversations, 3, play)
    assert [(r.output_tokens, r.max_tokens) for r in cut] == [(100, 512), (512, 512), (200, 512)]
    assert cut[2].prompt_tokens == 10 + 100 + 10 + 512 + 10


def test_the_next_turn_arrives_a_think_time_after_the_last_ended(play: Play) -> None:
    conversations = Conversations(
        prompt_tokens=Fixed(1), output_tokens=Fixed(1), turns=Fixed(3), think_time=ConstantTime(2.5)
    )
    first, second, third = play(OpenLoop(conversations, Arrivals(1.0), num_prompts=3), 4 * 10**9)
    assert second.request.arrival_ns == first.end_ns + 2_500_000_000
    assert third.request.arrival_ns == first.request.arrival_ns + 2 * 6_500_000_000


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"system_prompt_tokens": -1}, "system_prompt_tokens is from 0 to 2^40, not -1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, not 0"),
    ],
)
def test_bad_conversations_say_what_would_do(settings: dict[str, int], message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        Conversations(prompt_tokens=Fixed(1), output_tokens=Fixed(1), **settings)
    assert str(error.value) == message


def test_the_first_prompt_of_a_session_may_have_lengths_of_its_own(play: Play) -> None:
    plain = Conversations(prompt_tokens=Uniform(10, 19), output_tokens=Fixed(3), system_prompt_tokens=100)
    longer = replace(plain, first_prompt_tokens=Fixed(1000))
    before, after = one_session(plain, 3, play), one_session(longer, 3, play)
    assert [r.spans[-1][2] for r in after] == [1000, *(r.spans[-1][2] for r in before[1:])]
    assert_each_prompt_is_the_history_and_new_text(after)
    assert after[0].prompt_tokens == 1100
    assert longer.first_turn(0, id=0, arrival_ns=after[0].arrival_ns, has_next=True) == after[0]
