"""Rates that change over time or over requests, held against integrals and a naive model."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import Arrivals, Bursts, WorkloadError
from hbmtwin.workloads.draws import IntArray
from hbmtwin.workloads.rates import Ramp, RateCurve, Strategy, rate_curve_from

DAY = RateCurve(((0, 0.5), (25, 0.5), (50, 2.0), (75, 2.0), (100, 0.5)))
STAGES = RateCurve(((0, 1), (60, 1), (60, 5), (120, 5), (120, 0), (200, 0)))


def times(arrivals: Arrivals, sessions: int, seed: int = 0) -> IntArray:
    return np.concatenate(list(arrivals.times_ns(seed, sessions)))


def integral(curve: RateCurve, t: float, steps: int = 4000) -> float:
    """Of the factor from 0 to *t*, by small trapezoids over plain interpolation of each piece."""
    total = t // curve.period_s * curve.mean_factor * curve.period_s
    rest = t % curve.period_s
    for (a, fa), (b, fb) in pairwise(curve.points):
        end = min(b, rest)
        if end <= a:
            continue
        middles = a + (np.arange(steps) + 0.5) * (end - a) / steps
        total += float(np.mean(fa + (fb - fa) * (middles - a) / (b - a))) * (end - a)
    return total


def test_mean_factor_of_a_curve_is_its_area_over_its_period() -> None:
    assert (DAY.period_s, DAY.mean_factor) == (100, 1.25)  # 12.5 + 31.25 + 50 + 31.25
    assert (STAGES.period_s, STAGES.mean_factor) == (200, 1.8)  # 60 + 300 + 0


@pytest.mark.parametrize("curve", [DAY, STAGES, RateCurve(((0, 0), (10, 3), (20, 0)))])
def test_where_an_arrival_moves_the_integral_of_the_curve_is_what_the_steady_clock_read(curve: RateCurve) -> None:
    steady = np.arange(1, 4000, 7, dtype=np.int64) * 10**8
    bent = curve.bend(steady) / 1e9
    for t, read in zip(bent, steady / 1e9, strict=True):
        assert integral(curve, float(t)) == pytest.approx(read, abs=1e-4)


def test_worked_example_a_rate_that_rises_from_nought() -> None:
    # Factor t / 10 up to 10 s: area t^2 / 20, so that areas 0.05, 1.25 and 5 are reached after 1, 5 and 10 s.
    curve = RateCurve(((0, 0), (10, 1)))
    area = np.array([50_000_000, 1_250_000_000, 4_999_999_999, 5_000_000_000, 5_050_000_000])
    assert curve.bend(area).tolist() == pytest.approx([1e9, 5e9, 1e10, 1e10, 1.1e10], abs=2)


def test_counts_follow_the_curve() -> None:
    arrived = times(Arrivals(200.0, curve=DAY), 200_000) / 1e9
    phase = arrived % 100
    periods = arrived[-1] / 100
    assert periods == pytest.approx(8, rel=0.02)  # 200 x 1.25 a second: 25,000 a period
    counts = np.histogram(phase, bins=[0, 25, 50, 75, 100])[0] / periods
    assert counts.tolist() == pytest.approx([2500, 6250, 10_000, 6250], rel=0.03)


def test_nobody_comes_in_silence() -> None:
    phase = times(Arrivals(50.0, curve=STAGES), 54_000) / 1e9 % 200
    assert not ((phase > 120.001) & (phase < 199.999)).any()
    before, after = (phase < 60).sum(), ((phase >= 60) & (phase <= 120)).sum()
    assert after / before == pytest.approx(5, rel=0.05)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), min_size=1, max_size=6),
    st.integers(0, 2**32),
    st.sampled_from([None, Bursts(10, 1, 9.9)]),
)
def test_a_curve_keeps_the_order_and_depends_on_no_later_arrival(
    rises: list[tuple[float, float]], seed: int, bursts: Bursts | None
) -> None:
    ends = np.cumsum([rise for rise, _ in rises])
    points = ((0.0, 1.0), *zip(ends.tolist(), (factor for _, factor in rises), strict=True), (float(ends[-1]) + 1, 1.0))
    arrivals = Arrivals(20.0, 0.5, bursts, curve=RateCurve(points))
    many = times(arrivals, 9000, seed)
    assert many[0] >= 0
    assert (np.diff(many) >= 0).all()
    assert times(arrivals, 40, seed).tolist() == many[:40].tolist()
    assert np.concatenate(list(arrivals.times_ns(seed, 9000, chunk=700))).tolist() == many.tolist()


@pytest.mark.parametrize(("strategy", "middle"), [("linear", 5.5), ("exponential", math.sqrt(10))])
def test_a_ramp_goes_from_its_start_to_its_end_by_index(strategy: Strategy, middle: float) -> None:
    ramp = Ramp(strategy, 1.0, 10.0)
    assert ramp.rates(np.array([0, 50, 100]), 101).tolist() == pytest.approx([1.0, middle, 10.0], rel=1e-12)
    assert ramp.rates(np.array([0]), 1).tolist() == [1.0]


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
def test_constant_gaps_under_a_ramp_are_those_of_a_plain_loop(strategy: Strategy) -> None:
    arrived = times(Arrivals(math.inf, pattern="constant", ramp=Ramp(strategy, 2.0, 40.0)), 1000)
    t = 0.0
    for i, seen in enumerate(arrived.tolist()):
        p = i / 999
        t += 1 / (2 + 38 * p if strategy == "linear" else 2 * 20**p)
        assert seen / 1e9 == pytest.approx(t, abs=1e-6)


def test_random_gaps_under_a_ramp_have_the_rate_of_its_place() -> None:
    arrived = times(Arrivals(math.inf, ramp=Ramp("linear", 10.0, 100.0)), 100_000) / 1e9
    gaps = np.diff(arrived)
    assert 1 / gaps[:2000].mean() == pytest.approx(10.9, rel=0.06)  # the first 2 %: 10 to 11.8
    assert 1 / gaps[-2000:].mean() == pytest.approx(99.1, rel=0.06)
    # Integral of di / rate(i): n / (b - a) ln(b / a).
    assert arrived[-1] == pytest.approx(100_000 / 90 * math.log(10), rel=0.02)


@pytest.mark.parametrize("burstiness", [0.1, 1.0, 4.0, math.inf])
def test_rescaled_gaps_end_at_requests_over_rate(burstiness: float) -> None:
    free = Arrivals(8.0, burstiness)
    told = Arrivals(8.0, burstiness, rescale_gaps=True)
    for sessions in (1, 10, 20_000):
        arrived = times(told, sessions)
        assert abs(arrived[-1] - sessions / 8 * 1e9) <= 1
        drawn = times(free, sessions)
        assert arrived.tolist() == pytest.approx((drawn * (arrived[-1] / drawn[-1])).tolist(), rel=1e-9, abs=2)


def test_rescaled_at_an_infinite_rate_is_all_at_once() -> None:
    assert times(Arrivals(math.inf, rescale_gaps=True), 5).tolist() == [0] * 5


def test_a_ramp_whose_ends_have_no_quotient_is_a_ramp() -> None:
    rates = Ramp("exponential", 1e-300, 1e300).rates(np.arange(3), 3)
    assert rates == pytest.approx([1e-300, 1.0, 1e300], rel=1e-9)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: RateCurve(((0, 1),)), "a rate curve has two points or more, [seconds, factor], the first at 0 s"),
        (lambda: RateCurve(((1, 1), (2, 1))), "a rate curve has two points or more, [seconds, factor]"),
        (lambda: RateCurve(((0, 1), (2, 1), (1, 1))), "times of a rate curve do not fall, and the last is from 1e-3"),
        (lambda: RateCurve(((0, 1), (math.inf, 1))), "times of a rate curve do not fall, and the last is from 1e-3"),
        (lambda: RateCurve(((0, 1), (2, -1))), "factors of a rate curve are from 0 to 1e9"),
        (lambda: RateCurve(((0, 1), (2, math.nan))), "factors of a rate curve are from 0 to 1e9"),
        (lambda: RateCurve(((0, 0), (2, 0))), "the mean factor of a rate curve must be 1e-6 or more"),
        (lambda: rate_curve_from([[0, 1], [2]]), "each point of a rate curve is [seconds, factor]"),
        (lambda: Ramp("linear", 0, 1), "a ramp's start rate is above 0 a second and finite, not 0"),
        (lambda: Ramp("linear", 1, math.inf), "a ramp's end rate is above 0 a second and finite, not inf"),
        (lambda: Arrivals(3.0, ramp=Ramp("linear", 1, 2)), "a ramp goes without request_rate, bursts and rate_curve"),
        (lambda: Arrivals(math.inf, curve=DAY), "a rate_curve needs a finite request_rate, which it multiplies"),
        (lambda: Arrivals(1.0, curve=DAY, rescale_gaps=True), "rescale_gaps goes without ramp, bursts and rate_curve"),
        (
            lambda: times(Arrivals(1e-9, curve=RateCurve(((0, 1e-3), (1, 1e-3)))), 3),
            "arrivals under this rate curve take over 146 years",
        ),
        (
            lambda: times(Arrivals(math.inf, ramp=Ramp("linear", 1e-300, 1e300)), 3),
            "3 sessions on a ramp from 1e-300 to 1e+300 a second take over 146 years: raise "
            "workload.ramp_up_start_rps, or take fewer workload.num_prompts",
        ),
        (
            lambda: times(Arrivals(math.inf, ramp=Ramp("exponential", 1e300, 1e-300)), 3),
            "3 sessions on a ramp from 1e+300 to 1e-300 a second take over 146 years: raise workload.ramp_up_end_rps,",
        ),
    ],
)
def test_bad_rates_say_what_would_do(build: object, said: str) -> None:
    assert callable(build)
    with pytest.raises(WorkloadError) as error:
        build()
    assert str(error.value).startswith(said)
