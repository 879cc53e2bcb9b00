"""A recorded run's own traffic through the simulator, and how far its times are from the recorded ones.

::

    quantity        measured                                   simulated                    aim
    makespan        first arrival to the last token            the same                     5 %
    TTFT p50, p99   first_token_ts less arrival                first token less arrival     10 %, 20 %
    TPOT p50, p99   last less first token / (tokens - 1)       the same                     10 %, 20 %

Arrivals are in another clock than tokens; the first request, which an idle server queues at once, ties the two.
Percentiles are linear, as numpy's. Traffic, settings and the device's figures are all that the simulation is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.served_runs.served_run import Interval, ServedRun, ServedRunError

AIMS = {
    "makespan_s": 0.05,
    "ttft_p50_s": 0.10,
    "ttft_p99_s": 0.20,
    "tpot_p50_s": 0.10,
    "tpot_p99_s": 0.20,
}
"""Relative error of each quantity that is aimed at."""
STAMPS = ("arrival_time", "queued_ts", "first_token_ts", "last_token_ts", "output_toks")

Vector = NDArray[np.float64]


class Times(NamedTuple):
    """Of every request, in order of arrival, in seconds since the first one."""

    arrival: Vector
    first_token: Vector
    last_token: Vector
    output_tokens: Vector

    def quantities(self) -> dict[str, float]:
        """The quantities of :data:`AIMS`."""
        ttft = self.first_token - self.arrival
        several = self.output_tokens > 1
        tpot = (self.last_token - self.first_token)[several] / (self.output_tokens[several] - 1)
        return {
            "makespan_s": float(self.last_token.max()),
            "ttft_p50_s": float(np.percentile(ttft, 50)),
            "ttft_p99_s": float(np.percentile(ttft, 99)),
            "tpot_p50_s": float(np.percentile(tpot, 50)),
            "tpot_p99_s": float(np.percentile(tpot, 99)),
        }


class Judged(NamedTuple):
    """One quantity, measured and simulated."""

    measured: float
    simulated: float
    aim: float

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.simulated / self.measured - 1

    @property
    def met(self) -> bool:
        """Whether the error is within the aim."""
        return abs(self.error) <= self.aim


def measured_times(path: Path) -> Times:
    """Those of a log of requests. O(requests log requests). Raise ServedRunError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ServedRunError(f"{path}: {error}") from None
    rows: list[list[float]] = []
    for text in lines:
        try:
            row = json.loads(text)
            rows.append([float(row[key]) for key in STAMPS])
        except (ValueError, KeyError, TypeError) as error:
            where = f"{path}, line {len(rows) + 1}"
            raise ServedRunError(f"{where}: {error!r}; each line has {', '.join(STAMPS)}") from None
    if not rows:
        raise ServedRunError(f"{path}: no requests in it")
    arrival, queued, first, last, tokens = np.array(sorted(rows)).T
    return Times(arrival - arrival[0], first - queued[0], last - queued[0], tokens)


def simulated_times(result: Result) -> Times:
    """Those of a simulation. Raise ServedRunError where a request was not served."""
    rows = result.requests.sort_values(["arrival_ns", "id"])
    if not (rows["status"] == "completed").all():
        raise ServedRunError("the simulation did not serve every request, so its times are not those of the run")
    arrival, first, last = (rows[key].to_numpy(float) / 1e9 for key in ("arrival_ns", "first_token_ns", "end_ns"))
    return Times(arrival, first, last, rows["output_tokens"].to_numpy(float))


def scenario_of(run: ServedRun, device: str) -> Scenario:
    """The scenario of a recorded run: its model, its settings, its arrivals and lengths.

    Raise ScenarioError, CatalogError. For ranks that step together see :attr:`ServerSettings.ranks`: no request takes
    more of a step than one of them could.
    """
    s = run.settings
    return Scenario.load(
        preset="paged",
        overrides=[
            f"model.name={run.model}",
            f"device.name={device}",
            f"engine.tensor_parallel_size={s.ranks}",
            f"engine.gpu_memory_utilization={s.gpu_memory_utilization}",
            f"scheduler.max_num_seqs={s.most_sequences}",
            f"scheduler.max_num_batched_tokens={s.most_tokens}",
            f"scheduler.long_prefill_token_threshold={s.max_num_batched_tokens if s.data_parallel_size > 1 else 0}",
            f"scheduler.async_scheduling={str(s.async_scheduling).lower()}",
            f"workload.trace={json.dumps(str(run.requests))}",
            "results.steps=true",
        ],
    )


def replay_run(run: ServedRun, device: DeviceSpec) -> Result:
    """Simulate a recorded run on a device, catalog figures or fitted ones. Raise ScenarioError, CatalogError."""
    scenario = scenario_of(run, device.name)
    plan = ServerPlan(scenario)
    cost = RooflineCost(
        plan.model,
        device,
        tensor_parallel_size=run.settings.ranks,
        kv_token_bytes=plan.layout.token_bytes,
        attention=scenario.engine.attention,
    )
    return Twin(scenario, cost=cost).run()


def judged(measured: Times, simulated: Times) -> dict[str, Judged]:
    """Each quantity of :data:`AIMS`, side by side."""
    theirs, ours = measured.quantities(), simulated.quantities()
    return {key: Judged(theirs[key], ours[key], aim) for key, aim in AIMS.items()}


def from_second(times: Times, since_s: float) -> Times:
    """Of those requests that ended after *since_s*; a fit to the seconds before has not seen their end."""
    later = times.last_token > since_s
    return Times(*(column[later] for column in times))


class Curves(NamedTuple):
    """Counts at the ends of a log's intervals."""

    end_s: Vector
    running: Vector
    waiting: Vector


def measured_curves(intervals: Sequence[Interval]) -> Curves:
    """As the log has them."""
    columns = (np.array([getattr(i, key) for i in intervals], float) for key in ("end_s", "running", "waiting"))
    return Curves(*columns)


def simulated_curves(result: Result, end_s: Vector) -> Curves:
    """The last counts of the simulation before each of these times."""
    line = result.timeline
    at = np.searchsorted(line["time_ns"].to_numpy(float) / 1e9, end_s, side="right") - 1
    return Curves(end_s, *(line[key].to_numpy(float)[at] for key in ("running", "waiting")))


def simulated_generation(result: Result, end_s: Vector) -> Vector:
    """Tokens generated a second in each interval, counted as a log counts them: at the end of their step."""
    steps = result.steps
    if steps is None:
        raise ServedRunError("the simulation kept no steps; set results.steps")
    moments, tokens = [result.requests["first_token_ns"].to_numpy(float)], [np.ones(len(result.requests))]
    for new, context, ends in zip(steps["new_tokens"], steps["context_tokens"], steps["step_ends_ns"], strict=True):
        decodes = sum(1 for count, before in zip(new, context, strict=True) if count == 1 and before)
        moments.append(np.asarray(ends, float))
        tokens.append(np.full(len(ends), float(decodes)))
    edges = np.concatenate([[0.0], end_s]) * 1e9
    counted, _ = np.histogram(np.concatenate(moments), edges, weights=np.concatenate(tokens))
    return np.asarray(counted / np.diff(edges) * 1e9, dtype=float)


def curve_errors(measured: Curves, simulated: Curves) -> Mapping[str, float]:
    """Mean absolute difference of each count, as a share of its largest measured value; 0 where that is 0."""
    errors = {}
    for key in ("running", "waiting"):
        theirs, ours = getattr(measured, key), getattr(simulated, key)
        errors[key] = float(np.mean(np.abs(theirs - ours)) / theirs.max()) if theirs.max() else 0.0
    return errors
