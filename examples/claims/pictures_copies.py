"""Pictures of memory that is there and does not suffice.

A6: the pool in address order when a request fails. C1: KV while buffers double, token by token and within the step.
"""

from __future__ import annotations

from itertools import accumulate

import plotly.graph_objects as go
from claim import GIB, MIB, simulate
from claims_copies import C1_ALL, C1_MIXED, C1_ONE_BY_ONE, c1_jump, c1_steps
from claims_fragments import a6_pool
from look import finish, label
from oom_point import held_by_op
from pieces import Piece
from plotly.subplots import make_subplots

from hbmtwin import Result
from hbmtwin.dashboard.palette import ALARM, INK, MEMORY

KV = MEMORY["kv_tokens"].colour
FREE = MEMORY["external"].colour
OLD = MEMORY["growth_copy"].colour
GREY = "#777777"


def free_places() -> go.Figure:
    """A6: buffers and free places in address order, what is asked for, and the same buffers side by side."""
    died = simulate("A6")
    oom, pool = died.oom, a6_pool(died)
    assert oom is not None
    need, free = oom["need_bytes"], oom["free_bytes"]
    figure = go.Figure()
    held = [piece for piece in pool if piece.what == "kv"]
    for y, row in ((0.0, pool), (-1.9, [*held, Piece("free", free)])):
        ends = list(accumulate(piece.size for piece in row))
        for piece, end in zip(row, ends, strict=True):
            start, colour = (end - piece.size) / GIB, KV if piece.what == "kv" else FREE
            marker = {"color": colour, "line": {"color": "#FFFFFF", "width": 2}}
            figure.add_bar(y=[y], x=[piece.size / GIB], base=start, width=0.55, orientation="h", marker=marker)
            text, ink = ("KV", "#FFFFFF") if piece.what == "kv" else (f"{piece.size / MIB:,.0f}", INK)
            if piece.what == "kv" or piece.size < free:
                label(figure, text, start + piece.size / GIB / 2, y, ink)
    asked = {"color": ALARM, "line_width": 0}
    side = (sum(piece.size for piece in held)) / GIB
    for y, base in ((-0.62, 0.0), (-2.52, side)):
        figure.add_bar(y=[y], x=[need / GIB], base=base, width=0.2, orientation="h", marker=asked)
        text = f"asked for: {need / MIB:,.0f} MiB, in one piece"
        label(figure, text, base + need / GIB, y, ALARM, xanchor="left", xshift=6)
    label(figure, f"{free / MIB:,.0f} MiB free in one piece", side + free / GIB / 2, -1.9)
    largest = f"{oom['largest_free_bytes'] / MIB:,.0f}"
    holes = len(pool) - len(held)
    text = f"<b>when the request fails</b>: {free / MIB:,.0f} MiB free, in {holes} pieces of at most {largest}"
    label(figure, text, 0, 0.45, xanchor="left")
    text = f"<b>the same {len(held)} buffers placed side by side</b> in an empty pool"
    label(figure, text, 0, -1.45, xanchor="left")
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="address in the pool (GiB)", range=[0, 4.85])
    figure.update_yaxes(visible=False, range=[-2.8, 0.75])
    return finish(
        figure,
        f"{need / MIB:,.0f} MiB are asked for and {free / MIB:,.0f} free, but no piece is larger than {largest}",
        "Claim A6 (freed places are not adjacent): Llama-2-7B, chats of 256 MiB, every other one of which has ended",
    )


def doubling() -> go.Figure:
    """C1: KV against the generated token, and operation by operation in the step of the 128th."""
    died, jumped, one_by_one = simulate("C1"), simulate("C1", C1_ALL), simulate("C1", C1_ONE_BY_ONE)
    mixed = simulate("C1", C1_MIXED)
    oom, jump = died.oom, c1_jump(jumped)
    assert oom is not None
    room = (oom["limit_bytes"] - oom["weights_bytes"] - oom["static_bytes"]) / GIB
    figure = make_subplots(rows=1, cols=2, shared_yaxes=True, horizontal_spacing=0.03, column_widths=[0.58, 0.42])
    tokens = list(range(1, 220))
    for result, colour in ((mixed, GREY), (one_by_one, KV), (jumped, KV)):
        steps = c1_steps(result)
        last = steps["last"].reindex(range(220)).ffill() / GIB
        line = {"color": colour, "width": 2 if result is mixed else 3, "shape": "hv"}
        figure.add_scatter(x=tokens, y=last.iloc[1:], mode="lines", line=line, row=1, col=1)
    spike = [jump.after / GIB, jump.peak / GIB]
    figure.add_scatter(x=[128, 128], y=spike, mode="lines", line={"color": OLD, "width": 4}, row=1, col=1)
    label(figure, f"<b>{jump.before / GIB:.0f} GiB</b>", 60, 10.7, KV, row=1, col=1)
    label(figure, f"<b>{jump.after / GIB:.0f} GiB</b>", 175, 25.3, KV, row=1, col=1)
    text = f"<b>{jump.peak / GIB:.0f} GiB</b> while old<br>and new buffers live"
    label(figure, text, 124, jump.peak / GIB, OLD, xanchor="right", align="right", yshift=-12, row=1, col=1)
    label(figure, "prompts of 257 to 512 tokens", 217, 14.6, GREY, xanchor="right", row=1, col=1)
    for x, (result, name) in enumerate(((died, "all at once"), (one_by_one, "one by one"))):
        held = _within_the_step(result)
        colour = OLD if result is died else KV
        line = {"color": colour, "width": 3}
        figure.add_scatter(x=list(range(len(held))), y=held, mode="lines", line=line, row=1, col=2)
        if x == 0:
            label(figure, f"<b>{name}</b>", 30, 30.5, colour, xanchor="right", align="right", row=1, col=2)
        else:
            label(figure, f"<b>{name}</b>: {max(held):.2f}", 60, 17.5, colour, xanchor="left", row=1, col=2)
    end = len(_within_the_step(died)) - 1
    figure.add_scatter(
        x=[end],
        y=[_within_the_step(died)[-1]],
        mode="markers",
        marker={"color": ALARM, "size": 12, "symbol": "x"},
        row=1,
        col=2,
    )
    label(figure, "<b>dies</b>", end, 31.5, ALARM, xanchor="left", xshift=10, yshift=-4, row=1, col=2)
    for col in (1, 2):
        figure.add_hline(y=room, line={"color": ALARM, "width": 1.5, "dash": "dot"}, row=1, col=col)
    label(figure, "left beside the weights", 96, room, ALARM, xanchor="right", yshift=-10, row=1, col=2)
    figure.update_xaxes(title_text="generated token", range=[1, 219], tickvals=[1, 64, 128, 192], row=1, col=1)
    figure.update_xaxes(title_text="allocations and frees while the 128th is stored", range=[0, 98], row=1, col=2)
    figure.update_yaxes(range=[0, 38])
    figure.update_yaxes(title_text="KV of 48 requests (GiB)", row=1, col=1)
    return finish(
        figure,
        "For a moment doubling takes three times the bytes, unless old buffers go one by one",
        "Claim C1 (12 to 24 GB at the 128th token): Llama-2-7B on 75 % of a 64 GB 910B2, 48 prompts of 385 tokens",
    )


def _within_the_step(result: Result) -> list[float]:
    """GiB of KV after each of its operations in the step of the 128th token, the state before it first."""
    assert result.memory_trace is not None
    ops = held_by_op(result.memory_trace)
    before = ops.loc[ops["step"] < 128, "held"].iloc[-1]
    return [before / GIB, *(ops.loc[ops["step"] == 128, "held"] / GIB)]
