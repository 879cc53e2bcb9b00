"""Why SGLang or MindIE did not start.

::

    SGLang    pool = free after loading - (1 - mem_fraction_static) x free before loading      <= 0: it does not start
              graphs are captured after the pool was placed, in what the fraction leaves       lower the fraction
    MindIE    a warm-up with maxPrefillTokens runs before npuMemSize is taken                  fewer prefill tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from hbmtwin.allocators.oom import OomFacts, classify
from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.judge import Judgement
from hbmtwin.sim.explain.plan import EXPANDABLE, pool_facts
from hbmtwin.sim.explain.server import Server
from hbmtwin.sim.phrases import Count, Phrase, Said, Size

NO_POOL = Phrase(
    "nothing is left for SGLang's token pool: the loaded weights take all of its --mem-fraction-static",
    "SGLang 的 token 池没有剩余显存：加载的权重已用完 --mem-fraction-static 的份额",
)
CAPTURE = Phrase(
    "graphs were captured after the token pool was placed, and what --mem-fraction-static leaves was too little",
    "图捕获在 token 池分配之后进行，--mem-fraction-static 之外的余量不够",
)
SMALL_POOL = Phrase(
    "the token pool holds {tokens} tokens, fewer than one request of context_length {length}: it starts, and long "
    "requests are refused",
    "token 池只能容纳 {tokens} 个 token，少于一条 context_length {length} 的请求：能启动，但长请求会被拒绝",
)
UNBALANCED = Phrase(
    "the ranks' devices do not have the same memory free: other processes hold some of one",
    "各卡的空闲显存不一致：某张卡被其他进程占用",
)
WARM_UP = Phrase(
    "MindIE's warm-up ran out of memory with maxInputTokenLen {length}: it computes a full prefill batch before the KV "
    "cache is sized",
    "MindIE 预热时显存不足（maxInputTokenLen {length}）：它在确定 KV 缓存大小之前会跑一个满的 prefill 批",
)
TOO_FEW_TOKENS = Phrase(
    "TensorRT-LLM's KV cache holds fewer tokens than one sequence of the longest length takes",
    "TensorRT-LLM 的 KV 缓存容纳的 token 少于一条最长序列所需",
)
SHORTER_SEQUENCE = Phrase(
    "max_seq_len (max_input_len + max_output_len) or the beam width smaller when the engine is built",
    "构建引擎时减小 max_seq_len（max_input_len + max_output_len）或 beam width",
)
MORE_TOKENS = Phrase(
    "kv_cache_free_gpu_mem_fraction higher, or max_tokens_in_paged_kv_cache larger where it is set",
    "调高 kv_cache_free_gpu_mem_fraction；若设置了 max_tokens_in_paged_kv_cache，则增大它",
)
FEWER_SEQUENCES_NOT = Phrase(
    "max_batch_size smaller: this is one sequence alone", "减小 max_batch_size：这里只是一条序列"
)
POOL = Phrase(
    "{pool} for the pool = {after} free after loading - (1 - {fraction}) x {before} free before",
    "token 池 {pool} = 加载后空闲 {after} -（1 - {fraction}）× 加载前空闲 {before}",
)
FRACTION = Phrase(
    "--mem-fraction-static above {least} (1 - {after} / {before}); the default leaves room for graphs and activations, "
    "so take little more",
    "--mem-fraction-static 大于 {least}（1 - {after} ÷ {before}）；默认值为图和激活留了余量，不要高出太多",
)
FRACTION_TOLD = Phrase(
    "--mem-fraction-static above {least} (the engine says so itself)",
    "--mem-fraction-static 大于 {least}（引擎自己给出）",
)
FRACTION_BARE = Phrase(
    "--mem-fraction-static higher: it is the share of the memory free before loading, weights included",
    "调高 --mem-fraction-static：它是加载前空闲显存中（含权重）的比例",
)
LESS_WEIGHT = Phrase(
    "less for weights: quantised weights, a smaller model, or a larger --tp",
    "减少权重占用：量化、更小的模型，或增大 --tp",
)
CONTEXT_NOT = Phrase(
    "--context-length shorter: the pool is not sized by it", "减小 --context-length：token 池大小与它无关"
)
LOWER_FRACTION = Phrase(
    "--mem-fraction-static lower: each 0.01 leaves about {step} more outside the pool",
    "调低 --mem-fraction-static：每 0.01 约多留出 {step}",
)
LOWER_FRACTION_BARE = Phrase(
    "--mem-fraction-static lower: more is left outside the pool", "调低 --mem-fraction-static：token 池之外留得更多"
)
FEWER_GRAPHS = Phrase(
    "--cuda-graph-max-bs smaller: fewer graphs; --disable-cuda-graph: none, and slower",
    "减小 --cuda-graph-max-bs：图更少；--disable-cuda-graph：不捕获图，但变慢",
)
HIGHER_NOT = Phrase(
    "--mem-fraction-static higher, the cure of a pool that is too small: it leaves graphs still less",
    "调高 --mem-fraction-static（那是 token 池过小时的办法）：留给图的更少",
)
SHORTER = Phrase("--context-length {tokens} or less", "--context-length 不超过 {tokens}")
OTHERS_AWAY = Phrase(
    "end the other processes on these devices, or choose devices that nobody uses (CUDA_VISIBLE_DEVICES, "
    "ASCEND_RT_VISIBLE_DEVICES)",
    "结束这些卡上的其他进程，或选用空闲的卡（CUDA_VISIBLE_DEVICES、ASCEND_RT_VISIBLE_DEVICES）",
)
FEWER_TOKENS = Phrase(
    "maxPrefillTokens (and maxInputTokenLen) lower in config.json; or more cards (worldSize)",
    "在 config.json 中减小 maxPrefillTokens（及 maxInputTokenLen），或增加卡数（worldSize）",
)
KV_NOT = Phrase("npuMemSize: it is taken after the warm-up", "npuMemSize：它在预热之后才分配")


def no_pool(finding: Finding, server: Server) -> Judgement:
    """The fraction does not even hold the weights."""
    before, after = server.size("load_begin_bytes"), server.size("load_end_bytes")
    fraction = finding.numbers.get("mem_fraction_static", server.numbers.get("mem_fraction_static"))
    arithmetic, helps = [], []
    if before and after is not None:
        least = f"{math.ceil(1000 * (1 - after / before)) / 1000:.3f}"
        helps.append(Said.of(FRACTION, least=least, after=Size(after), before=Size(before)))
        if fraction is not None:
            pool = Size(after - round((1 - fraction) * before))
            arithmetic.append(
                Said.of(POOL, pool=pool, after=Size(after), fraction=f"{fraction:g}", before=Size(before))
            )
    elif (told := finding.numbers.get("least_fraction")) is not None:
        helps.append(Said.of(FRACTION_TOLD, least=f"{told:g}"))
    else:
        helps.append(Said.of(FRACTION_BARE))
    helps.append(Said.of(LESS_WEIGHT))
    facts = pool_facts(1, 0)
    return _judged(finding, facts, Said.of(NO_POOL), arithmetic, helps, [Said.of(CONTEXT_NOT), Said.of(EXPANDABLE)])


def capture_failed(finding: Finding, server: Server) -> Judgement:
    """Graphs have no room beside the pool."""
    before = server.size("load_begin_bytes")
    lower = Said.of(LOWER_FRACTION, step=Size(before // 100)) if before else Said.of(LOWER_FRACTION_BARE)
    helps = [lower, Said.of(FEWER_GRAPHS)]
    return _judged(finding, None, Said.of(CAPTURE), [], helps, [Said.of(HIGHER_NOT), Said.of(CONTEXT_NOT)])


def small_pool(finding: Finding, server: Server) -> Judgement:
    """It starts, and one longest request does not fit."""
    tokens, length = int(finding.numbers["kv_tokens"]), int(finding.numbers.get("max_model_len", 0))
    facts = pool_facts(max(length, tokens + 1), tokens)  # both in tokens: only their order matters
    said = Said.of(SMALL_POOL, tokens=Count(tokens), length=Count(length))
    helps = [Said.of(SHORTER, tokens=Count(tokens)), Said.of(FRACTION_BARE)]
    return _judged(finding, facts, said, [], helps, [Said.of(EXPANDABLE)])


def unbalanced(finding: Finding, server: Server) -> Judgement:
    """Somebody else is on one of the devices."""
    return _judged(finding, None, Said.of(UNBALANCED), [], [Said.of(OTHERS_AWAY)], [Said.of(EXPANDABLE)])


def too_few_tokens(finding: Finding, server: Server) -> Judgement:
    """TensorRT-LLM's pool is below one sequence."""
    helps = [Said.of(SHORTER_SEQUENCE), Said.of(MORE_TOKENS)]
    return _judged(
        finding,
        pool_facts(1, 0),
        Said.of(TOO_FEW_TOKENS),
        [],
        helps,
        [Said.of(FEWER_SEQUENCES_NOT), Said.of(EXPANDABLE)],
    )


def warm_up(finding: Finding, server: Server) -> Judgement:
    """MindIE's warm-up."""
    length = Count(int(finding.numbers.get("max_input_tokens", 0)))
    return _judged(
        finding,
        None,
        Said.of(WARM_UP, length=length),
        [],
        [Said.of(FEWER_TOKENS)],
        [Said.of(KV_NOT), Said.of(EXPANDABLE)],
    )


def _judged(
    finding: Finding,
    facts: OomFacts | None,
    said: Said,
    arithmetic: Sequence[Said],
    helps: Sequence[Said],
    does_not_help: Sequence[Said],
) -> Judgement:
    """*facts* where the pool is short, None where the text does not tell what was."""
    return Judgement(
        classify(facts) if facts is not None else None,
        "start_up",
        finding.rank,
        said,
        tuple(arithmetic),
        tuple(helps),
        tuple(does_not_help),
        facts or pool_facts(0, 0),
        finding.line,
    )


OTHER_START: dict[str, Callable[[Finding, Server], Judgement]] = {
    "sglang_no_kv": no_pool,
    "sglang_capture_failed": capture_failed,
    "sglang_short_pool": small_pool,
    "sglang_unbalanced": unbalanced,
    "trt_too_few_tokens": too_few_tokens,
    "mindie_warmup": warm_up,
}
"""Who judges an error, by its kind."""
