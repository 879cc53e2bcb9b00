"""Several runs that belong together: the same traffic under several policies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

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


def _cores(jobs: int) -> int:
    return int(cpu_count()) if jobs < 0 else max(1, jobs)
