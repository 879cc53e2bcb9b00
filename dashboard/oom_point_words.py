"""OOM points in words and rows: what the terminal and the page both say, in English or in Chinese."""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.dashboard.sweep_words import cause_text
from hbmtwin.dashboard.verdict import COMMA, LIST_COMMA, SEMICOLON, joined
from hbmtwin.sim.capacity.oom_point import CriticalLoad, OomPoint
from hbmtwin.sim.capacity.oom_point_curves import CONFIDENCE, Share, by_load, causes, memory_by_load, quantile
from hbmtwin.sim.capacity.oom_point_draws import what_varies
from hbmtwin.sim.capacity.oom_point_loads import WORDS
from hbmtwin.sim.capacity.oom_point_runs import End
from hbmtwin.sim.capacity.oom_point_tables import half_load
from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.workloads.builtin import NUM_PROMPTS

GIB = 2**30
MISSING = "–"
PLACE_COLUMNS = ("died_users", "died_turn", "died_at_s", "died_operations")

END_WORDS: dict[End, Phrase] = {"fails": Phrase("runs out", "显存耗尽"), "preempts": Phrase("preempts", "抢占")}
COLUMNS = (
    Phrase("policy", "策略"),
    Phrase("what", "事件"),
    Phrase("of draws", "样本数"),
    Phrase("at", "负载"),
    Phrase("causes", "原因"),
    Phrase("users", "用户数"),
    Phrase("turn", "轮次"),
    Phrase("time (s)", "时间（s）"),
    Phrase("operations", "操作数"),
)
"""Of :func:`rows`; the last four are medians of the runs at the critical loads."""
OF = Phrase("{ended} of {n}", "{ended} / {n}")
TO = Phrase("{first} to {last}", "{first} 至 {last}")
PREEMPTS = Phrase("{policy}, preempts", "{policy}，抢占")
OVER = Phrase("over 1,024", "超过 1,024")
HEADLINE = Phrase("{model} on {device}, {span}: {varies}", "{model}，{device}，{span}：{varies}")

ENDS: dict[End, Phrase] = {
    "fails": Phrase("runs out of memory", "显存耗尽"),
    "preempts": Phrase("preempts", "抢占"),
}
PLAN = Phrase("Memory suffices in {draws}: {policies} ({word}).", "{draws}显存够用：{policies}（{word}）。")
ALL_DRAWS = Phrase("all {n} draws", "全部 {n} 个样本")
ONE_DRAW = Phrase("the one draw", "唯一的样本")
WITHOUT = Phrase("{policy} {safe} (without preempting {without})", "{policy} {safe}（不抢占则{without}）")
NO_LOAD = Phrase("at no load that is known", "没有已知的负载")
TOO_MUCH = Phrase("at no load asked for ({load} is too much)", "在所给的负载下都不够（{load} 已过大）")
UP_TO = Phrase("up to {load}", "到 {load} 为止")
UP_TO_LARGEST = Phrase("up to {load}, the largest asked for", "到所给的最大负载 {load} 为止")
MEMORY_PLAN = Phrase(
    "The smallest device memory (GiB) on which every draw is served, from {first} to {last}: {policies}.",
    "{first} 至 {last}，所有样本都能跑完的最小显存（GiB）：{policies}。",
)
TAKES = Phrase("{policy} {first} to {last}", "{policy} {first} 至 {last}")
TAKES_WITHOUT = Phrase("{policy}, without preempting {first} to {last}", "{policy}，不抢占 {first} 至 {last}")
UNKNOWN = Phrase(
    "{policy}: no run says whether it {ends}: all ended in an error.",
    "{policy}：无法判断是否会{ends}：全部运行都报错。",
)
NEVER = Phrase("{policy} never {ends} up to {load} ({held}).", "{policy} 直到 {load}都未出现{ends}（{held}）。")
ALREADY = Phrase(
    "{policy} {ends} at {load} already, the smallest load asked for, in every draw.{why}",
    "{policy} 在最小的负载（{load}）下，所有样本都已{ends}。{why}",
)
AT_ONCE = Phrase(
    "{policy} {ends} at {load} in every draw; {before}.{why}",
    "{policy} {ends}：{load}时所有样本都出现；{before}。{why}",
)
ENDED = Phrase("{policy} {ends} {where}; {before}.{why}", "{policy} {ends}：{where}；{before}。{why}")
FIRST = Phrase("first at {load}", "首次在 {load}")
HALF = Phrase("in half of the draws at {load}", "{load} 时达到半数样本")
ALL = Phrase("in all at {load}", "{load} 时达到全部样本")
SOME = Phrase("in {ended} of {n} up to {load}", "到 {load} 为止 {n} 个样本中有 {ended} 个")
SMALLEST = Phrase("at the smallest load in {ended} of {n}", "最小的负载下 {n} 个样本中有 {ended} 个")
NONE = Phrase("at {load} in none ({held})", "{load} 时一个也没有（{held}）")
HELD = Phrase(
    "0 of {n}: with {confidence:.0%} confidence in fewer than {high:.0%}",
    "{n} 个样本中 0 个：{confidence:.0%} 置信度下比例低于 {high:.0%}",
)
CAUSES = Phrase(" Causes: {causes}.", "原因：{causes}。")
TWICE = Phrase(
    " At {load} it computes up to {share:.1f} % of its tokens twice{thrashes}.",
    "{load}时最多重复计算了 {share:.1f} % 的 token{thrashes}。",
)
THRASHES = Phrase(
    ", and thrashes in {minutes} of its minutes over all draws", "，所有样本合计有 {minutes} 分钟处于抢占抖动"
)
NEVER_THRASHES = Phrase(", and never thrashes", "，没有抢占抖动")
FEWER_ASK = Phrase(
    "Of {users:,} users only {asking:,} ever ask: raise workload.num_prompts.",
    "{users:,} 个用户中只有 {asking:,} 个会发出请求：请增大 workload.num_prompts。",
)
NOT_MONOTONE = Phrase(
    "Not monotone: {torn} of {draws} draws hold at a larger load than one that they fail at ({names}); every load was "
    "run for them, and the first failure counts.",
    "非单调：{draws} 个样本中有 {torn} 个在较小的负载下失败，却在更大的负载下跑完（{names}）；对它们运行了每个负载，"
    "以首次失败为准。",
)
LITTLE = Phrase(
    "With one draw the bands are all that a single run can say: next to nothing.",
    "只有一个样本：置信带只反映单次运行所能说明的，几乎没有信息。",
)
BROKEN = Phrase(
    "{count} runs ended in an error, and their draws count for nothing; the first: {error}",
    "{count} 次运行报错，其样本不计入；第一个错误：{error}",
)

NEVER_UP_TO = Phrase("never up to {load}", "到 {load} 未出现")
FIRST_AND_SOME = Phrase("first at {first}, {ended} of {n} by {last}", "首次 {first}，到 {last} 为止 {ended} / {n}")
ALL_AT = Phrase("all at {load}", "{load} 时全部")
ALL_AT_SMALLEST = Phrase("all at {load}, the smallest", "{load} 时全部（最小的负载）")
FIRST_AND_ALL = Phrase("first at {first}, all at {full}", "首次 {first}，{full} 时全部")


def header(lang: Lang = "en") -> tuple[str, ...]:
    """Titles of the columns of :func:`rows`."""
    return tuple(Said.of(title).text(lang) for title in COLUMNS)


HEADER = header()
"""In English."""


def name_of(policy: str, end: End, lang: Lang = "en") -> str:
    """``paged`` or ``paged, preempts``."""
    return policy if end == "fails" else Said.of(PREEMPTS, policy=policy).text(lang)


def headline(point: OomPoint, lang: Lang = "en") -> str:
    """Model, device, load and draws, in a line."""
    s, values = point.scenario, point.load.values
    span: object = point.load.text(values[-1], lang)
    if len(values) > 1:
        span = Said.of(TO, first=number(values[0]), last=span)
    varies = what_varies(s, point.draws, lang)
    return Said.of(HEADLINE, model=s.model.name, device=s.device.name, span=span, varies=varies).text(lang)


def sentences(point: OomPoint, lang: Lang = "en") -> list[str]:
    """What a planner takes from it; then one for each policy and end: where it comes first, for half, and for all."""
    said = [plan(point, lang), *([memory_plan(point, lang)] if point.smallest else [])]
    said += [_sentence(point, policy, end, lang) for policy, ends in point.ends.items() for end in ends]
    return [*said, *_remarks(point, lang)]


def plan(point: OomPoint, lang: Lang = "en") -> str:
    """The largest load for each policy up to which no draw came to an end, in a sentence."""
    parts = []
    for policy, ends in point.ends.items():
        safe = [_safe(point, policy, end).text(lang) for end in ends]
        if len(safe) == 2 and safe[0] != safe[1]:
            parts.append(Said.of(WITHOUT, policy=policy, safe=safe[0], without=safe[1]).text(lang))
        else:
            parts.append(f"{policy} {safe[0]}")
    draws = Said.of(ALL_DRAWS, n=len(point.draws)) if len(point.draws) > 1 else Said.of(ONE_DRAW)
    word = Said.of(WORDS[point.load.word])
    return Said.of(PLAN, draws=draws, policies=joined(parts, COMMA, lang), word=word).text(lang)


def _safe(point: OomPoint, policy: str, end: End) -> Said:
    curve = by_load(point, policy, end)
    if not curve:
        return Said.of(NO_LOAD)
    first = next((place for place, s in enumerate(curve) if s.ended), len(curve))
    if first == 0:
        return Said.of(TOO_MUCH, load=number(curve[0].at))
    return Said.of(UP_TO_LARGEST if first == len(curve) else UP_TO, load=number(curve[first - 1].at))


def memory_plan(point: OomPoint, lang: Lang = "en") -> str:
    """The memory that the worst of the draws takes at the smallest and at the largest load, in a sentence."""
    parts = []
    for policy, ends in point.ends.items():
        for end in ends:
            if curve := memory_by_load(point.smallest, policy, end):
                first, last = gib(curve[0].most_bytes, lang), gib(curve[-1].most_bytes, lang)
                takes = TAKES_WITHOUT if end == "preempts" else TAKES
                parts.append(Said.of(takes, policy=policy, first=first, last=last).text(lang))
    loads = sorted({s.load for s in point.smallest})
    policies = joined(parts, SEMICOLON, lang)
    last_load = point.load.text(loads[-1], lang)
    return Said.of(MEMORY_PLAN, first=number(loads[0]), last=last_load, policies=policies).text(lang)


def _sentence(point: OomPoint, policy: str, end: End, lang: Lang) -> str:
    curve = by_load(point, policy, end)
    ends = Said.of(ENDS[end])
    if not curve:
        return Said.of(UNKNOWN, policy=policy, ends=ends).text(lang)
    last = curve[-1]
    if not last.ended:
        load = point.load.text(last.at, lang)
        return Said.of(NEVER, policy=policy, ends=ends, load=load, held=_held(last)).text(lang)
    first = next(s for s in curve if s.ended)
    first_load, why = point.load.text(first.at, lang), _why(point, policy, end, lang)
    if first.ended == first.n and first is not curve[0]:
        before = _none_at(curve[curve.index(first) - 1])
        return Said.of(AT_ONCE, policy=policy, ends=ends, load=first_load, before=before, why=why).text(lang)
    if first is curve[0] and first.ended == first.n:
        return Said.of(ALREADY, policy=policy, ends=ends, load=first_load, why=why).text(lang)
    held = next((s for s in reversed(curve) if not s.ended), None)
    where = [Said.of(FIRST, load=first_load)]
    if (half := half_load(point, policy, end)) is not None and half != first.at:
        where.append(Said.of(HALF, load=number(half)))
    full = next((s for s in curve if s.ended == s.n), None)
    if full is not None and full.at not in (first.at, half):
        where.append(Said.of(ALL, load=number(full.at)))
    elif full is None:
        where.append(Said.of(SOME, ended=last.ended, n=last.n, load=number(last.at)))
    before = Said.of(SMALLEST, ended=first.ended, n=first.n) if held is None else _none_at(held)
    all_of_it = joined((said.text(lang) for said in where), COMMA, lang)
    return Said.of(ENDED, policy=policy, ends=ends, where=all_of_it, before=before, why=why).text(lang)


def _none_at(s: Share) -> Said:
    return Said.of(NONE, load=number(s.at), held=_held(s))


def _held(s: Share) -> Said:
    return Said.of(HELD, n=s.n, confidence=CONFIDENCE, high=s.high)


def _why(point: OomPoint, policy: str, end: End, lang: Lang) -> str:
    if end == "preempts":
        return _recomputed(point, policy, lang)
    found = causes(point.of(policy, end))
    return Said.of(CAUSES, causes=cause_counts(found, lang)).text(lang) if found else ""


def _recomputed(point: OomPoint, policy: str, lang: Lang) -> str:
    """What preempting costs at the largest load, which every draw was asked for."""
    top = [
        row
        for row in point.runs
        if (row["policy"], row["load"], row["memory_bytes"]) == (policy, point.load.values[-1], None)
        and row["recomputed_share"] is not None
    ]
    shares = [100 * float(row["recomputed_share"] or 0) for row in top]
    minutes = sum(int(row["thrashing_minutes"] or 0) for row in top)
    if not shares:
        return ""
    thrashes = Said.of(THRASHES, minutes=minutes) if minutes else Said.of(NEVER_THRASHES)
    load = point.load.text(point.load.values[-1], lang)
    return Said.of(TWICE, load=load, share=max(shares), thrashes=thrashes).text(lang)


def cause_counts(found: dict[str, int], lang: Lang = "en") -> str:
    """``external_fragmentation 8, growth_copy 2``."""
    return joined((f"{cause_name(cause, lang)} {count}" for cause, count in found.items()), LIST_COMMA, lang)


def cause_name(cause: str, lang: Lang = "en") -> str:
    """In English its identifier."""
    return cause if lang == "en" else cause_text(cause, lang)


def _remarks(point: OomPoint, lang: Lang) -> list[str]:
    remarks = []
    users, asking = point.load.values[-1], point.scenario.workload.num_prompts or NUM_PROMPTS
    if point.load.word == "users" and users > asking:
        remarks.append(Said.of(FEWER_ASK, users=users, asking=asking))
    if torn := [c for c in point.critical if not c.monotone]:
        names = joined(dict.fromkeys(name_of(c.policy, c.end, lang) for c in torn), LIST_COMMA, lang)
        remarks.append(Said.of(NOT_MONOTONE, torn=len(torn), draws=len(point.critical), names=names))
    if len(point.draws) == 1:
        remarks.append(Said.of(LITTLE))
    if point.broken:
        remarks.append(Said.of(BROKEN, count=len(point.broken), error=point.broken[0]["error"]))
    return [remark.text(lang) for remark in remarks]


def rows(point: OomPoint, lang: Lang = "en") -> list[tuple[str, ...]]:
    """A row for each policy and end under HEADER."""
    made = []
    for policy, ends in point.ends.items():
        for end in ends:
            critical = point.of(policy, end)
            ended = [c for c in critical if c.load is not None]
            loads = [c.load for c in ended if c.load is not None]
            at = number(min(loads, default=None))
            if len(set(loads)) > 1:
                at = Said.of(TO, first=at, last=number(max(loads))).text(lang)
            found = cause_counts(causes(ended), lang) if end == "fails" else ""
            of = Said.of(OF, ended=len(ended), n=len(critical)).text(lang)
            made.append((policy, Said.of(END_WORDS[end]).text(lang), of, at, found or MISSING, *_places(ended, end)))
    return made


def _places(ended: Sequence[CriticalLoad], end: End) -> list[str]:
    cells = []
    for place in PLACE_COLUMNS:
        column = "first_preemption_s" if (place, end) == ("died_at_s", "preempts") else place
        middle = quantile([float(v) for c in ended if c.row is not None and (v := c.row[column]) is not None], 0.5)
        cells.append(MISSING if middle is None else number(middle + (column == "died_turn")))
    return cells


def memory_header(point: OomPoint, lang: Lang = "en") -> tuple[str, ...]:
    """Columns of :func:`memory_rows`."""
    word = Said.of(WORDS[point.load.word]).text(lang)
    return (word, *(name_of(policy, end, lang) for policy, ends in point.ends.items() for end in ends))


def memory_rows(point: OomPoint, lang: Lang = "en") -> list[tuple[str, ...]]:
    """A row for each load: the middle of the draws, and from the least to the most, in GiB."""
    columns = [memory_by_load(point.smallest, policy, end) for policy, ends in point.ends.items() for end in ends]
    loads = sorted({m.load for column in columns for m in column})
    table = []
    for load in loads:
        cells = []
        for column in columns:
            m = next((m for m in column if m.load == load), None)
            cells.append(MISSING if m is None else _spread(m.least_bytes, m.median_bytes, m.most_bytes, lang))
        table.append((number(load), *cells))
    return table


def _spread(least: int | None, middle: int | None, most: int | None, lang: Lang) -> str:
    if least == most:
        return gib(middle, lang)
    return f"{gib(middle, lang)} ({gib(least, lang)} – {gib(most, lang)})"


def gib(size: int | None, lang: Lang = "en") -> str:
    """``29.52``, or what stands for more than was tried."""
    return Said.of(OVER).text(lang) if size is None else f"{size / GIB:,.2f}"


def number(value: float | None) -> str:
    """A load, a count or seconds, to four digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4g}"


def fate(point: OomPoint, policy: str, end: End, lang: Lang = "en") -> str:
    """``first at 0.5, all at 1`` or ``never up to 8``: a title's few words, to three digits."""
    curve = by_load(point, policy, end)
    last = curve[-1]
    if not last.ended:
        return Said.of(NEVER_UP_TO, load=_short(last.at)).text(lang)
    first = next(s for s in curve if s.ended)
    full = next((s for s in curve if s.ended == s.n), None)
    if full is None:
        said = Said.of(FIRST_AND_SOME, first=_short(first.at), ended=last.ended, n=last.n, last=_short(last.at))
    elif full.at == first.at:
        said = Said.of(ALL_AT_SMALLEST if full is curve[0] else ALL_AT, load=_short(full.at))
    else:
        said = Said.of(FIRST_AND_ALL, first=_short(first.at), full=_short(full.at))
    return said.text(lang)


def _short(load: float) -> str:
    return f"{load:,.3g}"
