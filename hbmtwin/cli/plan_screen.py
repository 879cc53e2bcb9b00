"""A plan on the screen, in either language: the verdict, what it rests on, and two tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hbmtwin.sim.capacity import plan_phrases as said
from hbmtwin.sim.capacity.capacity_plan import CapacityPlan
from hbmtwin.sim.capacity.leaning import Leaning
from hbmtwin.sim.capacity.plan_targets import Value
from hbmtwin.sim.capacity.plan_words import draws_of, known, sentences, value_text, verdict
from hbmtwin.sim.capacity.promise import seconds
from hbmtwin.sim.phrases import Lang, Phrase, Said

SHOWN_FIGURES = 8
"""Figures of the table of assumptions; the JSON has all."""
NOTHING = "–"
"""In a cell of something that there is not."""
WORDS = (said.POLICY, said.ANSWER_COLUMNS[2], said.ANSWER_COLUMNS[4], said.CHANGE_COLUMNS[0], said.FIGURE_COLUMNS[0])
"""Columns of words, which stand on the left; numbers stand on the right."""


class PlanScreen:
    """Prints plans on *console* in *lang*."""

    def __init__(self, console: Console, lang: Lang) -> None:
        self._console = console
        self._lang: Lang = lang

    def show(self, plans: Mapping[str, CapacityPlan]) -> None:
        """Each plan; of several first a table of their answers."""
        if len(plans) > 1:
            self._console.print(self._answers(plans))
        for name, plan in plans.items():
            self._console.print()
            heading = f"{name}: " if name else ""
            self._console.print(Text(f"{heading}{verdict(plan, self._lang)}", style="bold"))
            self._console.print(self._facts(plan))
            if plan.changes:
                self._console.print(self._changes(plan))
            if plan.leaning is not None and plan.leaning.leans:
                self._console.print(self._leans(plan.leaning))
            for note in plan.notes:
                self._console.print(Text(self._told(said.NOTE, note=note), style="dim"))

    def _told(self, phrase: Phrase, **values: object) -> str:
        return Said.of(phrase, **values).text(self._lang)

    def _table(self, title: str, columns: Sequence[Phrase]) -> Table:
        table = Table(title=title, title_justify="left")
        for column in columns:
            fold = column is said.FIGURE_COLUMNS[-1]
            table.add_column(
                self._told(column),
                justify="left" if fold or column in WORDS else "right",
                overflow="fold" if fold else "ellipsis",
            )
        return table

    def _answers(self, plans: Mapping[str, CapacityPlan]) -> Table:
        first = next(iter(plans.values()))
        title = self._told(said.ANSWERS, target=first.target.name, survive=100 * first.survive)
        table = self._table(title, (said.POLICY, *said.ANSWER_COLUMNS))
        for name, plan in plans.items():
            table.add_row(
                name,
                self._value(plan.answer),
                self._value(plan.first_failing),
                self._binding(plan),
                NOTHING if plan.peak is None else f"{plan.peak.kv_left_bytes / 2**30:.2f}",
                self._most(plan),
            )
        return table

    def _binding(self, plan: CapacityPlan) -> str:
        """What binds; it is told apart whether nothing failed, or nobody asked."""
        if plan.binding is not None:
            return known(said.CONSTRAINTS, plan.binding.constraint, self._lang)
        return NOTHING if plan.first_failing is None else self._told(said.NOT_ASKED)

    def _most(self, plan: CapacityPlan) -> str:
        """The figure on which it leans most."""
        if plan.leaning is None:
            between = plan.answer is not None and plan.first_failing is not None
            return self._told(said.NOT_ASKED) if between else NOTHING
        return NOTHING if plan.leaning.most is None else plan.leaning.most.assumption.name

    def _facts(self, plan: CapacityPlan) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 1))
        table.add_column(style="cyan", no_wrap=True)
        table.add_column(overflow="fold")
        comma = self._told(said.COMMA)
        promised = comma.join((*plan.slos, *self._preemptions(plan), self._told(said.THE_MARGIN, margin=plan.margin)))
        table.add_row(self._told(said.PROMISE), self._told(said.PROMISED, promised=promised))
        for heading, text in sentences(plan, self._lang):
            table.add_row(heading, text)
        if latencies := comma.join(f"{n} {seconds(v)}" for n, v in plan.latencies.items() if v is not None):
            basis = known(said.BASES, plan.basis, self._lang)
            table.add_row(self._told(said.LATENCY), self._told(said.MEANS, latencies=latencies, basis=basis))
        table.add_row(self._told(said.RUNS), f"{plan.runs:,}")
        return table

    def _preemptions(self, plan: CapacityPlan) -> tuple[str, ...]:
        if plan.max_preemptions is None:
            return ()
        if not plan.max_preemptions:
            return (self._told(said.NOBODY),)
        return (self._told(said.AT_MOST, count=plan.max_preemptions),)

    def _changes(self, plan: CapacityPlan) -> Table:
        at = "" if plan.first_failing is None else value_text(plan.target, plan.first_failing, self._lang)
        table = self._table(self._told(said.SINGLE_CHANGES, value=at), said.CHANGE_COLUMNS)
        for change in plan.changes or ():
            name = said.change_name(change.name, self._lang)
            if change.drops_tokens:
                name = self._told(said.DROPS_TOKENS, change=name)
            carries = self._value(change.carries_to) + ("+" if change.at_least else "")
            table.add_row(name, self._told(said.HELD_OF, held=change.held, trials=change.trials), carries)
        return table

    def _leans(self, leaning: Leaning) -> Table:
        table = self._table(self._told(said.UNCERTAIN, draws=draws_of(leaning.draws)), said.FIGURE_COLUMNS)
        for lean in leaning.leans[:SHOWN_FIGURES]:
            a = lean.assumption
            numbers = (f"{a.ends.low:.4g}", f"{a.ends.value:.4g}", f"{a.ends.high:.4g}")
            table.add_row(a.name, *numbers, self._value(lean.low), self._value(lean.high), a.basis)
        table.add_row(self._told(said.ALL_WORSE), "", "", "", self._value(leaning.worst), "", "")
        return table

    def _value(self, value: Value | None) -> str:
        return self._told(said.NO_VALUE) if value is None else f"{value:,}"
