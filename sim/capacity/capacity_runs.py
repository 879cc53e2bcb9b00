"""Runs of a plan: each scenario and draw once, whoever asks, and rows that do not hang on how many processes ran.

::

    ask (scenario, draw), ...  ->  rows so far  ->  missing ones to run_each  ->  DIR/runs, if there is one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hbmtwin.sim.result import ResultError
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sweep.execute import run_each
from hbmtwin.sim.sweep.run_row import Row
from hbmtwin.sim.sweep.scenario_key import scenario_key
from hbmtwin.sim.sweep.store import RunStore

SEEDS = 2**63
QUIET = {
    "steps": False,
    "memory_trace": False,
    "cache_events": False,
    "interval_s": 1e9,
    "alert_kv_used_bytes": None,
    "alert_kv_usage": None,
    "alert_hit_rate": None,
}
"""Nothing but its row is wanted of a run. Peaks stand in rows on both sides of a change, whatever the interval."""


class RunFailed(ResultError):
    """A run ended in an error that is none of memory: which, and what it said."""


class CapacityRuns:
    """All rows of a plan. *landed* is told how many runs have come in, each time one does."""

    def __init__(
        self, *, jobs: int = -1, store: RunStore | None = None, landed: Callable[[int], None] | None = None
    ) -> None:
        self.jobs, self.store = jobs, store
        self._landed = landed
        self._rows: dict[str, Row] = {}

    @property
    def count(self) -> int:
        """Different runs so far."""
        return len(self._rows)

    def rows(self, runs: Sequence[tuple[Scenario, int]]) -> list[Row]:
        """The rows of scenarios, each with that draw, in this order.

        Raise ScenarioError for an illegal scenario, RunFailed for one that fails, and what
        :func:`hbmtwin.sim.sweep.execute.run_each` raises.
        """
        asked = [drawn(scenario, draw) for scenario, draw in runs]
        keys = [scenario_key(scenario) for scenario in asked]
        missing = {key: scenario for key, scenario in zip(keys, asked, strict=True) if key not in self._rows}
        for row in run_each(missing.values(), jobs=self.jobs, store=self.store):
            if row["outcome"] == "illegal":
                raise ScenarioError(str(row["error"]))
            if row["outcome"] == "failed":
                raise RunFailed(f"a run with seed {row['seed']} failed: {row['error']}")
            self._rows[str(row["key"])] = row
            if self._landed is not None:
                self._landed(len(self._rows))
        return [self._rows[key] for key in keys]


def quiet(scenario: Scenario) -> Scenario:
    """*scenario* without what is only stored."""
    results = scenario.results.model_copy(update=QUIET)
    return scenario.model_copy(update={"results": results})


def drawn(scenario: Scenario, draw: int) -> Scenario:
    """*scenario* with the seed of that draw: the same at every load, so that loads differ by nothing else."""
    return scenario.model_copy(update={"seed": (scenario.seed + draw) % SEEDS})
