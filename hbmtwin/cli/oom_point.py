"""``hbmtwin oom-point``: at which load memory runs out, policy by policy, and the smallest HBM that survives."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from hbmtwin.cli.exits import FAILURE, OK, UsageError
from hbmtwin.cli.options import Json, Overrides, ScenarioFile, Seed, Variants
from hbmtwin.cli.output import json_text, stdout

if TYPE_CHECKING:
    from hbmtwin.api import OomPoint, Scenario
    from hbmtwin.sim.capacity.oom_point_loads import Load
    from hbmtwin.sim.sweep.run_row import Row

MAX_SEEDS = 10_000
FIRST_RUNS = 16
"""After so many it is told how long all will take."""
DEFAULT_LOADS = 25
MOST_ERRORS = 5
"""Different errors of runs that are told; all are in runs.csv."""


def oom_point(
    scenario: ScenarioFile = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Presets, separated by commas; none: only the variants. Default: all that are legal here.",
            show_default=False,
        ),
    ] = None,
    variants: Variants = None,
    load: Annotated[
        str | None,
        typer.Option(
            metavar="KEY=FROM:TO:STEP",
            help="What grows: users=10:200:10, request_rate=0.5:8:x1.2 (by a factor), rate_scale=0.1,0.2,0.4 (of a "
            "trace or model), num_prompts=8:64:8. Default: an eighth of the scenario's own load to 8 times it.",
            show_default=False,
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, max=MAX_SEEDS, help="Draws of the traffic: seeds, or windows of a trace.")
    ] = 10,
    memory: Annotated[
        bool, typer.Option("--memory", help="Also the smallest device memory that survives, at up to 4 of the loads.")
    ] = False,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory for report.html, tables and each run as it ends; a killed one goes on there."),
    ] = None,
    seed: Seed = None,
    jobs: Annotated[int, typer.Option(metavar="N", help="Runs at once; -1: one a core.")] = -1,
    json_: Json = False,
) -> int:
    """Find where memory runs out as a load grows: shares of draws with bounds, causes, and places within a run."""
    from hbmtwin.api import PRESETS, parse_load
    from hbmtwin.api import oom_point as find
    from hbmtwin.cli.oom_point_screen import print_oom_point
    from hbmtwin.cli.simulate import presets_of
    from hbmtwin.sim.variants import parse_variants

    own = parse_variants(variants or ())
    names = None if policies is None else presets_of(policies)
    if names == [] and not own:
        raise UsageError("--policies: no preset is named; write for example --policies caching,paged")
    if jobs == 0 or jobs < -1:
        raise UsageError(f"--jobs: 1 or more, or -1 for one a core, not {jobs}")
    grown = None if load is None else parse_load(load)
    begin = time.monotonic()
    with _Rows(out, jobs, _about(len(PRESETS if names is None else names) + len(own), seeds, grown, memory)) as rows:
        point = find(
            scenario,
            policies=names,
            variants=own,
            load=grown,
            seeds=seeds,
            memory=memory,
            overrides=overrides or (),
            seed=seed,
            call=rows.of,
        )
        if out is not None:
            _write(point, out)
    wall_s = time.monotonic() - begin
    for name, reason in point.left_out.items():
        print(f"note: the preset {name!r} is left out: {reason}", file=sys.stderr)
    if json_:
        from hbmtwin.sim.capacity.oom_point_tables import to_dict

        print(json_text({**to_dict(point), "wall_s": round(wall_s, 3)}))
    else:
        print_oom_point(stdout(), point, wall_s)
    if out is not None:
        print(f"report: {out / 'report.html'}", file=sys.stderr)
    return _verdict(point)


def _verdict(point: OomPoint) -> int:
    """0, or 1 where runs ended in an error, after the words."""
    for error, count in Counter(str(row["error"]) for row in point.broken).most_common(MOST_ERRORS):
        print(f"error: {count:,} run{'s' * (count > 1)} failed: {error}", file=sys.stderr)
    return FAILURE if point.broken else OK


class _Rows:
    """Rows of scenarios, stored as they come where there is a place, and counted on stderr.

    Whatever ends it early, it is told that nothing is lost.
    """

    def __init__(self, out: Path | None, jobs: int, about: int) -> None:
        from hbmtwin.api import ResultError
        from hbmtwin.sim.sweep.store import RunStore, check_runs_directory

        self._out, self._jobs = out, jobs
        self._about, self._landed, self._begin = about, 0, time.monotonic()
        """Runs that are to be expected, and those so far."""
        self._open: RunStore | None = None
        self._ends = ExitStack()
        try:
            if out is not None:
                check_runs_directory(out)
        except ResultError as error:
            raise UsageError(str(error)) from None

    def __enter__(self) -> _Rows:
        from hbmtwin.cli.progress import progress_of_runs

        self._finished = self._ends.enter_context(progress_of_runs())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.__exit__(kind, error, trace)
        if kind is not None and self._open is not None and (count := len(self._open.finished())):
            print(
                f"note: {count:,} runs are stored in {self._out}; the same command goes on from there", file=sys.stderr
            )

    def of(self, scenarios: Sequence[Scenario]) -> Iterable[Row]:
        """Run them, but for those in the store, which is opened when the first is asked for."""
        from hbmtwin.sim.sweep.execute import run_each
        from hbmtwin.sim.sweep.store import RunStore

        if self._out is not None and self._open is None:
            self._open = self._ends.enter_context(RunStore(self._out))
            for remark in self._open.remarks:
                print(f"note: {remark}", file=sys.stderr)
        yield from run_each(scenarios, jobs=self._jobs, store=self._open, landed=self._count)

    def _count(self, row: Row) -> None:
        """Once, when some have run and it will take minutes: how many."""
        self._finished(str(row["outcome"]))
        self._landed += 1
        if self._landed == FIRST_RUNS:
            minutes = (time.monotonic() - self._begin) / self._landed * (self._about - self._landed) / 60
            if minutes >= 1:
                print(f"note: about {self._about:,} runs, which take about {minutes:,.0f} min", file=sys.stderr)


def _about(policies: int, seeds: int, load: Load | None, memory: bool) -> int:
    """Runs of a study, roughly; of a policy that preempts the two ends share most of theirs."""
    loads = DEFAULT_LOADS if load is None else len(load.values)
    for_loads = min(loads, loads.bit_length() + 7)
    for_memories = min(loads, 4) * 15 if memory else 0
    return policies * seeds * (for_loads + for_memories)


def _write(point: OomPoint, out: Path) -> None:
    from hbmtwin.dashboard.oom_point_file import write_oom_point
    from hbmtwin.dashboard.oom_point_page import write_oom_point_page

    write_oom_point(point, out)
    write_oom_point_page(point, out)
