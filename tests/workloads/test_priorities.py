"""Priorities: classes of sessions, drawn by weights and keyed by seed and session."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from hbmtwin.workloads import (
    Arrivals,
    ClosedLoop,
    ConstantTime,
    Conversations,
    Fixed,
    OpenLoop,
    Priorities,
    Samples,
    WorkloadError,
)

Play = Callable[..., list[Any]]


def sessions(turns: int = 1) -> Conversations:
    return Conversations(
        prompt_tokens=Fixed(10), output_tokens=Fixed(5), turns=Fixed(turns), think_time=ConstantTime(1)
    )


def many(num_prompts: int = 4000) -> OpenLoop:
    return OpenLoop(sessions(), Arrivals(5.0), num_prompts=num_prompts)


def test_priorities_come_as_often_as_their_weights_say() -> None:
    """Expected 400, 0, 1200 and 2400; three standard deviations are 57, 0, 87 and 93."""
    seen = Counter(r.priority for r in Priorities(many(), [1, 0, 3, 6]).open())
    assert abs(seen[0] - 400) < 57
    assert seen[1] == 0
    assert abs(seen[2] - 1200) < 87
    assert seen.total() == 4000


def test_nothing_else_of_a_request_changes() -> None:
    assert [r._replace(priority=0) for r in Priorities(many(50), [1, 1]).open()] == list(many(50).open())
    assert Priorities(many(50), [1, 1]).total_requests == 50


def test_all_turns_of_a_session_and_all_samples_of_a_prompt_have_the_same(play: Play) -> None:
    source = Priorities(ClosedLoop(sessions(turns=3), users=4, num_prompts=60), [1, 1, 1])
    served = [each.request for each in play(source, 10)]
    assert len(served) == 60
    assert len({(r.session, r.priority) for r in served}) == len({r.session for r in served}) == 20
    assert len({r.priority for r in served}) == 3
    samples = list(Samples(Priorities(many(20), [1, 1]), 3).open())
    assert len({(r.session, r.priority) for r in samples}) == 20


def test_the_seed_draws_and_the_same_seed_the_same() -> None:
    first, again, other = ([r.priority for r in Priorities(many(99), [1, 1], seed=s).open()] for s in (1, 1, 2))
    assert first == again != other


def test_one_weight_is_one_class() -> None:
    assert {r.priority for r in Priorities(many(99), [0.3]).open()} == {0}
    assert {r.priority for r in Priorities(many(99), [0, 0, 7]).open()} == {2}


@pytest.mark.parametrize("weights", [[], [0, 0], [2, -1]])
def test_weights_that_make_no_sense_are_refused(weights: list[float]) -> None:
    with pytest.raises(WorkloadError, match="priorities must be weights from 0 on, one of them above 0"):
        Priorities(many(), weights)
