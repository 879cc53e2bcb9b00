"""Rows from many processes: each once, stored before it is told, and a worker that dies loses nobody else's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.sweep import execute
from hbmtwin.sim.sweep.execute import run_each
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS, Row, died_row, run_row
from hbmtwin.sim.sweep.scenario_key import scenario_key
from hbmtwin.sim.sweep.store import RunStore
from hbmtwin.sim.sweep.workers import Call, PoolBroke, WorkersLost


def seeded(path: Path, count: int) -> list[Scenario]:
    return [Scenario.load(path, seed=seed) for seed in range(count)]


def test_each_different_run_once_and_stored_before_it_is_told(tiny: Path, tmp_path: Path) -> None:
    scenarios = seeded(tiny, 4)
    told: list[bool] = []
    with RunStore(tmp_path / "out") as store:
        rows = list(
            run_each(
                [*scenarios, *scenarios],
                jobs=1,
                store=store,
                landed=lambda row: told.append((store.folder / f"{row['key']}.parquet").exists()),
            )
        )
        assert told == [True] * 4
        assert {row["key"]: row for row in rows} == {scenario_key(s): run_row(s) for s in scenarios}
        again = list(run_each(seeded(tiny, 5), jobs=1, store=store, landed=lambda row: told.append(True)))
    assert len(told) == 5  # four were there
    assert [row["key"] for row in again] == [scenario_key(s) for s in seeded(tiny, 5)]


def test_processes_and_one_process_give_the_same_rows(tiny: Path) -> None:
    scenarios = seeded(tiny, 6)

    def by_key(jobs: int) -> dict[object, Row]:
        return {row["key"]: row for row in run_each(scenarios, jobs=jobs)}

    assert by_key(2) == by_key(1)


def test_a_failure_of_the_machine_is_tried_again_and_one_of_the_run_is_not(tiny: Path, tmp_path: Path) -> None:
    first, second = seeded(tiny, 2)
    bug = {
        **dict.fromkeys(ROW_COLUMNS),
        "key": scenario_key(second),
        "seed": 1,
        "outcome": "failed",
        "cause": "KeyError",
    }
    with RunStore(tmp_path / "out") as store:
        store.add(died_row(scenario_key(first), 0))
        store.add(bug)
        rows = list(run_each([first, second], jobs=1, store=store))
    assert [(row["seed"], row["outcome"]) for row in rows] == [(1, "failed"), (0, "held")]


# -- workers that die ------------------------------------------------------------------------------------------------


class Deaths:
    """A pool of pretence that takes four calls ahead and dies at the runs of some seeds, so many times each."""

    def __init__(self, deaths: dict[int, int]) -> None:
        self.left = dict(deaths)
        self.pools = 0
        self.ran: list[int] = []
        self.told: list[str] = []

    def __call__(self, calls: Iterator[Call]) -> Iterator[Row]:
        self.pools += 1
        ahead: list[Call] = []
        for call in calls:
            ahead.append(call)
            if len(ahead) == 4:
                yield self.run(ahead.pop(0))
        while ahead:
            yield self.run(ahead.pop(0))

    def run(self, call: Call) -> Row:
        function, arguments, _ = call
        seed = arguments[1].seed
        if self.left.get(seed, 0):
            self.left[seed] -= 1
            raise PoolBroke(f"at {seed}")
        self.ran.append(seed)
        return function(*arguments)


def rows_of(deaths: Deaths, scenarios: list[Scenario]) -> dict[int, Row]:
    def call(key: str, scenario: Scenario) -> Row:
        return {"key": key, "seed": scenario.seed, "outcome": "held"}

    waiting = {scenario_key(s): s for s in scenarios}
    rows = list(execute._each(waiting, deaths, call, deaths.told.append))
    assert waiting == {}
    assert len({row["key"] for row in rows}) == len(rows) == len(scenarios)
    return {int(str(row["seed"])): row for row in rows}


def test_a_worker_that_was_killed_costs_a_pool_and_no_run(tiny: Path) -> None:
    deaths = Deaths({5: 1})
    rows = rows_of(deaths, seeded(tiny, 12))
    assert {row["outcome"] for row in rows.values()} == {"held"}
    assert deaths.pools == 2
    assert sorted(deaths.ran) == list(range(12))  # nobody ran twice
    assert deaths.told == ["a worker died; 4 runs under way will run again"]


def test_a_run_that_always_kills_its_worker_is_found_and_the_others_go_on(tiny: Path) -> None:
    deaths = Deaths({3: 99, 4: 99})
    rows = rows_of(deaths, seeded(tiny, 12))
    assert {seed for seed, row in rows.items() if row["outcome"] == "failed"} == {3, 4}
    assert rows[3]["cause"] == "ProcessDied"
    assert "also when it ran alone" in str(rows[3]["error"])
    assert sorted(deaths.ran) == [seed for seed in range(12) if seed not in (3, 4)]


def test_two_kills_at_one_run_are_no_proof(tiny: Path) -> None:
    rows = rows_of(Deaths({3: 2}), seeded(tiny, 6))
    assert {row["outcome"] for row in rows.values()} == {"held"}


def test_pools_that_break_before_anything_runs_end_it(tiny: Path) -> None:
    def broken(calls: Iterator[Call]) -> Iterator[Row]:
        raise PoolBroke("no core is left")
        yield {}

    with pytest.raises(WorkersLost, match="5 pools of workers broke one after another, the last: no core is left"):
        list(execute._each({"a": Scenario()}, broken, run_row))


def _kills(key: str, scenario: Scenario) -> Row:
    """Of a worker process: dies with seed 2."""
    if scenario.seed == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"key": key, "seed": scenario.seed, "outcome": "held", "cause": None}


def test_real_processes_that_are_killed(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(execute, "row_here", _by_value(_kills))
    rows = list(run_each(seeded(tiny, 8), jobs=2))
    assert sorted((row["seed"], row["outcome"]) for row in rows) == [
        (seed, "failed" if seed == 2 else "held") for seed in range(8)
    ]


def _by_value(function: Callable[[str, Scenario], Row]) -> Callable[[str, Scenario], Row]:
    """A function that workers get whole, as they cannot import this file."""
    function.__module__ = "__main__"
    return function


def test_who_stops_asking_leaves_no_process(tiny: Path) -> None:
    coming = run_each(seeded(tiny, 40), jobs=2)
    next(coming)
    before = _children()
    assert before
    coming.close()
    left = _children()
    assert not [pid for pid in before if "loky" in left.get(pid, "") and "tracker" not in left[pid]]


def _children() -> dict[int, str]:
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state not in "ZX":
                found[int(stat.parent.name)] = stat.with_name("cmdline").read_text().replace("\0", " ")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
