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
from typing import Any, NamedTuple

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.log_axis import log_axis
from hbmtwin.dashboard.palette import ALARM, HOLE, INK, LEAST, MOST_SERVED, NO_NUMBER, SLOWEST, policy_colours
from hbmtwin.dashboard.sweep_words import LATENCIES, capacity_name, ends_text, point_name, short_key, value_text
from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.sim.sweep.points import PointSummary, Spread, capacity_of, pareto

HELD_SCALE = [(0.0, ALARM), (0.5, "#F0D9C0"), (0.999, "#B9D3E6"), (1.0, "#0072B2")]
"""All that held stand out from nearly all."""
SCALE = [(0.0, LEAST), (0.5, "#E69F00"), (1.0, SLOWEST)]
SERVED_SCALE = [(0.0, LEAST), (0.5, "#56B4E9"), (1.0, MOST_SERVED)]
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
MOST_TEXTS = 120
"""Cells of a heat map that have their number written in."""
MOST_FACETS = 6
"""Pairs of axes that are drawn where there are three or more."""

BETWEEN = Phrase("{middle} ({low} to {high})", "{middle}（{low} 至 {high}）")
IS = Phrase("{title}: {value}", "{title}：{value}")
UNBEATEN = Phrase("nothing beats these", "Pareto 前沿")
COMBINATIONS = Phrase("combinations", "组合")
LATENCY = Phrase("{name} ({unit})", "{name}（{unit}）")
AT = Phrase("%{{x:,.2f}} {unit}, %{{y:,.3g}}", "%{{x:,.2f}} {unit}，%{{y:,.3g}}")


class Measure(NamedTuple):
    """What a panel shows of a point."""

    title: Phrase
    column: str
    factor: float
    digits: int
    log: bool


MEASURES = (
    Measure(Phrase("Share of the seeds that held (%)", "跑完全程的种子比例（%）"), "survival", 100, 0, False),
    Measure(Phrase("Requests served per second", "每秒完成请求数"), "requests_per_s", 1, 2, False),
    Measure(Phrase("TTFT p99 (s)", "TTFT p99（s）"), "ttft_p99_s", 1, 1, True),
    Measure(Phrase("TPOT p99 (ms)", "TPOT p99（ms）"), "tpot_p99_s", 1000, 0, True),
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


def heat_maps(points: Sequence[PointSummary], lang: Lang = "en") -> dict[str, go.Figure]:
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
        figures[point_name(fixed, lang)] = _four_maps(own, x, y, axes, lang)
    return figures


def _four_maps(points: Sequence[PointSummary], x: str, y: str, axes: dict[str, list[Any]], lang: Lang) -> go.Figure:
    names = {key: [value_text(key, value) for value in axes[key]] for key in (x, y)}
    at = {(point.settings[y], point.settings[x]): point for point in points}
    figure = make_subplots(
        rows=2,
        cols=2,
        subplot_titles=[Said.of(measure.title).text(lang) for measure in MEASURES],
        horizontal_spacing=0.14,
        vertical_spacing=0.2,
    )
    for place, measure in enumerate(MEASURES):
        spreads = [[_at(at, (b, a), measure) for a in axes[x]] for b in axes[y]]
        hover = [[_hover(at.get((b, a)), measure, lang) for a in axes[x]] for b in axes[y]]
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
        figure.update_xaxes(title={"text": x, "standoff": 8}, type="category", row=row, col=column)
        figure.update_yaxes(type="category", showticklabels=column == 1, row=row, col=column)
        if column == 1:  # those on the right are the same, and their place is the colour bar's
            figure.update_yaxes(title={"text": short_key(y), "standoff": 8}, automargin=True, row=row, col=column)
    style(figure, 300 + 2 * max(140, 26 * len(axes[y])))
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False)
    figure.update_layout(margin={"b": 70}, plot_bgcolor=NO_NUMBER)
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


def _hover(point: PointSummary | None, measure: Measure, lang: Lang) -> str:
    if point is None:
        return ""
    lines = [point_name(point.settings, lang), ends_text(point.outcomes, lang)]
    if (spread := spread_of(point, measure)) is not None:
        lines.append(Said.of(IS, title=Said.of(measure.title), value=_range(spread, measure)).text(lang))
    return "<br>".join(lines)


def _range(spread: Spread, measure: Measure) -> Said:
    middle, low, high = (f"{value:,.{measure.digits}f}" for value in spread)
    return Said.of(BETWEEN, middle=middle, low=low, high=high)


def curves(points: Sequence[PointSummary], lang: Lang = "en") -> go.Figure:
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
        subplot_titles=[Said.of(measure.title).text(lang) for measure in MEASURES],
        horizontal_spacing=0.1,
        vertical_spacing=0.18,
    )
    numeric = _numeric(axes[x])
    looks = _looks(others, axes, series)
    for name, (colour, dash) in looks.items():
        for place, measure in enumerate(MEASURES):
            where = {"row": place // 2 + 1, "col": place % 2 + 1}
            found = [(p, s) for p in series[name] if (s := spread_of(p, measure)) is not None]
            if not found:
                continue
            xs = [p.settings[x] if numeric else value_text(x, p.settings[x]) for p, _ in found]
            low, middle, high = ([getattr(s, end) for _, s in found] for end in ("low", "median", "high"))
            if numeric and len(found) > 1:
                figure.add_trace(_band(xs, low, high, name, colour, 0.14 / max(1, len(series) / 3)), **where)
            bars = {"array": _above(high, middle), "arrayminus": _above(middle, low), "width": 4, "thickness": 1}
            figure.add_scatter(
                x=xs,
                y=middle,
                mode="lines+markers" if numeric else "markers",
                line={"color": colour, "width": 2, "dash": dash},
                marker={"size": 6},
                error_y=None if numeric and len(found) > 1 else {"type": "data", "symmetric": False, **bars},
                name=name,
                legendgroup=name,
                showlegend=place == 0 and bool(others),
                customdata=[_hover(p, measure, lang) for p, _ in found],
                hovertemplate="%{customdata}<extra></extra>",
                **where,
            )
    style(figure, 700)
    for place, measure in enumerate(MEASURES):
        where = {"row": place // 2 + 1, "col": place % 2 + 1}
        title = {"text": x, "standoff": 8}
        figure.update_xaxes(title=title, type=None if numeric else "category", **where)
        shown = [end for p in points if (s := spread_of(p, measure)) is not None for end in s]
        figure.update_yaxes(**(log_axis(shown) if measure.log else {"rangemode": "tozero"}), **where)
    figure.update_yaxes(range=[-4, 104], row=1, col=1)
    figure.update_layout(legend={"orientation": "h", "y": -0.12})
    return figure


def _looks(
    others: Sequence[str], axes: dict[str, list[Any]], series: dict[str, list[PointSummary]]
) -> dict[str, tuple[str, str]]:
    """Colour and dash of each line: the colour tells the first key of words, the dash what else there is."""
    if not others:
        return {name: (colour, "solid") for name, colour in policy_colours(series).items()}
    apart = next((key for key in others if not _numeric(axes[key])), others[0])
    rest = [key for key in others if key != apart]
    kinds = {name: tuple(points[0].settings[key] for key in rest) for name, points in series.items()}
    order = list(dict.fromkeys(kinds.values()))
    colours = policy_colours(dict.fromkeys(value_text(apart, p[0].settings[apart]) for p in series.values()))
    return {
        name: (
            colours[value_text(apart, points[0].settings[apart])],
            DASHES[order.index(kinds[name]) % len(DASHES)],
        )
        for name, points in series.items()
    }


def _above(upper: Sequence[float], lower: Sequence[float]) -> list[float]:
    return [a - b for a, b in zip(upper, lower, strict=True)]


def _band(
    xs: Sequence[Any], low: Sequence[float], high: Sequence[float], name: str, colour: str, opacity: float
) -> go.Scatter:
    """The more there are, the paler: they lie over each other."""
    return go.Scatter(
        x=[*xs, *xs[::-1]],
        y=[*high, *low[::-1]],
        fill="toself",
        fillcolor=colour,
        opacity=opacity,
        mode="lines",
        line={"width": 0},
        legendgroup=name,
        showlegend=False,
        hoverinfo="skip",
    )


def pareto_figure(points: Sequence[PointSummary], lang: Lang = "en") -> go.Figure:
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
    for column, (latency, name_of_latency) in enumerate(LATENCIES.items(), start=1):
        front = pareto(points, latency)
        factor, unit = (1000, "ms") if latency.startswith("tpot") else (1, "s")
        figure.add_scatter(
            x=[p.measured[latency].median * factor for p in front],
            y=[capacity_of(p) for p in front],
            mode="lines",
            line={"color": INK, "width": 1, "dash": "dot", "shape": "hv"},
            name=Said.of(UNBEATEN).text(lang),
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
                name=name or Said.of(COMBINATIONS).text(lang),
                legendgroup=name,
                showlegend=column == 1 and bool(shown),
                customdata=[_hover(p, MEASURES[0], lang) for p in shown],
                hovertemplate=f"%{{customdata}}<br>{Said.of(AT, unit=unit).text(lang)}<extra></extra>",
                row=1,
                col=column,
            )
        times = [p.measured[latency].median * factor for p in points if latency in p.measured]
        title = Said.of(LATENCY, name=name_of_latency, unit=unit).text(lang)
        figure.update_xaxes(title_text=title, **log_axis(times), row=1, col=column)
    style(figure, 460)
    figure.update_yaxes(title_text=capacity_name(points, lang), rangemode="tozero", row=1, col=1)
    figure.update_layout(legend={"orientation": "h", "y": -0.2})
    return figure
