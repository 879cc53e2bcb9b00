"""OOM points as they are stored: the share of draws that has run out at each load, and the smallest memories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from hbmtwin.dashboard.figures import band_trace, style
from hbmtwin.dashboard.palette import policy_colours
from hbmtwin.sim.capacity.oom_point_loads import WORDS
from hbmtwin.sim.phrases import Lang, Phrase, Said

GIB = 1 << 30
OUT = Phrase("draws that ran out (%)", "显存耗尽的比例（%）")
PREEMPTED = Phrase("{policy}: first preemption", "{policy}：首次抢占")
LOAD = Phrase("load: {word}", "负载：{word}")
SMALLEST = Phrase("smallest memory that survives (GiB)", "能撑住的最小显存（GiB）")


def share_curves(told: Mapping[str, Any], lang: Lang) -> go.Figure:
    """The share at each load, with its bounds of 95 % confidence as a band. Preemption is dotted."""
    figure = go.Figure()
    colours = policy_colours(told["policies"])
    for policy, ends in told["policies"].items():
        for end, found in ends.items():
            curve = pd.DataFrame(found["curve"])
            if curve.empty:
                continue
            name = policy if end == "fails" else Said.of(PREEMPTED, policy=policy).text(lang)
            x = curve["at"].to_numpy(dtype=np.float64)
            if end == "fails":
                bands = pd.DataFrame({"p10": 100 * curve["low"], "p90": 100 * curve["high"]})
                figure.add_trace(band_trace(x, bands, name, colours[policy]))
            figure.add_scatter(
                x=x,
                y=100 * curve["share"],
                customdata=curve[["ended", "n"]],
                name=name,
                legendgroup=name,
                mode="lines+markers",
                line={"color": colours[policy], "width": 2, "dash": "solid" if end == "fails" else "dot"},
                hovertemplate="%{y:.0f} % (%{customdata[0]} / %{customdata[1]})",
            )
    return _styled(figure, told, Said.of(OUT).text(lang), lang, [-3, 104])


def memory_curves(told: Mapping[str, Any], lang: Lang) -> go.Figure:
    """The middle of the draws at each load, and from the least to the most as a band. Preemption is dotted."""
    figure = go.Figure()
    colours = policy_colours(told["smallest_memory"])
    for policy, ends in told["smallest_memory"].items():
        for end, found in ends.items():
            curve = pd.DataFrame(found["curve"])
            if curve.empty or curve["median_bytes"].isna().all():
                continue
            name = policy if end == "fails" else Said.of(PREEMPTED, policy=policy).text(lang)
            x = curve["load"].to_numpy(dtype=np.float64)
            if end == "fails" and curve[["least_bytes", "most_bytes"]].notna().all(axis=None):
                bands = pd.DataFrame({"p10": curve["least_bytes"] / GIB, "p90": curve["most_bytes"] / GIB})
                figure.add_trace(band_trace(x, bands, name, colours[policy]))
            figure.add_scatter(
                x=x,
                y=curve["median_bytes"].astype(float) / GIB,
                name=name,
                legendgroup=name,
                mode="lines+markers",
                line={"color": colours[policy], "width": 2, "dash": "solid" if end == "fails" else "dot"},
                hovertemplate="%{y:.2f} GiB",
            )
    return _styled(figure, told, Said.of(SMALLEST).text(lang), lang, None)


def _styled(
    figure: go.Figure, told: Mapping[str, Any], title: str, lang: Lang, bounds: list[float] | None
) -> go.Figure:
    style(figure, 420)
    word = told["load"]["key"]
    figure.update_xaxes(title_text=Said.of(LOAD, word=Said.of(WORDS[word]) if word in WORDS else word).text(lang))
    figure.update_yaxes(title_text=title, range=bounds, rangemode="tozero")
    figure.update_layout(hovermode="x unified", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return figure
