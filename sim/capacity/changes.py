"""What to change next: single changes of a scenario, run at the first value that does not hold, and how far they carry.

::

    change               keys                        held at 128    carries to
    paged KV             kv_cache.policy = paged     4 of 4         240 users
    INT8 KV              kv_cache.dtype = int8...    4 of 4         196 users
    half the sequences   scheduler.max_num_seqs      1 of 4         -

With the same promise, the margin among it: nothing is advised whose peak leaves less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from hbmtwin.kernels.weights import can_split
from hbmtwin.sim import catalog
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.capacity.capacity_runs import RunFailed
from hbmtwin.sim.capacity.capacity_search import CapacitySearch
from hbmtwin.sim.capacity.loads import Loads
from hbmtwin.sim.capacity.plan_targets import Value, with_keys
from hbmtwin.sim.capacity.promise import number
from hbmtwin.sim.capacity.sequential import SequentialRule
from hbmtwin.sim.resolve import device_of
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.sim.sweep.run_row import Row
from hbmtwin.sim.what_would_hold import alternatives

DRAWS = 4
"""Of each change at each value: what is advised is to be planned again."""
CARRIES_AT_MOST = 4
"""Times the first value that does not hold: how far a change is followed."""
SLOW = ("exact growth", "buffers per layer")
"""Changes whose runs place every token's tensors one by one: hours, for what no one would change to."""


class Change(NamedTuple):
    """One change that was run."""

    name: str
    keys: dict[str, Any]
    held: int
    trials: int
    carries_to: Value | None
    """The last value at which all draws held; None where they did not hold at the first."""
    at_least: bool
    """Whether it was not followed further."""
    drops_tokens: bool
    """Whether it forgets parts of conversations."""


def changes_of(loads: Loads, place: int, rule: SequentialRule, most_running: int) -> tuple[Change, ...]:
    """Every change, run at that value; those that carry farthest first, those that drop tokens behind others."""
    found = [
        change for name, keys in _tried(loads, place, most_running) for change in _run(loads, place, name, keys, rule)
    ]
    sign = -1 if loads.target.smaller_is_better else 1

    def order(change: Change) -> tuple[bool, bool, float, int]:
        carries = 0.0 if change.carries_to is None else sign * float(change.carries_to)
        return change.carries_to is None, change.drops_tokens, -carries, -change.held

    return tuple(sorted(found, key=order))


def _tried(loads: Loads, place: int, most_running: int) -> Iterator[tuple[str, dict[str, Any]]]:
    scenario, target = loads.at(place), loads.target
    moved = set(target.keys_of(target.values[place]))
    seen: list[dict[str, Any]] = []
    others = ((a.name, a.keys) for a in alternatives(scenario, most_running))
    for name, keys in (*_smaller_pool(loads, place), *_single(scenario), *others):
        if name not in SLOW and not moved & keys.keys() and keys not in seen and _differs(loads.scenario, keys):
            seen.append(keys)
            yield name, keys


def _single(s: Scenario) -> Iterator[tuple[str, dict[str, Any]]]:
    """Changes of more, where :mod:`hbmtwin.sim.what_would_hold` has those of less."""
    scheduler, engine, kv = s.scheduler, s.engine, s.kv_cache
    yield "twice the sequences at once", {"scheduler.max_num_seqs": 2 * scheduler.max_num_seqs}
    yield "twice the tokens a step", {"scheduler.max_num_batched_tokens": 2 * scheduler.max_num_batched_tokens}
    if scheduler.max_num_batched_tokens > 256:
        yield "half the tokens a step", {"scheduler.max_num_batched_tokens": scheduler.max_num_batched_tokens // 2}
    if kv.policy in ("paged", "radix") and not kv.enable_prefix_caching:
        keys: dict[str, Any] = {"kv_cache.enable_prefix_caching": True, "session.between_turns": "prefix_cache"}
        yield "prefix caching", keys
    model, device = catalog.model(s.model.name), device_of(s)
    larger = [tp for tp in sorted(device.allreduce_ns) if tp > engine.tensor_parallel_size and can_split(model, tp)]
    if larger:
        yield f"{larger[0]} devices", {"engine.tensor_parallel_size": larger[0]}


def _smaller_pool(loads: Loads, place: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """A pool that leaves the margin, where the one that is taken at the start does not."""
    if not loads.promise.kv_may_fill:
        return
    own = loads.at(place).engine.gpu_memory_utilization
    shares = []
    for row in loads.rows(place, loads.draws(DRAWS)):
        capacity = number(row, "capacity_bytes")
        if "margin" in loads.promise.broken(row):
            too_much = loads.promise.margin.of(int(capacity)) - loads.promise.left_bytes(row)
            shares.append(math.floor(100 * (own - too_much / capacity) + 1e-6) / 100)
    if shares and min(shares) > 0:
        yield "less of the device", {"engine.gpu_memory_utilization": min(shares)}


def _differs(s: Scenario, keys: dict[str, Any]) -> bool:
    def value(key: str) -> Any:
        section, _, name = key.partition(".")
        return getattr(getattr(s, section), name)

    return any(value(key) != wanted for key, wanted in keys.items())


def _run(loads: Loads, place: int, name: str, keys: dict[str, Any], rule: SequentialRule) -> Iterator[Change]:
    """That change, where it is legal here."""
    draws = loads.draws(DRAWS)
    try:
        changed = loads.changed(with_keys(loads.scenario, keys))
        ServerPlan(changed.at(place))
        rows = changed.rows(place, draws)
        held = sum(not changed.promise.broken(row) for row in rows)
        if held < len(rows):
            yield Change(name, keys, held, len(rows), None, False, _drops(rows))
            return
        limit = _limit(loads, place)
        last = CapacitySearch(limit, changed, rule, scouts=len(draws), guess=place).scout(limit)
    except (ScenarioError, DoesNotFit, RunFailed):
        return
    yield Change(name, keys, held, len(rows), loads.target.values[last], last == limit - 1, _drops(rows))


def _limit(loads: Loads, place: int) -> int:
    """Places that are looked at."""
    values = loads.target.values
    if loads.target.smaller_is_better:
        return len(values)
    most = CARRIES_AT_MOST * values[place]
    return next((i for i in range(place + 1, len(values)) if values[i] > most), len(values))


def _drops(rows: Sequence[Row]) -> bool:
    return any(row["dropped_tokens"] for row in rows)
