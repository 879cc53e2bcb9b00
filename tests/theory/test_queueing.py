"""The server judged by queueing theory: one request at a time makes it an M/G/1 queue, whose mean wait is known."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

import pytest

from hbmtwin.kernels.fixed_point import ticks
from hbmtwin.kernels.records import BatchShape
from hbmtwin.kernels.step_times import StepTimes
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

STEP_NS = 10_000_000
STUDENT_99_9_OF_11 = 4.437
"""Two-sided 99.9 % quantile of Student's t with 11 degrees of freedom."""


class ConstantCost:
    """Every step takes 10 ms, so a request of n output tokens takes n times that (its prompt goes with the first)."""

    basis = "constant, for theory"

    def steps(self, b: BatchShape) -> StepTimes:
        return StepTimes(0, ticks(STEP_NS))

    def work_ns(self, *, driver_calls: int, syncs: int, copied_bytes: int, swapped_bytes: int) -> int:
        return 0


def queue(output_tokens: str, *, rate: float, seed: int, seqs: int = 1, interval_s: float = 1000) -> Scenario:
    return Scenario.load(
        seed=seed,
        overrides=[
            f"workload.request_rate={rate}",
            "workload.num_prompts=2000",
            "workload.prompt_tokens=10",
            f"workload.output_tokens={output_tokens}",
            "workload.system_prompt_tokens=0",
            "session.turns=1",
            f"scheduler.max_num_seqs={seqs}",
            f"results.interval_s={interval_s}",
        ],
    )


def mean_waits(scenarios: Iterable[Scenario], cost: ConstantCost) -> list[float]:
    """Mean time in the queue of each run, in seconds, its first 200 requests left out."""
    waits = []
    for scenario in scenarios:
        settled = Twin(scenario, cost=cost).run().requests.iloc[200:]
        waits.append(float((settled["scheduled_ns"] - settled["arrival_ns"]).mean()) / 1e9)
    return waits


def half_width(values: list[float]) -> float:
    """Of the 99.9 % confidence interval of their mean."""
    return STUDENT_99_9_OF_11 * statistics.stdev(values) / math.sqrt(len(values))


@pytest.mark.parametrize(
    ("spec", "mean_s", "mean_square_s2"),
    [
        ("50", 0.5, 0.25),  # M/D/1
        ('{distribution="uniform",low=1,high=99}', 0.5, (99 * 100 * 199 / 6 / 99) * 1e-4),
    ],
)
@pytest.mark.parametrize("load", [0.5, 0.8])
def test_mean_wait_is_pollaczek_khinchine(spec: str, mean_s: float, mean_square_s2: float, load: float) -> None:
    rate = load / mean_s
    expected = rate * mean_square_s2 / (2 * (1 - load))
    waits = mean_waits((queue(spec, rate=rate, seed=seed) for seed in range(12)), ConstantCost())
    assert half_width(waits) < 0.35 * expected
    assert abs(statistics.mean(waits) - expected) < half_width(waits)


def test_a_server_that_wastes_time_on_every_request_fails_the_same_test() -> None:
    class Slower(ConstantCost):
        def steps(self, b: BatchShape) -> StepTimes:
            return StepTimes(0, ticks(STEP_NS * 6 if b.prefill else STEP_NS))

    expected = 1.6 * 0.25 / (2 * (1 - 0.8))
    waits = mean_waits((queue("50", rate=1.6, seed=seed) for seed in range(12)), Slower())
    assert abs(statistics.mean(waits) - expected) > half_width(waits)


def test_littles_law() -> None:
    """Mean number in the server = arrival rate times mean time in it; the two sides come from different tables."""
    scenario = queue('{distribution="uniform",low=1,high=99}', rate=6.0, seed=3, seqs=4, interval_s=0.05)
    result = Twin(scenario, cost=ConstantCost()).run()
    timeline, requests = result.timeline, result.requests
    time = timeline["time_ns"].to_numpy(dtype="float64")
    inside = (timeline["running"] + timeline["waiting"]).to_numpy(dtype="float64")
    area = float((((inside[1:] + inside[:-1]) / 2) * (time[1:] - time[:-1])).sum())
    sojourn = float((requests["end_ns"] - requests["arrival_ns"]).sum())
    assert area == pytest.approx(sojourn, rel=0.01)
