"""What kernels reached of a device's peak, as one page: the roofline, and each kind of kernel against its size."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from hbmtwin.dashboard.collectives_figure import collectives_figure
from hbmtwin.dashboard.figures import inline, style
from hbmtwin.dashboard.palette import ROOF
from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.validation.bench.peaks import bytes_and_flops_per_s, peaks_of
from hbmtwin.validation.bench.records import COLLECTIVES, Bench, Op

Floats = npt.NDArray[np.float64]

COLOURS: dict[Op, str] = {
    "matmul": "#0072B2",
    "layer": "#56B4E9",
    "step": "#6E6E6E",
    "prefill": "#E69F00",
    "decode": "#CC79A7",
    "paged_decode": "#D55E00",
}
"""Okabe and Ito's, which stay apart for the common kinds of colour blindness."""

REACHED = Phrase("FLOPs against FLOPs a byte (peaks: {whose})", "FLOP/s 与计算强度（峰值：{whose}）")
SHARE = Phrase("Share of the roof against a call's time", "达到屋顶线的比例与单次调用时间")
ROOF_LINE = Phrase("roof", "屋顶线")
INTENSITY = Phrase("FLOPs a byte that must be read", "每读取一字节的 FLOP 数")
GFLOPS = Phrase("GFLOP/s", "GFLOP/s")
MEDIAN = Phrase("median time (us)", "中位时间（us）")
PERCENT = Phrase("% of the roof", "占屋顶线的 %")
NO_PEAK = Phrase(
    "FLOPs against FLOPs a byte; no peak is known, as neither copies nor matrix products were timed",
    "FLOP/s 与计算强度；没有测复制和矩阵乘，峰值未知",
)
ONLY_COPIES = Phrase(
    "No kernel was timed but copies: there is nothing to hold to a roof", "只测了复制：没有可与屋顶线比较的算子"
)


def bench_figure(bench: Bench, lang: Lang = "en") -> go.Figure:
    """Left FLOPs a second against FLOPs a byte, under the roof of the two peaks; right the share of that roof against
    the median time, so that what is too small to reach it is seen. A peak that is not known bounds nothing. O(points).
    """
    points = [p for p in bench.points if p.case.op in COLOURS]
    if not points:
        blank = go.Figure().update_xaxes(visible=False).update_yaxes(visible=False)
        style(blank, 200)
        return blank.update_layout(title=Said.of(ONLY_COPIES).text(lang))
    peak_bytes, peak_flops, whose = peaks_of(bench)
    titles = [said.text(lang) for said in (Said.of(REACHED, whose=whose), Said.of(SHARE))]
    if not (peak_bytes or peak_flops):
        titles = [Said.of(NO_PEAK).text(lang)]
    figure = make_subplots(rows=1, cols=len(titles), subplot_titles=titles, horizontal_spacing=0.1)
    work = [bench.work(p) for p in points]
    intensity = np.array([w.flops / w.read_bytes for w in work])
    reached = np.array([bytes_and_flops_per_s(p, bench.dtype_bytes)[1] for p in points])
    roof = _roof(intensity, peak_bytes, peak_flops)
    times_us = np.array([p.median_ns / 1e3 for p in points])
    for op, colour in COLOURS.items():
        own = np.array([p.case.op == op for p in points])
        if not own.any():
            continue
        text = [f"{p.case}<br>{p.median_ns / 1e3:,.1f} us" for p, mine in zip(points, own, strict=True) if mine]
        marker = {"color": colour, "size": 7, "opacity": 0.75}
        shown = {"mode": "markers", "marker": marker, "name": op, "legendgroup": op, "text": text}
        hover = "%{text}<extra></extra>"
        figure.add_scatter(x=intensity[own], y=reached[own] / 1e9, hovertemplate=hover, **shown, row=1, col=1)
        if roof is None:
            continue
        share = 100 * reached[own] / roof[own]
        figure.add_scatter(
            x=times_us[own], y=share, hovertemplate="%{y:.0f} %<br>" + hover, showlegend=False, **shown, row=1, col=2
        )
    line = np.geomspace(intensity.min() / 2, intensity.max() * 2, 60)
    top = _roof(line, peak_bytes, peak_flops)
    look = {"mode": "lines", "line": {"color": ROOF, "width": 1.5}, "name": Said.of(ROOF_LINE).text(lang)}
    if top is not None:
        figure.add_scatter(x=line, y=top / 1e9, hoverinfo="skip", **look, row=1, col=1)
        figure.update_xaxes(type="log", dtick=1, title_text=Said.of(MEDIAN).text(lang), row=1, col=2)
        figure.update_yaxes(title_text=Said.of(PERCENT).text(lang), rangemode="tozero", row=1, col=2)
    style(figure, 560)
    figure.update_xaxes(type="log", dtick=1, title_text=Said.of(INTENSITY).text(lang), row=1, col=1)
    figure.update_yaxes(type="log", dtick=1, title_text=Said.of(GFLOPS).text(lang), row=1, col=1)
    figure.update_layout(legend={"orientation": "h", "y": -0.16})
    return figure


def _roof(intensity: Floats, peak_bytes: float, peak_flops: float) -> Floats | None:
    """FLOPs a second that the known peaks allow; None: neither is known."""
    ends = [peak for peak in (peak_flops, intensity * peak_bytes if peak_bytes else 0.0) if np.any(peak)]
    return np.minimum.reduce(np.broadcast_arrays(intensity * np.inf, *ends)) if ends else None


def write_bench_page(bench: Bench, path: Path) -> None:
    """Write the page of kernels, or of collectives, at *path* and ``plotly.min.js`` beside it; same benchmark, same
    bytes. Raise OSError."""
    figure = collectives_figure(bench) if bench.points[0].case.op in COLLECTIVES else bench_figure(bench)
    title = html.escape(f"{bench.kernels}, {bench.dtype}, on {bench.device}, torch {bench.torch}")
    page = (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        '<script src="plotly.min.js"></script>\n<body style="font-family: system-ui, sans-serif">\n'
        f"<h1>{title}</h1>\n{inline(figure, 'bench')}\n</body></html>\n"
    )
    path.write_text(page, encoding="utf-8")
    path.with_name("plotly.min.js").write_text(get_plotlyjs(), encoding="utf-8")
