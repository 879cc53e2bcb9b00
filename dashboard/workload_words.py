"""A description of traffic in words and tables, the same on the command line and on the page, in either language."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hbmtwin.dashboard.verdict import COMMA, MISSING, joined, number_text, percent_text, seconds_text
from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.workloads.statistics.arrivals import ArrivalStatistics, WindowCounts
from hbmtwin.workloads.statistics.describe import Description
from hbmtwin.workloads.statistics.lengths import QUANTILES, LengthStatistics
from hbmtwin.workloads.statistics.reuse import ReuseStatistics
from hbmtwin.workloads.statistics.sessions import SessionStatistics


class Rows(NamedTuple):
    """A table, the first column of which names its rows."""

    title: str
    header: tuple[str, ...]
    cells: Sequence[tuple[str, ...]]


MANY = Phrase("{count:,} requests", "{count:,} 条请求")
ONE = Phrase("1 request", "1 条请求")
AT_ONCE = Phrase("{requests}, no time between them", "{requests}，同时到达")
IN_TIME = Phrase("{requests} in {span}, {rate:,.2f} a second", "{span} 内 {requests}，每秒 {rate:,.2f} 条")

PROMPTS = Phrase("prompts", "提示词")
OUTPUTS = Phrase("outputs", "输出")
BOTH = Phrase("prompts and outputs", "提示词与输出")
STAND_OUT = Phrase("{name} that stand out", "{name}的突出长度")
LENGTHS = Phrase("Lengths", "长度")
LENGTH_COLUMNS = (
    *(Phrase("tokens", "token 数"), Phrase("mean", "均值"), Phrase("CV", "CV"), Phrase("least", "最小")),
    *(Phrase("{quantile}", "{quantile}"), Phrase("most", "最大")),
)
WINDOWS = Phrase("Arrivals in windows", "按窗口统计到达")
WINDOW_COLUMNS = (
    Phrase("window", "窗口"),
    Phrase("IDC", "IDC"),
    Phrase("IDC of whole\nwindows", "整窗口的\nIDC"),
    Phrase("fewest\nrequests", "最少\n请求数"),
    Phrase("most\nrequests", "最多\n请求数"),
)
REUSE = Phrase(
    "Blocks of {size} tokens that a prefix cache hits, of {references:,}",
    "前缀缓存命中的块（每块 {size} 个 token），共 {references:,} 块",
)
REUSE_COLUMNS = (
    Phrase("capacity\n(blocks)", "容量\n（块）"),
    Phrase("capacity\n(tokens)", "容量\n（token）"),
    Phrase("hits, touched\nlast to first", "命中，\n从后往前访问"),
    Phrase("share", "占比"),
    Phrase("hits, touched\nfirst to last", "命中，\n从前往后访问"),
    Phrase("share of\nthese", "其占比"),
)
ENDLESS = Phrase("endless", "无限")

BETWEEN = Phrase("between arrivals", "到达间隔")
TICKS = Phrase(
    "mean {mean}; times are ticks of {tick:g} s, which most requests share: a CV would be the clock's and is not "
    "computed (jitter spreads them over their tick)",
    "均值 {mean}；时间以 {tick:g} s 为刻度，多数请求落在同一刻度：CV 只反映时钟，因此不计算"
    "（jitter 可将其散布到刻度内）",
)
MEAN_AND_CV = Phrase("mean {mean}, CV {cv:.2f} (1: Poisson)", "均值 {mean}，CV {cv:.2f}（1 为 Poisson）")
WITHIN = Phrase("within 5 minutes", "5 分钟内")
CV_OF_ONE = Phrase("CV {cv:.2f}, of 1 window", "CV {cv:.2f}，1 个窗口")
CV_OF_WINDOWS = Phrase(
    "CV {cv:.2f} (p10 {low:.2f}, p90 {high:.2f}), of {windows:,} windows",
    "CV {cv:.2f}（p10 {low:.2f}，p90 {high:.2f}），共 {windows:,} 个窗口",
)
BUSIEST = Phrase("busiest second", "最忙的一秒")
TIMES_MEAN = Phrase("{times:.1f} times the mean", "均值的 {times:.1f} 倍")
NOT_CORRELATED = Phrase(
    "one of the two is always the same, so they are not correlated", "其中之一始终不变，因此没有相关性"
)
CORRELATION = Phrase(
    "correlation {pearson:.2f} (Pearson), {spearman:.2f} of ranks (Spearman)",
    "相关系数 {pearson:.2f}（Pearson），秩相关 {spearman:.2f}（Spearman）",
)
OF_LEADING_BITS = Phrase("{correlation} (of lengths to their leading bits)", "{correlation}（长度只取高位）")
CLIENTS = Phrase("clients", "客户端")
OF_CLIENTS = Phrase(
    "{count:,}: the first sends {first}; {most:,} make 90 %", "{count:,} 个：第一位发出 {first}；{most:,} 个占 90 %"
)
OF_MANY_CLIENTS = Phrase(
    "{count:,}: the first sends {first}; the first ten {ten}; {most:,} make 90 %",
    "{count:,} 个：第一位发出 {first}；前十位 {ten}；{most:,} 个占 90 %",
)
SESSIONS = Phrase("sessions", "会话")
SESSIONS_TOLD = Phrase("{count:,}", "{count:,}")
SESSIONS_MADE_OUT = Phrase(
    "{count:,} (made out from prompts that begin with a whole earlier one)",
    "{count:,}（由以更早的完整提示词开头的请求推断）",
)
TURNS = Phrase("turns of a session", "每个会话的轮数")
TURNS_TOLD = Phrase(
    "mean {mean:.2f}, p50 {p50:g}, p95 {p95:g}, most {most:,}",
    "均值 {mean:.2f}，p50 {p50:g}，p95 {p95:g}，最多 {most:,}",
)
TURN = Phrase("turn of a request", "请求所在的轮次")
TURN_TOLD = Phrase(
    "mean {mean:.2f}, p95 {p95:g}; {later} are no first turn", "均值 {mean:.2f}，p95 {p95:g}；{later} 不是首轮"
)
BETWEEN_TURNS = Phrase("between two turns", "两轮之间")
GAPS = Phrase("mean {mean}, p50 {p50}, p95 {p95}", "均值 {mean}，p50 {p50}，p95 {p95}")
SHARED = Phrase("shared beginnings", "共同前缀")
NONE_SHARED = Phrase(
    "none: the trace tells of no prompt that begins as another does", "无：trace 中没有与其他提示词开头相同的"
)
SHARED_TOLD = Phrase(
    "{several} of the blocks of prompts are in several; {once} of the {distinct:,} different ones are in one only; the "
    "commonest is in {commonest} of the requests",
    "提示词块中 {several} 出现在多条请求里；{distinct:,} 个不同的块中 {once} 只出现在一条里；最常见的块出现在 "
    "{commonest} 的请求中",
)
OF_ENDLESS = Phrase("of an endless cache", "缓存容量无限时")
ENDLESS_TOLD = Phrase(
    "{half} of the requests find more than half of their blocks, {most} more than nine tenths",
    "{half} 的请求命中一半以上的块，{most} 的请求命中九成以上",
)


def headline(d: Description, lang: Lang = "en") -> str:
    """How many requests, in what time."""
    count = Said.of(MANY, count=d.requests) if d.requests > 1 else Said.of(ONE)
    rate = d.arrivals.request_rate
    if rate is None:
        return Said.of(AT_ONCE, requests=count).text(lang)
    return Said.of(IN_TIME, requests=count, span=seconds_text(d.arrivals.span_s), rate=rate).text(lang)


def facts(d: Description, lang: Lang = "en") -> list[tuple[str, str]]:
    """What is one number or two, a line each: what it is, and how much."""
    found: list[tuple[Said, Said | str]] = [
        *_arrival_facts(d.arrivals),
        (Said.of(BOTH), _correlation(d)),
        *((Said.of(STAND_OUT, name=Said.of(name)), _mass(side, lang)) for name, side in _sides(d) if side.mass_points),
        *_tenant_facts(d),
        *(_session_facts(d.sessions) if d.sessions is not None else []),
        *_reuse_facts(d),
    ]
    return [(what.text(lang), much.text(lang) if isinstance(much, Said) else much) for what, much in found]


def lengths_table(d: Description, lang: Lang = "en") -> Rows:
    """Mean, spread and quantiles of both lengths."""
    *before, quantile, most = LENGTH_COLUMNS
    titles = [
        *map(Said.of, before),
        *(Said.of(quantile, quantile=f"p{100 * q:g}") for q in QUANTILES),
        Said.of(most),
    ]
    cells = [
        (
            Said.of(name).text(lang),
            f"{side.mean:,.1f}",
            f"{side.cv:.2f}",
            f"{side.least:,}",
            *(f"{q:,.0f}" for q in side.quantiles),
            f"{side.most:,}",
        )
        for name, side in _sides(d)
    ]
    return Rows(Said.of(LENGTHS).text(lang), tuple(title.text(lang) for title in titles), cells)


def windows_table(d: Description, lang: Lang = "en") -> Rows:
    """Counts in windows, by the width of the window."""
    cells = [
        (
            f"{w.width_s:,} s",
            number_text(w.idc, 1, 2),
            number_text(w.idc_whole, 1, 2),
            *(_whole(count, w, d) for count in (w.fewest, w.most)),
        )
        for w in d.arrivals.windows
    ]
    return Rows(Said.of(WINDOWS).text(lang), _titles(WINDOW_COLUMNS, lang), cells)


def _titles(columns: Sequence[Phrase], lang: Lang) -> tuple[str, ...]:
    return tuple(Said.of(title).text(lang) for title in columns)


def _whole(count: int, w: WindowCounts, d: Description) -> str:
    return f"{count:,}" if d.arrivals.tick_s is None or d.arrivals.tick_s <= w.width_s else MISSING


def reuse_table(reuse: ReuseStatistics, lang: Lang = "en") -> Rows:
    """What a prefix cache of each size hits."""
    references, size = reuse.curve.references, reuse.block_size
    cells = []
    for capacity, hits, other in zip(reuse.curve.capacities, reuse.curve.hits, reuse.first_to_last.hits, strict=True):
        cells.append(
            (
                Said.of(ENDLESS).text(lang) if capacity is None else f"{capacity:,}",
                MISSING if capacity is None else f"{capacity * size:,}",
                f"{hits:,}",
                percent_text(hits / references),
                f"{other:,}",
                percent_text(other / references),
            )
        )
    title = Said.of(REUSE, size=size, references=references).text(lang)
    return Rows(title, _titles(REUSE_COLUMNS, lang), cells)


def _sides(d: Description) -> Sequence[tuple[Phrase, LengthStatistics]]:
    return ((PROMPTS, d.prompt_tokens), (OUTPUTS, d.output_tokens))


Facts = list[tuple[Said, Said]]


def _arrival_facts(a: ArrivalStatistics) -> Facts:
    if a.tick_s is not None:
        return [(Said.of(BETWEEN), Said.of(TICKS, mean=seconds_text(a.iat_mean_s), tick=a.tick_s))]
    if a.iat_cv is None:
        return []
    found = [(Said.of(BETWEEN), Said.of(MEAN_AND_CV, mean=seconds_text(a.iat_mean_s), cv=a.iat_cv))]
    if (cv := a.iat_cv_windows) is not None:
        phrase = CV_OF_WINDOWS if cv.windows > 1 else CV_OF_ONE
        found.append((Said.of(WITHIN), Said.of(phrase, cv=cv.p50, low=cv.p10, high=cv.p90, windows=cv.windows)))
    if a.peak_second is not None:
        found.append((Said.of(BUSIEST), Said.of(TIMES_MEAN, times=a.peak_second)))
    return found


def _correlation(d: Description) -> Said:
    if d.pearson is None or d.spearman is None:
        return Said.of(NOT_CORRELATED)
    pearson, spearman = (round(value, 2) + 0.0 for value in (d.pearson, d.spearman))  # no "-0.00"
    said = Said.of(CORRELATION, pearson=pearson, spearman=spearman)
    return said if d.spearman_exact else Said.of(OF_LEADING_BITS, correlation=said)


def _mass(side: LengthStatistics, lang: Lang) -> str:
    points = (f"{point.tokens:,} ({percent_text(point.share)})" for point in side.mass_points[:8])
    return joined(points, COMMA, lang)


def _tenant_facts(d: Description) -> Facts:
    t = d.tenants
    if t is None:
        return []
    first, ten = percent_text(t.top_1), percent_text(t.top_10)
    phrase = OF_MANY_CLIENTS if t.tenants > 10 else OF_CLIENTS
    return [(Said.of(CLIENTS), Said.of(phrase, count=t.tenants, first=first, ten=ten, most=t.make_90_percent))]


def _session_facts(s: SessionStatistics) -> Facts:
    turns = Said.of(TURNS_TOLD, mean=s.turns_mean, p50=s.turns_p50, p95=s.turns_p95, most=s.turns_most)
    found = [
        (Said.of(SESSIONS), Said.of(SESSIONS_MADE_OUT if s.inferred else SESSIONS_TOLD, count=s.sessions)),
        (Said.of(TURNS), turns),
        (
            Said.of(TURN),
            Said.of(TURN_TOLD, mean=s.turn_mean, p95=s.turn_p95, later=percent_text(s.later_turns_share)),
        ),
    ]
    if s.gap_mean_s is not None:
        mean, p50, p95 = map(seconds_text, (s.gap_mean_s, s.gap_p50_s, s.gap_p95_s))
        found.append((Said.of(BETWEEN_TURNS), Said.of(GAPS, mean=mean, p50=p50, p95=p95)))
    return found


def _reuse_facts(d: Description) -> Facts:
    r = d.reuse
    if r is None:
        return [(Said.of(SHARED), Said.of(NONE_SHARED))]
    shared = Said.of(
        SHARED_TOLD,
        several=percent_text(r.reused_references_share),
        once=percent_text(r.used_once_share),
        distinct=r.curve.distinct,
        commonest=percent_text(r.commonest_share),
    )
    half, most = percent_text(r.half_cached_share), percent_text(r.nine_tenths_cached_share)
    return [(Said.of(SHARED), shared), (Said.of(OF_ENDLESS), Said.of(ENDLESS_TOLD, half=half, most=most))]
