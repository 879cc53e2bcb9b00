"""The static answer before any run: does it start, and how much of the device is left for KV.

The subtraction is the engine's own (:mod:`hbmtwin.sim.engines`), line by line; the lines sum to the device's total.
What is estimated carries its range (:mod:`hbmtwin.sim.budget.charges`).

::

    ranks of a stage      alike: heads, MLP and vocabulary divide evenly, or the split is refused      one is computed
    stages of a pipeline  differ in layers, embedding, head and logits                                 each is computed
    blocks                every rank has as many as the one with room for the fewest                   its budget counts
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hbmtwin.allocators.kv_groups import GroupKind
from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.budget.charges import MEASURED_BY, Charges, charges_of
from hbmtwin.sim.budget.objections import ON_STAGE, objection, warnings_of
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.engines import Account, Division, Estimate
from hbmtwin.sim.engines.figures import exactly
from hbmtwin.sim.layer_groups import BlockPool
from hbmtwin.sim.phrases import Said


@dataclass(frozen=True, slots=True)
class BudgetLine:
    """One share of the device: what holds it, how much, within which range, and how that is known."""

    item: str
    bytes: int
    low: int
    high: int
    source: str

    @property
    def profile(self) -> str:
        """Name of the calibration profile that measured it, or a part of it; empty: none did."""
        return self.source.partition(MEASURED_BY)[2].partition(";")[0]


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """Layers that share a block table, and how many of the pool's blocks one longest request takes for them."""

    kind: GroupKind
    num_layers: int
    """Of the whole model."""
    block_size: int
    """Tokens; of states those between two that are kept."""
    window: int
    """Tokens of a sliding window; else 0."""
    request_blocks: int


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Who holds which bytes of one device when the engine has started, and whether it starts at all.

    Of a pipeline it is that of the first stage with room for the fewest blocks, which decides how many all have.
    """

    engine: str
    version: str
    """Of the engine's rules: the first release that has them."""
    total_bytes: int
    tenants_bytes: int
    usable_bytes: int
    """What the engine lays claim to: ``gpu_memory_utilization`` of the total with vLLM."""
    weights_bytes: int
    """On one rank, with the rotary table, as vLLM logs it."""
    activation_bytes: int
    context_bytes: int
    """Held before the engine looks; not charged to the utilisation."""
    non_torch_bytes: int
    """Held outside torch and charged to the utilisation."""
    late_bytes: int
    """Taken after the plan from what the utilisation leaves."""
    graph_bytes: int
    kv_bytes: int
    """Left for KV; negative when the rest does not fit."""
    kv_low_bytes: int
    kv_high_bytes: int
    """Its range."""
    kv_bytes_per_token: int
    """In all layers of this rank, where none of it is forgotten; states of Mamba layers are not counted."""
    block_size: int
    """Tokens of a block, of attention where kinds differ."""
    block_bytes: int
    """Of one block of KV, in all layers of this rank."""
    num_blocks: int
    request_blocks: int
    """That one request of ``max_model_len`` takes, over all groups."""
    groups: tuple[GroupNeed, ...]
    """Those groups, where layers keep different things."""
    max_model_len: int
    kv_tokens: int
    """As vLLM logs it: the maximum concurrency times ``max_model_len``."""
    max_concurrency: float
    """How many requests of ``max_model_len`` fit."""
    fits: bool
    reason: str
    """Why it does not start, and what would make it; empty when it does."""
    lines: tuple[BudgetLine, ...]
    """They sum to ``total_bytes``."""
    outside_bytes: int
    """What must find room beside what the engine lays claim to: other tenants, context, what comes behind the plan."""
    layers: range = range(0)
    """Of the model, on this rank."""
    stage: int = 0
    """Its place in the pipeline."""
    tensor_parallel_size: int = 1
    why: Said | None = None
    """The same without the cures, in both languages; None when it starts."""
    warnings: tuple[Said, ...] = ()
    """What may fail later, when it starts."""
    stages: tuple[MemoryBudget, ...] = ()
    """Of a pipeline: what each stage alone would have room for."""

    @property
    def static_bytes(self) -> int:
        """What neither torch nor KV holds: context, libraries, communicators."""
        return self.context_bytes + self.non_torch_bytes + self.late_bytes

    @property
    def binding_rank(self) -> int:
        """The first of the ranks with room for the fewest blocks; those of a stage are alike."""
        return self.stage * self.tensor_parallel_size

    def line(self, item: str) -> BudgetLine | None:
        """The line of that item; None where the engine has none."""
        return next((line for line in self.lines if line.item == item), None)


class DoesNotFit(RuntimeError):
    """The server would not start: the plan leaves no room for KV, or not enough for one longest request."""

    def __init__(self, budget: MemoryBudget) -> None:
        super().__init__(budget)  # what pickle hands to a new one, when a run in another process does not fit
        self.budget = budget

    def __str__(self) -> str:
        return self.budget.reason


def budget_of(q: BudgetQuestion) -> MemoryBudget:
    """The budget of the rank that decides, by the engine's rule: all have as many blocks as the one with the fewest."""
    pool = q.pool
    needs = _needs(q, pool)
    stages = [
        _rank(q, place, model, own, needs) for place, (model, own) in enumerate(zip(q.stages, q.pools, strict=True))
    ]
    if len(stages) == 1:
        return stages[0]
    decides = min(stages, key=lambda b: b.num_blocks)
    refused = next((b for b in (decides, *stages) if not b.fits), decides)
    return replace(decides, fits=refused.fits, reason=refused.reason, why=refused.why, stages=tuple(stages))


def _rank(
    q: BudgetQuestion, stage: int, model: ModelShape, pool: BlockPool, needs: tuple[GroupNeed, ...]
) -> MemoryBudget:
    """One rank of a stage, as if it were alone."""
    charges = charges_of(q, model)
    divided, least, most = (_divide(q, charges, end) for end in (_figure, _high, _low))
    token_bytes = q.measured.kv_bytes_per_token or pool.token_bytes
    block_bytes = token_bytes * q.block_size if q.measured.kv_bytes_per_token else pool.block_bytes
    kv = _kv(q, divided, least, most, block_bytes)
    request_blocks = pool.request_blocks(q.max_model_len)
    num_blocks = max(0, kv.bytes) // block_bytes
    lines = _lines(q, charges, kv, divided, least, most)
    outside = charges.context.bytes + charges.late.bytes + (0 if q.rules.charges_graphs else charges.graphs.bytes)
    budget = MemoryBudget(
        engine=q.rules.engine,
        version=q.rules.version,
        total_bytes=q.device.memory_bytes,
        tenants_bytes=q.other_tenant_bytes,
        usable_bytes=divided.usable,
        weights_bytes=charges.weights.bytes,
        activation_bytes=charges.activations.bytes,
        context_bytes=charges.context.bytes,
        non_torch_bytes=charges.non_torch.bytes,
        late_bytes=charges.late.bytes,
        graph_bytes=charges.graphs.bytes,
        kv_bytes=kv.bytes,
        kv_low_bytes=kv.low,
        kv_high_bytes=kv.high,
        kv_bytes_per_token=token_bytes,
        block_size=next((need.block_size for need in needs if need.kind != "mamba"), q.block_size),
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        request_blocks=request_blocks,
        groups=needs,
        max_model_len=q.max_model_len,
        kv_tokens=num_blocks * q.max_model_len // request_blocks,
        max_concurrency=num_blocks / request_blocks,
        fits=True,
        reason="",
        lines=lines,
        outside_bytes=q.other_tenant_bytes + outside,
        layers=q.layers[stage],
        stage=stage,
        tensor_parallel_size=q.ranks.tensor,
    )
    why = objection(q, budget, request_blocks)
    if why is not None and len(q.layers) > 1:
        why = Said.of(ON_STAGE, stage=stage, stages=len(q.layers), why=why)
    return replace(budget, fits=why is None, reason=str(why or ""), why=why, warnings=warnings_of(q, budget))


def _needs(q: BudgetQuestion, pool: BlockPool) -> tuple[GroupNeed, ...]:
    """The groups of the whole model; none where all layers are alike."""
    if pool.grouping is None:
        return ()
    return tuple(
        GroupNeed(
            g.kind, g.num_layers, g.block_size, g.window, g.max_blocks(q.max_model_len, pool.max_num_batched_tokens)
        )
        for g in pool.grouping.groups
    )


def _divide(q: BudgetQuestion, c: Charges, end: Callable[[Estimate], int]) -> Division:
    """The engine's division with every charge at that end of its range."""
    account = Account(
        total=q.device.memory_bytes,
        tenants=q.other_tenant_bytes,
        fraction=q.gpu_memory_utilization,
        context=end(c.context),
        weights=end(c.weights),
        activations=end(c.activations),
        non_torch=end(c.non_torch),
        graphs=end(c.graphs) if q.rules.charges_graphs else 0,
    )
    return q.rules.divide(account)


def _figure(e: Estimate) -> int:
    return e.bytes


def _low(e: Estimate) -> int:
    return e.low


def _high(e: Estimate) -> int:
    return e.high


def _is_given(q: BudgetQuestion) -> bool:
    """Whether KV is not what the division leaves."""
    return any(
        given is not None
        for given in (q.num_gpu_blocks_override, q.measured.available_kv_bytes, q.kv_cache_memory_bytes)
    )


def _kv(q: BudgetQuestion, divided: Division, least: Division, most: Division, block_bytes: int) -> Estimate:
    """What is there for KV: given, or what the division leaves."""
    if q.num_gpu_blocks_override is not None:
        return exactly(q.num_gpu_blocks_override * block_bytes, "num_gpu_blocks_override")
    if q.measured.available_kv_bytes is not None:
        return exactly(q.measured.available_kv_bytes, "measured")
    if q.kv_cache_memory_bytes is not None:
        return exactly(q.kv_cache_memory_bytes, "kv_cache_memory_bytes, in place of the subtraction")
    source = f"the rest of {q.gpu_memory_utilization:g} of the device, by the rules of {q.rules.name}"
    return Estimate(divided.kv, least.kv, most.kv, source)


def _lines(
    q: BudgetQuestion, c: Charges, kv: Estimate, divided: Division, least: Division, most: Division
) -> tuple[BudgetLine, ...]:
    """Every byte of the device; the last line is what nobody planned for."""
    lines = [
        BudgetLine("other tenants", *exactly(q.other_tenant_bytes, "given")),
        BudgetLine("context", *c.context),
        BudgetLine("weights", *c.weights),
        BudgetLine("activations", *c.activations),
        BudgetLine("non-torch", *c.non_torch),
        BudgetLine("graphs", *c.graphs),
    ]
    if c.late.high:
        lines.append(BudgetLine("late buffers", *c.late))
    if q.rules.run_time_sampler_bytes:
        lines.append(BudgetLine("run-time sampler", *c.sampler))
    held = [sum(sizes) for sizes in zip(*((line.bytes, line.high, line.low) for line in lines), strict=True)]
    kept = (0, 0, 0) if _is_given(q) else (divided.kept, least.kept, most.kept)
    if any(kept):
        lines.append(BudgetLine("operators", *kept, "as much as KV: vllm-ascend keeps it on 310P"))
    places = zip(held, (kv.bytes, kv.low, kv.high), kept, strict=True)
    rest, low, high = (q.device.memory_bytes - h - k - o for h, k, o in places)
    source = "what the engine's plan leaves: late buffers and the sampler must live in it"
    last = BudgetLine("unplanned", rest, low, high, source)
    return (*lines, BudgetLine("KV cache", *kv), last)
