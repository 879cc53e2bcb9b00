"""A process beside the app that does one job after another: ``python -m hbmtwin.dashboard.app.worker``.

::

    app                                   worker
                                          imports the simulator
      <----------- {"ready": true} ------
      ---- {"verb": "run", ...} -------->  runs
      <------ {"fraction": 0.3, ...} ----
      <------ {"done": true} ------------  or {"error": "what, where, cure"}; with "again" it takes another job

One line of JSON each. The app says nothing more than jobs: its end of the pipe, once closed, ends the worker, so that
none outlives the app. A job's memory is bounded: what is too large for it fails, not the machine. Who has taken much
of it, or has started processes of its own, takes no other job, so that all of it is given back.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

from hbmtwin import api
from hbmtwin.api import Progress, Result, RunStore, Scenario, parse_load, run_each, scenario_key
from hbmtwin.dashboard.oom_point_file import write_oom_point
from hbmtwin.sim.capacity.plan_file import write_plans
from hbmtwin.sim.sweep.grid import parse_grid
from hbmtwin.sim.sweep.run_row import Row
from hbmtwin.sim.sweep.sweep import about_sweep, points_of, sweep_table, write_tables

MOST_BYTES = 8 << 30
"""Of memory that a job may take: a million requests take one."""
MOST_REQUESTS = 10_000_000
"""Of one run: so many fill that memory, and more would be drawn for minutes before they did."""
MOST_KEPT_BYTES = 512 << 20
"""Of a worker that takes another job: the simulator and a run of ordinary length take 200 MiB."""
EVERY_S = 0.1
"""Between two words on how far a job is."""

Tell = Callable[[Mapping[str, Any]], None]


def main() -> int:
    """Do the jobs that standard input tells, one after another."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is none of our words
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = MOST_BYTES if hard == resource.RLIM_INFINITY else min(MOST_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    tell = _teller(out)
    jobs: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin, jobs), daemon=True).start()
    tell({"ready": True})
    again = True
    while again:
        job = json.loads(jobs.get())
        try:
            said = {"done": True, **do(job, tell)}
        except MemoryError:
            cure = "ask for fewer requests (workload.num_prompts)"
            said = {"error": f"this takes more than {most >> 30} GiB of memory: {cure}"}
        except Exception as error:
            said = {"error": f"{_where(error)}{error}" if _known(error) else f"{type(error).__name__}: {error}"}
        again = job["verb"] in ALONE and _resident_bytes() < MOST_KEPT_BYTES
        tell({**said, "again": again})
    return 0


def do(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """Do one job; return what is told of it beside its results. Raise what the simulator raises."""
    check_requests(Scenario.load(overrides=job.get("settings", ())))
    return VERBS[job["verb"]](job, tell)


def check_requests(scenario: Scenario) -> None:
    """Raise ScenarioError for more requests than a job may draw."""
    asked = scenario.workload.num_prompts
    if asked is not None and asked > MOST_REQUESTS:
        raise api.ScenarioError(
            f"workload.num_prompts: {asked:,} is more than the {MOST_REQUESTS:,} of a run here; ask for fewer"
        )


def run(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"settings": [...], "out": directory}``: the result lands there, whole."""
    scenario = Scenario.load(overrides=job["settings"])
    api.run(scenario, progress=_progress(tell)).save(Path(job["out"]))
    return {}


def compare(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"settings": [...], "policies": [...], "variants": {name: [...]}, "out": {name: directory}}``.

    Each result lands in its directory; presets that are illegal here have none, and are told with the reason.
    """
    done = 0
    left_out: dict[str, str] = {}

    def one(name: str) -> None:
        nonlocal done
        done += 1
        tell({"runs": done, "total": len(job["out"]), "name": name})

    tell({"runs": 0, "total": len(job["out"]), "name": "–"})
    results = api.compare(
        None,
        job["policies"],
        variants=job["variants"],
        overrides=job["settings"],
        finished=one,
        left_out=left_out.__setitem__,
    )
    for name, result in results.items():
        result.save(Path(job["out"][name]))
    return {"left_out": left_out}


def what_would_hold(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"result": directory}``: its traffic under single changes, a row each."""
    done = 0

    def one(name: str) -> None:
        nonlocal done
        done += 1
        tell({"runs": done, "name": name})

    return {"rows": api.what_would_hold(Result.load(Path(job["result"])), finished=one)}


def error_bars(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"results": {name: directory}}``: what ``--error-bars`` tells of them, by name."""
    results = {name: Result.load(Path(directory)) for name, directory in job["results"].items()}
    total, done = api.runs_for_error_bars({name: result.scenario for name, result in results.items()}), 0

    def one(name: str) -> None:
        nonlocal done
        done += 1
        tell({"runs": done, "total": total})

    tell({"runs": 0, "total": total})
    return {"told": api.error_bars_to_dicts(api.error_bars(results, finished=one))}


def operations(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"result": directory, "out": directory}``: the last operations before its death, in two tables."""
    last = api.last_operations(Result.load(Path(job["result"])))
    out = Path(job["out"])
    staging = out.with_name(f".{out.name}.{os.getpid()}")
    staging.mkdir(parents=True)
    last.operations.to_parquet(staging / "operations.parquet", index=False)
    last.maps.to_parquet(staging / "maps.parquet", index=False)
    staging.rename(out)
    return {}


def sweep(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"settings": [...], "grid": [words], "seeds": n, "out": directory}``: what ``hbmtwin sweep`` writes there."""
    out, overrides = Path(job["out"]), job["settings"]
    grid = parse_grid(job["grid"], overrides)
    points = points_of(None, grid, overrides=overrides)
    first = points[0].scenario.seed
    seeds = range(first, first + job["seeds"])
    scenarios = {scenario_key(one): one for point in points for one in point.seeded(seeds)}
    rows: dict[str, Row] = {}
    with RunStore(out) as store:
        for row in run_each([scenarios[key] for key in sorted(scenarios)], jobs=-1, store=store):
            rows[str(row["key"])] = row
            tell({"runs": len(rows), "total": len(scenarios)})
        table = sweep_table(points, seeds, rows)
        write_tables(out, table, about_sweep(table, path=None, grid=grid, overrides=overrides, seeds=seeds))
    return {}


def oom_point(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"settings": [...], "policies": [...], "load": text, "seeds": n, "memory": bool, "out": directory}``."""
    out, landed = Path(job["out"]), 0

    def of(scenarios: Sequence[Scenario]) -> Iterable[Row]:
        nonlocal landed
        for row in run_each(scenarios, jobs=-1, store=store):
            landed += 1
            tell({"runs": landed})
            yield row

    with RunStore(out) as store:
        point = api.oom_point(
            None,
            policies=job["policies"] or None,
            load=parse_load(job["load"]) if job["load"] else None,
            seeds=job["seeds"],
            memory=job["memory"],
            overrides=job["settings"],
            call=of,
        )
        write_oom_point(point, out)
    return {}


def plan(job: Mapping[str, Any], tell: Tell) -> dict[str, Any]:
    """``{"settings": [...], "policies": [...], "target": name, "slo": text, "survive": x, "out": directory}``."""
    question = api.question_of(
        job["target"],
        slo=job["slo"] or None,
        survive=job["survive"],
        confidence=0.95,
        margin="1%",
        max_preemptions=None,
        seeds=None,
        explain=not job["quick"],
    )
    api.check_question(question)
    scenarios = {name: Scenario.load(overrides=job["settings"], preset=name) for name in job["policies"]}
    left_out: dict[str, str] = {}
    with RunStore(Path(job["out"])) as store:
        runs = api.CapacityRuns(jobs=-1, store=store, landed=lambda count: tell({"runs": count}))
        plans = api.plan_each(scenarios, question, runs, left_out=left_out.__setitem__)
    write_plans(plans, left_out, Path(job["out"]))
    return {}


VERBS: Mapping[str, Callable[[Mapping[str, Any], Tell], dict[str, Any]]] = {
    "run": run,
    "compare": compare,
    "what_would_hold": what_would_hold,
    "error_bars": error_bars,
    "operations": operations,
    "sweep": sweep,
    "oom_point": oom_point,
    "plan": plan,
}


ALONE = frozenset({"run", "operations"})
"""Verbs that start no process."""


def _progress(tell: Tell) -> Callable[[Progress], None]:
    last = time.monotonic()

    def progress(p: Progress) -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= EVERY_S:
            last = now
            tell({"simulated_s": p.simulated_s, "completed": p.completed, "total": p.total, "running": p.running})

    return progress


def _teller(out: IO[str]) -> Tell:
    def tell(words: Mapping[str, Any]) -> None:
        out.write(json.dumps(words, allow_nan=False) + "\n")
        out.flush()

    return tell


def _resident_bytes() -> int:
    """What the process has in memory now; where the system does not tell, as if it had all.

    The most that ``getrusage`` tells is that of the app, if the app had more when it started this process.
    """
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return MOST_BYTES


def _read(stdin: IO[str], jobs: SimpleQueue[str]) -> None:
    for line in stdin:
        jobs.put(line)
    os._exit(1)


def _known(error: Exception) -> bool:
    """Whether its message says what, where and the cure."""
    kinds = (
        *(api.ScenarioError, api.CatalogError, api.WorkloadError, api.DoesNotFit, api.ResultError, api.UnknownPolicy),
        OSError,
    )
    return isinstance(error, kinds)


def _where(error: Exception) -> str:
    return "".join(f"{note}: " for note in getattr(error, "__notes__", ()))


if __name__ == "__main__":
    sys.exit(main())
