"""Gap families: their mean, how they vary, their distribution, and the same bits on every machine."""

from __future__ import annotations

import math

import numpy as np
import pytest

from hbmtwin.workloads import Arrivals, WorkloadError, inverse
from hbmtwin.workloads.draws import FloatArray, uniform
from hbmtwin.workloads.gaps import Pattern, burstiness_of, gaps_of, weibull_cv

IDS = np.arange(100_000, dtype=np.int64)
KOLMOGOROV_1_PERCENT = 1.63 / math.sqrt(len(IDS))


def distance(gaps: FloatArray, cdf: FloatArray) -> float:
    """Kolmogorov's: between *cdf* at the sorted *gaps* and the share of gaps below."""
    assert (np.diff(gaps) >= 0).all()
    return float(np.max(np.abs(cdf - (np.arange(len(gaps)) + 0.5) / len(gaps))))


@pytest.mark.parametrize(
    ("pattern", "shape", "cv"),
    [
        ("constant", 1.0, 0.0),
        ("gamma", math.inf, 0.0),
        ("weibull", math.inf, 0.0),
        ("poisson", 1.0, 1.0),
        ("gamma", 1.0, 1.0),
        ("weibull", 1.0, 1.0),
        ("gamma", 0.25, 2.0),
        ("gamma", 4.0, 0.5),
        ("weibull", 0.5, math.sqrt(5)),  # G(5) / G(3)^2 - 1 = 24 / 4 - 1
        ("weibull", 2.0, math.sqrt(4 / math.pi - 1)),  # Rayleigh's
        ("weibull", 3.0, 0.36345),
    ],
)
def test_each_family_has_mean_one_and_the_cv_of_its_shape(pattern: Pattern, shape: float, cv: float) -> None:
    gaps = gaps_of(pattern, shape).drawn(0, IDS)
    assert gaps.mean() == pytest.approx(1, abs=0.02)
    assert gaps.std() == pytest.approx(cv, rel=0.03)


@pytest.mark.parametrize("shape", [0.3, 0.7, 1.6, 8.0])
def test_weibull_gaps_have_the_closed_distribution(shape: float) -> None:
    gaps = np.sort(gaps_of("weibull", shape).drawn(1, IDS))
    scale = 1 / math.gamma(1 + 1 / shape)
    assert distance(gaps, 1 - np.exp(-((gaps / scale) ** shape))) < KOLMOGOROV_1_PERCENT
    other = 1 - np.exp(-((gaps / scale) ** (shape * 1.03)))
    assert distance(gaps, other) > KOLMOGOROV_1_PERCENT  # so near a neighbour is told apart


def test_a_weibull_gap_is_the_inverse_cdf_of_the_arrival_draw() -> None:
    for session in range(50):
        u = uniform(3, "arrival", session, 0)
        expected = (-math.log(u)) ** (1 / 0.6) / math.gamma(1 + 1 / 0.6)
        assert gaps_of("weibull", 0.6).drawn(3, IDS[: session + 1])[session] == pytest.approx(expected, rel=1e-13)


def test_first_weibull_arrivals_never_change_from_one_version_to_the_next() -> None:
    times = next(Arrivals(4.0, 0.5, pattern="weibull").times_ns(0, 4))
    assert times.tolist() == [156546036, 619734970, 685553333, 691950175]


@pytest.mark.parametrize("x", [0.01, 0.5, 1.0, 1.5, 2.0, 11.999, 12.0, 21.0, 100.5, 2001.0])
def test_log_gamma_is_that_of_the_library(x: float) -> None:
    assert inverse.log_gamma(x) == pytest.approx(math.lgamma(x), rel=1e-14, abs=2e-14)


@pytest.mark.parametrize("cv", [0.01, 0.36345, 0.8, 1.0, 1.7, 3.95, 9.7, 400.0])
def test_the_shape_of_a_cv_has_that_cv(cv: float) -> None:
    assert weibull_cv(burstiness_of("weibull", cv)) == pytest.approx(cv, rel=1e-9)
    if cv <= 10:
        assert burstiness_of("gamma", cv) == pytest.approx(cv**-2)


def test_a_cv_of_nought_is_constant_and_one_of_one_is_poisson() -> None:
    for pattern in ("gamma", "weibull"):
        assert burstiness_of(pattern, 0) == math.inf
        assert burstiness_of(pattern, 1) == 1.0


@pytest.mark.parametrize(
    ("pattern", "shape", "said"),
    [
        ("constant", 2.0, "constant gaps have no burstiness; leave it 1, or take gamma or weibull"),
        ("poisson", 0.5, "poisson gaps have no burstiness; leave it 1, or take gamma or weibull"),
        ("weibull", 0.04, "burstiness is from 0.05 to 1e6 (1 is Poisson), or inf, not 0.04"),
        ("gamma", -math.inf, "burstiness is from 0.01 to 1e6 (1 is Poisson), or inf, not -inf"),
    ],
)
def test_a_shape_that_a_family_has_not_is_refused(pattern: Pattern, shape: float, said: str) -> None:
    with pytest.raises(WorkloadError) as error:
        gaps_of(pattern, shape)
    assert str(error.value) == said


@pytest.mark.parametrize(
    ("pattern", "cv", "said"),
    [
        ("poisson", 1.0, "poisson gaps have a CV of 1; take gamma or weibull"),
        ("constant", 0.5, "constant gaps have a CV of 0; take gamma or weibull"),
        ("gamma", 11.0, "cv of gamma gaps is from 0 to 10 (1 is Poisson), not 11.0"),
        ("weibull", math.nan, "cv of weibull gaps is from 0 to 100000 (1 is Poisson), not nan"),
    ],
)
def test_a_cv_that_a_family_cannot_have_is_refused(pattern: Pattern, cv: float, said: str) -> None:
    with pytest.raises(WorkloadError) as error:
        burstiness_of(pattern, cv)
    assert str(error.value) == said
