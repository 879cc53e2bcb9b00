"""Runs that got nowhere, in words: a standstill with its cause and its cure, and how much was computed again."""

from __future__ import annotations

from hbmtwin.dashboard.verdict import LIST_COMMA, SEMICOLON, Summary, bytes_text, joined, percent_text
from hbmtwin.sim.phrases import Count, Lang, Phrase, Said

NAMED = 5
"""Requests of a standstill that are told by number."""

DEADLOCK = Phrase(
    "Deadlock at {time_s:,.3f} s: {who}, the scheduler plans nothing for them, and no other request is to come. That "
    "is a fault of the scheduler or of the KV policy, not of a setting: take another scheduler.policy (vllm), and "
    "report this one with its scenario.",
    "{time_s:,.3f} s 时死锁：{who}，调度器不再为其安排计算，也不会再有其他请求到来。这是调度器或 KV 策略的缺陷，"
    "不是参数问题：请换用其他 scheduler.policy（vllm），并附上场景反馈。",
)
STUCK = Phrase("{who} run or wait", "{who}在运行或排队")
STUCK_ALONE = Phrase("{who} runs or waits", "{who}在运行或排队")
LIVE_LOCK = Phrase(
    "Live-lock from {since_s:,.3f} s: {who} give way to one another, {preemptions:,} times by {time_s:,.3f} s, are "
    "computed again, and none gets another token: the same state came again and again. At full length they take "
    "{size} ({tokens:,} tokens), and there are {pool} of KV. Cure: scheduler.policy = 'vllm', which always lets one go "
    "on; scheduler.max_num_seqs = {seqs}; memory.admission = 'reserve' where the KV policy has it; or more memory "
    "(engine.gpu_memory_utilization).",
    "自 {since_s:,.3f} s 起活锁：{who}互相抢占，到 {time_s:,.3f} s 共 {preemptions:,} 次，反复重计算，没有一条再生成 "
    "token：相同的状态一再出现。它们达到最大长度时需要 {size}（{tokens:,} 个 token），而 KV 共有 {pool}。"
    "解决办法：scheduler.policy = 'vllm'，总能让其中一条继续；scheduler.max_num_seqs = {seqs}；"
    "KV 策略支持时用 memory.admission = 'reserve'；或增大显存（engine.gpu_memory_utilization）。",
)
ONE_REQUEST = Phrase("request {ids}", "请求 {ids} ")
REQUESTS = Phrase("requests {ids}", "请求 {ids} ")
MORE_REQUESTS = Phrase("requests {ids} and {more} more", "请求 {ids} 及另外 {more} 条")
RECOMPUTED = Phrase("{again:,} of {all:,} computed ({share})", "计算的 {all:,} 个中有 {again:,} 个（{share}）")
THRASHED = Phrase(
    "thrashing {minutes}, first from {first_s:,} s: at least half of what was computed had been computed before "
    "({share} in the minute from {worst_s:,} s); fewer scheduler.max_num_seqs, memory.admission = 'reserve' or more "
    "memory for KV would spare it",
    "抢占抖动{minutes}，首次从 {first_s:,} s 起：计算量中至少一半是重计算（从 {worst_s:,} s 起的一分钟内为 {share}）；"
    "减小 scheduler.max_num_seqs、用 memory.admission = 'reserve' 或给 KV 更多显存即可避免",
)
MINUTES = Phrase("in {count:,} minutes", "共 {count:,} 分钟")
MINUTE = Phrase("in one minute", "共 1 分钟")
UNFINISHED = Phrase("{count:,} unfinished: {why}", "{count:,} 条未完成：{why}")
WHY_UNFINISHED = (
    Phrase("the run ended before they were sent", "运行结束时尚未发出"),
    Phrase("an earlier turn of their session was rejected", "会话中更早的一轮被拒绝"),
    Phrase("what they were to follow was in the server when the run ended", "运行结束时其前一轮还在服务中"),
    Phrase(
        "what they were to follow was rejected, or in the server when the run ended",
        "其前一轮被拒绝，或运行结束时还在服务中",
    ),
)
"""As results have them in English."""


def standstill_in_words(summary: Summary, lang: Lang = "en") -> str:
    """What came to a standstill, why, and which settings would have kept it going."""
    found = summary["standstill"]
    who = _requests(found["requests"], found["num_requests"], lang)
    if found["kind"] == "deadlock":
        stuck = Said.of(STUCK_ALONE if found["num_requests"] == 1 else STUCK, who=who)
        return Said.of(DEADLOCK, time_s=found["time_s"], who=stuck).text(lang)
    need, pool = found["kv_bytes"], found["kv_pool_bytes"]
    return Said.of(
        LIVE_LOCK,
        since_s=found["since_s"],
        who=who,
        preemptions=found["preemptions"],
        time_s=found["time_s"],
        size=bytes_text(need),
        tokens=found["tokens"],
        pool=bytes_text(pool),
        seqs=max(1, found["num_requests"] * pool // max(need, pool + 1)),
    ).text(lang)


def _requests(ids: list[int], count: int, lang: Lang) -> Said:
    named = joined((str(id) for id in ids[:NAMED]), LIST_COMMA, lang)
    if count > NAMED:
        return Said.of(MORE_REQUESTS, ids=named, more=Count(count - NAMED))
    return Said.of(ONE_REQUEST if count == 1 else REQUESTS, ids=named)


def recomputed_text(summary: Summary, lang: Lang = "en") -> str:
    """Tokens that preemptions made the server compute again, and their share of all."""
    share = percent_text(summary["recomputed_share"])
    again, all = summary["recomputed_tokens"], summary["computed_tokens"]
    return Said.of(RECOMPUTED, again=again, all=all, share=share).text(lang)


def thrashing_text(summary: Summary, lang: Lang = "en") -> str:
    """In which minutes the server undid its preemptions for most of the time, and what would spare it."""
    found = summary["thrashing"]
    return Said.of(
        THRASHED,
        minutes=Said.of(MINUTES if found["minutes"] > 1 else MINUTE, count=found["minutes"]),
        first_s=found["first_s"],
        share=percent_text(found["worst_share"]),
        worst_s=found["worst_s"],
    ).text(lang)


def unfinished_text(summary: Summary, lang: Lang = "en") -> str:
    """Why requests were never sent; empty where all were."""
    known = {why.en: Said.of(why) for why in WHY_UNFINISHED}
    said = (
        Said.of(UNFINISHED, count=count, why=known.get(why, why)).text(lang)
        for why, count in summary["unfinished_because"].items()
    )
    return joined(said, SEMICOLON, lang)
