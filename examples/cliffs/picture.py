"""Draw the cliffs: TTFT p99 and the share of recomputed tokens against the pool, one line a rule."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10

import plotly.graph_objects as go
from cliff import RULES, Point
from plotly.subplots import make_subplots

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.palette import ALARM, INK

COLOURS = dict(zip(RULES, ("#2A9D8F", "#332288", "#882255"), strict=True))
WORDS = {
    "whole prompt": "<b>vLLM 0.27</b>: begins when<br>its whole prompt fits",
    "first chunk": "<b>vLLM 0.18</b>, chunks of 512:<br>begins when its first fits",
    "largest gives way": "<b>the same, but who holds</b><br><b>most gives way</b>",
}
SYMBOLS = {"held": "circle-open", "preempted": "circle", "thrashing": "diamond", "live-lock": "x"}
KEY = (
    ("held", "no preemption"),
    ("preempted", "preemptions"),
    ("thrashing", "thrashing: for a minute, half was recomputed"),
    ("live-lock", "live-lock: it would never end"),
)
NEVER_S = 6000.0
"""Where a time to the first token stands that would never come."""
TICKS_GIB = (10, 8, 6, 4, 3, 2, 1.5, 1, 0.7, 0.5)


def cliffs(points: Sequence[Point]) -> go.Figure:
    """The figure of a sweep; the pool shrinks from left to right."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.6, 0.4])
    for rule, colour in COLOURS.items():
        line = [p for p in points if p.rule == rule]
        ttft_s = [NEVER_S if p.verdict == "live-lock" else p.ttft_p99_s for p in line]
        for row, values in ((1, ttft_s), (2, [100 * p.recomputed_share for p in line])):
            locks = [p.verdict == "live-lock" for p in line]
            figure.add_scatter(
                x=[p.pool_gib for p in line],
                y=values,
                mode="lines+markers",
                line={"color": colour, "width": 2.5},
                marker={
                    "symbol": [SYMBOLS[p.verdict] for p in line],
                    "size": [12 if lock else 9 for lock in locks],
                    "opacity": 1,
                    "color": [ALARM if lock else colour for lock in locks],
                    "line": {"width": [0 if lock else 1.5 for lock in locks], "color": colour},
                },
                showlegend=False,
                row=row,
                col=1,
            )
    for verdict, words in KEY:
        locked = verdict == "live-lock"
        line = {"width": 0 if locked else 1.5, "color": INK}
        marker = {"symbol": SYMBOLS[verdict], "size": 10, "color": ALARM if locked else INK, "line": line}
        figure.add_scatter(x=[None], y=[None], mode="markers", marker=marker, name=words, row=1, col=1)
    _label_lines(figure, points)
    style(figure, 620)
    figure.update_xaxes(type="log", range=[log10(11), log10(0.49)], tickvals=list(TICKS_GIB))
    figure.update_xaxes(ticktext=[f"{size:g}" for size in TICKS_GIB])
    figure.update_xaxes(title_text="KV pool (GiB), shrinking; the load stays the same", row=2, col=1)
    ticks = {"tickvals": [0.3, 1, 3, 10, 30, 100, 300, 1000, NEVER_S], "row": 1, "col": 1}
    words = ["0.3", "1", "3", "10", "30", "100", "300", "1,000", "never"]
    figure.update_yaxes(type="log", range=[log10(0.2), log10(9500)], title_text="TTFT p99 (s)", ticktext=words, **ticks)
    figure.update_yaxes(range=[-3, 108], title_text="recomputed (%)", row=2, col=1)
    figure.update_layout(
        width=1000,
        showlegend=True,
        legend={"orientation": "h", "x": 0, "y": 1.01, "xanchor": "left", "yanchor": "bottom"},
        margin={"t": 118, "r": 215},
        title={"text": _title(points), "x": 0.01, "y": 0.96, "font_size": 18},
    )
    return figure


def _label_lines(figure: go.Figure, points: Sequence[Point]) -> None:
    """Each rule beside its last point, in the panel where the lines are apart."""
    for rule, colour in COLOURS.items():
        last = [p for p in points if p.rule == rule][-1]
        y = NEVER_S if last.verdict == "live-lock" else last.ttft_p99_s
        font = {"color": colour, "size": 13}
        place = {"xanchor": "left", "xshift": 12, "align": "left", "showarrow": False, "row": 1, "col": 1}
        place["yshift"] = {"whole prompt": -24, "first chunk": 4, "largest gives way": 0}[rule]
        figure.add_annotation(text=WORDS[rule], x=log10(last.pool_gib), y=log10(y), font=font, **place)


def _title(points: Sequence[Point]) -> str:
    def first(rule: str, verdict: str) -> Point:
        return next(p for p in points if p.rule == rule and p.verdict == verdict)

    thrashing, locked = first("first chunk", "thrashing"), first("largest gives way", "live-lock")
    held = [p for p in points if p.rule == "first chunk" and p.verdict == "held"][-1]
    return (
        f"<b>A pool of {held.pool_gib:.1f} GiB answers in {held.ttft_p99_s:.1f} s; at {thrashing.pool_gib:.1f} GiB it "
        f"takes {thrashing.ttft_p99_s:.0f} s, and at {locked.pool_gib:.1f} one rule never ends</b><br>"
        "<span style='font-size:13px'>Llama-3.1-8B on a 64 GB 910B2, 4 requests/s for a minute, prompts of about "
        "1,000 tokens, answers of about 300</span>"
    )
