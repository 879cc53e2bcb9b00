"""Which traces are legal beyond their rows: no number twice, no stream too many, no pool that is not there."""

from __future__ import annotations

from collections.abc import Iterable

from hbmtwin.sim.replay import ReplayError
from hbmtwin.validation.emulated.npu import CREATED_STREAMS
from hbmtwin.workloads.formats.memory_trace import MemoryOp


def check_trace(name: str, ops: Iterable[MemoryOp]) -> None:
    """Raise ReplayError, ``name: operation N, op: what; cure``, at the first operation that no program can do.

    The rules are those of the operation trace (caching-allocator.md, section 16). What the real allocator refuses and
    survives, such as to enter a pool twice, is legal. O(operations).
    """
    tensors: set[int | str | None] = set()
    pools: dict[int | str | None, bool | None] = {}
    """True: entered, False: left, None: deleted."""
    for index, op in enumerate(ops):
        what = _wrong_stream(op)
        if op.op == "malloc":
            if op.id in tensors:
                what = what or f"id {op.id} stands for another tensor already; give each a number of its own"
            tensors.add(op.id)
        elif op.op.startswith("mempool_"):
            what = _wrong_pool(op, pools)
            pools[op.id] = {"mempool_begin": True, "mempool_end": False, "mempool_delete": None}[op.op]
        if what:
            raise ReplayError(f"{name}: operation {index}, {op.op}: {what}")


def _wrong_stream(op: MemoryOp) -> str:
    highest = max(op.stream or 0, int(op.arg) if op.op == "erase_stream" else 0)
    if highest > CREATED_STREAMS:
        return (
            f"there is no stream {highest}, torch has {CREATED_STREAMS} besides the default one; "
            f"number them from 0 to {CREATED_STREAMS}"
        )
    return ""


def _wrong_pool(op: MemoryOp, pools: dict[int | str | None, bool | None]) -> str:
    if op.id not in pools:
        return "" if op.op == "mempool_begin" else f"there is no pool {op.id!r}; begin it first"
    if pools[op.id] is None:
        return f"pool {op.id!r} is deleted; give each pool a name of its own"
    if op.op == "mempool_delete" and pools[op.id]:
        return f"pool {op.id!r} is entered; end its scope first"
    return ""
