"""A pool of workers: takes calls a few ahead of what runs, and yields rows as they come.

A pool whose worker dies is lost with all that it was given (loky's and Ray's alike) and does not say whose fault it
was: it raises PoolBroke, and whoever gave it the calls knows which rows did not come.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager

from joblib import Parallel
from joblib.externals.loky.process_executor import BrokenProcessPool

from hbmtwin.sim.processes import end_workers, ends_with_us, kill_workers, workers_deaf_to_ctrl_c
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.sweep.run_row import Row

Call = tuple[Callable[[str, Scenario], Row], tuple[str, Scenario], dict[str, object]]
"""As :func:`joblib.delayed` makes them: a function, the key and the scenario of a run."""
Pool = Callable[[Iterator[Call]], Generator[Row, None, None]]


class PoolBroke(Exception):
    """A worker died, and its pool with it."""


class WorkersLost(RuntimeError):
    """No worker can be had, or pools break whatever they are given: what to do, in words."""


_kept: list[ExitStack] = []
"""Innermost last: what ends with :func:`workers_kept`."""


@contextmanager
def workers_kept() -> Iterator[None]:
    """Let the calls of :func:`hbmtwin.sim.sweep.execute.run_each` in here share their workers, which take seconds to
    start. They end with this, however it ends."""
    with ExitStack() as ends:
        _kept.append(ends)
        try:
            yield
        finally:
            _kept.remove(ends)


def at_the_end(end: Callable[[], object]) -> None:
    """Call *end* when kept workers end: now, if none are kept."""
    if _kept:
        _kept[-1].callback(end)
    else:
        end()


def in_processes(calls: Iterator[Call], processes: int) -> Generator[Row, None, None]:
    """Rows from *processes* processes of this machine; none is left, however this ends."""
    coming: Generator[Row, None, None] | None = None
    ended = False
    try:
        with workers_deaf_to_ctrl_c():
            # one call a message: a row that waits for others in a worker is not stored yet
            coming = Parallel(n_jobs=processes, return_as="generator_unordered", batch_size=1, **ends_with_us())(calls)
        while (row := next(coming, None)) is not None:  # `yield from` would close it where we are closed
            yield row
        ended = True
    except BrokenProcessPool as error:
        raise PoolBroke(first_line(error)) from None
    finally:
        if processes > 1 and ended:
            at_the_end(end_workers)
        elif processes > 1:
            kill_workers(coming)


def first_line(error: BaseException) -> str:
    """The first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
