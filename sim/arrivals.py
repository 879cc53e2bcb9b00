"""From the keys of a scenario to its arrivals, for open traffic and for each client of it.

::

    request_rate, arrival_pattern, burstiness or cv     gaps
    rate_curve                                          a factor over time
    ramp_up_strategy, _start_rps, _end_rps              in place of request_rate
    rescale_gaps                                        the span is num_prompts / request_rate
    none of request_rate and ramp                       the built-in workload's rate, with its bursts
"""

from __future__ import annotations

import math

from hbmtwin.sim.scenario import ScenarioError
from hbmtwin.sim.traffic_sections import WorkloadSection
from hbmtwin.workloads.arrivals import Arrivals
from hbmtwin.workloads.builtin import BURSTS, REQUEST_RATE
from hbmtwin.workloads.gaps import Pattern, burstiness_of, gaps_of
from hbmtwin.workloads.rates import Ramp, RateCurve, rate_curve_from
from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.tables import naming


def arrivals_of(w: WorkloadSection) -> Arrivals:
    """The arrivals of open traffic. Raise ScenarioError where keys contradict each other, WorkloadError for figures."""
    pattern: Pattern = w.arrival_pattern or "gamma"
    burstiness = shape_of(pattern, w.burstiness, w.cv, "workload")
    curve, ramp = curve_of(w), _ramp_of(w)
    rate, bursts = w.request_rate, None
    if ramp is not None:
        if rate is not None and not math.isinf(rate):
            raise ScenarioError("workload.ramp_up_strategy: a ramp is the rate itself; leave workload.request_rate out")
        if curve is not None:
            raise ScenarioError("workload.rate_curve: a ramp is the rate itself; give one of the two")
        rate = math.inf
    elif rate is None:
        rate, bursts = REQUEST_RATE, BURSTS
    elif math.isinf(rate) and curve is not None:
        raise ScenarioError("workload.rate_curve: it multiplies workload.request_rate, which must then be finite")
    if w.rescale_gaps and not (ramp is None and bursts is None and curve is None):
        raise ScenarioError(
            "workload.rescale_gaps: it needs workload.request_rate, without a ramp or a rate_curve: the span of other "
            "traffic is not num_prompts / request_rate"
        )
    return Arrivals(rate, burstiness, bursts, pattern, curve, ramp, w.rescale_gaps)


def shape_of(pattern: Pattern, burstiness: float, cv: float | None, section: str) -> float:
    """Burstiness from whichever of the two was given. Raise ScenarioError for both, WorkloadError for a bad one."""
    if cv is None:
        with naming(f"{section}.burstiness"):
            gaps_of(pattern, burstiness)
        return burstiness
    if burstiness != 1:
        raise ScenarioError(f"{section}.cv: burstiness says the same; give one of the two")
    with naming(f"{section}.cv"):
        return burstiness_of(pattern, cv)


def curve_of(w: WorkloadSection) -> RateCurve | None:
    """The rate curve, if one was given. Raise WorkloadError."""
    if w.rate_curve is None:
        return None
    with naming("workload.rate_curve"):
        return rate_curve_from(w.rate_curve)


def _ramp_of(w: WorkloadSection) -> Ramp | None:
    start, end = w.ramp_up_start_rps, w.ramp_up_end_rps
    if w.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise ScenarioError(
                "workload.ramp_up_strategy: say linear or exponential, or leave out the rates of a ramp"
            )
        return None
    if start is None or end is None:
        raise ScenarioError("workload.ramp_up_strategy: a ramp needs ramp_up_start_rps and ramp_up_end_rps")
    try:
        return Ramp(w.ramp_up_strategy, start, end)
    except WorkloadError as error:
        raise ScenarioError(f"workload.ramp_up_strategy: {error}") from None
