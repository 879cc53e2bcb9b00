"""What a replayed run came to: what was measured on what, and how far the prediction lay from it.

::

    memory    our allocator    beside the real one (emulated driver or device)      bytes after every step
    steps     the cost model   beside a decoder's whole steps (CPU or device)       ns of sampled steps
    kernels   the cost model   beside attention kernels alone (CPU or device)       ns of sampled steps

The two are never mixed: each part names what it was measured on, and a part that was not measured says why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hbmtwin.validation.allocator import difference_dict
from hbmtwin.validation.run_replay.errors import ErrorRow, error_row
from hbmtwin.validation.run_replay.kernels import KernelReplay
from hbmtwin.validation.run_replay.memory import MemoryReplay
from hbmtwin.validation.run_replay.step_report import StepReplay


@dataclass(frozen=True)
class RunReplay:
    """A result directory, replayed on one backend."""

    directory: str
    run: str
    """Model, device and policy in words."""
    backend: str
    versions: dict[str, str]
    """Of hbmtwin and of every package that took part."""
    memory: MemoryReplay | None
    memory_absent: str
    """Why there is no memory part; empty where there is one."""
    kernels: KernelReplay | None
    kernels_absent: str
    steps: StepReplay | None
    steps_absent: str

    @property
    def agrees(self) -> bool:
        """No difference in memory; times are reported, and judged by nobody."""
        return self.memory is None or self.memory.agrees

    @property
    def verdict(self) -> str:
        """In a few words."""
        if self.memory is None:
            what = "attention" if self.steps is None else "steps"
            return f"{what} only: times are reported, not judged"
        return "no difference in memory" if self.agrees else "memory differs from the real one"

    @property
    def measured_on(self) -> dict[str, str]:
        """Part by part."""
        return {
            "memory": self.memory.against if self.memory else "",
            "kernels": self.kernels.measured_on if self.kernels else "",
            "steps": self.steps.measured_on if self.steps else "",
        }

    def memory_errors(self) -> tuple[ErrorRow, ...]:
        """One row for each of the sampled numbers."""
        m = self.memory
        if m is None:
            return ()
        return tuple(error_row(name, m.steps, m.predicted[name], m.measured[name]) for name in m.measured)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "directory": self.directory,
            "run": self.run,
            "backend": self.backend,
            "versions": self.versions,
            "measured_on": self.measured_on,
            "agrees": self.agrees,
            "memory": None if self.memory is None else self._memory_dict(self.memory),
            "memory_absent": self.memory_absent,
            "kernels": None if self.kernels is None else self.kernels.to_dict(),
            "kernels_absent": self.kernels_absent,
            "step_times": None if self.steps is None else self.steps.to_dict(),
            "step_times_absent": self.steps_absent,
        }

    def _memory_dict(self, m: MemoryReplay) -> dict[str, Any]:
        difference = m.case.difference
        return {
            "operations": m.case.operations,
            "numbers_compared": m.case.operations * m.case.counters + sum(check.compared for check in m.checks),
            "difference": None if difference is None else difference_dict(difference),
            "checks": [check._asdict() for check in m.checks],
            "ooms": m.ooms,
            "oom": {**m.oom._asdict(), "same": m.oom.same},
            "run_ended_by": m.ended_by,
            "errors": [row._asdict() for row in self.memory_errors()],
            "steps": {
                "step": m.steps.tolist(),
                "predicted": {name: series.tolist() for name, series in m.predicted.items()},
                "measured": {name: series.tolist() for name, series in m.measured.items()},
            },
            "not_compared": list(m.not_compared),
        }
