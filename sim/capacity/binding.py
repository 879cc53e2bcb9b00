"""Which limit is in force at the first value that does not hold: what the runs died of or missed, and what they would
have done with more of each thing.

::

    what broke                                       binding
    out of memory of shortage, never_fits            KV            preempted, rejected: KV as well
                     external_fragmentation          fragmentation
                     runtime_peak                    activation peak
                     growth_copy, reservation, ...   by its own name
    less than the margin is left                     KV; of a pool that is taken at the start: gpu_memory_utilization
    an SLO                                           the first of these that, doubled, makes it hold:
                                                     max_num_seqs, max_num_batched_tokens, memory; else compute

Found by running it: the same draws with twice as much of one thing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.capacity.assumptions import applied
from hbmtwin.sim.capacity.capacity_runs import RunFailed
from hbmtwin.sim.capacity.loads import Loads
from hbmtwin.sim.capacity.plan_targets import with_keys
from hbmtwin.sim.capacity.promise import MEMORY, number
from hbmtwin.sim.resolve import device_of
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sections import MAX_BYTES
from hbmtwin.sim.sweep.run_row import Row

OF_CAUSE = {
    "external_fragmentation": "fragmentation",
    "growth_copy": "growth copies",
    "reservation": "reserved KV that nobody fills",
    "parked_history": "parked histories",
    "runtime_peak": "activation peak",
    "other_tenant": "other processes on the device",
    "allocator_rule": "a rule of the allocator",
}
"""What a cause of death is called here; all others are a want of room for KV."""
GIVEN = "gpu_memory_utilization"
"""What leaves less than the margin where a pool is taken at the start, whatever the load then is."""
TWICE = 2
FASTER = ("memory_bandwidth_bytes_per_s", "peak_flops_per_s", "link_bandwidth_bytes_per_s")
SHORTER = (
    *("attention_launch_ns", "layer_overhead_ns", "step_overhead_ns", "host_step_ns", "host_layer_ns"),
    "allreduce_ns",
)
"""Figures of a device that is twice as fast: those that double, and those that halve."""


class Relaxed(NamedTuple):
    """What the same draws do with twice as much of one thing."""

    constraint: str
    change: str
    held: int
    trials: int


class Binding(NamedTuple):
    """The limit in force, and what it is judged by."""

    constraint: str
    broken: Mapping[str, int]
    """How many runs broke what first."""
    causes: Mapping[str, int]
    """Of those that died or rejected, by cause."""
    trials: int
    relaxed: tuple[Relaxed, ...]
    numbers: Mapping[str, float | None]
    """The largest over the runs: sequences at once, KV usage, waiting."""


def binding_of(loads: Loads, place: int, draws: Sequence[int], folder: Path) -> Binding | None:
    """What binds at that value; None where all of those draws hold. At most 4 x draws runs."""
    rows = loads.rows(place, draws)
    broken = [(loads.promise.broken(row), row) for row in rows]
    failing = [(kinds[0], row) for kinds, row in broken if kinds]
    if not failing:
        return None
    first = Counter(kind for kind, _ in failing)
    causes = Counter(str(row["cause"]) for kind, row in failing if kind in MEMORY)
    relaxed = tuple(_relaxed(loads, place, draws, folder))
    return Binding(
        constraint=_constraint(first, causes, relaxed, margin=GIVEN if loads.promise.kv_may_fill else "KV"),
        broken=dict(sorted(first.items())),
        causes=dict(sorted(causes.items())),
        trials=len(rows),
        relaxed=relaxed,
        numbers=_numbers(loads.at(place), [row for _, row in failing]),
    )


def _constraint(broken: Counter[str], causes: Counter[str], relaxed: Sequence[Relaxed], *, margin: str) -> str:
    kind = max(sorted(broken), key=lambda name: broken[name])
    if kind in ("out_of_memory", "rejected", "does_not_fit", "standstill"):
        cause = max(sorted(causes), key=lambda name: causes[name])
        return OF_CAUSE.get(cause, "KV")
    if kind in ("preemptions", "margin"):
        return margin if kind == "margin" else "KV"
    most = max((r.held for r in relaxed), default=0)
    if not most:
        return "several at once"
    return next(r.constraint for r in relaxed if r.held == most)


def _relaxed(loads: Loads, place: int, draws: Sequence[int], folder: Path) -> Iterator[Relaxed]:
    for constraint, change, scenario in _relaxations(loads.at(place), folder):
        try:
            held = loads.changed(scenario).held(place, draws)
        except (ScenarioError, DoesNotFit, RunFailed):
            continue
        yield Relaxed(constraint, change, held, len(draws))


def _relaxations(s: Scenario, folder: Path) -> Iterator[tuple[str, str, Scenario]]:
    """In the order in which one is preferred: compute last, for a faster device hides all else."""
    device = device_of(s)
    for key in ("max_num_seqs", "max_num_batched_tokens"):
        value = TWICE * getattr(s.scheduler, key)
        yield key, f"{key} {value}", with_keys(s, {f"scheduler.{key}": value})
    if (memory := TWICE * device.memory_bytes) <= MAX_BYTES:
        yield "KV", "twice the device's memory", with_keys(s, {"device.memory_bytes": memory})
    figures: dict[str, float] = {name: TWICE * getattr(device, name) for name in FASTER if getattr(device, name)}
    figures |= {name: getattr(device, name) / TWICE for name in SHORTER if name != "allreduce_ns"}
    if allreduce := device.allreduce_ns.get(s.engine.tensor_parallel_size):
        figures["allreduce_ns"] = allreduce / TWICE
    yield "compute", "a device twice as fast", applied(s, figures, folder)


def _numbers(scenario: Scenario, rows: Sequence[Row]) -> dict[str, Any]:
    def most(column: str) -> float:
        return max(number(row, column) for row in rows)

    return {
        "most_running": most("most_running"),
        "max_num_seqs": float(scenario.scheduler.max_num_seqs),
        "kv_usage_peak": most("kv_usage_peak"),
        "most_waiting": most("most_waiting"),
        "queue_p99_s": most("queue_p99_s"),
        "external_fragmentation_mean": most("external_fragmentation_mean"),
    }
