"""Progress on stderr: only for a person who is watching, and gone when the run is done."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars

from hbmtwin.api import Progress


def _bars(*more: ProgressColumn) -> Bars:
    console = Console(stderr=True)
    return Bars(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        *more,
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )


@contextmanager
def progress_of_run() -> Iterator[Callable[[Progress], None] | None]:
    """Yield what a run calls, or None where nobody watches."""
    with _bars() as bars:
        if bars.disable:
            yield None
            return
        task = bars.add_task("requests", total=None)
        yield lambda p: bars.update(
            task, completed=p.completed, total=p.total, description=f"{p.simulated_s:,.0f} s, {p.running} running"
        )


@contextmanager
def progress_of_runs(total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Yield what is called with each of several runs that has finished; *total* is how many they are, if known."""
    with _bars() as bars:
        task = bars.add_task("runs", total=total)
        yield lambda name: bars.update(task, advance=1, description=f"{name} done")


@contextmanager
def progress_with_eta(total: int, there: int = 0) -> Iterator[Callable[[str], None]]:
    """Yield what is called with how each of many runs ended; *there* of *total* had run before."""
    with _bars(TextColumn("left"), TimeRemainingColumn()) as bars:
        task = bars.add_task("runs", total=total, completed=there)
        yield lambda how: bars.update(task, advance=1, description=f"runs, the last: {how}")
