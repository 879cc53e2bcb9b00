"""Why a server does not start, in both languages: the first thing in the order of a start that stops it.

::

    asked for too much     more positions than the model has; more than is free         before anything is loaded
    nothing left           weights and charges take all that may be used                after the profiling run
    too little left        less than one request of ``max_model_len``                   when blocks are counted
    too few states         fewer blocks than sequences, each with a state of its own    when graphs are captured
    no room for late ones  graphs and buffers that come after the plan                  when graphs are captured
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hbmtwin.sim.phrases import Count, Phrase, Said, Size

if TYPE_CHECKING:
    from hbmtwin.sim.budget.memory_budget import MemoryBudget
    from hbmtwin.sim.budget.question import BudgetQuestion

POSITIONS = Phrase(
    "max_model_len {length} is above the model's {positions} positions",
    "max_model_len {length} 超过模型支持的最大位置数 {positions}",
)
TOO_LITTLE_FREE = Phrase(
    "{option} {utilization} asks for {usable} and {free} are free, as other tenants hold {tenants} and the context "
    "{context}",
    "{option} {utilization} 要求 {usable}，而空闲显存只有 {free}，其他进程占用 {tenants}，运行时上下文占用 {context}",
)
NOTHING_FOR_KV = Phrase(
    "no memory is left for KV: weights {weights} and the other charges need {need} of {usable}",
    "没有显存留给 KV 缓存：权重 {weights}，加上其他开销共需 {need}，而可用额度为 {usable}",
)
REQUEST_TOO_LONG = Phrase(
    "one request of max_model_len {length} needs {need} of KV and there are {kv}, room for {tokens} tokens",
    "一条 max_model_len {length} 的请求需要 {need} KV 缓存，而只有 {kv}，能容纳 {tokens} 个 token",
)
BLOCK_TOO_LARGE = Phrase(
    "block_size {size} is too large: a block takes {block}, so that one request of {length} tokens needs {need} where "
    "its tokens alone need {tokens}, and there are {kv} for KV",
    "block_size {size} 过大：每块占 {block}，一条 {length} token 的请求因此需要 {need}，"
    "而这些 token 本身只需要 {tokens}，KV 缓存可用 {kv}",
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
NO_ROOM = Phrase(
    "the shares need {missing} more than the device has: KV {kv} beside weights {weights} and {others} of others",
    "各部分合计超出显存 {missing}：KV 缓存 {kv}，权重 {weights}，其他 {others}",
)
TOO_FEW_STATES = Phrase(
    "max_num_seqs {seqs} exceeds the {blocks} blocks of the pool: each sequence that decodes has a Mamba state in a "
    "block of its own, and the engine refuses to capture graphs for more; take max_num_seqs {blocks}, or run eager",
    "max_num_seqs {seqs} 超过 KV 缓存的 {blocks} 个块：每条解码序列的 Mamba 状态各占一个块，引擎拒绝为更多序列捕获图；"
    "请将 max_num_seqs 设为 {blocks}，或使用 enforce_eager",
)
PROFILED_WHOLE = Phrase(
    "{why}. The profiling run computes one whole prompt of {tokens} tokens, which takes {peak} of activations: up to "
    "max_model_len {whole} this engine cuts no prompts; above it chunked prefill turns itself on, {chunk} tokens are "
    "profiled, and a longer max_model_len may start where this one does not",
    "{why}。profile 阶段会整段计算一条 {tokens} token 的提示词，激活占用 {peak}：max_model_len 不超过 {whole} 时该引擎"
    "不切分提示词；超过后会自动开启 chunked prefill，profile 只计算 {chunk} token，更长的 max_model_len 反而可能启动",
)
SAMPLER_AT_RUN_TIME = Phrase(
    "sampling a full batch of {seqs} sequences needs up to {need} when the server runs; no plan of the engine has it, "
    "and {left} are left: lower max_num_seqs or {option}",
    "推理中对 {seqs} 条序列整批采样最多需要 {need}，引擎的规划不包含这部分，而余量只有 {left}："
    "请减小 max_num_seqs 或调低 {option}",
)
ACTIVATIONS_AT_RUN_TIME = Phrase(
    "this engine profiles nothing: a full batch needs {need} for activations when the server runs, and {left} are left "
    "beside KV: lower {option} or the batch",
    "该引擎启动时没有 profile 阶段：推理中满批激活需要 {need}，而 KV 缓存之外只剩 {left}：请调低 {option} 或减小批大小",
)
ON_STAGE = Phrase("stage {stage} of {stages}: {why}", "流水线第 {stage} 级（共 {stages} 级）：{why}")


def objection(q: BudgetQuestion, b: MemoryBudget, request_blocks: int) -> Said | None:
    """What stops the start of the rank that *b* is of; None when nothing does. *request_blocks*: of one longest
    request."""
    free = max(0, b.total_bytes - b.tenants_bytes - b.context_bytes)
    if q.max_model_len > q.model.max_position_embeddings:
        return Said.of(POSITIONS, length=q.max_model_len, positions=q.model.max_position_embeddings)
    if q.rules.claims_free and free < b.usable_bytes:
        return Said.of(
            TOO_LITTLE_FREE,
            option=q.rules.fraction_name,
            utilization=f"{q.gpu_memory_utilization:g}",
            usable=Size(b.usable_bytes),
            free=Size(free),
            tenants=Size(b.tenants_bytes),
            context=Size(b.context_bytes),
        )
    if b.kv_bytes <= 0:
        why = Said.of(
            NOTHING_FOR_KV,
            weights=Size(b.weights_bytes),
            need=Size(b.usable_bytes - b.kv_bytes),
            usable=Size(b.usable_bytes),
        )
        return _as_profiled(q, b, why)
    if (
        not b.groups
        and b.num_blocks < request_blocks
        and b.kv_bytes >= (tokens := q.max_model_len * b.kv_bytes_per_token)
    ):
        return Said.of(
            BLOCK_TOO_LARGE,
            size=Count(b.block_size),
            block=Size(b.block_bytes),
            length=Count(q.max_model_len),
            need=Size(request_blocks * b.block_bytes),
            tokens=Size(tokens),
            kv=Size(b.kv_bytes),
        )
    if b.num_blocks < request_blocks:
        why = Said.of(
            REQUEST_TOO_LONG,
            length=q.max_model_len,
            need=Size(request_blocks * b.block_bytes),
            kv=Size(b.kv_bytes),
            tokens=Count(b.kv_tokens),
        )
        return _as_profiled(q, b, why)
    if _too_few_states(q, b):
        return Said.of(TOO_FEW_STATES, seqs=q.max_num_seqs, blocks=b.num_blocks)
    return _no_room(q, b)


def _as_profiled(q: BudgetQuestion, b: MemoryBudget, why: Said) -> Said:
    """*why*, and that the profiled batch is as long as a prompt may be, where a longer one would be cut."""
    rule = q.batch_rule
    if rule is None or not rule.chunk_tokens or q.max_model_len > rule.whole_up_to:
        return why
    return Said.of(
        PROFILED_WHOLE,
        why=why,
        tokens=Count(q.max_num_batched_tokens),
        peak=Size(b.activation_bytes),
        whole=Count(rule.whole_up_to),
        chunk=Count(rule.chunk_tokens),
    )


def _too_few_states(q: BudgetQuestion, b: MemoryBudget) -> bool:
    """vLLM 0.27 (``config/compilation.py``): it captures full graphs of up to ``max_num_seqs`` sequences only where the
    pool has as many blocks, the null block among them."""
    captures = q.rules.states_bound_sequences and not q.enforce_eager
    return captures and any(need.kind == "mamba" for need in b.groups) and q.max_num_seqs > b.num_blocks


def _no_room(q: BudgetQuestion, b: MemoryBudget) -> Said | None:
    """Whether what comes behind the plan has room when the engine starts: serving needs more, which is a warning."""
    if q.measured.available_kv_bytes is not None:  # it was there, whatever is estimated of the rest
        return None
    left = b.lines[-1].bytes + _needed_later(q, b)
    if left >= 0:
        return None
    outside = b.graph_bytes and not q.rules.charges_graphs
    given = q.kv_cache_memory_bytes is not None or q.num_gpu_blocks_override is not None
    if given or not outside or not q.rules.claims_free:
        others = b.total_bytes - left - b.kv_bytes - b.weights_bytes
        return Said.of(
            NO_ROOM, missing=Size(-left), kv=Size(b.kv_bytes), weights=Size(b.weights_bytes), others=Size(others)
        )
    if b.late_bytes:
        late = Size(b.late_bytes)
        return Said.of(NO_ROOM_FOR_GRAPHS_AND_LATE, graphs=Size(b.graph_bytes), late=late, missing=Size(-left))
    return Said.of(NO_ROOM_FOR_GRAPHS, graphs=Size(b.graph_bytes), missing=Size(-left))


def _needed_later(q: BudgetQuestion, b: MemoryBudget) -> int:
    """Of the lines, what is needed only when the server runs."""
    sampler = b.line("run-time sampler")
    return (0 if sampler is None else sampler.bytes) + (0 if q.rules.profiles else b.activation_bytes)


def warnings_of(q: BudgetQuestion, b: MemoryBudget) -> tuple[Said, ...]:
    """What may fail once the server runs, though it starts."""
    left = b.lines[-1].bytes + _needed_later(q, b)
    if b.lines[-1].bytes >= 0 or left < 0 or q.measured.available_kv_bytes is not None:
        return ()
    option = q.rules.fraction_name
    if not q.rules.profiles:
        return (Said.of(ACTIVATIONS_AT_RUN_TIME, need=Size(b.activation_bytes), left=Size(left), option=option),)
    need = Size(_needed_later(q, b))
    return (Said.of(SAMPLER_AT_RUN_TIME, seqs=Count(q.max_num_seqs), need=need, left=Size(left), option=option),)
