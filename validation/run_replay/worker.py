"""A process that does a run's operations on a device with the attention of its layers between them.

``python -P -m hbmtwin.validation.run_replay.worker npu|cuda FOLDER``, as :mod:`hbmtwin.validation.device_worker`.

::

    before            kernels of all sampled steps once, in a pool of their own: from here on it grows no more
    each operation    as in the trace
    at its place      a layer's attention, from and to that pool, between two events
    after each step   memory_stats less what the pool held at the start, mem_get_info, the events' times

What torch's default pools hold is then the trace's alone, and the cap is higher by the pool's bytes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hbmtwin.validation.device_worker import ABOUT, DeviceRun, open_device
from hbmtwin.validation.emulated.job import JOB, Job
from hbmtwin.validation.run_replay.case import fraction_of

LAUNCHES = "launches.json"
SAMPLES = "samples.npz"
"""``held``: a row a step, the first of HELD; ``times``: step, ns of its attention; ``first_oom``: an operation, or -1;
``pool``: bytes that the kernels' own pool holds."""
HELD = ("reserved", "allocated", "requested", "driver_free")
NO_ROOM = "no_room.txt"
"""In place of SAMPLES: the device cannot hold the kernels' tensors beside all that the run may take."""
POOL = "kernels of hbmtwin"

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Launches:
    """What is done between the operations."""

    directory: str
    """Of the result."""
    at: tuple[tuple[int, int, int], ...]
    """Operation in front of which it is launched, step, and which of the layers that keep KV."""
    ends: tuple[int, ...]
    """The last operation of each step, -1: none yet."""
    max_steps: int

    def write(self, folder: Path) -> None:
        """To LAUNCHES in *folder*."""
        (folder / LAUNCHES).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Launches:
        """From LAUNCHES in *folder*."""
        found: dict[str, Any] = json.loads((folder / LAUNCHES).read_text())
        return cls(found["directory"], tuple(map(tuple, found["at"])), tuple(found["ends"]), found["max_steps"])


class Kernels(Protocol):
    """The attention of a run's sampled steps."""

    @property
    def steps(self) -> Sequence[int]:
        """Those that are timed."""
        ...

    def calls(self, step: int) -> Sequence[Sequence[Call]]:
        """Tensors of a step are made now, on the device; the calls of each layer, in order."""
        ...


def main(kernels: Callable[[str, Launches], Kernels] | None = None) -> None:
    """Say what is there, and do the job if there is one; *kernels* stand in for the backend's own, in tests."""
    backend, folder = sys.argv[1], Path(sys.argv[2])
    about, device = open_device(backend)
    (folder / ABOUT).write_text(json.dumps(about))
    if device is not None and (folder / JOB).exists():
        launches = Launches.read(folder)
        made = (kernels or _own_kernels)(backend, launches)
        _Interleaved(backend, device, Job.read(folder), launches, made).write_samples(folder)


def _own_kernels(backend: str, launches: Launches) -> Kernels:
    from hbmtwin.validation.run_replay.kernels import SampledKernels

    return SampledKernels(Path(launches.directory), backend, launches.max_steps)


class _Interleaved(DeviceRun):
    """Operations and kernels, in one order."""

    def __init__(self, backend: str, device: Any, job: Job, launches: Launches, kernels: Kernels) -> None:
        super().__init__(backend, device, job)
        self._kernels = kernels
        self._timed = frozenset(kernels.steps)
        self._launches: dict[int, list[tuple[int, int]]] = {}
        for at, step, layer in launches.at:
            if step in self._timed:
                self._launches.setdefault(at, []).append((step, layer))
        self._ends = launches.ends
        self._ready: tuple[int, Sequence[Sequence[Call]]] = (-1, ())
        self._events: dict[int, list[tuple[Any, Any]]] = {}

    def write_samples(self, folder: Path) -> None:
        """Do the job and write SAMPLES."""
        rows = self.job.rows
        self.streams = [self.device.default_stream(), *(self.device.Stream() for _ in range(self.job.num_streams - 1))]
        self._warm_up()
        base = self._held()
        free, total = self.device.mem_get_info()
        cap = min((int(float(arg) * total) for op, _, _, _, arg in rows if op == "set_fraction"), default=total)
        if cap > free:
            (folder / NO_ROOM).write_text(
                f"the run may take {cap} bytes and {free} are free beside the {base[0]} of the kernels' own tensors"
            )
            return
        held = np.zeros((len(self._ends), len(HELD)), np.int64)
        next_end, first_oom = 0, -1
        for i, (op, id, size, stream, arg) in enumerate(rows):
            next_end = self._sample(held, next_end, i - 1, base)
            for step, layer in self._launches.get(i, ()):
                self._launch(step, layer)
            if op == "set_fraction":  # the kernels' pool is none of the run's
                arg = repr(min(1.0, fraction_of(int(float(arg) * total) + base[0], total)))
            try:
                self.do(op, id, size, stream or 0, arg)
            except self.torch.OutOfMemoryError:
                first_oom = i if first_oom < 0 else first_oom
        self._sample(held, next_end, len(rows) - 1, base)
        self.device.synchronize()
        times = [(step, self._elapsed_ns(step)) for step in sorted(self._events)]
        np.savez(
            folder / SAMPLES,
            held=held,
            times=np.array(times, np.int64).reshape(-1, 2),
            first_oom=np.int64(first_oom),
            pool=np.int64(base[0]),
        )

    def _warm_up(self) -> None:
        """All that the kernels ever hold at once, so that their pool takes it now."""
        for step in self._kernels.steps:
            self.do("mempool_begin", POOL, 0, 0, "")
            for calls in self._kernels.calls(step):
                for call in calls:
                    call()
            self.do("mempool_end", POOL, 0, 0, "")
        self.device.synchronize()

    def _launch(self, step: int, layer: int) -> None:
        self.do("mempool_begin", POOL, 0, 0, "")
        if self._ready[0] != step:
            self._ready = (-1, ())  # the tensors of the step before go first
            self._ready = (step, self._kernels.calls(step))
        begin, end = (self.device.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for call in self._ready[1][layer]:
            call()
        end.record()
        self.do("mempool_end", POOL, 0, 0, "")
        self._events.setdefault(step, []).append((begin, end))

    def _sample(self, held: np.ndarray, next_end: int, done: int, base: tuple[int, ...]) -> int:
        """Read what is held after each step whose last operation is *done* or lies before it."""
        while next_end < len(self._ends) and self._ends[next_end] <= done:
            self._ready = (-1, ())
            self.device.synchronize()
            now = self._held()
            held[next_end] = [a - b for a, b in zip(now[:3], base, strict=False)] + [now[3] + base[0]]
            next_end += 1
        return next_end

    def _held(self) -> tuple[int, ...]:
        stats = self.stats()
        bytes_held = tuple(stats[f"{name}_bytes.all.current"] for name in HELD[:3])
        return (*bytes_held, self.device.mem_get_info()[0])

    def _elapsed_ns(self, step: int) -> int:
        elapsed_ms: float = sum(begin.elapsed_time(end) for begin, end in self._events[step])
        return round(elapsed_ms * 1e6)


if __name__ == "__main__":
    main()
