"""One colour for one meaning, in every figure.

The memory colours are Okabe and Ito's, which stay apart for the common kinds of colour blindness; what is free is
pale, so that the eye reads "dark = in use". Policies take darker tones of another family, so that a line is never
mistaken for a kind of memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import cycle
from typing import NamedTuple


class Layer(NamedTuple):
    """One band of the memory picture: the timeline columns that it adds up, and how it looks."""

    label: str
    columns: tuple[str, ...]
    colour: str


MEMORY: dict[str, Layer] = {
    "static": Layer("Context, libraries, other processes", ("tenants", "static"), "#6E6E6E"),
    "weights": Layer("Weights", ("weights",), "#A3A3A3"),
    "activations": Layer("Activations", ("activations",), "#C9BBA8"),
    "kv_tokens": Layer("KV: live tokens", ("kv_tokens",), "#0072B2"),
    "kv_padding": Layer("KV: padding", ("kv_padding",), "#8A6FB0"),
    "kv_state": Layer("KV: states (Mamba)", ("kv_state",), "#00505C"),
    "kv_parked": Layer("KV: parked histories", ("kv_parked",), "#56B4E9"),
    "kv_cached": Layer("KV: prefix cache", ("kv_cached",), "#009E73"),
    "internal": Layer("Internal: held, no token in it", ("kv_unfilled", "rounding"), "#E69F00"),
    "growth_copy": Layer("Old copies of growing buffers", ("growth_copy",), "#D55E00"),
    "external": Layer("External: free, but in pieces", ("external",), "#CC79A7"),
    "pending_events": Layer("Freed, event pending", ("pending_events",), "#F0E442"),
    "kv_pool_free": Layer("Free in the KV pool", ("kv_pool_free",), "#D6E6F2"),
    "driver_free": Layer("Free at the driver", ("driver_free",), "#F1F1F1"),
}
"""Bands from the bottom of the stack to its top; their columns are all byte columns of a timeline, each once."""

POOL_TENSOR = Layer("KV pool tensors (their blocks: below)", (), "#A9C9E2")
UNRESERVED = Layer("Reserved by no allocator", (), MEMORY["driver_free"].colour)
PARTLY_FILLED = Layer("KV block, partly filled", (), "#7FA6A0")
ARRIVALS, PROMPTS, OUTPUTS = "#4C566A", "#2F6690", "#B56B45"
HOLE = "#FFFFFF"
ALARM = "#B00020"
INK = "#222222"
GRID = "#E3E3E3"

_POLICIES = ("#332288", "#999933", "#882255", "#2A9D8F", "#6699CC", "#AA4499", "#661100", "#117733")
_KNOWN = ("caching", "pooled", "doubling", "paged")


def policy_colours(names: Iterable[str]) -> dict[str, str]:
    """Colours of the lines of a figure: fixed for the four presets, the others in turn for variants."""
    names = list(names)
    taken = [_POLICIES[_KNOWN.index(name)] for name in names if name in _KNOWN]
    free = cycle([colour for colour in (*_POLICIES[len(_KNOWN) :], *_POLICIES) if colour not in taken])
    return {name: _POLICIES[_KNOWN.index(name)] if name in _KNOWN else next(free) for name in names}
