"""What the seeds of a point come to: counts, middles with their bands, and who is beaten by nobody."""

from __future__ import annotations

import itertools
import random
from statistics import median
from typing import Any

import pytest

from hbmtwin.sim.sweep.points import PointSummary, capacity_of, pareto, point_summaries, spread


def row(users: int, outcome: str = "held", cause: str | None = None, **values: Any) -> dict[str, Any]:
    from hbmtwin.sim.sweep.run_row import ROW_COLUMNS

    return {**dict.fromkeys(ROW_COLUMNS), "workload.users": users, "outcome": outcome, "cause": cause, **values}


def test_a_point_over_its_seeds() -> None:
    rows = [
        *(row(10, ttft_p99_s=seconds, requests_per_s=2.0) for seconds in (1.0, 3.0, 2.0)),
        row(10, "out_of_memory", "growth_copy", ttft_p99_s=0.1),
        row(10, "failed", "KeyError"),
        row(20, "does_not_fit", "does_not_fit"),
    ]
    ten, twenty = point_summaries(rows, ["workload.users"])
    assert (ten.runs, ten.held) == (4, 3)
    assert ten.survival is not None
    assert ten.survival == pytest.approx((0.75, 0.19412, 0.99369), abs=1e-5)  # Clopper and Pearson, 3 of 4
    assert ten.outcomes == {"held": 3, "KeyError": 1, "growth_copy": 1}
    assert ten.measured["ttft_p99_s"] == (2.0, 1.0, 3.0)  # that of the death is not among them
    assert (twenty.runs, twenty.held, twenty.survival, twenty.measured) == (0, 0, None, {})


@pytest.mark.parametrize(("n", "low", "high"), [(1, 1, 1), (5, 1, 5), (6, 1, 6), (8, 1, 8), (9, 2, 8), (20, 6, 15)])
def test_the_band_of_a_median_is_that_of_the_tables(n: int, low: int, high: int) -> None:
    """Ranks as printed for 95 %: Conover, Practical Nonparametric Statistics."""
    assert spread([float(value) for value in range(n, 0, -1)]) == (median(range(1, n + 1)), low, high)


def test_the_band_holds_the_true_median_as_often_as_it_says() -> None:
    draw = random.Random(4)
    hits = sum(
        band.low <= 0 <= band.high for band in (spread([draw.gauss(0, 1) ** 3 for _ in range(20)]) for _ in range(4000))
    )
    assert 0.95 <= hits / 4000 <= 0.97  # exactly 0.9586


def naive_front(points: list[PointSummary], latency: str) -> set[int]:
    """By the definition: nobody serves as many as fast, and one of the two better; of equals the first."""

    def beats(a: int, b: int) -> bool:
        (ca, la), (cb, lb) = values[a], values[b]
        return ca >= cb and la <= lb and ((ca, la) != (cb, lb) or a < b)

    values = {i: (capacity_of(p) or 0, p.measured[latency].median) for i, p in enumerate(points) if p.held == p.runs}
    return {b for b in values if not any(beats(a, b) for a in values if a != b)}


def test_the_front_is_what_nobody_beats() -> None:
    draw = random.Random(7)
    for _ in range(200):
        rows = [
            row(users, ttft_p99_s=float(draw.randint(1, 6)), requests_per_s=1.0, cause=f"{place}")
            | {"place": place, "outcome": draw.choice(["held", "held", "held", "out_of_memory"])}
            for place, users in enumerate(draw.choices(range(1, 6), k=8))
        ]
        points = point_summaries(rows, ["place", "workload.users"])
        front = pareto(points, "ttft_p99_s")
        assert {points.index(point) for point in front} == naive_front(points, "ttft_p99_s")
        assert [capacity_of(point) for point in front] == sorted(capacity_of(point) or 0 for point in front)


def test_a_planted_bug_is_caught() -> None:
    """A front that forgets to look at capacity is not the front."""
    rows = [row(users, ttft_p99_s=seconds, requests_per_s=1.0) for users, seconds in ((1, 1.0), (2, 2.0), (3, 2.0))]
    points = point_summaries(rows, ["workload.users"])
    fastest = [min(points, key=lambda p: p.measured["ttft_p99_s"].median)]
    assert naive_front(points, "ttft_p99_s") == {0, 2} != {points.index(p) for p in fastest}


def test_capacity_is_users_where_they_are_varied_else_requests_a_second() -> None:
    with_users, without = (
        point_summaries([row(5, requests_per_s=0.5, **{"kv_cache.preset": "paged"})], [key])[0]
        for key in ("workload.users", "kv_cache.preset")
    )
    assert (capacity_of(with_users), capacity_of(without)) == (5.0, 0.5)
    assert list(itertools.chain(with_users.settings, without.settings)) == ["workload.users", "kv_cache.preset"]
