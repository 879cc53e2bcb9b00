"""The smallest single changes that make a server start, each one tried."""

from __future__ import annotations

import math
from dataclasses import replace

from hbmtwin.kernels.stages import stage_layers
from hbmtwin.kernels.weights import can_split
from hbmtwin.sim.budget_question import BudgetQuestion
from hbmtwin.sim.memory_budget import MemoryBudget, budget_of
from hbmtwin.sim.pool_segments import placed_blocks

SAFE_UTILIZATION = 0.95
"""The most that is advised: above it nothing is left for what the engine allocates after its plan."""


def cures(q: BudgetQuestion, b: MemoryBudget) -> str:
    """The single changes that make it start; each was tried."""
    outside = b.total_bytes - b.usable_bytes - b.lines[-1].bytes
    utilization = min(math.floor(100 * (b.total_bytes - outside) / b.total_bytes) / 100, SAFE_UTILIZATION)
    tries = {
        f"max_model_len {length}": replace(q, max_model_len=length)
        for length in (q.pool.longest_request(_placed_blocks(q, b) - 1, q.model.max_position_embeddings),)
        if 0 < length < q.max_model_len
    }
    if utilization > 0 and utilization != q.gpu_memory_utilization:
        tries[f"gpu_memory_utilization {utilization:g}"] = replace(q, gpu_memory_utilization=utilization)
    tokens, seqs = min(q.max_num_batched_tokens, 2048), min(q.max_num_seqs, 64)
    if (tokens, seqs) != (q.max_num_batched_tokens, q.max_num_seqs):
        tries[f"max_num_batched_tokens {tokens} with max_num_seqs {seqs}"] = replace(
            q, max_num_batched_tokens=tokens, max_num_seqs=seqs
        )
    if b.tenants_bytes:
        tries["the device to itself"] = replace(q, other_tenant_bytes=0)
    cures = [text for text, other in tries.items() if _starts(other)]
    ranks = q.layout.tensor_parallel_size
    larger = [tp for tp in sorted(q.device.allreduce_ns) if tp > ranks and can_split(q.model, tp)]
    enough = next((tp for tp in larger if _starts(_over_ranks(q, tp))), None)
    if enough:
        cures.append(f"tensor_parallel_size {enough}")
    elif len(q.layers) == 1 and (stages := _enough_stages(q)):
        cures.append(f"pipeline_parallel_size {stages}")
    if cures:
        return f"Any one of these would start: {'; '.join(cures)}"
    return "No single change of length, utilisation, batch or ranks would start: take a smaller model or more memory"


def _starts(q: BudgetQuestion) -> bool:
    """Whether it starts with a pool that holds one longest request beside the null block, after rounding."""
    b = budget_of(q)
    return b.fits and _placed_blocks(q, b) - 1 >= q.pool.request_blocks(q.max_model_len)


def _placed_blocks(q: BudgetQuestion, b: MemoryBudget) -> int:
    """Blocks of a pool once it is rounded, on the rank that has the fewest."""
    ranks = zip(q.pools, b.stages or (b,), strict=True)
    return min(placed_blocks(pool, rank.num_blocks, rank.kv_bytes) for pool, rank in ranks)


def _enough_stages(q: BudgetQuestion) -> int | None:
    """The fewest of 2, 4, 8 pipeline stages that would start; None if none would, or no figure for sending is there."""
    if not q.device.send_ns or not q.device.send_bandwidth_bytes_per_s:
        return None
    for stages in (2, 4, 8):
        try:
            if _starts(replace(q, layers=stage_layers(q.model.num_layers, stages))):
                return stages
        except ValueError:  # fewer layers than stages, or a stage without one of their kinds
            return None
    return None


def _over_ranks(q: BudgetQuestion, tp: int) -> BudgetQuestion:
    return replace(q, layout=replace(q.layout, tensor_parallel_size=tp))
