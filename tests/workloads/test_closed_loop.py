"""Closed traffic: users who wait for their answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import (
    ClosedLoop,
    ConstantTime,
    Conversations,
    ExponentialTime,
    Fixed,
    LogNormal,
    Request,
    Status,
    Uniform,
    WorkloadError,
)

Play = Callable[..., list[Any]]

CHAT = Conversations(
    prompt_tokens=LogNormal(100, 1), output_tokens=Uniform(1, 300), turns=Uniform(1, 5), think_time=ExponentialTime(3)
)


def test_two_users_with_two_turns_a_session(play: Play) -> None:
    conversations = Conversations(
        prompt_tokens=Fixed(10), output_tokens=Fixed(5), turns=Fixed(2), think_time=ConstantTime(1)
    )
    source = ClosedLoop(conversations, users=2, num_prompts=7)
    log = [
        (r.id, r.session, r.turn, r.arrival_ns // 10**9, r.prompt_tokens, r.has_next)
        for r, _ in play(source, 3 * 10**9)
    ]
    assert log == [
        (0, 0, 0, 0, 10, True),
        (4, 1, 0, 0, 10, True),
        (1, 0, 1, 4, 25, False),
        (5, 1, 1, 4, 25, False),
        (2, 2, 0, 8, 10, True),
        (6, 3, 0, 8, 10, False),
        (3, 2, 1, 12, 25, False),
    ]


@pytest.mark.parametrize(("users", "num_prompts"), [(1, 1), (1, 50), (7, 103), (10, 10), (20, 9)])
def test_each_user_makes_an_equal_part(play: Play, users: int, num_prompts: int) -> None:
    source = ClosedLoop(CHAT, users=users, num_prompts=num_prompts)
    requests = [r for r, _ in play(source, 10**9)]
    assert source.total_requests == len(requests) == num_prompts
    assert sorted(r.id for r in requests) == list(range(num_prompts))
    parts = Counter(r.session % users for r in requests)
    assert max(parts.values()) - min(parts[user] for user in range(users)) <= 1


def test_a_user_has_one_request_at_a_time(play: Play) -> None:
    by_user: dict[int, list[Any]] = {}
    for served in play(ClosedLoop(CHAT, users=5, num_prompts=300), lambda r: r.output_tokens * 10**7):
        by_user.setdefault(served.request.session % 5, []).append(served)
    for served in by_user.values():
        for before, after in pairwise(served):
            assert after.request.id == before.request.id + 1
            assert after.request.arrival_ns >= before.end_ns
            if before.request.has_next:
                assert (after.request.session, after.request.turn) == (before.request.session, before.request.turn + 1)
            else:
                assert (after.request.session, after.request.turn) == (before.request.session + 5, 0)


@given(service_ns=st.integers(1, 10**11), other_ns=st.integers(1, 10**11))
def test_lengths_and_think_times_are_the_same_however_slow_the_server_is(
    play: Play, service_ns: int, other_ns: int
) -> None:
    source = ClosedLoop(CHAT, users=3, num_prompts=40)

    def traffic(service_ns: int) -> set[tuple[Request, int]]:
        """Requests with their arrivals replaced by the think time before them."""
        ended = {}
        made = set()
        for r, end_ns in play(source, service_ns):
            user = r.session % 3
            made.add((r._replace(arrival_ns=0), r.arrival_ns - ended.get(user, 0)))
            ended[user] = end_ns
        return made

    assert traffic(service_ns) == traffic(other_ns)


@pytest.mark.parametrize("status", [Status.REJECTED, Status.FAILED])
def test_a_user_whose_turn_was_not_served_opens_a_new_session(play: Play, status: Status) -> None:
    source = ClosedLoop(replace(CHAT, turns=Fixed(3)), users=2, num_prompts=12)

    def judge(r: Request) -> Status:
        return status if (r.session, r.turn) == (0, 1) else Status.COMPLETED

    requests = [r for r, _ in play(source, 10**9, judge)]
    assert len(requests) == 12
    assert [(r.session, r.turn) for r in requests if r.session % 2 == 0] == [
        (0, 0),
        (0, 1),
        (2, 0),
        (2, 1),
        (2, 2),
        (4, 0),
    ]


def test_if_nothing_is_served_every_request_is_still_made_once(play: Play) -> None:
    requests = [r for r, _ in play(ClosedLoop(CHAT, users=3, num_prompts=50), 1, lambda r: Status.REJECTED)]
    assert len(requests) == 50
    assert {r.turn for r in requests} == {0}


def test_nothing_follows_an_unfinished_request() -> None:
    source = ClosedLoop(CHAT, users=1, num_prompts=5)
    first = next(iter(source.open()))
    assert source.next_turn(first, 10, Status.UNFINISHED) is None


@pytest.mark.parametrize(("users", "num_prompts", "name"), [(0, 5, "users"), (-1, 5, "users"), (5, 0, "num_prompts")])
def test_bad_figures_are_refused(users: int, num_prompts: int, name: str) -> None:
    with pytest.raises(WorkloadError, match=f"^{name} must be at least 1, not "):
        ClosedLoop(CHAT, users=users, num_prompts=num_prompts)


def test_more_users_than_requests_cost_nothing() -> None:
    source = ClosedLoop(CHAT, users=10**12, num_prompts=3)
    assert [r.id for r in source.open()] == [0, 1, 2]
