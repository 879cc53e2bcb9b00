"""Predicted over measured, as a validation report has stored them: bytes after each step, and times of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.log_axis import log_axis
from hbmtwin.dashboard.run_replay_page import LABELS
from hbmtwin.dashboard.run_replay_steps import MEASURED, PREDICTED
from hbmtwin.sim.phrases import Lang, Phrase, Said

GIB = 1 << 30
MOST_POINTS = 2000
STEP = Phrase("step", "步")
TIME = Phrase("time (ms)", "时间（ms）")
OF_MEASURED = Phrase("measured", "实测")
OF_PREDICTED = Phrase("predicted", "预测")
ATTENTION_MEASURED = Phrase("attention, measured", "attention，实测")
ATTENTION_PREDICTED = Phrase("attention, predicted", "attention，预测")


def memory_overlay(memory: Mapping[str, Any], lang: Lang) -> go.Figure:
    """A panel a counter; measured is the broad line, predicted the narrow one upon it."""
    steps = memory["steps"]
    names = [name for name in steps["measured"] if name in LABELS]
    titles = [Said.of(LABELS[name]).text(lang) for name in names]
    figure = make_subplots(rows=2, cols=2, shared_xaxes=True, subplot_titles=titles, vertical_spacing=0.12)
    every = max(1, -(-len(steps["step"]) // MOST_POINTS))
    x = steps["step"][::every]
    for at, name in enumerate(names):
        for label, values, colour, width in (
            (OF_MEASURED, steps["measured"][name], MEASURED, 6),
            (OF_PREDICTED, steps["predicted"][name], PREDICTED, 2.5),
        ):
            figure.add_scatter(
                x=x,
                y=np.array(values[::every], dtype=np.float64) / GIB,
                name=Said.of(label).text(lang),
                legendgroup=label.en,
                showlegend=at == 0,
                mode="lines",
                line={"color": colour, "width": width},
                hovertemplate="%{y:.6f} GiB",
                row=at // 2 + 1,
                col=at % 2 + 1,
            )
    style(figure, 560)
    figure.update_yaxes(title_text="GiB", col=1)
    figure.update_xaxes(title_text=Said.of(STEP).text(lang), row=2)
    figure.update_layout(hovermode="x unified", legend={"orientation": "h", "y": 1.06, "yanchor": "bottom"})
    return figure


def times_overlay(part: Mapping[str, Any], lang: Lang) -> go.Figure:
    """Times of the measured steps on a log axis; attention within them dotted, or alone where it was measured alone."""
    steps = part["steps"]
    figure = go.Figure()
    for key, label, colour, dash in (
        ("measured_ns", OF_MEASURED, MEASURED, "solid"),
        ("predicted_ns", OF_PREDICTED, PREDICTED, "solid"),
        ("measured_attention_ns", ATTENTION_MEASURED, MEASURED, "dot"),
        ("predicted_attention_ns", ATTENTION_PREDICTED, PREDICTED, "dot"),
    ):
        if steps.get(key) is None:
            continue
        figure.add_scatter(
            x=steps["step"],
            y=np.array(steps[key], dtype=np.float64) / 1e6,
            customdata=steps["kind"],
            name=Said.of(label).text(lang),
            mode="lines+markers",
            line={"color": colour, "width": 1.5, "dash": dash},
            hovertemplate="%{y:.3f} ms, %{customdata}",
        )
    style(figure, 440)
    figure.update_xaxes(title_text=Said.of(STEP).text(lang))
    shown = [float(value) for trace in figure.data for value in trace.y]
    figure.update_yaxes(title_text=Said.of(TIME).text(lang), **log_axis(shown))
    figure.update_layout(hovermode="x unified", legend={"orientation": "h", "y": 1.02, "yanchor": "bottom"})
    return figure
