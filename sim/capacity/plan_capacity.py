"""How much a server holds, with a stated confidence: scout, count, check, then say what binds and what would help.

::

    Scenario + target + promise
       |  scouts          few draws, exponential and bisection: where about
       |  counted runs    other draws at few values, until the sequential rule decides: [answer, first failing)
       |  checks          few draws well below and above: is more load never better?
       v
    CapacityPlan: verdict, peak, binding limit, cost of one more, changes, what it leans on
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import floor, log, log10
from pathlib import Path
from statistics import fmean

from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.capacity.binding import binding_of
from hbmtwin.sim.capacity.capacity_plan import CapacityPlan, Kind, OneMore, Peak, Tried
from hbmtwin.sim.capacity.capacity_runs import CapacityRuns
from hbmtwin.sim.capacity.capacity_search import MOST_COUNTED, CapacitySearch, Count, Found
from hbmtwin.sim.capacity.changes import changes_of
from hbmtwin.sim.capacity.confidence import clopper_pearson, least_trials
from hbmtwin.sim.capacity.leaning import leaning_of
from hbmtwin.sim.capacity.loads import Loads
from hbmtwin.sim.capacity.plan_targets import Target, target_of
from hbmtwin.sim.capacity.promise import ONE_PERCENT, Margin, Promise, Slo, kv_left_bytes, number
from hbmtwin.sim.capacity.sequential import SequentialRule, TooFewSeeds, sequential_rule
from hbmtwin.sim.legality import effective_oom
from hbmtwin.sim.phrases import Size
from hbmtwin.sim.resolve import device_of
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.sim.sweep.run_row import Row

SCOUTS = 8
ROOM = 2.5
"""Seeds that a value may take, in those that it takes if none fails: enough for values next to the edge."""
MOST_SEEDS = 20_000
"""Of one value: hours, and its rule takes seconds to find."""
ONCE = SequentialRule(0.95, 0.05, (1,), (0,), (1,))
"""Where there is no chance one run decides."""
LOWER = 0.8
"""The cost of one more is read between the answer and this part of it."""
SHOWN = ("ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99", "e2e_p99")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """What is asked of a scenario."""

    target: str | None = None
    slos: tuple[Slo, ...] = ()
    survive: float = 0.95
    """The least share of runs that is to hold."""
    confidence: float = 0.95
    """With which the interval is to be right."""
    margin: Margin = ONE_PERCENT
    max_preemptions: int | None = None
    """None: none without SLOs, any number with them."""
    seeds: int | None = None
    """The most at one value; None: 2.5 times those that a yes takes."""
    explain: bool = True
    """Whether to look for what binds, what would help, and what it leans on: about as many runs again."""


def check_question(question: PlanQuestion) -> None:
    """Raise ScenarioError for numbers that make no sense, or too few seeds: how many it takes."""
    for name, value in (("survive", question.survive), ("confidence", question.confidence)):
        if not 0 < value < 1:
            why = "no number of runs shows that all would hold" if value == 1 else "it is a share of the runs"
            if name == "confidence":
                why = "no number of runs makes sure" if value == 1 else "it is a probability"
            raise ScenarioError(f"--{name} {value:g}: above 0 and below 1, for {why}; take for example 0.95")
    if question.max_preemptions is not None and question.max_preemptions < 0:
        raise ScenarioError(f"--max-preemptions {question.max_preemptions}: at least 0")
    if question.seeds is not None and not 1 <= question.seeds <= MOST_SEEDS:
        raise ScenarioError(f"--seeds {question.seeds}: at least 1, at most {MOST_SEEDS:,}")
    rule_of(question)


def rule_of(question: PlanQuestion) -> SequentialRule:
    """When it is decided at a value: the error is shared among the values that may be counted."""
    error = (1 - question.confidence) / MOST_COUNTED
    if log(error) / log(question.survive) > MOST_SEEDS:
        raise ScenarioError(
            f"--survive {question.survive:.12g}: {MOST_SEEDS:,} runs of which none fails do not show that so many hold "
            f"with a confidence of {question.confidence:.12g}, and no value has more; take for example 0.99"
        )
    least = least_trials(question.survive, error)
    try:
        return sequential_rule(question.survive, error, question.seeds or min(MOST_SEEDS, round(ROOM * least)))
    except TooFewSeeds as few:
        raise ScenarioError(
            f"--seeds {question.seeds}: too few to show that {question.survive:g} of the runs hold with a confidence "
            f"of {question.confidence:g}, even if none fails; at least {few.least}, or a lower --survive"
        ) from None


def plan_capacity(
    scenario: Scenario, question: PlanQuestion, runs: CapacityRuns, folder: Path, *, name: str = ""
) -> CapacityPlan:
    """Plan one scenario; profiles of what it assumes are written into *folder*.

    Raise ScenarioError, CatalogError, WorkloadError; DoesNotFit where the server does not start at the easiest value;
    what :meth:`CapacityRuns.rows` raises.
    """
    loads, rule = asked(scenario, question, runs)
    target = loads.target
    before = runs.count
    found = _search(_of_the_kv_alone(loads) if target.name == "gpu_memory_utilization" else loads, rule)
    plan = CapacityPlan(
        name=name,
        target=target,
        kind=_kind(found, target),
        answer=None if found.yes is None else target.values[found.yes],
        first_failing=None if found.no is None else target.values[found.no],
        survive=question.survive,
        confidence=question.confidence,
        chance=loads.chance,
        slos=tuple(map(str, question.slos)),
        margin=str(question.margin),
        max_preemptions=loads.promise.max_preemptions,
        tried=_tried(target, found, question.confidence),
        runs=0,
        gave_up=found.gave_up,
        out_of_order=tuple((target.values[p.easier], target.values[p.harder]) for p in found.out_of_order),
        checked=tuple(target.values[place] for place in sorted(found.scouted)),
        latencies={},
        best_missed={},
        basis=device_of(scenario).basis,
        notes=target.assumed,
    )
    scouts = loads.draws(SCOUTS)
    if found.yes is None:
        plan = replace(plan, best_missed=_best(loads, scouts), breaks=_breaks(loads, found, len(scouts)))
    else:
        rows = _counted_rows(loads, found, found.yes, len(scouts))
        plan = replace(plan, peak=_peak(rows), latencies=_latencies(rows))
        if not rule.decided(sum(bool(loads.promise.broken(row)) for row in rows), len(rows)):
            serves = target.values[found.yes]
            plan = replace(plan, kind="nothing_holds", answer=None, first_failing=None, serves=serves)
            return replace(plan, runs=runs.count - before)
        if target.name in ("users", "request_rate"):
            plan = replace(plan, one_more=_one_more(loads, found.yes, scouts))
        if target.name == "gpu_memory_utilization":
            plan = replace(plan, upper=_upper(loads, rule, found.yes))
    if question.explain and found.no is not None:
        plan = replace(plan, binding=binding_of(loads, found.no, scouts, folder))
        running = max((int(number(row, "most_running")) for row in loads.rows(found.no, scouts)), default=1)
        plan = replace(plan, changes=changes_of(loads, found.no, rule, running))
    if question.explain and found.yes is not None and found.no is not None:
        plan = replace(plan, leaning=leaning_of(loads, found.yes, rule, folder))
    return replace(plan, runs=runs.count - before)


def asked(scenario: Scenario, question: PlanQuestion, runs: CapacityRuns) -> tuple[Loads, SequentialRule]:
    """What is to be searched, and when it is decided at a value, before anything runs.

    Raise what :func:`plan_capacity` raises then.
    """
    check_question(question)
    target = target_of(scenario, question.target)
    memory = device_of(scenario).memory_bytes
    if question.margin.of(memory) >= memory:
        raise ScenarioError(f"--margin {question.margin}: the device has {Size(memory)}; take less")
    preempts = effective_oom(scenario) == "preempt"
    most = question.max_preemptions
    if most is None and preempts and not question.slos:
        most = 0
    promise = Promise(slos=question.slos, margin=question.margin, max_preemptions=most)
    chance = has_chance(scenario)
    rule = rule_of(question) if chance else replace(ONCE, survive=question.survive)
    loads = Loads(scenario, target, promise, runs, chance=chance)
    try:
        ServerPlan(loads.at(0))
    except DoesNotFit as error:
        error.add_note(f"at the easiest value, {target.text(target.values[0])}")
        raise
    return loads, rule


def has_chance(scenario: Scenario) -> bool:
    """Whether two seeds make two runs: a trace has happened once, unless something of it is drawn."""
    w = scenario.workload
    return w.trace is None or w.trace_jitter or w.priorities is not None


def _search(loads: Loads, rule: SequentialRule) -> Found:
    target = loads.target
    return CapacitySearch(len(target.values), loads, rule, scouts=len(loads.draws(SCOUTS)), guess=target.start).run()


def _of_the_kv_alone(loads: Loads) -> Loads:
    """For the smallest share of the device: the smaller it is, the more it leaves of the device, and the less of KV."""
    promise = replace(loads.promise, device_may_fill=True)
    return Loads(loads.scenario, loads.target, promise, loads.runs, chance=loads.chance)


def _upper(loads: Loads, rule: SequentialRule, smallest: int) -> float | None:
    """The largest share of the device that holds and keeps the margin; None: not even the smallest does."""
    values = loads.target.values[: smallest + 1][::-1]
    target = replace(loads.target, values=values, start=len(values) - 1)
    upward = Loads(loads.scenario, target, loads.promise, loads.runs, chance=loads.chance)
    found = _search(upward, rule)
    return None if found.yes is None else float(values[found.yes])


def _kind(found: Found, target: Target) -> Kind:
    if found.yes is None:
        return "nothing_holds" if found.no == 0 else "not_shown"
    return "unbounded" if found.no is None and found.yes == len(target.values) - 1 and not target.end else "found"


def _tried(target: Target, found: Found, confidence: float) -> tuple[Tried, ...]:
    def tried(place: int, count: Count, counted: bool) -> Tried:
        low, high = clopper_pearson(count.held, count.trials, confidence)
        return Tried(target.values[place], count.held, count.trials, low, high, count.decided, counted)

    places = sorted({*found.scouted, *found.counted})
    return tuple(
        tried(place, found.counted[place], True)
        if place in found.counted
        else tried(place, found.scouted[place], False)
        for place in places
    )


def _breaks(loads: Loads, found: Found, scouts: int) -> Mapping[str, int]:
    """What the runs at the easiest value break first, by kind: those by which it was decided, if there are such."""
    easiest = min((*found.scouted, *found.counted))
    counted = easiest in found.counted
    rows = _counted_rows(loads, found, easiest, scouts) if counted else loads.rows(easiest, range(scouts))
    broken = Counter(kinds[0] for row in rows if (kinds := loads.promise.broken(row)))
    return dict(sorted(broken.items()))


def _counted_rows(loads: Loads, found: Found, place: int, scouts: int) -> list[Row]:
    return loads.rows(place, range(scouts, scouts + found.counted[place].trials))


def _peak(rows: list[Row]) -> Peak:
    fullest = max(rows, key=lambda row: number(row, "kv_usage_peak"))
    refused = max(rows, key=lambda row: number(row, "requests_rejected"))
    return Peak(
        peak_reserved_bytes=max(int(number(row, "peak_reserved_bytes")) for row in rows),
        capacity_bytes=int(number(rows[0], "capacity_bytes")),
        device_left_bytes=min(int(number(row, "least_free_bytes")) for row in rows),
        kv_usage=number(fullest, "kv_usage_peak"),
        kv_budget_bytes=int(number(fullest, "kv_budget_bytes")),
        kv_left_bytes=kv_left_bytes(fullest),
        most_running=max(int(number(row, "most_running")) for row in rows),
        preemptions=max(int(number(row, "preemptions")) for row in rows),
        refused=int(number(refused, "requests_rejected")),
        requests=int(number(refused, "requests_total")),
    )


def _latencies(rows: list[Row]) -> dict[str, float | None]:
    return {name: _mean(rows, f"{name}_s") for name in SHOWN}


def _mean(rows: list[Row], column: str) -> float | None:
    values = [float(value) for row in rows if (value := row[column]) is not None and not isinstance(value, str)]
    return fmean(values) if values else None


def _best(loads: Loads, draws: range) -> Mapping[str, float | None]:
    """What the easiest value reached of each promise: the middle of its runs."""
    rows = loads.rows(0, draws)
    return {slo.metric: _mean(rows, f"{slo.metric}_s") for slo in loads.promise.slos}


def _one_more(loads: Loads, place: int, draws: range) -> OneMore | None:
    """Differences between the answer and a value somewhat below it, for one more; and what breaks at the next value."""
    values = loads.target.values
    lower = max((i for i in range(place) if values[i] <= LOWER * values[place]), default=place - 1)
    if lower < 0:
        return None
    before, here = loads.rows(lower, draws), loads.rows(place, draws)
    by = 1 if loads.target.name == "users" else float(f"{10.0 ** (floor(log10(values[place])) - 1):g}")
    span = (values[place] - values[lower]) / by

    def slope(column: str) -> float:
        return ((_mean(here, column) or 0.0) - (_mean(before, column) or 0.0)) / span

    def kv(rows: list[Row]) -> float:
        return fmean(number(row, "kv_usage_peak") * number(row, "kv_budget_bytes") for row in rows)

    breaks: dict[str, int] = {}
    after = place + 1 if place + 1 < len(values) else None
    for broken in loads.broken(after, draws) if after is not None else []:
        for kind in broken[:1]:
            breaks[kind] = breaks.get(kind, 0) + 1
    return OneMore(
        from_value=values[lower],
        to_value=values[place],
        by=by,
        kv_bytes=(kv(here) - kv(before)) / span,
        ttft_p99_s=slope("ttft_p99_s"),
        tpot_p99_s=slope("tpot_p99_s"),
        tpot_p50_s=slope("tpot_p50_s"),
        then_breaks=dict(sorted(breaks.items())),
        next_value=None if after is None else values[after],
        next_trials=len(draws) if after is not None else 0,
    )
