"""Whole serving runs, tensor by tensor, on the real torch_npu: no difference in 130,000 operations.

The simulator runs ``exact`` (concatenating) and ``doubling`` servers with every tensor of the forward pass and keeps
the operation trace of the caching allocator. The real one does the same operations under the same cap and beside the
same static bytes. Three parties then agree: every number after each operation with the real one's, the run's own
statistics at its end with the real one's, and what the real one holds at each step's end with the scheduler's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import pytest

from hbmtwin.allocators.caching import CachingAllocator, conf, releases
from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.records import Tag
from hbmtwin.kernels.activations import Instruction
from hbmtwin.sim.forward import Forward
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario
from hbmtwin.validation.allocator import Case, EmulatedBackend, Report, validate
from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealRun
from hbmtwin.workloads.formats.memory_trace import MemoryOp, read_memory_trace

LLAMA_7B_WEIGHTS = 13_477_879_808
TOKEN_BYTES = 524_288
"""K and V of a token in the 32 layers of Llama-2-7B."""
TRAFFIC = (
    "model.name=llama-2-7b",
    "device.name=ascend-910b4",
    "memory.activations=per_layer",
    "results.memory_trace=true",
    "results.steps=true",
    "workload.request_rate=inf",
    "workload.system_prompt_tokens=0",
    "session.turns=1",
    "engine.max_model_len=1024",
)
TIGHT = ("engine.gpu_memory_utilization=0.5",)
"""About 2 GiB of KV."""
EXPANDABLE = ("memory.alloc_conf='expandable_segments:True'",)


def requests(count: int, prompt: int, output: int) -> tuple[str, ...]:
    return (
        f"workload.num_prompts={count}",
        f"workload.prompt_tokens={prompt}",
        f"workload.output_tokens={output}",
    )


class Run(NamedTuple):
    preset: str
    settings: tuple[str, ...]
    dies: str = ""
    """Tag of the request that ends the server."""


RUNS = {
    "exact": Run("caching", requests(6, 100, 20)),
    "exact, until memory is out": Run("caching", (*TIGHT, *requests(16, 250, 200)), dies="workspace"),
    "exact, TASK_QUEUE 2, until memory is out": Run(
        "caching", (*TIGHT, *requests(16, 245, 200), "engine.task_queue_enable=2"), dies="kv"
    ),
    "exact, expandable": Run("caching", (*EXPANDABLE, *requests(6, 100, 8))),
    "doubling": Run("doubling", requests(6, 100, 30)),
    "doubling, preempting": Run("doubling", (*TIGHT, *requests(20, 120, 16), "memory.oom=preempt")),
    "doubling, rejecting, expandable, standard attention": Run(
        "doubling",
        (*TIGHT, *EXPANDABLE, *requests(20, 120, 16), "memory.oom=reject", "engine.attention=standard"),
    ),
}


class Recorded(NamedTuple):
    """A run, and what its allocator was asked for."""

    twin: Twin
    result: Result
    case: Case


def record(name: str, preset: str, settings: Sequence[str]) -> Recorded:
    twin = Twin(Scenario.load(preset=preset, overrides=[*TRAFFIC, *settings]))
    result = twin.run()
    with TemporaryDirectory() as folder:
        result.save(Path(folder) / "run")
        ops = list(read_memory_trace(Path(folder) / "run" / "memory_trace.parquet"))
    total = twin.driver.capacity_bytes
    cap = MemoryOp("set_fraction", arg=repr(fraction(caching(twin).config.limit_bytes, total)))
    device = NpuSettings(total, tenants_bytes=twin.static_bytes, alloc_conf=twin.scenario.memory.alloc_conf)
    return Recorded(twin, result, Case(name, [cap, *ops], device))


def caching(twin: Twin) -> CachingAllocator:
    assert isinstance(twin.general, CachingAllocator)
    return twin.general


@cache
def recorded(name: str) -> Recorded:
    return record(name, RUNS[name].preset, RUNS[name].settings)


def fraction(limit: int | None, total: int) -> float:
    """What caps a process at exactly *limit* bytes: the real one multiplies, and cuts the result off."""
    assert limit is not None
    found = limit / total
    while int(found * total) < limit:
        found = math.nextafter(found, 1.0)
    assert int(found * total) == limit
    return found


class KeepsLast(EmulatedBackend):
    """Keeps the last run of the real one."""

    real: RealRun

    def both(self, ops: Sequence[MemoryOp], settings: NpuSettings) -> tuple[RealRun, RealRun]:
        ours, self.real = super().both(ops, settings)
        return ours, self.real


def statistics(real: RealRun) -> dict[str, int]:
    """The real one's, at the end."""
    return dict(zip(real.stat_names, real.stats[-1].tolist(), strict=True))


def held_at_step_ends(run: Recorded, real: RealRun) -> list[int]:
    """Bytes that the real one was asked for and had not got back when each step was over."""
    of_step = np.array([op.step for op in run.case.ops])
    requested = real.stat("requested_bytes.all.current")
    assert run.result.steps is not None
    return [int(requested[np.flatnonzero(of_step == step)[-1]]) for step in run.result.steps["step"]]


def due_at_step_ends(run: Recorded, room: Callable[[int], int]) -> list[int]:
    """Weights, and room for the tokens of all sequences: by the scheduler's counts, which know no allocator."""
    assert run.result.steps is not None
    due = []
    for _, step in run.result.steps.iterrows():
        assert step["repeat"] == 1
        lengths = (new + before for new, before in zip(step["new_tokens"], step["context_tokens"], strict=True))
        due.append(LLAMA_7B_WEIGHTS + TOKEN_BYTES * sum(map(room, lengths)))
    return due


def room_of(preset: str) -> Callable[[int], int]:
    """Tokens that a sequence's buffers hold."""
    if preset == "caching":
        return lambda tokens: tokens
    return lambda tokens: max(64, 1 << (tokens - 1).bit_length())


# -- the runs ----------------------------------------------------------------------------------------------------------


def test_there_are_enough_of_them() -> None:
    runs = {name: recorded(name) for name in RUNS}
    operations = {name: len(run.case.ops) for name, run in runs.items()}
    assert sum(operations.values()) >= 120_000
    assert {name: run.result.oom["tag"] for name, run in runs.items() if run.result.oom} == {
        name: planned.dies for name, planned in RUNS.items() if planned.dies
    }
    assert runs["doubling, preempting"].result.summary["preemptions"] > 5
    stats = {name: run.twin.general.stats() for name, run in runs.items()}
    assert sum(s["num_ooms"] for s in stats.values()) >= 20
    assert {name for name, s in stats.items() if not s["segment.all.current"]} == {n for n in RUNS if "expandable" in n}
    assert {op.op for run in runs.values() for op in run.case.ops} == {"set_fraction", "malloc", "free", "workspace"}
    assert {op.tag for run in runs.values() for op in run.case.ops if op.op == "malloc"} == {
        *("weight", "activation", "kv", "workspace")
    }


@pytest.mark.parametrize("name", RUNS)
def test_no_number_differs_at_any_operation_of_a_serving_run(npu: EmulatedNpu, name: str) -> None:
    run, planned, backend = recorded(name), RUNS[name], KeepsLast(npu)
    report = validate([run.case], backend)
    assert report.differing == ()
    (done,) = report.cases
    assert (done.operations, done.counters) == (len(run.case.ops), 126)
    # And it is the run itself that agrees, not only its replay.
    assert statistics(backend.real) == run.twin.general.stats()
    assert done.ooms == run.twin.general.stats()["num_ooms"]
    assert held_at_step_ends(run, backend.real) == due_at_step_ends(run, room_of(planned.preset))


# -- planted bugs ------------------------------------------------------------------------------------------------------

SHORT = requests(3, 100, 4)


def differing(npu: EmulatedNpu, run: Recorded) -> set[str]:
    report: Report = validate([run.case], EmulatedBackend(npu))
    return {what for case in report.differing if case.difference for what, _, _ in case.difference.what}


@pytest.mark.parametrize(
    ("module", "rule", "wrong"),
    [(releases, "NPU_PAD", 0), (conf, "LARGE_BUFFER", 22 << 20)],
)
def test_a_wrong_size_in_the_allocator_is_caught(
    npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch, module: object, rule: str, wrong: int
) -> None:
    monkeypatch.setattr(module, rule, wrong)
    assert {"reserved_bytes.all.current", "driver_bytes"} & differing(npu, record("short", "caching", SHORT))


def test_a_forward_pass_that_skips_a_free_is_caught(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Forward._run

    calls = count()

    def skips(self: Forward, instructions: Sequence[Instruction], kv: KVPolicy, kv_layers: Iterator[int]) -> None:
        layer = next(calls) % (2 + 32) - 1  # before the layers of a step stands one program, and one behind them
        kept = [i for i in instructions if (i.verb, i.name) != ("free", "activated") or layer != 7]
        honest(self, kept, kv, kv_layers)

    monkeypatch.setattr(Forward, "_run", skips)
    run, backend = record("short", "caching", SHORT), KeepsLast(npu)
    assert validate([run.case], backend).differing == (), "both did what they were told"
    held, due = held_at_step_ends(run, backend.real), due_at_step_ends(run, room_of("caching"))
    activated = [3 * 100 * 11008 * 2, *[3 * 11008 * 2] * 3]
    assert [h - d for h, d in zip(held, due, strict=True)] == [sum(activated[: i + 1]) for i in range(len(due))]


def test_a_forward_pass_that_goes_past_the_trace_is_caught(npu: EmulatedNpu, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = CachingAllocator.malloc

    def unseen(self: CachingAllocator, size: int, *, stream: int = 0, tag: Tag, owner: int = -1) -> int:
        observer = self.observer
        if tag is Tag.WORKSPACE:
            self.observer = None
        handle = honest(self, size, stream=stream, tag=tag, owner=owner)
        self.observer = observer
        return handle

    monkeypatch.setattr(CachingAllocator, "malloc", unseen)
    run, backend = record("short", "caching", SHORT), KeepsLast(npu)
    assert validate([run.case], backend).differing == ()
    assert statistics(backend.real) != run.twin.general.stats()
