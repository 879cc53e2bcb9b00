"""The answer of a plan: numbers for programs, and the sentences that people read, made of the same numbers.

::

    verdict    how many, how often it holds, how sure that is
    margin     what the peak left
    binding    which limit is in force beyond
    one more   what another user costs
    changes    what carries farther
    leaning    which assumption decides
    order      whether more load was ever better
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hbmtwin.sim.capacity.binding import Binding
from hbmtwin.sim.capacity.changes import Change
from hbmtwin.sim.capacity.leaning import Leaning
from hbmtwin.sim.capacity.plan_targets import Target, Value
from hbmtwin.sim.phrases import Said

Kind = Literal["found", "unbounded", "nothing_holds", "not_shown"]


class Tried(NamedTuple):
    """What was seen at one value."""

    value: Value
    held: int
    trials: int
    low: float
    high: float
    """Bounds of the probability that such a run holds, at the plan's confidence, this value alone."""
    decided: bool | None
    """Whether it holds often enough: by counted runs; None: not decided, or only scouted."""
    counted: bool


class Peak(NamedTuple):
    """Of the runs at the answer, the worst of them."""

    peak_reserved_bytes: int
    capacity_bytes: int
    device_left_bytes: int
    kv_usage: float
    kv_budget_bytes: int
    kv_left_bytes: int
    most_running: int
    preemptions: int
    refused: int = 0
    """Requests of a run that were refused for their length, the most of a run, and all of that run."""
    requests: int = 0


class OneMore(NamedTuple):
    """What one more costs, from two values with the same draws: one user, or about a tenth of a rate."""

    from_value: Value
    to_value: Value
    by: Value
    """How many more."""
    kv_bytes: float
    ttft_p99_s: float
    tpot_p99_s: float
    tpot_p50_s: float
    then_breaks: Mapping[str, int]
    """What runs break at the next value, by kind."""
    next_value: Value | None
    next_trials: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityPlan:
    """The answer for one scenario."""

    name: str
    target: Target
    kind: Kind
    answer: Value | None
    """The value that was shown to hold often enough; None: none was."""
    first_failing: Value | None
    """The first value that was shown not to; None: none was."""
    upper: Value | None = None
    """Of ``gpu_memory_utilization``: the largest that holds and keeps the margin."""
    serves: Value | None = None
    """Of the same, where no share keeps the margin: the smallest that serves the traffic. The peak is its own."""
    survive: float
    confidence: float
    chance: bool
    """Whether runs differ by their draws at all."""
    slos: tuple[str, ...]
    margin: str
    max_preemptions: int | None
    tried: tuple[Tried, ...]
    runs: int
    gave_up: bool
    out_of_order: tuple[tuple[Value, Value], ...]
    checked: tuple[Value, ...]
    """Values below and above the answer at which order was checked."""
    latencies: Mapping[str, float | None]
    """Percentiles at the answer: the mean over its runs."""
    best_missed: Mapping[str, float | None]
    """Where nothing holds: what the easiest value reached of each SLO."""
    breaks: Mapping[str, int] = field(default_factory=dict)
    """Where nothing holds: how many runs of the easiest value broke what first."""
    peak: Peak | None = None
    binding: Binding | None = None
    one_more: OneMore | None = None
    changes: tuple[Change, ...] | None = None
    """None: not tried."""
    leaning: Leaning | None = None
    basis: str = ""
    notes: tuple[Said, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """All of it, in plain numbers: the same bytes for the same scenario, seed and version."""
        leaning = self.leaning
        return {
            "name": self.name,
            "target": self.target.name,
            "kind": self.kind,
            "answer": self.answer,
            "first_failing": self.first_failing,
            "upper": self.upper,
            "serves": self.serves,
            "survive": self.survive,
            "confidence": self.confidence if self.chance else None,
            "promise": {"slos": list(self.slos), "margin": self.margin, "max_preemptions": self.max_preemptions},
            "tried": [t._asdict() for t in self.tried],
            "runs": self.runs,
            "gave_up": self.gave_up,
            "out_of_order": [{"easier": a, "harder": b} for a, b in self.out_of_order],
            "checked": list(self.checked),
            "latencies_s": dict(self.latencies),
            "best_missed": dict(self.best_missed),
            "breaks": dict(self.breaks),
            "peak": None if self.peak is None else self.peak._asdict(),
            "binding": None if self.binding is None else _binding(self.binding),
            "one_more": None
            if self.one_more is None
            else {**self.one_more._asdict(), "then_breaks": dict(self.one_more.then_breaks)},
            "changes": None if self.changes is None else [c._asdict() for c in self.changes],
            "leaning": None if leaning is None else _leaning(leaning),
            "basis": self.basis,
            "notes": [note.text() for note in self.notes],
        }


def _binding(binding: Binding) -> dict[str, Any]:
    found = binding._asdict()
    return {
        **found,
        "broken": dict(binding.broken),
        "causes": dict(binding.causes),
        "numbers": dict(binding.numbers),
        "relaxed": [r._asdict() for r in binding.relaxed],
    }


def _leaning(leaning: Leaning) -> dict[str, Any]:
    return {
        "answer": leaning.answer,
        "draws": leaning.draws,
        "worst": leaning.worst,
        "figures": [
            {
                "name": lean.assumption.name,
                "value": lean.assumption.ends.value,
                "low": lean.assumption.ends.low,
                "high": lean.assumption.ends.high,
                "basis": lean.assumption.basis,
                "answer_at_low": lean.low,
                "answer_at_high": lean.high,
            }
            for lean in leaning.leans
        ],
        "still": [a.name for a in leaning.still],
    }
