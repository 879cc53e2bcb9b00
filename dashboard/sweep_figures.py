"""Figures of a sweep: heat maps over two axes, curves over one, and what serves the most at which latency.

::

    panel            of a point                                         where runs died
    share that held  of the runs that started, 95 % Clopper-Pearson     below 100 %
    requests per s   \\
    TTFT p99          } median of the runs that held, and its band      nothing, if none held
    TPOT p99         /
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import ceil, floor, log10
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.palette import ALARM, HOLE, INK, policy_colours
from hbmtwin.dashboard.sweep_words import LATENCIES, capacity_name, cause_text, point_name, short_key, value_text
from hbmtwin.sim.sweep.points import PointSummary, Spread, capacity_of, pareto

HELD_SCALE = [(0.0, ALARM), (0.5, "#F0D9C0"), (0.999, "#B9D3E6"), (1.0, "#0072B2")]
"""All that held stand out from nearly all."""
SCALE = [(0.0, "#F3F1EC"), (0.5, "#E69F00"), (1.0, "#5A2A00")]
SERVED_SCALE = [(0.0, "#F3F1EC"), (0.5, "#56B4E9"), (1.0, "#08306B")]
MOST_TEXTS = 120
"""Cells of a heat map that have their number written in."""
MOST_FACETS = 6
"""Pairs of axes that are drawn where there are three or more."""
NO_DATA = "#FFFFFF"


class Measure(NamedTuple):
    """What a panel shows of a point."""

    title: str
    column: str
    factor: float
    digits: int
    log: bool


MEASURES = (
    Measure("Share of the seeds that held (%)", "survival", 100, 0, False),
    Measure("Requests served per second", "requests_per_s", 1, 2, False),
    Measure("TTFT p99 (s)", "ttft_p99_s", 1, 1, True),
    Measure("TPOT p99 (ms)", "tpot_p99_s", 1000, 0, True),
)


def axes_of(points: Sequence[PointSummary]) -> dict[str, list[Any]]:
    """The keys of a grid that have several values, and these in order."""
    keys = points[0].settings
    values = {key: list(dict.fromkeys(point.settings[key] for point in points)) for key in keys}
    return {key: found for key, found in values.items() if len(found) > 1} or dict(list(values.items())[-1:])


def across(axes: dict[str, list[Any]]) -> str:
    """The axis that runs from left to right: that of numbers with the most values, else the last."""
    numeric = [key for key, values in axes.items() if _numeric(values)]
    return max(numeric, key=lambda key: len(axes[key])) if numeric else list(axes)[-1]


def _numeric(values: Iterable[Any]) -> bool:
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def spread_of(point: PointSummary, measure: Measure) -> Spread | None:
    """What a panel shows of a point, in its unit; None where there is nothing to show."""
    found = point.survival if measure.column == "survival" else point.measured.get(measure.column)
    return None if found is None else Spread(*(value * measure.factor for value in found))


def heat_maps(points: Sequence[PointSummary]) -> dict[str, go.Figure]:
    """The four measures over two axes, a figure for each combination of the others, by its name. O(points)."""
    axes = axes_of(points)
    x = across(axes)
    others = [key for key in axes if key != x]
    y = max(others, key=lambda key: (_numeric(axes[key]), len(axes[key])))
    outer = [key for key in others if key != y]
    figures = {}
    for values in list(product(*(axes[key] for key in outer)))[:MOST_FACETS]:
        fixed = dict(zip(outer, values, strict=True))
        own = [point for point in points if all(point.settings[key] == value for key, value in fixed.items())]
        figures[point_name(fixed)] = _four_maps(own, x, y, axes)
    return figures


def _four_maps(points: Sequence[PointSummary], x: str, y: str, axes: dict[str, list[Any]]) -> go.Figure:
    names = {key: [value_text(key, value) for value in axes[key]] for key in (x, y)}
    at = {(point.settings[y], point.settings[x]): point for point in points}
    figure = make_subplots(
        rows=2,
        cols=2,
        subplot_titles=[measure.title for measure in MEASURES],
        horizontal_spacing=0.14,
        vertical_spacing=0.2,
    )
    for place, measure in enumerate(MEASURES):
        spreads = [[_at(at, (b, a), measure) for a in axes[x]] for b in axes[y]]
        hover = [[_hover(at.get((b, a)), measure) for a in axes[x]] for b in axes[y]]
        column, row = place % 2 + 1, place // 2 + 1
        figure.add_heatmap(
            x=names[x],
            y=names[y],
            z=[[None if spread is None else spread.median for spread in line] for line in spreads],
            text=[["" if s is None else short_number(s.median) for s in line] for line in spreads],
            texttemplate="%{text}" if len(points) <= MOST_TEXTS and len(axes[x]) <= 20 else None,
            textfont={"size": 11},
            customdata=hover,
            hovertemplate="%{customdata}<extra></extra>",
            xgap=1,
            ygap=1,
            **_colours(measure, spreads),
            colorbar={
                "len": 0.4,
                "thickness": 10,
                "x": 0.435 if column == 1 else 1.005,
                "y": 0.8 if row == 1 else 0.2,
                "tickfont": {"size": 11},
            },
            row=row,
            col=column,
        )
        figure.update_xaxes(title_text=x, type="category", row=row, col=column)
        figure.update_yaxes(type="category", row=row, col=column)
        if column == 1:
            figure.update_yaxes(title_text=short_key(y), row=row, col=column)
        else:
            figure.update_yaxes(
                showticklabels=False, row=row, col=column
            )  # those of the first, and a scale stands there
    style(figure, 300 + 2 * max(140, 26 * len(axes[y])))
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    figure.update_layout(margin={"l": 110}, plot_bgcolor="#DDDDDD")
    return figure


def _at(at: dict[tuple[Any, Any], PointSummary], place: tuple[Any, Any], measure: Measure) -> Spread | None:
    point = at.get(place)
    return None if point is None else spread_of(point, measure)


def short_number(value: float) -> str:
    """Two digits that say something, and all of those before the point."""
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _colours(measure: Measure, spreads: Sequence[Sequence[Spread | None]]) -> dict[str, Any]:
    if measure.column == "survival":
        return {"colorscale": HELD_SCALE, "zmin": 0, "zmax": 100}
    middles = [spread.median for line in spreads for spread in line if spread is not None]
    top = max(middles, default=1.0)
    return {"colorscale": SCALE if measure.log else SERVED_SCALE, "zmin": 0, "zmax": top or 1.0}


def _hover(point: PointSummary | None, measure: Measure) -> str:
    if point is None:
        return ""
    ends = ", ".join(f"{count:,} {cause_text(end)}" for end, count in point.outcomes.items())
    spread = spread_of(point, measure)
    value = "" if spread is None else f"<br>{measure.title}: {_range(spread, measure)}"
    return f"{point_name(point.settings)}<br>{ends}{value}"


def _range(spread: Spread, measure: Measure) -> str:
    digits = measure.digits
    return f"{spread.median:,.{digits}f} ({spread.low:,.{digits}f} to {spread.high:,.{digits}f})"


def curves(points: Sequence[PointSummary]) -> go.Figure:
    """The four measures over one axis, a line for each combination of the others, with bands of 95 %. O(points)."""
    axes = axes_of(points)
    x = across(axes)
    others = [key for key in axes if key != x]
    series: dict[str, list[PointSummary]] = {}
    for point in points:
        name = ", ".join(value_text(key, point.settings[key]) for key in others)
        series.setdefault(name, []).append(point)
    figure = make_subplots(
        rows=2,
        cols=2,
        subplot_titles=[measure.title for measure in MEASURES],
        horizontal_spacing=0.1,
        vertical_spacing=0.18,
    )
    numeric = _numeric(axes[x])
    for name, colour in policy_colours(series).items():
        for place, measure in enumerate(MEASURES):
            where = {"row": place // 2 + 1, "col": place % 2 + 1}
            found = [(p, s) for p in series[name] if (s := spread_of(p, measure)) is not None]
            if not found:
                continue
            xs = [p.settings[x] if numeric else value_text(x, p.settings[x]) for p, _ in found]
            low, middle, high = ([getattr(s, end) for _, s in found] for end in ("low", "median", "high"))
            if numeric and len(found) > 1:
                figure.add_trace(_band(xs, low, high, name, colour), **where)
            bars = {"array": _above(high, middle), "arrayminus": _above(middle, low), "width": 4, "thickness": 1}
            figure.add_scatter(
                x=xs,
                y=middle,
                mode="lines+markers" if numeric else "markers",
                line={"color": colour, "width": 2},
                marker={"size": 6},
                error_y=None if numeric and len(found) > 1 else {"type": "data", "symmetric": False, **bars},
                name=name,
                legendgroup=name,
                showlegend=place == 0 and bool(others),
                customdata=[_hover(p, measure) for p, _ in found],
                hovertemplate="%{customdata}<extra></extra>",
                **where,
            )
    style(figure, 700)
    for place, measure in enumerate(MEASURES):
        where = {"row": place // 2 + 1, "col": place % 2 + 1}
        figure.update_xaxes(title_text=x, type=None if numeric else "category", **where)
        shown = [end for p in points if (s := spread_of(p, measure)) is not None for end in s]
        figure.update_yaxes(**(log_axis(shown) if measure.log else {"rangemode": "tozero"}), **where)
    figure.update_yaxes(range=[-4, 104], row=1, col=1)
    figure.update_layout(legend={"orientation": "h", "y": -0.12})
    return figure


def log_axis(values: Iterable[float]) -> dict[str, Any]:
    """A logarithmic axis that holds all values above 0, with ticks at 1, 2 and 5 of each decade, or at each digit."""
    above = [value for value in values if value > 0]
    low, high = (log10(min(above)), log10(max(above))) if above else (0.0, 1.0)
    digits = (1, 2, 5) if high - low > 0.8 else range(1, 10)
    ticks = [digit * 10.0**decade for decade in range(floor(low) - 1, ceil(high) + 1) for digit in digits]
    margin = max(0.05, 0.06 * (high - low))
    return {
        "type": "log",
        "range": [low - margin, high + margin],
        "tickvals": ticks,
        "ticktext": [f"{tick:,g}" if tick < 1 else f"{tick:,.0f}" for tick in ticks],
    }


def _above(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(upper, lower, strict=True)]


def _band(xs: Sequence[Any], low: Sequence[float], high: Sequence[float], name: str, colour: str) -> go.Scatter:
    return go.Scatter(
        x=[*xs, *xs[::-1]],
        y=[*high, *low[::-1]],
        fill="toself",
        fillcolor=colour,
        opacity=0.14,
        mode="lines",
        line={"width": 0},
        legendgroup=name,
        showlegend=False,
        hoverinfo="skip",
    )


def pareto_figure(points: Sequence[PointSummary]) -> go.Figure:
    """What is served against TTFT and against TPOT: every point of which a seed held, and those that nothing beats.

    A point is full where all seeds held, hollow where some did not; only full ones can be on the front. O(n log n).
    """
    axes = axes_of(points)
    apart = [key for key in axes if not _numeric(axes[key])] or [key for key in axes if key != across(axes)][:1]
    series: dict[str, list[PointSummary]] = {}
    for point in points:
        name = ", ".join(value_text(key, point.settings[key]) for key in apart)
        series.setdefault(name, []).append(point)
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.1, shared_yaxes=True)
    for column, (latency, title) in enumerate(LATENCIES.items(), start=1):
        front = pareto(points, latency)
        factor, unit = (1000, "ms") if latency.startswith("tpot") else (1, "s")
        figure.add_scatter(
            x=[p.measured[latency].median * factor for p in front],
            y=[capacity_of(p) for p in front],
            mode="lines",
            line={"color": INK, "width": 1, "dash": "dot", "shape": "hv"},
            name="nothing beats these",
            legendgroup="front",
            showlegend=column == 1,
            hoverinfo="skip",
            row=1,
            col=column,
        )
        for name, colour in policy_colours(series).items():
            shown = [p for p in series[name] if latency in p.measured and capacity_of(p) is not None]
            figure.add_scatter(
                x=[p.measured[latency].median * factor for p in shown],
                y=[capacity_of(p) for p in shown],
                mode="markers",
                marker={
                    "size": [11 if any(p is best for best in front) else 7 for p in shown],
                    "color": [colour if p.held == p.runs else HOLE for p in shown],
                    "line": {"color": colour, "width": 1.5},
                },
                name=name or "combinations",
                legendgroup=name,
                showlegend=column == 1 and bool(shown),
                customdata=[_hover(p, MEASURES[0]) for p in shown],
                hovertemplate="%{customdata}<br>%{x:,.2f} " + unit + ", %{y:,.3g}<extra></extra>",
                row=1,
                col=column,
            )
        times = [p.measured[latency].median * factor for p in points if latency in p.measured]
        figure.update_xaxes(title_text=f"{title} ({unit})", **log_axis(times), row=1, col=column)
    style(figure, 460)
    figure.update_yaxes(title_text=capacity_name(points), rangemode="tozero", row=1, col=1)
    figure.update_layout(legend={"orientation": "h", "y": -0.2})
    return figure
