"""What one rank holds beside its KV cache: computed, estimated, or measured.

::

    context        held before the engine looks
    weights        from shapes, exactly, in the blocks of the caching allocator, which is what an engine logs
    activations    estimated; what the profiling run adds for a while
    non-torch      estimated
    graphs         estimated
    late buffers   estimated; taken once KV is placed
    sampler        estimated; needed when the engine serves, and in no engine's plan
"""

from __future__ import annotations

from typing import NamedTuple

from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.budget.loaded_weights import loaded_weight_bytes
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.engines import (
    Estimate,
    activation_peak,
    context,
    graph_pool,
    late_buffers,
    non_torch,
    run_time_sampler,
)
from hbmtwin.sim.engines.figures import exactly


class Charges(NamedTuple):
    """Of one rank, each with its range and source."""

    context: Estimate
    weights: Estimate
    activations: Estimate
    non_torch: Estimate
    graphs: Estimate
    late: Estimate
    sampler: Estimate


def charges_of(q: BudgetQuestion, model: ModelShape) -> Charges:
    """What a rank of the stage *model* holds. O(layers)."""
    m, ranks = q.measured, q.ranks
    weights = _measured(m.weights_bytes) or exactly(
        loaded_weight_bytes(
            model,
            q.device.vendor,
            ranks.tensor,
            expert_ranks=ranks.of_whole_experts,
            data_parallel_size=ranks.data,
        ),
        f"shapes of {model.name}: {model.source or 'given'}",
    )
    activations = _measured(m.activation_bytes) or activation_peak(
        q.rules,
        model,
        q.device,
        tensor_parallel_size=ranks.tensor,
        max_num_batched_tokens=q.max_num_batched_tokens,
        max_num_seqs=q.max_num_seqs,
        num_speculative_tokens=q.num_speculative_tokens,
        ranks=ranks,
    )
    graphs = _measured(m.graph_bytes) or graph_pool(
        q.rules,
        model,
        max_num_seqs=q.max_num_seqs,
        max_num_batched_tokens=q.max_num_batched_tokens,
        num_speculative_tokens=q.num_speculative_tokens,
        enforce_eager=q.enforce_eager,
        ranks=ranks,
    )
    sampler = run_time_sampler(
        q.rules, model, max_num_seqs=q.max_num_seqs, num_speculative_tokens=q.num_speculative_tokens
    )
    return Charges(
        context=context(q.rules, model, q.device, ranks),
        weights=weights,
        activations=activations,
        non_torch=_measured(m.non_torch_bytes) or non_torch(q.rules, model, ranks),
        graphs=graphs,
        late=late_buffers(q.rules, ranks),
        sampler=sampler,
    )


def _measured(size: int | None) -> Estimate | None:
    return None if size is None else exactly(size, "measured")
