"""A run's operations and its layers' attention on a device, in the order of the forward passes: what came of it.

The places come from :mod:`hbmtwin.validation.run_replay.program`: of each pass the row in front of which a layer's
attention runs, behind the growth of its KV and its workspace's neighbours. The process is
:mod:`hbmtwin.validation.run_replay.worker`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hbmtwin.validation.device import DeviceBackend, DeviceUnavailable
from hbmtwin.validation.emulated.job import Job
from hbmtwin.validation.run_replay.case import Setup, case_of
from hbmtwin.validation.run_replay.kernels import NoKernels
from hbmtwin.validation.run_replay.memory import MemoryReplay
from hbmtwin.validation.run_replay.source import RecordedRun
from hbmtwin.validation.run_replay.witness import Check
from hbmtwin.validation.run_replay.worker import HELD, NO_ROOM, SAMPLES, Launches

WORKER = (sys.executable, "-P", "-m", "hbmtwin.validation.run_replay.worker")
COMPARED = HELD[:3]
"""Free bytes of a device depend on other processes."""

Ints = NDArray[np.int64]


class Interleaved(NamedTuple):
    """What was sampled."""

    check: Check
    times_ns: dict[int, int]
    """Attention of all layers, by step."""
    pool_bytes: int
    """What the kernels' own tensors took beside."""


def interleave(
    run: RecordedRun,
    setup: Setup,
    memory: MemoryReplay,
    device: DeviceBackend,
    *,
    max_steps: int,
    command: Sequence[str] = WORKER,
) -> Interleaved:
    """Do operations and kernels in one order, and hold what is held after each step to the replay without kernels.

    Raise NoKernels where both do not fit on the device, DeviceUnavailable where the process dies.
    """
    case, index_of = case_of(run, setup, told=False)
    capped = device.capped(case.ops, case.settings)
    shift = len(capped) - len(case.ops)
    places = [int(i) + shift for i in index_of]
    ends = np.searchsorted(run.rows.step, memory.steps, "right") - 1
    launches = Launches(
        directory=str(run.directory.resolve()),
        at=tuple(
            (places[row], p.step, layer)
            for p in memory.passes
            for layer, row in enumerate(p.layers)
            if row < len(places)
        ),
        ends=tuple(places[row] if row >= 0 else -1 for row in ends.tolist()),
        max_steps=max_steps,
    )
    with tempfile.TemporaryDirectory(prefix="hbmtwin-interleaved-") as name:
        folder = Path(name)
        launches.write(folder)
        Job("replay", case.settings, [(op.op, op.id, op.size, op.stream, op.arg) for op in capped]).write(folder)
        said = device.work(folder, case.settings.alloc_conf, command=command)
        if (folder / NO_ROOM).exists():
            why = (folder / NO_ROOM).read_text()
            raise NoKernels(f"{why}: simulate with a smaller device.memory_bytes, or time fewer steps (--max-steps)")
        if not (folder / SAMPLES).exists():
            raise DeviceUnavailable(f"the worker died between operations and kernels: {said.strip()}")
        samples = dict(np.load(folder / SAMPLES))
    return Interleaved(
        check=_check(memory, samples["held"], int(samples["first_oom"]) - shift, index_of),
        times_ns={int(step): int(ns) for step, ns in samples["times"]},
        pool_bytes=int(samples["pool"]),
    )


def _check(memory: MemoryReplay, held: Ints, first_oom: int, index_of: Ints) -> Check:
    differing, first = 0, ""
    for column, name in enumerate(COMPARED):
        measured = memory.measured[name]
        n = min(len(measured), len(held))
        apart = np.flatnonzero(measured[:n] != held[:n, column])
        differing += len(apart)
        if len(apart) and not first:
            i = int(apart[0])
            first = f"{name} after step {memory.steps[i]}: {held[i, column]}, without kernels {measured[i]}"
    alone = int(index_of[memory.oom.measured]) if memory.oom.measured >= 0 else -1
    if alone != max(first_oom, -1):
        differing += 1
        first = first or f"memory is out at operation {first_oom}, without kernels at {alone}"
    return Check("bytes after each step, with kernels between the operations", held[:, :3].size + 1, differing, first)
