"""Plans as they are stored: of the runs at each value that was tried, the share that held, and its bounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.palette import ALARM, HOLE, policy_colours
from hbmtwin.sim.capacity.oom_point_loads import WORDS
from hbmtwin.sim.phrases import Lang, Phrase, Said

HELD = Phrase("runs that held (%)", "满足目标的运行（%）")
ASKED = Phrase("must hold: {share:g} %", "要求：{share:g} %")
OF = Phrase(
    "%{{y:.0f}} % (%{{customdata[0]}} of %{{customdata[1]}})", "%{{y:.0f}} %（%{{customdata[0]}} / %{{customdata[1]}}）"
)
SCENARIO = Phrase("scenario", "当前场景")


def held_by_value(plans: Mapping[str, Mapping[str, Any]], lang: Lang) -> go.Figure:
    """A line a plan; hollow marks are values that were looked at on the way, whose runs are not counted."""
    figure = go.Figure()
    for name, colour in policy_colours(plans).items():
        tried = sorted(plans[name]["tried"], key=lambda t: t["value"])
        shares = [100 * t["held"] / t["trials"] for t in tried]
        figure.add_scatter(
            x=[t["value"] for t in tried],
            y=shares,
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [100 * t["high"] - share for t, share in zip(tried, shares, strict=True)],
                "arrayminus": [share - 100 * t["low"] for t, share in zip(tried, shares, strict=True)],
                "thickness": 1,
                "width": 4,
            },
            customdata=[(t["held"], t["trials"]) for t in tried],
            name=name or Said.of(SCENARIO).text(lang),
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={
                "size": 9,
                "color": [colour if t["counted"] else HOLE for t in tried],
                "line": {"color": colour, "width": 1.5},
            },
            hovertemplate=Said.of(OF).text(lang),
        )
    style(figure, 380)
    first = next(iter(plans.values()))
    asked = 100 * first["survive"]
    figure.add_hline(
        y=asked,
        line={"color": ALARM, "width": 1, "dash": "dash"},
        annotation={
            "text": Said.of(ASKED, share=asked).text(lang),
            "font": {"color": ALARM},
            "x": 1,
            "xanchor": "right",
            "yanchor": "top",
        },
    )
    target = first["target"]
    figure.update_xaxes(title_text=Said.of(WORDS[target]).text(lang) if target in WORDS else target)
    figure.update_yaxes(title_text=Said.of(HELD).text(lang), range=[-3, 104])
    figure.update_layout(hovermode="x unified", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return figure
