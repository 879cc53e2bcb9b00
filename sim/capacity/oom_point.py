"""The OOM point: the load at which memory runs out, for each policy and each of several draws of the same traffic.

::

    load      1   2   4   8  16  32  64
    seed 0    .   .   .   .   .   X   x     fails first at 32      . held    X the first failure    x not asked for
    seed 1    .   .   .   X   x   x   x     fails first at  8
    dead      0   0   0  1/2 1/2  1   1     share of the draws that have failed at this load or a smaller one

A run *fails* if it dies of memory, does not start, comes to a standstill, or rejects a request for want of memory. A
policy that preempts may never fail: where its first preemption comes is asked as well, and told apart. The first
failure is found by bisection, and that it is the only edge is checked (:mod:`hbmtwin.sim.capacity.oom_point_search`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.capacity.oom_point_draws import Draw, draws_of, what_varies
from hbmtwin.sim.capacity.oom_point_loads import Load, check_load, default_load
from hbmtwin.sim.capacity.oom_point_runs import UNKNOWN, End, Question, Runs, ends_of, reached, search_runs
from hbmtwin.sim.capacity.oom_point_search import first_failure
from hbmtwin.sim.capacity.smallest_memory import SmallestMemory, smallest_memories
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import PRESETS, Scenario, ScenarioError
from hbmtwin.sim.sweep.execute import run_each
from hbmtwin.sim.sweep.run_row import Row
from hbmtwin.sim.sweep.workers import workers_kept


class CriticalLoad(NamedTuple):
    """Where one draw comes to an end under one policy, as the load grows."""

    policy: str
    end: End
    draw: int
    load: float | None
    """The smallest at which it came; None: not up to the largest."""
    monotone: bool
    """Whether it came at all larger loads that were asked for; if not, every load was asked for."""
    row: Row | None
    """The run at that load."""


@dataclass(frozen=True)
class OomPoint:
    """What was asked, and every answer."""

    scenario: Scenario
    load: Load
    draws: tuple[Draw, ...]
    varies: str
    ends: dict[str, tuple[End, ...]]
    """By policy, in the order asked for: what was looked for."""
    left_out: dict[str, str]
    """Presets that are illegal here, and why."""
    critical: tuple[CriticalLoad, ...]
    smallest: tuple[SmallestMemory, ...]
    """Empty if it was not asked for."""
    runs: tuple[Row, ...]
    """A row for each question: :data:`~hbmtwin.sim.capacity.oom_point_runs.LABELS`, then those of a run."""
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Names beside those of presets, and the settings behind them."""

    @property
    def broken(self) -> tuple[Row, ...]:
        """Runs that ended in an error, which say nothing of memory: the draw that they belong to counts for nothing."""
        return tuple(row for row in self.runs if row["outcome"] in UNKNOWN)

    def of(self, policy: str, end: End) -> tuple[CriticalLoad, ...]:
        """The critical loads of one policy, a draw each."""
        return tuple(c for c in self.critical if (c.policy, c.end) == (policy, end))


def oom_point(
    path: Path | None,
    *,
    policies: Sequence[str] | None = None,
    variants: Mapping[str, Sequence[str]] | None = None,
    load: Load | None = None,
    seeds: int = 10,
    memory: bool = False,
    overrides: Sequence[str] = (),
    seed: int | None = None,
    call: Callable[[Sequence[Scenario]], Iterable[Row]] = run_each,
) -> OomPoint:
    """Find the OOM points of policies (None: all presets that are legal here), and with *memory* the smallest memories.

    *variants* are further ones: a name and ``a.b=c`` settings on top of the scenario, without a preset.
    *call* turns scenarios into rows, in any order: :func:`hbmtwin.sim.sweep.execute.run_each`, with a store and a
    number of jobs if need be. About log2(loads) + 7 runs for each policy, end and draw, and about
    15 for each smallest memory. Raise ScenarioError, CatalogError or WorkloadError before the first run.
    """
    runs = _asked(path, policies, variants or {}, load, seeds, overrides, seed, call)
    ends, left_out = _legal(runs, policies)
    with workers_kept():
        critical = _critical_loads(runs, ends)
        smallest = smallest_memories(runs, ends) if memory else ()
    return OomPoint(
        scenario=runs.base,
        load=runs.load,
        draws=runs.draws,
        varies=what_varies(runs.base, runs.draws),
        ends=ends,
        left_out=left_out,
        critical=critical,
        smallest=smallest,
        runs=runs.labelled(),
        variants={name: tuple(settings) for name, settings in runs.variants.items()},
    )


def check_oom_point(
    path: Path | None,
    *,
    policies: Sequence[str] | None = None,
    load: Load | None = None,
    seeds: int = 10,
    overrides: Sequence[str] = (),
) -> None:
    """Raise what :func:`oom_point` raises before its first run."""
    _legal(_asked(path, policies, {}, load, seeds, overrides, None, run_each), policies)


def _asked(
    path: Path | None,
    policies: Sequence[str] | None,
    variants: Mapping[str, Sequence[str]],
    load: Load | None,
    seeds: int,
    overrides: Sequence[str],
    seed: int | None,
    call: Callable[[Sequence[Scenario]], Iterable[Row]],
) -> Runs:
    overrides = [*overrides, *([] if seed is None else [f"seed={seed}"])]
    base = Scenario.load(path, overrides=overrides, preset=policies[0] if policies else None)
    load = default_load(base) if load is None else load
    check_load(base, load)
    return Runs(path, overrides, base, load, draws_of(base, seeds), call, variants=variants)


def _legal(runs: Runs, policies: Sequence[str] | None) -> tuple[dict[str, tuple[End, ...]], dict[str, str]]:
    """What is looked for under each policy that can be built, and why the others cannot; a named one must."""
    ends: dict[str, tuple[End, ...]] = {}
    left_out: dict[str, str] = {}
    for policy in (*(PRESETS if policies is None else policies), *runs.variants):
        scenario = runs.scenario(Question(policy, 0, runs.load.values[0]))
        try:
            Twin(scenario)
        except DoesNotFit:
            pass  # which is an answer
        except ScenarioError as error:
            own = policy in runs.variants
            if own or policies is not None or (not runs.variants and len(left_out) == len(PRESETS) - 1):
                error.add_note(f"{'variant' if own else 'preset'} {policy!r}")
                raise
            left_out[policy] = str(error)
            continue
        ends[policy] = ends_of(scenario)
    return ends, left_out


def _critical_loads(runs: Runs, ends: dict[str, tuple[End, ...]]) -> tuple[CriticalLoad, ...]:
    values = runs.load.values
    names = [(policy, end, draw) for policy in ends for end in ends[policy] for draw in range(len(runs.draws))]
    found = search_runs(
        runs,
        {name: first_failure(len(values)) for name in names},
        lambda name, place: Question(name[0], name[2], values[place]),
        lambda name, row: reached(name[1], row),
    )
    critical = []
    for (policy, end, draw), first in found.items():
        if first is not None:
            load = None if first.place is None else values[first.place]
            row = None if load is None else runs.row(Question(policy, draw, load))
            critical.append(CriticalLoad(policy, end, draw, load, first.monotone, row))
    return tuple(critical)
