"""``hbmtwin validate run``: a finished run on the real allocator and step by step on a real decoder."""

from __future__ import annotations

from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hbmtwin.cli.exits import DIFFERS, OK
from hbmtwin.cli.options import Json
from hbmtwin.cli.output import json_text, stdout, write_whole
from hbmtwin.cli.places import check_directory_place

if TYPE_CHECKING:
    from rich.console import Console

    from hbmtwin.validation.run_replay.errors import ErrorRow
    from hbmtwin.validation.run_replay.kernels import KernelReplay
    from hbmtwin.validation.run_replay.memory import MemoryReplay
    from hbmtwin.validation.run_replay.report import RunReplay
    from hbmtwin.validation.run_replay.step_report import StepReplay
    from hbmtwin.validation.run_replay.steps import StepOptions

PAGE, SUMMARY = "validate_run.html", "validate_run.json"
MOST_OPERATIONS = 10**7


class ReplayOn(StrEnum):
    """What ``hbmtwin validate run`` asks."""

    EMULATED = "emulated"
    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


def validate_run(
    result_dir: Annotated[
        Path, typer.Argument(metavar="RESULT_DIR", help="The --out directory of a run that kept both tables.")
    ],
    backend: Annotated[
        ReplayOn,
        typer.Option(
            help="emulated: memory, by the real torch_npu on an emulated driver; cpu: whole steps on a decoder; "
            "npu, cuda: both, on a device."
        ),
    ] = ReplayOn.EMULATED,
    max_operations: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_OPERATIONS,
            help="Operations replayed, from the first on; default: 300,000, on a device 50,000.",
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option("--steps", "--max-steps", min=1, max=100_000, help="Steps that are measured, by batch size.")
    ] = 24,
    layers: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Layers that are measured at most; default: all that fit.")
    ] = None,
    limit_s: Annotated[
        float, typer.Option(min=1, max=86_400, help="Seconds that whole steps may take; fewer are measured to hold it.")
    ] = 120,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="Of a CPU; 0: as torch has them.")] = 1,
    attention_only: Annotated[bool, typer.Option("--attention-only", help="No whole steps: attention alone.")] = False,
    out: Annotated[
        Path | None, typer.Option(help=f"Directory for {PAGE} and {SUMMARY}; nothing is written without.")
    ] = None,
    json_: Json = False,
) -> int:
    """Replay a finished run beside the real thing: every allocation, and its steps on a real decoder.

    The run needs two tables: --set results.steps=true --set results.memory_trace=true, and
    memory.activations=per_layer for every tensor of its steps.
    """
    if out is not None:
        check_directory_place("--out", out)
    from hbmtwin.validation.run_replay.steps import StepOptions

    options = StepOptions(steps, layers, limit_s, threads)
    report = _replay(result_dir, backend.value, max_operations, options, attention_only)
    if out is not None:
        from hbmtwin.dashboard.run_replay_page import write_run_replay

        write_run_replay(report, out / PAGE)
        write_whole(out / SUMMARY, json_text(report.to_dict()) + "\n")
    if json_:
        print(json_text(report.to_dict()))
    else:
        print_run_replay(stdout(), report)
        if out is not None:
            print(f"pictures: {out / PAGE}")
    return OK if report.agrees else DIFFERS


def _replay(
    directory: Path, backend: str, max_operations: int | None, options: StepOptions, attention_only: bool
) -> RunReplay:
    """Raise what becomes a line of stderr: 1 where the real thing is not there, 2 for a run that it cannot do."""
    from hbmtwin.cli.progress import progress_of_runs
    from hbmtwin.cli.validate import NothingRun, Unavailable
    from hbmtwin.kernels.attention.backends import BackendUnavailable
    from hbmtwin.validation.device import DeviceUnavailable
    from hbmtwin.validation.emulated import EmulatorUnavailable, WorkerDied
    from hbmtwin.validation.run_replay.backends import BackendName, replay_run
    from hbmtwin.validation.run_replay.case import NotReplayable
    from hbmtwin.validation.run_replay.kernels import NoKernels

    names: dict[str, BackendName] = {"emulated": "emulated", "cpu": "cpu", "cuda": "cuda", "npu": "npu"}
    try:
        with progress_of_runs() as finished:
            return replay_run(
                directory,
                names[backend],
                max_operations=max_operations,
                options=options,
                attention_only=attention_only,
                told=partial(typer.echo, err=True),
                done=finished,
            )
    except (EmulatorUnavailable, DeviceUnavailable, BackendUnavailable, WorkerDied) as error:
        raise Unavailable(str(error)) from None
    except (NotReplayable, NoKernels) as error:
        raise NothingRun(f"{directory}: {error}") from None


def print_run_replay(console: Console, report: RunReplay) -> None:
    """The verdict, what was measured on what, the checks, the errors, and what was not compared."""
    from rich.markup import escape

    console.print(f"[bold]{escape(report.verdict)}[/bold]")
    console.print(f"run: {escape(report.run)}", soft_wrap=True)
    console.print(
        "versions: " + ", ".join(f"{name} {escape(v)}" for name, v in report.versions.items()), soft_wrap=True
    )
    if report.memory is not None:
        _print_memory(console, report, report.memory)
    else:
        console.print(f"\nmemory: {escape(report.memory_absent)}", soft_wrap=True)
    if report.steps is not None:
        _print_steps(console, report.steps)
    else:
        console.print(f"\nwhole steps: {escape(report.steps_absent)}", soft_wrap=True)
    if report.kernels is not None:
        _print_kernels(console, report.kernels)
    else:
        console.print(f"\nattention alone: {escape(report.kernels_absent)}", soft_wrap=True)


def _print_memory(console: Console, report: RunReplay, m: MemoryReplay) -> None:
    from rich.markup import escape

    console.print(f"\n[bold]memory[/bold], measured on {escape(m.against)}", soft_wrap=True)
    case = m.case
    numbers = case.operations * case.counters
    console.print(f"  {case.operations:,} operations, {numbers:,} numbers compared, {m.ooms:,} out of memory")
    if case.difference is not None:
        d = case.difference
        console.print(f"  first difference at operation {d.operation} of torch's allocator:")
        for name, ours, real in d.what:
            console.print(f"    {escape(name)}: predicted {escape(ours)}, measured {escape(real)}", soft_wrap=True)
    for check in m.checks:
        verdict = "agree" if not check.differing else f"{check.differing:,} differ"
        console.print(f"  {escape(check.name)}: {check.compared:,} numbers, {verdict}")
        if check.first:
            console.print(f"    the first: {escape(check.first)}", soft_wrap=True)
    console.print(f"  out of memory: {escape(m.oom_in_words)}", soft_wrap=True)
    print_errors(console, report.memory_errors())
    for words in m.not_compared:
        console.print(f"  not compared: {escape(words)}", soft_wrap=True)


def _print_steps(console: Console, s: StepReplay) -> None:
    from rich.markup import escape

    console.print(f"\n[bold]whole steps[/bold], measured on {escape(s.measured_on)}, {s.clock} time", soft_wrap=True)
    console.print(f"  predicted for {escape(s.predicted_for)}: {escape(s.basis)}; {s.layers_in_words} measured")
    for note in s.notes:
        console.print(f"  {escape(note)}", soft_wrap=True)
    for words in s.in_words:
        console.print(f"  {escape(words)}", soft_wrap=True)
    print_errors(console, s.errors())


def _print_kernels(console: Console, k: KernelReplay) -> None:
    from rich.markup import escape

    console.print(f"\n[bold]attention[/bold], measured on {escape(k.measured_on)}", soft_wrap=True)
    console.print(f"  predicted for {escape(k.predicted_for)}: {escape(k.basis)}")
    for note in k.notes:
        console.print(f"  {escape(note)}", soft_wrap=True)
    if not k.same_device and k.factor is not None:
        console.print(
            f"  another device than the prediction is for: measured times are {k.factor_in_words} the "
            "predicted ones (median); errors are those behind this one factor",
            soft_wrap=True,
        )
    print_errors(console, k.errors())


def print_errors(console: Console, rows: tuple[ErrorRow, ...]) -> None:
    """A table, a line a quantity."""
    from rich.table import Table

    if not rows:
        return
    table = Table("error", "steps", "differ", "MAPE", "p50", "p95", "worst step", "predicted", "measured", box=None)
    for row in rows:
        percents = [
            "-" if value is None else f"{value:.2f} %" for value in (row.mape_percent, row.p50_percent, row.p95_percent)
        ]
        worst = (
            ("-", "-", "-")
            if row.worst_step < 0
            else (str(row.worst_step), f"{row.worst_predicted:,}", f"{row.worst_measured:,}")
        )
        table.add_row(row.quantity, f"{row.steps:,}", f"{row.differing:,}", *percents, *worst)
    console.print(table)
