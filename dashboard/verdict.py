"""Results in words and rows: what the terminal, the report and the app all say about a run, in English or in Chinese.

::

    fate, headline        how a run ended, in a few words; who held, who died of what
    oom_in_words          one death: when, who asked for what, what was free, and why that did not do
    rows                  a comparison's table under HEADER
    rejections, goodput   what is told of requests
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hbmtwin.allocators.oom import Cause
from hbmtwin.api import RULES, Result, differences
from hbmtwin.dashboard.rules_in_chinese import RULES_IN_CHINESE
from hbmtwin.sim.explain.words import NAMES
from hbmtwin.sim.phrases import Lang, Phrase, Said

Summary = Mapping[str, Any]

GIB = 2**30
MISSING = "–"

CAUSES = {
    "never_fits": Phrase("It would not fit even in the empty device.", "即使设备全空也放不下。"),
    "allocator_rule": Phrase(
        "A free piece is large enough, but a rule of the allocator bars it: {rule}.",
        "有足够大的空闲块，但分配器规则不允许使用：{rule}。",
    ),
    "external_fragmentation": Phrase(
        "Enough is free in all, but no single piece is large enough.", "空闲总量足够，但没有足够大的连续块。"
    ),
    "growth_copy": Phrase(
        "The old copies of growing buffers, which live until the step ends, hold what it needs.",
        "增长缓冲区的旧副本到本步结束才释放，占用了所缺的显存。",
    ),
    "reservation": Phrase(
        "Room that is held, but filled by no token, is what it needs.", "已占用但没有 token 填充的部分正是所缺的显存。"
    ),
    "parked_history": Phrase(
        "Histories that are kept between turns hold what it needs.", "轮次之间保留的历史会话占用了所缺的显存。"
    ),
    "other_tenant": Phrase("Other processes on the device hold what it needs.", "设备上的其他进程占用了所缺的显存。"),
    "runtime_peak": Phrase(
        "Activations and frees that wait for an event hold what it needs.",
        "激活以及等待事件才能释放的显存正是所缺的部分。",
    ),
    "shortage": Phrase("The device is full of live data.", "设备已被在用数据占满。"),
}
"""What each cause of an out-of-memory record means."""

TAGS = {
    "weight": Phrase("weights", "权重"),
    "activation": Phrase("activations", "激活"),
    "workspace": Phrase("workspace", "workspace"),
    "kv": Phrase("KV", "KV"),
}

SLO_NAMES = {
    "ttft_s": Phrase("TTFT", "TTFT"),
    "tpot_s": Phrase("TPOT", "TPOT"),
    "e2e_s": Phrase("end to end", "端到端"),
}

REASONS = {
    "kv_capacity": Phrase("kv_capacity", "KV 容量不足"),
    "out_of_memory": Phrase("out_of_memory", "显存不足"),
    "swap_space": Phrase("swap_space", "swap_space 不足"),
    "max_model_len": Phrase("max_model_len", "超过 max_model_len"),
    "max_num_seqs": Phrase("max_num_seqs", "超过 max_num_seqs"),
    "max_num_batched_tokens": Phrase("max_num_batched_tokens", "超过 max_num_batched_tokens"),
    "never_fits": Phrase("never_fits", "永远放不下"),
}
"""Why requests are rejected; another reason is told as it is called."""

COLUMNS = (
    Phrase("policy", "策略"),
    Phrase("verdict", "结果"),
    Phrase("completed", "已完成"),
    Phrase("KV util.\n(%)", "KV 利用率\n（%）"),
    Phrase("internal\n(%)", "内部碎片\n（%）"),
    Phrase("external\n(%)", "显存碎片\n（%）"),
    Phrase("reserved\npeak (GiB)", "预留峰值\n（GiB）"),
    Phrase("TTFT p50 / p99\n(s)", "TTFT p50 / p99\n（s）"),
    Phrase("TPOT p50\n(ms)", "TPOT p50\n（ms）"),
    Phrase("makespan\n(s)", "总时长\n（s）"),
)


def header(lang: Lang = "en") -> tuple[str, ...]:
    """Titles of the columns of :func:`rows`."""
    return tuple(Said.of(title).text(lang) for title in COLUMNS)


HEADER = header()
"""In English."""

COMMA = Phrase(", ", "，")
SEMICOLON = Phrase("; ", "；")
LIST_COMMA = Phrase(", ", "、")
AND = Phrase("{names} and {last}", "{names} 和 {last}")
SENTENCE = Phrase("{said}.", "{said}。")

HELD = Phrase("held", "跑完全程")
DIED = Phrase("died at {time_s:,.1f} s: {cause}", "{time_s:,.1f} s 时 OOM：{cause}")
LIVE_LOCKED = Phrase("live-locked at {time_s:,.1f} s", "{time_s:,.1f} s 时活锁")
DEADLOCKED = Phrase("deadlocked at {time_s:,.1f} s", "{time_s:,.1f} s 时死锁")
SERVED_NOTHING = Phrase("served nothing: {rejected}", "未处理任何请求：{rejected}")
ALL_REJECTED = Phrase("all {count:,} requests rejected", "全部 {count:,} 条请求被拒绝")
ONLY_REJECTED = Phrase("the only request rejected", "唯一的请求被拒绝")
PREEMPTIONS = Phrase("{count:,} preemptions", "抢占 {count:,} 次")
PREEMPTION = Phrase("1 preemption", "抢占 1 次")
THRASHING = Phrase("thrashing", "抢占抖动")
REJECTED = Phrase("{count:,} rejected", "拒绝 {count:,} 条")
TURNS_LOST = Phrase("{count:,} turns lost tokens", "{count:,} 轮丢失 token")
TURN_LOST = Phrase("1 turn lost tokens", "1 轮丢失 token")

THEY_HELD = Phrase("{names} held", "{names} 跑完全程")
ONE_SERVED_NOTHING = Phrase("{name} served nothing ({rejected})", "{name} 未处理任何请求（{rejected}）")
ONE_DIED = Phrase("{name} died at {time_s:,.1f} s ({cause})", "{name} 在 {time_s:,.1f} s 时 OOM（{cause}）")
ONE_STOOD_STILL = Phrase("{name} {how}", "{name} 在 {how}")

OOM = Phrase(
    "Out of memory at {time_s:.3f} s, cause {cause}: {who} {asked}. {found}. {because}",
    "{time_s:.3f} s 时 OOM，原因：{cause}。{who}{asked}。{found}。{because}",
)
REQUEST = Phrase("request {id}", "请求 {id} ")
SERVER = Phrase("the server", "服务")
ASKS = Phrase("asks for {need}", "申请 {need}")
ASKS_ONE_PIECE = Phrase("asks for {need} in one piece", "申请 {need}，须为一整块")
NEED_OF = Phrase("{need} of {tag}", "{need}（{tag}）")
FREE = Phrase("{free} are free", "空闲 {free}")
FREE_IN_PIECES = Phrase("{free} are free in all, the largest piece is {largest}", "空闲共 {free}，最大的一块 {largest}")
LOG = Phrase('The server\'s log would say: "{message}"', "服务日志将打印：“{message}”")

OTHER_TRAFFIC = Phrase(
    "The runs do not have the same traffic: they differ in {keys}.", "各次运行的负载不同，区别在于 {keys}。"
)
LATER_TURNS = Phrase(
    "Lengths and think times are the same under every policy; arrivals of later turns may differ: {why}.",
    "各策略下的长度和思考时间相同；后续轮次的到达时间可能不同：{why}。",
)
USER_WAITS = Phrase("a user waits for each answer", "用户收到回答后才发下一条")
TURN_WAITS = Phrase("a turn waits for the answer before it", "每一轮要等上一轮的回答")
SAME_TRAFFIC = Phrase("Every policy gets the same requests at the same times.", "各策略在相同时刻收到相同的请求。")

OF_REASON = Phrase("{count:,} {reason}", "{reason}：{count:,} 条")
GOODPUT = Phrase("{rate} requests/s, {met:,} met the SLO ({share})", "{rate} 条请求/s，{met:,} 条满足 SLO（{share}）")
GOODPUT_BY_SLO = Phrase("{goodput}: {shares}", "{goodput}：{shares}")
MISSED = Phrase("{goodput}; missed", "{goodput}；未达标")
DROPPED = Phrase("{count:,}, of {turns:,} turns", "{count:,} 个，涉及 {turns:,} 轮")
DROPPED_OF_ONE = Phrase("{count:,}, of 1 turn", "{count:,} 个，涉及 1 轮")


def fate(summary: Summary, lang: Lang = "en") -> str:
    """How a run ended, in a few words."""
    if served_nothing(summary):
        return Said.of(SERVED_NOTHING, rejected=_all_rejected(summary)).text(lang)
    words = [_end(summary, lang)]
    if preemptions := summary["preemptions"]:
        words.append(_counted(preemptions, PREEMPTION, PREEMPTIONS))
    if summary.get("thrashing"):
        words.append(Said.of(THRASHING))
    if rejected := sum(summary["requests_rejected"].values()):
        words.append(Said.of(REJECTED, count=rejected))
    if turns := summary["turns_with_dropped_tokens"]:
        words.append(_counted(turns, TURN_LOST, TURNS_LOST))
    return joined((word.text(lang) for word in words), COMMA, lang)


def short_fate(summary: Summary, lang: Lang = "en") -> str:
    """:func:`fate` for a narrow place: the end alone if it came early, or what a run that held did beside it."""
    return _end(summary, lang).text(lang) if ended_early(summary) else fate(summary, lang)


def joined(parts: Iterable[str], by: Phrase, lang: Lang) -> str:
    """One text of several, with the language's own comma or semicolon between them."""
    return Said.of(by).text(lang).join(parts)


def _counted(count: int, one: Phrase, many: Phrase) -> Said:
    return Said.of(many, count=count) if count > 1 else Said.of(one)


def ended_early(summary: Summary) -> bool:
    """Whether a run ended before its traffic did: the server died, or nothing could go on."""
    return summary["oom"] is not None or summary.get("standstill") is not None


def _end(summary: Summary, lang: Lang) -> Said:
    if (oom := summary["oom"]) is not None:
        return Said.of(DIED, time_s=oom["time_s"], cause=cause_text(oom, lang))
    if (standstill := summary.get("standstill")) is not None:
        return _stood_still(standstill)
    return Said.of(HELD)


def _stood_still(standstill: Summary) -> Said:
    return Said.of(LIVE_LOCKED if standstill["kind"] == "live_lock" else DEADLOCKED, time_s=standstill["time_s"])


def served_nothing(summary: Summary) -> bool:
    """Whether a server lived through its traffic by refusing all of it."""
    return not (ended_early(summary) or summary["requests_completed"]) and bool(summary["requests_rejected"])


def _all_rejected(summary: Summary) -> Said:
    return _counted(sum(summary["requests_rejected"].values()), ONLY_REJECTED, ALL_REJECTED)


def cause_text(oom: Summary, lang: Lang = "en") -> str:
    """The cause of an out-of-memory record as words."""
    name = str(oom["cause"])
    return Said.of(NAMES[Cause(name)]).text(lang) if lang != "en" and name in CAUSES else name.replace("_", " ")


def headline(summaries: Mapping[str, Summary], lang: Lang = "en") -> str:
    """One sentence: who held, who died of what."""
    parts = []
    held = [name for name, s in summaries.items() if not (ended_early(s) or served_nothing(s))]
    if held:
        parts.append(Said.of(THEY_HELD, names=_listed(held, lang)))
    for name, summary in summaries.items():
        if served_nothing(summary):
            parts.append(Said.of(ONE_SERVED_NOTHING, name=name, rejected=_all_rejected(summary)))
        if (oom := summary["oom"]) is not None:
            parts.append(Said.of(ONE_DIED, name=name, time_s=oom["time_s"], cause=cause_text(oom, lang)))
        elif (standstill := summary.get("standstill")) is not None:
            parts.append(Said.of(ONE_STOOD_STILL, name=name, how=_stood_still(standstill)))
    return Said.of(SENTENCE, said=joined((part.text(lang) for part in parts), SEMICOLON, lang)).text(lang)


def _listed(names: Sequence[str], lang: Lang) -> str:
    if len(names) == 1:
        return names[0]
    return Said.of(AND, names=joined(names[:-1], LIST_COMMA, lang), last=names[-1]).text(lang)


def bytes_text(count: int) -> str:
    """Bytes in the binary unit that suits them."""
    for unit, name in ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count} B"


def oom_in_words(oom: Summary, lang: Lang = "en") -> str:
    """An out-of-memory record as three sentences: when and what asked, what was free, and why that did not do."""
    need, free, largest = (bytes_text(oom[f"{key}_bytes"]) for key in ("need", "free", "largest_free"))
    whole = oom["free_bytes"] == oom["largest_free_bytes"]  # blocks of a pool, or a single hole
    tag = Said.of(TAGS[oom["tag"]]) if oom["tag"] in TAGS else oom["tag"]
    asked = Said.of(NEED_OF, need=need, tag=tag) if tag else need
    rule = RULES.get(oom["rule"], oom["rule"]) if lang == "en" else RULES_IN_CHINESE.get(oom["rule"], oom["rule"])
    return Said.of(
        OOM,
        time_s=oom["time_s"],
        cause=cause_text(oom, lang),
        who=Said.of(REQUEST, id=oom["request"]) if oom["request"] >= 0 else Said.of(SERVER),
        asked=Said.of(ASKS if whole else ASKS_ONE_PIECE, need=asked),
        found=Said.of(FREE, free=free) if whole else Said.of(FREE_IN_PIECES, free=free, largest=largest),
        because=Said.of(CAUSES[oom["cause"]], rule=rule) if oom["cause"] in CAUSES else "",
    ).text(lang)


def server_log(oom: Summary, lang: Lang = "en") -> str:
    """What the log of a real server would say, as a sentence; empty where nothing is known of it."""
    message = oom.get("torch_message", "")
    return Said.of(LOG, message=message).text(lang) if message else ""


def rows(summaries: Mapping[str, Summary], lang: Lang = "en") -> list[tuple[str, ...]]:
    """The comparison table: one row a policy, cells as text in the units of :func:`header`."""
    return [
        (
            name,
            fate(s, lang),
            f"{s['requests_completed']:,} / {s['requests_total']:,}",
            number_text(s["kv_utilization_mean"], 100, 1),
            number_text(s["internal_fragmentation_mean"], 100, 1),
            number_text(s["external_fragmentation_mean"], 100, 1),
            number_text(s["peak_reserved_bytes"], 1 / GIB, 2),
            f"{number_text(s['ttft_s']['p50'], 1, 2)} / {number_text(s['ttft_s']['p99'], 1, 2)}",
            number_text(s["tpot_s"]["p50"], 1000, 1),
            number_text(s["makespan_s"], 1, 1),
        )
        for name, s in summaries.items()
    ]


def number_text(value: float | None, factor: float = 1, digits: int = 0) -> str:
    """A number in another unit, or a dash where there is none."""
    return MISSING if value is None else f"{value * factor:,.{digits}f}"


def same_traffic(results: Mapping[str, Result], lang: Lang = "en") -> str:
    """What the policies of a comparison share of their traffic: all of it, or all but when turns arrive."""
    if changed := traffic_changes(results):
        return Said.of(OTHER_TRAFFIC, keys=_listed(changed, lang)).text(lang)
    closed = any(result.scenario.workload.users is not None for result in results.values())
    if closed or any((result.requests["turn"] > 0).any() for result in results.values()):
        return Said.of(LATER_TURNS, why=Said.of(USER_WAITS if closed else TURN_WAITS)).text(lang)
    return Said.of(SAME_TRAFFIC).text(lang)


def traffic_changes(results: Mapping[str, Result]) -> list[str]:
    """The keys of traffic in which the runs of a comparison differ."""
    scenarios = {name: result.scenario for name, result in results.items()}
    return [key for key in differences(scenarios) if _is_of_traffic(key)]


def _is_of_traffic(key: str) -> bool:
    return key == "seed" or (key.startswith(("workload.", "session.")) and key != "session.between_turns")


def rejections_text(summary: Summary, lang: Lang = "en") -> str:
    """Rejected requests by reason; empty when none was."""
    said = [
        Said.of(OF_REASON, count=count, reason=Said.of(REASONS[reason]) if reason in REASONS else reason)
        for reason, count in summary["requests_rejected"].items()
    ]
    return joined((each.text(lang) for each in said), COMMA, lang)


def percent_text(ratio: float | None) -> str:
    """A ratio as percent, or a dash where there is none."""
    return MISSING if ratio is None else f"{100 * ratio:.1f} %"


def goodput_text(goodput: Summary, lang: Lang = "en") -> str:
    """Requests a second that met every objective, their share, and the share that met each where there are several."""
    rate, share_met = number_text(goodput["requests_per_s"], 1, 3), percent_text(goodput["share_met"])
    said = Said.of(GOODPUT, rate=rate, met=goodput["requests_met"], share=share_met)
    each = goodput["share_met_by_slo"]
    if len(each) > 1:
        words = (f"{Said.of(SLO_NAMES[key]).text(lang)} {percent_text(share)}" for key, share in each.items())
        said = Said.of(GOODPUT_BY_SLO, goodput=said, shares=joined(words, COMMA, lang))
    return (said if goodput["attained"] else Said.of(MISSED, goodput=said)).text(lang)


def dropped_text(summary: Summary, lang: Lang = "en") -> str:
    """How many tokens retention dropped, of how many turns."""
    turns = summary["turns_with_dropped_tokens"]
    phrase = DROPPED if turns > 1 else DROPPED_OF_ONE
    return Said.of(phrase, count=summary["dropped_tokens"], turns=turns).text(lang)


def seconds_text(seconds: float | None) -> str:
    """Seconds, or milliseconds below one."""
    if seconds is None:
        return MISSING
    return f"{seconds * 1000:,.1f} ms" if 0 < seconds < 1 else f"{seconds:,.2f} s"


def basis_text(summaries: Mapping[str, Summary]) -> str:
    """Where times come from: one basis, or of each run its own."""
    bases: dict[str, list[str]] = {}
    for name, summary in summaries.items():
        bases.setdefault(str(summary["basis"]), []).append(name)
    if len(bases) == 1:
        return next(iter(bases))
    return "; ".join(f"{', '.join(names)}: {basis}" for basis, names in bases.items())
