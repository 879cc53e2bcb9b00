"""A finished run beside the real allocator: its own operations once more, and every number of both sides.

::

    the run:      plan -> set-up operations | steps ... | death            books at step ends, maps, peaks: witnesses
                                |  the same operations, the same cap, the same bytes beside
    ours again:   statistics after every operation    --- first_difference ---    the real one's
                                                                                     |  every witness is held to them

Three parties must agree: our allocator on the trace and the real one, number by number; the trace and the forward
program (:mod:`hbmtwin.validation.run_replay.program`); and the books that the run itself wrote and what the real one
held. An operation that is lost, has another size or stands elsewhere is told by at least one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hbmtwin.kernels.activations import ActivationModel
from hbmtwin.validation.allocator import Backend, CaseReport, validate
from hbmtwin.validation.emulated import NpuSettings, RealRun
from hbmtwin.validation.emulated.records import OUTCOMES
from hbmtwin.validation.run_replay.case import NotReplayable, Setup, case_of
from hbmtwin.validation.run_replay.program import Misplaced, Pass, passes, stray_frees
from hbmtwin.validation.run_replay.region import RegionState, hold_region
from hbmtwin.validation.run_replay.source import RecordedRun
from hbmtwin.validation.run_replay.witness import Check, Held, witnesses
from hbmtwin.workloads.formats.memory_trace import MemoryOp

SERIES = ("reserved", "allocated", "requested", "driver_free")
"""What is sampled after every step, in bytes: ``memory_stats`` and the first number of ``mem_get_info``."""
FREE_BYTES = (
    "The free bytes of mem_get_info, and the text of an out-of-memory error that names them: they depend on the "
    "device's size and on what else runs there."
)
_OOM = OUTCOMES.index("oom")

Ints = NDArray[np.int64]


class OomPoint(NamedTuple):
    """Where memory ran out first."""

    predicted: int
    """Row of the trace; -1: nowhere."""
    measured: int
    step: int
    """Of the measured one; -1 where there is none."""
    message: str
    """The real one's text at its first."""

    @property
    def same(self) -> bool:
        """Both at the same operation, or both nowhere."""
        return self.predicted == self.measured


@dataclass(frozen=True)
class MemoryReplay:
    """How the memory of a run came out."""

    against: str
    case: CaseReport
    checks: tuple[Check, ...]
    oom: OomPoint
    ooms: int
    ended_by: str
    """What the run says of its end: an allocator's refusal, a policy's, or nothing."""
    steps: Ints
    """Numbers of the steps sampled."""
    predicted: dict[str, Ints]
    measured: dict[str, Ints]
    """Of each of :data:`SERIES` one value a step; a device's free bytes are not among those compared."""
    passes: tuple[Pass, ...]
    not_compared: tuple[str, ...]
    """In sentences."""

    @property
    def agrees(self) -> bool:
        """No difference, no witness against it, memory out at the same operation."""
        return self.case.difference is None and self.oom.same and not any(check.differing for check in self.checks)

    @property
    def oom_in_words(self) -> str:
        """Where memory ran out first, on both sides."""
        oom = self.oom
        if not oom.same:
            predicted, measured = ("nowhere" if row < 0 else f"at operation {row:,}" for row in oom[:2])
            where = f"predicted {predicted}, measured {measured}"
        else:
            where = (
                "nowhere, on both sides" if oom.measured < 0 else f"first at operation {oom.measured:,}, on both sides"
            )
        return where + (f"; the run ended there: {self.ended_by}" if self.ended_by else "")


class _Keeping:
    """A backend that keeps the first pair of runs."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.against, self.same_driver = backend.against, backend.same_driver
        self.runs: tuple[RealRun, RealRun] | None = None

    def refuses(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> str:
        return self._backend.refuses(ops, settings)

    def both(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> tuple[RealRun, RealRun]:
        runs = self._backend.both(ops, settings)
        if self.runs is None:
            self.runs = runs
        return runs


def replay_memory(run: RecordedRun, backend: Backend, setup: Setup) -> MemoryReplay:
    """Do the run's operations on both sides and hold everything to everything. Raise NotReplayable, ReplayError."""
    case, index_of = case_of(run, setup, told=backend.same_driver)
    keeping = _Keeping(backend)
    report = validate([case], keeping)
    if not report.cases:
        raise NotReplayable(f"{backend.against} cannot do this run: {report.skipped[0][1]}")
    assert keeping.runs is not None
    ours, real = keeping.runs
    region: list[RegionState] = []
    region_check: list[Check] = []
    region_words: list[str] = []
    if setup.region_bytes:
        arena = setup.memory.arena
        region, region_check, region_words = hold_region(arena, run.ops.get(arena.name, ()))
    ends, numbers = _step_ends(run)
    predicted, measured = (_series(x, index_of, ends, setup) for x in (ours, real))
    predicted = {name: series for name, series in predicted.items() if name in measured}
    placed, places = _passes(run, setup)
    checks = [_check_setup(run, setup), _check_stamps(run), places, *region_check]
    if report.cases[0].difference is None or len(real.stats) == len(case.ops):
        held = _held(real, index_of, region, setup)
        checks += witnesses(run, held, real, setup.memory, same_driver=backend.same_driver)
    return MemoryReplay(
        against=backend.against,
        case=report.cases[0],
        checks=tuple(checks),
        oom=_oom_point(run, ours, real, index_of, region),
        ooms=int(np.count_nonzero(real.results["outcome"] == _OOM)) + sum(state.oom for state in region),
        ended_by=_ended_by(run),
        steps=numbers,
        predicted=predicted,
        measured=measured,
        passes=placed,
        not_compared=(*_left_out(run), *region_words, *([] if backend.same_driver else [FREE_BYTES])),
    )


def _step_ends(run: RecordedRun) -> tuple[Ints, Ints]:
    """The last row of each step that is wholly there, -1 in front of the first; and the steps' numbers."""
    steps = run.steps
    numbers = steps["step"].to_numpy(dtype=np.int64)
    ends = np.searchsorted(run.rows.step, numbers + steps["repeat"].to_numpy(dtype=np.int64) - 1, "right") - 1
    whole = np.ones(len(numbers), bool) if run.is_whole else ends < len(run.rows) - 1
    return ends[whole], numbers[whole]


def _series(side: RealRun, index_of: Ints, ends: Ints, setup: Setup) -> dict[str, Ints]:
    """SERIES at the *ends* of steps, as far as that side came."""
    found = {}
    at = index_of[ends] if len(index_of) else ends
    at = at[at < len(side.stats)]
    for name in SERIES[:3]:
        found[name] = side.stat(f"{name}_bytes.all.current")[at] if len(side.stats) else np.empty(0, np.int64)
    driver, held = setup.memory.driver, side.results["driver_bytes"][at]
    if (held >= 0).all():
        beside = setup.memory.static_bytes + driver.tenants_bytes + setup.region_bytes
        found["driver_free"] = driver.capacity_bytes - beside - held
    return found


# -- witnesses ---------------------------------------------------------------------------------------------------------


def _check_setup(run: RecordedRun, setup: Setup) -> Check:
    """The run began with the tensors that this release loads."""
    trace = setup.memory.recorder.memory_trace()
    assert trace is not None
    n = min(len(trace), len(run.rows))
    differ = np.zeros(n, bool)
    for name in ("op", "id", "size", "tag", "allocator"):
        differ |= trace[name].to_numpy()[:n] != getattr(run.rows, name)[:n]
    missing = len(trace) - n if run.is_whole else 0
    first = ""
    if differ.any():
        i = int(differ.argmax())
        asked, found = trace.iloc[i], run.rows
        first = (
            f"operation {i}: this release asks for {asked['op']} of {asked['size']} bytes ({asked['tag']}), the trace "
            f"has {found.op[i]} of {found.size[i]} ({found.tag[i]})"
        )
    elif missing:
        first = f"the trace ends within the set-up, {missing} operations early"
    return Check("weights and pools, as planned", n + missing, int(differ.sum()) + missing, first)


def _check_stamps(run: RecordedRun) -> Check:
    """Operations are stamped with steps that the table of steps has, or with the one that would come behind its last:
    what is given back at the end, and a pass that failed. With tensors in each step, each step has some."""
    steps, stamps = run.steps, run.rows.step
    name = "operations are those of the steps"
    if run.total_steps > len(steps):
        return Check(name, 0, 0, "")
    firsts, repeats = (steps[column].to_numpy(dtype=np.int64) for column in ("step", "repeat"))
    behind = int(firsts[-1] + repeats[-1]) if len(firsts) else 0
    strangers = np.flatnonzero((stamps < 0) | (stamps > behind))
    missing = len(strangers) or int(run.last_step > behind)
    first = ""
    if missing:
        which = f"operation {strangers[0]}" if len(strangers) else "the last operation"
        stamp = stamps[strangers[0]] if len(strangers) else run.last_step
        first = f"{which} is of step {stamp}, and the steps end in front of {behind}"
    empty = np.empty(0, np.int64)
    if run.scenario.memory.activations != "none":
        there = firsts if run.is_whole else firsts[firsts < stamps[-1]]
        empty = there[~np.isin(there, stamps)]
    if len(empty) and not first:
        first = f"step {empty[0]} has no operation"
    return Check(name, len(stamps) + len(firsts) + 1, missing + len(empty), first)


def _passes(run: RecordedRun, setup: Setup) -> tuple[tuple[Pass, ...], Check]:
    s, plan, rows = run.scenario, setup.plan, run.rows
    name = "operations in the order of the forward program"
    for column in (rows.step, rows.time_ns):
        if (np.diff(column) < 0).any():
            i = int((np.diff(column) < 0).argmax()) + 1
            return (), Check(name, len(rows), 1, f"operation {i} stands behind later ones")
    if s.memory.activations != "none" and s.engine.attention == "standard" and s.kv_cache.retention != "full":
        return (), Check(name, 0, 0, "")
    model = ActivationModel(
        plan.rank_model,
        plan.device,
        tensor_parallel_size=s.engine.tensor_parallel_size,
        attention=s.engine.attention,
    )
    apart = s.engine.task_queue_enable == 2 and plan.device.vendor == "ascend"
    found = list(passes(run, model, num_layers=plan.layout.num_layers, workspace_apart=apart))
    good = tuple(p for p in found if isinstance(p, Pass))
    bad = [*stray_frees(rows), *(p for p in found if isinstance(p, Misplaced))]
    rows_held = sum(p.end - p.begin for p in good) + len(bad)
    return good, Check(name, rows_held, len(bad), str(bad[0]) if bad else "")


def _held(real: RealRun, index_of: Ints, region: Sequence[RegionState], setup: Setup) -> Held:
    """What the real one held after each row of the trace, and the region beside it."""
    reserved, allocated, requested = (real.stat(f"{name}_bytes.all.current")[index_of] for name in SERIES[:3])
    driver = real.results["driver_bytes"][index_of]
    driver = np.where(driver < 0, reserved, driver)
    done = np.arange(len(index_of)) - np.cumsum(_of_torch(index_of))
    states = region or [RegionState(-1, False, 0, 0, 0)]
    table = np.array([(s.allocated, s.requested, s.largest_free) for s in states], np.int64)
    of_region = table[np.clip(done + 1, 0, len(table) - 1)]
    return Held(
        driver=driver + setup.region_bytes,
        workspace=driver - reserved,
        reserved=reserved,
        allocated=allocated,
        requested=requested,
        region_allocated=of_region[:, 0],
        region_requested=of_region[:, 1],
        region_largest_free=of_region[:, 2],
    )


def _of_torch(index_of: Ints) -> NDArray[np.bool_]:
    """Which rows are operations of torch's allocator."""
    return np.diff(index_of, prepend=-1) > 0


def _oom_point(
    run: RecordedRun, ours: RealRun, real: RealRun, index_of: Ints, region: Sequence[RegionState]
) -> OomPoint:
    """By rows of the trace; a region's own end counts for both sides."""
    is_general = _of_torch(index_of)
    rows = np.flatnonzero(is_general)
    places = index_of[rows]
    points = []
    for side in (ours, real):
        outcome = side.results["outcome"]
        there = places < len(outcome)
        ooms = rows[there][outcome[places[there]] == _OOM]
        points.append(int(ooms[0]) if len(ooms) else -1)
    in_region = np.flatnonzero([state.oom for state in region[1:]])
    if len(in_region):
        row = int(np.flatnonzero(~is_general)[in_region[0]])
        points = [row if point < 0 else min(point, row) for point in points]
    message = ""
    if points[1] >= 0 and is_general[points[1]]:
        message = real.errors[int(index_of[points[1]])].text
    step = int(run.rows.step[points[1]]) if points[1] >= 0 else -1
    return OomPoint(points[0], points[1], step, message)


def _ended_by(run: RecordedRun) -> str:
    oom = run.summary["oom"]
    if oom is None:
        return ""
    if oom["torch_message"]:
        return f"torch's allocator refused {oom['asked_bytes']} bytes ({oom['tag']})"
    return f"{oom['allocator']} refused {oom['asked_bytes']} bytes ({oom['tag']})"


def _left_out(run: RecordedRun) -> list[str]:
    words = []
    if not run.is_whole:
        words.append(
            f"Only the first {len(run.rows):,} of {run.total_operations:,} operations were replayed; --max-operations "
            "says how many."
        )
    if run.total_steps > len(run.steps):
        words.append(f"Only the first {len(run.steps):,} of {run.total_steps:,} rows of steps were read.")
    if run.summary["oom"] is not None and not run.summary["oom"]["torch_message"]:
        words.append(
            "The run ended by a refusal of its KV policy, which asks no allocator: there is nothing to measure."
        )
    if run.scenario.memory.activations == "none":
        words.append(
            "memory.activations = 'none': activations are one reserve, so no step's tensors are in the trace; simulate "
            "with memory.activations=per_layer for these."
        )
    return words
