"""Figures of results against time and turn: pure functions from results to Plotly figures.

Each takes ``{name: result}`` and draws all of them on shared axes, so that one run is simply a dictionary of one, and
says what it draws in English or in Chinese.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.api import Result
from hbmtwin.dashboard.palette import ALARM, AXIS, GRID, INK, MEMORY, PAPER, policy_colours
from hbmtwin.dashboard.verdict import bytes_text, percent_text, short_fate
from hbmtwin.sim.phrases import Lang, Phrase, Said

GIB = 2**30
COLUMNS = 500
"""Slices of time that one curve is drawn from: about as many as a panel has columns of pixels."""
MAX_MARKS = 500
TITLE_PX = 46
"""Height of a panel's title of two lines."""

SIMULATED_TIME = Phrase("simulated time (s)", "仿真时间（s）")
HBM = Phrase("HBM (GiB)", "HBM（GiB）")
PREEMPTION = Phrase("Preemption", "抢占")
PREEMPTED_AT = Phrase("preemption at %{{x:.1f}} s<extra></extra>", "%{{x:.1f}} s 时抢占<extra></extra>")
OUT_OF_MEMORY = Phrase("out of<br>memory", "显存不足<br>（OOM）")
UNTIL_DEATHS = Phrase("until the deaths", "到 OOM 为止")
WHOLE_RUN = Phrase("whole run ({end_s:,.0f} s)", "全程（{end_s:,.0f} s）")
MEAN = Phrase("{name} (mean {mean})", "{name}（均值 {mean}）")
UTILISATION = Phrase("KV utilisation (% of held bytes)", "KV 利用率（占已持有字节的 %）")
USAGE = Phrase("KV usage (% of its budget)", "KV 使用率（占 KV 预算的 %）")
HIT_RATE = Phrase("KV hit rate so far (%)", "KV 累计命中率（%）")
ALERT_ABOVE = Phrase("alert above {limit}", "高于 {limit} 告警")
ALERT_BELOW = Phrase("alert below {limit}", "低于 {limit} 告警")
OF_REQUESTS = Phrase("%{{y:.2f}} ms, %{{customdata}} requests", "%{{y:.2f}} ms，%{{customdata}} 条请求")
NONE_COMPLETED = Phrase("no request completed with two tokens or more", "没有输出两个以上 token 并完成的请求")
TURN = Phrase("turn of the conversation", "对话轮次")
CONTEXT = Phrase("context (tokens); every request here is a first turn", "序列长度（token）；这里的请求都是首轮")
TPOT = Phrase("time per output token (ms)", "单个输出 token 时延 TPOT（ms）")


def style(figure: go.Figure, height: int) -> go.Figure:
    """Give a figure the common look. An empty template keeps 7 kB of defaults out of each figure's JSON."""
    figure.update_layout(
        template=go.layout.Template(),
        height=height,
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        margin={"l": 70, "r": 20, "t": 50, "b": 60},
    )
    axes = {"gridcolor": GRID, "zeroline": False, "linecolor": AXIS, "ticks": "outside"}
    figure.update_xaxes(**axes)
    figure.update_yaxes(**axes)
    return figure


def inline(figure: go.Figure, div_id: str) -> str:
    """The figure as a fragment of the page; without an id of ours Plotly draws a random one."""
    text: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        div_id=div_id,
        config={"responsive": True, "displaylogo": False},
    )
    return text


def thin(frame: pd.DataFrame, signals: list[pd.Series[float]], columns: int = COLUMNS) -> pd.DataFrame:
    """Of each slice of time keep the first row, the last, and those where a signal is highest or lowest.

    A line through these rows covers the same pixels as one through all of them (M4: Jugel et al., VLDB 2014). Whole
    rows are kept, so what sums to the capacity still does. O(rows log rows).
    """
    if len(frame) <= columns:
        return frame
    time = frame["time_ns"].to_numpy()
    width = max(1, -(-(int(time[-1]) - int(time[0]) + 1) // columns))
    column = (time - time[0]) // width
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    ends = np.append(starts[1:], len(frame)) - 1
    keep = [starts, ends]
    for signal in signals:
        order = np.lexsort((signal.to_numpy(), column))
        keep += [order[starts], order[ends]]
    return frame.iloc[np.unique(np.concatenate(keep))]


def band_trace(x: npt.NDArray[np.float64], bands: pd.DataFrame, name: str, colour: str) -> go.Scatter:
    """The area between the columns ``p10`` and ``p90`` over *x*, shown and hidden with the lines of *name*."""
    return go.Scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([bands["p90"], bands["p10"][::-1]]),
        fill="toself",
        fillcolor=colour,
        opacity=0.13,
        mode="lines",
        line={"width": 0},
        legendgroup=name,
        showlegend=False,
        hoverinfo="skip",
    )


def memory_over_time(results: Mapping[str, Result], lang: Lang = "en") -> go.Figure:
    """The whole device as a stack over simulated time, one panel a result, with OOM and preemption marks.

    Memory grows evenly between two rows, and rows stand on both sides of every jump, so straight lines are true.
    Bands that are empty in every result are left out.
    """
    columns = 2 if len(results) > 1 else 1
    panel_rows = -(-len(results) // columns)
    figure = make_subplots(
        rows=panel_rows,
        cols=columns,
        shared_xaxes="all",
        shared_yaxes="all",
        subplot_titles=[f"<b>{name}</b><br>{short_fate(result.summary, lang)}" for name, result in results.items()],
        horizontal_spacing=0.04,
        vertical_spacing=0.28 / panel_rows,
    )
    figure.update_annotations(font_size=13)  # two lines, in half of a page 800 pixels wide
    top_gib = max((int(result.summary["capacity_bytes"]) for result in results.values()), default=0) / GIB
    end_s = max((float(result.timeline["time_ns"].max()) / 1e9 for result in results.values()), default=0.0)
    layers = {
        key: layer
        for key, layer in MEMORY.items()
        if any(int(result.timeline[list(layer.columns)].to_numpy().max(initial=0)) > 0 for result in results.values())
    }
    for position, result in enumerate(results.values()):
        place = {"row": position // columns + 1, "col": position % columns + 1}
        line = result.timeline
        in_use = -(line["driver_free"] + line["kv_pool_free"])
        drawn = thin(line, [in_use, line["growth_copy"], line["external"]])
        time_s = drawn["time_ns"].to_numpy() / 1e9
        for key, layer in layers.items():
            figure.add_scatter(
                x=time_s,
                y=(drawn[list(layer.columns)].sum(axis=1) / GIB).to_numpy(dtype=np.float32),
                name=Said.of(layer.label).text(lang),
                legendgroup=key,
                showlegend=position == 0,
                stackgroup="hbm",
                mode="lines",
                line={"width": 0, "color": layer.colour},
                fillcolor=layer.colour,
                hovertemplate="%{y:.2f} GiB",
                **place,
            )
        _mark_preemptions(figure, line, 1.015 * top_gib, lang, show=position == 0, **place)
        _mark_oom(figure, result.summary, end_s, lang, **place)
        last = position + columns >= len(results)
        time, hbm = Said.of(SIMULATED_TIME).text(lang), Said.of(HBM).text(lang)
        figure.update_xaxes(title_text=time if last else None, showticklabels=True, **place)
        figure.update_yaxes(title_text=hbm if place["col"] == 1 else None, range=[0, 1.04 * top_gib], **place)
    height = 150 + 320 * panel_rows
    style(figure, height)
    figure.update_layout(
        hovermode="x unified",
        legend={"orientation": "h", "y": -80 / (height - 200), "yanchor": "top", "traceorder": "normal"},
        margin={"t": 24 + TITLE_PX},
    )
    deaths_s = [r.summary["oom"]["time_s"] for r in results.values() if r.summary["oom"] is not None]
    _offer_zoom(figure, deaths_s, end_s, lang)
    return figure


def _mark_preemptions(
    figure: go.Figure, line: pd.DataFrame, at_gib: float, lang: Lang, *, show: bool, row: int, col: int
) -> None:
    moments = line.loc[line["preemptions"].diff().fillna(line["preemptions"]) > 0, "time_ns"]
    moments = moments.iloc[:: len(moments) // MAX_MARKS + 1]
    figure.add_scatter(
        x=moments.to_numpy() / 1e9,
        y=np.full(len(moments), at_gib),
        name=Said.of(PREEMPTION).text(lang),
        legendgroup="preemption",
        showlegend=show,
        mode="markers",
        marker={"symbol": "triangle-down", "size": 8, "color": ALARM},
        hovertemplate=Said.of(PREEMPTED_AT).text(lang),
        row=row,
        col=col,
    )


def _mark_oom(
    figure: go.Figure, summary: Mapping[str, object], end_s: float, lang: Lang, *, row: int, col: int
) -> None:
    oom = summary["oom"]
    if not isinstance(oom, dict):
        return
    figure.add_vline(x=oom["time_s"], line={"color": ALARM, "width": 3}, row=row, col=col)
    if oom["time_s"] < 0.97 * end_s:
        figure.add_vrect(
            x0=oom["time_s"],
            x1=end_s,
            fillcolor=ALARM,
            opacity=0.06,
            line_width=0,
            annotation={"text": Said.of(OUT_OF_MEMORY).text(lang), "font": {"color": ALARM}},
            annotation_position="inside left" if oom["time_s"] < 0.75 * end_s else "inside right",
            row=row,
            col=col,
        )


def _offer_zoom(figure: go.Figure, deaths_s: list[float], end_s: float, lang: Lang) -> None:
    """Where all deaths lie in the first part of the time axis, begin with that part, and offer the whole."""
    if not deaths_s or max(deaths_s) > 0.4 * end_s:
        return
    axes = sorted(name for name in figure.layout if name.startswith("xaxis"))  # Plotly hands them out as a set
    until = 1.25 * max(deaths_s)
    choices = ((Said.of(UNTIL_DEATHS), until), (Said.of(WHOLE_RUN, end_s=end_s), end_s))
    figure.update_layout({f"{axis}.range": [0, until] for axis in axes})
    figure.update_layout(
        updatemenus=[
            {
                "type": "buttons",
                "direction": "right",
                "x": 0,
                "xanchor": "left",
                "y": 1,
                "yanchor": "bottom",
                "pad": {"b": TITLE_PX},
                "showactive": True,
                "buttons": [
                    {
                        "label": label.text(lang),
                        "method": "relayout",
                        "args": [{f"{axis}.range": [0, to] for axis in axes}],
                    }
                    for label, to in choices
                ],
            }
        ],
        margin={"t": 56 + TITLE_PX},
    )


def kv_utilization(results: Mapping[str, Result], lang: Lang = "en") -> go.Figure:
    """Share of the KV bytes held by sequences, parked ones included, that tokens or states fill, over time, in percent.

    Moments at which nobody holds KV are gaps. The legend carries the time-weighted mean of the whole run.
    """
    figure = go.Figure()
    colours = policy_colours(results)
    for name, result in results.items():
        line = result.timeline
        tokens = line["kv_tokens"] + line["kv_state"] + line["kv_parked"]
        held = tokens + line["kv_padding"] + line["kv_unfilled"]
        percent = (100 * tokens / held).where(held > 0)
        drawn = thin(line, [percent.fillna(0.0)])
        mean = result.summary["kv_utilization_mean"]
        figure.add_scatter(
            x=drawn["time_ns"].to_numpy() / 1e9,
            y=percent.loc[drawn.index].to_numpy(dtype=np.float32),
            name=Said.of(MEAN, name=name, mean=percent_text(mean)).text(lang),
            mode="lines",
            line={"width": 2, "color": colours[name]},
            hovertemplate="%{y:.1f} %",
        )
    style(figure, 380)
    figure.update_xaxes(title_text=Said.of(SIMULATED_TIME).text(lang))
    figure.update_yaxes(title_text=Said.of(UTILISATION).text(lang), range=[0, 103])
    _legend_above(figure)
    return figure


def kv_monitor_over_time(results: Mapping[str, Result], lang: Lang = "en") -> go.Figure:
    """KV usage over time, and below it the hit rate, where a token was found in memory or a limit is set on it.

    Limits of alerts are dashed lines.
    """
    monitors = {name: result.kv_monitor for name, result in results.items()}
    limits = sorted({limit for result in results.values() for limit in _limits(result, lang)})
    reuse = any((m["hit_rate"] > 0).any() for m in monitors.values()) or any(row == 2 for row, _, _ in limits)
    figure = make_subplots(rows=1 + reuse, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    colours = policy_colours(results)
    for name, monitor in monitors.items():
        for row, metric in enumerate(("usage", "hit_rate")[: 1 + reuse], start=1):
            percent = 100 * monitor[metric]
            drawn = thin(monitor, [percent.fillna(0.0)])
            figure.add_scatter(
                x=drawn["time_ns"].to_numpy() / 1e9,
                y=percent.loc[drawn.index].to_numpy(dtype=np.float32),
                name=name,
                legendgroup=name,
                showlegend=row == 1,
                mode="lines",
                line={"width": 2, "color": colours[name]},
                hovertemplate="%{y:.1f} %",
                row=row,
                col=1,
            )
    for row, height, text in limits:
        figure.add_hline(
            y=height,
            line={"color": ALARM, "width": 1, "dash": "dash"},
            annotation={"text": text, "font": {"color": ALARM, "size": 12}},
            annotation_position="top left",
            row=row,
            col=1,
        )
    style(figure, 380 + 200 * reuse)
    figure.update_xaxes(title_text=Said.of(SIMULATED_TIME).text(lang), row=1 + reuse, col=1)
    figure.update_yaxes(title_text=Said.of(USAGE).text(lang), range=[0, 103], row=1, col=1)
    if reuse:
        figure.update_yaxes(title_text=Said.of(HIT_RATE).text(lang), range=[-3, 103], row=2, col=1)
    _legend_above(figure)
    return figure


def _limits(result: Result, lang: Lang) -> list[tuple[int, float, str]]:
    """Panel, height in percent and text of each limit that a run's scenario sets."""
    wanted, budget = result.scenario.results, result.summary["kv_budget_bytes"]
    found = []
    if (size := wanted.alert_kv_used_bytes) is not None:
        found.append((1, round(100 * size / budget, 1), Said.of(ALERT_ABOVE, limit=bytes_text(size)).text(lang)))
    if (usage := wanted.alert_kv_usage) is not None:
        found.append((1, 100 * usage, Said.of(ALERT_ABOVE, limit=percent_text(usage)).text(lang)))
    if (rate := wanted.alert_hit_rate) is not None:
        found.append((2, 100 * rate, Said.of(ALERT_BELOW, limit=percent_text(rate)).text(lang)))
    return found


def _legend_above(figure: go.Figure) -> None:
    """One legend of two rows at most, below the buttons that Plotly shows at the top."""
    legend = {"orientation": "h", "y": 1.02, "yanchor": "bottom"}
    figure.update_layout(hovermode="x unified", legend=legend, margin={"t": 80})


def latency_by_turn(results: Mapping[str, Result], lang: Lang = "en") -> go.Figure:
    """Time per output token (TPOT) against the turn of the conversation: median, and the band from p10 to p90.

    Completed requests with at least two output tokens. Where every request is a first turn, the context length takes
    the turn's place, in eight groups of equal numbers of requests.
    """
    tables = {name: _tpot_table(result.requests) for name, result in results.items()}
    turns = any((table["turn"] > 0).any() for table in tables.values())
    figure = go.Figure()
    colours = policy_colours(results)
    for name, table in tables.items():
        if table.empty:
            continue
        bands = _bands(table, by_turn=turns)
        colour = colours[name]
        band = bands[bands["count"] >= 5]
        figure.add_trace(band_trace(band["x"].to_numpy(), band, name, colour))
        figure.add_scatter(
            x=bands["x"],
            y=bands["p50"],
            customdata=bands["count"],
            name=name,
            legendgroup=name,
            mode="lines+markers",
            line={"width": 2, "color": colour},
            hovertemplate=Said.of(OF_REQUESTS).text(lang),
        )
    style(figure, 380)
    if not figure.data:
        figure.add_annotation(text=Said.of(NONE_COMPLETED).text(lang), showarrow=False)
    figure.update_xaxes(title_text=Said.of(TURN if turns else CONTEXT).text(lang))
    if turns and max(table["turn"].max() for table in tables.values() if not table.empty) < 30:
        figure.update_xaxes(dtick=1)
    figure.update_yaxes(title_text=Said.of(TPOT).text(lang), rangemode="tozero")
    _legend_above(figure)
    return figure


def _tpot_table(requests: pd.DataFrame) -> pd.DataFrame:
    done = requests[(requests["status"] == "completed") & (requests["output_tokens"] > 1)]
    return pd.DataFrame(
        {
            "turn": done["turn"],
            "context": done["prompt_tokens"] + done["output_tokens"] // 2,
            "tpot_ms": (done["end_ns"] - done["first_token_ns"]) / (done["output_tokens"] - 1) / 1e6,
        }
    )


def _bands(table: pd.DataFrame, *, by_turn: bool) -> pd.DataFrame:
    if by_turn:
        key = table["turn"] + 1
    else:
        groups = (np.arange(len(table)) * min(8, len(table)) // len(table)).astype(int)
        key = pd.Series(groups, index=table["context"].sort_values(kind="stable").index).reindex(table.index)
    grouped = table.groupby(key)
    bands = pd.DataFrame(
        {
            "x": grouped["turn"].first() + 1 if by_turn else grouped["context"].median(),
            "count": grouped.size(),
            **{f"p{q}": grouped["tpot_ms"].quantile(q / 100) for q in (10, 50, 90)},
        }
    )
    return bands.reset_index(drop=True)
