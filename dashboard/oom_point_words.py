"""OOM points in words and rows: what the terminal and the page both say."""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.sim.capacity.oom_point import CriticalLoad, OomPoint
from hbmtwin.sim.capacity.oom_point_curves import CONFIDENCE, Share, by_load, causes, memory_by_load, quantile
from hbmtwin.sim.capacity.oom_point_loads import WORDS
from hbmtwin.sim.capacity.oom_point_runs import End
from hbmtwin.sim.capacity.oom_point_tables import half_load
from hbmtwin.workloads.builtin import NUM_PROMPTS

GIB = 2**30
MISSING = "–"
END_WORDS: dict[End, str] = {"fails": "runs out", "preempts": "preempts"}
HEADER = ("policy", "what", "of draws", "at", "causes", "users", "turn", "time (s)", "operations")
"""Columns of :func:`rows`; the last four are medians of the runs at the critical loads."""
PLACE_COLUMNS = ("died_users", "died_turn", "died_at_s", "died_operations")


def name_of(policy: str, end: End) -> str:
    """``paged`` or ``paged, preempts``."""
    return policy if end == "fails" else f"{policy}, preempts"


def headline(point: OomPoint) -> str:
    """Model, device, load and draws, in a line."""
    s, values = point.scenario, point.load.values
    span = point.load.text(values[0]) if len(values) == 1 else f"{number(values[0])} to {point.load.text(values[-1])}"
    return f"{s.model.name} on {s.device.name}, {span}: {point.varies}"


def sentences(point: OomPoint) -> list[str]:
    """What a planner takes from it; then one for each policy and end: where it comes first, for half, and for all."""
    said = [plan(point), *([memory_plan(point)] if point.smallest else [])]
    said += [_sentence(point, policy, end) for policy, ends in point.ends.items() for end in ends]
    return [*said, *_remarks(point)]


def plan(point: OomPoint) -> str:
    """The largest load for each policy up to which no draw came to an end, in a sentence."""
    parts = []
    for policy, ends in point.ends.items():
        safe = [_safe(point, policy, end) for end in ends]
        if len(safe) == 2 and safe[0] != safe[1]:
            parts.append(f"{policy} {safe[0]} (without preempting {safe[1]})")
        else:
            parts.append(f"{policy} {safe[0]}")
    many = f"all {len(point.draws)} draws" if len(point.draws) > 1 else "the one draw"
    return f"Memory suffices in {many}: {', '.join(parts)} ({WORDS[point.load.word]})."


def _safe(point: OomPoint, policy: str, end: End) -> str:
    curve = by_load(point, policy, end)
    if not curve:
        return "at no load that is known"
    first = next((place for place, s in enumerate(curve) if s.ended), len(curve))
    if first == 0:
        return f"at no load asked for ({number(curve[0].at)} is too much)"
    return f"up to {number(curve[first - 1].at)}" + (", the largest asked for" if first == len(curve) else "")


def memory_plan(point: OomPoint) -> str:
    """The memory that the worst of the draws takes at the smallest and at the largest load, in a sentence."""
    parts = []
    for policy, ends in point.ends.items():
        for end in ends:
            if curve := memory_by_load(point.smallest, policy, end):
                without = ", without preempting" if end == "preempts" else ""
                parts.append(f"{policy}{without} {gib(curve[0].most_bytes)} to {gib(curve[-1].most_bytes)}")
    loads = sorted({s.load for s in point.smallest})
    span = f"{number(loads[0])} to {point.load.text(loads[-1])}"
    return f"The smallest device memory (GiB) on which every draw is served, from {span}: {'; '.join(parts)}."


def _sentence(point: OomPoint, policy: str, end: End) -> str:
    curve = by_load(point, policy, end)
    verb = "runs out of memory" if end == "fails" else "preempts"
    if not curve:
        return f"{policy}: no run says whether it {verb}: all ended in an error."
    last = curve[-1]
    text = point.load.text
    if not last.ended:
        return f"{policy} never {verb} up to {text(last.at)} ({_held(last)})."
    first = next(s for s in curve if s.ended)
    if first.ended == first.n and first is not curve[0]:
        held = curve[curve.index(first) - 1]
        return (
            f"{policy} {verb} at {text(first.at)} in every draw; at {number(held.at)} in none ({_held(held)})."
            f"{_why(point, policy, end)}"
        )
    if first is curve[0] and first.ended == first.n:
        already = f"at {text(first.at)} already, the smallest load asked for, in every draw"
        return f"{policy} {verb} {already}.{_why(point, policy, end)}"
    before = next((s for s in reversed(curve) if not s.ended), None)
    where = [f"first at {text(first.at)}"]
    if (half := half_load(point, policy, end)) is not None and half != first.at:
        where.append(f"in half of the draws at {number(half)}")
    full = next((s for s in curve if s.ended == s.n), None)
    if full is not None and full.at not in (first.at, half):
        where.append(f"in all at {number(full.at)}")
    elif full is None:
        where.append(f"in {last.ended} of {last.n} up to {number(last.at)}")
    some = f"at the smallest load in {first.ended} of {first.n}"
    so_far = f"at {number(before.at)} in none ({_held(before)})" if before else some
    return f"{policy} {verb} {', '.join(where)}; {so_far}.{_why(point, policy, end)}"


def _held(s: Share) -> str:
    return f"0 of {s.n}: with {CONFIDENCE:.0%} confidence in fewer than {s.high:.0%}"


def _why(point: OomPoint, policy: str, end: End) -> str:
    critical = point.of(policy, end)
    if end == "preempts":
        return _recomputed(point, policy)
    found = causes(critical)
    return f" Causes: {cause_counts(found)}." if found else ""


def _recomputed(point: OomPoint, policy: str) -> str:
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
    thrashes = f", and thrashes in {minutes} of its minutes over all draws" if minutes else ", and never thrashes"
    most = f"up to {max(shares):.1f} %"
    return f" At {point.load.text(point.load.values[-1])} it computes {most} of its tokens twice{thrashes}."


def cause_counts(found: dict[str, int]) -> str:
    """``external_fragmentation 8, growth_copy 2``."""
    return ", ".join(f"{cause} {count}" for cause, count in found.items())


def _remarks(point: OomPoint) -> list[str]:
    remarks = []
    asking = point.scenario.workload.num_prompts or NUM_PROMPTS
    if point.load.word == "users" and point.load.values[-1] > asking:
        remarks.append(f"Of {point.load.values[-1]:,} users only {asking:,} ever ask: raise workload.num_prompts.")
    if torn := [c for c in point.critical if not c.monotone]:
        names = dict.fromkeys(name_of(c.policy, c.end) for c in torn)
        remarks.append(
            f"Not monotone: {len(torn)} of {len(point.critical)} draws hold at a larger load than one that they fail "
            f"at ({', '.join(names)}); every load was run for them, and the first failure counts."
        )
    if len(point.draws) == 1:
        remarks.append("With one draw the bands are all that a single run can say: next to nothing.")
    if point.broken:
        count = f"{len(point.broken)} runs ended in an error, and their draws count for nothing"
        remarks.append(f"{count}; the first: {point.broken[0]['error']}")
    return remarks


def rows(point: OomPoint) -> list[tuple[str, ...]]:
    """A row for each policy and end under HEADER."""
    made = []
    for policy, ends in point.ends.items():
        for end in ends:
            critical = point.of(policy, end)
            ended = [c for c in critical if c.load is not None]
            loads = [c.load for c in ended if c.load is not None]
            at = number(min(loads, default=None))
            if len(set(loads)) > 1:
                at += f" to {number(max(loads))}"
            found = cause_counts(causes(ended)) if end == "fails" else ""
            of = f"{len(ended)} of {len(critical)}"
            made.append((policy, END_WORDS[end], of, at, found or MISSING, *_places(ended, end)))
    return made


def _places(ended: Sequence[CriticalLoad], end: End) -> list[str]:
    cells = []
    for place in PLACE_COLUMNS:
        column = "first_preemption_s" if (place, end) == ("died_at_s", "preempts") else place
        middle = quantile([float(v) for c in ended if c.row is not None and (v := c.row[column]) is not None], 0.5)
        cells.append(MISSING if middle is None else number(middle + (column == "died_turn")))
    return cells


def memory_header(point: OomPoint) -> tuple[str, ...]:
    """Columns of :func:`memory_rows`."""
    return (point.load.word, *(name_of(policy, end) for policy, ends in point.ends.items() for end in ends))


def memory_rows(point: OomPoint) -> list[tuple[str, ...]]:
    """A row for each load: the middle of the draws, and from the least to the most, in GiB."""
    columns = [memory_by_load(point.smallest, policy, end) for policy, ends in point.ends.items() for end in ends]
    loads = sorted({m.load for column in columns for m in column})
    table = []
    for load in loads:
        cells = []
        for column in columns:
            m = next((m for m in column if m.load == load), None)
            cells.append(MISSING if m is None else _spread(m.least_bytes, m.median_bytes, m.most_bytes))
        table.append((number(load), *cells))
    return table


def _spread(least: int | None, middle: int | None, most: int | None) -> str:
    if least == most:
        return gib(middle)
    return f"{gib(middle)} ({gib(least)} – {gib(most)})"


def gib(size: int | None) -> str:
    """``29.52``, or what stands for more than was tried."""
    return "over 1,024" if size is None else f"{size / GIB:,.2f}"


def number(value: float | None) -> str:
    """A load, a count or seconds, to four digits."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:.4g}"


def fate(point: OomPoint, policy: str, end: End) -> str:
    """``first at 0.5, all at 1`` or ``never up to 8``: a title's few words, to three digits."""
    curve = by_load(point, policy, end)
    last = curve[-1]
    if not last.ended:
        return f"never up to {last.at:,.3g}"
    first = next(s for s in curve if s.ended)
    full = next((s for s in curve if s.ended == s.n), None)
    if full is None:
        return f"first at {first.at:,.3g}, {last.ended} of {last.n} by {last.at:,.3g}"
    if full.at == first.at:
        return f"all at {full.at:,.3g}" + (", the smallest" if full is curve[0] else "")
    return f"first at {first.at:,.3g}, all at {full.at:,.3g}"
