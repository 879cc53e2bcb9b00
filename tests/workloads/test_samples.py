"""Samples: each prompt as several requests that differ only in their number, their id and their output stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from hbmtwin.workloads import (
    Arrivals,
    Conversations,
    Fixed,
    OpenLoop,
    Request,
    Samples,
    Uniform,
    WorkloadError,
    output_stream,
)

Play = Callable[..., list[Any]]
ONE_TURN = Conversations(prompt_tokens=Uniform(1, 300), output_tokens=Uniform(1, 90), turns=Fixed(1))


def single() -> OpenLoop:
    return OpenLoop(ONE_TURN, Arrivals(5.0), num_prompts=20)


def test_each_prompt_comes_as_often_at_the_same_time(play: Play) -> None:
    prompts = [served.request for served in play(single(), 10)]
    source = Samples(single(), 3)
    requests = [served.request for served in play(source, 10)]
    assert source.total_requests == len(requests) == 60
    assert [r.id for r in requests] == list(range(60))
    for number, r in enumerate(requests):
        assert r == prompts[number // 3]._replace(id=number, sample=number % 3)


def test_each_sample_has_an_output_stream_of_its_own() -> None:
    names = [output_stream(r.session, r.turn, r.sample) for r in Samples(single(), 4).open()]
    assert len(set(names)) == 80
    assert names[:4] == ["out/0/0/0", "out/0/0/1", "out/0/0/2", "out/0/0/3"]


def test_one_sample_changes_nothing() -> None:
    assert list(Samples(single(), 1).open()) == list(single().open())


def test_it_is_lazy() -> None:
    class Endless(OpenLoop):
        def open(self) -> Iterator[Request]:
            yield from single().open()
            raise AssertionError("read too far")

    source = Samples(Endless(ONE_TURN, Arrivals(5.0), num_prompts=1), 2)
    assert sum(1 for _ in zip(range(40), source.open(), strict=False)) == 40


def test_bad_numbers_and_sources_with_turns_are_refused() -> None:
    with pytest.raises(WorkloadError, match="samples must be at least 1, not 0"):
        Samples(single(), 0)
    turns = OpenLoop(replace(ONE_TURN, turns=Fixed(2)), Arrivals(5.0), num_prompts=4)
    with pytest.raises(WorkloadError, match="session 0 has several turns, and 2 samples of a turn leave no one answer"):
        list(Samples(turns, 2).open())
