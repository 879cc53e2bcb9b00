"""A scenario at every value of a target: what a search asks, answered by runs.

::

    place   0    1    2   ...     scenario   keys of the value      draws   seed, seed + 1, ...
    value   1    2    3           Loads.at   users, num_prompts             the same at every value
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from hbmtwin.sim.capacity.capacity_runs import CapacityRuns, quiet
from hbmtwin.sim.capacity.plan_targets import Target, with_keys
from hbmtwin.sim.capacity.promise import Promise
from hbmtwin.sim.legality import effective_oom
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.sweep.run_row import Row


class Loads:
    """The runs of one scenario, and which of them hold."""

    def __init__(
        self, scenario: Scenario, target: Target, promise: Promise, runs: CapacityRuns, *, chance: bool = True
    ) -> None:
        self.scenario, self.target, self.runs, self.chance = quiet(scenario), target, runs, chance
        self.promise = replace(promise, kv_may_fill=effective_oom(scenario) == "preempt")
        self._at: dict[int, Scenario] = {}

    def at(self, place: int) -> Scenario:
        """The scenario at that value. Raise ScenarioError where it cannot be."""
        if place not in self._at:
            self._at[place] = with_keys(self.scenario, self.target.keys_of(self.target.values[place]))
        return self._at[place]

    def rows(self, place: int, draws: Sequence[int]) -> list[Row]:
        """The rows of those draws. Raise what :meth:`CapacityRuns.rows` does."""
        return self.runs.rows([(self.at(place), draw) for draw in draws])

    def broken(self, place: int, draws: Sequence[int]) -> list[tuple[str, ...]]:
        """What each of those draws breaks."""
        return [self.promise.broken(row) for row in self.rows(place, draws)]

    def held(self, place: int, draws: Sequence[int]) -> int:
        """How many of those draws hold."""
        return sum(not broken for broken in self.broken(place, draws))

    def __call__(self, runs: Sequence[tuple[int, int]]) -> Mapping[tuple[int, int], bool]:
        """Whether runs hold, by place and draw: what a search asks."""
        rows = self.runs.rows([(self.at(place), draw) for place, draw in runs])
        return {run: not self.promise.broken(row) for run, row in zip(runs, rows, strict=True)}

    def changed(self, scenario: Scenario) -> Loads:
        """Another scenario under the same target and promise."""
        return Loads(scenario, self.target, self.promise, self.runs, chance=self.chance)

    def draws(self, count: int) -> range:
        """The first *count* draws: one where there is no chance."""
        return range(count if self.chance else 1)
