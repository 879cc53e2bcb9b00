"""Open traffic: arrivals that no server can slow down, and sessions that wait for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from hbmtwin.workloads import (
    Arrivals,
    Conversations,
    ExponentialTime,
    Fixed,
    LogNormal,
    OpenLoop,
    Request,
    Status,
    Uniform,
    WorkloadError,
)

Play = Callable[..., list[Any]]

CHAT = Conversations(
    prompt_tokens=LogNormal(100, 1), output_tokens=Uniform(1, 300), turns=Uniform(1, 5), think_time=ExponentialTime(3)
)


def content(r: Request) -> tuple[int, int, int, int, int]:
    """What a request is, its arrival apart."""
    return r.session, r.turn, r.prompt_tokens, r.output_tokens, r.id


def test_num_prompts_counts_the_requests_of_all_turns(play: Play) -> None:
    for num_prompts in (1, 2, 3, 100, 1001):
        source = OpenLoop(CHAT, Arrivals(2.0), num_prompts=num_prompts)
        requests = [served.request for served in play(source, 10**9)]
        assert source.total_requests == len(requests) == num_prompts
        assert sorted(r.id for r in requests) == list(range(num_prompts))
        assert source.num_sessions == len({r.session for r in requests})


def test_the_last_session_is_cut_to_fit(play: Play) -> None:
    source = OpenLoop(replace(CHAT, turns=Fixed(4)), Arrivals(1.0), num_prompts=10)
    turns = [(r.session, r.turn) for r, _ in play(source, 1)]
    assert sorted(turns) == [(s, t) for s in range(3) for t in range(4)][:10]
    assert [r.id for r in source.open()] == [0, 4, 8]


def test_has_next_tells_which_requests_are_followed(play: Play) -> None:
    served = play(OpenLoop(CHAT, Arrivals(2.0), num_prompts=400), 10**9)
    made = {(r.session, r.turn) for r, _ in served}
    for r, _ in served:
        assert r.has_next == ((r.session, r.turn + 1) in made)


def test_traffic_is_the_same_however_slow_the_server_is(play: Play) -> None:
    source = OpenLoop(CHAT, Arrivals(2.0), num_prompts=600)
    fast, slow = play(source, 1), play(source, 60 * 10**9)
    assert {content(r) for r, _ in fast} == {content(r) for r, _ in slow}
    firsts_fast = [r for r, _ in fast if r.turn == 0]
    assert firsts_fast == [r for r, _ in slow if r.turn == 0] == list(source.open())


def test_sessions_arrive_at_the_request_rate(play: Play) -> None:
    source = OpenLoop(CHAT, Arrivals(8.0), num_prompts=30_000)
    firsts = list(source.open())
    assert len(firsts) == pytest.approx(10_000, rel=0.02)
    assert firsts[-1].arrival_ns / 1e9 == pytest.approx(len(firsts) / 8, rel=0.03)
    assert all(a.arrival_ns <= b.arrival_ns for a, b in pairwise(firsts))


def test_changing_one_model_moves_no_other_draw() -> None:
    base = list(OpenLoop(CHAT, Arrivals(2.0), num_prompts=300).open())
    longer = replace(CHAT, prompt_tokens=LogNormal(2000, 0.5))
    others = list(OpenLoop(longer, Arrivals(2.0), num_prompts=300).open())
    assert [r.prompt_tokens for r in base] != [r.prompt_tokens for r in others]
    assert [(r.arrival_ns, r.output_tokens, r.id) for r in base] == [
        (r.arrival_ns, r.output_tokens, r.id) for r in others
    ]
    faster = list(OpenLoop(CHAT, Arrivals(4.0), num_prompts=300).open())
    assert [content(r) for r in base] == [content(r) for r in faster]
    # Twice the rate halves each gap; each is rounded to a nanosecond.
    assert faster[-1].arrival_ns == pytest.approx(base[-1].arrival_ns / 2, abs=len(base))


def test_another_seed_is_other_traffic() -> None:
    base, other = (list(OpenLoop(replace(CHAT, seed=s), Arrivals(2.0), num_prompts=50).open()) for s in (0, 1))
    assert base[0].arrival_ns != other[0].arrival_ns
    assert base[0].prompt_tokens != other[0].prompt_tokens


@pytest.mark.parametrize("status", [Status.REJECTED, Status.FAILED, Status.UNFINISHED])
def test_a_session_ends_with_a_turn_that_was_not_served(play: Play, status: Status) -> None:
    source = OpenLoop(replace(CHAT, turns=Fixed(4)), Arrivals(1.0), num_prompts=40)

    def judge(r: Request) -> Status:
        return status if (r.session, r.turn) == (3, 1) else Status.COMPLETED

    requests = [r for r, _ in play(source, 10**9, judge)]
    assert len(requests) == 38
    assert [r.turn for r in requests if r.session == 3] == [0, 1]
    assert [r.turn for r in requests if r.session == 4] == [0, 1, 2, 3]


def test_an_infinite_rate_opens_every_session_at_time_0() -> None:
    source = OpenLoop(replace(CHAT, turns=Fixed(1)), Arrivals(math.inf), num_prompts=1000)
    assert [r.arrival_ns for r in source.open()] == [0] * 1000


@pytest.mark.parametrize("num_prompts", [0, -5])
def test_zero_requests_are_refused(num_prompts: int) -> None:
    with pytest.raises(WorkloadError, match=f"^num_prompts must be at least 1, not {num_prompts}$"):
        OpenLoop(CHAT, Arrivals(1.0), num_prompts=num_prompts)
