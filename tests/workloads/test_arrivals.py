"""When sessions arrive: rates, clustering, and bursts."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import Arrivals, Bursts, WorkloadError
from hbmtwin.workloads.draws import IntArray, uniform


def times(arrivals: Arrivals, sessions: int, seed: int = 0) -> IntArray:
    return np.concatenate(list(arrivals.times_ns(seed, sessions)))


def index_of_dispersion(times_ns: IntArray, window_s: int) -> float:
    """Variance over mean of the counts in whole windows; 1 for a Poisson process."""
    counts = np.bincount(times_ns // (window_s * 10**9))[:-1]
    return float(counts.var() / counts.mean())


def test_first_arrivals_never_change_from_one_version_to_the_next() -> None:
    assert times(Arrivals(4.0), 4).tolist() == [279_773_154, 761_015_782, 942_424_661, 998_979_245]
    assert times(Arrivals(4.0, burstiness=0.5), 3).tolist() == [91_232_183, 92_050_803, 542_184_199]
    assert uniform(0, "arrival", 0, 0) == pytest.approx(math.exp(-0.279773154 * 4), rel=1e-8)


def test_a_poisson_process_has_its_rate_and_no_clusters() -> None:
    arrived = times(Arrivals(5.0), 50_000)
    assert arrived[-1] / 1e9 == pytest.approx(10_000, rel=0.02)
    for window_s in (1, 10, 60):
        assert index_of_dispersion(arrived, window_s) == pytest.approx(1, abs=0.2)
    gaps = np.sort(np.diff(arrived)) / 1e9
    expected = 1 - np.exp(-5 * gaps)
    distance = np.max(np.abs(expected - (np.arange(len(gaps)) + 0.5) / len(gaps)))
    assert distance < 1.63 / np.sqrt(len(gaps))  # Kolmogorov-Smirnov, 1 % level


@pytest.mark.parametrize("burstiness", [0.05, 0.3, 1.0, 2.0, 9.0])
def test_gaps_vary_as_burstiness_says(burstiness: float) -> None:
    gaps = np.diff(times(Arrivals(5.0, burstiness), 60_000)) / 1e9
    assert gaps.mean() == pytest.approx(0.2, rel=0.04)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.04)


def test_gamma_gaps_of_shape_two_have_the_distribution_of_two_exponentials() -> None:
    gaps = np.sort(np.diff(times(Arrivals(1.0, 2.0), 20_000))) / 1e9
    expected = 1 - np.exp(-2 * gaps) * (1 + 2 * gaps)
    distance = np.max(np.abs(expected - (np.arange(len(gaps)) + 0.5) / len(gaps)))
    assert distance < 1.63 / np.sqrt(len(gaps))


def test_an_infinite_rate_is_all_at_once() -> None:
    assert times(Arrivals(math.inf), 20_000).tolist() == [0] * 20_000


@given(
    rate=st.floats(1e-3, 1e6),
    burstiness=st.sampled_from([0.1, 1.0, 4.0]),
    bursts=st.sampled_from([None, Bursts(180, 45, 2.5), Bursts(1e-3, 9e-4, 1.1), Bursts(10, 1, 9.9)]),
    seed=st.integers(0, 2**64),
)
def test_arrivals_are_in_order_and_do_not_depend_on_how_many_are_asked_for(
    rate: float, burstiness: float, bursts: Bursts | None, seed: int
) -> None:
    arrivals = Arrivals(rate, burstiness, bursts)
    many = times(arrivals, 9_000, seed)
    assert (np.diff(many) >= 0).all()
    assert many[0] >= 0
    assert times(arrivals, 50, seed).tolist() == many[:50].tolist()


def test_bursts_keep_the_rate_and_make_minutes_uneven() -> None:
    steady, bursty = Arrivals(5.0), Arrivals(5.0, bursts=Bursts(180, 45, 2.5))
    calm, arrived = times(steady, 60_000), times(bursty, 60_000)
    assert arrived[-1] == pytest.approx(calm[-1], abs=180e9)
    assert index_of_dispersion(arrived, 60) > 20
    # Within a second the process is still near Poisson, with a rate that varies: 1 + 5 x 0.75 at 5 a second.
    assert index_of_dispersion(arrived, 1) == pytest.approx(4.75, rel=0.1)


def test_each_cycle_holds_one_burst_at_its_rate() -> None:
    bursts = Bursts(100, 20, 3.0)
    assert bursts.calm_factor == 0.5
    arrived = times(Arrivals(100.0, bursts=bursts), 100_000) / 1e9
    for cycle in range(9):
        start = cycle * 100 + uniform(0, "burst", cycle, 0) * 80
        within = ((arrived >= start) & (arrived < start + 20)).sum()
        whole = ((arrived >= cycle * 100) & (arrived < (cycle + 1) * 100)).sum()
        assert within == pytest.approx(6_000, abs=350)  # 20 s at 300, four standard deviations and a little
        assert whole - within == pytest.approx(4_000, abs=280)  # 80 s at 50


def test_bending_keeps_the_ends_of_every_cycle() -> None:
    bursts = Bursts(100, 20, 3.0)
    ends = np.arange(0, 1001, 100, dtype=np.int64) * 10**9
    assert bursts.bend(ends, seed=4).tolist() == ends.tolist()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Arrivals(0), "request_rate must be above 0 a second (inf: all at once), not 0"),
        (lambda: Arrivals(-2.0), "request_rate must be above 0 a second (inf: all at once), not -2.0"),
        (lambda: Arrivals(math.nan), "request_rate must be above 0 a second (inf: all at once), not nan"),
        (lambda: Arrivals(1, 0), "burstiness is from 0.01 to 1e6 (1 is Poisson), or inf, not 0"),
        (lambda: Arrivals(1, math.nan), "burstiness is from 0.01 to 1e6 (1 is Poisson), or inf, not nan"),
        (lambda: Arrivals(math.inf, bursts=Bursts(9, 1, 2)), "bursts need a finite request_rate"),
        (lambda: Bursts(10, 10, 1), "a burst of 10 s does not fit in a cycle of 10 s"),
        (lambda: Bursts(10, 2, 5), "bursts of 2 s in 10 s can be 1 to just under 5 times the mean rate, not 5"),
        (lambda: Bursts(10, 2, 0.5), "bursts of 2 s in 10 s can be 1 to just under 5 times the mean rate, not 0.5"),
        (
            lambda: times(Arrivals(1e-9), 100_000),
            "100,000 sessions at a request_rate of 1e-09 take over 146 years: raise workload.request_rate, or take "
            "fewer workload.num_prompts",
        ),
        (
            lambda: times(Arrivals(1e-300), 20),
            "20 sessions at a request_rate of 1e-300 take over 146 years: raise workload.request_rate, or take fewer "
            "workload.num_prompts",
        ),
    ],
)
def test_bad_arrivals_say_what_would_do(build: object, message: str) -> None:
    assert callable(build)
    with pytest.raises(WorkloadError) as error:
        build()
    assert str(error.value) == message
