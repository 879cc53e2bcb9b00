"""Why a server does not start, in both languages: the first thing in the order of a start that stops it.

::

    asked for too much     more positions than the model has; more than is free         before anything is loaded
    nothing left           weights and charges take all that may be used                after the profiling run
    too little left        less than one request of ``max_model_len``                   when blocks are counted
    no room for late ones  graphs and buffers that come after the plan                  when graphs are captured
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hbmtwin.sim.phrases import Phrase, Said, Size

if TYPE_CHECKING:
    from hbmtwin.sim.budget_question import BudgetQuestion
    from hbmtwin.sim.memory_budget import MemoryBudget

POSITIONS = Phrase(
    "max_model_len {length} is above the model's {positions} positions",
    "max_model_len {length} 超过模型支持的最大位置数 {positions}",
)
TOO_LITTLE_FREE = Phrase(
    "the engine refuses to start: gpu_memory_utilization {utilization} asks for {usable} and {free} are free, as "
    "other tenants hold {tenants} and the context {context}",
    "引擎拒绝启动：gpu_memory_utilization {utilization} 要求 {usable}，而空闲显存只有 {free}，"
    "其他进程占用 {tenants}，上下文占用 {context}",
)
NOTHING_FOR_KV = Phrase(
    "no memory is left for KV: weights {weights} and the other charges need {need} of {usable}",
    "没有显存留给 KV 缓存：权重 {weights}，加上其他开销共需 {need}，而可用额度为 {usable}",
)
REQUEST_TOO_LONG = Phrase(
    "one request of max_model_len {length} needs {need} of KV and there are {kv}, room for {tokens} tokens",
    "一条 max_model_len {length} 的请求需要 {need} KV 缓存，而只有 {kv}，能容纳 {tokens} 个 token",
)
NO_ROOM_FOR_GRAPHS = Phrase(
    "the graph pool ({graphs}) is captured outside the utilisation and exceeds what that leaves by {missing}",
    "图捕获的显存池（{graphs}）不在 gpu_memory_utilization 额度之内，超出余量 {missing}",
)
NO_ROOM_FOR_GRAPHS_AND_LATE = Phrase(
    "the graph pool ({graphs}) is captured outside the utilisation and exceeds what that leaves, after the pipeline's "
    "buffers ({late}), by {missing}",
    "图捕获的显存池（{graphs}）不在 gpu_memory_utilization 额度之内，扣除流水线通信缓冲（{late}）后超出余量 {missing}",
)
ON_STAGE = Phrase("stage {stage} of {stages}: {why}", "流水线第 {stage} 级（共 {stages} 级）：{why}")


def objection(q: BudgetQuestion, b: MemoryBudget, request_blocks: int) -> Said | None:
    """What stops the start of the rank that *b* is of; None when nothing does. *request_blocks*: of one longest
    request."""
    free = max(0, b.total_bytes - b.tenants_bytes - b.context_bytes)
    unplanned = b.lines[-1].bytes
    if q.max_model_len > q.model.max_position_embeddings:
        return Said.of(POSITIONS, length=q.max_model_len, positions=q.model.max_position_embeddings)
    if free < b.usable_bytes:
        return Said.of(
            TOO_LITTLE_FREE,
            utilization=f"{q.gpu_memory_utilization:g}",
            usable=Size(b.usable_bytes),
            free=Size(free),
            tenants=Size(b.tenants_bytes),
            context=Size(b.context_bytes),
        )
    if b.kv_bytes <= 0:
        return Said.of(
            NOTHING_FOR_KV,
            weights=Size(b.weights_bytes),
            need=Size(b.usable_bytes - b.kv_bytes),
            usable=Size(b.usable_bytes),
        )
    if b.num_blocks < request_blocks:
        return Said.of(
            REQUEST_TOO_LONG,
            length=q.max_model_len,
            need=Size(request_blocks * b.block_bytes),
            kv=Size(b.kv_bytes),
            tokens=b.kv_tokens,
        )
    if unplanned < 0 and b.late_bytes:
        late = Size(b.late_bytes)
        return Said.of(NO_ROOM_FOR_GRAPHS_AND_LATE, graphs=Size(b.graph_bytes), late=late, missing=Size(-unplanned))
    if unplanned < 0:
        return Said.of(NO_ROOM_FOR_GRAPHS, graphs=Size(b.graph_bytes), missing=Size(-unplanned))
    return None
