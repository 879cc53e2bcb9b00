"""Operation traces on the real ``libc10_cuda.so``: the same tables as those of an emulated NPU."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hbmtwin.validation.emulated.cuda.build import build_cuda
from hbmtwin.validation.emulated.process import SETTING_VARIABLES, WorkerDied
from hbmtwin.validation.emulated.records import BLOCK, ENTRY, RESULT, SEGMENT, NpuSettings, RealError, RealRun, Table
from hbmtwin.validation.simulated import simulate
from hbmtwin.workloads.formats.memory_trace import OPERATIONS, MemoryOp

Ours = Callable[[Sequence[MemoryOp], NpuSettings], RealRun]


class EmulatedCuda:
    """The allocator of the torch 2.11.0 wheel over an emulated CUDA runtime; *wheels* is a folder with the files.

    Making one compiles what is not compiled yet; raise EmulatorUnavailable where that is not possible.
    """

    def __init__(self, wheels: Path) -> None:
        self._program = build_cuda(wheels).replay

    def replay(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> RealRun:
        """Do *ops* in a process of their own, on a device of which capacity, tenants and alloc_conf are used.

        Statistics and entries are taken at every operation, segments and blocks after the last. Raise WorkerDied if
        the process ends otherwise than it should.
        """
        ours = {name: text for name, text in os.environ.items() if not name.startswith(SETTING_VARIABLES)}
        if settings.alloc_conf:
            ours["PYTORCH_CUDA_ALLOC_CONF"] = settings.alloc_conf
        with tempfile.TemporaryDirectory(prefix="hbmtwin-cuda-") as folder:
            done = subprocess.run(
                [str(self._program), str(settings.capacity_bytes), str(settings.tenants_bytes), folder],
                input="".join(map(_line, ops)),
                env=ours,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise WorkerDied(f"the CUDA allocator's process ended with {done.returncode}: {done.stderr[:2000]}")
            return _read(Path(folder))


class CudaBackend:
    """The real CUDA allocator beside the simulated one, for :func:`hbmtwin.validation.allocator.validate`."""

    same_driver = True
    against = "torch 2.11.0's libc10_cuda.so on the emulated CUDA runtime"

    def __init__(self, cuda: EmulatedCuda, ours: Ours | None = None) -> None:
        self.cuda = cuda
        self.ours = ours or simulate_cuda

    def refuses(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> str:
        """Nothing."""
        return ""

    def both(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> tuple[RealRun, RealRun]:
        """Our run and the real one."""
        return self.ours(ops, settings), self.cuda.replay(ops, settings)


def simulate_cuda(ops: Sequence[MemoryOp], settings: NpuSettings) -> RealRun:
    """Our side, as torch 2.11.0 on CUDA."""
    return simulate(ops, settings, flavour="torch_cuda")


def _line(op: MemoryOp) -> str:
    uses = OPERATIONS[op.op]
    size = str(op.size) if uses.size else ""
    stream = "" if op.stream is None else str(op.stream)
    if uses.stream == "one" and not stream:
        stream = "0"
    return f"{op.op}\t{'' if op.id is None else op.id}\t{size}\t{stream}\t{op.arg}\n"


def _read(folder: Path) -> RealRun:
    errors = {}
    for line in (folder / "errors").read_text().splitlines():
        operation, kind, text = line.split("\t", 2)
        errors[int(operation)] = RealError(kind, text.replace("\\n", "\n").rstrip())
    if -1 in errors:
        return RealRun(setup_error=errors[-1])
    names = (folder / "names").read_text().split()
    order = np.argsort(names)
    stats = np.fromfile(folder / "stats", np.int64).reshape(-1, len(names))[:, order]

    def table(name: str, columns: np.dtype[np.void]) -> Table:
        rows: Table = np.fromfile(folder / name, columns)
        return rows

    return RealRun(
        stat_names=tuple(names[i] for i in order),
        initial_stats=stats[0],
        stats=stats[1:],
        results=table("results", RESULT),
        errors=errors,
        segments=table("segments", SEGMENT),
        blocks=table("blocks", BLOCK),
        entries=table("entries", ENTRY),
    )
