"""All-reduces of a benchmark: their time against the message, and the bandwidth that this is, by ranks.

::

    time (us)     |        __/       a latency, then          bus GB/s  |     ____     2 (n - 1) / n of the message
                  |  _____/          the link's bandwidth               | ___/         over the time
                  +------------ bytes                                   +------------ bytes
"""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.log_axis import log_axis
from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.validation.bench.peaks import bytes_and_flops_per_s
from hbmtwin.validation.bench.records import Bench

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's, by number of ranks."""
LINES = {"all_reduce": "solid", "all_reduce_in_graph": "dot"}

TIME = Phrase("Time of an all-reduce", "AllReduce 耗时")
BANDWIDTH = Phrase("Bus bandwidth: what each rank of a ring sends", "总线带宽：环上每个 rank 的发送速率")
RANKS = Phrase("{ranks} ranks", "{ranks} 个 rank")
IN_A_GRAPH = Phrase("{ranks} ranks, in a graph", "{ranks} 个 rank，图模式")
MESSAGE = Phrase("bytes of the message", "消息大小（字节）")
MEDIAN = Phrase("median time (us), with quartiles", "中位时间（us），含四分位")


def collectives_figure(bench: Bench, lang: Lang = "en") -> go.Figure:
    """Left the median and quartiles of each message's time, right its bus bandwidth; dotted in a graph. O(points)."""
    titles = [Said.of(title).text(lang) for title in (TIME, BANDWIDTH)]
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.1)
    counts = sorted({p.case.named()["ranks"] for p in bench.points})
    for op, dash in LINES.items():
        for place, ranks in enumerate(counts):
            own = sorted(
                (p for p in bench.points if p.case.op == op and p.case.named()["ranks"] == ranks),
                key=lambda p: p.case.named()["bytes"],
            )
            if not own:
                continue
            colour = COLOURS[place % len(COLOURS)]
            name = Said.of(IN_A_GRAPH if op == "all_reduce_in_graph" else RANKS, ranks=ranks).text(lang)
            look = {"mode": "lines+markers", "name": name, "legendgroup": name, "line": {"color": colour, "dash": dash}}
            x = [p.case.named()["bytes"] for p in own]
            bars = {
                "type": "data",
                "array": [(p.p75_ns - p.median_ns) / 1e3 for p in own],
                "arrayminus": [(p.median_ns - p.p25_ns) / 1e3 for p in own],
                "thickness": 1,
            }
            times = [p.median_ns / 1e3 for p in own]
            figure.add_scatter(x=x, y=times, error_y=bars, **look, row=1, col=1)
            speeds = [bytes_and_flops_per_s(p, bench.dtype_bytes)[0] / 1e9 for p in own]
            figure.add_scatter(x=x, y=speeds, showlegend=False, **look, row=1, col=2)
    style(figure, 520)
    figure.update_xaxes(type="log", dtick=1, title_text=Said.of(MESSAGE).text(lang))
    times = [ns / 1e3 for p in bench.points for ns in (p.p25_ns, p.p75_ns)]
    figure.update_yaxes(title_text=Said.of(MEDIAN).text(lang), **log_axis(times), row=1, col=1)
    figure.update_yaxes(title_text="GB/s", rangemode="tozero", row=1, col=2)
    figure.update_layout(legend={"orientation": "h", "y": -0.16})
    return figure
