"""A plan in sentences, in English or in Chinese: made of its numbers, so that none is said that is not in the JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from hbmtwin.sim.capacity import plan_phrases as said
from hbmtwin.sim.capacity.binding import Binding
from hbmtwin.sim.capacity.capacity_plan import CapacityPlan, OneMore, Peak, Tried
from hbmtwin.sim.capacity.changes import Change
from hbmtwin.sim.capacity.leaning import Leaning
from hbmtwin.sim.capacity.plan_targets import Target, Value
from hbmtwin.sim.capacity.promise import seconds
from hbmtwin.sim.phrases import Lang, Phrase, Said, Size

MOST_CHANGES = 3
"""That are told in a sentence; the table has all."""


def broke(kind: str, lang: Lang = "en") -> str:
    """What a run did that broke its promise: ``missed ttft_p99``."""
    broken = said.BROKEN.get(kind)
    return Said.of(said.MISSED, slo=kind).text(lang) if broken is None else Said.of(broken).text(lang)


def verdict(plan: CapacityPlan, lang: Lang = "en") -> str:
    """The answer, and how sure it is."""
    if plan.answer is None:
        return _none(plan, lang)
    value = value_text(plan.target, plan.answer, lang)
    if plan.kind == "unbounded":
        why = Said.of(_why_unbounded(plan))
        return Said.of(said.UNBOUNDED, value=value, why=why).text(lang)
    if not plan.chance:
        return Said.of(said.ONCE, value=value).text(lang)
    best = said.SMALLEST if plan.target.smaller_is_better else said.MOST
    if plan.target.name == "devices":
        best = said.FEWEST
    return Said.of(
        said.FOUND,
        value=value,
        best=Said.of(best),
        survive=100 * plan.survive,
        shown=_seen(_of(plan, plan.answer)),
        beyond=_beyond(plan, lang),
        confidence=100 * plan.confidence,
    ).text(lang)


def _why_unbounded(plan: CapacityPlan) -> Phrase:
    if not plan.slos:
        return said.NO_PROMISE if plan.max_preemptions is None else said.NO_SLO
    return said.NOT_WORSE if all(slo.startswith("tpot") for slo in plan.slos) else said.NOT_FELT


def sentences(plan: CapacityPlan, lang: Lang = "en") -> Iterator[tuple[str, str]]:
    """All else that is known of it: a heading and its sentence."""
    for heading, sentence in _sentences(plan, lang):
        yield Said.of(said.HEADINGS[heading]).text(lang), sentence


def _sentences(plan: CapacityPlan, lang: Lang) -> Iterator[tuple[str, str]]:
    if plan.peak is not None:
        yield "margin", _margin(plan, plan.peak, lang)
        if plan.peak.refused:
            refused = Said.of(said.REFUSED, refused=plan.peak.refused, requests=plan.peak.requests)
            yield "refused", refused.text(lang)
    if plan.upper is not None:
        yield "range", Said.of(said.RANGE, answer=plan.answer, upper=plan.upper, margin=plan.margin).text(lang)
    if plan.binding is not None:
        yield "binding", _binding(plan, plan.binding, lang)
    if plan.one_more is not None:
        yield "one more", _one_more(plan, plan.one_more, lang)
    if plan.changes is not None:
        yield "next", _changes(plan, lang)
    if plan.leaning is not None:
        yield "leans on", _leans(plan.leaning, lang)
    yield "order", _order(plan, lang)


def _listed(parts: Iterable[str], by: Phrase, lang: Lang) -> str:
    return Said.of(by).text(lang).join(parts)


def value_text(target: Target, value: Value, lang: Lang) -> str:
    """``96 users``."""
    counted = None if lang == "en" else said.COUNTED.get(target.unit)  # in English there is a singular
    if counted is None:
        return target.text(value)
    return Said.of(counted, value=f"{value:,}" if isinstance(value, int) else f"{value:g}").text(lang)


def _value(value: Value | None, lang: Lang) -> str:
    return Said.of(said.NO_VALUE).text(lang) if value is None else f"{value:,}"


def _of(plan: CapacityPlan, value: Value) -> Tried:
    return next(t for t in plan.tried if t.value == value)


def _seen(tried: Tried) -> Said:
    return Said.of(said.SEEN, held=tried.held, trials=tried.trials)


def _beyond(plan: CapacityPlan, lang: Lang) -> str:
    failing = plan.first_failing
    open_ = [f"{t.value:,}" for t in plan.tried if t.counted and t.decided is None]
    if failing is None:
        if plan.answer != plan.target.values[-1]:
            undecided = Said.of(said.UNDECIDED, values=_listed(open_, said.LIST_COMMA, lang)) if open_ else ""
            return Said.of(said.NONE_BEYOND, undecided=undecided).text(lang)
        end = said.TARGET_ENDS.get(plan.target.end)
        return plan.target.end if end is None else Said.of(end).text(lang)
    return Said.of(
        said.DOES_NOT if failing == 1 else said.DO_NOT,
        value=value_text(plan.target, failing, lang),
        shown=_seen(_of(plan, failing)),
        between=Said.of(said.BETWEEN, values=_listed(open_, said.LIST_COMMA, lang)) if open_ else "",
    ).text(lang)


def _none(plan: CapacityPlan, lang: Lang) -> str:
    if plan.serves is not None and plan.peak is not None:
        left = Size(plan.peak.device_left_bytes)
        return Said.of(said.LEAVES_LESS, serves=plan.serves, left=left, margin=plan.margin).text(lang)
    easiest = plan.tried[0]
    shown, value = _seen(easiest), value_text(plan.target, easiest.value, lang)
    if plan.kind == "not_shown":
        return Said.of(said.NOT_SHOWN, value=value, shown=shown, survive=100 * plan.survive).text(lang)
    why = [Said.of(said.SO_MANY, count=n, broke=broke(kind, lang)).text(lang) for kind, n in plan.breaks.items()]
    best = [f"{name} {seconds(value)}" for name, value in plan.best_missed.items() if value is not None]
    slos = _listed(plan.slos, said.COMMA, lang)
    return Said.of(
        said.NOTHING_HOLDS,
        value=value,
        shown=shown,
        why=Said.of(said.WHY, broken=_listed(why, said.COMMA, lang)) if why else "",
        reached=Said.of(said.REACHED, best=_listed(best, said.COMMA, lang), slos=slos) if best else "",
    ).text(lang)


def _margin(plan: CapacityPlan, p: Peak, lang: Lang) -> str:
    return Said.of(
        said.MARGIN,
        usage=100 * p.kv_usage,
        budget=Size(p.kv_budget_bytes),
        kv_left=Size(p.kv_left_bytes),
        device_left=Size(p.device_left_bytes),
        margin=plan.margin,
    ).text(lang)


def _binding(plan: CapacityPlan, b: Binding, lang: Lang) -> str:
    value = plan.first_failing
    causes = (
        Said.of(said.OF_CAUSE, count=count, cause=said.cause_name(cause, lang)).text(lang)
        for cause, count in b.causes.items()
    )
    relaxed = [
        Said.of(said.RELAXED, change=known(said.TWICE, r.change, lang), held=r.held, trials=r.trials).text(lang)
        for r in b.relaxed
    ]
    return Said.of(
        said.BINDING,
        constraint=known(said.CONSTRAINTS, b.constraint, lang),
        where="" if value is None else Said.of(said.AT, value=value_text(plan.target, value, lang)),
        broken=_broken(b.broken.items(), b.trials, lang),
        causes=Said.of(said.CAUSES, causes=_listed(causes, said.COMMA, lang)) if b.causes else "",
        relaxed=Said.of(said.DOUBLED, relaxed=_listed(relaxed, said.SEMICOLON, lang)) if relaxed else "",
    ).text(lang)


def known(table: dict[str, Phrase], name: str, lang: Lang) -> str:
    """What stands in results by its English name; a setting is called so in both languages."""
    return Said.of(table[name]).text(lang) if name in table else name


def _broken(kinds: Iterable[tuple[str, int]], trials: int, lang: Lang) -> str:
    told = (Said.of(said.OF, count=n, trials=trials, broke=broke(kind, lang)).text(lang) for kind, n in kinds)
    return _listed(told, said.COMMA, lang)


def _one_more(plan: CapacityPlan, cost: OneMore, lang: Lang) -> str:
    one = Said.of(
        said.ONE_MORE if plan.target.name == "users" else said.SO_MUCH_MORE,
        by=value_text(plan.target, cost.by, lang),
        kv=Size(round(cost.kv_bytes)),
        tpot=cost.tpot_p99_s * 1e3,
        ttft=cost.ttft_p99_s * 1e3,
        first=cost.from_value,
        last=cost.to_value,
    )
    if cost.next_value is None:
        return one.text(lang)
    value = value_text(plan.target, cost.next_value, lang)
    breaks: object = Said.of(said.NONE_BREAKS, trials=cost.next_trials)
    if cost.then_breaks:
        breaks = _broken(cost.then_breaks.items(), cost.next_trials, lang)
    return Said.of(said.THEN, one=one, value=value, breaks=breaks).text(lang)


def _changes(plan: CapacityPlan, lang: Lang) -> str:
    holding = [(change, to) for change in plan.changes or () if (to := change.carries_to) is not None]
    if not holding:
        return Said.of(said.NO_CHANGE, count=len(plan.changes or ())).text(lang)
    told = (_change(plan, change, to, lang) for change, to in holding[:MOST_CHANGES])
    return Said.of(said.CHANGES_TOLD, told=_listed(told, said.COMMA, lang), draws=draws_of(holding[0][0].trials)).text(
        lang
    )


def draws_of(count: int) -> Said:
    """``4 draws``."""
    return Said.of(said.DRAW) if count == 1 else Said.of(said.DRAWS, count=count)


def _change(plan: CapacityPlan, change: Change, carries_to: Value, lang: Lang) -> str:
    return Said.of(
        said.CARRIES_BEYOND if change.at_least else said.CARRIES,
        change=said.change_name(change.name, lang),
        value=value_text(plan.target, carries_to, lang),
        drops=Said.of(said.DROPS) if change.drops_tokens else "",
    ).text(lang)


def _leans(leaning: Leaning, lang: Lang) -> str:
    most = leaning.most
    if most is None:
        return Said.of(said.STILL).text(lang)
    a = most.assumption
    return Said.of(
        said.LEANS,
        name=a.name,
        words=a.words(lang),
        how=Said.of(said.CALIBRATED if a.calibrated else said.DEFAULT),
        value=a.ends.value,
        low=_value(most.low, lang),
        low_end=a.ends.low,
        high=_value(most.high, lang),
        high_end=a.ends.high,
        answer=_value(leaning.answer, lang),
        draws=draws_of(leaning.draws),
        worst=_value(leaning.worst, lang),
    ).text(lang)


def _order(plan: CapacityPlan, lang: Lang) -> str:
    if not plan.out_of_order:
        checked = _listed((f"{value:,}" for value in plan.checked), said.LIST_COMMA, lang)
        return Said.of(said.IN_ORDER, checked=checked).text(lang)
    pairs = (Said.of(said.LESS_OFTEN, easier=a, harder=b).text(lang) for a, b in plan.out_of_order)
    return Said.of(said.OUT_OF_ORDER, pairs=_listed(pairs, said.COMMA, lang)).text(lang)
