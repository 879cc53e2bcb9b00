"""A budget at the ends of its estimates' ranges: whether the figures decide alone, or their range does.

::

    figures   |weights|activations|..|   KV cache   |rest|       starts
    bad end   |weights|activations....|.....|  KV   |            may not start: the range decides
"""

from __future__ import annotations

from dataclasses import replace

from hbmtwin.sim.budget.memory_budget import MemoryBudget
from hbmtwin.sim.budget.objections import objection
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.phrases import Said

REMAINDERS = ("KV cache", "operators", "unplanned")
"""Lines that are large when the others are small."""


def objection_at_the_bad_end(q: BudgetQuestion, b: MemoryBudget) -> Said | None:
    """What would stop the start if every estimate came out at its high end; None: it starts all the same."""
    return _first_objection(q, b, "high", "low")


def objection_at_the_good_end(q: BudgetQuestion, b: MemoryBudget) -> Said | None:
    """What still stops the start if every estimate comes out at its low end."""
    return _first_objection(q, b, "low", "high")


def _first_objection(q: BudgetQuestion, b: MemoryBudget, held: str, rest: str) -> Said | None:
    for stage, pool in zip(b.stages or (b,), q.pools, strict=True):
        why = objection(q, _at(stage, held, rest), pool.request_blocks(q.max_model_len))
        if why is not None:
            return why
    return None


def _at(b: MemoryBudget, held: str, rest: str) -> MemoryBudget:
    ends = [getattr(line, rest if line.item in REMAINDERS else held) for line in b.lines]
    lines = tuple(replace(line, bytes=end) for line, end in zip(b.lines, ends, strict=True))
    sizes = {line.item: line.bytes for line in lines}
    kv = sizes["KV cache"]
    blocks = b.num_blocks if kv == b.kv_bytes else max(0, kv) // b.block_bytes
    return replace(
        b,
        lines=lines,
        kv_bytes=kv,
        num_blocks=blocks,
        kv_tokens=blocks * b.max_model_len // b.request_blocks,
        context_bytes=sizes["context"],
        graph_bytes=sizes["graphs"],
        late_bytes=sizes.get("late buffers", 0),
        activation_bytes=sizes["activations"],
    )
