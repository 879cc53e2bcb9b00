"""What ``hbmtwin sweep`` prints: a row a combination, and those that nothing beats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from hbmtwin.cli.tables import print_table
from hbmtwin.dashboard.sweep_words import (
    LATENCIES,
    capacity_name,
    headline,
    point_name,
    summary_rows,
)
from hbmtwin.sim.sweep.points import PointSummary, Spread, capacity_of, pareto

MOST_ROWS = 60
"""Combinations that are printed; with more, those that nothing beats."""


def print_sweep(console: Console, points: Sequence[PointSummary], about: Mapping[str, Any], wall_s: float) -> None:
    """The verdict, the combinations, and the Pareto fronts in a line each."""
    console.print(f"[bold]{escape(headline(points, about))}[/bold]")
    shown = list(points) if len(points) <= MOST_ROWS else _best(points)
    header, cells = summary_rows(shown)
    styles = ["red" if p.survival is not None and p.held < p.runs else "dim" if not p.runs else "" for p in shown]
    print_table(console, header, cells, words=header[-1:], styles=styles)
    if len(shown) < len(points):
        console.print(f"{len(points):,} combinations; here those that no other beats. All: runs.csv, report.html.")
    for latency, name in LATENCIES.items():
        front = pareto(points, latency)
        if front:
            names = "; ".join(point_name(p.settings) for p in front)
            console.print(f"[bold]Nothing beats[/bold] in {capacity_name(points)} and {name}: {escape(names)}.")
    console.print(
        "held: ran to its end, and rejected nothing for want of memory. Shares with 95 % confidence (Clopper-Pearson). "
        "Times and rates are medians over the seeds that held, and estimates as in `hbmtwin run`. "
        f"Took {wall_s:.1f} s.",
        style="dim",
    )


def _best(points: Sequence[PointSummary]) -> list[PointSummary]:
    """Those of any front, in the grid's order."""
    fronts = [point for latency in LATENCIES for point in pareto(points, latency)]
    return [point for point in points if any(point is best for best in fronts)] or list(points[:MOST_ROWS])


def sweep_json(points: Sequence[PointSummary], about: Mapping[str, Any]) -> dict[str, Any]:
    """A sweep as JSON: what it was asked, each combination, and the fronts as places among them."""
    places = {id(point): place for place, point in enumerate(points)}
    return {
        **about,
        "combinations": [_point_json(point) for point in points],
        "capacity": capacity_name(points),
        "pareto": {latency: [places[id(p)] for p in pareto(points, latency)] for latency in LATENCIES},
    }


def _point_json(point: PointSummary) -> dict[str, Any]:
    return {
        "settings": point.settings,
        "runs": point.runs,
        "held": point.held,
        "survival": None if point.survival is None else _spread_json(point.survival, "share"),
        "outcomes": point.outcomes,
        "capacity": capacity_of(point),
        **{name: _spread_json(spread, "median") for name, spread in point.measured.items()},
    }


def _spread_json(spread: Spread, middle: str) -> dict[str, float]:
    return {middle: spread.median, "low": spread.low, "high": spread.high}
