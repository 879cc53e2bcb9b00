"""Where each operation of a recorded run belongs in its forward pass, and where the layers' kernels stand between them.

::

    rows of a step   | free free      | malloc hidden | malloc normed, qkv | kv kv | workspace | ... | kv | ...  free |
                     | who ended or   | before        | layer 0            | grow  ^ kernels   |     layer 1  | after |
                     | gave way, or a |<------------- the pass that was carried out ----------------------------->|
                     | pass that failed

A step's pass is found from its end: what stands in front of it are operations between passes, or a pass that ran out of
memory and was given up. Activations are held to the program of the step's batch, line by line; KV's operations may
stand where a layer's KV grows and behind the pass, nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hbmtwin.kernels.activations import ActivationModel, Instruction, StepProgram
from hbmtwin.kernels.records import BatchShape
from hbmtwin.sim.forward import Activations
from hbmtwin.validation.run_replay.source import RecordedRun, TraceRows


class Pass(NamedTuple):
    """One forward pass in the trace."""

    step: int
    begin: int
    """Its first row."""
    end: int
    """The row behind its last; as :attr:`begin` where it asks for nothing."""
    layers: tuple[int, ...]
    """Of each layer that keeps KV the row in front of which its attention runs."""


class Misplaced(NamedTuple):
    """The row of a pass that is not what the forward program asks for there."""

    row: int
    step: int
    wanted: str
    found: str

    def __str__(self) -> str:
        return f"operation {self.row} of step {self.step}: the forward pass asks for {self.wanted}, not {self.found}"


def passes(
    run: RecordedRun,
    model: ActivationModel,
    *,
    num_layers: int,
    workspace_apart: bool,
) -> Iterator[Pass | Misplaced]:
    """The pass of each step whose operations are all there, or what is wrong with it. O(operations).

    *num_layers* keep KV of every token; *workspace_apart*: workspaces are one operation of an allocator of their own.
    """
    rows, mode = run.rows, run.scenario.memory.activations
    is_kv = _kv_rows(rows)
    numbers = run.steps["step"].to_numpy(dtype=np.int64)
    begins = np.searchsorted(rows.step, numbers, "left").tolist()
    ends = np.searchsorted(rows.step, numbers, "right").tolist()
    for step, begin, end, new, context in zip(
        numbers.tolist(), begins, ends, run.steps["new_tokens"], run.steps["context_tokens"], strict=True
    ):
        if end == len(rows) and not run.is_whole:
            return
        program = model.program(batch_shape(new, context))
        lines = _lines(mode, program, num_layers)
        yield _Alignment(rows, is_kv, workspace_apart).find(step, begin, end, lines, num_layers)


def stray_frees(rows: TraceRows) -> Iterator[Misplaced]:
    """Frees of what is not there. O(operations)."""
    live: set[tuple[str, int]] = set()
    for row, (op, id, allocator) in enumerate(zip(rows.op, rows.id.tolist(), rows.allocator, strict=True)):
        if op == "malloc":
            live.add((allocator, id))
        elif op == "free":
            if (allocator, id) not in live:
                yield Misplaced(row, int(rows.step[row]), "a free of what is there", f"free {id}")
            live.discard((allocator, id))


def batch_shape(new_tokens: Sequence[int], context_tokens: Sequence[int]) -> BatchShape:
    """A step's batch as its table tells it: one new token is decode, which nothing that memory depends on can tell from
    a chunk of one token."""
    prefill = tuple((int(n), int(c)) for n, c in zip(new_tokens, context_tokens, strict=True) if n > 1)
    read = [int(c) + 1 for n, c in zip(new_tokens, context_tokens, strict=True) if n == 1]
    return BatchShape(prefill, len(read), sum(read), len(read))


def _lines(mode: Activations, program: StepProgram, num_layers: int) -> list[Instruction]:
    grows = [Instruction("grow")] * num_layers
    if mode == "none":
        return grows
    if mode == "peak":
        return [Instruction("malloc", "peak", program.peak_bytes), *grows, Instruction("free", "peak")]
    return [*program.before, *(line for layer in program.layers for line in layer), *program.after]


def _kv_rows(rows: TraceRows) -> list[bool]:
    """Whether a row is a malloc of KV, or a free of one."""
    tag_of: dict[tuple[str, int], bool] = {}
    found = []
    for op, id, tag, allocator in zip(rows.op, rows.id.tolist(), rows.tag, rows.allocator, strict=True):
        if op == "malloc":
            tag_of[allocator, id] = tag == "kv"
        found.append(op in ("malloc", "free") and tag_of.get((allocator, id), False))
    return found


class _Alignment:
    """Walks backwards through rows and lines together."""

    def __init__(self, rows: TraceRows, is_kv: list[bool], workspace_apart: bool) -> None:
        self._rows = rows
        self._is_kv = is_kv
        self._workspace_apart = workspace_apart
        self._freed: dict[str, int] = {}
        self._at = self._low = 0

    def find(self, step: int, low: int, end: int, lines: Sequence[Instruction], num_layers: int) -> Pass | Misplaced:
        self._low, self._at = low, end - 1
        layers: list[int] = []
        self._skip_kv()  # old copies that are given back when the step is over
        verbs: dict[str, Callable[[Instruction], str]] = {"malloc": self._malloc, "free": self._free}
        for line in reversed(lines):
            if line.verb == "grow":
                layers.append(self._at + 1)
                self._skip_kv()
                continue
            wanted = verbs.get(line.verb, self._workspace)(line)
            if wanted:
                return Misplaced(self._at, step, wanted, self._told())
        return Pass(step, self._at + 1, end, tuple(reversed(layers[:num_layers])))

    def _skip_kv(self) -> None:
        while self._at >= self._low and self._is_kv[self._at]:
            self._at -= 1

    def _is(self, op: str, size: int, tag: str) -> bool:
        rows, at = self._rows, self._at
        return at >= self._low and rows.op[at] == op and rows.size[at] == size and rows.tag[at] == tag

    def _malloc(self, line: Instruction) -> str:
        if not self._is("malloc", line.size, "activation") or self._rows.id[self._at] != self._freed.pop(line.name, -1):
            return f"a malloc of {line.size} bytes ({line.name})"
        self._at -= 1
        return ""

    def _free(self, line: Instruction) -> str:
        if self._at < self._low or self._rows.op[self._at] != "free" or self._is_kv[self._at]:
            return f"a free of {line.name}"
        self._freed[line.name] = int(self._rows.id[self._at])
        self._at -= 1
        return ""

    def _workspace(self, line: Instruction) -> str:
        if self._workspace_apart:
            if not self._is("workspace", line.size, ""):
                return f"a workspace of {line.size} bytes"
            self._at -= 1
            return ""
        if self._free(Instruction("free", "workspace")):
            return f"a workspace of {line.size} bytes given back"
        if not self._is("malloc", line.size, "workspace") or self._rows.id[self._at] != self._freed.pop("workspace"):
            return f"a workspace of {line.size} bytes"
        self._at -= 1
        return ""

    def _told(self) -> str:
        rows, at = self._rows, self._at
        if at < self._low:
            return "for nothing more: the step has no further operation"
        size = f" of {rows.size[at]} bytes" if rows.size[at] else ""
        kind = rows.tag[at] or ("kv" if self._is_kv[at] else "")
        return f"{rows.op[at]} {rows.id[at]}{size}{f' ({kind})' if kind else ''}"
