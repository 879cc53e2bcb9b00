"""Rows of many scenarios, from processes here or on a Ray cluster, each stored as soon as it is there.

::

    scenarios -> by key -> in the store?  yes -> its row
                              | no
                              v
                           waiting --(a few ahead of the workers)--> pool of workers --> row -> store -> landed
                              ^                                        |
                              +-- a worker died: those on their way ---+   twice on their way: each alone,
                                                                           and whoever kills it then has failed
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

from joblib import delayed

from hbmtwin.sim.processes import cores
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.sweep.ray_cluster import on_a_cluster
from hbmtwin.sim.sweep.run_row import OTHER_RELEASE, PROCESS_DIED, Row, died_row, elsewhere_row, run_row
from hbmtwin.sim.sweep.scenario_key import scenario_key
from hbmtwin.sim.sweep.store import RunStore
from hbmtwin.sim.sweep.workers import Call, Pool, PoolBroke, WorkersLost, in_processes
from hbmtwin.workloads.plural import counted

Executor = Literal["local", "ray"]
EXECUTORS: tuple[Executor, ...] = ("local", "ray")
STRIKES = 2
"""After so many pools that broke with a run on its way, it runs alone."""
NOBODY_LANDED = 5
"""Pools that may break one after another without a row: then it is not the runs' fault."""
RETRIED = (PROCESS_DIED, OTHER_RELEASE, "MemoryError", "OSError")
"""Causes of a failure that may lie in the machine: such a run runs again when a store is opened again."""


def run_each(
    scenarios: Iterable[Scenario],
    *,
    jobs: int = -1,
    executor: Executor = "local",
    address: str | None = None,
    store: RunStore | None = None,
    landed: Callable[[Row], None] | None = None,
    remark: Callable[[str], None] | None = None,
) -> Iterator[Row]:
    """Yield a row for each different scenario: first those in the store, then the others in order of completion.

    *jobs* processes run at once (-1: one a core, or all of the cluster). *address* is that of a Ray cluster (None: one
    is started here, and ends with us). A row that ran now is first stored, then told to *landed*, then yielded;
    *remark* is told of workers that die. A run that fails, or kills its process time and again, is a row; the others go
    on. Whoever stops asking, or an interrupt, ends every process. Raise ResultError where the store cannot be written,
    WorkersLost.
    """
    waiting: dict[str, Scenario] = {}
    for scenario in scenarios:
        waiting.setdefault(scenario_key(scenario), scenario)
    done = {} if store is None else store.finished()
    for key in list(waiting):
        if (row := done.get(key)) is not None and stands(row):
            del waiting[key]
            yield row
    if not waiting:
        return
    with _workers(executor, address, jobs, len(waiting)) as (pool, call):
        for row in _each(waiting, pool, call, remark):
            if store is not None:
                store.add(row)
            if landed is not None:
                landed(row)
            yield row


def stands(row: Row) -> bool:
    """Whether a stored row is not to be run again."""
    return row["cause"] not in RETRIED


def _each(
    waiting: dict[str, Scenario],
    pool: Pool,
    call: Callable[[str, Scenario], Row],
    remark: Callable[[str], None] | None = None,
) -> Iterator[Row]:
    """Rows of all that waits; *waiting* loses what has its row."""
    strikes: dict[str, int] = {}
    broken = 0
    while waiting:
        alone = [key for key in waiting if strikes.get(key, 0) >= STRIKES][:1]
        sent: list[str] = []
        came: Generator[Row, None, None] | None = None
        try:
            came = pool(_calls(waiting, alone or list(waiting), sent, call))
            for row in came:
                broken = 0
                del waiting[str(row["key"])]
                yield row
        except PoolBroke as error:
            broken += 1
            if alone:
                broken = 0
                scenario = waiting.pop(alone[0])
                yield died_row(alone[0], scenario.seed)
            if broken >= NOBODY_LANDED:
                raise WorkersLost(f"{broken} pools of workers broke one after another, the last: {error}") from None
            under_way = [key for key in sent if key in waiting]
            for key in under_way:
                strikes[key] = strikes.get(key, 0) + 1
            if remark is not None and under_way:
                remark(f"a worker died; {counted(len(under_way), 'run')} under way will run again")
        finally:
            if came is not None:
                came.close()


def _calls(
    waiting: dict[str, Scenario], keys: Sequence[str], sent: list[str], call: Callable[[str, Scenario], Row]
) -> Iterator[Call]:
    """One call a run, noting which have been taken."""
    for key in keys:
        sent.append(key)
        yield delayed(call)(key, waiting[key])


@contextmanager
def _workers(
    executor: Executor, address: str | None, jobs: int, count: int
) -> Iterator[tuple[Pool, Callable[[str, Scenario], Row]]]:
    """A pool, and what it is to call."""
    if executor == "local":
        yield partial(in_processes, processes=min(count, cores(jobs))), row_here
        return
    with on_a_cluster(address, jobs) as pool:
        yield pool, row_elsewhere


def row_here(key: str, scenario: Scenario) -> Row:
    """The row of a run under the name that it was given."""
    return {**run_row(scenario), "key": key}


def row_elsewhere(key: str, scenario: Scenario) -> Row:
    """As :func:`row_here`, on a machine that may have other files, or another release: then the run has failed."""
    return row_here(key, scenario) if scenario_key(scenario) == key else elsewhere_row(key, scenario.seed)
