"""One colour for one meaning, in every figure.

The memory colours are Okabe and Ito's, which stay apart for the common kinds of colour blindness; what is free is
pale, so that the eye reads "dark = in use". Policies take darker tones of another family, so that a line is never
mistaken for a kind of memory. On a dark page what is free is dim, what is in use keeps its colour, and what would be
too dark to see takes a lighter one (:data:`NIGHT`).
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple

from hbmtwin.sim.phrases import Phrase


class Layer(NamedTuple):
    """One band of the memory picture: the timeline columns that it adds up, and how it looks."""

    label: Phrase
    columns: tuple[str, ...]
    colour: str


MEMORY: dict[str, Layer] = {
    "static": Layer(
        Phrase("Context, libraries, other processes", "运行时上下文、通信库、其他进程"),
        ("tenants", "static"),
        "#6E6E6E",
    ),
    "weights": Layer(Phrase("Weights", "权重"), ("weights",), "#A3A3A3"),
    "activations": Layer(Phrase("Activations", "激活"), ("activations",), "#C9BBA8"),
    "kv_tokens": Layer(Phrase("KV: live tokens", "KV 缓存：在用 token"), ("kv_tokens",), "#0072B2"),
    "kv_padding": Layer(Phrase("KV: padding", "KV 缓存：补齐"), ("kv_padding",), "#8A6FB0"),
    "kv_state": Layer(Phrase("KV: states (Mamba)", "KV 缓存：状态（Mamba）"), ("kv_state",), "#00505C"),
    "kv_parked": Layer(Phrase("KV: parked histories", "KV 缓存：保留的历史会话"), ("kv_parked",), "#56B4E9"),
    "kv_cached": Layer(Phrase("KV: prefix cache", "KV 缓存：前缀缓存"), ("kv_cached",), "#009E73"),
    "internal": Layer(
        Phrase("Internal: held, no token in it", "内部碎片：已占用但无 token"), ("kv_unfilled", "rounding"), "#E69F00"
    ),
    "growth_copy": Layer(Phrase("Old copies of growing buffers", "增长缓冲区的旧副本"), ("growth_copy",), "#D55E00"),
    "external": Layer(Phrase("External: free, but in pieces", "显存碎片：空闲但不连续"), ("external",), "#CC79A7"),
    "pending_events": Layer(Phrase("Freed, event pending", "已释放，等待事件"), ("pending_events",), "#F0E442"),
    "kv_pool_free": Layer(Phrase("Free in the KV pool", "KV 池内空闲"), ("kv_pool_free",), "#D6E6F2"),
    "driver_free": Layer(Phrase("Free at the driver", "驱动层空闲"), ("driver_free",), "#F1F1F1"),
}
"""Bands from the bottom of the stack to its top; their columns are all byte columns of a timeline, each once."""

POOL_TENSOR = Layer(Phrase("KV pool tensors (their blocks: below)", "KV 池张量（其中的块见下图）"), (), "#A9C9E2")
UNRESERVED = Layer(Phrase("Reserved by no allocator", "未被任何分配器预留"), (), MEMORY["driver_free"].colour)
PARTLY_FILLED = Layer(Phrase("KV block, partly filled", "KV 块：部分填充"), (), "#7FA6A0")
ARRIVALS, PROMPTS, OUTPUTS = "#4C566A", "#2F6690", "#B56B45"
PAPER = "#FFFFFF"
HOLE = PAPER
NOTE_PAPER = "rgba(255,255,255,0.85)"
"""Under words that stand on a picture."""
LEAST, SLOWEST, MOST_SERVED = "#F3F1EC", "#5A2A00", "#08306B"
"""Ends of the scales of heat maps: from the page's light to the other; what lies between is the same on both pages."""
NO_NUMBER = "#DDDDDD"
"""Of a heat map's cell that has none."""
DID_NOT_START, PALE = "#444444", "#C8C8C8"
"""What died before it began, and lines that stand behind others."""
ALARM = "#B00020"
INK = "#222222"
ROOF = "#333333"
AXIS = "#888888"
GRID = "#E3E3E3"

_POLICIES = ("#332288", "#999933", "#882255", "#2A9D8F", "#6699CC", "#AA4499", "#661100", "#117733")
_KNOWN = ("caching", "pooled", "doubling", "paged")


def policy_colours(names: Iterable[str]) -> dict[str, str]:
    """Colours of the lines of a figure: fixed for the four presets, the others in turn for variants."""
    names = list(names)
    taken = [_POLICIES[_KNOWN.index(name)] for name in names if name in _KNOWN]
    free = cycle([colour for colour in (*_POLICIES[len(_KNOWN) :], *_POLICIES) if colour not in taken])
    return {name: _POLICIES[_KNOWN.index(name)] if name in _KNOWN else next(free) for name in names}


NIGHT: dict[str, str] = {
    PAPER: "#0E1117",
    NOTE_PAPER: "rgba(14,17,23,0.85)",
    INK: "#E6E6E6",
    ROOF: "#CFCFCF",
    AXIS: "#8A8F99",
    GRID: "#3A3F4B",
    ALARM: "#FF6B6B",
    MEMORY["driver_free"].colour: "#2C323C",
    MEMORY["kv_pool_free"].colour: "#20384C",
    MEMORY["kv_state"].colour: "#2C94A3",
    POOL_TENSOR.colour: "#3F6785",
    ARRIVALS: "#93A1BD",
    PROMPTS: "#6BA7D6",
    LEAST: "#23262E",
    SLOWEST: "#FFE3B3",
    MOST_SERVED: "#D6EEFF",
    NO_NUMBER: "#4A505C",
    DID_NOT_START: "#C9CED8",
    PALE: "#565D6B",
    "#332288": "#9B8CFF",
    "#882255": "#D1588E",
    "#AA4499": "#C86AB8",
    "#661100": "#C8553D",
    "#117733": "#3FAE64",
}
"""On a dark page: what a colour becomes that is meant for a white one. The others are the same on both."""
