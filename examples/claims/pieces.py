"""What an address map shows of the memory that KV lies in."""

from __future__ import annotations

from typing import NamedTuple

import pandas as pd


class Piece(NamedTuple):
    """A run of bytes that one buffer has, or that nobody has."""

    what: str
    """A tag, as ``kv``, or ``free``."""
    size: int


def pieces(checkpoints: pd.DataFrame, moment_ns: int | None = None) -> list[Piece]:
    """The segments that hold KV in the last map (up to a moment), in address order."""
    rows = checkpoints[checkpoints["level"] != "kv_block"]
    if moment_ns is not None:
        rows = rows[rows["time_ns"] <= moment_ns]
    rows = rows[rows["time_ns"] == rows["time_ns"].max()]
    segment = (rows["level"] == "segment").cumsum()
    holds_kv = (rows["tag"] == "kv").groupby(segment).transform("any")
    blocks = rows[holds_kv & (rows["level"] == "block")]
    return [Piece(tag or "free", int(size)) for tag, size in zip(blocks["tag"], blocks["size"], strict=True)]
