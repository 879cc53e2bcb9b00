"""Times of all-reduces over several ranks of this machine, each a process with a device of its own.

::

    ranks 2   |rank 0|--lines of JSON--\\      a sample is the mean over ranks, each of several calls in a row
              |rank 1|------------------> parent --> points of ranks and bytes, quartiles over samples
    ranks 4   after them                       no line for STALL_S, or a rank that ends early: all are killed, and told

Messages are what a serving step sends, hidden states of its tokens. What a group's communicator takes of a device is
told with them. An engine replays its small all-reduces in graphs, so where a graph can be captured those times are told
besides; where it cannot, the others stand.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from hbmtwin.kernels.attention.backends import load
from hbmtwin.kernels.attention.interface import Backend
from hbmtwin.validation.bench.collective_rank import ANSWER, Task
from hbmtwin.validation.bench.kernels import ROUNDS, device_called, point_of
from hbmtwin.validation.bench.memory import SAME_BYTES, shortened
from hbmtwin.validation.bench.records import DTYPE_BYTES, MAX_RANKS, Bench, BenchError, Case, MemoryFigure, Op, Point

WORKER = (sys.executable, "-P", "-m", "hbmtwin.validation.bench.collective_rank")
STALL_S = 120.0
"""Ranks that say nothing for so long are stuck: the longest is the start of a device's runtime."""
END_S = 10.0


class GroupFailed(RuntimeError):
    """A rank ended early, or all of them say nothing; the text has what it said last."""


class _Group(NamedTuple):
    """What a group of ranks told."""

    samples: dict[tuple[bool, int], list[float]]
    """By whether in a graph, and bytes."""
    taken: list[list[int]]
    """Readings of each rank's device, less what was there before the group; empty of a CPU."""
    library: str
    no_graph: str


def run_collectives(
    cases: Sequence[Case],
    backend: Backend = "cpu",
    *,
    dtype: str = "bfloat16",
    rounds: int = ROUNDS,
    memory_bytes: int = 0,
    stall_s: float = STALL_S,
    command: tuple[str, ...] = WORKER,
    done: Callable[[str], None] | None = None,
) -> Bench:
    """Time the *cases*, all-reduces, a group of ranks after the other. *memory_bytes*: cap of each rank's allocator.

    Raise BackendUnavailable, BenchError for more ranks than devices, GroupFailed where one does not come to its end.
    """
    torch = load(backend)
    sizes: dict[int, list[int]] = {}
    for case in cases:
        n = case.named()
        element = DTYPE_BYTES[dtype]
        sizes.setdefault(n["ranks"], []).append(max(1, n["bytes"] // element) * element)
    check_devices(torch, backend, max(sizes))
    points: list[Point] = []
    taken: dict[int, list[list[int]]] = {}
    told: list[str] = []
    library = ""
    for ranks, own in sorted(sizes.items()):
        task = Task(backend, dtype, 0, ranks, list(dict.fromkeys(own)), rounds, stall_s, "", memory_bytes)
        try:
            group = _measured(task, command, done)
        except GroupFailed as why:
            raise GroupFailed(
                f"all_reduce of {ranks} ranks: {why}; see whether others hold these devices, or take fewer with --ranks"
            ) from None
        taken[ranks], library = group.taken, group.library
        points += [
            point_of(Case("all_reduce_in_graph" if graphed else "all_reduce", (ranks, size)), found)
            for (graphed, size), found in group.samples.items()
        ]
        told += [f"{ranks} ranks: {group.no_graph}"] * bool(group.no_graph)
    order: tuple[Op, ...] = ("all_reduce", "all_reduce_in_graph")
    return Bench(
        backend=backend,
        kernels=library,
        device=device_called(torch, backend),
        dtype=dtype,
        threads=1 if backend == "cpu" else 0,
        torch=str(torch.__version__),
        clock="wall" if backend == "cpu" else "events",
        points=tuple(sorted(points, key=lambda p: (order.index(p.case.op), p.case.sizes))),
        memory=(communicator_figure(backend, taken, told),),
    )


def groups_of(backend: Backend) -> tuple[int, ...]:
    """Powers of two up to the number of devices; of a CPU, 2. Raise BackendUnavailable, BenchError for one device."""
    torch = load(backend)
    if backend == "cpu":
        return (2,)
    there = int(getattr(torch, backend).device_count())
    if there < 2:
        check_devices(torch, backend, 2)
    return tuple(2**n for n in range(1, min(there, MAX_RANKS).bit_length()))


def check_devices(torch: Any, backend: Backend, ranks: int) -> None:
    """Raise BenchError where there is not a device for each rank."""
    there = ranks if backend == "cpu" else int(getattr(torch, backend).device_count())
    if ranks > there:
        raise BenchError(
            f"{ranks} ranks want a device each, and {there} can be seen; take fewer with --ranks, or make more "
            "visible (CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES)"
        )


def communicator_figure(backend: Backend, taken: dict[int, list[list[int]]], told: Sequence[str] = ()) -> MemoryFigure:
    """What a group takes of a rank's device: of the largest group, the most of any rank. H: ranks and the last two
    readings agree within :data:`SAME_BYTES`; M: within a tenth; else others came or went, L."""
    name = "communicator_bytes"
    if backend == "cpu":
        return MemoryFigure(name, None, "a CPU has no device memory of its own", "")
    most = {ranks: max(max(readings) for readings in group) for ranks, group in taken.items()}
    last = [readings[-1] for readings in taken[max(taken)]]
    before = [readings[-2] for readings in taken[max(taken)]]
    size = most[max(most)]
    apart = max(max(last) - min(last), *(abs(a - b) for a, b in zip(last, before, strict=True)))
    confidence = "H" if apart < SAME_BYTES else "M" if apart * 10 <= size else "L"
    if min(last) < 0:
        size, confidence = 0, "L"
    groups = ", ".join(f"{ranks} ranks {size}" for ranks, size in most.items())
    how = f"free memory lost to a group and its all-reduces, beside the allocator: {groups}; noise {apart} bytes"
    if backend == "npu":
        how += f"; HCCL_BUFFSIZE={os.environ.get('HCCL_BUFFSIZE', 'not set')}"
    how += "".join(f"; no graph, {why}" for why in told)
    return MemoryFigure(name, size, shortened(how), confidence)


def _measured(task: Task, command: tuple[str, ...], done: Callable[[str], None] | None) -> _Group:
    """One group from its start to its end. Raise GroupFailed."""
    with (
        tempfile.TemporaryDirectory(prefix="hbmtwin-ranks-") as folder,
        _started(task, command, Path(folder)) as processes,
    ):
        return _Answers(task, done).of(processes, Path(folder))


@contextmanager
def _started(task: Task, command: tuple[str, ...], folder: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process a rank. However it is left, none is alive behind it; each ends by itself if we are killed."""
    processes: list[subprocess.Popen[bytes]] = []
    environment = dict(os.environ)
    if task.backend == "cpu" and any(name == "lo" for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else by the host's name, which may not resolve
    try:
        for rank in range(task.ranks):
            told = json.dumps(task._replace(rank=rank, store=str(folder / "store"))._asdict())
            with (folder / f"{rank}.log").open("wb") as errors:
                processes.append(
                    subprocess.Popen(
                        [*command, told],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        env=environment,
                        bufsize=0,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()


class _Answers:
    """Takes in the lines of a group's ranks until each has ended."""

    def __init__(self, task: Task, done: Callable[[str], None] | None) -> None:
        self.task, self.done = task, done
        self._samples: list[dict[tuple[bool, int], list[float]]] = [{} for _ in range(task.ranks)]
        self._taken: list[list[int]] = [[] for _ in range(task.ranks)]
        self._eager: set[int] = set()
        self.library = self.no_graph = ""

    def of(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> _Group:
        """What they told. Raise GroupFailed where one ends before its times of eager calls are there, or all say
        nothing; behind that it is the graphs that failed, and the times stand."""
        self._read(processes, folder)
        graphed = all(map(self._has_graphs, range(self.task.ranks)))
        self.no_graph *= not graphed  # what failed behind the last one is nobody's matter
        keys = [key for key in self._samples[0] if graphed or not key[0]]
        means = {key: [fmean(turn) for turn in zip(*(own[key] for own in self._samples), strict=True)] for key in keys}
        return _Group(means, self._taken if self.task.backend != "cpu" else [], self.library, self.no_graph)

    def _read(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path) -> None:
        """Until all have ended, or a graph has failed and all have told the rest."""
        with selectors.DefaultSelector() as selector:
            rests = [b""] * len(processes)
            for rank, process in enumerate(processes):
                assert process.stdout is not None
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            until = time.monotonic() + self.task.timeout_s
            while selector.get_map() and not (self.no_graph and self._all_eager()):
                ready = selector.select(max(0.0, until - time.monotonic()))
                if not ready:
                    self._fail(f"no rank said anything for {self.task.timeout_s:.0f} s{self._last(folder)}")
                for key, _ in ready:
                    rank, data = key.data, os.read(key.fd, 1 << 16)
                    if not data:
                        selector.unregister(key.fileobj)
                        self._ended(rank, processes[rank], folder)
                        continue
                    until = time.monotonic() + self.task.timeout_s
                    *lines, rests[rank] = (rests[rank] + data).split(b"\n")
                    for line in lines:
                        self._take(rank, line.decode("utf-8", "replace"))

    def _all_eager(self) -> bool:
        return len(self._eager) == self.task.ranks

    def _has_graphs(self, rank: int) -> bool:
        """Whether it told all that it has to tell."""
        return all((True, size) in self._samples[rank] for size in self.task.sizes)

    def _fail(self, why: str, rank: int | None = None) -> None:
        """Raise GroupFailed, unless that rank, or each, has told its times of eager calls."""
        if rank in self._eager or self._all_eager():
            self.no_graph = self.no_graph or why
            return
        raise GroupFailed(why)

    def _ended(self, rank: int, process: subprocess.Popen[bytes], folder: Path) -> None:
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise GroupFailed(f"rank {rank} does not end") from None
        if (code or rank not in self._eager) and not self._has_graphs(rank):
            self._fail(f"rank {rank} ended with {code}{self._last(folder, rank)}", rank)

    def _last(self, folder: Path, rank: int = 0) -> str:
        lines = (folder / f"{rank}.log").read_text("utf-8", "replace").strip().splitlines()
        return f": {shortened(lines[-1])}" if lines else ""

    def _take(self, rank: int, line: str) -> None:
        if not line.startswith(ANSWER):
            return
        told = json.loads(line.removeprefix(ANSWER))
        if "samples" in told:
            self._samples[rank][bool(told.get("graph")), told["bytes"]] = told["samples"]
        elif "communicator" in told:
            self._taken[rank] = [size for size in told["communicator"] if size is not None]
            self.library = told["library"]
        elif "eager" in told:
            self._eager.add(rank)
        elif "no_graph" in told:
            self.no_graph = told["no_graph"]
        elif rank == 0 and self.done is not None:
            self.done(f"all_reduce ranks={self.task.ranks} bytes={told['at']}")
