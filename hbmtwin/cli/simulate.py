"""``hbmtwin run`` and ``hbmtwin compare``: one scenario, or several policies on the same traffic."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hbmtwin.cli.exits import DOES_NOT_FIT, OK, UsageError
from hbmtwin.cli.options import FailOnOom, FailOnSlo, Json, Overrides, ScenarioFile, Seed, Variants
from hbmtwin.cli.output import json_text, stdout
from hbmtwin.cli.places import check_directory_place
from hbmtwin.cli.process import machine_memory_bytes

if TYPE_CHECKING:
    from hbmtwin.api import Result, Scenario

THE_RUN = "the run"
ROW_BYTES = 100
"""Of a request in a result, at least: twelve numbers that are seldom alike, of eight bytes. Measured: 176."""

ErrorBarsToo = Annotated[
    bool,
    typer.Option(
        "--error-bars",
        help="Run each again with one uncertain figure at a time (bandwidths, overheads, activations, ...) at its low "
        "and its high end, and say between what its numbers lie. Two further runs a figure: some thirty of each run, "
        "which is minutes for rules that copy at every token (caching, pooled).",
    ),
]

NO_SLO = "--fail-on-slo: no objective is set; add one, e.g. --set slo.ttft_s=2 (there are ttft_s, tpot_s, e2e_s)"


def run(
    scenario: ScenarioFile = None,
    overrides: Overrides = None,
    out: Annotated[Path | None, typer.Option(help="Directory for the result; nothing is written without.")] = None,
    seed: Seed = None,
    json_: Json = False,
    fail_on_oom: FailOnOom = False,
    fail_on_slo: FailOnSlo = False,
    cures: Annotated[
        bool,
        typer.Option(
            "--what-would-hold",
            help="If memory ran out, run the same traffic under each single change (minutes), and rank them.",
        ),
    ] = False,
    bars: ErrorBarsToo = False,
) -> int:
    """Simulate one scenario."""
    from hbmtwin.api import Scenario, objectives
    from hbmtwin.api import run as simulate
    from hbmtwin.cli.error_bars_screen import print_error_bars
    from hbmtwin.cli.progress import progress_of_run
    from hbmtwin.cli.tables import print_cures, print_run
    from hbmtwin.dashboard.remarks import alert_lines

    _check_target(out)
    loaded = Scenario.load(scenario, overrides=overrides or (), seed=seed)
    check_rows(loaded)
    if fail_on_slo and not objectives(loaded.slo):
        raise UsageError(NO_SLO)
    begin = time.monotonic()
    with progress_of_run() as progress:
        result = simulate(loaded, progress=progress)
    for note in result.summary["notes"]:
        print(f"note: {note}", file=sys.stderr)
    if cures:
        result = _with_cures(result)
    if bars:
        result = _with_error_bars({THE_RUN: result})[THE_RUN]
    wall_s = time.monotonic() - begin
    for line in alert_lines(result.summary):
        print(f"note: {line}", file=sys.stderr)
    if out is not None:
        result.save(out)
    if json_:
        print(json_text(_with_wall(result, wall_s)))
    else:
        name = f"{loaded.model.name} on {loaded.device.name}, {loaded.kv_cache.preset or loaded.kv_cache.policy}"
        print_run(stdout(), name, result.summary, wall_s)
        if result.summary.get("what_would_hold"):
            print_cures(stdout(), result.summary["what_would_hold"])
        if bars:
            print_error_bars(stdout(), {THE_RUN: result.summary["error_bars"]})
    return _verdict([result], fail_on_oom, fail_on_slo)


def compare(
    scenario: ScenarioFile = None,
    policies: Annotated[
        str | None,
        typer.Option(
            help="Presets to compare, separated by commas; none: only the variants. Default: all that are legal here.",
            show_default=False,
        ),
    ] = None,
    variants: Variants = None,
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option(help="Directory for report.html and each run's result.")] = Path(
        "hbmtwin-compare"
    ),
    seed: Seed = None,
    json_: Json = False,
    fail_on_oom: FailOnOom = False,
    fail_on_slo: FailOnSlo = False,
    bars: ErrorBarsToo = False,
) -> int:
    """Run KV-memory policies and variants of your own on the same traffic, and write a report."""
    from hbmtwin.api import PRESETS, Scenario, ScenarioError, objectives, write_directory
    from hbmtwin.api import compare as simulate
    from hbmtwin.cli.error_bars_screen import print_error_bars
    from hbmtwin.cli.progress import progress_of_runs
    from hbmtwin.cli.tables import print_comparison
    from hbmtwin.dashboard.remarks import remarks
    from hbmtwin.dashboard.verdict import same_traffic
    from hbmtwin.sim.variants import parse_variants

    own = parse_variants(variants or ())
    names = presets_of(policies) if policies is not None else list(PRESETS)
    if not names and not own:
        raise UsageError("nothing to compare: write for example --policies caching,paged, or give a --variant")
    with suppress(ScenarioError):  # the comparison tells it, and of which run
        for name in ([""] if names else []) + [*own]:
            loaded = Scenario.load(scenario, overrides=[*(overrides or ()), *own.get(name, ())])
            check_rows(loaded)
            if fail_on_slo and not objectives(loaded.slo):
                raise UsageError(NO_SLO)
    _check_target(out)
    begin = time.monotonic()
    with progress_of_runs(len(names) + len(own)) as finished:
        results = simulate(
            scenario,
            names,
            variants=own,
            overrides=overrides or (),
            seed=seed,
            finished=finished,
            left_out=_tell_left_out if policies is None else None,
        )
    if bars:
        results = _with_error_bars(results)
    wall_s = time.monotonic() - begin
    for remark in remarks({name: result.summary for name, result in results.items()}):
        print(f"note: {remark}", file=sys.stderr)
    write_directory(out, _comparison_writer(results))
    if json_:
        print(json_text({name: _with_wall(result, wall_s) for name, result in results.items()}))
    else:
        summaries = {name: result.summary for name, result in results.items()}
        settings = {name: result.scenario for name, result in results.items()} if own else None
        print_comparison(stdout(), summaries, wall_s, same_traffic(results) if len(results) > 1 else "", settings)
        if bars:
            print_error_bars(stdout(), {name: summary["error_bars"] for name, summary in summaries.items()})
    print(f"report: {out / 'report.html'}", file=sys.stderr)
    return _verdict(list(results.values()), fail_on_oom, fail_on_slo)


def _with_cures(result: Result) -> Result:
    """The result with ``what_would_hold`` in its summary."""
    from hbmtwin.api import ran_short, what_would_hold
    from hbmtwin.cli.progress import progress_of_runs

    if not ran_short(result.summary):
        print("note: memory sufficed, so nothing was run again", file=sys.stderr)
    with progress_of_runs() as finished:
        rows = what_would_hold(result, finished=finished)
    return replace(result, summary={**result.summary, "what_would_hold": rows})


def _with_error_bars(results: Mapping[str, Result]) -> dict[str, Result]:
    """The results with ``error_bars`` in their summaries, of the same ends."""
    from hbmtwin.api import error_bars, error_bars_to_dicts, runs_for_error_bars
    from hbmtwin.cli.progress import progress_of_runs

    if further := runs_for_error_bars({name: result.scenario for name, result in results.items()}):
        print(f"note: error bars take {further} further runs", file=sys.stderr)
    with progress_of_runs(further) as finished:
        told = error_bars_to_dicts(error_bars(results, finished=finished))
    return {
        name: replace(result, summary={**result.summary, "error_bars": told[name]}) for name, result in results.items()
    }


def _tell_left_out(name: str, reason: str) -> None:
    print(f"note: the preset {name!r} is left out: {reason}", file=sys.stderr)


def _verdict(results: Sequence[Result], fail_on_oom: bool, fail_on_slo: bool) -> int:
    """The exit code of runs that ended: 3 where one failed in what was asked for, or would never have ended."""
    stood_still = any(result.summary["standstill"] is not None for result in results)
    died = fail_on_oom and any(result.oom is not None for result in results)
    missed = fail_on_slo and not all(result.summary["goodput"]["attained"] for result in results)
    return DOES_NOT_FIT if died or missed or stood_still else OK


def presets_of(policies: str) -> list[str]:
    """The names of an option ``--policies``; none where it says so. Raise UsageError for one that is no preset."""
    from hbmtwin.api import PRESETS

    names = list(dict.fromkeys(name.strip() for name in policies.split(",") if name.strip()))
    if names == ["none"]:
        return []
    for name in names:
        if name not in PRESETS:
            near = difflib.get_close_matches(name, PRESETS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise UsageError(f"--policies: no preset is called {name!r} (there are {', '.join(PRESETS)}){hint}")
    return names


def _comparison_writer(results: dict[str, Result]) -> Callable[[Path], None]:
    from hbmtwin.dashboard.report import write_report

    def write(directory: Path) -> None:
        for name, result in results.items():
            (directory / name).mkdir()
            result.write_into(directory / name)
        write_report(results, directory / "report.html")

    return write


def check_rows(scenario: Scenario) -> None:
    """Refuse, before hours have passed, more requests than this machine can hold the rows of."""
    workload, memory_bytes = scenario.workload, machine_memory_bytes()
    if workload.num_prompts is None or workload.trace is not None or workload.multi_turn is not None:
        return  # a file ends, however many are asked for
    if memory_bytes is not None and (rows := workload.num_prompts * ROW_BYTES) > memory_bytes:
        raise UsageError(
            f"workload.num_prompts: the rows of {workload.num_prompts:,} requests take {rows / 1e9:,.1f} GB or more, "
            f"and this machine has {memory_bytes / 1e9:,.1f} GB; take at most {memory_bytes // ROW_BYTES:,}"
        )


def _check_target(out: Path | None) -> None:
    """Refuse a directory that cannot be made or replaced before the runs, not after them."""
    from hbmtwin.api import ResultError, check_replaceable

    if out is None:
        return
    try:
        check_replaceable(out)
    except ResultError as error:
        raise UsageError(str(error)) from None
    except OSError as error:  # a name that is too long, a directory that nobody may look into
        raise UsageError(f"--out: {out} cannot be written: {error.strerror}; name another directory") from None
    check_directory_place("--out", out)


def _with_wall(result: Result, wall_s: float) -> dict[str, Any]:
    return {**result.summary, "wall_s": round(wall_s, 3)}
