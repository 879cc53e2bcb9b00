"""A plan on the screen: the verdict, what it rests on, and two tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from hbmtwin.sim.capacity.plan_words import sentences, verdict
from hbmtwin.sim.capacity.promise import seconds

if TYPE_CHECKING:
    from rich.console import Console

    from hbmtwin.api import CapacityPlan
    from hbmtwin.sim.capacity.leaning import Leaning
    from hbmtwin.sim.capacity.plan_targets import Value

SHOWN_FIGURES = 8
"""Figures of the table of assumptions; the JSON has all."""


def print_plans(console: Console, plans: Mapping[str, CapacityPlan]) -> None:
    """Each plan; of several first a table of their answers."""
    if len(plans) > 1:
        console.print(_answers(plans))
    for name, plan in plans.items():
        console.print()
        heading = f"{name}: " if name else ""
        console.print(Text(f"{heading}{verdict(plan)}", style="bold"))
        console.print(_facts(plan))
        if plan.changes:
            console.print(_changes(plan))
        if plan.leaning is not None and plan.leaning.leans:
            console.print(_leans(plan.leaning))
        for note in plan.notes:
            console.print(Text(f"note: {note}", style="dim"))


def _answers(plans: Mapping[str, CapacityPlan]) -> Table:
    first = next(iter(plans.values()))
    table = Table(title=f"{first.target.name}: at least {100 * first.survive:g} % of runs hold", title_justify="left")
    for name in ("", "holds", "does not", "binding", "KV left (GiB)", "leans most on"):
        table.add_column(name, justify="left" if name in ("", "binding", "leans most on") else "right")
    for name, plan in plans.items():
        left = "" if plan.peak is None else f"{plan.peak.kv_left_bytes / 2**30:.2f}"
        most = None if plan.leaning is None else plan.leaning.most
        table.add_row(
            name,
            _text(plan.answer),
            _text(plan.first_failing),
            "" if plan.binding is None else plan.binding.constraint,
            left,
            "" if most is None else most.assumption.name,
        )
    return table


def _facts(plan: CapacityPlan) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    promised = ", ".join((*plan.slos, *_preemptions(plan), f"margin {plan.margin}"))
    table.add_row("promise", f"no death, nothing rejected for want of memory, all served; {promised}")
    for heading, text in sentences(plan):
        table.add_row(heading, text)
    if latencies := ", ".join(f"{n} {seconds(v)}" for n, v in plan.latencies.items() if v is not None):
        table.add_row("latency", f"{latencies} (means of its runs; {plan.basis})")
    table.add_row("runs", f"{plan.runs:,}")
    return table


def _preemptions(plan: CapacityPlan) -> tuple[str, ...]:
    if plan.max_preemptions is None:
        return ()
    return (f"at most {plan.max_preemptions} preemptions" if plan.max_preemptions else "nobody preempted",)


def _changes(plan: CapacityPlan) -> Table:
    at = "" if plan.first_failing is None else plan.target.text(plan.first_failing)
    table = Table(title=f"single changes, run at {at}", title_justify="left")
    table.add_column("change")
    table.add_column("held", justify="right")
    table.add_column("carries to", justify="right")
    for change in plan.changes or ():
        carries = _text(change.carries_to) + ("+" if change.at_least else "")
        drops = " (drops tokens)" if change.drops_tokens else ""
        table.add_row(f"{change.name}{drops}", f"{change.held} of {change.trials}", carries)
    return table


def _leans(leaning: Leaning) -> Table:
    table = Table(title=f"uncertain figures, with {leaning.draws} draws each", title_justify="left")
    for name in ("figure", "low", "value", "high", "answer at low", "at high"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    table.add_column("known by", overflow="fold")
    for lean in leaning.leans[:SHOWN_FIGURES]:
        a = lean.assumption
        numbers = (f"{a.ends.low:.4g}", f"{a.ends.value:.4g}", f"{a.ends.high:.4g}")
        table.add_row(a.name, *numbers, _text(lean.low), _text(lean.high), a.basis)
    table.add_row("all at the worse end", "", "", "", _text(leaning.worst), "", "")
    return table


def _text(value: Value | None) -> str:
    return "none" if value is None else f"{value:,}"
