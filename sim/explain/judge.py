"""From what was read to one cause, its arithmetic, and what would help.

::

    findings --failure--> OomFacts --classify--> Cause --+--> arithmetic   the message's own books, line by line
                                                         +--> advice       what helps and what does not, with numbers

One failure is told many times: by the worker, by its parent, by the driver below it. Each is judged once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hbmtwin.allocators.oom import Cause, OomFacts
from hbmtwin.allocators.size_text import format_size
from hbmtwin.sim.explain.advice import Situation, does_not_help, helps
from hbmtwin.sim.explain.arithmetic import NEARLY_FULL, books
from hbmtwin.sim.explain.circumstances import When
from hbmtwin.sim.explain.failure import EXABYTE, KINDS, Around, Failure, failure_of
from hbmtwin.sim.explain.findings import Finding
from hbmtwin.sim.explain.words import CAUSE, NAMES, NO_CAUSE, NOT_SETTLED, WHEN
from hbmtwin.sim.phrases import Phrase, Said

CAUSES = {
    Cause.NEVER_FITS: Phrase(
        "the request is larger than the device or its cap: it could never be served", "申请超过设备或上限，永远无法满足"
    ),
    Cause.ALLOCATOR_RULE: Phrase(
        "enough memory was free, and something other than its amount refused it",
        "空闲显存足够，是数量以外的原因拒绝了本次申请",
    ),
    Cause.EXTERNAL_FRAGMENTATION: Phrase(
        "fragmentation: enough is free in all, but not in one piece", "显存碎片：空闲总量足够，但没有足够大的连续块"
    ),
    Cause.GROWTH_COPY: Phrase(
        "old copies of growing buffers hold what was missing", "增长缓冲区的旧副本占用了所缺的显存"
    ),
    Cause.RESERVATION: Phrase(
        "memory that is reserved and not filled holds what was missing", "已预留但未填充的显存正是所缺的部分"
    ),
    Cause.PARKED_HISTORY: Phrase("kept conversations hold what was missing", "保留的历史会话占用了所缺的显存"),
    Cause.OTHER_TENANT: Phrase(
        "other processes on the device hold {tenants}; without them it would fit",
        "设备上的其他进程占用 {tenants}，没有它们就能放下",
    ),
    Cause.RUNTIME_PEAK: Phrase(
        "memory that was freed and is still in use by a step in flight was missing",
        "已释放但仍被在途计算使用的显存正是所缺的部分",
    ),
    Cause.SHORTAGE: Phrase(
        "a plain shortage: this process itself has filled the device", "显存不足：就是本进程自己把设备用满了"
    ),
}
SHORTAGE_AMONG_OTHERS = Phrase(
    "a plain shortage: even without the other processes ({tenants}) it would not fit",
    "显存不足：即使没有其他进程（{tenants}）也放不下",
)
SHORTAGE_OF_ALL = Phrase(
    "a plain shortage; the message does not tell who holds the rest of the device",
    "显存不足；报错没有说明其余显存被谁占用",
)
SHORTAGE_OUTSIDE = Phrase(
    "a plain shortage, and not of PyTorch's making: {outside} of the device are held outside of it, by this process's "
    "context and libraries or by another process",
    "显存不足，但不是 PyTorch 占满的：设备上 {outside} 在 PyTorch 之外，属于本进程的运行时上下文和通信库，或其他进程",
)
FRAGMENTED_AND_FULL = Phrase(
    "fragmentation on a device that is full anyway: not in one piece, and with this request served only {left} would "
    "be left",
    "显存碎片，而且设备本来就快满了：没有连续块，即使这次成功也只剩 {left}",
)
FULL_OF_OTHERS = Phrase(
    "fragmentation on a device that is full anyway, mostly with what others hold: about {tenants} of {limit}; look for "
    "them first",
    "显存碎片，而且设备本来就快满了，大部分被其他进程占用：{limit} 中约 {tenants}；请先查看这些进程",
)
GRAPHS_KEEP = Phrase(
    "graphs keep what was missing: {private} lie free in their private pools, where ordinary tensors cannot use them",
    "所缺的显存在图的私有显存池里：那里空闲 {private}，普通张量不能使用",
)
NEVER_BESIDE_WEIGHTS = Phrase(
    "the request is larger than what the weights leave of the device: it could never be served",
    "申请超过权重之外的全部显存，永远无法满足",
)
UNSETTLED = Phrase(
    "either of two, which the printed digits do not settle: {one}; or {other}",
    "打印精度不足以区分两种可能：{one}；或者 {other}",
)
UNTOLD = Phrase(
    "memory ran out; the text does not tell enough of the figures to say why",
    "显存不足，但文本中的数字不全，无法判断原因",
)
OUTSIDE_TORCH = Phrase(
    "the driver had no memory for something outside of torch's allocator{what}",
    "驱动层没有显存可分配，申请来自 torch 分配器之外{what}",
)
CORRUPT = Phrase("a size that no tensor has was asked for", "申请了不可能的大小")
PREEMPTED = Phrase(
    "the memory fraction refused {asked} before the driver was asked", "显存比例上限在询问驱动之前拒绝了 {asked}"
)

SAME_STORY_LINES = 200
"""A driver's word within so many lines of an allocator's message of the same rank tells the same failure."""
TRACEBACK_LINES = 400
_OF_THE_LOG = ("serving", "failed_start", "begun", "ended")
"""Phases of a moment that a line of the log tells, and no frame of a traceback."""
MOST_FAILURES = 64
"""Judged of one text: one a rank on eight nodes. What failed later failed because of these."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """Why one request for memory failed, as far as the text tells."""

    cause: Cause | None
    """None: the text tells that memory ran out and not enough to say why."""
    when: When | None
    """Before or after the server could answer; None: the text does not tell."""
    rank: str
    """Of the worker that failed, as its finding names it."""
    said: Said
    """The cause in one sentence."""
    arithmetic: tuple[Said, ...]
    helps: tuple[Said, ...]
    does_not_help: tuple[Said, ...]
    facts: OomFacts
    """What :func:`~hbmtwin.allocators.oom.classify` was asked; what the text does not tell is 0."""
    line: int
    """Where its message begins."""
    phase: str = ""
    """weights, profile, kv_cache, capture, warm_up, step; empty: not told."""


def cause_line(judgement: Judgement) -> Said:
    """Its cause by identifier and name, and when; or that there is none, or one of two."""
    when = Said.of(WHEN[judgement.when]) if judgement.when else ""
    if judgement.cause is None:
        return Said.of(NOT_SETTLED if judgement.said.phrase is UNSETTLED else NO_CAUSE, when=when)
    return Said.of(CAUSE, cause=judgement.cause.value, name=Said.of(NAMES[judgement.cause]), when=when)


def judge(findings: Sequence[Finding]) -> list[Judgement]:
    """One judgement for each of the first :data:`MOST_FAILURES` failed requests that *findings* tell, in their order.

    O(findings x log(findings) + failures x neighbours), where a text has few of either.
    """
    around = Around.of(findings)
    return [_judged(finding, around) for finding in _failures(findings)]


def _failures(findings: Sequence[Finding]) -> list[Finding]:
    """The messages of failures, each once: a repeated one and a driver's word under an allocator's are left out."""
    kept: list[Finding] = []
    seen: set[tuple[object, ...]] = set()
    told = [finding for finding in findings if finding.kind in KINDS]
    allocators: dict[str | None, list[int]] = {}
    for finding in told:
        if not finding.kind.endswith("driver_oom"):
            for key in (finding.rank, None):
                allocators.setdefault(key, []).append(finding.line)
    for finding in told:
        driver = finding.kind.endswith("driver_oom")
        what = (tuple(sorted(finding.numbers.items())), tuple(sorted(finding.words.items())))
        key_of_failure = (finding.rank if driver else "", finding.kind, *what)
        ranks = (finding.rank, "") if finding.rank else (None,)
        if driver and any(_is_near(finding.line, allocators.get(rank, [])) for rank in ranks):
            continue
        if key_of_failure not in seen:
            seen.add(key_of_failure)
            kept.append(finding)
            if len(kept) == MOST_FAILURES:
                break
    return kept


def _is_near(line: int, lines: list[int]) -> bool:
    """Whether one of the sorted *lines* belongs to the story that *line* tells. O(log(lines))."""
    at = bisect_left(lines, line - SAME_STORY_LINES)
    return at < len(lines) and lines[at] <= line + SAME_STORY_LINES


def _judged(finding: Finding, around: Around) -> Judgement:
    failure = failure_of(finding, around)
    when, phase = _moment(finding, around.moments)
    cause = failure.causes[0] if len(failure.causes) == 1 else None
    situation = Situation(
        cause,
        when,
        phase,
        expandable_on=any("expandable_segments:True" in conf for conf in around.confs),
        page_1g=any("page_size:1g" in conf for conf in around.confs),
        hccl_buffsize_mib=around.settings.get("HCCL_BUFFSIZE"),
        task_queue=around.settings.get("TASK_QUEUE_ENABLE"),
    )
    return Judgement(
        cause,
        when,
        finding.rank,
        _said(failure, cause),
        books(failure),
        helps(failure, situation),
        does_not_help(failure, situation),
        failure.facts,
        finding.line,
        phase,
    )


def _said(failure: Failure, cause: Cause | None) -> Said:
    """The cause in one sentence."""
    words = failure.finding.words
    if failure.asked is not None and failure.asked >= EXABYTE:
        return Said.of(CORRUPT)
    if words.get("refused") == "preempted":
        return Said.of(PREEMPTED, asked=format_size(failure.asked or 0))
    if failure.finding.kind.endswith("driver_oom"):
        what = words.get("operator") or words.get("resource")
        return Said.of(OUTSIDE_TORCH, what=f": {what}" if what else "")
    if len(failure.causes) > 1:
        one, other = (Said.of(CAUSES[each], **_tenants(failure, each)) for each in failure.causes[:2])
        return Said.of(UNSETTLED, one=one, other=other)
    if cause is None:
        return Said.of(UNTOLD)
    if cause is Cause.SHORTAGE and failure.tenants:
        return Said.of(SHORTAGE_AMONG_OTHERS, tenants=format_size(failure.facts.tenants_bytes))
    if cause is Cause.SHORTAGE and failure.reserved is None:
        return Said.of(SHORTAGE_OF_ALL)
    if cause is Cause.SHORTAGE and failure.mostly_outside:
        return Said.of(SHORTAGE_OUTSIDE, outside=format_size(failure.outside or 0))
    facts = failure.facts
    if cause is Cause.NEVER_FITS and facts.need_bytes <= facts.limit_bytes:
        return Said.of(NEVER_BESIDE_WEIGHTS)
    if cause is Cause.EXTERNAL_FRAGMENTATION and failure.graphs_keep_it:
        return Said.of(GRAPHS_KEEP, private=format_size(failure.told("private_free_bytes") or 0))
    left = facts.driver_free_bytes + facts.cached_free_bytes - facts.need_bytes
    if cause is Cause.EXTERNAL_FRAGMENTATION and left < NEARLY_FULL * facts.limit_bytes:
        if failure.mostly_others:
            tenants = format_size(facts.tenants_bytes)
            return Said.of(FULL_OF_OTHERS, tenants=tenants, limit=format_size(facts.limit_bytes))
        return Said.of(FRAGMENTED_AND_FULL, left=format_size(max(0, left)))
    return Said.of(CAUSES[cause], **_tenants(failure, cause))


def _tenants(failure: Failure, cause: Cause) -> dict[str, object]:
    return {"tenants": format_size(failure.facts.tenants_bytes)} if cause is Cause.OTHER_TENANT else {}


def _moment(finding: Finding, moments: Sequence[Finding]) -> tuple[When | None, str]:
    """When it failed: as its own traceback tells, else another rank's, else as the log around it does."""
    frames = [other for other in moments if other.words["phase"] not in _OF_THE_LOG]
    before = [other for other in frames if 0 <= finding.line - other.line <= TRACEBACK_LINES]
    for nearest in ([other for other in before if other.rank == finding.rank], before):
        if nearest:
            return _when(nearest[-1]), nearest[-1].words["phase"]
    past = [other for other in moments if other.words["phase"] in _OF_THE_LOG and other.line < finding.line]
    begun = past[-1].words.get("what", "") if past else ""
    if begun or any(other.words["phase"] == "failed_start" for other in moments):
        return "start_up", begun
    if any(other.words["phase"] == "serving" for other in past):
        return "run_time", ""
    return None, ""


def _when(moment: Finding) -> When:
    return "start_up" if moment.words["when"] == "start_up" else "run_time"
