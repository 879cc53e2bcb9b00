"""The report of a sweep: one HTML page, and ``plotly.min.js`` beside it, that works without a network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from hbmtwin.dashboard.figures import inline
from hbmtwin.dashboard.sweep_figures import MOST_FACETS, across, axes_of, curves, heat_maps, pareto_figure
from hbmtwin.dashboard.sweep_words import LATENCIES, capacity_name, headline, point_name, short_key, summary_rows
from hbmtwin.sim.sweep.points import PointSummary, pareto
from hbmtwin.sim.sweep.store import writing

MOST_LINES = 8
"""Lines of one panel of curves: beyond it only the heat maps are drawn."""
MAPS = """
<h2>Over two of the settings</h2>
<p class="note">Each cell is a combination. Blue held with every seed, the redder the fewer did; grey has no number:
nothing started, or nothing held.</p>
"""
CURVES = """
<h2>Along {key}</h2>
<p class="note">Lines are shares and medians over the seeds, bands hold the true one with 95 % confidence. Latencies
and rates are of the runs that held, and end where none did.</p>
"""


def write_sweep_report(points: Sequence[PointSummary], about: Mapping[str, Any], directory: Path) -> None:
    """Write ``report.html`` and ``plotly.min.js``, each by one rename; same points, same bytes. Raise ResultError."""
    axes = axes_of(points)
    lines = len(points) // len(axes[across(axes)])
    template = Template(files("hbmtwin.dashboard").joinpath("sweep.html").read_text(encoding="utf-8"))
    page = template.substitute(
        title=html.escape(f"a sweep over {' and '.join(short_key(key) for key in about['grid'])}"),
        setting=html.escape(_setting(about)),
        headline=html.escape(headline(points, about)),
        maps=_maps(points) if len(axes) > 1 else "",
        curves=_curves(points) if lines <= MOST_LINES else "",
        capacity=capacity_name(points),
        pareto=inline(pareto_figure(points), "pareto"),
        table=_table(points),
        version=html.escape(str(about["version"])),
    )
    with writing(directory / "plotly.min.js") as staging:
        staging.write_text(get_plotlyjs(), encoding="utf-8")
    with writing(directory / "report.html") as staging:
        staging.write_text(page, encoding="utf-8")


def _setting(about: Mapping[str, Any]) -> str:
    seeds, count = about["seeds"], about["runs"]
    scenario = about["scenario"] or "the built-in scenario"
    settings = f", with {', '.join(about['set'])}" if about["set"] else ""
    several = f"seeds {seeds['first']} to {seeds['first'] + seeds['count'] - 1}" if seeds["count"] > 1 else "one seed"
    return f"{scenario}{settings}; {several} of each combination, {count:,} runs"


def _maps(points: Sequence[PointSummary]) -> str:
    parts = [MAPS]
    figures = heat_maps(points)
    for place, (name, figure) in enumerate(figures.items()):
        title = f"<h3>{html.escape(name)}</h3>" if name else ""
        parts.append(title + inline(figure, f"map{place}"))
    if len(figures) == MOST_FACETS:
        parts.append(f'<p class="note">At most {MOST_FACETS} of these are drawn; the table has all.</p>')
    return "\n".join(parts)


def _curves(points: Sequence[PointSummary]) -> str:
    key = across(axes_of(points))
    return CURVES.format(key=html.escape(key)) + inline(curves(points), "curves")


def _table(points: Sequence[PointSummary]) -> str:
    header, rows = summary_rows(points)
    best = {point_name(p.settings) for latency in LATENCIES for p in pareto(points, latency)}
    left = len(points[0].settings)

    def cells(tag: str, texts: Sequence[str]) -> str:
        kinds = [' class="left"' if place < left or place == len(texts) - 1 else "" for place in range(len(texts))]
        return "".join(f"<{tag}{k}>{html.escape(t)}</{tag}>" for k, t in zip(kinds, texts, strict=True))

    body = "".join(
        f'<tr class="{_kind(point, best)}">{cells("td", row)}</tr>' for point, row in zip(points, rows, strict=True)
    )
    return f"<table><thead><tr>{cells('th', header)}</tr></thead><tbody>{body}</tbody></table>"


def _kind(point: PointSummary, best: set[str]) -> str:
    if not point.runs:
        return "none"
    if point.held < point.runs:
        return "some"
    return "front" if point_name(point.settings) in best else "all"
