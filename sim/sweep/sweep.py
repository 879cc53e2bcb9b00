"""A sweep: every combination of a grid for every seed, and what the runs come to.

::

    scenario + grid --points_of--> Point(paged, 10)  Point(paged, 20) ...     checked before anything runs
                                      | x seeds
                                      v  run_each, stored under DIR/runs
    runs.parquet, runs.csv         one row a run, by point, then by seed
    sweep.json                     scenario, grid, seeds, release, and how many runs ended how

The same sweep leaves the same bytes, whether it was interrupted or not, and wherever it ran.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from hbmtwin.allocators.registry import UnknownPolicy
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.catalog import CatalogError
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.sim.sweep.grid import Grid
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS, Row
from hbmtwin.sim.sweep.scenario_key import scenario_key
from hbmtwin.sim.sweep.store import SCHEMA, writing
from hbmtwin.sim.traffic import source_of

UNKNOWN_NAME = "did you mean"
"""What an error says of a name that nobody knows: a slip of the keyboard, where other errors are of a combination."""


class Point(NamedTuple):
    """One combination of a grid: its settings, as text, and the scenario with them and the first seed."""

    settings: dict[str, str]
    scenario: Scenario
    refused: str | None
    """Why no server starts with it, in words; None: one does."""
    cause: str | None
    """``illegal`` or ``does_not_fit``."""

    def seeded(self, seeds: Iterable[int]) -> Iterator[Scenario]:
        """The scenario with each seed."""
        for seed in seeds:
            yield self.scenario.model_copy(update={"seed": seed})


def points_of(
    path: Path | None, grid: Grid, *, overrides: Sequence[str] = (), seed: int | None = None
) -> tuple[Point, ...]:
    """Every combination, checked. O(combinations).

    A key, value or name that does not exist is refused, also where other combinations lack it; one that contradicts the
    rest of its combination, or does not fit, makes a point that says so. Raise ScenarioError, CatalogError or
    WorkloadError, also where every combination is refused as illegal.
    """
    for axis in grid.axes:
        for value in axis.values:
            Scenario.load(path, overrides=[*overrides, f"{axis.key}={value}"])
    points = []
    opened: set[str] = set()
    first: Exception | None = None
    for settings in grid.combinations():
        texts = [f"{key}={value}" for key, value in settings.items()]
        scenario = Scenario.load(path, overrides=[*overrides, *texts], seed=seed)
        try:
            _check(scenario, opened)
        except DoesNotFit as error:
            points.append(Point(settings, scenario, str(error), "does_not_fit"))
        except ScenarioError as error:
            if UNKNOWN_NAME in str(error):
                raise
            first = first or error
            points.append(Point(settings, scenario, str(error), "illegal"))
        except (CatalogError, UnknownPolicy) as error:
            error.add_note(", ".join(texts))
            raise
        else:
            points.append(Point(settings, scenario, None, None))
    if first is not None and all(point.cause == "illegal" for point in points):
        first.add_note(f"all {len(points)} combinations are illegal, the first")
        raise first
    return tuple(points)


def _check(scenario: Scenario, opened: set[str]) -> None:
    """Raise what a run of it would raise before it starts; traffic is opened once for all that share it."""
    traffic = repr((scenario.workload, scenario.session))
    if traffic not in opened:
        source_of(scenario)
        opened.add(traffic)
    ServerPlan(scenario)


def sweep_table(points: Sequence[Point], seeds: Sequence[int], rows: Mapping[str, Row]) -> pa.Table:
    """The rows of a sweep by point, then by seed, the settings first. *rows* are by key; what has none is left out."""
    keys = list(points[0].settings)
    found: list[dict[str, Any]] = []
    for point in points:
        settings = {key: _typed(point, key) for key in keys}
        own = (rows.get(scenario_key(scenario)) for scenario in point.seeded(seeds))
        found += [settings | row for row in own if row is not None]
    columns = {key: pa.array(_of_one_kind([row[key] for row in found])) for key in keys}
    names = {name: pa.array([row[name] for row in found], SCHEMA.field(name).type) for name in ROW_COLUMNS}
    return pa.table(columns | names)


def _typed(point: Point, key: str) -> int | float | str | bool:
    """The value of a setting where it is a number or a text, else as it was written."""
    section, _, name = key.rpartition(".")
    value = getattr(getattr(point.scenario, section) if section else point.scenario, name)
    return value if isinstance(value, int | float | str) else point.settings[key]


def _of_one_kind(values: Sequence[int | float | str | bool]) -> list[Any]:
    """Values of one type: what is not all numbers, or all truths, is text."""
    kinds = {type(value) for value in values}
    if len(kinds) <= 1 or kinds == {int, float}:
        return [float(value) for value in values] if kinds == {int, float} else list(values)
    return [str(value) for value in values]


def outcomes(rows: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """How many runs ended how, the most frequent first."""
    return dict(sorted(Counter(str(row["outcome"]) for row in rows).items(), key=lambda item: (-item[1], item[0])))


def about_sweep(
    table: pa.Table, *, path: Path | None, grid: Grid, overrides: Sequence[str], seeds: Sequence[int]
) -> dict[str, Any]:
    """What a sweep was asked, and how its runs ended, as JSON has it."""
    return {
        "scenario": None if path is None else path.name,
        "set": list(overrides),
        "grid": {axis.key: list(axis.values) for axis in grid.axes},
        "seeds": {"first": seeds[0], "count": len(seeds)},
        "runs": table.num_rows,
        "outcomes": outcomes(table.select(["outcome"]).to_pylist()),
        "version": version("hbmtwin"),
    }


def write_tables(directory: Path, table: pa.Table, about: Mapping[str, Any]) -> None:
    """Write ``runs.parquet``, ``runs.csv`` and ``sweep.json``, each by one rename. Raise ResultError."""
    with writing(directory / "runs.parquet") as staging:
        pq.write_table(table, staging, store_schema=False)
    with writing(directory / "runs.csv") as staging:
        pa_csv.write_csv(table, staging)
    with writing(directory / "sweep.json") as staging:
        staging.write_text(json.dumps(about, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
