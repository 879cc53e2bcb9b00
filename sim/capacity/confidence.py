"""How sure a count makes of a probability: exact binomial bounds, after Clopper and Pearson.

::

    n = 100 runs, k = 97 held                     tail(p) = P(at least k of n hold | p)
                                              1 |                  .----
    lower bound: the p at which 97 or more      |               .-'
    would be as rare as the error allows        |            .-'
    upper bound: the same for 97 or fewer   err |--------.--'
                                              0 +-------+-------------- p
                                                        lower bound

Such a bound is wrong with at most the error that it was given, whatever p is and however few the runs: nothing is
approximated by a normal curve. Source: C. J. Clopper, E. S. Pearson, The use of confidence or fiducial limits
illustrated in the case of the binomial, Biometrika 26 (1934), 404-413.
"""

from __future__ import annotations

from math import ceil, exp, fsum, lgamma, log, log1p

_HALVINGS = 100
"""Bisections of [0, 1]: until neighbouring floats are reached."""
_NEGLIGIBLE = 1e-18
"""A term below this share of a sum no longer changes it."""


def clopper_pearson(successes: int, trials: int, confidence: float) -> tuple[float, float]:
    """The interval that holds the probability of a success with at least *confidence*: half the error on each side.

    O(sqrt(trials)) a bisection. Raise ValueError for counts or a confidence that make no sense.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence is above 0 and below 1, not {confidence:g}")
    error = (1 - confidence) / 2
    return lower_bound(successes, trials, error), upper_bound(successes, trials, error)


def lower_bound(successes: int, trials: int, error: float) -> float:
    """What the probability is not below, wrong with at most *error*: 0 where nothing succeeded. Raise ValueError."""
    _check(successes, trials, error)
    if successes == 0:
        return 0.0
    if successes == trials:
        return exp(log(error) / trials)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if at_least(successes, trials, middle) < error:
            low = middle
        else:
            high = middle
    return low


def upper_bound(successes: int, trials: int, error: float) -> float:
    """What the probability is not above, wrong with at most *error*: 1 where nothing failed. Raise ValueError."""
    return 1 - lower_bound(trials - successes, trials, error)


def at_least(successes: int, trials: int, probability: float) -> float:
    """The probability of that many successes or more. O(sqrt(trials)) terms, from the largest on."""
    if successes <= 0:
        return 1.0
    if successes > trials or probability <= 0:
        return 0.0
    if probability >= 1:
        return 1.0
    if successes > trials * probability:
        return _tail(successes, trials, probability)
    return max(0.0, 1 - _tail(trials - successes + 1, trials, 1 - probability))


def least_trials(probability: float, error: float) -> int:
    """Trials, all successes, that show at least *probability* with at most *error*: fewer cannot. Raise ValueError."""
    if not 0 < probability < 1 or not 0 < error < 1:
        raise ValueError(f"a probability and an error are above 0 and below 1, not {probability:g} and {error:g}")
    trials = max(1, ceil(log(error) / log(probability)) - 1)
    while lower_bound(trials, trials, error) < probability:  # by the bound itself: logarithms round
        trials += 1
    return trials


def _tail(first: int, trials: int, probability: float) -> float:
    """Terms of the binomial from *first*, which lies above the mean, upwards: each is smaller than the one before."""
    choices = lgamma(trials + 1) - lgamma(first + 1) - lgamma(trials - first + 1)
    term = exp(choices + first * log(probability) + (trials - first) * log1p(-probability))
    odds = probability / (1 - probability)
    terms = [term]
    for k in range(first, trials):
        term *= (trials - k) / (k + 1) * odds
        if term < _NEGLIGIBLE * terms[0]:
            break
        terms.append(term)
    return min(1.0, fsum(terms))


def _check(successes: int, trials: int, error: float) -> None:
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes of {trials} trials make no sense")
    if not 0 < error < 1:
        raise ValueError(f"an error is above 0 and below 1, not {error:g}")
