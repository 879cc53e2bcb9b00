"""The plan of a start, as a log tells it: what may be used, less what is held, is what KV gets.

::

    3.04 GiB for KV = 75.23 GiB that may be used (0.95 x 79.19 GiB) - 67.80 weights - 2.29 activation peak
                      - 2.09 outside torch

Whoever does not start wants to know which of these terms to change, and by how much: :func:`enough` says whether a
change covers what is missing, and tells it with its numbers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hbmtwin.allocators.oom import OomFacts
from hbmtwin.allocators.records import Tag
from hbmtwin.sim.explain.server import Server
from hbmtwin.sim.fit.options import SAFE_UTILIZATION
from hbmtwin.sim.phrases import Count, Phrase, Said, Size

PLAN = Phrase("{kv} for KV = {terms}", "KV 缓存 {kv} = {terms}")
MINUS = Phrase("{left} - {right}", "{left} - {right}")
TERM = Phrase("{size} {what}", "{what} {size}")
MAY_BE_USED = Phrase("that may be used ({utilization} x {total})", "可用额度（{utilization} × {total}）")
MAY_BE_USED_ONLY = Phrase("that may be used", "可用额度")
WEIGHTS = Phrase("weights", "权重")
ACTIVATIONS = Phrase("activation peak", "激活峰值")
NON_TORCH = Phrase("outside torch", "非 torch 显存")
GRAPHS = Phrase("graphs", "图捕获")
REST = Phrase("for the rest: activation peak, context, communication", "其余：激活峰值、运行时上下文、通信缓冲")
UNTOLD = Phrase(
    "({rest} more are charged that the text does not tell of, such as graphs)",
    "（另有 {rest} 计入其中而文本没有给出，例如图捕获）",
)
MISMATCH = Phrase(
    "(these figures are not of one start: their sum is off by {off})", "（这些数字不属于同一次启动，相差 {off}）"
)

REQUESTS = Phrase(
    "{tokens} tokens / {length} a request = {ratio} requests of full length at once",
    "{tokens} 个 token ÷ 每条 {length} = 同时 {ratio} 条满长请求",
)
TOKEN = Phrase(
    "{kv} / {tokens} tokens = about {each} bytes of KV a token on each rank",
    "{kv} ÷ {tokens} 个 token = 每卡每 token 约 {each} 字节 KV",
)

UTILIZATION = Phrase(
    "gpu_memory_utilization {new} in place of {old}: {gain} more for KV, which covers the {short} that are missing",
    "gpu_memory_utilization 从 {old} 提到 {new}：KV 缓存多出 {gain}，足以补上所缺的 {short}",
)
UTILIZATION_TOTAL_UNKNOWN = Phrase(
    "gpu_memory_utilization higher by {short} / (memory of the device): the text does not tell its total",
    "调高 gpu_memory_utilization，幅度为 {short} ÷ 单卡总显存（文本没有给出总量）",
)
UTILIZATION_BY = Phrase(
    "gpu_memory_utilization higher by {step}: {short} of {total}, if that much is free",
    "gpu_memory_utilization 调高 {step}：即 {total} 中的 {short}，前提是有这么多空闲",
)
UTILIZATION_NOT_ENOUGH = Phrase(
    "gpu_memory_utilization higher: {short} more would take {new} of the device, and above {safe} nothing is left for "
    "graphs, late buffers and the sampler",
    "调高 gpu_memory_utilization：补足 {short} 需要提到 {new}，而高于 {safe} 就没有余量留给图、后续通信缓冲和采样",
)
UTILIZATION_NOT_FREE = Phrase(
    "gpu_memory_utilization higher: only {free} of {total} were free when it started",
    "调高 gpu_memory_utilization：启动时 {total} 中只有 {free} 空闲",
)
BATCH = Phrase(
    "max_num_batched_tokens or max_num_seqs lower: the activation peak is {activation}, and falls with them (with the "
    "tokens of a batch, or with sequences x vocabulary); {short} are missing",
    "减小 max_num_batched_tokens 或 max_num_seqs：激活峰值 {activation} 随之下降（与批内 token 数，"
    "或序列数 × 词表大小成正比）；还缺 {short}",
)
BATCH_NOT_ENOUGH = Phrase(
    "max_num_batched_tokens or max_num_seqs lower: the whole activation peak is {activation}, and {short} are missing",
    "减小 max_num_batched_tokens 或 max_num_seqs：激活峰值总共只有 {activation}，而缺口是 {short}",
)
QUANTISED = Phrase(
    "quantised weights ({method}): about {gain} of the {weights} are freed; {short} are missing",
    "权重量化（{method}）：{weights} 权重约可省出 {gain}；缺口 {short}",
)
QUANTISED_NOT_ENOUGH = Phrase(
    "8-bit weights alone: about {gain} of the {weights} are freed, and {short} are missing",
    "仅做 8 比特权重量化：{weights} 权重约省出 {gain}，而缺口是 {short}",
)
RANKS = Phrase(
    "tensor_parallel_size {new} in place of {old}: weights fall to about {weights} a rank, which alone frees more than "
    "the {short} that are missing",
    "tensor_parallel_size 从 {old} 提到 {new}：每卡权重降到约 {weights}，仅此就超过所缺的 {short}",
)
EXPANDABLE = Phrase(
    "expandable_segments, max_split_size_mb, empty_cache: nothing is fragmented; the plan is too small before a byte "
    "of KV is placed",
    "expandable_segments、max_split_size_mb、empty_cache：这里没有碎片，是还没分配 KV 缓存，启动时的规划就已经不够",
)


_ROUNDED = (1 << 30) // 25
"""What five terms of two decimals may be off together."""
_SAME_RATIO = 0.02
"""Farther apart the log's own number of requests is not tokens through length: layers with windows or states take less
of a long request than others do."""
_LARGEST_STEP = 0.05
"""Of a share that is not told, engines' defaults are 0.9 or more: so much is left below what is safe."""


class Short(NamedTuple):
    """What a plan lacks."""

    bytes: int
    said: Size


def short_of(need: int, have: int) -> Short:
    """*need* less *have*, at least one byte: the engine has refused."""
    missing = max(1, need - have)
    return Short(missing, Size(missing))


def pool_facts(need: int, limit: int) -> OomFacts:
    """One longest request asks a pool that could at most be *limit* bytes, all of it free."""
    return OomFacts(
        allocator="kv cache",
        asked_bytes=need,
        need_bytes=need,
        tag=Tag.KV,
        owner=-1,
        stream=0,
        capacity_bytes=max(0, limit),
        limit_bytes=max(0, limit),
        reserved_bytes=0,
        allocated_bytes=0,
        requested_bytes=0,
        largest_free_bytes=max(0, limit),
        cached_free_bytes=max(0, limit),
        driver_free_bytes=0,
        fixed_pool=True,
    )


def plan(server: Server) -> list[Said]:
    """The subtraction, as far as the text tells its terms; empty where it does not."""
    usable, kv = server.usable_bytes, server.size("available_kv_bytes")
    if usable is None or kv is None or "kv_cache_memory_bytes" in server.numbers:
        return []
    what = Said.of(MAY_BE_USED_ONLY)
    if server.utilization is not None and (total := server.size("total_bytes")) is not None:
        what = Said.of(MAY_BE_USED, utilization=f"{server.utilization:g}", total=Size(total))
    terms = Said.of(TERM, size=Size(usable), what=what)
    rest = usable - kv
    known = (
        ("weights_bytes", WEIGHTS),
        ("activation_bytes", ACTIVATIONS),
        ("non_torch_bytes", NON_TORCH),
    )
    for name, phrase in known:
        if (held := server.size(name)) is not None:
            terms = Said.of(MINUS, left=terms, right=Said.of(TERM, size=Size(held), what=Said.of(phrase)))
            rest -= held
    told = all(server.size(name) is not None for name, _ in known)
    graphs = server.size("graph_estimate_bytes") or 0
    if told and graphs and abs(rest - graphs) < abs(rest):
        terms = Said.of(MINUS, left=terms, right=Said.of(TERM, size=Size(graphs), what=Said.of(GRAPHS)))
        rest -= graphs
    if not told and rest > 0:
        terms = Said.of(MINUS, left=terms, right=Said.of(TERM, size=Size(rest), what=Said.of(REST)))
        rest = 0
    lines = [Said.of(PLAN, kv=Size(kv), terms=terms)]
    if abs(rest) > _ROUNDED:
        lines.append(Said.of(UNTOLD, rest=Size(rest)) if rest > 0 else Said.of(MISMATCH, off=Size(-rest)))
    return lines


def capacity(server: Server) -> list[Said]:
    """What the room for KV comes to in tokens and requests; empty where the text does not tell it."""
    tokens, kv, length = server.size("kv_tokens"), server.size("available_kv_bytes"), server.size("max_model_len")
    lines = []
    if tokens and kv and kv > 0:
        lines.append(Said.of(TOKEN, kv=Size(kv), tokens=Count(tokens), each=Count(kv // tokens)))
    own = server.numbers.get("max_concurrency")
    if tokens and length and (not own or abs(tokens / length - own) <= _SAME_RATIO * own):
        lines.append(Said.of(REQUESTS, tokens=Count(tokens), length=Count(length), ratio=f"{tokens / length:.2f}"))
    return lines


def enough(server: Server, short: Short, *, ranks: bool = True) -> tuple[list[Said], list[Said]]:
    """Changes to the terms of the plan: those that cover what is *short*, and those that do not; of *ranks* where the
    demand does not fall with them."""
    helps: list[Said] = []
    not_enough: list[Said] = []
    terms = [_utilization(server, short), _batch(server, short), _weights(server, short)]
    for judged in (*terms, _ranks(server, short) if ranks else None):
        if judged is not None:
            said, covers = judged
            (helps if covers else not_enough).append(said)
    return helps, [*not_enough, Said.of(EXPANDABLE)]


def _utilization(server: Server, short: Short) -> tuple[Said, bool] | None:
    total, old = server.size("total_bytes"), server.utilization
    if total is None:
        return Said.of(UTILIZATION_TOTAL_UNKNOWN, short=short.said), True
    if old is None:
        usable = server.usable_bytes
        if usable is None:
            step = math.ceil(100 * short.bytes / total) / 100
            return Said.of(UTILIZATION_BY, step=f"{step:g}", short=short.said, total=Size(total)), step < _LARGEST_STEP
        old = round(usable / total, 4)
    new = math.ceil(100 * (old + short.bytes / total) - 1e-9) / 100
    if new > SAFE_UTILIZATION:
        return Said.of(UTILIZATION_NOT_ENOUGH, short=short.said, new=f"{new:.2f}", safe=SAFE_UTILIZATION), False
    free = server.size("free_bytes")
    if free is not None and new * total > free:
        return Said.of(UTILIZATION_NOT_FREE, free=Size(free), total=Size(total)), False
    gain = Size(round((new - old) * total))
    return Said.of(UTILIZATION, new=f"{new:g}", old=f"{old:g}", gain=gain, short=short.said), True


def _batch(server: Server, short: Short) -> tuple[Said, bool] | None:
    activation = server.size("activation_bytes")
    if activation is None:
        return None
    covers = short.bytes * 4 <= activation * 3
    return Said.of(BATCH if covers else BATCH_NOT_ENOUGH, activation=Size(activation), short=short.said), covers


def _weights(server: Server, short: Short) -> tuple[Said, bool] | None:
    weights = server.size("weights_bytes")
    if weights is None or server.words.get("quantization"):
        return None
    gain = weights * 9 // 20  # embeddings and the head stay as they are
    method = "W8A8" if server.engine == "vllm-ascend" else "FP8, W8A8"
    said = {"gain": Size(gain), "weights": Size(weights), "short": short.said, "method": method}
    return Said.of(QUANTISED if gain >= short.bytes else QUANTISED_NOT_ENOUGH, **said), gain >= short.bytes


def _ranks(server: Server, short: Short) -> tuple[Said, bool] | None:
    weights = server.size("weights_bytes")
    old = int(server.numbers.get("tensor_parallel_size", 1))
    if weights is None or weights // 2 < short.bytes:
        return None
    return Said.of(RANKS, new=2 * old, old=old, weights=Size(weights // 2), short=short.said), True
