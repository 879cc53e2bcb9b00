"""Free pieces of one moment by their size: how many bytes lie in pieces of which size, and what the largest is."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from hbmtwin.dashboard.figures import style
from hbmtwin.dashboard.palette import ALARM, MEMORY
from hbmtwin.sim.phrases import Lang, Phrase

SIZE = Phrase("size of a free piece", "空闲块大小")
FREE = Phrase("free in such pieces (MiB)", "该大小空闲块合计（MiB）")
PIECES = Phrase("pieces", "块")
ASKED = Phrase("asked: {size}", "请求：{size}")
MIB = 1 << 20
INACTIVE = "inactive"


def free_pieces(checkpoints: pd.DataFrame, time_ns: int) -> npt.NDArray[np.int64]:
    """Bytes of each block that an allocator keeps and nobody uses, at the latest moment not after *time_ns*."""
    times = checkpoints["time_ns"]
    before = times[times <= time_ns]
    at = checkpoints[times == (before.max() if len(before) else times.min())]
    at = at[at["op_index"] == at["op_index"].max()]
    free = at[(at["level"] == "block") & (at["state"] == INACTIVE)]
    sizes: npt.NDArray[np.int64] = free["size"].to_numpy(dtype=np.int64)
    return sizes


def free_sizes(pieces: npt.NDArray[np.int64], asked_bytes: int | None, lang: Lang) -> go.Figure:
    """Bytes free against the power of two below the size of a piece; what was asked in vain is marked. O(pieces)."""

    def said(phrase: Phrase, **values: object) -> str:
        return (phrase.zh if lang == "zh" else phrase.en).format(**values)

    powers = np.floor(np.log2(np.maximum(pieces, 1))).astype(int)
    low = int(min(powers.min(initial=40), _power(asked_bytes)))
    high = int(max(powers.max(initial=9), _power(asked_bytes) if asked_bytes else 9))
    classes = np.arange(min(low, high), high + 1)
    sums = [int(pieces[powers == power].sum()) / MIB for power in classes]
    counts = [int((powers == power).sum()) for power in classes]
    figure = go.Figure(
        go.Bar(
            x=[_size(1 << int(power)) for power in classes],
            y=sums,
            customdata=counts,
            marker={"color": MEMORY["external"].colour},
            hovertemplate=f"%{{y:,.1f}} MiB, %{{customdata:,}} {said(PIECES)}<extra></extra>",
        )
    )
    style(figure, 320)
    figure.update_xaxes(title_text=said(SIZE), type="category")
    figure.update_yaxes(title_text=said(FREE), rangemode="tozero")
    if asked_bytes:
        figure.add_vline(x=_size(1 << _power(asked_bytes)), line={"color": ALARM, "width": 2, "dash": "dash"})
        figure.add_annotation(
            x=_size(1 << _power(asked_bytes)),
            y=1,
            yref="paper",
            yanchor="bottom",
            text=said(ASKED, size=_size(asked_bytes)),
            showarrow=False,
            font={"color": ALARM},
        )
    return figure


def _power(size: int | None) -> int:
    return 40 if size is None else max(0, size.bit_length() - 1)


def _size(size: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (MIB, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g} {name}"
    return f"{size} B"
