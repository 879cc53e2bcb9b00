"""Is generated traffic like the trace it was learned from? The rule that says so, figure by figure.

::

    figure                              may differ by
    request rate                        2 %
    CV of gaps in windows of 5 minutes  10 %     the median of the windows
    IDC(60 s)                           30 %     variance / mean of the counts of minutes
    length quantiles p50 to p99         5 %      prompts and outputs
    LRU hit share at each capacity      0.03     of an ideal prefix cache

What the trace does not tell (gaps under coarse ticks, sharing where nothing is shared by either) is not held against
the generated traffic.
"""

from __future__ import annotations

from dataclasses import dataclass

from hbmtwin.workloads.statistics.describe import Description
from hbmtwin.workloads.statistics.lengths import QUANTILES, LengthStatistics
from hbmtwin.workloads.statistics.reuse_curve import ReuseCurve

RATE, WINDOW_CV, IDC, LENGTH, HIT_SHARE = 0.02, 0.10, 0.30, 0.05, 0.03
_IDC_WINDOW_S = 60
_LEAST_QUANTILE, _GREATEST_QUANTILE = 0.5, 0.99


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a trace beside that of generated traffic."""

    name: str
    trace: float
    generated: float
    allowed: float
    relative: bool
    """Whether *allowed* is a share of the trace's figure."""

    @property
    def deviation(self) -> float:
        """How far off the generated traffic is, in the unit of *allowed*; of a figure of 0 by the difference itself."""
        difference = self.generated - self.trace
        return difference / self.trace if self.relative and self.trace else difference

    @property
    def holds(self) -> bool:
        """Whether that is allowed."""
        return abs(self.deviation) <= self.allowed


def figures(trace: Description, generated: Description) -> tuple[Figure, ...]:
    """All figures of the rule that the trace tells."""
    found = []
    ours, theirs = trace.arrivals, generated.arrivals
    if ours.request_rate is not None:
        found.append(Figure("request rate /s", ours.request_rate, theirs.request_rate or 0.0, RATE, True))
    if ours.iat_cv_windows is not None:
        cv = theirs.iat_cv_windows.p50 if theirs.iat_cv_windows is not None else 0.0
        found.append(Figure("window CV, median", ours.iat_cv_windows.p50, cv, WINDOW_CV, True))
    for counts, others in zip(ours.windows, theirs.windows, strict=True):
        if counts.width_s == _IDC_WINDOW_S and counts.idc is not None:
            found.append(Figure(f"IDC({_IDC_WINDOW_S} s)", counts.idc, others.idc or 0.0, IDC, True))
    found += _lengths("prompt", trace.prompt_tokens, generated.prompt_tokens)
    found += _lengths("output", trace.output_tokens, generated.output_tokens)
    if trace.reuse is not None:
        found += _hit_shares(trace.reuse.curve, None if generated.reuse is None else generated.reuse.curve)
    elif generated.reuse is not None:
        found += _hit_shares(None, generated.reuse.curve)
    return tuple(found)


def _lengths(name: str, ours: LengthStatistics, theirs: LengthStatistics) -> list[Figure]:
    return [
        Figure(f"{name} tokens p{100 * q:g}", a, b, LENGTH, True)
        for q, a, b in zip(QUANTILES, ours.quantiles, theirs.quantiles, strict=True)
        if _LEAST_QUANTILE <= q <= _GREATEST_QUANTILE
    ]


def _hit_shares(ours: ReuseCurve | None, theirs: ReuseCurve | None) -> list[Figure]:
    known = ours or theirs
    assert known is not None, "one of the two shares something"
    rows = []
    for i, capacity in enumerate(known.capacities):
        a, b = (0.0 if curve is None else curve.hits[i] / curve.references for curve in (ours, theirs))
        name = f"hit share, {'endless' if capacity is None else f'{capacity:,} blocks'}"
        rows.append(Figure(name, a, b, HIT_SHARE, False))
    return rows
