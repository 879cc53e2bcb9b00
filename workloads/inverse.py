"""Logarithm, exponential, gamma and inverse normal for inverse CDFs, with the same bits everywhere.

``math.log`` and ``numpy.log`` may differ in their last bit, from each other and from one processor to the next, and
a rounded token count can then differ too. These use only + - * /, square root and scaling by powers of two, which
IEEE 754 fixes to the bit, in one order of operations. Each comes for a float and, in the plural, for an array;
errors are below 1e-15, relative.
"""

from __future__ import annotations

import math
from typing import TypeVar

import numpy as np

from hbmtwin.workloads.draws import FloatArray

N = TypeVar("N", float, FloatArray)

_LN2 = float.fromhex("0x1.62e42fefa39efp-1")
_LN2_HIGH = float.fromhex("0x1.62e42feep-1")
"""Upper half of ln 2, so short that its product with an exponent is exact."""
_LN2_LOW = 1.90821492927058770002e-10
_SQRT_HALF = math.sqrt(0.5)
_LOG_SERIES = tuple(1.0 / (2 * k + 1) for k in range(11, -1, -1))
"""log m = 2 s (1 + s^2/3 + s^4/5 + ...) with s = (m - 1) / (m + 1), here below 0.172."""
_HALF_LOG_2_PI = 0.91893853320467274178
_STIRLING = (-691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12)
_EXP_SERIES = tuple(1.0 / math.factorial(k) for k in range(14, -1, -1))


def log(x: float) -> float:
    """Natural logarithm of a positive number."""
    m, e = math.frexp(x)
    if m < _SQRT_HALF:
        m, e = m * 2.0, e - 1
    return _log_of_parts(m, float(e))


def logs(x: FloatArray) -> FloatArray:
    """:func:`log` of each element."""
    m, e = np.frexp(x)
    low = m < _SQRT_HALF
    return _log_of_parts(np.where(low, m * 2.0, m), (e - low).astype(np.float64))


def exp(x: float) -> float:
    """e to the *x*, for *x* from -700 to 700."""
    k = round(x / _LN2)
    return math.ldexp(_polynomial(_EXP_SERIES, (x - k * _LN2_HIGH) - k * _LN2_LOW), k)


def exps(x: FloatArray) -> FloatArray:
    """:func:`exp` of each element."""
    k = np.rint(x / _LN2)
    value: FloatArray = np.ldexp(_polynomial(_EXP_SERIES, (x - k * _LN2_HIGH) - k * _LN2_LOW), k.astype(np.int32))
    return value


def log_gamma(x: float) -> float:
    """Logarithm of the gamma function of a positive number, by Stirling's series above 12."""
    product = 1.0
    while x < 12.0:
        product *= x
        x += 1.0
    y = 1.0 / (x * x)
    return (x - 0.5) * log(x) - x + _HALF_LOG_2_PI + _polynomial(_STIRLING, y) / x - log(product)


def normal(u: float) -> float:
    """Quantile *u* of the standard normal distribution, by Wichura's AS 241 (Applied Statistics 37, 1988)."""
    q = u - 0.5
    if abs(q) <= 0.425:
        return _normal_centre(q)
    r = math.sqrt(-log(min(u, 1.0 - u)))
    tail = _normal_tail(r) if r <= 5.0 else _normal_far_tail(r)
    return tail if q > 0 else -tail


def normals(u: FloatArray) -> FloatArray:
    """:func:`normal` of each element."""
    q = u - 0.5
    z = np.empty_like(u)
    centre = np.abs(q) <= 0.425
    z[centre] = _normal_centre(q[centre])
    outside = u[~centre]
    r = np.sqrt(-logs(np.minimum(outside, 1.0 - outside)))
    near = r <= 5.0
    tail = np.empty_like(r)
    tail[near] = _normal_tail(r[near])
    tail[~near] = _normal_far_tail(r[~near])
    z[~centre] = np.where(outside > 0.5, tail, -tail)
    return z


def _log_of_parts(m: N, e: N) -> N:
    s = (m - 1.0) / (m + 1.0)
    return e * _LN2 + s * 2.0 * _polynomial(_LOG_SERIES, s * s)


def _polynomial(coefficients: tuple[float, ...], x: N) -> N:
    value = x * coefficients[0] + coefficients[1]
    for c in coefficients[2:]:
        value = value * x + c
    return value


def _normal_centre(q: N) -> N:
    r = 0.180625 - q * q
    return q * _polynomial(_CENTRE_ABOVE, r) / _polynomial(_CENTRE_BELOW, r)


def _normal_tail(r: N) -> N:
    return _polynomial(_TAIL_ABOVE, r - 1.6) / _polynomial(_TAIL_BELOW, r - 1.6)


def _normal_far_tail(r: N) -> N:
    return _polynomial(_FAR_ABOVE, r - 5.0) / _polynomial(_FAR_BELOW, r - 5.0)


# The coefficients of AS 241 (PPND16), highest power first.
_CENTRE_ABOVE = (
    2.5090809287301226727e3,
    3.3430575583588128105e4,
    6.7265770927008700853e4,
    4.5921953931549871457e4,
    1.3731693765509461125e4,
    1.9715909503065514427e3,
    1.3314166789178437745e2,
    3.3871328727963666080e0,
)
_CENTRE_BELOW = (
    5.2264952788528545610e3,
    2.8729085735721942674e4,
    3.9307895800092710610e4,
    2.1213794301586595867e4,
    5.3941960214247511077e3,
    6.8718700749205790830e2,
    4.2313330701600911252e1,
    1.0,
)
_TAIL_ABOVE = (
    7.74545014278341407640e-4,
    2.27238449892691845833e-2,
    2.41780725177450611770e-1,
    1.27045825245236838258e0,
    3.64784832476320460504e0,
    5.76949722146069140550e0,
    4.63033784615654529590e0,
    1.42343711074968357734e0,
)
_TAIL_BELOW = (
    1.05075007164441684324e-9,
    5.47593808499534494600e-4,
    1.51986665636164571966e-2,
    1.48103976427480074590e-1,
    6.89767334985100004550e-1,
    1.67638483018380384940e0,
    2.05319162663775882187e0,
    1.0,
)
_FAR_ABOVE = (
    2.01033439929228813265e-7,
    2.71155556874348757815e-5,
    1.24266094738807843860e-3,
    2.65321895265761230930e-2,
    2.96560571828504891230e-1,
    1.78482653991729133580e0,
    5.46378491116411436990e0,
    6.65790464350110377720e0,
)
_FAR_BELOW = (
    2.04426310338993978564e-15,
    1.42151175831644588870e-7,
    1.84631831751005468180e-5,
    7.86869131145613259100e-4,
    1.48753612908506148525e-2,
    1.36929880922735805310e-1,
    5.99832206555887937690e-1,
    1.0,
)
