"""Several runs that belong together: the same traffic under several policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from threading import current_thread, main_thread

from joblib import Parallel, cpu_count, delayed
from joblib.externals.loky import get_reusable_executor

from hbmtwin.sim.result import Result
from hbmtwin.sim.run import run
from hbmtwin.sim.scenario import Scenario


def compare(
    path: Path | None,
    policies: Sequence[str],
    *,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    jobs: int = -1,
    finished: Callable[[str], None] | None = None,
) -> dict[str, Result]:
    """Run the same scenario under each preset; return the results in the order of *policies*.

    *jobs* processes run at once (-1: one a core); *finished* is told each preset's name as its run comes in. Raise
    what :func:`hbmtwin.sim.run.run` raises; every scenario is read before the first run starts.
    """
    scenarios = [Scenario.load(path, overrides=overrides, preset=name, seed=seed) for name in policies]
    results: dict[str, Result] = {}
    try:
        with _workers_deaf_to_ctrl_c():
            outcomes = Parallel(n_jobs=min(len(scenarios), _cores(jobs)), return_as="generator")(
                delayed(run)(scenario) for scenario in scenarios
            )
        for name, result in zip(policies, outcomes, strict=True):
            results[name] = result
            if finished is not None:
                finished(name)
    except BaseException:  # an interrupt too: workers would finish their runs for nobody, and then wait for ever
        get_reusable_executor().shutdown(wait=True, kill_workers=True)
        raise
    return results


@contextmanager
def _workers_deaf_to_ctrl_c() -> Iterator[None]:
    """Start workers that ignore SIGINT: a terminal sends it to them as well, and they would each print a traceback.

    We kill them when it reaches us. A process inherits nothing but "ignored", so for these 30 ms we ignore it too.
    """
    if current_thread() is not main_thread():  # no other thread may have handlers
        yield
        return
    before = signal(SIGINT, SIG_IGN)
    try:
        yield
    finally:
        signal(SIGINT, before)


def _cores(jobs: int) -> int:
    return int(cpu_count()) if jobs < 0 else max(1, jobs)
