"""A plan in sentences: made of its numbers, so that none is said that is not in the JSON."""

from __future__ import annotations

from collections.abc import Iterator

from hbmtwin.sim.capacity.binding import Binding
from hbmtwin.sim.capacity.capacity_plan import CapacityPlan, OneMore, Peak, Tried
from hbmtwin.sim.capacity.changes import Change
from hbmtwin.sim.capacity.leaning import Leaning
from hbmtwin.sim.capacity.plan_targets import Value
from hbmtwin.sim.capacity.promise import seconds
from hbmtwin.sim.phrases import Size

BROKEN = {
    "out_of_memory": "ran out of memory",
    "does_not_fit": "did not start",
    "standstill": "came to a standstill",
    "rejected": "rejected requests for want of memory",
    "unfinished": "did not serve all requests",
    "preemptions": "preempted more than they may",
    "margin": "left less than the margin",
}
MOST_CHANGES = 3
"""That are told in a sentence; the table has all."""


def broke(kind: str) -> str:
    """What a run did that broke its promise: ``missed ttft_p99``."""
    return BROKEN.get(kind, f"missed {kind}")


def verdict(plan: CapacityPlan) -> str:
    """The answer, and how sure it is."""
    if plan.answer is None:
        return _none(plan)
    said = plan.target.text(plan.answer)
    shown = _seen(_of(plan, plan.answer))
    if plan.kind == "unbounded":
        most = f"up to {said}, as far as was looked, everything holds: no answer, but a bound from below"
        return f"{most}. {_why_unbounded(plan)}"
    if not plan.chance:
        return f"{said}: the last value that holds. {_once(plan)}"
    best = "the smallest" if plan.target.smaller_is_better else "the most"
    if plan.target.name == "devices":
        best = "the fewest"
    beyond = _beyond(plan)
    share = f"at least {100 * plan.survive:g} % of runs hold"
    sure = f"Both ends are right together with a confidence of {100 * plan.confidence:g} %"
    return f"{said}, {best} at which {share} ({shown}); {beyond}. {sure}."


def sentences(plan: CapacityPlan) -> Iterator[tuple[str, str]]:
    """All else that is known of it: a heading and its sentence."""
    if plan.peak is not None:
        yield "margin", _margin(plan, plan.peak)
    if plan.upper is not None:
        yield (
            "range",
            f"holds from {plan.answer:g} up to {plan.upper:g}, which still leaves {plan.margin} of the device",
        )
    if plan.binding is not None:
        yield "binding", _binding(plan, plan.binding)
    if plan.one_more is not None:
        yield "one more", _one_more(plan, plan.one_more)
    if plan.changes is not None:
        yield "next", _changes(plan)
    if plan.leaning is not None:
        yield "leans on", _leans(plan.leaning)
    yield "order", _order(plan)


def _of(plan: CapacityPlan, value: Value) -> Tried:
    return next(t for t in plan.tried if t.value == value)


def _seen(tried: Tried) -> str:
    return f"{tried.held:,} of {tried.trials:,} did"


def _beyond(plan: CapacityPlan) -> str:
    failing = plan.first_failing
    if failing is None:
        return plan.target.end if plan.answer == plan.target.values[-1] else "none beyond was shown to fail"
    between = [t for t in plan.tried if t.counted and t.decided is None]
    open_ = f"; between them {', '.join(f'{t.value:,}' for t in between)} could not be decided" if between else ""
    do = "does" if failing == 1 else "do"
    return f"{plan.target.text(failing)} {do} not ({_seen(_of(plan, failing))}){open_}"


def _once(plan: CapacityPlan) -> str:
    return "One run decides: this traffic has no chance in it, so there is no confidence to state"


def _why_unbounded(plan: CapacityPlan) -> str:
    if plan.slos:
        return (
            "Nothing that is promised gets worse with the load: who waits meets any TPOT; promise a ttft_p99 or an "
            "e2e_p99 as well"
        )
    return "Nothing was promised that a load breaks: add --slo, or --max-preemptions"


def _none(plan: CapacityPlan) -> str:
    easiest = plan.target.values[0]
    tried = _of(plan, easiest)
    said = plan.target.text(easiest)
    if plan.kind == "not_shown":
        return (
            f"not shown even at {said}: {_seen(tried)}, which shows neither that {100 * plan.survive:g} % hold nor "
            "that they do not; allow more --seeds, or a lower --survive"
        )
    broken = {} if plan.binding is None else plan.binding.broken
    why = ": " + ", ".join(f"{n} {broke(kind)}" for kind, n in broken.items()) if broken else ""
    best = ", ".join(f"{name} {seconds(value)}" for name, value in plan.best_missed.items() if value is not None)
    reached = f". The best that was reached there: {best}; wanted is {', '.join(plan.slos)}" if best else ""
    return f"nothing holds: even at {said} {_seen(tried)}{why}{reached}"


def _margin(plan: CapacityPlan, p: Peak) -> str:
    return (
        f"at the fullest of its runs {100 * p.kv_usage:.0f} % of {Size(p.kv_budget_bytes)} of KV were held "
        f"({Size(p.kv_left_bytes)} left) and {Size(p.device_left_bytes)} of the device were free; the margin is "
        f"{plan.margin}"
    )


def _binding(plan: CapacityPlan, b: Binding) -> str:
    value = plan.first_failing
    broken = ", ".join(f"{count} of {b.trials} {broke(kind)}" for kind, count in b.broken.items())
    causes = f" ({', '.join(f'{count} of {cause}' for cause, count in b.causes.items())})" if b.causes else ""
    relaxed = "; ".join(f"with {r.change} {r.held} of {r.trials} hold" for r in b.relaxed)
    where = "" if value is None else f" at {plan.target.text(value)}"
    return f"{b.constraint}:{where} {broken}{causes}. {relaxed}"


def _one_more(plan: CapacityPlan, cost: OneMore) -> str:
    unit = "user" if plan.target.name == "users" else plan.target.unit
    slower = f"{cost.tpot_p99_s * 1e3:+.2f} ms of tpot_p99, {cost.ttft_p99_s * 1e3:+.1f} ms of ttft_p99"
    one = (
        f"one more {unit} takes {Size(round(cost.kv_bytes))} of KV at the peak, {slower} "
        f"(between {cost.from_value:,} and {cost.to_value:,})"
    )
    if cost.next_value is None:
        return one
    gives = ", ".join(f"{count} of {cost.next_trials} {broke(kind)}" for kind, count in cost.then_breaks.items())
    return f"{one}; at {plan.target.text(cost.next_value)} {gives or f'none of {cost.next_trials} runs breaks yet'}"


def _changes(plan: CapacityPlan) -> str:
    holding = [(change, to) for change in plan.changes or () if (to := change.carries_to) is not None]
    if not holding:
        return f"none of {len(plan.changes or ())} single changes holds there"
    told = ", ".join(_change(plan, change, to) for change, to in holding[:MOST_CHANGES])
    return f"{told}; each with {holding[0][0].trials} draws: plan what you choose again"


def _change(plan: CapacityPlan, change: Change, carries_to: Value) -> str:
    more = "or beyond " if change.at_least else ""
    drops = " (drops parts of conversations)" if change.drops_tokens else ""
    return f"{change.name} carries to {more}{plan.target.text(carries_to)}{drops}"


def _leans(leaning: Leaning) -> str:
    most = leaning.most
    if most is None:
        return "no uncertain figure moves it within its range"
    a = most.assumption
    how = "calibrated" if a.calibrated else "a default, uncalibrated"
    ends = f"{_value(most.low)} at {a.ends.low:g}, {_value(most.high)} at {a.ends.high:g}"
    worst = f"; with all figures at their worse ends at once {_value(leaning.worst)}"
    return (
        f"{a.name}, {a.words}: {how} ({a.ends.value:g}). The answer is {ends}, and {_value(leaning.answer)} as it is, "
        f"by {leaning.draws} draws{worst}"
    )


def _value(value: Value | None) -> str:
    return "none" if value is None else f"{value:,}"


def _order(plan: CapacityPlan) -> str:
    checked = ", ".join(f"{value:,}" for value in plan.checked)
    if not plan.out_of_order:
        return f"less load held as often at {checked}: what lies between was not run"
    pairs = ", ".join(f"{easier:,} holds less often than {harder:,}" for easier, harder in plan.out_of_order)
    return f"more load is not always worse here: {pairs}. Only what lies below the first that fails is answered"
