"""The server over time: who runs, who waits, who lost its KV, and how long the queue took, on one axis of time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.api import Result
from hbmtwin.dashboard.figures import SIMULATED_TIME, band_trace, style, thin
from hbmtwin.dashboard.palette import policy_colours
from hbmtwin.sim.phrases import Lang, Phrase, Said

SLICES = 60
"""Slices of time whose requests share a point of the queue time."""

COUNTS = (
    ("running", Phrase("running", "运行中")),
    ("waiting", Phrase("waiting", "排队中")),
    ("preemptions", Phrase("preemptions<br>so far", "累计抢占")),
)
"""Columns of a timeline, and what their panels are called."""
QUEUE = Phrase("queue (s)", "排队时间（s）")
OF_REQUESTS = Phrase("%{{y:.3f}} s, %{{customdata}} requests", "%{{y:.3f}} s，%{{customdata}} 条请求")


def server_over_time(results: Mapping[str, Result], lang: Lang = "en") -> go.Figure:
    """Running and waiting requests, preemptions so far where there were any, and the queue time, one panel each.

    Queue time stands at the arrival: the median of the requests of a slice of time, and the band from p10 to p90.
    O(rows log rows + requests log requests).
    """
    preempted = any(result.summary["preemptions"] for result in results.values())
    panels = COUNTS if preempted else COUNTS[:2]
    figure = make_subplots(rows=len(panels) + 1, cols=1, shared_xaxes=True, vertical_spacing=0.05)
    colours = policy_colours(results)
    for name, result in results.items():
        line = result.timeline
        drawn = thin(line, [line[column] for column, _ in panels])
        for row, (column, _) in enumerate(panels, start=1):
            figure.add_scatter(
                x=drawn["time_ns"].to_numpy() / 1e9,
                y=drawn[column].to_numpy(),
                name=name,
                legendgroup=name,
                showlegend=row == 1,
                mode="lines",
                line={"width": 1.5, "color": colours[name], "shape": "hv"},
                hovertemplate="%{y:,}",
                row=row,
                col=1,
            )
        _queue(figure, result, name, colours[name], lang, row=len(panels) + 1)
    style(figure, 80 + 150 * (len(panels) + 1))
    for row, (_, title) in enumerate(panels, start=1):
        figure.update_yaxes(title_text=Said.of(title).text(lang), rangemode="tozero", row=row, col=1)
    figure.update_yaxes(title_text=Said.of(QUEUE).text(lang), rangemode="tozero", row=len(panels) + 1, col=1)
    figure.update_xaxes(title_text=Said.of(SIMULATED_TIME).text(lang), row=len(panels) + 1, col=1)
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
    figure.update_layout(hovermode="x unified", legend=legend, margin={"t": 80})
    return figure


def _queue(figure: go.Figure, result: Result, name: str, colour: str, lang: Lang, *, row: int) -> None:
    bands = queue_bands(result.requests)
    time_s = bands["time_s"].to_numpy()
    figure.add_trace(band_trace(time_s, bands, name, colour), row=row, col=1)
    figure.add_scatter(
        x=time_s,
        y=bands["p50"].to_numpy(),
        customdata=bands["count"].to_numpy(),
        name=name,
        legendgroup=name,
        showlegend=False,
        mode="lines+markers",
        marker={"size": 4},
        line={"width": 1.5, "color": colour},
        hovertemplate=Said.of(OF_REQUESTS).text(lang),
        row=row,
        col=1,
    )


def queue_bands(requests: pd.DataFrame, slices: int = SLICES) -> pd.DataFrame:
    """Queue time against arrival: ``time_s`` (the mean arrival of a slice), ``count``, ``p10``, ``p50``, ``p90``.

    Of requests that were scheduled; slices in which none arrived have no row.
    """
    begun = requests[requests["scheduled_ns"] >= 0]
    arrival = begun["arrival_ns"].to_numpy(dtype="float64")
    width = max(1.0, (arrival.max() + 1 if len(arrival) else 1.0) / slices)
    table = pd.DataFrame({"arrival_s": arrival / 1e9, "queue_s": (begun["scheduled_ns"].to_numpy() - arrival) / 1e9})
    grouped = table.groupby((arrival // width).astype(np.int64))
    quantiles = {f"p{q}": grouped["queue_s"].quantile(q / 100) for q in (10, 50, 90)}
    bands = pd.DataFrame({"time_s": grouped["arrival_s"].mean(), "count": grouped.size(), **quantiles})
    return bands.reset_index(drop=True)
