"""What can be planned: the key that moves, its values from the easiest on, and what moves with it.

::

    target                    easiest ... hardest        moves with it                        answer
    users                     1, 2, 3, ... 100, 102      num_prompts: as many for each user   the most
    request_rate              0.01, 0.0102, ...          num_prompts: as many seconds         the highest
      of a trace or model     0.01 x ... 100 x           time_scale, rate_scale               the highest
    max_model_len             128, 256, ...              -                                    the longest
    devices                   8, 4, 2, 1                 tensor_parallel_size                 the fewest
    gpu_memory_utilization    0.98, 0.97, ...            -                                    the smallest

Values of loads are those that people would say: steps of 1 to 2.5 %, of 1 below 100.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hbmtwin.kernels.weights import can_split
from hbmtwin.sim import catalog
from hbmtwin.sim.budget.memory_budget import DoesNotFit
from hbmtwin.sim.capacity import plan_phrases as said
from hbmtwin.sim.catalog import CatalogError
from hbmtwin.sim.phrases import Said
from hbmtwin.sim.resolve import device_of
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sections import Section
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.workloads.builtin import NUM_PROMPTS, REQUEST_RATE
from hbmtwin.workloads.suggest import did_you_mean

TARGETS = ("users", "request_rate", "max_model_len", "devices", "gpu_memory_utilization")
MOST_USERS = 1_024
RATES = (0.01, 100.0)
"""Sessions a second, or times the recorded rate. Beyond either it is said that all holds, which is no answer."""
REQUESTS_PER_USER = 10
"""Where the scenario does not say how many."""
LEAST_LENGTH = 128
LENGTHS_AN_OCTAVE = 16
LEAST_REQUESTS = 20
"""Of an open loop, however low its rate."""
MOST_PROMPTS = 10**6
"""Of one run: more would take minutes each."""
_STEPS = ((1.0, 2.0, 0.02), (2.0, 5.0, 0.05), (5.0, 10.0, 0.1))
"""Steps of a decade: from, to, by."""

Value = int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What moves, through which values, and how a scenario gets one."""

    name: str
    values: tuple[Value, ...]
    """The easiest to hold first."""
    keys_of: Callable[[Value], dict[str, Any]]
    """The dotted keys that bring the scenario there."""
    unit: str
    """Behind a value."""
    smaller_is_better: bool = False
    start: int = 0
    """Of the values, where a search begins: the scenario's own, or a guess."""
    end: str = ""
    """What the hardest value is where nothing lies beyond it; empty: it is only as far as is looked."""
    assumed: tuple[Said, ...] = ()
    """What the scenario left open, in sentences."""

    def text(self, value: Value) -> str:
        """``96 users``, ``1.5 sessions a second``."""
        number = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        first, space, rest = self.unit.partition(" ")
        if value == 1 and first in ("users", "tokens", "devices", "sessions"):
            first = first.removesuffix("s")
        return f"{number} {first}{space}{rest}" if first else number


def target_of(scenario: Scenario, name: str | None) -> Target:
    """The target of that name; None: users in a closed loop, else the rate. Raise ScenarioError, with the cure."""
    w = scenario.workload
    recorded = w.trace is not None or w.model is not None
    if name is None:
        name = "request_rate" if recorded or w.request_rate is not None or w.clients is not None else "users"
    if name not in TARGETS:
        raise ScenarioError(f"--target: nothing is called {name!r}; {did_you_mean(name, TARGETS)}")
    made = {
        "users": _users,
        "request_rate": _recorded_rate if recorded else _request_rate,
        "max_model_len": _max_model_len,
        "devices": _devices,
        "gpu_memory_utilization": _utilization,
    }[name](scenario)
    return made


def with_keys(scenario: Scenario, keys: Mapping[str, Any]) -> Scenario:
    """*scenario* with other values of dotted keys, checked. Raise ScenarioError."""
    flat: dict[str, Any] = {}
    for name in type(scenario).model_fields:
        value = getattr(scenario, name)
        if isinstance(value, Section):
            flat.update({f"{name}.{key}": getattr(value, key) for key in type(value).model_fields})
        else:
            flat[name] = value
    apart = any(flat[key] != value for key, value in keys.items() if key.startswith(("kv_cache.", "memory.")))
    renamed = {"kv_cache.preset": None} if apart else {}
    return Scenario.of({**flat, **renamed, **keys})


def nice_values(low: float, high: float) -> tuple[float, ...]:
    """Two or three digits, each at most 2.5 % above the one before, from *low* to *high*."""
    found = []
    for power in range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1):
        for first, last, step in _STEPS:
            found += [float(f"{(first + i * step) * 10.0**power:.6g}") for i in range(round((last - first) / step))]
    return tuple(value for value in found if low <= value <= high)


def _users(s: Scenario) -> Target:
    w = s.workload
    if w.trace is not None or w.model is not None or w.clients is not None or w.request_rate is not None:
        what = next(k for k in ("trace", "model", "clients", "request_rate") if getattr(w, k) is not None)
        raise ScenarioError(
            f"--target users: workload.{what} makes an open loop, where nobody waits for an answer; plan --target "
            f"request_rate, or leave workload.{what} out"
        )
    if w.ramp_up_strategy is not None:
        raise ScenarioError("--target users: workload.ramp_up_strategy makes an open loop; leave it out")
    values = tuple(int(value) for value in nice_values(1, MOST_USERS) if float(value).is_integer())
    assumed: tuple[Said, ...] = ()
    if w.users is not None and w.num_prompts is not None:
        each = max(1.0, w.num_prompts / w.users)
    else:
        each = float(REQUESTS_PER_USER)
        assumed = (Said.of(said.REQUESTS_EACH, count=REQUESTS_PER_USER),)

    def keys(value: Value) -> dict[str, Any]:
        return {"workload.users": int(value), "workload.num_prompts": min(MOST_PROMPTS, math.ceil(value * each))}

    return Target(
        name="users", values=values, keys_of=keys, unit="users", start=_place(values, w.users or 16), assumed=assumed
    )


def _request_rate(s: Scenario) -> Target:
    w = s.workload
    if w.users is not None:
        raise ScenarioError(
            "--target request_rate: workload.users makes a closed loop, which has no rate; plan --target users, or put "
            "workload.request_rate in its place"
        )
    if w.clients is not None or w.ramp_up_strategy is not None or w.multi_turn is not None:
        what = next(k for k in ("clients", "ramp_up_strategy", "multi_turn") if getattr(w, k) is not None)
        raise ScenarioError(
            f"--target request_rate: workload.{what} has rates of its own; put one workload.request_rate in its place"
        )
    own = w.request_rate if w.request_rate is not None and math.isfinite(w.request_rate) else None
    rate, count = own or REQUEST_RATE, w.num_prompts or NUM_PROMPTS
    values = nice_values(*RATES)
    assumed = () if own else (Said.of(said.REQUESTS_OF, seconds=count / rate, rate=rate),)

    def keys(value: Value) -> dict[str, Any]:
        prompts = min(MOST_PROMPTS, max(LEAST_REQUESTS, math.ceil(count * value / rate)))
        return {"workload.request_rate": float(value), "workload.num_prompts": prompts}

    return Target(
        name="request_rate",
        values=values,
        keys_of=keys,
        unit="sessions a second",
        start=_place(values, rate),
        assumed=assumed,
    )


def _recorded_rate(s: Scenario) -> Target:
    w = s.workload
    values = nice_values(*RATES)

    def keys(value: Value) -> dict[str, Any]:
        if w.trace is not None:
            return {"workload.time_scale": 1 / value}
        return {"workload.rate_scale": float(value)}

    return Target(
        name="request_rate",
        values=values,
        keys_of=keys,
        unit="times the recorded rate" if w.trace is not None else "times the learned rate",
        start=_place(values, 1 / w.time_scale if w.trace is not None else w.rate_scale),
        assumed=(Said.of(said.TRACE_CLOCK if w.trace is not None else said.MODEL_CLOCK),),
    )


def _max_model_len(s: Scenario) -> Target:
    most = catalog.model(s.model.name).max_position_embeddings
    found, length = [], LEAST_LENGTH
    while length < most:
        found.append(length)
        length += max(LEAST_LENGTH, 2 ** (length.bit_length() - 1) // LENGTHS_AN_OCTAVE)
    values = (*found, most)
    start = _place(values, s.engine.max_model_len or most)
    return Target(
        name="max_model_len",
        values=values,
        keys_of=lambda value: {"engine.max_model_len": int(value)},
        unit="tokens",
        start=start,
        end="all positions of the model",
        assumed=(Said.of(said.LONGER),),
    )


def _devices(s: Scenario) -> Target:
    model, device = catalog.model(s.model.name), device_of(s)
    sizes = sorted({1, s.engine.tensor_parallel_size, *device.allreduce_ns}, reverse=True)
    values = tuple(tp for tp in sizes if can_split(model, tp) and (tp == 1 or tp in device.allreduce_ns))
    stages = s.engine.pipeline_parallel_size
    assumed = [Said.of(said.ONE_REPLICA)]
    if stages > 1:
        assumed.append(Said.of(said.EACH_STAGE, stages=stages))
    return Target(
        name="devices",
        values=values,
        keys_of=lambda value: {"engine.tensor_parallel_size": int(value)},
        unit="devices" if stages == 1 else "devices a stage",
        smaller_is_better=True,
        start=_place(values, s.engine.tensor_parallel_size),
        end="there are no fewer",
        assumed=tuple(assumed),
    )


def _utilization(s: Scenario) -> Target:
    def keys(value: Value) -> dict[str, Any]:
        return {"engine.gpu_memory_utilization": float(value)}

    found = tuple(hundredths / 100 for hundredths in range(98, 4, -1))
    largest = next((value for value in found if starts(with_keys(s, keys(value)))), found[0])
    values = tuple(value for value in found if value <= largest)
    return Target(
        name="gpu_memory_utilization",
        values=values,
        keys_of=keys,
        unit="",
        smaller_is_better=True,
        start=_place(values, s.engine.gpu_memory_utilization),
    )


def starts(scenario: Scenario) -> bool:
    """Whether the server starts, by its budget alone. Raise ScenarioError."""
    try:
        ServerPlan(scenario)
    except DoesNotFit:
        return False
    except CatalogError as error:
        raise ScenarioError(str(error)) from None
    return True


def _place(values: tuple[Value, ...], wanted: float) -> int:
    """Where the nearest value lies."""
    return min(range(len(values)), key=lambda place: abs(values[place] - wanted))
