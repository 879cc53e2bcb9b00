"""What one rank holds beside its KV cache: computed, estimated, or measured.

::

    context        held before the engine looks; estimated, or a profile's
    weights        from shapes, exactly, in the blocks of the caching allocator, which is what an engine logs
    activations    estimated; what the profiling run adds for a while
    non-torch      estimated
    graphs         estimated
    late buffers   estimated; taken once KV is placed
    sampler        estimated; needed when the engine serves, and in no engine's plan

What was measured says so, and by which profile. Of a group's communicator see :mod:`hbmtwin.sim.budget.communicators`.
"""

from __future__ import annotations

from typing import NamedTuple

from hbmtwin.kernels.profile import calibrated_context
from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.budget.communicators import context_with, late_with, non_torch_with
from hbmtwin.sim.budget.loaded_weights import loaded_weight_bytes
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.engines import (
    Estimate,
    Ranks,
    activation_peak,
    context,
    graph_pool,
    late_buffers,
    non_torch,
    run_time_sampler,
)
from hbmtwin.sim.engines.figures import exactly

MEASURED_BY = "measured: profile "
"""In a source, and the name behind it up to a semicolon."""


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
    m, ranks, rules = q.measured, q.ranks, q.rules
    weights = _measured(q, "weights_bytes") or exactly(
        loaded_weight_bytes(
            model,
            q.device.vendor,
            ranks.tensor,
            expert_ranks=ranks.of_whole_experts,
            data_parallel_size=ranks.data,
        ),
        f"shapes of {model.name}: {model.source or 'given'}",
    )
    activations = _measured(q, "activation_bytes") or activation_peak(
        q.rules,
        model,
        q.device,
        tensor_parallel_size=ranks.tensor,
        max_num_batched_tokens=q.max_num_batched_tokens,
        max_num_seqs=q.max_num_seqs,
        num_speculative_tokens=q.num_speculative_tokens,
        ranks=ranks,
    )
    graphs = _measured(q, "graph_bytes") or graph_pool(
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
    group, by = m.communicator_bytes, _by(q, "communicator_bytes")
    libraries = _measured(q, "non_torch_bytes") or non_torch_with(
        group, non_torch(rules, model, ranks), rules, ranks, by
    )
    return Charges(
        context=_context(q, model),
        weights=weights,
        activations=activations,
        non_torch=libraries,
        graphs=graphs,
        late=late_with(group, late_buffers(rules, ranks), rules, ranks, by),
        sampler=sampler,
    )


def _context(q: BudgetQuestion, model: ModelShape) -> Estimate:
    """The device's own and its groups'; what a profile measured of it is exact."""
    whole, alone = (context(q.rules, model, q.device, ranks) for ranks in (q.ranks, Ranks()))
    own = alone
    source = q.device.sources.get("context_bytes", "")
    if q.device.profile and source == calibrated_context(q.device.profile):
        own = exactly(alone.bytes, f"{MEASURED_BY}{q.device.profile}")
        figure, low, high = (own.bytes + size - before for size, before in zip(whole[:3], alone[:3], strict=True))
        whole = Estimate(figure, low, high, own.source + "; groups estimated" * (high > own.high))
    found = context_with(q.measured.communicator_bytes, whole, q.rules, q.ranks, own)
    if found == whole:
        return whole
    return found._replace(source=f"{whole.source}; at least the communicators, {_by(q, 'communicator_bytes')}")


def _measured(q: BudgetQuestion, name: str) -> Estimate | None:
    size: int | None = getattr(q.measured, name)
    return None if size is None else exactly(size, _by(q, name))


def _by(q: BudgetQuestion, name: str) -> str:
    """Whose figure it is."""
    return f"{MEASURED_BY}{q.device.profile}" if name in q.profiled else "measured"
