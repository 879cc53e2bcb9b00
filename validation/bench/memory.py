"""Bytes that a device takes besides tensors: a context, kernels' workspaces, the graph of a step.

::

    context      free memory | a fresh process initialises the device, and waits | free | it ends | free
                 its drop to the second reading; in the third it is back, or others move
    workspace    first call of an op    inside   peak of the allocator, less what was there before and what came out
                                        outside  free memory lost, less what the allocator took of the driver
                 second call of it      nothing more is lost, or others move
    graph        free memory lost when a decode step is captured

Operands are made before the first call, so they are no workspace. Nothing is told of a communicator: HCCL and NCCL make
one for several ranks (:mod:`hbmtwin.validation.bench.collectives`). Free memory is the whole device's
(``mem_get_info``): where another process comes or goes meanwhile, the figure is told with confidence L, and no profile
takes it.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from hbmtwin.kernels.attention.backends import load
from hbmtwin.kernels.attention.interface import Backend
from hbmtwin.validation.bench.records import MEMORY_FIGURES, Case, MemoryFigure, Op

KERNEL_OPS: tuple[Op, ...] = ("matmul", "prefill", "decode", "paged_decode")
"""Whose temporaries are workspace; those of a layer or a step are activations."""
STARTS = 2
START_S = 180.0
SAME_BYTES = 1 << 20
"""Contexts that differ by less are the same."""
READY = b"ready\n"
CAPTURER = (sys.executable, "-P", "-m", "hbmtwin.validation.bench.capture")
ANSWER = "graph "
"""Begins the capturing process's line; torch and CANN print others."""
WORKER = (sys.executable, "-P", "-m", "hbmtwin.validation.bench.memory")
COMMUNICATOR = "one rank has no communicator of HCCL or NCCL; `hbmtwin bench collectives` measures one"

Call = Callable[[], object]


class NotStarted(RuntimeError):
    """The fresh process did not come up; the text says how far it came."""


class Held(NamedTuple):
    """What a device and its allocator hold at one time."""

    free: int
    """Of the whole device."""
    allocated: int
    peak: int
    """Of ``allocated``, since it was last reset."""
    reserved: int

    def outside(self, later: Held) -> int:
        """Bytes that the device has lost since to others than the allocator."""
        return self.free - later.free - (later.reserved - self.reserved)


class Workspace(NamedTuple):
    """Of one op's first call."""

    passing: int
    """Given back when the call was done."""
    kept: int
    """Still in the allocator behind it."""
    outside: int
    """Of the driver, beside the allocator."""


class Meter:
    """Measures one device; *module* is ``torch.cuda`` or ``torch.npu``. *started* enters with a fresh process that has
    the device initialised, and ends it; *captured* captures a step's case with operands of a dtype.
    """

    def __init__(
        self,
        module: Any,
        backend: Backend,
        started: Callable[[], AbstractContextManager[None]] | None = None,
        captured: Callable[[Case, str], MemoryFigure] | None = None,
    ) -> None:
        self._module, self._backend = module, backend
        self._captured = captured or partial(captured_elsewhere, backend)
        self._started = started or (lambda: fresh_process(backend))
        self._workspaces: dict[Op, Workspace] = {}
        self._quiet = True
        self._graph = MemoryFigure("graph_step_bytes", None, "the grid has no step", "")
        self._context = self._measured_context()

    def watch(self, op: Op, call: Call) -> None:
        """Make an op's first two calls, if it is a kernel and these are the first. Raise what they raise."""
        if op not in KERNEL_OPS or op in self._workspaces:
            return
        before = self._held(reset=True)
        output = call()
        with_output = self._held()
        del output
        after = self._held()
        self._workspaces[op] = workspace_of(before, with_output, after)
        del before
        again = call()
        del again
        self._quiet &= after.outside(self._held()) == 0

    def capture(self, case: Case, dtype: str) -> None:
        """Have a step captured into a graph; where that does not work, keep why."""
        self._graph = self._captured(case, dtype)

    def figures(self) -> tuple[MemoryFigure, ...]:
        """All that were measured, and of the others why not."""
        communicator = MemoryFigure("communicator_bytes", None, COMMUNICATOR, "")
        return (self._context, self._workspace(), self._graph, communicator)

    def _workspace(self) -> MemoryFigure:
        """One stream shares what passes; what stays adds up."""
        found = self._workspaces
        if not found:
            return MemoryFigure("workspace_bytes", None, "the grid has no kernel", "")
        size = max(w.passing for w in found.values()) + sum(w.kept + w.outside for w in found.values())
        parts = ", ".join(f"{op} {w.passing}+{w.kept}+{w.outside}" for op, w in found.items())
        how = f"first calls, bytes passing+kept+outside the allocator: {parts}"
        if self._backend == "npu":
            how += f"; TASK_QUEUE_ENABLE={os.environ.get('TASK_QUEUE_ENABLE', 'not set')}"
        return MemoryFigure("workspace_bytes", max(0, size), shortened(how), "H" if self._quiet and size >= 0 else "L")

    def _measured_context(self) -> MemoryFigure:
        name, drops, apart = "context_bytes", [], 0
        try:
            for _ in range(STARTS):
                before = self._free()
                with self._started():
                    during = self._free()
                drops.append(before - during)
                apart = max(apart, abs(before - self._free()))
        except (NotStarted, OSError) as why:
            return MemoryFigure(name, None, shortened(f"no second process could use the device: {why}"), "")
        size = min(drops)
        if size <= 0:
            return MemoryFigure(name, None, "free memory did not fall when another process took the device", "")
        noise = max(apart, max(drops) - size)
        how = (
            f"drop of free memory while a fresh process has the device initialised, {STARTS} times; noise {noise} bytes"
        )
        confidence = "H" if noise < SAME_BYTES else "M" if noise * 10 <= size else "L"
        return MemoryFigure(name, size, how, confidence)

    def _free(self) -> int:
        return free_bytes(self._module)

    def _held(self, *, reset: bool = False) -> Held:
        return held(self._module, reset=reset)


def free_bytes(module: Any) -> int:
    """Of the whole device, when all that was launched is done."""
    module.synchronize()
    return int(module.mem_get_info()[0])


def held(module: Any, *, reset: bool = False) -> Held:
    """What the device of ``torch.cuda`` or ``torch.npu`` holds; *reset*: peaks count from here."""
    free = free_bytes(module)
    if reset:
        module.reset_peak_memory_stats()
    stats = module.memory_stats()
    allocated, peak = (int(stats.get(f"allocated_bytes.all.{at}", 0)) for at in ("current", "peak"))
    return Held(free, allocated, peak, int(stats.get("reserved_bytes.all.current", 0)))


def workspace_of(before: Held, with_output: Held, after: Held) -> Workspace:
    """Of a call from what was held before it, behind it, and without its output."""
    output = with_output.allocated - after.allocated
    kept = after.allocated - before.allocated
    return Workspace(with_output.peak - before.allocated - output - kept, kept, before.outside(after))


def meter_of(torch: Any, backend: Backend, memory_bytes: int = 0) -> Meter | None:
    """That of the backend's device; None: a CPU has none. *memory_bytes*: cap of the process that captures; 0: none."""
    if backend == "cpu":
        return None
    capture = partial(captured_elsewhere, backend, memory_bytes=memory_bytes)
    return Meter(getattr(torch, backend), backend, captured=capture)


def no_figures() -> tuple[MemoryFigure, ...]:
    """Of a CPU."""
    return tuple(MemoryFigure(name, None, "a CPU has no device memory of its own", "") for name in MEMORY_FIGURES)


@contextmanager
def fresh_process(backend: Backend, command: tuple[str, ...] = WORKER) -> Iterator[None]:
    """A process that has the device initialised and no tensor on it. Raise NotStarted, OSError."""
    with subprocess.Popen(
        [*command, backend], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if not select.select([process.stdout], [], [], START_S)[0]:
                raise NotStarted(f"it was not ready in {START_S:.0f} s")
            if process.stdout.read(len(READY)) != READY:
                raise NotStarted("it ended before the device was initialised")
            yield
            process.stdin.close()
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            raise NotStarted("it did not end") from None
        finally:
            process.kill()


def captured_elsewhere(
    backend: Backend, case: Case, dtype: str, command: tuple[str, ...] = CAPTURER, *, memory_bytes: int = 0
) -> MemoryFigure:
    """The graph of a step, captured by a process of its own: one that a driver kills takes no times with it."""
    task = json.dumps(
        {"backend": backend, "dtype": dtype, "op": case.op, "sizes": case.named()} | {"memory_bytes": memory_bytes}
    )
    name, why = "graph_step_bytes", ""
    try:
        done = subprocess.run([*command, task], capture_output=True, text=True, check=False, timeout=START_S)
        lines = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
        if lines:
            return MemoryFigure(**json.loads(lines[-1].removeprefix(ANSWER)))
        why = f"its process ended with {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"
    except subprocess.TimeoutExpired:
        why = f"it took more than {START_S:.0f} s"
    except OSError as refused:
        why = str(refused)
    return MemoryFigure(name, None, shortened(f"capture did not work: {why}"), "")


def main() -> None:
    """Initialise the device, say so, and wait until standard input ends. Argument: the backend."""
    backend: Any = sys.argv[1]
    answers = os.dup(1)
    os.dup2(2, 1)
    module = getattr(load(backend), backend)
    module.synchronize()
    module.mem_get_info()
    os.write(answers, READY)
    sys.stdin.read()


def shortened(text: str) -> str:
    """One line of what somebody else said."""
    return "".join(c if c.isprintable() else " " for c in text)[:300]


if __name__ == "__main__":
    main()
