"""Holds the simulated caching allocator to the real one: both sides on the same traces, every counter every time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hbmtwin.sim.replay import ReplayError
from hbmtwin.validation.comparison import Difference, first_difference, segment_lines
from hbmtwin.validation.configurations import CONFIGURATIONS
from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealRun
from hbmtwin.validation.emulated.records import OUTCOMES
from hbmtwin.validation.legality import check_trace
from hbmtwin.validation.simulated import simulate
from hbmtwin.workloads.formats.memory_trace import MemoryOp, read_memory_trace

BESIDE_STATISTICS = 3
"""Numbers compared at each operation besides the statistics: address, outcome, and the driver's bytes in use."""
OPERATIONS = 240_000
"""Of all made-up traces together, unless told otherwise."""


@dataclass(frozen=True, slots=True)
class Case:
    """One trace and the device that it is for."""

    name: str
    ops: Sequence[MemoryOp]
    settings: NpuSettings


@dataclass(frozen=True, slots=True)
class CaseReport:
    """How one case went."""

    name: str
    operations: int
    ooms: int
    counters: int
    """Numbers compared at each operation."""
    difference: Difference | None


@dataclass(frozen=True, slots=True)
class Report:
    """What was compared with what, and how it went."""

    against: str
    cases: tuple[CaseReport, ...]
    skipped: tuple[tuple[str, str], ...] = ()
    """Cases of which nothing could be run, and why."""

    @property
    def operations(self) -> int:
        """All of them."""
        return sum(case.operations for case in self.cases)

    @property
    def numbers(self) -> int:
        """Compared numbers, all operations together."""
        return sum(case.operations * case.counters for case in self.cases)

    @property
    def differing(self) -> tuple[CaseReport, ...]:
        """Cases with a difference."""
        return tuple(case for case in self.cases if case.difference is not None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "against": self.against,
            "operations": self.operations,
            "ooms": sum(case.ooms for case in self.cases),
            "numbers_compared": self.numbers,
            "differences": len(self.differing),
            "cases": [
                {
                    "name": case.name,
                    "operations": case.operations,
                    "ooms": case.ooms,
                    "counters": case.counters,
                    "difference": None if case.difference is None else difference_dict(case.difference),
                }
                for case in self.cases
            ],
            "skipped": dict(self.skipped),
        }


class Backend(Protocol):
    """A real allocator that can be asked to do a trace, and our side of the same thing."""

    against: str
    """What stands on the other side, in words."""

    def refuses(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> str:
        """Why it cannot run a trace; empty if it can."""
        ...

    def both(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> tuple[RealRun, RealRun]:
        """Our run and the real one."""
        ...

    same_driver: bool
    """Both sides see the same driver: its free bytes, and so the texts of OutOfMemory, must be equal as well."""


class EmulatedBackend:
    """The real torch_npu wheel over the emulated driver."""

    same_driver = True

    def __init__(self, npu: EmulatedNpu, ours: Callable[[Sequence[MemoryOp], NpuSettings], RealRun] = simulate) -> None:
        self.npu = npu
        self.ours = ours
        self.against = "torch_npu 2.13.0 on the emulated driver"

    def refuses(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> str:
        """Nothing."""
        return ""

    def both(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> tuple[RealRun, RealRun]:
        """Our run and the real one, with its trace entries."""
        real = self.npu.replay(ops, settings, entries=True)
        return self.ours(ops, settings), real


def made_up(operations: int = OPERATIONS, seed: int = 0) -> Iterator[Case]:
    """A case per configuration of :mod:`hbmtwin.validation.configurations`, about *operations* together."""
    each = -(-operations // len(CONFIGURATIONS))
    for c in CONFIGURATIONS:
        settings = NpuSettings(capacity_bytes=c.capacity_bytes, alloc_conf=c.alloc_conf, soc=c.soc, cann=c.cann)
        yield Case(c.name, c.trace(each, seed), settings)


def from_files(paths: Iterable[Path], settings: NpuSettings) -> Iterator[Case]:
    """A case per trace file. Raise WorkloadError."""
    for path in paths:
        yield Case(str(path), list(read_memory_trace(path)), settings)


def validate(cases: Iterable[Case], backend: Backend, *, done: Callable[[CaseReport], None] | None = None) -> Report:
    """Run both sides of each case and compare; *done* is called with each report as it comes.

    A case whose settings both sides refuse alike is skipped with both reasons; refused otherwise it differs. Raise
    ReplayError with the case's name for a trace that is not legal.
    """
    reports, skipped = [], []
    for case in cases:
        why_not = backend.refuses(case.ops, case.settings)
        if why_not:
            skipped.append((case.name, why_not))
            continue
        check_trace(case.name, case.ops)
        report = _report(case, backend)
        if isinstance(report, str):
            skipped.append((case.name, report))
            continue
        reports.append(report)
        if done is not None:
            done(report)
    return Report(backend.against, tuple(reports), tuple(skipped))


def _report(case: Case, backend: Backend) -> CaseReport | str:
    """How it went, or why nothing could be run."""
    try:
        ours, real = backend.both(case.ops, case.settings)
    except ReplayError as unsafe:
        raise ReplayError(f"{case.name}: {unsafe}") from None
    difference = first_difference(case.ops, ours, real, same_driver=backend.same_driver)
    mine, theirs = ours.setup_error, real.setup_error
    if difference is None and mine is not None and theirs is not None:
        return (
            f"both sides refuse the settings {case.settings.alloc_conf!r}, so nothing was run "
            f"(ours {mine.kind}: {mine.text}; real {theirs.kind}: {theirs.text}); "
            "correct the settings"
        )
    if difference is not None and difference.operation >= 0:
        difference = _with_states(difference, case, backend)
    return CaseReport(
        name=case.name,
        operations=len(real.results),
        ooms=int(np.count_nonzero(real.results["outcome"] == OUTCOMES.index("oom"))),
        counters=len(real.stat_names) + BESIDE_STATISTICS,
        difference=difference,
    )


def _with_states(difference: Difference, case: Case, backend: Backend) -> Difference:
    """Run both sides up to the difference, and past it, for what they held."""
    at = difference.operation
    before = [segment_lines(run) for run in backend.both(case.ops[:at], case.settings)]
    after = [segment_lines(run) for run in backend.both(case.ops[: at + 1], case.settings)]
    return replace(difference, before_ours=before[0], before_real=before[1], after_ours=after[0], after_real=after[1])


def difference_dict(d: Difference) -> dict[str, Any]:
    """A difference as JSON values."""
    return {
        "operation": d.operation,
        "op": None if d.op is None else dict(zip(d.op._fields[:5], d.op[:5], strict=True)),
        "what": [{"name": name, "ours": ours, "real": real} for name, ours, real in d.what],
        "before": {"ours": d.before_ours, "real": d.before_real},
        "after": {"ours": d.after_ours, "real": d.after_real},
    }
