"""One run over one axis of time: the device as a stack, KV usage, who runs and who waits."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.api import Result
from hbmtwin.dashboard.figures import memory_over_time, style, thin
from hbmtwin.dashboard.palette import ALARM
from hbmtwin.sim.phrases import Lang, Phrase

HBM = Phrase("HBM (GiB)", "HBM（GiB）")
USAGE = Phrase("KV usage (%)", "KV 使用率（%）")
REQUESTS = Phrase("requests", "请求数")
RUNNING = Phrase("running", "运行中")
WAITING = Phrase("waiting", "等待中")
TIME = Phrase("simulated time (s)", "仿真时间（s）")
RUNNING_COLOUR, WAITING_COLOUR, USAGE_COLOUR = "#117733", "#CC6677", "#332288"


def timeline(result: Result, lang: Lang) -> go.Figure:
    """Three panels above each other; a horizontal drag selects a stretch of time. O(rows log rows)."""

    def said(phrase: Phrase) -> str:
        return phrase.zh if lang == "zh" else phrase.en

    memory = memory_over_time({"": result}, lang)
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, row_heights=[0.6, 0.2, 0.2], vertical_spacing=0.04)
    for trace in memory.data:
        figure.add_trace(trace, row=1, col=1)
    line, monitor = result.timeline, result.kv_monitor
    usage = 100 * monitor["usage"]
    drawn = thin(monitor, [usage.fillna(0.0)])
    figure.add_scatter(
        x=drawn["time_ns"].to_numpy() / 1e9,
        y=usage.loc[drawn.index].to_numpy(),
        name=said(USAGE),
        showlegend=False,
        mode="lines",
        line={"width": 1.5, "color": USAGE_COLOUR},
        hovertemplate="%{y:.1f} %",
        row=2,
        col=1,
    )
    drawn = thin(line, [line["running"], line["waiting"]])
    for column, name, colour in (
        ("running", said(RUNNING), RUNNING_COLOUR),
        ("waiting", said(WAITING), WAITING_COLOUR),
    ):
        figure.add_scatter(
            x=drawn["time_ns"].to_numpy() / 1e9,
            y=drawn[column].to_numpy(),
            name=name,
            mode="lines",
            line={"width": 1.5, "color": colour, "shape": "hv"},
            hovertemplate="%{y:,}",
            row=3,
            col=1,
        )
    style(figure, 760)
    if result.oom is not None:
        figure.add_vline(x=result.oom["time_s"], line={"color": ALARM, "width": 3}, row="all", col=1)
    figure.update_yaxes(title_text=said(HBM), row=1, col=1)
    figure.update_yaxes(title_text=said(USAGE), range=[0, 103], row=2, col=1)
    figure.update_yaxes(title_text=said(REQUESTS), rangemode="tozero", row=3, col=1)
    figure.update_xaxes(title_text=said(TIME), row=3, col=1)
    figure.update_layout(
        hovermode="x unified",
        dragmode="select",
        selectdirection="h",
        legend={"orientation": "h", "y": -0.12, "yanchor": "top", "traceorder": "normal"},
        margin={"t": 20, "b": 150},
    )
    return figure
