"""Error bars of runs: each is run again with one uncertain figure at a time at its low or its high end.

::

    end of a figure                     paged     doubling      of each: TTFT p99, ..., how it ended
    the runs as they are                 5.3 s      9.0 s
    kv_bandwidth_efficiency  low        18.9 s     31.0 s       <- the most of both
                             high        1.2 s      4.4 s       <- the least of both
    activation_bytes         low         5.2 s      9.0 s
    ...                                 -------    -------
    bar                               1.2 .. 18.9  4.4 .. 31.0  and paged is below doubling in every row

Rows are paired: all runs are at the same end of the same figure, so that their order can be compared in each. A run
that has no range for a figure (a variant on another device) stands there as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.capacity.assumptions import Assumption, applied, assumptions_of
from hbmtwin.sim.capacity.plan_targets import with_keys
from hbmtwin.sim.experiment import in_processes
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import run
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.what_would_hold import QUIET

Number = int | float | None

MEASURES: Mapping[str, Callable[[Mapping[str, Any]], Number]] = {
    "requests_completed": lambda s: s["requests_completed"],
    "ttft_p50_s": lambda s: s["ttft_s"]["p50"],
    "ttft_p99_s": lambda s: s["ttft_s"]["p99"],
    "tpot_p50_s": lambda s: s["tpot_s"]["p50"],
    "tpot_p99_s": lambda s: s["tpot_s"]["p99"],
    "e2e_p99_s": lambda s: s["e2e_s"]["p99"],
    "output_tokens_per_s": lambda s: s["simulated_output_tokens"] / s["makespan_s"] if s["makespan_s"] else None,
    "goodput_requests_per_s": lambda s: None if s["goodput"] is None else s["goodput"]["requests_per_s"],
    "preemptions": lambda s: s["preemptions"],
    "peak_reserved_bytes": lambda s: s["peak_reserved_bytes"],
    "died_at_s": lambda s: None if _early(s) is None else _early(s)["time_s"],
}
"""What has a bar, and where a summary has it; None: it has none, as no request was completed, or nothing died."""
ORDERED = ("requests_completed", "ttft_p99_s", "tpot_p99_s", "e2e_p99_s")
"""What runs are compared by."""
BETWEEN_DEVICES = frozenset({"link_bandwidth_bytes_per_s", "send_ns", "send_bandwidth_bytes_per_s"})
"""No run on one device asks for them."""
LEVEL = 1e-6
"""Of a number: a smaller difference is none, as in the table of differences."""


class End(NamedTuple):
    """One end of an uncertain figure."""

    figure: str
    end: str
    """``low`` or ``high``."""


class Outcome(NamedTuple):
    """What of a run is compared."""

    outcome: str
    """``held``, ``out_of_memory``, ``standstill``, or ``does_not_start``."""
    cause: str | None
    numbers: Mapping[str, Number]


class Moved(NamedTuple):
    """A run with a figure at an end: where that is in its scenario, None without a range there, and what came of it."""

    end: End
    assumption: Assumption | None
    outcome: Outcome

    @property
    def at(self) -> float | None:
        """The value of the figure there."""
        return None if self.assumption is None else _at(self.assumption, self.end.end)


class Extreme(NamedTuple):
    """The least or the most of a number, and the end that made it; None: the run as it is."""

    value: float
    by: Moved | None


class Bar(NamedTuple):
    """A number of a run, and between what it lies."""

    value: Number
    least: Extreme | None
    most: Extreme | None
    missing: int
    """Ends at which there is no such number, or only one of what was served until an early end."""
    moved_most_by: str | None
    """The figure whose two ends, and the run, lie farthest apart; None: no figure moves it."""


class Order(NamedTuple):
    """How a number of one run stands to that of another at each end: ``below``, ``above``, ``level`` or ``none``."""

    run: str
    ends: tuple[tuple[End, str], ...]

    def count(self, relation: str) -> int:
        """At how many ends it is so."""
        return sum(at == relation for _, at in self.ends)


@dataclass(frozen=True, slots=True)
class ErrorBars:
    """A run at every end of every figure that is not known exactly."""

    own: Outcome
    moved: tuple[Moved, ...]

    @property
    def bars(self) -> dict[str, Bar]:
        """The least and the most of each number. O(ends)."""
        return {measure: self._bar(measure) for measure in MEASURES}

    def _bar(self, measure: str) -> Bar:
        value = self.own.numbers[measure]
        at_ends = [(self._there(measure, one), one) for one in self.moved]
        found = [Extreme(there, by) for there, by in [(value, None), *at_ends] if there is not None]
        missing = len(at_ends) - len(found) + (value is not None)
        if not found:
            return Bar(value, None, None, missing, None)
        # the first of equals: where nothing moves it, the run as it is
        return Bar(value, min(found, key=_value), max(found, key=_value), missing, self._most(measure))

    def _there(self, measure: str, one: Moved) -> Number:
        """The number at an end. None for a time of a run that went to its end where this one did not, or vice versa."""
        alike = one.outcome.outcome == self.own.outcome or not _of_those_served(measure)
        return one.outcome.numbers[measure] if alike else None

    def _most(self, measure: str) -> str | None:
        own, found = self.own.numbers[measure], dict[str, list[float]]()
        for one in self.moved:
            there = self._there(measure, one)
            found.setdefault(one.end.figure, [] if own is None else [own]).extend([] if there is None else [there])
        spans = {figure: max(values) - min(values) for figure, values in found.items() if values}
        widest = max(spans, key=lambda figure: spans[figure], default=None)
        return widest if widest is not None and spans[widest] > 0 else None

    def order(self, other: ErrorBars, measure: str) -> Order:
        """How its number stands to that of *other*, as they are and end by end. Raise ValueError if not paired."""
        if [one.end for one in self.moved] != [one.end for one in other.moved]:
            raise ValueError("these error bars are not of the same ends: make them in one call")
        pairs = zip(self.moved, other.moved, strict=True)
        at_ends = tuple((a.end, _relation(a.outcome, b.outcome, measure)) for a, b in pairs)
        return Order(_relation(self.own, other.own, measure), at_ends)

    def to_dict(self, others: Mapping[str, ErrorBars] | None = None) -> dict[str, Any]:
        """As JSON has it; with *others* also how it stands to each of them."""
        told = {
            "outcome": self.own.outcome,
            "bars": {name: _bar_dict(bar) for name, bar in self.bars.items()},
            "ends": [_moved_dict(one) for one in self.moved],
        }
        if others:
            told["order"] = {
                measure: {name: _order_dict(self.order(other, measure)) for name, other in others.items()}
                for measure in ORDERED
            }
        return told


def error_bars(
    results: Mapping[str, Result], *, jobs: int = -1, finished: Callable[[str], None] | None = None
) -> dict[str, ErrorBars]:
    """Run every result's scenario at each end of each of its uncertain figures; their bars, paired, by their names.

    An end at which a server does not start is an outcome. *jobs* and *finished* as in
    :func:`hbmtwin.sim.experiment.compare`. Runs: :func:`runs_for_error_bars`. Raise what a run raises but for that.
    """
    scenarios = {name: result.scenario for name, result in results.items()}
    ends = ends_of(scenarios)
    asked = [(name, end, each[name]) for end, each in ends.items() for name in results if name in each]
    told = (lambda place: finished(_called(*asked[place]))) if finished is not None else None
    with TemporaryDirectory(prefix="hbmtwin-") as folder:
        runs = [
            with_keys(applied(scenarios[name], {end.figure: _at(assumption, end.end)}, Path(folder)), QUIET)
            for name, end, assumption in asked
        ]
        outcomes = in_processes(_outcome, runs, jobs=jobs, finished=told)
    found = {(name, end): outcome for (name, end, _), outcome in zip(asked, outcomes, strict=True)}
    own = {name: outcome_of(result.summary) for name, result in results.items()}
    return {
        name: ErrorBars(
            own[name],
            tuple(Moved(end, each.get(name), found.get((name, end), own[name])) for end, each in ends.items()),
        )
        for name in results
    }


def ends_of(scenarios: Mapping[str, Scenario]) -> dict[End, dict[str, Assumption]]:
    """Each end of each figure that some scenario has a range of, and the figure in each of those scenarios.

    An end that is the value itself is none. Raise what a ServerPlan does.
    """
    found: dict[End, dict[str, Assumption]] = {}
    for name, scenario in scenarios.items():
        alone = scenario.engine.tensor_parallel_size * scenario.engine.pipeline_parallel_size == 1
        for assumption in assumptions_of(scenario):
            if alone and assumption.name in BETWEEN_DEVICES:
                continue
            for end in ("low", "high"):
                if _at(assumption, end) != assumption.ends.value:
                    found.setdefault(End(assumption.name, end), {})[name] = assumption
    return found


def runs_for_error_bars(scenarios: Mapping[str, Scenario]) -> int:
    """How many further runs :func:`error_bars` takes: two a figure and scenario, at most. Raise what ends_of does."""
    return sum(map(len, ends_of(scenarios).values()))


def error_bars_to_dicts(bars: Mapping[str, ErrorBars]) -> dict[str, dict[str, Any]]:
    """Each as JSON has it, with how it stands to the others."""
    return {
        name: one.to_dict({other: its for other, its in bars.items() if other != name}) for name, one in bars.items()
    }


def outcome_of(summary: Mapping[str, Any]) -> Outcome:
    """What of a summary is compared."""
    numbers = {name: of(summary) for name, of in MEASURES.items()}
    if summary["oom"] is not None:
        return Outcome("out_of_memory", summary["oom"]["cause"], numbers)
    if (standstill := summary.get("standstill")) is not None:
        return Outcome("standstill", standstill["kind"], numbers)
    return Outcome("held", None, numbers)


def _outcome(scenario: Scenario) -> Outcome:
    try:
        return outcome_of(run(scenario).summary)
    except (DoesNotFit, ScenarioError) as error:
        return Outcome("does_not_start", str(error), dict.fromkeys(MEASURES))


def _early(summary: Mapping[str, Any]) -> Any:
    return summary["oom"] or summary.get("standstill")


def _at(assumption: Assumption, end: str) -> float:
    return assumption.ends.low if end == "low" else assumption.ends.high


def _value(extreme: Extreme) -> float:
    return extreme.value


def _of_those_served(measure: str) -> bool:
    """Whether a number covers only what a run lived through: times of requests, and rates."""
    return measure.endswith("_s") and measure != "died_at_s"


def _relation(a: Outcome, b: Outcome, measure: str) -> str:
    """Times of runs that ended early are not compared."""
    one, other = a.numbers[measure], b.numbers[measure]
    if one is None or other is None or (_of_those_served(measure) and not a.outcome == b.outcome == "held"):
        return "none"
    if abs(one - other) <= LEVEL * max(abs(one), abs(other)):
        return "level"
    return "below" if one < other else "above"


def _called(name: str, end: End, assumption: Assumption) -> str:
    return f"{name}: {end.figure} = {_at(assumption, end.end):.4g}"


def _bar_dict(bar: Bar) -> dict[str, Any]:
    told: dict[str, Any] = {"value": bar.value}
    for name, extreme in (("least", bar.least), ("most", bar.most)):
        told[name] = None if extreme is None else extreme.value
        by = None if extreme is None else extreme.by
        told[f"{name}_at"] = None if by is None else {**by.end._asdict(), "at": by.at}
    return {**told, "missing": bar.missing, "moved_most_by": bar.moved_most_by}


def _moved_dict(one: Moved) -> dict[str, Any]:
    known = one.assumption
    return {
        **one.end._asdict(),
        "value": None if known is None else known.ends.value,
        "at": one.at,
        "basis": None if known is None else known.basis,
        "outcome": one.outcome.outcome,
        "cause": one.outcome.cause,
        **one.outcome.numbers,
    }


def _order_dict(order: Order) -> dict[str, Any]:
    counts = {relation: order.count(relation) for relation in ("below", "above", "level", "none")}
    otherwise: Sequence[tuple[End, str]] = [pair for pair in order.ends if pair[1] != order.run]
    return {
        "run": order.run,
        **counts,
        "otherwise": [{**end._asdict(), "relation": relation} for end, relation in otherwise],
    }
