"""Pictures of the claims on paged KV.

A7: what is held beside the tokens. B3: hit rates, and what they could be. C8: what pages of each size leave empty, and
what their tables take.
"""

from __future__ import annotations

from math import log10

import plotly.graph_objects as go
from claim import GIB
from claims_paged import (
    B3_PAGE,
    C8_MHA,
    C8_PAGES,
    TABLE_ENTRY_BYTES,
    a7_results,
    b3_results,
    c8_before,
    c8_pages,
    hit_rate,
    most_found,
)
from look import finish, label
from plotly.subplots import make_subplots

from hbmtwin import Result, kv_layout, model
from hbmtwin.dashboard.palette import ALARM, INK, MEMORY

TOKENS = MEMORY["kv_tokens"].colour
EMPTY = MEMORY["internal"].colour
CACHED = MEMORY["kv_cached"].colour
LOST = MEMORY["growth_copy"].colour
GREY = "#777777"


def how_full() -> go.Figure:
    """A7: KV held on average of time, tokens and what no token fills, under each rule."""
    figure = go.Figure()
    results = a7_results()
    means = {name: _mean_gib(result) for name, result in results.items()}
    for place, (name, (tokens, unfilled)) in enumerate(means.items()):
        for start, size, colour in ((0.0, tokens, TOKENS), (tokens, unfilled, EMPTY)):
            marker = {"color": colour, "line_width": 0}
            figure.add_bar(y=[-place], x=[size], base=start, width=0.62, orientation="h", marker=marker)
        label(figure, f"<b>{name}</b>", 0, -place, xanchor="right", xshift=-8)
        share = 100 * results[name].summary["kv_utilization_mean"]
        text = f"<b>{share:.0f} %</b> in use on average" if place == 0 else f"<b>{share:.0f} %</b>"
        label(figure, text, tokens + unfilled, -place, xanchor="left", xshift=8)
    tokens, unfilled = means["static"]
    label(figure, "<b>tokens</b>", tokens / 2, 0, "#FFFFFF")
    label(figure, "<b>held, no token in it</b>", tokens + unfilled / 2, 0)
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="KV held by up to 32 sequences, mean over time (GiB)", range=[0, 30])
    figure.update_yaxes(visible=False, range=[-len(means) + 0.45, 0.55])
    return finish(
        figure,
        f"In pages of 128 the same tokens take {sum(means['paged, pages of 128']):.1f} GiB instead of "
        f"{sum(means['static']):.1f}",
        "Claim A7 (34 % to 91 %): Llama-2-7B on a 64 GB 910B2, memory utilisation 0.85, a limit of 2,048 tokens, "
        "32 sequences",
    ).update_layout(margin={"l": 175})


def _mean_gib(result: Result) -> tuple[float, float]:
    """Tokens and unfilled room of a run, mean over its time."""
    line = result.timeline
    length = line["time_ns"].diff()

    def mean(column: str) -> float:
        middle = (line[column] + line[column].shift()) / 2
        return float((middle * length).sum() / length.sum() / GIB)

    return mean("kv_tokens"), mean("kv_unfilled")


B3_LINES = (
    ("10 turns", "10 turns", TOKENS, 95),
    ("4 turns", "4 turns", CACHED, 84),
    ("10 turns of 128 users", "10 turns, memory short", LOST, 73),
    ("10 turns without prefix caching", "no prefix caching", GREY, 3),
)
"""A traffic of the claim, what it is called, its colour, and how high that is written."""


def hit_rates() -> go.Figure:
    """B3: the monitor's hit rate over time beside what was possible, and what is possible against the turns."""
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.225)
    results = b3_results()
    end_s = max(results[name].summary["makespan_s"] for name, *_ in B3_LINES)
    for name, words, colour, height in B3_LINES:
        monitor, rate = results[name].kv_monitor, hit_rate(results[name].requests)
        time_s, percent = monitor["time_ns"] / 1e9, 100 * monitor["hit_rate"]
        figure.add_scatter(x=time_s, y=percent, mode="lines", line={"color": colour, "width": 3}, row=1, col=1)
        text = f"<b>{words}</b><br>{rate.found:.0f} %; possible {rate.in_pages:.0f} %"
        label(figure, text, end_s, height, colour, xanchor="left", align="left", xshift=8, row=1, col=1)
    turns = list(range(1, 21))
    for question, answer, colour, height in ((40, 225, INK, 101), (225, 40, GREY, 71)):
        for page, dash in ((None, "solid"), (B3_PAGE, "dot")):
            share = [100 * most_found(turn, question, answer, page) for turn in turns]
            line = {"color": colour, "width": 3, "dash": dash}
            figure.add_scatter(x=turns, y=share, mode="lines", line=line, row=1, col=2)
        text = f"<b>questions of {question}, answers of {answer}</b>"
        label(figure, text, 20, height, colour, xanchor="right", row=1, col=2)
    for col, x, text in ((1, 0, "hit rate so far, of four runs"), (2, 1, "the most that is possible")):
        figure.add_hline(y=90, line={"color": ALARM, "width": 1.5, "dash": "dash"}, row=1, col=col)
        label(figure, text, x, 107, xanchor="left", xshift=4, row=1, col=col)
    label(figure, "alert under 90 %", end_s, 90, ALARM, xanchor="right", yanchor="top", row=1, col=1)
    key = "solid: token by token<br>dotted: whole pages of 128"
    label(figure, key, 20, 8, xanchor="right", align="left", row=1, col=2)
    figure.update_xaxes(title_text="simulated time (s)", range=[0, end_s], row=1, col=1)
    figure.update_xaxes(title_text="turns of a conversation", range=[1, 20], row=1, col=2)
    figure.update_yaxes(range=[-2, 110], tickvals=[0, 20, 40, 60, 80, 100])
    figure.update_yaxes(title_text="prompt tokens found in memory (%)", row=1, col=1)
    return finish(
        figure,
        "A hit rate of 79 % may be all that is possible, or a cache that loses what it should keep",
        "Claim B3 (under 90 % the cache is not reused): Llama-2-70B on four 64 GB 910B2, questions of about 40 tokens, "
        "answers of 225",
    )


BEFORE = "#A06A00"
"""Contiguous buffers: EMPTY, dark enough for a line and words."""


def page_sizes() -> go.Figure:
    """C8: utilisation against page size, and the bytes that it costs: room without a token, and tables."""
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    gqa, mha = list(c8_pages()), list(c8_pages(C8_MHA))
    places = list(range(len(C8_PAGES)))
    marks = {"mode": "lines+markers", "marker_size": 8}
    shares = [page.utilisation for page in gqa]
    figure.add_scatter(x=places, y=shares, line={"color": TOKENS, "width": 3}, **marks, row=1, col=1)
    for place, page in zip(places, gqa, strict=True):
        if page.tokens >= 16:
            above = page.utilisation > 95
            where = {"xanchor": "left" if above else "right", "xshift": 0 if above else -7, "row": 1, "col": 1}
            where |= {"yshift": 12 if above else -9}
            label(figure, f"<b>{page.utilisation:.0f} %</b>", place, page.utilisation, TOKENS, **where)
    figure.add_hrect(y0=60, y1=70, fillcolor="#EEEEEE", line_width=0, layer="below", row=1, col=1)
    figure.add_hline(y=95, line={"color": ALARM, "width": 1.5, "dash": "dash"}, row=1, col=1)
    label(figure, "told: from 60-70 % ...", 0, 60.5, xanchor="left", yanchor="bottom", row=1, col=1)
    label(figure, "... to over 95 %", 8.3, 95, ALARM, xanchor="right", yanchor="bottom", row=1, col=1)
    for name, share in c8_before().items():
        figure.add_hline(y=share, line={"color": BEFORE, "width": 2}, row=1, col=1)
        where = {"xanchor": "left", "yanchor": "bottom", "row": 1, "col": 1}
        label(figure, f"<b>{name}</b> {share:.0f} %", 0, share, BEFORE, **where)
    series = (
        ([page.unfilled_bytes for page in mha], EMPTY, "dot", "the same with 64 KV heads", -86, 24),
        ([page.unfilled_bytes for page in gqa], EMPTY, "solid", "room that no token fills", 40, -28),
        ([page.table_bytes for page in gqa], INK, "solid", "block tables", 30, 18),
    )
    for sizes, colour, dash, words, right, up in series:
        seen = [(place, size) for place, size in zip(places, sizes, strict=True) if size]  # a log axis has no 0
        line = {"color": colour, "width": 3, "dash": dash}
        x, y = [place for place, _ in seen], [size for _, size in seen]
        figure.add_scatter(x=x, y=y, line=line, **marks, row=1, col=2)
        ink = BEFORE if colour == EMPTY else colour
        label(figure, f"<b>{words}</b>", 4, log10(sizes[4]), ink, xshift=right, yshift=up, row=1, col=2)
    label(figure, "none with pages of 1", -0.3, log10(200 << 10), BEFORE, xanchor="left", row=1, col=2)
    ticks = {"tickvals": places, "ticktext": [str(size) for size in C8_PAGES], "range": [-0.4, 8.4]}
    figure.update_xaxes(title_text="tokens a page", **ticks)
    figure.update_yaxes(title_text="KV held that holds tokens (%)", range=[0, 104], row=1, col=1)
    bytes_of = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
    tens = {f"{count} {unit}": count * size for unit, size in bytes_of.items() for count in (1, 32)}
    figure.update_yaxes(
        title_text="bytes, when most is held",
        type="log",
        range=[log10(64), log10(16 << 30)],
        tickvals=list(tens.values()),
        ticktext=list(tens),
        row=1,
        col=2,
    )
    token_bytes = kv_layout(model("llama-2-70b"), tensor_parallel_size=4).token_bytes
    return finish(
        figure,
        f"Small pages cost next to no memory: an entry of a table takes {TABLE_ENTRY_BYTES} bytes, a token "
        f"{token_bytes >> 10} KiB",
        "Claim C8 (16 tokens a page is best for 70B): Llama-2-70B on four 64 GB 910B2, 32 users, "
        "about 100 + 150 tokens",
    )
