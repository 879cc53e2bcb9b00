"""``hbmtwin sweep``: every combination of a grid for every seed; what has run once does not run again."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from hbmtwin.cli.exits import FAILURE, OK, UsageError
from hbmtwin.cli.options import MAX_SEED, Json, Overrides, ScenarioFile, Seed
from hbmtwin.cli.output import json_text, stdout
from hbmtwin.cli.simulate import check_rows

if TYPE_CHECKING:
    from hbmtwin.sim.sweep.run_row import Row
    from hbmtwin.sim.sweep.store import RunStore
    from hbmtwin.sim.sweep.sweep import Point

GRID_WORD = re.compile(r"[A-Za-z_][\w.]*\s*=.*", re.DOTALL)
FIRST_S, FIRST_RUNS, WORTH_S = 2.0, 8, 10.0
"""After so many seconds and runs it is told how long the others will take, if it is so many seconds."""
VARIANTS = (
    "--variant: a sweep has none; variants of one key are its values, e.g. --grid kv_cache.initial_tokens=256,1024; "
    "for several keys that change together use hbmtwin compare or oom-point --variant"
)
MANY_RUNS = 10**6
MOST_ERRORS = 5
"""Different errors of runs that are told; all are in runs.csv."""


class ExecutorName(StrEnum):
    """Where runs run."""

    LOCAL = "local"
    RAY = "ray"


class GridCommand(TyperCommand):
    """A command whose ``--grid`` takes every ``key=values`` that follows it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write ``--grid a=1,2 b=3:5:1`` as ``--grid a=1,2 --grid b=3:5:1``."""
        if any(arg.partition("=")[0] == "--variant" for arg in args):
            raise UsageError(VARIANTS)
        spelt: list[str] = []
        in_grid = False
        for arg in args:
            word = GRID_WORD.fullmatch(arg) is not None
            if in_grid and word and spelt[-1] != "--grid":
                spelt.append("--grid")
            in_grid = arg == "--grid" or arg.startswith("--grid=") or (in_grid and word)
            spelt.append(arg)
        return super().parse_args(ctx, spelt)


def sweep(
    scenario: ScenarioFile = None,
    grid: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUES ...",
            help="What is varied: key=a,b,c or key=start:stop:step (decimal steps; the stop is a value where a step "
            "hits it; one unit for all three, as in 32GiB:64GiB:8GiB). Several words, or --grid again, for several "
            "keys. Variants of one key are its values; of several keys that change together: compare, oom-point.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MANY_RUNS, help="Seeds of each combination, one after another.")] = 1,
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option(help="Directory for the runs and the report; what is in it is not run again.")
    ] = Path("hbmtwin-sweep"),
    seed: Seed = None,
    jobs: Annotated[int, typer.Option(help="Runs at once; -1: one a core, or all cores of a cluster.")] = -1,
    executor: Annotated[ExecutorName, typer.Option(help="Where they run.")] = ExecutorName.LOCAL,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster to use; without one it is started here, and ends with the sweep.")
    ] = None,
    json_: Json = False,
) -> int:
    """Run every combination of a grid for several seeds; stopped or killed, the same command goes on."""
    from hbmtwin.cli.sweep_tables import print_sweep, sweep_json
    from hbmtwin.dashboard.sweep_report import write_sweep_report
    from hbmtwin.sim.sweep.execute import run_each, stands
    from hbmtwin.sim.sweep.grid import FORM, parse_grid
    from hbmtwin.sim.sweep.points import point_summaries
    from hbmtwin.sim.sweep.scenario_key import scenario_key
    from hbmtwin.sim.sweep.sweep import about_sweep, points_of, sweep_table, write_tables

    if not grid:
        raise UsageError(f"--grid: nothing is varied; {FORM}")
    if jobs < 1 and jobs != -1:
        raise UsageError(f"--jobs: runs at once are 1 or more, or -1 for one a core, not {jobs}")
    if address is not None and executor is not ExecutorName.RAY:
        raise UsageError("--address names a Ray cluster; add --executor ray")
    parsed = parse_grid(grid, overrides or ())
    if len(parsed) * seeds > MANY_RUNS:
        raise UsageError(f"--grid: {len(parsed):,} combinations x {seeds:,} seeds; take at most {MANY_RUNS:,} runs")
    points = points_of(scenario, parsed, overrides=overrides or (), seed=seed)
    for point in points:
        check_rows(point.scenario)
    first = points[0].scenario.seed
    if first + seeds - 1 > MAX_SEED:
        raise UsageError(f"--seeds: {seeds} seeds from {first} on go beyond {MAX_SEED}")
    drawn = range(first, first + seeds)
    scenarios = {scenario_key(s): s for point in points for s in point.seeded(drawn)}
    begin = time.monotonic()
    rows: dict[str, Row] = {}
    with _opened(out) as store:
        there = len(scenarios.keys() & {key for key, row in store.finished().items() if stands(row)})
        _tell(points, seeds, len(scenarios), there, out)
        with _progress(len(scenarios), there) as landed, redirect_stdout(sys.stderr):  # Ray tells of dead workers there
            # by key: an even draw of the grid from the start on, so that what is left can be told from what has run
            for row in run_each(
                [scenarios[key] for key in sorted(scenarios)],
                jobs=jobs,
                executor=executor.value,
                address=address,
                store=store,
                landed=landed,
                remark=lambda text: print(f"note: {text}", file=sys.stderr),
            ):
                rows[str(row["key"])] = row
        table = sweep_table(points, drawn, rows)
        about = about_sweep(table, path=scenario, grid=parsed, overrides=overrides or (), seeds=drawn)
        write_tables(out, table, about)
        summaries = point_summaries(table.to_pylist(), list(points[0].settings))
        write_sweep_report(summaries, about, out)
    wall_s = time.monotonic() - begin
    print(f"report: {out / 'report.html'}", file=sys.stderr)
    if json_:
        print(json_text(sweep_json(summaries, about) | {"wall_s": round(wall_s, 3)}))
    else:
        print_sweep(stdout(), summaries, about, wall_s)
    return _verdict(table.to_pylist())


def _verdict(rows: Sequence[Row]) -> int:
    """0, or 1 where runs failed, after the words."""
    failed = [row for row in rows if row["outcome"] == "failed"]
    for error, count in Counter(str(row["error"]) for row in failed).most_common(MOST_ERRORS):
        print(f"error: {count:,} run{'s' * (count > 1)} failed: {error}", file=sys.stderr)
    if failed:
        print("note: they are in runs.csv, outcome failed; the others stand", file=sys.stderr)
    return FAILURE if failed else OK


@contextmanager
def _opened(out: Path) -> Iterator[RunStore]:
    """The store of a directory; whatever ends the sweep early, it is told that nothing is lost."""
    from hbmtwin.api import ResultError
    from hbmtwin.sim.sweep.store import RunStore, check_runs_directory

    try:
        check_runs_directory(out)
    except ResultError as error:
        raise UsageError(str(error)) from None
    with RunStore(out) as store:
        for remark in store.remarks:
            print(f"note: {remark}", file=sys.stderr)
        try:
            yield store
        except BaseException:
            if count := len(store.finished()):
                print(f"note: {count:,} runs are stored in {out}; the same command goes on from there", file=sys.stderr)
            raise


def _tell(points: Sequence[Point], seeds: int, total: int, there: int, out: Path) -> None:
    """What is about to run, and what of it will be refused, before it does."""
    from hbmtwin.sim.capacity.plan_capacity import has_chance

    of = f"{len(points):,} combination{'s' * (len(points) != 1)} x {seeds:,} seed{'s' * (seeds != 1)}"
    left = f"; {there:,} of them are in {out} already" if there else ""
    print(f"note: {of}: {total:,} run{'s' * (total != 1)}{left}", file=sys.stderr)
    if seeds > 1 and not any(has_chance(point.scenario) for point in points):
        print(
            "note: a trace has happened once: the seeds of a combination are the same run again, and its shares say "
            "nothing of chance; --seeds 1 is enough (hbmtwin oom-point takes windows of a trace)",
            file=sys.stderr,
        )
    _tell_who_never_asks(points)
    refused = Counter((point.cause, point.refused) for point in points if point.cause)
    for (cause, text), count in refused.items():
        many = f"{count:,} combinations" if count > 1 else "1 combination"
        verb = (
            ("are" if count > 1 else "is") + " illegal"
            if cause == "illegal"
            else "do" + "es" * (count == 1) + " not fit"
        )
        print(f"note: {many} {verb}: {text}", file=sys.stderr)


def _tell_who_never_asks(points: Sequence[Point]) -> None:
    """Where users are varied: those for whom there is no request, so that more of them are no more load."""
    from hbmtwin.workloads.builtin import NUM_PROMPTS

    if "workload.users" not in points[0].settings:
        return
    loads = [point.scenario.workload for point in points]
    asking = [(w.users or 0, NUM_PROMPTS if w.num_prompts is None else w.num_prompts) for w in loads]
    if few := [(users, prompts) for users, prompts in asking if users > prompts]:
        users, prompts = max(few)
        print(f"note: of {users:,} users only {prompts:,} ever ask: raise workload.num_prompts", file=sys.stderr)


@contextmanager
def _progress(total: int, there: int) -> Iterator[Callable[[Row], None]]:
    """What is called with each row that lands; once it is told how long the rest will take."""
    from hbmtwin.cli.progress import progress_with_eta

    first_s, landed, told = 0.0, 0, False
    with progress_with_eta(total, there) as advance:

        def call(row: Row) -> None:
            nonlocal first_s, landed, told
            advance(str(row["outcome"]))
            first_s = first_s or time.monotonic()  # workers that start take seconds, and do so once
            seconds = time.monotonic() - first_s
            rest_s = (total - there - landed - 1) * seconds / max(1, landed)
            landed += 1
            if not told and seconds >= FIRST_S and landed > FIRST_RUNS and rest_s >= WORTH_S:
                told = True
                print(f"note: about {_duration(rest_s)} for the other {total - there - landed:,}", file=sys.stderr)

        yield call


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
