"""A sweep in words and rows: what the terminal and the report both say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hbmtwin.dashboard.verdict import MISSING, number_text, seconds_text
from hbmtwin.sim.sweep.points import PointSummary, pareto

LATENCIES = {"ttft_p99_s": "TTFT p99", "tpot_p99_s": "TPOT p99"}
"""What a sweep is judged by, beside what it serves."""
GIB = 2**30


def short_key(key: str) -> str:
    """The last word of a key."""
    return key.rpartition(".")[2]


def value_text(key: str, value: object) -> str:
    """The value of a setting; bytes in GiB where they are whole ones."""
    if key.endswith("_bytes") and isinstance(value, int):
        return f"{value / GIB:g} GiB"
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)


def point_name(settings: Mapping[str, Any]) -> str:
    """A combination in words."""
    return ", ".join(f"{short_key(key)} {value_text(key, value)}" for key, value in settings.items())


def capacity_name(points: Sequence[PointSummary]) -> str:
    """What is counted as capacity, in words."""
    by_users = any(isinstance(point.settings.get("workload.users"), int) for point in points)
    return "users served" if by_users else "requests served per second"


def headline(points: Sequence[PointSummary], about: Mapping[str, Any]) -> str:
    """The sweep in a sentence: how many runs held, and what serves the most."""
    ends = about["outcomes"]
    held = f"{ends.get('held', 0):,} of {about['runs']:,} runs held"
    front = pareto(points, "ttft_p99_s") or pareto(points, "tpot_p99_s")
    if not front:
        return f"{held}; no combination held with every seed."
    most = front[-1]
    return f"{held}. The most with every seed: {point_name(most.settings)}{_as_fast_as(most)}."


def _as_fast_as(point: PointSummary) -> str:
    told = [
        f"{name} {seconds_text(point.measured[key].median)}" for key, name in LATENCIES.items() if key in point.measured
    ]
    return f" ({', '.join(told)})" if told else ""


def summary_rows(points: Sequence[PointSummary]) -> tuple[list[str], list[list[str]]]:
    """A header, and a row a combination."""
    keys = list(points[0].settings)
    header = [
        *(key.replace(".", ".\n", 1) for key in keys),
        *("held", "share that held\n(95 %)", "requests\nper s", "TTFT p99\n(s)", "TPOT p99\n(ms)", "of the others"),
    ]
    return header, [
        [*(value_text(key, value) for key, value in point.settings.items()), *_cells(point)] for point in points
    ]


def _cells(point: PointSummary) -> list[str]:
    share = point.survival
    others = [f"{count:,} {cause_text(cause)}" for cause, count in point.outcomes.items() if cause != "held"]
    return [
        f"{point.held:,} / {point.runs:,}" if point.runs else MISSING,
        MISSING if share is None else f"{100 * share.median:.0f} % ({100 * share.low:.0f} to {100 * share.high:.0f})",
        _middle(point, "requests_per_s", 1, 3),
        _middle(point, "ttft_p99_s", 1, 2),
        _middle(point, "tpot_p99_s", 1000, 1),
        ", ".join(others),
    ]


def cause_text(cause: str) -> str:
    """What ended a run, as it stands behind a number."""
    return "did not fit" if cause == "does_not_fit" else cause.replace("_", " ")


def _middle(point: PointSummary, column: str, factor: float, digits: int) -> str:
    found = point.measured.get(column)
    small = found is not None and found.median * factor < 0.1
    return number_text(None if found is None else found.median, factor, max(digits, 3) if small else digits)
