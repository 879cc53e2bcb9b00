"""Lengths: what the distributions promise, and how a scenario states them."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import Fixed, Length, LogNormal, Quantiles, Uniform, WorkloadError, length_from
from hbmtwin.workloads.draws import Purpose, uniform, uniforms
from hbmtwin.workloads.lengths import MAX_TOKENS, Values, Zipf, tokens_many

LENGTHS = [
    Fixed(7),
    Uniform(1, 1),
    Uniform(3, 11),
    Uniform(1, MAX_TOKENS),
    LogNormal(1155, 0.9),
    LogNormal(1155, 0.9, min=4, max=4096),
    LogNormal(2.0**40, 10),
    LogNormal(1e-300, 0),
    Quantiles((0.01, 0.5, 0.99), (29, 1020, 4142)),
    Quantiles((0.5, 0.6), (1, 1)),
    Quantiles((0.0, 1.0), (1, MAX_TOKENS)),
    Quantiles((0.0, 1.0), (1, 10_000), min=30, max=4142),
    Values((100,), (2.5,)),
    Values((1, 100, 400, MAX_TOKENS), (0, 2, 0, 1)),
    Zipf(0.6, max=4096, min=1024),
    Zipf(1.2, max=2**20),
    Zipf(10, max=2**40, min=2**40 - 5),
]
GRID = (np.arange(20_000) + 0.5) / 20_000
"""The middle of each of 20,000 equal parts: a distribution's mean without any chance."""


@pytest.mark.parametrize("length", LENGTHS, ids=repr)
@given(u=st.floats(2.0**-53, 1 - 2.0**-53))
def test_arrays_and_scalars_give_the_same_lengths_within_bounds(length: Length, u: float) -> None:
    value = length.at(u)
    assert type(value) is int
    assert 1 <= value <= MAX_TOKENS
    many = length.at_many(np.array([u, u]))
    assert many.dtype == np.int64
    assert many.tolist() == [value, value]


@pytest.mark.parametrize("length", LENGTHS, ids=repr)
def test_a_higher_quantile_is_never_a_shorter_length(length: Length) -> None:
    assert (np.diff(length.at_many(GRID)) >= 0).all()


def test_a_draw_is_the_quantile_of_its_key() -> None:
    length = LogNormal(1155, 0.9)
    many = tokens_many(length, 5, Purpose.PROMPT_TOKENS, np.arange(50), 2)
    assert many.tolist() == [length.at(uniform(5, Purpose.PROMPT_TOKENS, session, 2)) for session in range(50)]
    assert many.tolist() == length.at_many(uniforms(5, "prompt_tokens", np.arange(50), 2)).tolist()


def test_uniform_gives_each_value_equally_often() -> None:
    values, counts = np.unique(Uniform(3, 7).at_many(GRID), return_counts=True)
    assert values.tolist() == [3, 4, 5, 6, 7]
    assert counts.tolist() == [4000] * 5


def test_lognormal_has_its_mean_and_median() -> None:
    length = LogNormal(1155, 0.5)
    assert length.at_many(GRID).mean() == pytest.approx(1155, rel=2e-4)
    assert length.at(0.5) == 1019  # 1155 exp(-1/8)


def test_lognormal_piles_up_at_its_limits() -> None:
    values = LogNormal(1155, 0.9, min=200, max=4096).at_many(GRID)
    assert (values.min(), values.max()) == (200, 4096)
    log_length = NormalDist(math.log(1155) - 0.9**2 / 2, 0.9)
    assert (values == 4096).mean() == pytest.approx(1 - log_length.cdf(math.log(4095.5)), abs=1e-4)  # 3.2 %
    assert (values == 200).mean() == pytest.approx(log_length.cdf(math.log(200.5)), abs=1e-4)  # 6.7 %


def test_quantiles_pass_through_their_points_and_stop_at_the_ends() -> None:
    length = Quantiles((0.1, 0.5, 0.9), (10, 50, 1000))
    assert [length.at(u) for u in (0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999)] == [10, 10, 30, 50, 525, 1000, 1000]


def test_quantiles_pile_up_at_a_limit() -> None:
    values = Quantiles((0.0, 1.0), (1, 1001), min=101, max=901).at_many(GRID)
    assert (values.min(), values.max()) == (101, 901)
    assert (values == 901).mean() == pytest.approx(0.1, abs=1e-3)
    assert (values == 101).mean() == pytest.approx(0.1, abs=1e-3)


def test_values_are_drawn_as_often_as_their_weights_say_and_nothing_else_is() -> None:
    values, counts = np.unique(Values((400, 100, 7), (3, 5, 0)).at_many(GRID), return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {400: 7500, 100: 12_500}


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 2.5])
def test_zipf_falls_with_the_power_alpha(alpha: float) -> None:
    values, counts = np.unique(Zipf(alpha, max=12, min=3).at_many(GRID), return_counts=True)
    weights = [x**-alpha for x in range(3, 13)]
    assert values.tolist() == list(range(3, 13))
    assert counts.tolist() == pytest.approx([20_000 * w / sum(weights) for w in weights], abs=1.01)


def test_zipf_has_the_same_bits_everywhere() -> None:
    lengths = tokens_many(Zipf(0.6, max=4096, min=1), 0, Purpose.PROMPT_TOKENS, np.arange(8), 0)
    assert lengths.tolist() == [2701, 504, 54, 3441, 262, 29, 287, 3667]


@pytest.mark.parametrize(
    ("spec", "length"),
    [
        (128, Fixed(128)),
        ({"distribution": "fixed", "value": 5}, Fixed(5)),
        ({"distribution": "uniform", "low": 2, "high": 4}, Uniform(2, 4)),
        ({"distribution": "lognormal", "mean": 1155, "sigma": 0.9, "max": 4096}, LogNormal(1155, 0.9, 1, 4096)),
        ({"distribution": "lognormal", "mean": 100, "median": 100}, LogNormal(100, 0.0)),
        (
            {"distribution": "quantiles", "probabilities": [0.5, 1], "values": [1, 9]},
            Quantiles((0.5, 1.0), (1, 9)),
        ),
        (
            {"distribution": "quantiles", "probabilities": [0.5, 1], "values": [1, 9], "min": 2, "max": 8},
            Quantiles((0.5, 1.0), (1, 9), 2, 8),
        ),
        ({"distribution": "values", "values": [100, 400], "weights": [3, 1]}, Values((100, 400), (3.0, 1.0))),
        ({"distribution": "zipf", "alpha": 0.6, "max": 99}, Zipf(0.6, 99)),
        ({"distribution": "zipf", "alpha": 0.6, "max": 99, "min": 9}, Zipf(0.6, 99, 9)),
    ],
)
def test_a_scenario_states_a_length(spec: object, length: Length) -> None:
    assert length_from(spec, "workload.prompt_tokens") == length


def test_sigma_follows_from_median_or_standard_deviation() -> None:
    by_median = length_from({"distribution": "lognormal", "mean": 1155, "median": 1020}, "x")
    assert by_median.at(0.5) == 1020
    by_stddev = length_from({"distribution": "lognormal", "mean": 4000, "stddev": 2500}, "x")
    assert by_stddev.at_many(GRID).std() == pytest.approx(2500, rel=2e-3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (0, "a length is from 1 to 2^40, not 0"),
        (-3, "a length is from 1 to 2^40, not -3"),
        (1.5, "value must be a whole number, not 1.5"),
        (True, "value must be a whole number, not True"),
        ("many", "value must be a whole number, not 'many'"),
        (None, "fixed needs 'value'"),
        ({"mean": 4}, "the table needs a distribution: one of fixed, uniform, lognormal, quantiles, values"),
        ({"distribution": "lognormall", "mean": 4}, "no distribution 'lognormall'; did you mean 'lognormal'?"),
        ({"distribution": "lognormal", "mena": 4}, "lognormal has no 'mena'; did you mean 'mean'?"),
        ({"distribution": "uniform", "low": 4}, "uniform needs 'high'"),
        ({"distribution": "uniform", "low": 4, "high": 3}, "1 <= low <= high is needed, not 4, 3"),
        ({"distribution": "uniform", "low": 1, "high": 3, "sigma": 1}, "uniform has no 'sigma'; known are low, high"),
        (
            {"distribution": "lognormal", "mean": 4},
            "give exactly one of sigma, median and stddev beside mean, not 0",
        ),
        (
            {"distribution": "lognormal", "mean": 4, "sigma": 1, "stddev": 2},
            "give exactly one of sigma, median and stddev beside mean, not 2",
        ),
        ({"distribution": "lognormal", "mean": 0, "stddev": 2}, "mean is above 0, not 0.0"),
        ({"distribution": "lognormal", "mean": 0, "sigma": 1}, "mean is above 0 and up to 2^40, not 0.0"),
        ({"distribution": "lognormal", "mean": float("nan"), "sigma": 1}, "mean is above 0 and up to 2^40, not nan"),
        ({"distribution": "lognormal", "mean": 4, "sigma": -1}, "sigma is from 0 to 10, not -1.0"),
        ({"distribution": "lognormal", "mean": 4, "sigma": 1, "max": 0}, "1 <= min <= max is needed, not 1, 0"),
        (
            {"distribution": "lognormal", "mean": 4, "median": 5},
            "the median of a log-normal is above 0 and not above its mean 4.0, not 5.0",
        ),
        ({"distribution": "lognormal", "mean": "4", "sigma": 1}, "mean must be a number, not '4'"),
        ({"distribution": "quantiles", "probabilities": [0.5], "values": [1]}, "as many values as probabilities"),
        ({"distribution": "quantiles", "probabilities": 0.5, "values": [1]}, "probabilities must be a list of numbers"),
        ({"distribution": "quantiles", "probabilities": [0.5, 0.5], "values": [1, 2]}, "probabilities must rise"),
        ({"distribution": "quantiles", "probabilities": [0.5, 1.5], "values": [1, 2]}, "probabilities are from 0 to 1"),
        ({"distribution": "quantiles", "probabilities": [0.1, 0.5], "values": [2, 1]}, "values must not fall"),
        ({"distribution": "quantiles", "probabilities": [0.1, 0.5], "values": [0, 1]}, "values are from 1 to 2^40"),
        ({"distribution": "quantiles", "probabilities": [0.1, 0.5], "values": [1, 1.5]}, "values must be a whole"),
        (
            {"distribution": "quantiles", "probabilities": [0.1, 0.5], "values": [1, 2], "min": 3, "max": 2},
            "1 <= min <= max is needed, not 3, 2",
        ),
        ({"distribution": "values", "values": [1, 2], "weights": [1]}, "as many weights as values, one or more, not 1"),
        ({"distribution": "values", "values": [], "weights": []}, "as many weights as values, one or more, not 0"),
        ({"distribution": "values", "values": [0], "weights": [1]}, "values are from 1 to 2^40"),
        ({"distribution": "values", "values": [1], "weights": [0]}, "weights are from 0 on, and one of them is above"),
        ({"distribution": "values", "values": [1, 2], "weights": [2, -1]}, "weights are from 0 on"),
        ({"distribution": "values", "values": [1, 2], "weights": [1, math.nan]}, "weights are from 0 on"),
        ({"distribution": "zipf", "alpha": 11, "max": 9}, "alpha is from 0 to 10, not 11.0"),
        ({"distribution": "zipf", "alpha": 1, "max": 9, "min": 10}, "1 <= min <= max is needed, not 10, 9"),
        ({"distribution": "zipf", "alpha": 1, "max": 2**20 + 1}, "from min to max are at most 1,048,576 lengths"),
    ],
)
def test_a_bad_length_names_its_key_and_the_cure(spec: object, message: str) -> None:
    with pytest.raises(WorkloadError) as error:
        length_from(spec, "workload.prompt_tokens")
    assert str(error.value).startswith(f"workload.prompt_tokens: {message}")
