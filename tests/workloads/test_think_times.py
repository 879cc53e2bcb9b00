"""Think times: what the distributions promise, and how a scenario states them."""

from __future__ import annotations

import numpy as np
import pytest

from hbmtwin.workloads import ConstantTime, ExponentialTime, LogNormalTime, ThinkTime, WorkloadError, think_time_from

GRID = ((np.arange(20_000) + 0.5) / 20_000).tolist()


def test_a_constant_wait() -> None:
    assert [ConstantTime(1.5).at(u) for u in (0.01, 0.5, 0.99)] == [1_500_000_000] * 3
    assert ConstantTime(0).at(0.5) == 0


def test_an_exponential_wait_has_its_mean_and_median() -> None:
    wait = ExponentialTime(45)
    assert np.mean([wait.at(u) for u in GRID]) == pytest.approx(45e9, rel=1e-3)
    assert wait.at(0.5) == 31_191_623_125  # 45 ln 2


def test_a_lognormal_wait_has_its_mean_and_median() -> None:
    wait = LogNormalTime(35, 0.96)
    assert np.mean([wait.at(u) for u in GRID]) == pytest.approx(35e9, rel=1e-3)
    assert wait.at(0.5) == pytest.approx(22.08e9, rel=1e-3)


@pytest.mark.parametrize(
    ("spec", "think_time"),
    [
        (0, ConstantTime(0)),
        (2.5, ConstantTime(2.5)),
        ({"distribution": "constant", "seconds": 3}, ConstantTime(3)),
        ({"distribution": "exponential", "mean": 45}, ExponentialTime(45)),
        ({"distribution": "lognormal", "mean": 35, "sigma": 1}, LogNormalTime(35, 1)),
        ({"distribution": "lognormal", "mean": 35, "median": 35}, LogNormalTime(35, 0)),
    ],
)
def test_a_scenario_states_a_think_time(spec: object, think_time: ThinkTime) -> None:
    assert think_time_from(spec, "session.think_time_s") == think_time


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (-1, "a think time is from 0 to 100000000 seconds, not -1.0"),
        (float("nan"), "a think time is from 0 to 100000000 seconds, not nan"),
        (float("inf"), "a think time is from 0 to 100000000 seconds, not inf"),
        ("long", "seconds must be a number, not 'long'"),
        ({"distribution": "exponentiol", "mean": 1}, "no distribution 'exponentiol'; did you mean 'exponential'?"),
        ({"distribution": "exponential", "mean": -1}, "a think time is from 0 to 100000000 seconds, not -1.0"),
        ({"distribution": "lognormal", "mean": 1, "sigma": 6}, "sigma of a think time is from 0 to 5, not 6.0"),
        ({"distribution": "constant", "mean": 1}, "constant has no 'mean'; known are seconds"),
    ],
)
def test_a_bad_think_time_names_its_key_and_the_cure(spec: object, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        think_time_from(spec, "session.think_time_s")
    assert str(error.value) == f"session.think_time_s: {message}"
