"""Figures of a description of traffic: arrivals at two scales, lengths, and what prefix caches of each size hit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.palette import ALARM, ARRIVALS, INK, OUTPUTS, PROMPTS
from hbmtwin.sim.phrases import Lang, Phrase, Said
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

WHOLE_TRACE = Phrase("<b>The whole trace</b>, requests in each {width}", "<b>整个 trace</b>，每 {width} 的请求数")
BUSIEST = Phrase(
    "<b>The busiest {minutes} minutes</b>, requests in each second", "<b>最忙的 {minutes} 分钟</b>，每秒请求数"
)
REQUESTS = Phrase("requests", "请求数")
SINCE_FIRST = Phrase("time since the first arrival (s); dashed: the mean", "距首个请求到达的时间（s）；虚线为均值")
REQUESTS_AT = Phrase(
    "%{{y:,}} requests at %{{x:,.0f}} s<extra></extra>", "%{{x:,.0f}} s：%{{y:,}} 条请求<extra></extra>"
)
UNITS = (
    (86400, Phrase("day", "天"), Phrase("{count} days", "{count} 天")),
    (3600, Phrase("hour", "小时"), Phrase("{count} hours", "{count} 小时")),
    (60, Phrase("minute", "分钟"), Phrase("{count} minutes", "{count} 分钟")),
)
SECOND = Phrase("second", "秒")
SECONDS = Phrase("{count} s", "{count} s")
SIDES = (Phrase("Prompts", "提示词"), Phrase("Outputs", "输出"))
LENGTHS = Phrase(
    "<b>{name}</b>: mean {mean:,.0f}, median {median:,.0f}, p99 {p99:,.0f} tokens",
    "<b>{name}</b>：均值 {mean:,.0f}，中位数 {median:,.0f}，p99 {p99:,.0f} 个 token",
)
SHARE_OF_REQUESTS = Phrase("requests (%)", "请求占比（%）")
UP_TO = Phrase("up to this length (%)", "累计占比（%）")
TOKENS = Phrase("tokens", "token 数")
IN_RANGE = Phrase(
    "%{{customdata[0]:,}} to %{{customdata[1]:,}} tokens: %{{y:.2f}} %<extra></extra>",
    "%{{customdata[0]:,}} 至 %{{customdata[1]:,}} 个 token：%{{y:.2f}} %<extra></extra>",
)
AT_MOST = Phrase(
    "%{{y:.1f}} % have at most %{{x:,}} tokens<extra></extra>", "%{{y:.1f}} % 不超过 %{{x:,}} 个 token<extra></extra>"
)
ALONE = Phrase(
    "%{{x:,}} tokens alone: %{{y:.2f}} %<extra></extra>", "恰为 %{{x:,}} 个 token：%{{y:.2f}} %<extra></extra>"
)
LAST_TO_FIRST = Phrase("touched last to first", "从后往前访问")
FIRST_TO_LAST = Phrase("touched first to last", "从前往后访问")
ENDLESS = Phrase("endless cache: {share:.1f} %", "容量无限：{share:.1f} %")
CAPACITY = Phrase("capacity (blocks of {size} tokens)", "容量（块，每块 {size} 个 token）")
BLOCKS_HIT = Phrase("blocks of prompts that hit (%)", "提示词块命中率（%）")


def arrivals_at_two_scales(d: Description, lang: Lang = "en") -> go.Figure:
    """Requests over the whole trace, and by the second in its busiest 5 minutes, with the mean as a line."""
    a = d.arrivals
    coarse, fine = a.coarse, a.fine
    figure = make_subplots(
        rows=2,
        cols=1,
        vertical_spacing=0.2,
        subplot_titles=[
            Said.of(WHOLE_TRACE, width=_width(coarse.width_s)).text(lang),
            Said.of(BUSIEST, minutes=CV_WINDOW_S // 60).text(lang),
        ],
    )
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    for row, bars in enumerate((coarse, fine), start=1):
        _bars(figure, bars, row, lang)
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
    figure.update_yaxes(title_text=Said.of(REQUESTS).text(lang), rangemode="tozero")
    figure.update_xaxes(title_text=Said.of(SINCE_FIRST).text(lang), row=2, col=1)
    figure.update_layout(showlegend=False, bargap=0, margin={"t": 40})
    return figure


def _bars(figure: go.Figure, bars: Bars, row: int, lang: Lang) -> None:
    starts = bars.start_s + bars.width_s * np.arange(len(bars.counts))
    figure.add_bar(
        x=starts + bars.width_s / 2,
        y=np.array(bars.counts),
        width=bars.width_s,
        marker={"color": ARRIVALS, "line": {"width": 0}},
        hovertemplate=Said.of(REQUESTS_AT).text(lang),
        row=row,
        col=1,
    )


def _width(width_s: int) -> Said:
    for unit, one, several in UNITS:
        if width_s % unit == 0:
            return Said.of(one) if width_s == unit else Said.of(several, count=width_s // unit)
    return Said.of(SECOND) if width_s == 1 else Said.of(SECONDS, count=width_s)


def length_distributions(d: Description, lang: Lang = "en") -> go.Figure:
    """Prompts and outputs: the share of the requests in each range of lengths, the share up to each, and the lengths
    that stand out by themselves."""
    prompts, outputs = (Said.of(side).text(lang) for side in SIDES)
    sides = ((prompts, d.prompt_tokens, PROMPTS), (outputs, d.output_tokens, OUTPUTS))
    figure = make_subplots(
        rows=2,
        cols=1,
        vertical_spacing=0.17,
        specs=[[{"secondary_y": True}], [{"secondary_y": True}]],
        subplot_titles=[
            Said.of(LENGTHS, name=name, mean=side.mean, median=quantile(side, 0.5), p99=quantile(side, 0.99)).text(lang)
            for name, side, _ in sides
        ],
    )
    figure.update_annotations(x=0, xanchor="left", font_size=13)
    style(figure, 640)
    for row, (name, side, colour) in enumerate(sides, start=1):
        log = side.most > _LOG_FROM * max(1.0, quantile(side, 0.01))
        _histogram(figure, name, side, colour, row, lang, log=log)
        _cumulated(figure, side, row, lang)
        _mass_points(figure, side, row, lang)
        if log:
            figure.update_xaxes(type="log", dtick=1, row=row, col=1)
        share = Said.of(SHARE_OF_REQUESTS).text(lang)
        figure.update_yaxes(title_text=share, rangemode="tozero", row=row, col=1, secondary_y=False)
        figure.update_yaxes(
            title_text=Said.of(UP_TO).text(lang),
            range=[0, 105],
            tickmode="array",
            tickvals=[0, 25, 50, 75, 100],
            showgrid=False,
            row=row,
            col=1,
            secondary_y=True,
        )
    figure.update_xaxes(title_text=Said.of(TOKENS).text(lang), row=2, col=1)
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


def _histogram(
    figure: go.Figure, name: str, side: LengthStatistics, colour: str, row: int, lang: Lang, *, log: bool
) -> None:
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
        hovertemplate=Said.of(IN_RANGE).text(lang),
        row=row,
        col=1,
        secondary_y=False,
    )


def _cumulated(figure: go.Figure, side: LengthStatistics, row: int, lang: Lang) -> None:
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
        hovertemplate=Said.of(AT_MOST).text(lang),
        row=row,
        col=1,
        secondary_y=True,
    )


def _mass_points(figure: go.Figure, side: LengthStatistics, row: int, lang: Lang) -> None:
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
        hovertemplate=Said.of(ALONE).text(lang),
        row=row,
        col=1,
        secondary_y=False,
    )


def reuse_by_capacity(reuse: ReuseStatistics, lang: Lang = "en") -> go.Figure:
    """The share of the blocks of prompts that a prefix cache hits, by its capacity; dashed what an endless one does."""
    figure = go.Figure()
    style(figure, 380)
    lines = {"mode": "lines+markers", "marker": {"size": 6, "color": PROMPTS}, "line": {"width": 2, "color": PROMPTS}}
    ring = {"size": 12, "symbol": "circle-open", "color": OUTPUTS, "line": {"width": 1.5}}
    for curve, name, look in (
        (reuse.curve, LAST_TO_FIRST, lines),
        (reuse.first_to_last, FIRST_TO_LAST, {"mode": "markers", "marker": ring}),
    ):
        bounded = [(c, h) for c, h in zip(curve.capacities, curve.hits, strict=True) if c is not None]
        figure.add_scatter(
            x=[capacity for capacity, _ in bounded],
            y=[100 * hits / curve.references for _, hits in bounded],
            name=Said.of(name).text(lang),
            hovertemplate="%{y:.2f} %",
            **look,
        )
    endless = 100 * reuse.curve.hits[-1] / reuse.curve.references
    figure.add_hline(
        y=endless,
        line={"color": INK, "width": 1, "dash": "dash"},
        annotation={"text": Said.of(ENDLESS, share=endless).text(lang), "font": {"color": INK, "size": 12}},
        annotation_position="top left",
    )
    figure.update_xaxes(title_text=Said.of(CAPACITY, size=reuse.block_size).text(lang), type="log", dtick=1)
    figure.update_yaxes(title_text=Said.of(BLOCKS_HIT).text(lang), range=[0, max(1.0, 1.15 * endless)])
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
    figure.update_layout(hovermode="x unified", legend=legend, margin={"t": 60})
    return figure
