"""Draw the most telling claims: ``python examples/claims/pictures.py DIR`` writes one self-contained page each.

A1: what a token costs, turn by turn. B1: the same with either attention. C4: what each growth rule holds beside the
tokens. C5 and C6: where the free memory lies when a request fails. The others are in ``pictures_copies.py`` (A6, C1),
``pictures_paged.py`` (A7, B3, C8), ``pictures_sharing.py`` (C9) and ``pictures_capacity.py`` (C13).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import plotly.graph_objects as go
from b1_turns import KINDS, TURNS, alone, machine, measured, together, users_for
from claim import GIB, MIB, simulate
from claims_a import a1_turns
from claims_growth import C4_RULES
from look import finish, label
from oom_point import copies, held_by_op, oom_point
from pictures_capacity import tuned_servers
from pictures_copies import doubling, free_places
from pictures_paged import hit_rates, how_full, page_sizes
from pictures_sharing import shared_pages
from pieces import Piece, pieces
from plotly.subplots import make_subplots

from hbmtwin.dashboard.palette import ALARM, MEMORY, policy_colours

COPIED = "rgba(213, 94, 0, 0.2)"
"""The colour of old copies, pale."""


def slowing_chat() -> go.Figure:
    """A1: time per token and HBM against the turn, concat on a caching allocator beside paged."""
    turns = a1_turns()
    concat, paged = turns["caching"], turns["paged"]
    last = int(concat.index[-1])
    colours = policy_colours(turns)
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.06, row_heights=[0.58, 0.42])
    for name, what, table in (("paged", "paged", paged), ("caching", "concat on a caching allocator", concat)):
        line = {"color": colours[name], "width": 3}
        fill = {"fill": "tonexty", "fillcolor": COPIED} if name == "caching" else {}
        figure.add_scatter(x=table.index, y=table["step_ms"], mode="lines", line=line, row=1, col=1, **fill)
        figure.add_scatter(x=table.index, y=table["hbm_gib"], mode="lines", line=line, row=2, col=1)
        ms = table["step_ms"].iloc[-1]
        text = f"<b>{what}</b><br>{ms:.0f} ms: {1000 / ms:.0f} token/s"
        label(figure, text, last, ms, colours[name], xanchor="left", align="left", xshift=8, row=1, col=1)
    label(figure, "copies", 20, 68, MEMORY["growth_copy"].colour, row=1, col=1)
    kv = MEMORY["kv_tokens"].colour
    line = {"color": kv, "width": 3}
    figure.add_scatter(x=concat.index, y=concat["kv_gib"], mode="lines", line=line, fill="tozeroy", row=2, col=1)
    text = "<b>KV</b> of the 16<br>conversations"
    label(figure, text, last, concat["kv_gib"].iloc[-1], kv, xanchor="left", align="left", xshift=8, row=2, col=1)
    label(
        figure,
        "taken from the device at the start by <b>paged</b>",
        1.2,
        50,
        colours["paged"],
        xanchor="left",
        row=2,
        col=1,
    )
    label(figure, "... by <b>concat</b>", 8.2, 36, colours["caching"], xanchor="right", row=2, col=1)
    figure.update_xaxes(range=[1, last])
    figure.update_xaxes(title_text="turn of the conversation", row=2, col=1)
    figure.update_yaxes(title_text="time per token (ms)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="HBM (GiB)", range=[0, 61], row=2, col=1)
    added = {name: table["step_ms"].iloc[-1] - table["step_ms"].iloc[0] for name, table in turns.items()}
    copied = (added["pooled"] - added["paged"]) / added["caching"]
    return finish(
        figure,
        f"By turn 25 a token takes {concat['step_ms'].iloc[-1] / concat['step_ms'].iloc[0]:.1f} times as long; "
        f"{100 * copied:.0f} % of the rise is copying",
        "Claim A1 (15 to 2 token/s, 7.5 times as long): Llama-2-7B on a 64 GB 910B2, turns of 160 tokens, always "
        "the same 16 users",
        right=230,
    )


def two_attentions() -> go.Figure:
    """B1: a token's time against the turn with either attention, by the NPU's cost model and measured on a CPU."""
    users = users_for(210 / 55)
    assert users is not None
    turns = list(range(1, TURNS + 1))
    colours = {"standard": ALARM, "flash": MEMORY["kv_tokens"].colour}
    titles = ("Simulated: Llama-2-70B on four 910B2", "Measured: one layer of one rank, on a CPU")
    figure = make_subplots(rows=1, cols=2, subplot_titles=titles, horizontal_spacing=0.16)
    for kind in KINDS:
        line = {"color": colours[kind], "width": 3}
        figure.add_scatter(x=turns, y=together(kind, users), mode="lines", line=line, row=1, col=1)
        figure.add_scatter(x=turns, y=alone(kind), mode="lines", line=line | {"dash": "dot"}, row=1, col=1)
        figure.add_scatter(x=turns, y=measured()[kind], mode="lines+markers", line=line, row=1, col=2)
        last = together(kind, users)[-1]
        text = f"<b>{kind}</b>, {users} users"
        label(figure, text, 9.6, last, colours[kind], xanchor="right", yshift=16, row=1, col=1)
        us = measured()[kind][-1]
        label(figure, f"<b>{kind}</b>", 9.2, us, colours[kind], xanchor="right", yshift=12, row=1, col=2)
    label(figure, "dotted: 1 user, either attention", 1.2, 30, xanchor="left", row=1, col=1)
    figure.add_scatter(
        x=[10, 10],
        y=[210, 55],
        mode="markers",
        marker={"symbol": "x", "size": 10, "color": "#333333"},
        row=1,
        col=1,
    )
    label(figure, "crosses: as claimed", 1.2, 15, xanchor="left", row=1, col=1)
    figure.update_xaxes(title_text="turn of the conversation")
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title_text="time per token (ms)", row=1, col=1)
    figure.update_yaxes(title_text="attention of a token (us)", row=1, col=2)
    figure.update_annotations(selector={"font": {"size": 16}}, font_size=13)
    return finish(
        figure,
        f"The times told take {users} users at once; alone, either attention costs almost the same",
        f"Claim B1 (turn 10: 210 and 55 ms a token). Left default, uncalibrated; right {machine()}",
    )


def growth_rules() -> go.Figure:
    """C4: what each rule holds for the same twelve requests, over time, old copies among it."""
    rules = ("concat", "2x from 64", "steps of 64")
    held = {name: oom_point("C4", *C4_RULES[name], most=128).requests for name in C4_RULES}
    figure = make_subplots(rows=1, cols=3, shared_yaxes=True, horizontal_spacing=0.025)
    for col, name in enumerate(rules, start=1):
        result = simulate("C4", "results.interval_s=0.001", *C4_RULES[name])
        assert result.memory_trace is not None
        line = result.timeline
        time_s, tokens = line["time_ns"] / 1e9, line["kv_tokens"] / GIB
        figure.add_scatter(x=time_s, y=tokens, **_band("kv_tokens"), fill="tozeroy", row=1, col=col)
        made_room = tokens + line["kv_unfilled"] / GIB
        figure.add_scatter(x=time_s, y=made_room, **_band("internal"), fill="tonexty", row=1, col=col)
        steps = held_by_op(result.memory_trace).groupby("time_ns")["held"].agg(["max", "last"]) / GIB
        spikes = steps[steps["max"] > steps["last"]]
        figure.add_scatter(
            x=[x for time in spikes.index / 1e9 for x in (time, time, None)],
            y=[y for low, high in zip(spikes["last"], spikes["max"], strict=True) for y in (low, high, None)],
            mode="lines",
            line={"color": MEMORY["growth_copy"].colour, "width": 1.5},
            row=1,
            col=col,
        )
        made = copies(result)
        text = (
            f"<b>{name}: {held[name]} requests fit</b><br>these 12 peak at {made.peak_bytes / GIB:.2f} GiB<br>"
            f"{made.count:,} copies, {made.copied_bytes / GIB:,.0f} GiB"
        )
        label(
            figure, text, 24.5, 2.75, xanchor="right", yanchor="top", align="right", bgcolor="#FFFFFF", row=1, col=col
        )
    label(figure, "<b>tokens</b>", 7, 0.5, "#FFFFFF", row=1, col=1)
    label(figure, "<b>old copies</b>", 13, 1.62, MEMORY["growth_copy"].colour, xanchor="left", row=1, col=1)
    label(figure, "<b>not filled</b>", 13.5, 1.45, MEMORY["internal"].colour, xanchor="left", row=1, col=2)
    figure.update_xaxes(title_text="simulated time (s)", range=[0, 25])
    figure.update_yaxes(range=[0, 2.8])
    figure.update_yaxes(title_text="KV of 12 requests (GiB)", row=1, col=1)
    return finish(
        figure,
        "Buffers that grow in steps of 64 hold what concat holds, almost without its copies",
        "Claim C4 (2x from 64 is a good default): Llama-2-7B on a 32 GB 910B4, requests of about 150 + 250 tokens; "
        f"of static buffers {held['static']} fit",
    )


def free_but_in_pieces() -> go.Figure:
    """C5, C6: where KV lies when a request fails though more is free than it asks for."""
    rows = {
        "caching": simulate("C5"),
        "pooled, best fit": simulate("C6"),
        "pooled, next fit": simulate("C6", "memory.fit=next", "results.checkpoint_s=0.5"),
    }
    moment_ns = max(round(result.oom["time_s"] * 1e9) for result in rows.values() if result.oom is not None)
    figure = go.Figure()
    for place, (name, result) in enumerate(rows.items()):
        y = -place
        parts = pieces(result.checkpoints, moment_ns)
        oom = result.oom
        if oom is not None and oom["driver_free_bytes"]:
            parts.append(Piece("left at the driver", oom["driver_free_bytes"]))
        holes = [size for what, size in parts if what != "kv"]
        start = 0.0
        for what, size in parts:
            colour = MEMORY["kv_tokens" if what == "kv" else "external"].colour
            marker = {"color": colour, "line": {"color": "#FFFFFF", "width": 1}}
            figure.add_bar(y=[y], x=[size / GIB], base=start, width=0.4, orientation="h", marker=marker)
            if what != "kv" and size > 150 * MIB:
                label(figure, f"free<br>{size / MIB:,.0f}", start + size / GIB / 2, y)
            start += size / GIB
        free, largest = sum(holes) / GIB, max(holes) / MIB
        fate = f"{free:.2f} GiB free beside KV, in {len(holes)} pieces, the largest {largest:,.0f} MiB"
        if oom is None:
            fate = f"<b>{name}</b> lives on: at that time {fate}"
        else:
            fate = f"<b>{name}</b> dies at {oom['time_s']:.1f} s: {fate}"
            need = oom["need_bytes"]
            figure.add_bar(y=[y - 0.3], x=[need / GIB], base=0, width=0.12, orientation="h", marker={"color": ALARM})
            label(figure, f"asked for: {need / MIB:.0f} MiB", need / GIB, y - 0.3, ALARM, xanchor="left", xshift=6)
        label(figure, fate, 0, y + 0.3, xanchor="left")
    label(figure, "<b>KV</b>", 0.16, 0, "#FFFFFF")
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(title_text="memory for KV (GiB)", range=[0, 5])
    figure.update_yaxes(visible=False, range=[-2.5, 0.5])
    return finish(
        figure,
        "Two to three times the memory asked for is free, but in pieces that are too small",
        "Claims C5, C6: eight users, concatenated buffers, Llama-2-7B, 4.8 GiB for KV; free pieces in MiB",
    )


def _band(layer: str) -> dict[str, object]:
    colour = MEMORY[layer].colour
    return {"mode": "lines", "line": {"width": 0, "color": colour}, "fillcolor": colour}


PAGES: dict[str, Callable[[], go.Figure]] = {
    "claim-a1": slowing_chat,
    "claim-b1": two_attentions,
    "claim-a6": free_places,
    "claim-a7": how_full,
    "claim-b3": hit_rates,
    "claim-c1": doubling,
    "claim-c4": growth_rules,
    "claim-c5": free_but_in_pieces,
    "claim-c8": page_sizes,
    "claim-c9": shared_pages,
    "claim-c13": tuned_servers,
}


def main(arguments: list[str]) -> int:
    """Write the pages."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python examples/claims/pictures.py DIR", file=sys.stderr)
        return 2
    directory = Path(arguments[0])
    directory.mkdir(parents=True, exist_ok=True)
    for name, draw in PAGES.items():
        draw().write_html(directory / f"{name}.html", include_plotlyjs=True, config={"displayModeBar": False})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
