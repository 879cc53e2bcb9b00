"""The smallest single changes that make a server start, each one tried by the function that said no.

::

    change                                        found by                                what it costs
    -------------------------------------------   -------------------------------------   ------------------------
    gpu_memory_utilization, other tenants away    bisection in steps of 0.01              nothing but the margin
    block_size                                    halves                                  nothing
    enable_chunked_prefill                        tried                                   nothing
    max_num_batched_tokens, max_num_seqs          bisection downwards                     speed
    enforce_eager                                 tried                                   speed
    num_speculative_tokens 0                      tried                                   speed
    max_model_len                                 bisection downwards                     long requests
    kv_cache_dtype, quantization                  next smaller that the engine has        accuracy
    tensor, pipeline parallel size, experts       next larger that divides                devices
    device                                        next larger of the catalog              a device

Bisection supposes that less asks for less; what it finds is tried again like all else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from hbmtwin.kernels.stages import stage_layers
from hbmtwin.kernels.weights import can_split
from hbmtwin.sim import catalog
from hbmtwin.sim.budget.memory_budget import MemoryBudget, budget_of
from hbmtwin.sim.budget.question import BudgetQuestion
from hbmtwin.sim.budget.ranges import objection_at_the_bad_end
from hbmtwin.sim.catalog.quantization import BY_NAME
from hbmtwin.sim.engines import GIB, EngineArgs, rules_for, settings_of
from hbmtwin.sim.fit.kernels import findings_of, smaller_kv, smaller_weights
from hbmtwin.sim.fit.options import SAFE_UTILIZATION, fraction_option
from hbmtwin.sim.kv_layout import kv_layout
from hbmtwin.sim.phrases import Phrase, Said
from hbmtwin.sim.pool_segments import placed_blocks

LEAST_BATCHED_TOKENS = 256
"""Below it a prefill no longer fills a matrix unit: a server that starts so is of no use."""

SET = Phrase("{name} {value}", "{name} {value}")
ALONE = Phrase("the device to itself", "独占该设备（其他进程退出）")
NO_DRAFTS = Phrase("no speculative tokens", "关闭投机解码")
QUANTISED = Phrase("quantization {value}: weights in {bits} bits", "quantization {value}：权重量化为 {bits} 比特")
CHUNKED = Phrase("enable_chunked_prefill: prompts in chunks", "enable_chunked_prefill：提示词分块计算")
EXPERTS = Phrase("enable_expert_parallel: whole experts on each rank", "enable_expert_parallel：专家并行")
ON_DEVICE = Phrase("device {value}", "换用设备 {value}")
EAGER = Phrase("enforce_eager: no graphs", "enforce_eager：不捕获图")
NO_KEY = ("quantization", "enforce_eager", "num_speculative_tokens", "num_gpu_blocks_override")
"""Settings of a server that a scenario does not have."""
ANY_ONE = "Any one of these would start: "
NONE_ALONE = "No single change of length, utilisation, batch or ranks would start: take a smaller model or more memory"


@dataclass(frozen=True, slots=True)
class Advice:
    """One change that makes it start, and what then fits."""

    change: Said
    settings: Mapping[str, Any]
    """The change in the words of the flags."""
    question: BudgetQuestion
    budget: MemoryBudget
    notes: tuple[Said, ...] = ()
    """What is to be known of it that was not so before."""

    @property
    def certain(self) -> bool:
        """Whether it starts at the far end of the estimates' ranges too."""
        return objection_at_the_bad_end(self.question, self.budget) is None


@dataclass(frozen=True, slots=True)
class Advised:
    """What helps, the least costly first, and what was tried and does not help alone."""

    helps: tuple[Advice, ...]
    in_vain: tuple[str, ...]
    """Settings, by name."""
    pairs: tuple[Advice, ...] = ()
    """Where nothing helps alone: two changes together."""


Starts = Callable[[BudgetQuestion], MemoryBudget | None]
"""The budget of a question whose server starts, else None."""
Confirm = Callable[[Advice], Advice | None]
"""An advice as it comes out for whoever takes it: other settings may follow from a changed one. None: not at all."""


def starts_by_the_engine(q: BudgetQuestion) -> MemoryBudget | None:
    """By the engine's own rule; None too where the model cannot be laid out so."""
    try:
        budget = budget_of(q)
    except ValueError:  # a group of layers without a common page, a stage without a kind of layer
        return None
    return budget if budget.fits else None


def starts_with_a_pool(q: BudgetQuestion) -> MemoryBudget | None:
    """By what a run needs: a pool that holds one longest request beside the null block, after rounding, and figures
    for what the ranks send to each other."""
    tp, device = q.layout.tensor_parallel_size, q.device
    if tp > 1 and tp not in device.allreduce_ns:
        return None
    if len(q.layers) > 1 and not (device.send_ns and device.send_bandwidth_bytes_per_s):
        return None
    budget = starts_by_the_engine(q)
    if budget is None:
        return None
    ranks = zip(q.pools, budget.stages or (budget,), strict=True)
    blocks = min(placed_blocks(pool, rank.num_blocks, rank.kv_bytes) for pool, rank in ranks)
    return budget if blocks - 1 >= q.pool.request_blocks(q.max_model_len) else None


def cures(q: BudgetQuestion) -> str:
    """The single changes that make a run start, as one sentence; only those that a scenario has a key for."""
    helps = advise(q, starts_with_a_pool, without=NO_KEY).helps
    return ANY_ONE + "; ".join(str(advice.change) for advice in helps) if helps else NONE_ALONE


def _as_it_is(advice: Advice) -> Advice:
    return advice


def advise(
    q: BudgetQuestion,
    starts: Starts = starts_by_the_engine,
    confirm: Confirm = _as_it_is,
    *,
    without: Collection[str] = (),
) -> Advised:
    """Single changes of *q* that make it start, of each kind the smallest that is also confirmed.

    *without*: names of what is not tried. Some hundred budgets, of 0.1 ms each.
    """
    helps: list[Advice] = []
    in_vain: list[str] = []
    for name, search in SEARCHES:
        name_of_it = ""
        for change, settings, other in search(q, starts) if name not in without else ():
            name_of_it = next(iter(settings))
            if (advice := tried(change, settings, other, starts, confirm)) is not None:
                helps.append(advice)
                break
        else:
            in_vain.append(name_of_it)
    helping = {name for advice in helps for name in advice.settings}
    vain = tuple(dict.fromkeys(name for name in in_vain if name and name not in helping))
    return Advised(tuple(helps), vain)


def tried(
    change: Said, settings: Mapping[str, Any], other: BudgetQuestion, starts: Starts, confirm: Confirm
) -> Advice | None:
    """That change, where it starts and is confirmed."""
    budget = starts(other)
    return None if budget is None else confirm(Advice(change, settings, other, budget))


Change = tuple[Said, Mapping[str, Any], BudgetQuestion]
Search = Callable[[BudgetQuestion, Starts], Iterator[Change]]


def _set(name: str, value: int | float | str, other: BudgetQuestion) -> Change:
    said = f"{value:g}" if isinstance(value, float) else value
    return Said.of(SET, name=name, value=said), {name: value}, other


def _utilization(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    """In hundredths: the least above that leaves enough for KV, and the most below with which the rest has room."""
    now, safe = round(100 * q.gpu_memory_utilization, 6), round(100 * SAFE_UTILIZATION)

    def at(hundredths: int) -> BudgetQuestion:
        return replace(q, gpu_memory_utilization=hundredths / 100)

    def too_few(hundredths: int) -> bool:
        budget = budget_of(at(hundredths))
        return budget.num_blocks < budget.request_blocks

    above, below = math.floor(now) + 1, math.ceil(now) - 1
    tries = []
    if above <= safe:
        least = largest(above - 1, safe, too_few) + 1
        tries += [least, least + 1]  # one more for the block that a run needs besides
    if now > safe:
        tries.append(safe)
    if below >= 1:
        tries.append(largest(1, below, lambda n: too_few(n) or starts(at(n))))  # where it is too few, less is no help
    for hundredths in tries:
        if hundredths <= max(safe, now):
            said, _, other = _set(q.rules.fraction_name, hundredths / 100, at(hundredths))
            yield said, {fraction_option(q.rules.engine): hundredths / 100}, other


def _tenants(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    if q.other_tenant_bytes:
        yield Said.of(ALONE), {"other_tenant_bytes": 0}, replace(q, other_tenant_bytes=0)


def _block_size(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    size = q.block_size
    while size % 2 == 0 and size // 2 >= q.device.default_block_size:
        size //= 2
        yield _set("block_size", size, replace(q, block_size=size))


def _overrides(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    """What stands in for the plan: as much as one longest request needs where it is too little, else what has room."""
    need, size = q.pool.request_blocks(q.max_model_len), q.pool.block_bytes
    if (blocks := q.num_gpu_blocks_override) is not None:
        given = replace(q, num_gpu_blocks_override=max(need, blocks))
        most = largest(need, max(need, blocks), lambda n: starts(replace(given, num_gpu_blocks_override=n)))
        yield _set("num_gpu_blocks_override", most, replace(given, num_gpu_blocks_override=most))
    elif (room := q.kv_cache_memory_bytes) is not None:
        given = replace(q, kv_cache_memory_bytes=max(need * size, room))
        most = size * largest(
            need, max(need, room // size), lambda n: starts(replace(given, kv_cache_memory_bytes=n * size))
        )
        if q.rules.engine != "mindie":
            yield _set("kv_cache_memory_bytes", most, replace(given, kv_cache_memory_bytes=most))
            return
        gib = most * 100 // GIB / 100  # as it is typed
        gib = gib if gib * GIB >= need * size else round(gib + 0.01, 2)
        yield _set("npu_mem_size", gib, replace(given, kv_cache_memory_bytes=int(gib * GIB)))


def _chunked(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    """Prompts in chunks, where they are computed whole and so profiled whole."""
    if q.batch_rule is not None:
        said = EngineArgs(
            max_model_len=q.max_model_len,
            max_num_seqs=q.max_num_seqs,
            block_size=q.block_size,
            enable_chunked_prefill=True,
            tensor_parallel_size=q.ranks.tensor,
            pipeline_parallel_size=q.ranks.pipeline,
        )
        tokens = settings_of(q.rules, q.model, q.device, said).max_num_batched_tokens
        settings = {"enable_chunked_prefill": True}
        yield Said.of(CHUNKED), settings, replace(q, max_num_batched_tokens=tokens, batch_rule=None)


def _batched_tokens(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    low, high = max(LEAST_BATCHED_TOKENS, q.max_num_seqs), q.max_num_batched_tokens - 1
    if low > high or q.batch_rule is not None:  # whole prompts: a batch is no shorter than the longest
        return
    found = largest(low, high, lambda n: starts(replace(q, max_num_batched_tokens=n)))
    tokens = max(low, found // 64 * 64)
    yield _set("max_num_batched_tokens", tokens, replace(q, max_num_batched_tokens=tokens))


def _seqs(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    if q.max_num_seqs > 1:
        seqs = largest(1, q.max_num_seqs - 1, lambda n: starts(replace(q, max_num_seqs=n)))
        yield _set("max_num_seqs", seqs, replace(q, max_num_seqs=seqs))


def _eager(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    if not q.enforce_eager and q.rules.capture_sizes:
        yield Said.of(EAGER), {"enforce_eager": True}, replace(q, enforce_eager=True)


def _drafts(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    if q.num_speculative_tokens:
        yield Said.of(NO_DRAFTS), {"num_speculative_tokens": 0}, replace(q, num_speculative_tokens=0)


def _length(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    high = min(q.max_model_len - 1, q.model.max_position_embeddings)
    if high >= 1:
        length = largest(1, high, lambda n: starts(q.at_length(n)))
        yield _set("max_model_len", length, q.at_length(length))


def _longer(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    """Where longer prompts are cut, and whole ones are not: then the profiled batch is smaller."""
    if q.batch_rule is not None and q.max_model_len <= q.batch_rule.whole_up_to < q.model.max_position_embeddings:
        length = q.batch_rule.whole_up_to + 1
        yield _set("max_model_len", length, q.at_length(length))


def _kv_dtype(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    if q.measured.kv_bytes_per_token is not None:
        return
    for name in smaller_kv(q):
        layout = kv_layout(q.model, dtype=name, tensor_parallel_size=q.layout.tensor_parallel_size)
        if layout.token_bytes < q.layout.token_bytes:
            yield _set("kv_cache_dtype", name, replace(q, layout=layout))


def _quantization(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    if q.measured.weights_bytes is not None:
        return
    for name, other in smaller_weights(q):
        said = Said.of(QUANTISED, value=name, bits=BY_NAME[name].weight_bits)
        yield said, {"quantization": name}, other


def _tensor_parallel(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    for tp in sorted(q.device.allreduce_ns or (2, 4, 8)):
        expert_ranks = q.ranks._replace(tensor=tp).of_whole_experts
        if tp > q.ranks.tensor and can_split(q.model, tp, expert_ranks=expert_ranks):
            yield _set("tensor_parallel_size", tp, replace(q, layout=replace(q.layout, tensor_parallel_size=tp)))


def _experts(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    if q.model.experts is not None and q.ranks.of_experts > 1 and not q.enable_expert_parallel:
        other = replace(q, enable_expert_parallel=True)
        if can_split(q.model, q.ranks.tensor, expert_ranks=other.ranks.of_whole_experts):
            yield Said.of(EXPERTS), {"enable_expert_parallel": True}, other


def _pipeline(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    for stages in (2, 4, 8) if len(q.layers) == 1 else ():
        try:
            other = replace(q, layers=stage_layers(q.model.num_layers, stages))
        except ValueError:  # fewer layers than stages
            return
        yield _set("pipeline_parallel_size", stages, other)


def _device(q: BudgetQuestion, starts: Starts) -> Iterator[Change]:
    """Larger ones of the same vendor that can run it: those of the same family first, then the smallest first."""
    if q.device.name not in catalog.devices():
        return
    as_known = q.device.memory_bytes == catalog.device(q.device.name).memory_bytes
    larger = [d for d in map(catalog.device, catalog.devices()) if d.memory_bytes > q.device.memory_bytes]
    for device in sorted(larger, key=lambda d: (d.family != q.device.family, d.memory_bytes, d.name)):
        own_size = q.block_size == q.device.default_block_size
        if device.vendor != q.device.vendor or device.name == q.device.name:
            continue
        other = replace(
            q,
            device=device,
            rules=rules_for(device, q.rules.engine, q.rules.version),
            block_size=device.default_block_size if own_size else q.block_size,
        )
        if not any(f.refused for f in findings_of(other)):
            settings: dict[str, Any] = {"device": device.name}
            if not as_known:  # what was said of its memory is not true of another
                settings["total_memory_bytes"] = device.memory_bytes
            yield Said.of(ON_DEVICE, value=device.name), settings, other


def largest(low: int, high: int, starts: Callable[[int], object]) -> int:
    """The largest number with which it starts, if less asks for less; *low* where none does. O(log(high - low))."""
    while low < high:
        middle = (low + high + 1) // 2
        if starts(middle):
            low = middle
        else:
            high = middle - 1
    return low


SEARCHES: tuple[tuple[str, Search], ...] = (
    ("gpu_memory_utilization", _utilization),
    ("other_tenant_bytes", _tenants),
    ("block_size", _block_size),
    ("num_gpu_blocks_override", _overrides),
    ("enable_chunked_prefill", _chunked),
    ("max_model_len", _longer),
    ("max_num_batched_tokens", _batched_tokens),
    ("max_num_seqs", _seqs),
    ("enforce_eager", _eager),
    ("num_speculative_tokens", _drafts),
    ("max_model_len", _length),
    ("kv_cache_dtype", _kv_dtype),
    ("quantization", _quantization),
    ("tensor_parallel_size", _tensor_parallel),
    ("enable_expert_parallel", _experts),
    ("pipeline_parallel_size", _pipeline),
    ("device", _device),
)
"""The least costly first."""
