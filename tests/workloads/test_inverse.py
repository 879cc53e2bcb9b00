"""The inverse CDFs' functions: right to the last digits, and the same for a float and an array."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import inverse

inside = st.floats(2.0**-53, 1 - 2.0**-53)


@given(st.floats(1e-300, 1e300))
def test_log(x: float) -> None:
    assert inverse.log(x) == pytest.approx(math.log(x), rel=1e-15, abs=1e-300)
    assert inverse.logs(np.array([x])).item() == inverse.log(x)


@given(st.floats(-700, 700))
def test_exp(x: float) -> None:
    assert inverse.exp(x) == pytest.approx(math.exp(x), rel=1e-15)
    assert inverse.exps(np.array([x])).item() == inverse.exp(x)


@given(inside)
def test_normal(u: float) -> None:
    assert inverse.normal(u) == pytest.approx(statistics.NormalDist().inv_cdf(u), rel=1e-13, abs=1e-15)
    assert inverse.normals(np.array([u])).item() == inverse.normal(u)


def test_arrays_take_every_branch_of_the_normal_as_scalars_do() -> None:
    u = np.array([2.0**-53, 1e-12, 1e-6, 0.07, 0.08, 0.4, 0.5, 0.6, 0.92, 0.93, 1 - 1e-6, 1 - 1e-12, 1 - 2.0**-53])
    assert inverse.normals(u).tolist() == [inverse.normal(x) for x in u.tolist()]


def test_known_values() -> None:
    assert inverse.log(1.0) == 0.0
    assert inverse.exp(0.0) == 1.0
    assert inverse.normal(0.5) == 0.0
    assert inverse.normal(0.975) == pytest.approx(1.959963984540054, rel=1e-15)
    assert inverse.normal(0.0013498980316300933) == pytest.approx(-3.0, rel=1e-14)


def test_bits_never_change_from_one_machine_to_the_next() -> None:
    assert inverse.log(10.0).hex() == "0x1.26bb1bbb55515p+1"
    assert inverse.exp(1.0).hex() == "0x1.5bf0a8b14576ap+1"  # one unit above the nearest, on every machine
    assert inverse.normal(0.975).hex() == "0x1.f5c0331eeff82p+0"
