"""When requests arrive, measured in one pass: rate, gaps between arrivals, counts in windows, ticks of a coarse clock.

    first arrival = 0 s                                                          last arrival
    |----- window 0 -----|----- window 1 -----|- ... -|----- whole window -----|-- begun --|

Windows are counted from the first arrival. The last one is *begun* only: the trace ends within it, so its count is too
low. All sums are of integers, so nothing cancels: a CV is right to the last digit whatever the origin of the clock.
Memory: a number for each window of 5 minutes that has requests in it, and a few hundred counts for the pictures.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from math import sqrt
from typing import Final

import numpy as np

from hbmtwin.workloads.records import WorkloadError

SECOND_NS: Final = 10**9
IDC_WINDOWS_S: Final = (1, 10, 60)
CV_WINDOW_S: Final = 300
LEAST_GAPS: Final = 10
"""Gaps that a window needs before its CV says something."""
BARS: Final = 600
"""Bars at most that the picture of a whole trace is drawn from."""
_BAR_WIDTHS_S = (1, 2, 10, 60, 300, 600, 3600, 7200, 21600, 86400)
_TICK_GAPS = 1000
_TICK_SHARE = 0.99
_TICK_TOLERANCE = 0.01


@dataclass(frozen=True, slots=True)
class WindowCounts:
    """How evenly arrivals fall into windows of one width."""

    width_s: int
    idc: float | None
    """Variance / mean of the counts (1 for Poisson arrivals) of all windows, the begun one too; None for one window,
    and for windows shorter than a tick."""
    idc_whole: float | None
    """The same of whole windows alone, in which the end of the trace does not show."""
    fewest: int
    most: int
    """Of all windows, the begun one too."""


@dataclass(frozen=True, slots=True)
class WindowCV:
    """The CV of the gaps within each whole window of 5 minutes, of those that have at least ten gaps."""

    windows: int
    p10: float
    p50: float
    p90: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Bars:
    """Arrivals counted in slices of equal width, for a picture."""

    start_s: float
    width_s: int
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArrivalStatistics:
    """When requests arrive. What cannot be told is None."""

    span_s: float
    """From the first arrival to the last."""
    request_rate: float | None
    """Requests a second of the span; None where all arrive at once."""
    tick_s: float | None
    """The clock's step, where most requests share their time with another; gaps, and what is counted in windows
    shorter than it, would measure the clock then, and are None."""
    iat_mean_s: float | None
    iat_cv: float | None
    """Standard deviation / mean of the time between two arrivals (IAT); 1 for Poisson arrivals."""
    iat_cv_windows: WindowCV | None
    windows: tuple[WindowCounts, ...]
    """For 1, 10, 60 and 300 s."""
    peak_second: float | None
    """The most requests in one second, as a multiple of the rate."""
    coarse: Bars
    """The whole trace."""
    fine: Bars
    """Its busiest 5 minutes, by the second."""


class ArrivalMeter:
    """Takes times of arrival in order, and tells their statistics at any moment. O(1) a request."""

    def __init__(self) -> None:
        self._first_ns: int | None = None
        self._last_ns = 0
        self._requests = 0
        self._gap_squares = 0
        self._windows = [_Windows(width_s) for width_s in (*IDC_WINDOWS_S, CV_WINDOW_S)]
        self._cvs = _GapsInWindows()
        self._ticks = _Ticks()
        self._coarse = _Coarse()
        self._fine = _Fine()

    def add(self, arrival_ns: int) -> None:
        """One more request. Raise WorkloadError if it arrives before the last one."""
        if self._first_ns is None:
            self._first_ns = arrival_ns
            self._last_ns = 0
        since_ns = arrival_ns - self._first_ns
        gap_ns = since_ns - self._last_ns
        if gap_ns < 0:
            raise WorkloadError(
                f"request {self._requests} arrives {-gap_ns / 1e9:g} s before the one above it; sort by time of arrival"
            )
        if self._requests:
            self._gap_squares += gap_ns * gap_ns
            self._ticks.add(gap_ns)
        self._requests += 1
        self._last_ns = since_ns
        for windows in self._windows:
            windows.add(since_ns)
        self._cvs.add(since_ns)
        second = since_ns // SECOND_NS
        self._coarse.add(second)
        self._fine.add(second)

    def statistics(self) -> ArrivalStatistics:
        """Of all requests so far; at least one."""
        span_ns, gaps = self._last_ns, self._requests - 1
        rate = self._requests * SECOND_NS / span_ns if span_ns else None
        tick_ns = self._ticks.tick_ns(gaps)
        smooth = span_ns > 0 and tick_ns is None
        seconds = self._windows[0].counts(tick_ns)
        return ArrivalStatistics(
            span_s=span_ns / 1e9,
            request_rate=rate,
            tick_s=None if tick_ns is None else tick_ns / 1e9,
            iat_mean_s=span_ns / gaps / 1e9 if gaps else None,
            iat_cv=_cv(gaps, span_ns, self._gap_squares) if smooth else None,
            iat_cv_windows=self._cvs.statistics() if smooth else None,
            windows=tuple(windows.counts(tick_ns) for windows in self._windows),
            peak_second=seconds.most / rate if rate and (tick_ns is None or tick_ns <= SECOND_NS) else None,
            coarse=self._coarse.bars(),
            fine=self._fine.bars(),
        )


def _cv(count: int, total: int, squares: int) -> float | None:
    """Standard deviation / mean of *count* integers from their sum and the sum of their squares."""
    return sqrt((count * squares - total * total) / (total * total)) if total else None


class _Windows:
    """Counts in windows of one width: sums of the closed ones, and the count of the one that is filling."""

    def __init__(self, width_s: int) -> None:
        self._width_s = width_s
        self._width_ns = width_s * SECOND_NS
        self._index = 0
        self._filling = 0
        self._total = 0
        self._squares = 0
        self._fewest: int | None = None
        self._most = 0

    def add(self, since_ns: int) -> None:
        index = since_ns // self._width_ns
        if index != self._index:
            closed = self._filling
            self._total += closed
            self._squares += closed * closed
            self._most = max(self._most, closed)
            fewest = closed if index == self._index + 1 else 0  # those between are empty
            self._fewest = fewest if self._fewest is None else min(self._fewest, fewest)
            self._index, self._filling = index, 0
        self._filling += 1

    def counts(self, tick_ns: int | None) -> WindowCounts:
        last = self._filling
        told = tick_ns is None or tick_ns <= self._width_ns
        return WindowCounts(
            width_s=self._width_s,
            idc=_idc(self._index + 1, self._total + last, self._squares + last * last)
            if told and self._index
            else None,
            idc_whole=_idc(self._index, self._total, self._squares) if told and self._index else None,
            fewest=last if self._fewest is None else min(self._fewest, last),
            most=max(self._most, last),
        )


def _idc(windows: int, total: int, squares: int) -> float | None:
    """Variance / mean of the counts of so many windows, from their sum and the sum of their squares."""
    if windows < 2:
        return None
    return (windows * squares - total * total) / (windows * total)


class _GapsInWindows:
    """The CV of the gaps of each whole window; a gap that leads from one window into another belongs to none."""

    def __init__(self) -> None:
        self._cvs = array("d")
        self._index = 0
        self._last_ns: int | None = None
        self._gaps = 0
        self._total = 0
        self._squares = 0

    def add(self, since_ns: int) -> None:
        index = since_ns // (CV_WINDOW_S * SECOND_NS)
        if index != self._index:
            if self._gaps >= LEAST_GAPS:
                cv = _cv(self._gaps, self._total, self._squares)
                if cv is not None:
                    self._cvs.append(cv)
            self._index, self._gaps, self._total, self._squares = index, 0, 0, 0
        elif self._last_ns is not None:
            gap_ns = since_ns - self._last_ns
            self._gaps += 1
            self._total += gap_ns
            self._squares += gap_ns * gap_ns
        self._last_ns = since_ns

    def statistics(self) -> WindowCV | None:
        if not self._cvs:
            return None
        p10, p50, p90 = (float(q) for q in np.quantile(self._cvs, (0.1, 0.5, 0.9)))
        return WindowCV(len(self._cvs), p10, p50, p90, min(self._cvs), max(self._cvs))


class _Ticks:
    """Finds a clock that steps: at least half of the gaps are 0, and nearly all others lie on a lattice.

    Mooncake's steps are 2,999 to 3,001 ms, so a gap within a hundredth of a step is on it. The different gaps are
    kept, up to a thousand; a trace with more has no such clock.
    """

    def __init__(self) -> None:
        self._zeros = 0
        self._steps: dict[int, int] | None = {}

    def add(self, gap_ns: int) -> None:
        if gap_ns == 0:
            self._zeros += 1
        elif self._steps is not None:
            self._steps[gap_ns] = self._steps.get(gap_ns, 0) + 1
            if len(self._steps) > _TICK_GAPS:
                self._steps = None

    def tick_ns(self, gaps: int) -> int | None:
        steps = gaps - self._zeros
        if self._steps is None or steps < LEAST_GAPS or 2 * self._zeros < gaps:
            return None
        seen, tick = 0, 0
        for tick in sorted(self._steps):  # the median step
            seen += self._steps[tick]
            if 2 * seen >= steps:
                break
        on = sum(
            n for gap, n in self._steps.items() if abs(gap - max(1, round(gap / tick)) * tick) < tick * _TICK_TOLERANCE
        )
        return tick if on >= _TICK_SHARE * steps else None


class _Coarse:
    """Counts of the whole trace in at most BARS slices, which grow wider as the trace grows longer."""

    def __init__(self) -> None:
        self._width_s = _BAR_WIDTHS_S[0]
        self._counts: dict[int, int] = {}

    def add(self, second: int) -> None:
        index = second // self._width_s
        while index >= BARS:
            self._widen()
            index = second // self._width_s
        self._counts[index] = self._counts.get(index, 0) + 1

    def _widen(self) -> None:
        wider = next((w for w in _BAR_WIDTHS_S if w > self._width_s), 2 * self._width_s)
        merged: dict[int, int] = {}
        for index, count in self._counts.items():
            index = index * self._width_s // wider
            merged[index] = merged.get(index, 0) + count
        self._width_s, self._counts = wider, merged

    def bars(self) -> Bars:
        return Bars(0.0, self._width_s, tuple(self._counts.get(i, 0) for i in range(max(self._counts) + 1)))


class _Fine:
    """Counts by the second of the window of 5 minutes that had the most requests; the earliest of equal ones."""

    def __init__(self) -> None:
        self._index = 0
        self._counts = [0] * CV_WINDOW_S
        self._best: tuple[int, list[int]] | None = None

    def add(self, second: int) -> None:
        index, place = divmod(second, CV_WINDOW_S)
        if index != self._index:
            self._best = self._busiest()
            self._index, self._counts = index, [0] * CV_WINDOW_S
        self._counts[place] += 1

    def _busiest(self) -> tuple[int, list[int]]:
        if self._best is not None and sum(self._best[1]) >= sum(self._counts):
            return self._best
        return self._index, self._counts

    def bars(self) -> Bars:
        index, counts = self._busiest()
        last = max(place for place, count in enumerate(counts) if count)
        return Bars(float(index * CV_WINDOW_S), 1, tuple(counts if index < self._index else counts[: last + 1]))
