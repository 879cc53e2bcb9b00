"""Traffic by name: ``workload.preset`` stands for keys of the catalog, and a key that a user gives stands before them.

::

    defaults  <  workload.preset  <  file  <  --set

A key is given where the file or the command line has it, also with its default. Who gives users, clients, a ramp, or
all requests at once has said when they arrive, so the preset's keys that would contradict it are left out. A saved
scenario names the preset and leaves out what it says, so that another preset may still be set over it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from math import inf
from typing import Any

from hbmtwin.kernels.weights import weight_bytes
from hbmtwin.sim.catalog import CatalogError, model, models, workload_preset
from hbmtwin.workloads.records import Request, Source, Status

PRESET = "workload.preset"
_RATE, _CURVE = "workload.request_rate", "workload.rate_curve"
WHOLE = tuple(f"workload.{key}" for key in ("trace", "model", "multi_turn", "shared_prefix", "prefix_repetition"))
"""Keys that say by themselves who asks for what."""
_NAMED = 5
"""Models that a remark names."""
_LOOKED_AT = 1000
"""Requests of a preset that are held against the context: what a run of a minute has, in milliseconds."""


def with_workload_preset(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The dotted keys of a scenario, and those of its preset that are not among them.

    Raise CatalogError for an unknown preset, and for one beside a key that leaves it nothing to say.
    """
    name = keys.get(PRESET)
    if not isinstance(name, str):  # none, or a value that the scenario refuses
        return dict(keys)
    preset = workload_preset(name)
    for key in WHOLE:
        if keys.get(key) is not None:
            raise CatalogError(f"{key} says by itself who asks for what; give one of the two")
    left_out: tuple[str, ...] = ()
    if any(keys.get(f"workload.{key}") is not None for key in ("users", "clients", "ramp_up_strategy")):
        left_out = (_RATE, _CURVE)
    elif keys.get(_RATE) == inf or keys.get("workload.rescale_gaps"):
        left_out = (_CURVE,)
    return {**{key: value for key, value in preset.keys.items() if key not in left_out}, **keys}


def without_preset_keys(tree: Mapping[str, dict[str, Any]], preset: str | None) -> None:
    """Take the keys that *preset* says in the same words out of the sections of a scenario's *tree*, in place."""
    if preset is None:
        return
    for key, value in workload_preset(preset).keys.items():
        section, _, name = key.partition(".")
        if tree[section].get(name) == value:
            del tree[section][name]


def context_notes(preset: str | None, source: Source, longest_request: int) -> tuple[str, ...]:
    """A remark where requests of a preset are longer than the server takes, with the cure and who holds them.

    *source* is asked anew, as if every answer came at once: at most a thousand requests.
    """
    if preset is None:
        return ()
    looked_at = sorted(r.prompt_tokens + r.output_tokens for r in islice(_requests(source), _LOOKED_AT))
    longer = sum(tokens > longest_request for tokens in looked_at)
    if not longer:
        return ()
    are = "is" if longer == 1 else "are"
    of = f"the first {_LOOKED_AT}" if len(looked_at) == _LOOKED_AT else f"its {len(looked_at)}"
    return (
        f"{PRESET} = {preset!r}: {longer} of {of} requests {are} longer than max_model_len, {longest_request} (up "
        f"to {looked_at[-1]} tokens), and {are} rejected, which ends their sessions: take a model of a longer context, "
        "or clip workload.prompt_tokens, first_prompt_tokens or session.turns. "
        f"{_who_holds(looked_at, longest_request)}",
    )


def _who_holds(lengths: Sequence[int], longest_request: int) -> str:
    """Which models have a position for every token of 99 in 100 requests, from their lengths in order."""
    p99 = lengths[-(-len(lengths) * 99 // 100) - 1]
    if p99 <= longest_request:
        return f"99 % are of at most {p99} tokens, and fit"
    names = sorted(
        (name for name in models() if model(name).max_position_embeddings >= p99),
        key=lambda name: weight_bytes(model(name)),
    )
    if not names:
        return f"The p99, {p99} tokens, is held by no model of the catalog"
    named, others = names[:_NAMED], len(names) - _NAMED
    more = [f"{others} larger ones"] if others > 0 else []
    *first, last = named + more
    return f"The p99, {p99} tokens, is held by {' and '.join([', '.join(first)] * bool(first) + [last])}"


def _requests(source: Source) -> Iterator[Request]:
    for first in source.open():
        r: Request | None = first
        while r is not None:
            yield r
            r = source.next_turn(r, r.arrival_ns, Status.COMPLETED)
