"""Why a running engine preempts, retracts or refuses: the KV cache is full, and what is asked for can wait.

::

    vLLM v0    Sequence group .. is preempted ..., total_cumulative_preemption_cnt
    vLLM v1    Running: r reqs, Waiting: w reqs, [Preemptions: p,] GPU KV cache usage: 99.8 %
    SGLang     KV cache pool is full. Retract requests;  Decode batch. #running-req .., token usage: 0.98

Nobody dies of it: preempted requests are computed again. More for KV, or less in flight, is the cure; where the device
itself ran out while serving, which a message of the allocator tells, it is the opposite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hbmtwin.allocators.oom import classify
from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.judge import Judgement
from hbmtwin.sim.explain.plan import pool_facts
from hbmtwin.sim.explain.server import Server
from hbmtwin.sim.phrases import Count, Phrase, Said, Size

FULL = 0.95
"""Usage above which a pool is full: what is left is the last block of each request."""

PREEMPTS = Phrase(
    "the KV cache is full while serving: running requests are preempted and computed again later ({count} so far)",
    "推理中 KV 缓存已满：正在运行的请求被抢占，之后重新计算（目前 {count} 次）",
)
RETRACTS = Phrase(
    "the token pool is full while serving: running requests are retracted and computed again later ({count} in these "
    "lines)",
    "推理中 token 池已满：正在运行的请求被撤回，之后重新计算（这些行中共 {count} 条）",
)
QUEUES = Phrase(
    "the KV cache is full while serving ({usage} of it), and {waiting} requests wait",
    "推理中 KV 缓存已满（{usage}），有 {waiting} 条请求在排队",
)
NO_SLOTS = Phrase(
    "a batch was scheduled that the token pool has no room for: it is full, and nothing more can be evicted",
    "已调度的批在 token 池中放不下：池已满，也没有可驱逐的缓存",
)
SWAP = Phrase(
    "the KV cache is full, requests were to be swapped out, and the swap space of the host is full: the engine ends",
    "KV 缓存已满，需要把请求换出到主机内存，而 swap_space 也已用完：引擎因此退出",
)
REQUEST = Phrase(
    "one request of {tokens} tokens was refused: max_model_len is {length}; no shortage of memory",
    "一条 {tokens} token 的请求被拒绝：max_model_len 为 {length}，不是显存不足",
)
NEVER = Phrase(
    "one prompt of {tokens} tokens was dropped: it has more blocks than the whole KV cache, however idle the server is",
    "一条 {tokens} token 的提示词被丢弃：即使服务空闲，它需要的块也超过整个 KV 缓存",
)
SERVED = Phrase(
    "the server runs, and its KV cache is not full ({usage} at most, {waiting} waiting)",
    "服务运行正常，KV 缓存未满（最高 {usage}，{waiting} 条排队）",
)

USAGE = Phrase(
    "{running} running, {waiting} waiting, {usage} of the KV cache in use",
    "运行 {running}，排队 {waiting}，KV 使用 {usage}",
)
HOLDS = Phrase(
    "{usage} of {tokens} tokens / {running} running = about {each} tokens held by each",
    "{tokens} token × {usage} ÷ {running} 条 = 每条约占 {each} 个 token",
)
CONCURRENCY = Phrase(
    "the KV cache holds {tokens} tokens: {fit} requests of {length} at full length, and max_num_seqs lets {seqs} run",
    "KV 缓存容纳 {tokens} 个 token：只够 {fit} 条 {length} 的满长请求，而 max_num_seqs 允许 {seqs} 条同时运行",
)

MORE_KV = Phrase(
    "more for KV: gpu_memory_utilization higher, if the device has room outside it (each 0.01 is {step})",
    "增大 KV 缓存：若卡上还有余量，调高 gpu_memory_utilization（每 0.01 即 {step}）",
)
MORE_KV_BARE = Phrase(
    "more for KV: gpu_memory_utilization higher, if the device has room outside it",
    "增大 KV 缓存：若卡上还有余量，调高 gpu_memory_utilization",
)
MORE_SGLANG = Phrase(
    "more for the pool: --mem-fraction-static higher, if memory stays free after the start",
    "增大 token 池：若启动后仍有空闲显存，调高 --mem-fraction-static",
)
SMALLER_KV = Phrase(
    "fewer bytes a token: kv_cache_dtype fp8 where the device has it, or more ranks (tensor_parallel_size)",
    "减少每 token 字节：设备支持时用 kv_cache_dtype fp8，或增加卡数（tensor_parallel_size）",
)
FEWER = Phrase(
    "max_num_seqs about {seqs}: fewer run at once and none is computed twice; the others wait in the queue",
    "max_num_seqs 约 {seqs}：同时运行的请求变少，不再重复计算，其余请求排队",
)
FEWER_BARE = Phrase(
    "max_num_seqs lower: fewer run at once and none is computed twice; the others wait in the queue",
    "减小 max_num_seqs：同时运行的请求变少，不再重复计算，其余请求排队",
)
FEWER_SGLANG = Phrase(
    "--max-running-requests lower, or --schedule-conservativeness above 1: fewer are admitted",
    "减小 --max-running-requests，或把 --schedule-conservativeness 设到 1 以上：少接纳一些请求",
)
SWAP_MORE = Phrase("swap_space larger, or preemption by recomputing", "增大 swap_space，或改用重计算方式抢占")
SHORTER_PROMPT = Phrase(
    "a prompt and max_tokens of at most {length} together, or a server with a larger max_model_len",
    "提示词与 max_tokens 之和不超过 {length}，或以更大的 max_model_len 启动服务",
)
LENGTH_NOT = Phrase(
    "max_model_len shorter: blocks are taken as tokens come, not set aside for the longest request; it only refuses "
    "long ones",
    "减小 max_model_len：KV 块按实际 token 分配，不会按最大长度预留（它只会拒绝长请求）",
)
EXPANDABLE_NOT = Phrase(
    "expandable_segments, empty_cache: the KV cache has all of its memory since the start; nothing of it is fragmented",
    "expandable_segments、empty_cache：KV 缓存的显存在启动时已全部分配，不存在碎片",
)
LOWER_NOT = Phrase(
    "gpu_memory_utilization lower, the cure where the device itself runs out: the KV cache would be smaller still",
    "调低 gpu_memory_utilization（那是设备显存不足时的办法）：KV 缓存会更小",
)


def served(findings: Sequence[Finding], server: Server) -> list[Judgement]:
    """At most one judgement of what the lines of a running engine tell. O(findings)."""
    by_kind: dict[str, list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault(finding.kind, []).append(finding)
    found: list[Judgement] = []
    if swap := by_kind.get("swap_full"):
        found.append(_short(swap[0], Said.of(SWAP), [], [Said.of(SWAP_MORE)], server))
    metrics = [*by_kind.get("metrics", ()), *by_kind.get("sglang_batch", ())]
    retracts = by_kind.get("sglang_retract", [])
    slots = by_kind.get("sglang_out_of_slots", [])
    peak = max(metrics, key=_used, default=None)
    told = _usage(peak, server) if peak is not None else []
    if count := _preemptions(by_kind):
        first = (by_kind.get("preempted") or [f for f in metrics if f.numbers.get("preemptions")])[0]
        found.append(_short(first, Said.of(PREEMPTS, count=Count(count)), told, _less(peak, server), server))
    if slots:
        found.append(_short(slots[0], Said.of(NO_SLOTS), told, [Said.of(FEWER_SGLANG)], server))
    elif retracts:
        count = sum(int(finding.numbers.get("retracted", 1)) for finding in retracts)
        said = Said.of(RETRACTS, count=Count(count))
        found.append(_short(retracts[0], said, told, [Said.of(FEWER_SGLANG)], server))
    if not found and peak is not None and _used(peak) >= FULL and peak.numbers.get("waiting"):
        usage, waiting = _percent(peak), Count(int(peak.numbers["waiting"]))
        said = Said.of(QUEUES, usage=usage, waiting=waiting)
        found.append(_short(peak, said, told, _less(peak, server), server))
    found += [_never(finding, server) for finding in by_kind.get("request_never", ())[:1]]
    return [*found, *(_refused(finding) for finding in by_kind.get("request_too_long", ())[:1])]


def healthy(findings: Sequence[Finding]) -> Said | None:
    """What is said of a running engine that lacks nothing; None where no line of one was pasted."""
    metrics = [f for f in findings if f.kind in ("metrics", "sglang_batch")]
    peak = max(metrics, key=_used, default=None)
    if peak is None:
        return None
    waiting = max(int(finding.numbers.get("waiting", 0)) for finding in metrics)
    return Said.of(SERVED, usage=_percent(peak), waiting=Count(waiting))


def _preemptions(by_kind: dict[str, list[Finding]]) -> int:
    """v0 counts since its start, v1 in each interval."""
    since_start = [int(f.numbers.get("preemptions", 1)) for f in by_kind.get("preempted", ())]
    in_intervals = [int(f.numbers.get("preemptions", 0)) for f in by_kind.get("metrics", ())]
    return max(since_start, default=0) or sum(in_intervals)


def _used(finding: Finding) -> float:
    """How full the fullest of its pools is: hybrid models have one more, for windows or for states."""
    return max(finding.numbers.get(name, 0.0) for name in ("kv_usage", "swa_usage", "state_usage"))


def _percent(finding: Finding) -> str:
    return f"{100 * _used(finding):.1f} %"


def _usage(peak: Finding, server: Server) -> list[Said]:
    """The books of the fullest line; nothing of one that was cut off before them."""
    if "running" not in peak.numbers or "kv_usage" not in peak.numbers:
        return []
    running, waiting = int(peak.numbers.get("running", 0)), int(peak.numbers.get("waiting", 0))
    usage = _percent(peak)
    lines = [Said.of(USAGE, running=Count(running), waiting=Count(waiting), usage=usage)]
    tokens = server.size("kv_tokens")
    if tokens and running:
        each = round(tokens * peak.numbers.get("kv_usage", 0.0) / running)
        lines.append(Said.of(HOLDS, usage=usage, tokens=Count(tokens), running=Count(running), each=Count(each)))
    length, seqs = server.size("max_model_len"), server.size("max_num_seqs")
    if tokens and length and seqs:
        fit = f"{tokens / length:.2f}"
        lines.append(Said.of(CONCURRENCY, tokens=Count(tokens), fit=fit, length=Count(length), seqs=Count(seqs)))
    return lines


def _less(peak: Finding | None, server: Server) -> list[Said]:
    """How many to let run: as many as ran when the pool was full."""
    running = int(peak.numbers.get("running", 0)) if peak is not None else 0
    return [Said.of(FEWER, seqs=Count(running)) if running > 1 else Said.of(FEWER_BARE)]


def _short(
    finding: Finding, said: Said, arithmetic: Sequence[Said], first: Sequence[Said], server: Server
) -> Judgement:
    """The pool lacks a block, and all of it is held by sequences."""
    capacity = server.size("available_kv_bytes") or 0
    facts = replace(pool_facts(1, max(1, capacity)), largest_free_bytes=0, cached_free_bytes=0)
    sglang = server.engine == "sglang"
    total = server.size("total_bytes")
    more = Said.of(MORE_KV, step=Size(total // 100)) if total else Said.of(MORE_KV_BARE)
    return Judgement(
        classify(facts),
        "run_time",
        finding.rank,
        said,
        tuple(arithmetic),
        (*first, Said.of(MORE_SGLANG) if sglang else more, Said.of(SMALLER_KV)),
        (Said.of(LOWER_NOT), Said.of(LENGTH_NOT), Said.of(EXPANDABLE_NOT)),
        facts,
        finding.line,
        "step",
    )


def _never(finding: Finding, server: Server) -> Judgement:
    tokens = int(finding.numbers["request_tokens"])
    capacity = server.size("kv_tokens") or 0
    facts = pool_facts(max(tokens, capacity + 1), capacity)  # both in tokens: only their order matters
    told = _short(finding, Said.of(NEVER, tokens=Count(tokens)), [], [], server)
    return replace(
        told, cause=classify(facts), facts=facts, does_not_help=(Said.of(LOWER_NOT), Said.of(EXPANDABLE_NOT))
    )


def _refused(finding: Finding) -> Judgement:
    length = Count(int(finding.numbers.get("max_model_len", 0)))
    said = Said.of(REQUEST, tokens=Count(int(finding.numbers.get("request_tokens", 0))), length=length)
    return Judgement(
        None,
        "run_time",
        finding.rank,
        said,
        (),
        (Said.of(SHORTER_PROMPT, length=length),),
        (Said.of(EXPANDABLE_NOT), Said.of(LOWER_NOT)),
        pool_facts(0, 0),
        finding.line,
    )
