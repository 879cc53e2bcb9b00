"""Two runs of one operation trace side by side: the first operation after which anything differs, and what."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hbmtwin.validation.emulated.records import ACTIONS, BLOCK_STATES, OUTCOMES, RealError, RealRun, Table
from hbmtwin.workloads.formats.memory_trace import MemoryOp

_OOM_ENTRY = ACTIONS.index("oom")


@dataclass(frozen=True, slots=True)
class Difference:
    """What differs after one operation, and nothing before it. The last four are segments as text, block by block."""

    operation: int
    """Index in the trace; -1 is the set-up."""
    op: MemoryOp | None
    what: tuple[tuple[str, str, str], ...]
    """Name of a number, ours, the real one's."""
    before_ours: tuple[str, ...] = ()
    before_real: tuple[str, ...] = ()
    after_ours: tuple[str, ...] = ()
    after_real: tuple[str, ...] = ()


def first_difference(
    ops: Sequence[MemoryOp], ours: RealRun, real: RealRun, *, same_driver: bool = True
) -> Difference | None:
    """The earliest difference in address, outcome, statistics, errors, trace entries, and final segments and blocks.

    Addresses count from the first one that the run got. Over the *same_driver* its bytes in use and the texts of
    OutOfMemory, which name its free bytes, are compared as well. O(numbers), in numpy.
    """
    if ours.setup_error is not None or real.setup_error is not None:
        if _kind(ours.setup_error) == _kind(real.setup_error):
            return None  # the texts are in our own words
        return Difference(-1, None, (("settings", _said(ours.setup_error), _said(real.setup_error)),))
    a, b = ours.stat_names, real.stat_names
    if a != b:
        mine, theirs = (",".join(sorted(set(a) - set(b))) for a, b in ((a, b), (b, a)))
        return Difference(-1, None, (("names of statistics", mine, theirs),))
    found = min(_differences(ops, ours, real, same_driver=same_driver), default=None)
    if found is None:
        return None
    what = tuple(w for i, w in _differences(ops, ours, real, same_driver=same_driver) if i == found[0])
    return Difference(found[0], ops[found[0]] if 0 <= found[0] < len(ops) else None, what)


_Found = tuple[int, tuple[str, str, str]]


def _differences(ops: Sequence[MemoryOp], ours: RealRun, real: RealRun, *, same_driver: bool) -> Iterator[_Found]:
    """The first difference of each kind; of the statistics each that differs at that operation."""
    n = min(len(ours.results), len(real.results))
    if real.crash is not None:
        yield real.crash.operation, ("process", "lives", f"died: {real.crash.text.splitlines()[-1:]}")
    columns: dict[str, Callable[[int], str]] = {"outcome": OUTCOMES.__getitem__, "address": _address}
    if same_driver:
        columns["driver_bytes"] = str
    for name, say in columns.items():
        a, b = (_from_first(run)[:n] if name == "address" else run.results[name][:n] for run in (ours, real))
        i = _first(a != b)
        if i is not None:
            yield i, (name, say(int(a[i])), say(int(b[i])))
    a, b = np.vstack([ours.initial_stats, ours.stats[:n]]), np.vstack([real.initial_stats, real.stats[:n]])
    i = _first((a != b).any(axis=1))
    if i is not None:
        for k in np.flatnonzero(a[i] != b[i]):
            yield i - 1, (ours.stat_names[k], str(a[i, k]), str(b[i, k]))
    for i in sorted(i for i in ours.errors.keys() | real.errors.keys() if i < n):
        mine, theirs = ours.errors.get(i), real.errors.get(i)
        if _kind(mine) != _kind(theirs) or (same_driver and _kind(mine) == "OutOfMemoryError" and mine != theirs):
            yield i, ("error", _said(mine), _said(theirs))
            break
    yield from _different_entries(ours, real, same_driver=same_driver)
    if real.crash is None:
        yield from _different_snapshots(len(ops) - 1, ours, real)


def _different_entries(ours: RealRun, real: RealRun, *, same_driver: bool) -> Iterator[_Found]:
    a, b = (_entries(run, free_bytes=same_driver) for run in (ours, real))
    if real.crash is not None:
        return
    n = min(len(a), len(b))
    i = _first(a[:n] != b[:n])
    if i is None and len(a) == len(b):
        return
    i = n if i is None else i
    at = min(int(table["operation"][i]) for table in (a, b) if i < len(table))
    mine, theirs = (_entry_text(table[table["operation"] == at]) for table in (a, b))
    yield at, ("trace entries", mine, theirs)


def _different_snapshots(last: int, ours: RealRun, real: RealRun) -> Iterator[_Found]:
    a, b = (segment_lines(run) for run in (ours, real))
    if a != b:
        mine, theirs = ("; ".join(line for line in x if line not in y) for x, y in ((a, b), (b, a)))
        yield last, ("segments and blocks at the end", mine, theirs)


# -- numbers as both sides count them ----------------------------------------------------------------------------------


def base_address(run: RealRun) -> int:
    """The first address that a run got; 0 if it got none."""
    given = run.results["address"][run.results["address"] >= 0]
    return int(given[0]) if len(given) else 0


def _from_first(run: RealRun) -> NDArray[np.int64]:
    addresses: NDArray[np.int64] = run.results["address"]
    return np.where(addresses < 0, np.iinfo(np.int64).min, addresses - base_address(run))


def _entries(run: RealRun, *, free_bytes: bool) -> Table:
    """The trace entries, addresses from the first one that the run got; an oom has the driver's free bytes there."""
    entries = run.entries.copy()
    is_oom = entries["action"] == _OOM_ENTRY
    entries["address"][~is_oom] -= base_address(run)
    if not free_bytes:
        entries["address"][is_oom] = 0
    return entries


def segment_lines(run: RealRun) -> tuple[str, ...]:
    """The last snapshot of a run, a line per segment in order of address, addresses from the first one given."""
    base = base_address(run)
    lines = []
    for s in np.sort(run.segments, order="address"):
        blocks = np.sort(run.blocks[run.blocks["segment"] == s["address"]], order="address")
        inside = " ".join(
            f"[{BLOCK_STATES[b['state']]} {b['size']}"
            + (f" for {b['requested_size']}]" if b["requested_size"] else "]")
            for b in blocks
        )
        kind = "workspace" if s["is_workspace"] else "large" if s["is_large"] else "small"
        kind = f"expandable {kind}" if s["is_expandable"] else kind
        pool = f", pool {s['pool']}" if s["pool"] else ""
        lines.append(
            f"{int(s['address']) - base:+}: {kind} {s['total_size']}, stream {s['stream']}{pool}, "
            f"allocated {s['allocated_size']}, active {s['active_size']}, requested {s['requested_size']}: {inside}"
        )
    return tuple(lines)


def _entry_text(entries: Table) -> str:
    return " ".join(
        f"{ACTIONS[e['action']]}({e['address']}, {e['size']}, stream {e['stream']}, pool {e['pool']})" for e in entries
    )


def _first(differs: NDArray[np.bool_]) -> int | None:
    return int(differs.argmax()) if differs.any() else None


def _address(value: int) -> str:
    return "none" if value == np.iinfo(np.int64).min else f"{value:+}"


def _kind(error: RealError | None) -> str:
    return "" if error is None else error.kind


def _said(error: RealError | None) -> str:
    return "no error" if error is None else f"{error.kind}: {error.text}"
