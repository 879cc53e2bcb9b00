"""The command line: results on stdout, progress and errors on stderr.

Exit codes: 0 done (an out-of-memory death is a result), 1 failure (traffic or files that cannot be read or written,
something to compare with that is not there), 2 usage (a key, value or combination that makes no sense), 3 does not fit,
or died with ``--fail-on-oom``, or served too few as promised with ``--fail-on-slo``, or came to a standstill (a
live-lock or a deadlock of its scheduler), or differs from the real one, 130 interrupted (Ctrl-C), 143 terminated
(SIGTERM).

The simulator, pandas and Plotly are imported inside the verbs that need them: together they cost most of a second,
which ``--help`` and shell completion should not pay.
"""

from __future__ import annotations

import difflib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hbmtwin import __version__
from hbmtwin.cli.export import export
from hbmtwin.cli.process import Terminated, open_closed_streams, sigterm_raises

if TYPE_CHECKING:
    from rich.console import Console

    from hbmtwin.api import Result

OK, FAILURE, USAGE, DOES_NOT_FIT, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
DIFFERS = 3

app = typer.Typer(
    name="hbmtwin",
    help="A discrete-event twin of accelerator memory (HBM) under LLM serving: will it start, how many users fit, "
    "when does it run out of memory, and why.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

validate_app = typer.Typer(help="Hold the simulator to the real thing.", no_args_is_help=True)
app.add_typer(validate_app, name="validate")
app.command()(export)

ScenarioFile = Annotated[
    Path | None,
    typer.Argument(metavar="[SCENARIO]", help="Scenario file (TOML); without one the built-in traffic runs."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a key, e.g. workload.num_prompts=100. May be repeated."),
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant",
        metavar="NAME:KEY=VALUE,...",
        help="A run of your own: the scenario with these keys, e.g. big:kv_cache.preset=doubling,"
        "kv_cache.initial_tokens=1024. A value with commas stands in brackets or quotes. May be repeated.",
    ),
]
Seed = Annotated[int | None, typer.Option(help="Seed of every random draw; default: the scenario's.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout instead of text for people.")]
FailOnOom = Annotated[bool, typer.Option("--fail-on-oom", help="Exit with 3 when a server died of memory.")]
FailOnSlo = Annotated[
    bool,
    typer.Option("--fail-on-slo", help="Exit with 3 when less than slo.attainment of the requests met the SLO."),
]


NO_SLO = "--fail-on-slo: no objective is set; add one, e.g. --set slo.ttft_s=2 (there are ttft_s, tpot_s, e2e_s)"


class UsageError(typer.TyperException):
    """An argument that makes no sense, told as the other errors are."""

    exit_code = USAGE


class RealSide(StrEnum):
    """What ``hbmtwin validate allocator`` compares with."""

    EMULATED = "emulated"
    NPU = "npu"
    CUDA = "cuda"


class Part(StrEnum):
    """What ``hbmtwin catalog`` lists."""

    DEVICES = "devices"
    MODELS = "models"
    POLICIES = "policies"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never a traceback for a user's mistake."""
    open_closed_streams()
    try:
        with sigterm_raises():
            code = app(args=argv, prog_name="hbmtwin", standalone_mode=False)
        sys.stdout.flush()  # a closed pipe shows here, not at interpreter exit
        return code if isinstance(code, int) else OK
    except typer.TyperException as error:
        return _complain(error.format_message(), error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except Terminated:
        return TERMINATED
    except BrokenPipeError:  # `hbmtwin catalog | head`: the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left must not fail again at exit
        return FAILURE
    except Exception as error:
        code = _exit_code(error)
        if code is None:
            raise
        where = "".join(f"{note}: " for note in getattr(error, "__notes__", ()))
        return _complain(where + str(error) + _subtraction(error), code)


def _exit_code(error: Exception) -> int | None:
    """The exit code of a known failure; None for a bug, whose traceback is wanted."""
    from hbmtwin.api import (
        CatalogError,
        DoesNotFit,
        ReplayError,
        ResultError,
        ScenarioError,
        UnknownPolicy,
        WorkloadError,
    )

    if isinstance(error, DoesNotFit):
        return DOES_NOT_FIT
    if isinstance(error, ScenarioError | CatalogError | UnknownPolicy | ReplayError):
        return USAGE
    if isinstance(error, WorkloadError | ResultError | OSError):
        return FAILURE
    return None


def _subtraction(error: Exception) -> str:
    """Where every byte of a device goes on which a model does not fit, line by line; empty for other errors."""
    from hbmtwin.api import DoesNotFit

    if not isinstance(error, DoesNotFit):
        return ""
    if error.budget.stages:
        from hbmtwin.cli.tables import stage_columns

        return stage_columns(error.budget)
    rows = [(line.item, line.bytes, line.low, line.high) for line in error.budget.lines]
    total = error.budget.total_bytes
    text = ""
    for item, size, low, high in [*rows, ("sum: the device", total, total, total)]:
        text += f"\n  {item:<16}{size / 2**30:>9.2f} GiB"
        if low != high:
            text += f"   estimated, {low / 2**30:.2f} to {high / 2**30:.2f}"
    return text


def _complain(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    if version:
        print(f"hbmtwin {__version__}")
        raise typer.Exit(OK)
    if context.invoked_subcommand is None:
        print(context.get_help(), end="")
        raise typer.Exit(USAGE)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="File to write; - for stdout.")] = Path("scenario.toml"),
    json_: Json = False,
) -> int:
    """Write a commented scenario with every key and its default."""
    from hbmtwin.cli.commented import commented_scenario

    if file == Path("-"):
        print(commented_scenario(), end="")
        return OK
    if os.path.lexists(file):
        raise UsageError(f"{file} exists; name another file, or remove it first")
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.write_text(commented_scenario(), encoding="utf-8")
        partial.rename(file)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from None
    finally:
        partial.unlink(missing_ok=True)
    print(json.dumps({"written": str(file)}) if json_ else f"wrote {file}; now: hbmtwin compare {file}")
    return OK


@app.command()
def catalog(part: Annotated[Part | None, typer.Argument()] = None, json_: Json = False) -> int:
    """List devices, models and policies."""
    from hbmtwin.cli import listing, tables

    verbs: dict[Part, tuple[Callable[[], Any], Callable[[Console, Any], None]]] = {
        Part.DEVICES: (listing.list_devices, tables.print_devices),
        Part.MODELS: (listing.list_models, tables.print_models),
        Part.POLICIES: (listing.list_policies, tables.print_policies),
    }
    found = {name: verbs[name][0]() for name in ([part] if part else Part)}
    if json_:
        print(_json(found[part] if part else found))
        return OK
    for name, entries in found.items():
        verbs[name][1](_stdout(), entries)
    return OK


@app.command()
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
) -> int:
    """Simulate one scenario."""
    from hbmtwin.api import Scenario, objectives
    from hbmtwin.api import run as simulate
    from hbmtwin.cli.progress import progress_of_run
    from hbmtwin.cli.tables import print_cures, print_run
    from hbmtwin.dashboard.remarks import alert_lines

    _check_target(out)
    loaded = Scenario.load(scenario, overrides=overrides or (), seed=seed)
    if fail_on_slo and not objectives(loaded.slo):
        raise UsageError(NO_SLO)
    begin = time.monotonic()
    with progress_of_run() as progress:
        result = simulate(loaded, progress=progress)
    for note in result.summary["notes"]:
        print(f"note: {note}", file=sys.stderr)
    if cures:
        result = _with_cures(result)
    wall_s = time.monotonic() - begin
    for line in alert_lines(result.summary):
        print(f"note: {line}", file=sys.stderr)
    if out is not None:
        result.save(out)
    if json_:
        print(_json(_with_wall(result, wall_s)))
    else:
        name = f"{loaded.model.name} on {loaded.device.name}, {loaded.kv_cache.preset or loaded.kv_cache.policy}"
        print_run(_stdout(), name, result.summary, wall_s)
        if result.summary.get("what_would_hold"):
            print_cures(_stdout(), result.summary["what_would_hold"])
    return _verdict([result], fail_on_oom, fail_on_slo)


@app.command()
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
) -> int:
    """Run KV-memory policies and variants of your own on the same traffic, and write a report."""
    from hbmtwin.api import PRESETS, Scenario, ScenarioError, objectives, write_directory
    from hbmtwin.api import compare as simulate
    from hbmtwin.cli.progress import progress_of_runs
    from hbmtwin.cli.tables import print_comparison
    from hbmtwin.cli.variants import parse_variants
    from hbmtwin.dashboard.remarks import remarks
    from hbmtwin.dashboard.verdict import same_traffic

    own = parse_variants(variants or ())
    names = _presets(policies) if policies is not None else list(PRESETS)
    if not names and not own:
        raise UsageError("nothing to compare: write for example --policies caching,paged, or give a --variant")
    if fail_on_slo:
        with suppress(ScenarioError):  # the comparison tells it, and of which run
            for name in ([""] if names else []) + [*own]:
                loaded = Scenario.load(scenario, overrides=[*(overrides or ()), *own.get(name, ())])
                if not objectives(loaded.slo):
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
    wall_s = time.monotonic() - begin
    for remark in remarks({name: result.summary for name, result in results.items()}):
        print(f"note: {remark}", file=sys.stderr)
    write_directory(out, _comparison_writer(results))
    if json_:
        print(_json({name: _with_wall(result, wall_s) for name, result in results.items()}))
    else:
        summaries = {name: result.summary for name, result in results.items()}
        settings = {name: result.scenario for name, result in results.items()} if own else None
        print_comparison(_stdout(), summaries, wall_s, same_traffic(results) if len(results) > 1 else "", settings)
    print(f"report: {out / 'report.html'}", file=sys.stderr)
    return _verdict(list(results.values()), fail_on_oom, fail_on_slo)


@app.command()
def replay(
    trace: Annotated[Path, typer.Argument(help="Operation trace, CSV (plain or gzip) or Parquet.")],
    capacity_bytes: Annotated[int, typer.Option(min=1, help="Bytes of the device.")],
    allocator: Annotated[str, typer.Option(help="Device allocator: see `hbmtwin catalog policies`.")] = "caching",
    flavour: Annotated[str | None, typer.Option(help="torch_npu or torch_cuda; default: torch_npu.")] = None,
    release: Annotated[str | None, typer.Option(help="Release whose rules hold, e.g. 2.13.0.")] = None,
    alloc_conf: Annotated[
        str | None, typer.Option(help="Settings as in PYTORCH_NPU_ALLOC_CONF, e.g. max_split_size_mb:64.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Operations of this allocator, where a recorded run had several.")
    ] = None,
    per_op: Annotated[
        Path | None, typer.Option(help="Table with one row per operation: .csv, .csv.gz or .parquet.")
    ] = None,
    json_: Json = False,
) -> int:
    """Replay an operation trace on a device allocator."""
    from hbmtwin.cli.replay import print_replay, replay_trace, summary

    given = {"flavour": flavour, "release": release, "alloc_conf": alloc_conf}
    settings = {name: value for name, value in given.items() if value is not None}
    begin = time.monotonic()
    tally, stats = replay_trace(trace, allocator, settings, capacity_bytes, only=only, per_op=per_op)
    wall_s = time.monotonic() - begin
    if tally.errors:
        print(f"note: {tally.errors:,} operations were refused; the first: {tally.first_error}", file=sys.stderr)
    if json_:
        print(_json(summary(tally, stats, wall_s)))
    else:
        print_replay(_stdout(), allocator, tally, stats, wall_s)
    return OK


@validate_app.command("allocator")
def validate_allocator(
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="[TRACE]...", help="Operation traces; without any they are made up.")
    ] = None,
    backend: Annotated[
        RealSide, typer.Option(help="emulated: the real torch_npu on an emulated driver; npu, cuda: a device.")
    ] = RealSide.EMULATED,
    capacity_bytes: Annotated[int, typer.Option(min=1, help="Bytes of the device, for trace files.")] = 64 << 30,
    alloc_conf: Annotated[str, typer.Option(help="Settings as in PYTORCH_NPU_ALLOC_CONF, for trace files.")] = "",
    operations: Annotated[int, typer.Option(min=1, help="Of all made-up traces together.")] = 240_000,
    seed: Annotated[int, typer.Option(help="Seed of the made-up traces.")] = 0,
    json_: Json = False,
) -> int:
    """Compare the caching allocator with the real one, every counter at every operation."""
    from hbmtwin.cli.validate import print_report
    from hbmtwin.cli.validate import validate_allocator as compare_both
    from hbmtwin.validation.emulated import NpuSettings

    settings = NpuSettings(capacity_bytes=capacity_bytes, alloc_conf=alloc_conf)
    begin = time.monotonic()
    report = compare_both(traces or (), backend.value, settings, operations, seed)
    wall_s = time.monotonic() - begin
    if json_:
        print(_json(report.to_dict() | {"wall_s": round(wall_s, 3)}))
    else:
        print_report(_stdout(), report, wall_s)
    return DIFFERS if report.differing else OK


def _with_cures(result: Result) -> Result:
    """The result with ``what_would_hold`` in its summary."""
    from hbmtwin.api import ran_short, what_would_hold
    from hbmtwin.cli.progress import progress_of_runs

    if not ran_short(result.summary):
        print("note: memory sufficed, so nothing was run again", file=sys.stderr)
    with progress_of_runs() as finished:
        rows = what_would_hold(result, finished=finished)
    return replace(result, summary={**result.summary, "what_would_hold": rows})


def _tell_left_out(name: str, reason: str) -> None:
    print(f"note: the preset {name!r} is left out: {reason}", file=sys.stderr)


def _verdict(results: Sequence[Result], fail_on_oom: bool, fail_on_slo: bool) -> int:
    """The exit code of runs that ended: 3 where one failed in what was asked for, or would never have ended."""
    stood_still = any(result.summary["standstill"] is not None for result in results)
    died = fail_on_oom and any(result.oom is not None for result in results)
    missed = fail_on_slo and not all(result.summary["goodput"]["attained"] for result in results)
    return DOES_NOT_FIT if died or missed or stood_still else OK


def _presets(policies: str) -> list[str]:
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


def _check_target(out: Path | None) -> None:
    """Refuse a directory that cannot be replaced before the run, not after it."""
    from hbmtwin.api import ResultError, check_replaceable

    try:
        if out is not None:
            check_replaceable(out)
    except ResultError as error:
        raise UsageError(str(error)) from None


def _with_wall(result: Result, wall_s: float) -> dict[str, Any]:
    return {**result.summary, "wall_s": round(wall_s, 3)}


def _json(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)


def _stdout() -> Console:
    """Tables on stdout: as wide as COLUMNS or the terminal says; a pipe gets 140, the same in every log."""
    from rich.console import Console

    return Console(width=shutil.get_terminal_size((140, 24)).columns, highlight=False, soft_wrap=False)
