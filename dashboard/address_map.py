"""The address map: where every segment, block and hole lies at one moment.

Addresses run from left to right and from top to bottom, like text: the device is cut into rows of equal length, so
that neighbours stay neighbours and the size of a hole can be seen. A block pool is drawn below as one cell a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from hbmtwin.api import Result
from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.palette import ALARM, HOLE, INK, MEMORY, NOTE_PAPER, PARTLY_FILLED, POOL_TENSOR, UNRESERVED
from hbmtwin.dashboard.verdict import bytes_text
from hbmtwin.sim.phrases import Count, Lang, Phrase, Said

MIB = 2**20
ROWS = 32
"""Rows at most; their length is the next power of two."""
GRID_COLUMNS = 64

Pieces = list[tuple[int, int, str]]
"""``(start, end, kind)`` in address order."""

_COLOURS = {
    **{key: (layer.label, layer.colour) for key, layer in MEMORY.items()},
    "unreserved": (UNRESERVED.label, UNRESERVED.colour),
    "pool": (POOL_TENSOR.label, POOL_TENSOR.colour),
    "kv": (Phrase("KV cache", "KV 缓存"), MEMORY["kv_tokens"].colour),
    "partly": (PARTLY_FILLED.label, PARTLY_FILLED.colour),
    "hole": (Phrase("Hole: cached by the allocator, in nobody's use", "空洞：分配器缓存着，无人使用"), HOLE),
}
DEVICE_MEMORY = Phrase("device memory", "设备显存")
BLOCK_POOL = Phrase("KV block pool: {count} blocks, by id", "KV 块池：{count} 块，按块号排列")
ADDRESS = Phrase("address within its row (MiB)", "行内地址（MiB）")
FIRST_ADDRESS = Phrase("row's first address (GiB)", "行首地址（GiB）")
LARGEST_HOLE = Phrase(
    "largest of {count} holes: {largest}; all: {all}", "{count} 个空洞中最大的：{largest}；合计：{all}"
)
BLOCK = Phrase("block {id}<extra></extra>", "块 {id}<extra></extra>")
BLOCK_ID = Phrase("block id within its row", "行内块号")
FIRST_ID = Phrase("first id", "行首块号")

_TAGS = {"weight": "weights", "activation": "activations", "workspace": "activations", "kv": "pool"}
_STATES = {"running": "kv_tokens", "parked": "kv_parked", "cached": "kv_cached", "growth_copy": "growth_copy"}


def moments(result: Result) -> list[int]:
    """Times in ns at which there is a map, in order."""
    return [int(t) for t in np.unique(result.checkpoints["time_ns"].to_numpy())]


def address_map(result: Result, time_ns: int, lang: Lang = "en") -> go.Figure:
    """The map at the latest recorded moment that is not after *time_ns* (the first one, if there is none before)."""
    at = result.checkpoints
    times = at["time_ns"]
    at = at[times == max(times.min(), times[times <= time_ns].max() if (times <= time_ns).any() else 0)]
    at = at[at["op_index"] == at["op_index"].max()]
    segments, blocks, kv = (
        at[at["level"] == level].sort_values("address") for level in ("segment", "block", "kv_block")
    )
    in_place = bool(kv["address"].isin(blocks.loc[blocks["tag"] == "kv", "address"]).all())
    grid = _blocks(kv.iloc[:0] if in_place else kv, result.summary["kv_block_bytes"])
    pieces = _pieces(segments, blocks, kv if in_place else kv.iloc[:0])
    if kv.empty:  # no map of the blocks, or of how full the buffers are, was kept of that moment
        pieces = [(start, stop, "kv" if kind == "pool" else kind) for start, stop, kind in pieces]
    static_bytes = int(result.timeline["static"].iloc[0])  # placed first, so at the bottom, and nobody's block
    if pieces and 0 < static_bytes <= pieces[0][0]:
        pieces.insert(0, (0, static_bytes, "static"))
    titles = (Said.of(DEVICE_MEMORY), Said.of(BLOCK_POOL, count=Count(len(grid))))
    figure = make_subplots(
        rows=1 if grid.empty else 2,
        cols=1,
        row_heights=None if grid.empty else [0.64, 0.36],
        vertical_spacing=0.16,
        subplot_titles=None if grid.empty else [title.text(lang) for title in titles],
    )
    capacity = int(result.summary["capacity_bytes"])
    end = max(capacity, pieces[-1][1] if pieces else 0)
    row_bytes = max(MIB, 1 << (-(-end // ROWS) - 1).bit_length())
    drawn = _draw_pieces(figure, pieces, end, row_bytes, lang)
    _mark_largest_hole(figure, pieces, row_bytes, lang)
    if not grid.empty:
        _draw_grid(figure, grid, drawn, lang, has_states=bool(result.timeline["kv_state"].any()))
    height = 640 if grid.empty else 860
    style(figure, height)
    figure.update_layout(
        barmode="overlay",
        bargap=0.12,
        legend={"orientation": "h", "y": -85 / height, "yanchor": "top"},
        hovermode="closest",
        margin={"b": 130},
    )
    figure.update_xaxes(
        title_text=Said.of(ADDRESS).text(lang),
        range=[0, row_bytes / MIB],
        row=1,
        col=1,
    )
    figure.update_yaxes(
        title_text=Said.of(FIRST_ADDRESS).text(lang),
        range=[-(-end // row_bytes) - 0.4, -0.6],
        tickvals=list(range(0, -(-end // row_bytes), 2)),
        ticktext=[f"{row * row_bytes / 2**30:g}" for row in range(0, -(-end // row_bytes), 2)],
        row=1,
        col=1,
    )
    return figure


def _pieces(segments: pd.DataFrame, blocks: pd.DataFrame, buffers: pd.DataFrame) -> Pieces:
    """Cut the device's reserved part into pieces of one kind; equal neighbours are merged, unless they are holes."""
    filled = {
        int(a): (int(size), int(tokens), str(state))
        for a, size, tokens, state in buffers[["address", "size", "requested", "state"]].itertuples(index=False)
    }
    raw: Pieces = []
    for address, size, requested, state, tag in blocks[["address", "size", "requested", "state", "tag"]].itertuples(
        index=False
    ):
        end = address + size
        if state == "inactive":
            raw.append((address, end, "hole"))
        elif state == "active_pending_free":
            raw.append((address, end, "pending_events"))
        elif state == "active_allocated" and address in filled:
            _, tokens, kind = filled[address]
            raw.append((address, address + tokens, _STATES.get(kind, "internal")))
            raw.append((address + tokens, end, "internal" if kind != "growth_copy" else "growth_copy"))
        elif state == "active_allocated":
            raw.append((address, address + requested, _TAGS.get(str(tag), "static")))
            raw.append((address + requested, end, "internal"))
    merged: Pieces = []
    starts = set(segments["address"].tolist())
    for start, end, kind in raw:
        if start == end:
            continue
        if merged and merged[-1][1:] == (start, kind) and not (kind == "hole" and start in starts):
            merged[-1] = (merged[-1][0], end, kind)
        else:
            merged.append((start, end, kind))
    return merged


def _split(pieces: Pieces, row_bytes: int) -> dict[str, list[tuple[int, int, int, int]]]:
    """Pieces by kind as (row, offset, length, whole size), cut where a row ends."""
    by_kind: dict[str, list[tuple[int, int, int, int]]] = {}
    for start, end, kind in pieces:
        out = by_kind.setdefault(kind, [])
        at = start
        while at < end:
            row = at // row_bytes
            stop = min(end, (row + 1) * row_bytes)
            out.append((row, at - row * row_bytes, stop - at, end - start))
            at = stop
    return by_kind


def _draw_pieces(figure: go.Figure, pieces: Pieces, end: int, row_bytes: int, lang: Lang) -> set[str]:
    """Draw them, and return of which kinds there were any."""
    by_kind = _split(pieces, row_bytes)
    by_kind["unreserved"] = _split([(0, end, "unreserved")], row_bytes)["unreserved"]  # behind everything
    for kind in ("unreserved", *(kind for kind in _COLOURS if kind != "unreserved")):
        said, colour = _COLOURS[kind]
        label = Said.of(said).text(lang)
        rows = by_kind.get(kind)
        if not rows:
            continue
        table: npt.NDArray[np.int64] = np.array(rows, dtype=np.int64)
        figure.add_trace(
            go.Bar(
                orientation="h",
                y=table[:, 0].astype(np.int16),
                base=(table[:, 1] / MIB).astype(np.float32),
                x=(table[:, 2] / MIB).astype(np.float32),
                customdata=(table[:, 3] / MIB).astype(np.float32),
                name=label,
                marker={"color": colour, "line": {"width": 0.6 if kind == "hole" else 0, "color": INK}},
                hovertemplate=f"{label}: %{{customdata:,.2f}} MiB<extra></extra>",
                hoverinfo="skip" if kind == "unreserved" else None,
            ),
            row=1,
            col=1,
        )
    return set(by_kind)


def _mark_largest_hole(figure: go.Figure, pieces: Pieces, row_bytes: int, lang: Lang) -> None:
    holes = [(end - start, start) for start, end, kind in pieces if kind == "hole"]
    if not holes:
        return
    size, start = max(holes)
    row, offset = divmod(start, row_bytes)
    seen = min(size, row_bytes - offset)
    figure.add_shape(
        type="rect",
        x0=offset / MIB,
        x1=(offset + seen) / MIB,
        y0=row - 0.46,
        y1=row + 0.46,
        line={"color": ALARM, "width": 2},
        row=1,
        col=1,
    )
    middle = (offset + seen / 2) / row_bytes
    sizes = {"largest": bytes_text(size), "all": bytes_text(sum(length for length, _ in holes))}
    figure.add_annotation(
        x=middle * row_bytes / MIB,
        xanchor="left" if middle < 0.3 else "right" if middle > 0.7 else "center",
        y=row - 0.46,
        text=Said.of(LARGEST_HOLE, count=Count(len(holes)), **sizes).text(lang),
        font={"color": ALARM},
        bgcolor=NOTE_PAPER,
        arrowcolor=ALARM,
        ax=0,
        ay=-26,
        row=1,
        col=1,
    )


def _blocks(pieces: pd.DataFrame, block_bytes: int | None) -> pd.DataFrame:
    """A row for each block: of a pool, neighbours that are alike come in one piece. None: a piece is a block."""
    if block_bytes is None:
        return pieces
    repeated = pieces.loc[pieces.index.repeat(pieces["size"] // block_bytes)]
    return repeated.assign(requested=repeated["requested"] * block_bytes // repeated["size"], size=block_bytes)


def _draw_grid(figure: go.Figure, grid: pd.DataFrame, drawn: set[str], lang: Lang, *, has_states: bool) -> None:
    """Where a model has states, a block in use without any token holds one. The legend has those *drawn* already."""
    kinds = ["kv_pool_free", "kv_tokens", "partly", "kv_parked", "kv_cached", "kv_state"]
    code = grid["state"].map({"running": 1, "parked": 3, "cached": 4}).fillna(0).to_numpy(dtype=np.int8)
    if has_states:
        code[(code == 1) & (grid["requested"] == 0).to_numpy()] = kinds.index("kv_state")
    code[(code == 1) & (grid["requested"] < grid["size"]).to_numpy()] = 2
    columns = min(len(code), max(GRID_COLUMNS, int(np.ceil(np.sqrt(len(code) * 6)))))
    height = -(-len(code) // columns)
    cells: npt.NDArray[Any] = np.full(height * columns, np.nan)
    cells[: len(code)] = code
    scale = [[(i + side) / len(kinds), _COLOURS[kind][1]] for i, kind in enumerate(kinds) for side in (0, 1)]
    figure.add_trace(
        go.Heatmap(
            z=cells.reshape(height, columns).astype(np.float32),
            zmin=-0.5,
            zmax=len(kinds) - 0.5,
            colorscale=scale,
            showscale=False,
            xgap=1 if columns <= 200 else 0,
            ygap=1 if columns <= 200 else 0,
            hovertemplate=Said.of(BLOCK, id=f"%{{x}} + {columns} × %{{y}}").text(lang),
        ),
        row=2,
        col=1,
    )
    for kind in (kinds[i] for i in np.unique(code)):
        if kind not in drawn:
            said, colour = _COLOURS[kind]
            key = go.Bar(x=[None], y=[None], name=Said.of(said).text(lang), marker={"color": colour})
            figure.add_trace(key, row=1, col=1)
    figure.update_xaxes(title_text=Said.of(BLOCK_ID).text(lang), row=2, col=1)
    figure.update_yaxes(
        title_text=Said.of(FIRST_ID).text(lang),
        autorange="reversed",
        tickvals=list(range(0, height, max(1, height // 8))),
        ticktext=[f"{row * columns:,}" for row in range(0, height, max(1, height // 8))],
        row=2,
        col=1,
    )
