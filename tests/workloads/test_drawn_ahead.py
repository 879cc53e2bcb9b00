"""Draws made ahead are the single ones, whoever asks, in whatever order, and however few arrays are kept."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hbmtwin.workloads import ConstantTime, ExponentialTime, Fixed, LogNormal, LogNormalTime, Quantiles, Uniform
from hbmtwin.workloads import drawn_ahead as module
from hbmtwin.workloads.drawn_ahead import Distribution, DrawnAhead
from hbmtwin.workloads.draws import FloatArray, IntArray, Purpose, uniform

DISTRIBUTIONS: list[Distribution] = [
    Fixed(7),
    Uniform(3, 90),
    LogNormal(200, 0.5, max=500),
    Quantiles((0.1, 0.5, 0.9), (3, 40, 700)),
    ConstantTime(1.5),
    ExponentialTime(45),
    LogNormalTime(35, 0.96),
]


def single(distribution: Distribution, session: int, turn: int) -> int:
    return distribution.at(uniform(5, Purpose.THINK_TIME, session, turn))


def asked(distribution: Distribution, keys: list[tuple[int, int]]) -> list[int]:
    drawn = DrawnAhead(distribution, 5, Purpose.THINK_TIME)
    return [drawn.at(*key) for key in keys]


@pytest.mark.parametrize("arrays", [1, 3, 256])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS, ids=lambda d: type(d).__name__)
def test_they_are_the_single_draws_in_any_order(
    distribution: Distribution, arrays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ARRAYS", arrays)
    monkeypatch.setattr(module, "SESSIONS", 32)
    keys = [(session, turn) for session in range(100) for turn in range(4)] * 2
    random.Random(0).shuffle(keys)
    keys += sorted(keys)
    assert asked(distribution, keys) == [single(distribution, *key) for key in keys]


@pytest.mark.parametrize("distribution", DISTRIBUTIONS[4:], ids=lambda d: type(d).__name__)
def test_many_waits_are_the_single_ones_to_the_nanosecond(distribution: Distribution) -> None:
    grid = (np.arange(5000) + 0.5) / 5000
    assert distribution.at_many(grid).tolist() == [distribution.at(u) for u in grid.tolist()]


def test_an_array_is_made_when_it_pays_and_the_oldest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ARRAYS", 2)
    drawn = DrawnAhead(Uniform(1, 10**6), 5, Purpose.TURNS)
    for session in range(16):
        drawn.at(session, 0)
    assert not drawn._drawn
    for turn in range(3):
        for session in range(17):
            drawn.at(session, turn)
    assert list(drawn._drawn) == [(0, 1), (0, 2)]
    for turn in range(3, 50):
        drawn.at(0, turn)
    assert len(drawn._asked) == 2


class OneOff(Uniform):
    """Its array is that of the next sessions."""

    def at_many(self, u: FloatArray) -> IntArray:
        return super().at_many(np.roll(u, 1))


def test_a_planted_bug_is_noticed() -> None:
    keys = [(session, 0) for session in range(40)]
    distribution = OneOff(1, 10**6)
    assert asked(distribution, keys) != [single(distribution, *key) for key in keys]
