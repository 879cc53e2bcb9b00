"""The runs behind OOM points: each is named by what was asked, and each different one runs once.

::

    Question(policy, draw, load, memory_bytes)  ->  scenario, as `--set` would write it  ->  row
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from hbmtwin.sim.capacity.oom_point_draws import Draw
from hbmtwin.sim.capacity.oom_point_loads import Load
from hbmtwin.sim.capacity.oom_point_search import K, Q, Search, in_rounds
from hbmtwin.sim.legality import effective_oom
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.sweep.run_row import Row
from hbmtwin.sim.sweep.scenario_key import scenario_key

R = TypeVar("R")

End = Literal["fails", "preempts"]
"""What a search looks for: the first failure, or the first preemption or failure."""
FAILURES = ("out_of_memory", "does_not_fit", "standstill", "rejected")
"""Outcomes of a run whose memory did not suffice."""
UNKNOWN = ("failed", "illegal")
"""Outcomes that say nothing of memory."""
QUIET = ("results.steps=false", "results.memory_trace=false", "results.cache_events=false")
"""Nothing but its row is wanted of a run."""
LABELS = ("policy", "draw", "load", "memory_bytes")
"""Columns that say what was asked, before those of a row."""


class Question(NamedTuple):
    """One run: the policy or variant, the place of its draw, the load, the device's memory (None: the scenario's)."""

    policy: str
    draw: int
    load: float
    memory_bytes: int | None = None


def reached(end: End, row: Row) -> bool | None:
    """Whether a run came to that end; None where it ended in an error."""
    if row["outcome"] in UNKNOWN:
        return None
    return row["outcome"] in FAILURES or (end == "preempts" and bool(row["preemptions"]))


class Runs:
    """What was asked so far, and the rows."""

    def __init__(
        self,
        path: Path | None,
        overrides: Sequence[str],
        base: Scenario,
        load: Load,
        draws: Sequence[Draw],
        call: Callable[[Sequence[Scenario]], Iterable[Row]],
        *,
        variants: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self.base, self.load, self.draws = base, load, tuple(draws)
        self.variants = dict(variants or {})
        self._path, self._overrides, self._call = path, tuple(overrides), call
        self._keys: dict[Question, str] = {}
        self._rows: dict[str, Row] = {}

    def scenario(self, q: Question) -> Scenario:
        """The scenario of a question. Raise ScenarioError."""
        keys = {**self.draws[q.draw].keys, **self.load.keys(self.base, q.load)}
        if q.memory_bytes is not None:
            keys["device.memory_bytes"] = q.memory_bytes
        sets = [f"{key}={value!r}" for key, value in keys.items()]
        own = self.variants.get(q.policy)
        overrides = [*self._overrides, *(own or ()), *QUIET, *sets]
        return Scenario.load(self._path, overrides=overrides, preset=q.policy if own is None else None)

    def row(self, q: Question) -> Row:
        """The row of a question that was asked."""
        return self._rows[self._keys[q]]

    def ask(self, questions: Iterable[Question]) -> None:
        """Run what has not run yet, all of it together."""
        wanted: dict[str, Scenario] = {}
        for q in questions:
            if q not in self._keys:
                scenario = self.scenario(q)
                self._keys[q] = key = scenario_key(scenario)
                if key not in self._rows:
                    wanted[key] = scenario
        for row in self._call(list(wanted.values())) if wanted else ():
            self._rows[str(row["key"])] = row

    def labelled(self) -> tuple[Row, ...]:
        """A row for each question, in the order of policies, loads, memories and draws."""
        policies = list(dict.fromkeys(q.policy for q in self._keys))
        ordered = sorted(self._keys, key=lambda q: (policies.index(q.policy), q.load, q.memory_bytes or 0, q.draw))
        return tuple({**self._labels(q), **self.row(q)} for q in ordered)

    def _labels(self, q: Question) -> Row:
        return dict(zip(LABELS, (q.policy, self.draws[q.draw].name, q.load, q.memory_bytes), strict=True))


def ends_of(scenario: Scenario) -> tuple[End, ...]:
    """What is looked for under a policy: of one that preempts, its first preemption too."""
    return ("fails", "preempts") if effective_oom(scenario) == "preempt" else ("fails",)


def search_runs(
    runs: Runs,
    searches: Mapping[K, Search[Q, R]],
    question: Callable[[K, Q], Question],
    answer: Callable[[K, Row], bool | None],
) -> dict[K, R | None]:
    """Carry searches to their ends, in rounds; *question* says which run tells, *answer* reads it off its row."""

    def answers(asked: Sequence[tuple[K, Q]]) -> dict[tuple[K, Q], bool | None]:
        named = {(name, q): question(name, q) for name, q in asked}
        runs.ask(named.values())
        return {pair: answer(pair[0], runs.row(q)) for pair, q in named.items()}

    return in_rounds(searches, answers)
