"""Figures of a description of traffic: arrivals at two scales, lengths, and what prefix caches of each size hit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.palette import ALARM, ARRIVALS, INK, OUTPUTS, PROMPTS
from hbmtwin.workloads.statistics.arrivals import CV_WINDOW_S, Bars
from hbmtwin.workloads.statistics.describe import Description
from hbmtwin.workloads.statistics.lengths import QUANTILES, LengthStatistics
from hbmtwin.workloads.statistics.reuse import ReuseStatistics

BINS = 80
"""Bars at most of a distribution of lengths."""
MASS_POINTS = 6
"""Lengths that stand out which are named in a picture."""
_LOG_FROM = 20
_CDF_POINTS = 400


def arrivals_at_two_scales(d: Description) -> go.Figure:
    """Requests over the whole trace, and by the second in its busiest 5 minutes, with the mean as a line."""
    a = d.arrivals
    coarse, fine = a.coarse, a.fine
    figure = make_subplots(
        rows=2,
        cols=1,
        vertical_spacing=0.2,
        subplot_titles=[
            f"<b>The whole trace</b>, requests in each {_width(coarse.width_s)}",
            f"<b>The busiest {CV_WINDOW_S // 60} minutes</b>, requests in each second",
        ],
    )
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    for row, bars in enumerate((coarse, fine), start=1):
        _bars(figure, bars, row)
        if a.request_rate is not None:
            figure.add_hline(
                y=a.request_rate * bars.width_s, line={"color": INK, "width": 1, "dash": "dash"}, row=row, col=1
            )
    if a.span_s > 2 * CV_WINDOW_S:
        figure.add_vrect(
            x0=fine.start_s,
            x1=fine.start_s + CV_WINDOW_S,
            fillcolor=ALARM,
            opacity=0.12,
            line_width=0,
            layer="below",
            row=1,
            col=1,
        )
    style(figure, 520)
    figure.update_yaxes(title_text="requests", rangemode="tozero")
    figure.update_xaxes(title_text="time since the first arrival (s); dashed: the mean", row=2, col=1)
    figure.update_layout(showlegend=False, bargap=0, margin={"t": 40})
    return figure


def _bars(figure: go.Figure, bars: Bars, row: int) -> None:
    starts = bars.start_s + bars.width_s * np.arange(len(bars.counts))
    figure.add_bar(
        x=starts + bars.width_s / 2,
        y=np.array(bars.counts),
        width=bars.width_s,
        marker={"color": ARRIVALS, "line": {"width": 0}},
        hovertemplate="%{y:,} requests at %{x:,.0f} s<extra></extra>",
        row=row,
        col=1,
    )


def _width(width_s: int) -> str:
    for unit, one, several in ((86400, "day", "days"), (3600, "hour", "hours"), (60, "minute", "minutes")):
        if width_s % unit == 0:
            return one if width_s == unit else f"{width_s // unit} {several}"
    return "second" if width_s == 1 else f"{width_s} s"


def length_distributions(d: Description) -> go.Figure:
    """Prompts and outputs: the share of the requests in each range of lengths, the share up to each, and the lengths
    that stand out by themselves."""
    sides = (("Prompts", d.prompt_tokens, PROMPTS), ("Outputs", d.output_tokens, OUTPUTS))
    figure = make_subplots(
        rows=2,
        cols=1,
        vertical_spacing=0.17,
        specs=[[{"secondary_y": True}], [{"secondary_y": True}]],
        subplot_titles=[
            f"<b>{name}</b>: mean {side.mean:,.0f}, median {quantile(side, 0.5):,.0f}, "
            f"p99 {quantile(side, 0.99):,.0f} tokens"
            for name, side, _ in sides
        ],
    )
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    style(figure, 640)
    for row, (name, side, colour) in enumerate(sides, start=1):
        log = side.most > _LOG_FROM * max(1.0, quantile(side, 0.01))
        _histogram(figure, name, side, colour, row, log=log)
        _cumulated(figure, side, row)
        _mass_points(figure, side, row)
        if log:
            figure.update_xaxes(type="log", dtick=1, row=row, col=1)
        figure.update_yaxes(title_text="requests (%)", rangemode="tozero", row=row, col=1, secondary_y=False)
        figure.update_yaxes(
            title_text="up to this length (%)",
            range=[0, 105],
            tickmode="array",
            tickvals=[0, 25, 50, 75, 100],
            showgrid=False,
            row=row,
            col=1,
            secondary_y=True,
        )
    figure.update_xaxes(title_text="tokens", row=2, col=1)
    figure.update_layout(showlegend=False, bargap=0, margin={"t": 40, "r": 70})
    return figure


def quantile(side: LengthStatistics, q: float) -> float:
    """One of the quantiles that a description has."""
    return side.quantiles[QUANTILES.index(q)]


def bin_edges(side: LengthStatistics, *, log: bool) -> npt.NDArray[np.int64]:
    """Edges of at most BINS ranges of lengths, as wide or, with *log*, in ratio as wide: from one to below the next."""
    least, end = side.least, side.most + 1
    if log:
        edges = np.geomspace(max(1, least), end, BINS + 1).round().astype(np.int64)
        edges[0] = least
    else:
        width = -(-(end - least) // BINS)
        edges = np.arange(least, end + width, width, dtype=np.int64)
    return np.unique(edges)


def _histogram(figure: go.Figure, name: str, side: LengthStatistics, colour: str, row: int, *, log: bool) -> None:
    edges = bin_edges(side, log=log)
    counts, _ = np.histogram(side.values, bins=edges, weights=side.counts)
    share = 100 * counts / sum(side.counts)
    low, high = edges[:-1], edges[1:]
    # As an outline: bars of Plotly have no width on an axis of logarithms.
    figure.add_scatter(
        x=np.repeat(edges, 2)[1:-1],
        y=np.repeat(share, 2),
        customdata=np.repeat(np.stack([low, high - 1], axis=1), 2, axis=0),
        name=name,
        mode="lines",
        line={"width": 1, "color": colour},
        fill="tozeroy",
        hovertemplate="%{customdata[0]:,} to %{customdata[1]:,} tokens: %{y:.2f} %<extra></extra>",
        row=row,
        col=1,
        secondary_y=False,
    )


def _cumulated(figure: go.Figure, side: LengthStatistics, row: int) -> None:
    values, up_to = np.array(side.values), 100 * np.cumsum(side.counts) / sum(side.counts)
    if len(values) > _CDF_POINTS:  # as many points as a panel shows, at equal steps of the share
        at = np.searchsorted(up_to, np.linspace(up_to[0], 100, _CDF_POINTS)).clip(0, len(values) - 1)
        keep = np.unique(np.concatenate([[0], at, [len(values) - 1]]))
        values, up_to = values[keep], up_to[keep]
    figure.add_scatter(
        x=values,
        y=up_to,
        mode="lines",
        line={"width": 1.5, "color": INK, "shape": "hv"},
        hovertemplate="%{y:.1f} % have at most %{x:,} tokens<extra></extra>",
        row=row,
        col=1,
        secondary_y=True,
    )


def _mass_points(figure: go.Figure, side: LengthStatistics, row: int) -> None:
    points = side.mass_points[:MASS_POINTS]
    if not points:
        return
    figure.add_scatter(
        x=[point.tokens for point in points],
        y=[100 * point.share for point in points],
        text=[f"{point.tokens:,}" for point in points],
        mode="markers+text",
        textposition="top center",
        textfont={"size": 11, "color": ALARM},
        marker={"symbol": "diamond", "size": 7, "color": ALARM},
        hovertemplate="%{x:,} tokens alone: %{y:.2f} %<extra></extra>",
        row=row,
        col=1,
        secondary_y=False,
    )


def reuse_by_capacity(reuse: ReuseStatistics) -> go.Figure:
    """The share of the blocks of prompts that a prefix cache hits, by its capacity; dashed what an endless one does."""
    figure = go.Figure()
    style(figure, 380)
    lines = {"mode": "lines+markers", "marker": {"size": 6, "color": PROMPTS}, "line": {"width": 2, "color": PROMPTS}}
    ring = {"size": 12, "symbol": "circle-open", "color": OUTPUTS, "line": {"width": 1.5}}
    for curve, name, look in (
        (reuse.curve, "touched last to first", lines),
        (reuse.first_to_last, "touched first to last", {"mode": "markers", "marker": ring}),
    ):
        bounded = [(c, h) for c, h in zip(curve.capacities, curve.hits, strict=True) if c is not None]
        figure.add_scatter(
            x=[capacity for capacity, _ in bounded],
            y=[100 * hits / curve.references for _, hits in bounded],
            name=name,
            hovertemplate="%{y:.2f} %",
            **look,
        )
    endless = 100 * reuse.curve.hits[-1] / reuse.curve.references
    figure.add_hline(
        y=endless,
        line={"color": INK, "width": 1, "dash": "dash"},
        annotation={"text": f"endless cache: {endless:.1f} %", "font": {"color": INK, "size": 12}},
        annotation_position="top left",
    )
    figure.update_xaxes(title_text=f"capacity (blocks of {reuse.block_size} tokens)", type="log", dtick=1)
    figure.update_yaxes(title_text="blocks of prompts that hit (%)", range=[0, max(1.0, 1.15 * endless)])
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
    figure.update_layout(hovermode="x unified", legend=legend, margin={"t": 60})
    return figure
