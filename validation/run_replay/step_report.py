"""What the steps of a run came to on a real decoder: times step by step, their errors, and what they add up to.

::

    error of a step     |predicted - measured| / measured          all, by kind of step, of attention
    sum of the run      predicted: of every step
                        measured:  that, times what the measured steps took by what was predicted for them,
                                   each counted for as many as it stands for
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hbmtwin.validation.run_replay.errors import ErrorRow, error_row
from hbmtwin.validation.run_replay.sampling import KINDS, StepKind

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StepReplay:
    """Measured steps of a run."""

    measured_on: str
    predicted_for: str
    basis: str
    """Of the prediction: ``default, uncalibrated``, or on what it was calibrated."""
    same_device: bool
    """The prediction is for the device that was measured."""
    clock: str
    steps: Ints
    kinds: tuple[StepKind, ...]
    sequences: Ints
    """Of each step's batch."""
    stands_for: Floats
    """Steps of the run, for each that was measured."""
    predicted_ns: Ints
    measured_ns: Ints
    """Of all layers, medians: scaled where fewer were measured."""
    least_ns: Ints
    """The least of each step's rounds, which another's load on the machine lengthens least."""
    predicted_attention_ns: Ints | None
    """None: the cost model does not tell it apart."""
    measured_attention_ns: Ints
    num_layers: int
    layers_measured: int
    at_depth_ns: Ints
    """Through the layers that were measured, unscaled."""
    without_layers_ns: Ints
    """Through none; empty where all layers were measured."""
    total_steps: int
    total_predicted_ns: int
    """Of every step of the run."""
    left_out: int
    """Chosen, and not measured: time was up."""
    notes: tuple[str, ...]

    @property
    def factor(self) -> float | None:
        """Median of measured by predicted."""
        if not len(self.measured_ns):
            return None
        return float(np.median(self.measured_ns / np.maximum(1, self.predicted_ns)))

    @property
    def layers_in_words(self) -> str:
        """``all 32 layers``, ``8 of 32 layers``."""
        if self.layers_measured == self.num_layers:
            return f"all {self.num_layers} layers"
        return f"{self.layers_measured} of {self.num_layers} layers"

    @property
    def total_measured_ns(self) -> int | None:
        """What all steps of the run would take, by those that were measured; None without one."""
        return self._total_ns(self.measured_ns)

    @property
    def total_least_ns(self) -> int | None:
        """The same by the least of the rounds."""
        return self._total_ns(self.least_ns)

    def _total_ns(self, times_ns: Ints) -> int | None:
        predicted = float((self.stands_for * self.predicted_ns).sum())
        if not predicted:
            return None
        return round(self.total_predicted_ns * float((self.stands_for * times_ns).sum()) / predicted)

    @property
    def total_error_percent(self) -> float | None:
        """Of the predicted sum, by the measured one."""
        measured = self.total_measured_ns
        return 100 * (self.total_predicted_ns - measured) / measured if measured else None

    @property
    def attention_shares(self) -> tuple[float | None, float | None]:
        """Of attention in the measured steps' time: predicted and measured, each by what steps stand for."""
        found: list[float | None] = []
        pairs = (self.predicted_attention_ns, self.predicted_ns), (self.measured_attention_ns, self.measured_ns)
        for part, whole in pairs:
            total = float((self.stands_for * whole).sum())
            found.append(None if part is None or not total else float((self.stands_for * part).sum()) / total)
        return found[0], found[1]

    @property
    def in_words(self) -> tuple[str, ...]:
        """What it comes to, in a sentence each."""
        measured, error, factor = self.total_measured_ns, self.total_error_percent, self.factor
        if measured is None or error is None or factor is None:
            return ()
        ours, theirs = self.total_predicted_ns / 1e9, measured / 1e9
        extrapolated = "" if len(self.steps) == self.total_steps else ", by those that were measured"
        if self.same_device:
            both = f"predicted {ours:,.3f} s, measured {theirs:,.3f} s{extrapolated}: {error:+.1f} %"
            least = self.total_least_ns or measured
            found = [
                f"All {self.total_steps:,} steps: {both}. By the least of the rounds {least / 1e9:,.3f} s: what a busy "
                "machine adds is the difference."
            ]
        else:
            times = f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"
            found = [
                f"Another device than the prediction is for: measured times are {times} times the predicted ones "
                f"(median); errors are those behind this one factor. All {self.total_steps:,} steps: predicted "
                f"{ours:,.3f} s there, measured {theirs:,.3f} s here{extrapolated}."
            ]
        shares = self.attention_shares
        if shares[1] is not None:
            said = "not told apart" if shares[0] is None else f"{shares[0]:.1%}"
            found.append(f"Attention's share of a step: predicted {said}, measured {shares[1]:.1%}.")
        return tuple(found)

    def errors(self) -> tuple[ErrorRow, ...]:
        """In ns: as predicted for the device that was measured, else behind the one factor."""
        factor = self.factor
        if factor is None:
            return ()
        behind = "" if self.same_device else ", behind one factor"
        scale = 1.0 if self.same_device else factor
        predicted = np.rint(self.predicted_ns * scale).astype(np.int64)
        rows = [error_row(f"step time (ns){behind}", self.steps, predicted, self.measured_ns)]
        if self.same_device:
            rows.append(error_row("  by the least of the rounds", self.steps, predicted, self.least_ns))
        for kind in KINDS:
            own = np.array([k == kind for k in self.kinds])
            if own.any() and not own.all():
                rows.append(
                    error_row(f"  {kind} steps{behind}", self.steps[own], predicted[own], self.measured_ns[own])
                )
        if self.predicted_attention_ns is not None:
            attention = np.rint(self.predicted_attention_ns * scale).astype(np.int64)
            rows.append(error_row(f"  attention in them{behind}", self.steps, attention, self.measured_attention_ns))
        return tuple(rows)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        attention = self.predicted_attention_ns
        shares = self.attention_shares
        return {
            "measured_on": self.measured_on,
            "predicted_for": self.predicted_for,
            "basis": self.basis,
            "same_device": self.same_device,
            "clock": self.clock,
            "num_layers": self.num_layers,
            "layers_measured": self.layers_measured,
            "factor": self.factor,
            "errors": [row._asdict() for row in self.errors()],
            "steps_of_the_run": self.total_steps,
            "steps_left_out": self.left_out,
            "total_predicted_ns": self.total_predicted_ns,
            "total_measured_ns": self.total_measured_ns,
            "total_least_ns": self.total_least_ns,
            "total_error_percent": self.total_error_percent,
            "attention_share": {"predicted": shares[0], "measured": shares[1]},
            "steps": {
                "step": self.steps.tolist(),
                "kind": list(self.kinds),
                "sequences": self.sequences.tolist(),
                "stands_for": self.stands_for.tolist(),
                "predicted_ns": self.predicted_ns.tolist(),
                "measured_ns": self.measured_ns.tolist(),
                "least_ns": self.least_ns.tolist(),
                "predicted_attention_ns": None if attention is None else attention.tolist(),
                "measured_attention_ns": self.measured_attention_ns.tolist(),
                "measured_at_depth_ns": self.at_depth_ns.tolist(),
                "measured_without_layers_ns": self.without_layers_ns.tolist(),
            },
            "notes": list(self.notes),
        }
