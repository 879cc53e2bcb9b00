"""What a run must keep to hold: words of a command line, and which of it a row breaks.

::

    memory            no death, no standstill, nothing rejected for want of it, all traffic served
    preemptions       at most so many in a run
    ttft_p99=2s       a percentile of one run's completed requests is at most that
    margin 1%         left at the peak: of the device, and of the KV budget where a full one ends the server
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import NamedTuple

from hbmtwin.sim.scenario import ScenarioError
from hbmtwin.sim.sizes import parse_bytes
from hbmtwin.sim.sweep.run_row import LATENCIES, PERCENTILES, Row
from hbmtwin.workloads.suggest import did_you_mean

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
_SIZES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10), ("B", 1))
METRICS = tuple(f"{name}_p{percent}" for name in LATENCIES for percent in PERCENTILES)
"""What may be promised: columns of a row, without their unit."""
MEMORY = ("out_of_memory", "does_not_fit", "standstill", "rejected")
"""Outcomes that are broken for want of memory, or of a scheduler that goes on."""


class Slo(NamedTuple):
    """One service-level objective: a percentile and its limit."""

    metric: str
    limit_s: float

    def __str__(self) -> str:
        return f"{self.metric} <= {seconds(self.limit_s)}"


class Margin(NamedTuple):
    """What must be left at the peak: bytes, or a share of the device."""

    bytes: int = 0
    share: float = 0.0

    def of(self, capacity_bytes: int) -> int:
        """In bytes of a device."""
        return self.bytes + round(self.share * capacity_bytes)

    def __str__(self) -> str:
        if self.share:
            return f"{100 * self.share:g} %"
        unit, size = next(((u, s) for u, s in _SIZES if self.bytes >= s), ("GiB", 1 << 30))
        return f"{self.bytes / size:g} {unit}"


NO_MARGIN, ONE_PERCENT = Margin(), Margin(share=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What a run must keep."""

    slos: tuple[Slo, ...] = ()
    margin: Margin = NO_MARGIN
    max_preemptions: int | None = None
    """None: any number, which the SLOs will show."""
    kv_may_fill: bool = False
    """Whether a full KV cache only makes requests wait or give way; then the margin is the device's alone."""
    device_may_fill: bool = False
    """Whether the margin is that of the KV budget alone."""

    def broken(self, row: Row) -> tuple[str, ...]:
        """What that run breaks, the first the most telling: an outcome, ``preemptions``, an SLO, ``margin``."""
        outcome = str(row["outcome"])
        if outcome in MEMORY:
            return (outcome,)
        found = []
        if number(row, "requests_unfinished") or number(row, "requests_failed"):
            found.append("unfinished")
        if self.max_preemptions is not None and number(row, "preemptions") > self.max_preemptions:
            found.append("preemptions")
        for slo in self.slos:
            value = row[f"{slo.metric}_s"]
            if value is None or float(value) > slo.limit_s:
                found.append(slo.metric)
        if self.left_bytes(row) < self.margin.of(int(number(row, "capacity_bytes"))):
            found.append("margin")
        return tuple(found)

    def left_bytes(self, row: Row) -> float:
        """What the peak left of what may not fill: of the device, and of the KV budget; infinite where both may."""
        device = math.inf if self.device_may_fill else number(row, "least_free_bytes")
        return device if self.kv_may_fill else min(device, kv_left_bytes(row))


def number(row: Row, column: str) -> float:
    """A number of a row; 0 where there is none."""
    value = row[column]
    return 0.0 if value is None or isinstance(value, str) else float(value)


def kv_left_bytes(row: Row) -> int:
    """What of the KV budget nobody held when most of it was held."""
    return round(number(row, "kv_budget_bytes") * (1 - number(row, "kv_usage_peak")))


def parse_slos(text: str) -> tuple[Slo, ...]:
    """Read ``ttft_p99=2s,tpot_p99=80ms``. Raise ScenarioError for a name, number or unit that makes no sense."""
    found: dict[str, Slo] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, limit = (piece.strip() for piece in part.partition("="))
        name = name.lower().removesuffix("_s").replace("e2el", "e2e")
        if not equals:
            raise ScenarioError(f"--slo {part}: write it as ttft_p99=2s,tpot_p99=80ms")
        if name not in METRICS:
            known = f"{', '.join(LATENCIES)} with _p50, _p90, _p95 or _p99"
            hint = did_you_mean(name, METRICS)
            raise ScenarioError(f"--slo: {name!r} is no percentile of a latency ({known}); {hint}")
        if name in found:
            raise ScenarioError(f"--slo: {name} is given twice")
        found[name] = Slo(name, _seconds(part, limit))
    if not found:
        raise ScenarioError("--slo: empty; write it as ttft_p99=2s,tpot_p99=80ms")
    return tuple(found.values())


def _seconds(part: str, text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text)
    if match is None or match[2] not in _UNITS_S:
        raise ScenarioError(f"--slo {part}: a time is a number and its unit, such as 2s or 80ms, not {text!r}")
    value = float(match[1]) * _UNITS_S[match[2]]
    if not 0 < value <= 1e9:
        raise ScenarioError(f"--slo {part}: a time is above 0, and at most 1e9 s")
    return value


def parse_margin(text: str) -> Margin:
    """Read ``2%`` or ``1GiB``. Raise ScenarioError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is not None:
        share = float(match[1]) / 100
        if share >= 1:
            raise ScenarioError(f"--margin {text}: all of the device would be left free; take less than 100%")
        return Margin(share=share)
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ScenarioError(f"--margin {text}: {error}, or a share of the device such as 2%") from None
    if not isinstance(size, int):
        raise ScenarioError(f"--margin {text}: write bytes such as 1GiB, or a share of the device such as 2%")
    return Margin(bytes=size)


def seconds(value: float) -> str:
    """A time as people write it: ``2 s``, ``80 ms``."""
    return f"{value:.4g} s" if value >= 1 else f"{value * 1e3:.4g} ms"
