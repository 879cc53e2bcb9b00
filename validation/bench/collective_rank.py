"""One rank of a benchmark of all-reduces: a process of its own, on a device of its own.

::

    the device, nothing else on it   free memory                   (all wait for each other by files, not by a group)
    the group, its first all-reduce  free memory: communicator
    rounds over message sizes        {"bytes": ..., "samples": [...]} after the last round
    the same, captured in a graph    {"bytes": ..., "graph": true, "samples": [...]}

It answers in lines of JSON on standard output, and ends when its standard input does, so that none is left behind when
whoever started it is killed. Ctrl-C is for that one to take. All ranks make the same calls in the same order: how many
is agreed by an all-reduce.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

from hbmtwin.kernels.attention.backends import load
from hbmtwin.kernels.attention.interface import Backend
from hbmtwin.validation.bench.kernels import (
    MAX_CALLS,
    SAMPLES,
    WARM_UP_NS,
    WARM_UPS,
    ClockTimer,
    EventTimer,
    Timer,
)
from hbmtwin.validation.bench.memory import Held, held, shortened
from hbmtwin.validation.bench.memory_cap import cap_memory

GROUPS: dict[Backend, str] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""What torch calls the library that sends."""
ANSWER = "rank "
"""Begins a line of ours; libraries print others."""
GRAPHED_CALLS = 20
MIN_SAMPLE_NS = 2e6
"""So that what ranks begin apart is a small part of it."""


class Task(NamedTuple):
    """What a rank does; as JSON its argument."""

    backend: Backend
    dtype: str
    rank: int
    ranks: int
    sizes: list[int]
    """Bytes of the messages."""
    rounds: int
    timeout_s: float
    store: str
    """A file by which ranks find each other."""
    memory_bytes: int
    """Cap of torch's allocator; 0: none."""


def main() -> None:
    """Do it. Argument: the task."""
    task = Task(**json.loads(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_stdin, daemon=True).start()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**told: Any) -> None:
        answers.write(ANSWER + json.dumps(told) + "\n")
        answers.flush()

    Rank(task, say).run()


def end_with_stdin() -> None:
    """End this process when nobody holds the other end of its standard input any more."""
    while os.read(0, 4096):
        pass
    os._exit(1)


class Rank:
    """Does a task, and says what comes of it."""

    def __init__(self, task: Task, say: Callable[..., None]) -> None:
        self.task, self.say = task, say
        self.torch = torch = load(task.backend)
        self.module: Any = None if task.backend == "cpu" else getattr(torch, task.backend)
        self.device = "cpu"
        if self.module is None:
            torch.set_num_threads(1)
        else:
            self.device = f"{task.backend}:{task.rank}"
            self.module.set_device(task.rank)
            if task.memory_bytes:
                cap_memory(self.module, task.memory_bytes)

    def run(self) -> None:
        """All of it, and leave the group."""
        from torch import distributed

        task = self.task
        store = distributed.FileStore(task.store, task.ranks)
        store.set_timeout(timedelta(seconds=task.timeout_s))
        largest = max(task.sizes)
        message = self.torch.zeros(largest // self._element, dtype=self._dtype, device=self.device)
        before = self._held()
        self._all_are_here(store, "looked")
        distributed.init_process_group(
            GROUPS[task.backend],
            store=store,
            rank=task.rank,
            world_size=task.ranks,
            timeout=timedelta(seconds=task.timeout_s),
        )
        self.reduce = distributed.all_reduce
        self.reduce(message[:1])
        self.timer: Timer = ClockTimer() if self.module is None else EventTimer(self.module)  # a rank that waits counts
        readings = [self._taken(before)]
        samples: dict[int, list[float]] = {size: [] for size in task.sizes}
        for _ in range(task.rounds):
            for size in task.sizes:
                samples[size] += self._samples(message[: size // self._element])
                self.say(at=size)
            readings.append(self._taken(before))
        for size, found in samples.items():
            self.say(bytes=size, samples=found)
        self.say(communicator=readings, library=self.library())
        self.say(eager=True)
        self._in_graphs(message)
        distributed.barrier()
        distributed.destroy_process_group()

    @property
    def _element(self) -> int:
        return int(getattr(self.torch, self.task.dtype).itemsize)

    @property
    def _dtype(self) -> Any:
        return getattr(self.torch, self.task.dtype)

    def _samples(self, message: Any) -> list[float]:
        def call() -> object:
            return self.reduce(message)

        once = self._agreed(min(self.timer.time_ns(call, 1) for _ in range(2)))
        more = max(0, min(WARM_UPS - 2, int(WARM_UP_NS / max(1.0, once))))
        times = [self.timer.time_ns(call, 1) for _ in range(more)]
        once = self._agreed(min([once, *times]))
        calls = max(1, min(MAX_CALLS, round(MIN_SAMPLE_NS / max(1.0, once))))
        return [self._together(call, calls) for _ in range(SAMPLES)]

    def _together(self, call: Callable[[], object], calls: int) -> float:
        self._agreed(0.0)
        return self.timer.time_ns(call, calls)

    def _agreed(self, value: float) -> float:
        """The longest of all ranks; none goes on before all are here."""
        from torch import distributed

        told = self.torch.tensor([value], dtype=self.torch.float32, device=self.device)
        self.reduce(told, op=distributed.ReduceOp.MAX)
        return float(told.item())

    def _in_graphs(self, message: Any) -> None:
        """Say what a graph of each size takes, or why none can be made."""
        if self.module is None:
            return
        kind = getattr(self.module, "CUDAGraph" if self.task.backend == "cuda" else "NPUGraph", None)
        if kind is None:
            self.say(no_graph="this torch has no graphs of the device")
            return
        try:
            for size in self.task.sizes:
                part, graph = message[: size // self._element], kind()
                with self.module.graph(graph, capture_error_mode="thread_local"):  # the group's watchdog asks on
                    for _ in range(GRAPHED_CALLS):
                        self.reduce(part)
                for _ in range(2):
                    graph.replay()
                times = [self._together(graph.replay, 1) / GRAPHED_CALLS for _ in range(self.task.rounds * SAMPLES)]
                self.say(bytes=size, graph=True, samples=times)
        except (RuntimeError, ValueError, TypeError) as refused:
            why = (str(refused) or type(refused).__name__).strip().splitlines()[0]
            self.say(no_graph=shortened(why))
            os._exit(0)  # the others wait in it for this one: whoever started all ends them

    def _held(self) -> Held | None:
        return None if self.module is None else held(self.module)

    def _taken(self, before: Held | None) -> int | None:
        """Of the device since *before*, by others than the allocator."""
        return None if before is None else before.outside(held(self.module))

    def _all_are_here(self, store: Any, name: str) -> None:
        store.set(f"{name} {self.task.rank}", "1")
        store.wait([f"{name} {rank}" for rank in range(self.task.ranks)])

    def library(self) -> str:
        """What sends, with its version where it tells one."""
        name = GROUPS[self.task.backend]
        if name != "nccl":
            return name
        return f"{name} {'.'.join(map(str, self.module.nccl.version()))}"


if __name__ == "__main__":
    main()
