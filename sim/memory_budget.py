"""The static answer before any run: does it start, and how much of the device is left for KV.

The subtraction is the engine's own, line by line; the lines sum to the device's total. What is estimated carries its
range (:mod:`hbmtwin.sim.engine_rules`).

::

    ranks of a stage      alike: heads, MLP and vocabulary divide evenly, or the split is refused      one is computed
    stages of a pipeline  differ in layers, embedding, head and logits                                 each is computed
    blocks                every rank has as many as the one with room for the fewest                   its budget counts
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from hbmtwin.kernels.records import ModelShape
from hbmtwin.kernels.weights import weight_bytes_per_rank
from hbmtwin.sim.budget_question import BudgetQuestion
from hbmtwin.sim.engine_rules import (
    Estimate,
    activation_peak,
    context,
    graph_pool,
    late_buffers,
    non_torch,
)
from hbmtwin.sim.layer_groups import BlockPool
from hbmtwin.sim.objections import ON_STAGE, objection
from hbmtwin.sim.phrases import Said


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One share of the device: what holds it, how much, within which range, and how that is known."""

    item: str
    bytes: int
    low: int
    high: int
    source: str


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Who holds which bytes of one device when the engine has started, and whether it starts at all.

    Of a pipeline it is that of the first stage with room for the fewest blocks, which decides how many all have.
    """

    total_bytes: int
    tenants_bytes: int
    usable_bytes: int
    """``gpu_memory_utilization`` of the total."""
    weights_bytes: int
    """On one rank, with the rotary table, as vLLM logs it."""
    activation_bytes: int
    context_bytes: int
    """Held before the engine looks; not charged to the utilisation."""
    non_torch_bytes: int
    """Held outside torch and charged to the utilisation."""
    late_bytes: int
    """Of the pipeline's communicator, taken after the plan from what the utilisation leaves."""
    graph_bytes: int
    kv_bytes: int
    """Left for KV; negative when the rest does not fit."""
    block_bytes: int
    """Of one block of KV, in all layers of this rank."""
    num_blocks: int
    kv_tokens: int
    """As vLLM logs it: the maximum concurrency times ``max_model_len``."""
    max_concurrency: float
    """How many requests of ``max_model_len`` fit."""
    fits: bool
    reason: str
    """Why it does not start, and what would make it; empty when it does."""
    lines: tuple[BudgetLine, ...]
    """They sum to ``total_bytes``."""
    layers: range = range(0)
    """Of the model, on this rank."""
    stage: int = 0
    """Its place in the pipeline."""
    why: Said | None = None
    """The same without the cures, in both languages; None when it starts."""
    stages: tuple[MemoryBudget, ...] = ()
    """Of a pipeline: what each stage alone would have room for."""

    @property
    def static_bytes(self) -> int:
        """What neither torch nor KV holds: context, libraries, communicators."""
        return self.context_bytes + self.non_torch_bytes + self.late_bytes


class DoesNotFit(RuntimeError):
    """The server would not start: the plan leaves no room for KV, or not enough for one longest request."""

    def __init__(self, budget: MemoryBudget) -> None:
        super().__init__(budget)  # what pickle hands to a new one, when a run in another process does not fit
        self.budget = budget

    def __str__(self) -> str:
        return self.budget.reason


def budget_of(q: BudgetQuestion) -> MemoryBudget:
    """The budget of the rank that decides, by the engine's rule: all have as many blocks as the one with the fewest."""
    stages = [_rank(q, place, *parts) for place, parts in enumerate(zip(q.stages, q.pools, strict=True))]
    if len(stages) == 1:
        return stages[0]
    decides = min(stages, key=lambda b: b.num_blocks)
    refused = next((b for b in (decides, *stages) if not b.fits), decides)
    return replace(decides, fits=refused.fits, reason=refused.reason, why=refused.why, stages=tuple(stages))


def _rank(q: BudgetQuestion, stage: int, model: ModelShape, pool: BlockPool) -> MemoryBudget:
    """One rank of a stage, as if it were alone."""
    total, tp, pp, rules = q.device.memory_bytes, q.layout.tensor_parallel_size, len(q.layers), q.rules
    usable = (math.ceil if rules.rounds_up else math.floor)(total * q.gpu_memory_utilization)
    weights = weight_bytes_per_rank(model, tp)
    held = context(rules, q.device, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    libraries = non_torch(rules, tensor_parallel_size=tp, pipeline_parallel_size=pp)
    late = late_buffers(rules, pipeline_parallel_size=pp)
    graphs = graph_pool(rules, model, max_num_seqs=q.max_num_seqs)
    if q.measured.activation_bytes is not None:
        peak = Estimate(q.measured.activation_bytes, q.measured.activation_bytes, q.measured.activation_bytes, "given")
    else:
        peak = activation_peak(
            rules,
            model,
            q.device,
            tensor_parallel_size=tp,
            max_num_batched_tokens=q.max_num_batched_tokens,
            max_num_seqs=q.max_num_seqs,
        )
    charged = [peak, libraries, *([graphs] if rules.charges_graphs else [])]
    outside = [held, late, *([] if rules.charges_graphs else [graphs])]
    kv = usable - weights - sum(e.bytes for e in charged)
    rest = total - usable - q.other_tenant_bytes

    request_blocks = pool.request_blocks(q.max_model_len)
    num_blocks = max(0, kv) // pool.block_bytes
    lines = (
        BudgetLine("other tenants", q.other_tenant_bytes, q.other_tenant_bytes, q.other_tenant_bytes, "given"),
        BudgetLine("context", *held),
        BudgetLine("weights", weights, weights, weights, f"shapes of {model.name}: {model.source or 'given'}"),
        BudgetLine("activations", *peak),
        BudgetLine("non-torch", *libraries),
        BudgetLine("graphs", *graphs),
        *([BudgetLine("late buffers", *late)] if late.bytes else []),
        BudgetLine(
            "KV cache",
            kv,
            usable - weights - sum(e.high for e in charged),
            usable - weights - sum(e.low for e in charged),
            f"the rest of {q.gpu_memory_utilization:g} of the device, by the rules of {rules.name}",
        ),
        BudgetLine(
            "unplanned",
            rest - sum(e.bytes for e in outside),
            rest - sum(e.high for e in outside),
            rest - sum(e.low for e in outside),
            "what the utilisation leaves: late buffers and the sampler must live in it",
        ),
    )
    budget = MemoryBudget(
        total_bytes=total,
        tenants_bytes=q.other_tenant_bytes,
        usable_bytes=usable,
        weights_bytes=weights,
        activation_bytes=peak.bytes,
        context_bytes=held.bytes,
        non_torch_bytes=libraries.bytes,
        late_bytes=late.bytes,
        graph_bytes=graphs.bytes,
        kv_bytes=kv,
        block_bytes=pool.block_bytes,
        num_blocks=num_blocks,
        kv_tokens=num_blocks * q.max_model_len // request_blocks,
        max_concurrency=num_blocks / request_blocks,
        fits=True,
        reason="",
        lines=lines,
        layers=q.layers[stage],
        stage=stage,
    )
    why = objection(q, budget, request_blocks)
    if why is not None and pp > 1:
        why = Said.of(ON_STAGE, stage=stage, stages=pp, why=why)
    return replace(budget, fits=why is None, reason=str(why or ""), why=why)
