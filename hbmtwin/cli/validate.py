"""``hbmtwin validate``: what it compares, and what it prints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import typer
from rich.console import Console
from rich.markup import escape

from hbmtwin.cli.progress import progress_of_runs
from hbmtwin.validation.allocator import Backend, CaseReport, EmulatedBackend, Report, from_files, made_up, validate
from hbmtwin.validation.configurations import CONFIGURATIONS
from hbmtwin.validation.device import DeviceBackend, DeviceUnavailable
from hbmtwin.validation.emulated import EmulatedNpu, EmulatorUnavailable, NpuSettings, WorkerDied

BackendName = Literal["emulated", "npu", "cuda"]


class Unavailable(typer.TyperException):
    """The real side is not there, or broke; the message says what to do."""

    exit_code = 1


class NothingRun(typer.TyperException):
    """No operation of the given traces could be compared; the message says why, trace by trace."""

    exit_code = 2


def validate_allocator(
    traces: Sequence[Path], backend: BackendName, settings: NpuSettings, operations: int, seed: int
) -> Report:
    """Compare on trace files, or on made-up traces where none is given.

    Raise Unavailable, WorkloadError, ReplayError for a trace that is not legal, NothingRun.
    """
    cases = from_files(traces, settings) if traces else made_up(operations, seed)
    names = [str(trace) for trace in traces] or [c.name for c in CONFIGURATIONS]
    with ExitStack() as opened, progress_of_runs(len(names)) as finished:
        try:
            real = _open(backend, opened)
            report = validate(cases, real, done=lambda report: finished(report.name))
        except (EmulatorUnavailable, DeviceUnavailable, WorkerDied) as error:
            raise Unavailable(str(error)) from None
    if report.skipped and not report.operations and not report.differing:
        raise NothingRun("\n".join(f"{name}: {reason}" for name, reason in report.skipped))
    return report


def _open(backend: BackendName, opened: ExitStack) -> Backend:
    if backend == "emulated":
        return EmulatedBackend(opened.enter_context(EmulatedNpu()))
    return DeviceBackend(backend)


def print_report(console: Console, report: Report, wall_s: float) -> None:
    """The verdict, then each difference with the states around it, then what was left out."""
    found = len(report.differing)
    verdict = "no difference" if not found else f"{found} of {len(report.cases)} traces differ"
    ooms = sum(case.ooms for case in report.cases)
    console.print(f"[bold]{verdict}[/bold] from {escape(report.against)}")
    console.print(
        f"{len(report.cases):,} traces, {report.operations:,} operations, {ooms:,} of them OutOfMemory; "
        f"{report.numbers:,} numbers compared. Took {wall_s:.1f} s."
    )
    for case in report.differing:
        _print_difference(console, case)
    for name, reason in report.skipped:
        console.print(f"skipped {escape(name)}: {escape(reason)}")


def _print_difference(console: Console, case: CaseReport) -> None:
    d = case.difference
    assert d is not None
    op = "the set-up" if d.op is None else ", ".join(str(v) for v in d.op[:5] if v not in (None, ""))
    console.print(f"\n[bold]{escape(case.name)}[/bold], operation {d.operation} ({escape(op)}):")
    for name, ours, real in d.what:
        console.print(f"  {escape(name)}: ours {escape(ours)}, real {escape(real)}")
    common = set(d.before_ours) & set(d.before_real) & set(d.after_ours) & set(d.after_real)
    for when, ours_lines, real_lines in (
        ("before", d.before_ours, d.before_real),
        ("after", d.after_ours, d.after_real),
    ):
        sides = {"both": ours_lines} if ours_lines == real_lines else {"ours": ours_lines, "real": real_lines}
        for side, lines in sides.items():
            console.print(f"  {when}, {side}, besides {len(common)} segments that no side touched:")
            for line in lines:
                if line not in common:
                    console.print(f"    {escape(line)}")
