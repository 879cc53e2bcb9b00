"""Bytes that a device takes besides tensors: known ones come out, on a made-up device and over the emulated driver."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, load
from hbmtwin.kernels.profile import Coefficient, Profile, parse_profile
from hbmtwin.sim import catalog
from hbmtwin.validation.bench import memory as bench_memory
from hbmtwin.validation.bench.capture import captured
from hbmtwin.validation.bench.grid import grid_of
from hbmtwin.validation.bench.kernels import run_bench
from hbmtwin.validation.bench.memory import (
    Held,
    Meter,
    NotStarted,
    Workspace,
    captured_elsewhere,
    fresh_process,
    no_figures,
)
from hbmtwin.validation.bench.records import Bench, BenchError, Case, MemoryFigure, Point, case, read_bench, work_of
from hbmtwin.validation.calibrate.calibration import calibrate
from hbmtwin.validation.calibrate.memory import memory_of_bench
from hbmtwin.validation.emulated import EmulatorUnavailable
from hbmtwin.validation.emulated.build import build_emulator

MIB = 1 << 20


HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
SIZES = {"hidden_size": 32, "intermediate_size": 48, **HEADS}
CASES = (
    case("copy", {"bytes": 4096}),
    case("matmul", {"tokens": 3, "out_features": 16, "in_features": 32}),
    case("layer", {"tokens": 5, **SIZES}),
    case("prefill", {"batch": 2, "new_tokens": 3, "context_tokens": 4, **HEADS}),
    case("decode", {"batch": 2, "context_tokens": 9, **HEADS}),
    case("paged_decode", {"batch": 3, "context_tokens": 9, **HEADS, "block_size": 4}),
    case("step", {"batch": 3, "context_tokens": 9, "block_size": 4, "num_layers": 2, "vocab_size": 50, **SIZES}),
)


class Tensor:
    """Bytes of a device for as long as somebody holds it."""

    def __init__(self, device: FakeDevice, size: int) -> None:
        self.device, self.size = device, size
        device.allocated += size
        device.peak = max(device.peak, device.allocated)
        device.reserved = max(device.reserved, device.allocated)

    def __del__(self) -> None:
        self.device.allocated -= self.size


class FakeDevice:
    """Counts what ``torch.cuda`` counts."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.reserved = self.others = 0
        self.captured = 0
        self.refuses_capture = ""

    def synchronize(self) -> None:
        """Nothing runs."""

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def mem_get_info(self) -> tuple[int, int]:
        return 1000 * MIB - self.reserved - self.others, 1000 * MIB

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.allocated

    def memory_stats(self) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated,
            "allocated_bytes.all.peak": self.peak,
            "reserved_bytes.all.current": self.reserved,
        }

    class CUDAGraph:
        """Holds nothing."""

    @contextmanager
    def graph(self, graph: object) -> Iterator[None]:
        if self.refuses_capture:
            raise RuntimeError(self.refuses_capture)
        yield
        self.others += 7 * MIB

    def starting(self, *contexts: int, left: int = 0) -> Callable[[], Any]:
        """Processes that take so much, one after the other, and leave that behind."""
        sizes = iter(contexts)

        @contextmanager
        def started() -> Iterator[None]:
            size = next(sizes)
            self.others += size
            yield
            self.others -= size - left

        return started


class Kernel:
    """A call with so much of each."""

    def __init__(
        self, device: FakeDevice, *, passing: int = 0, kept: int = 0, outside: int = 0, moves: int = 0
    ) -> None:
        self.device, self.passing, self.kept, self.outside, self.moves = device, passing, kept, outside, moves
        self.inputs = Tensor(device, 100 * MIB)
        self.own: list[Tensor] = []

    def __call__(self) -> Tensor:
        if not self.own:
            self.device.others += self.outside
            self.own.append(Tensor(self.device, self.kept))
        self.device.others += self.moves
        passing = Tensor(self.device, self.passing)
        output = Tensor(self.device, 10 * MIB)
        del passing
        return output


def told(meter: Meter) -> dict[str, tuple[int | None, str]]:
    return {figure.name: (figure.bytes, figure.confidence) for figure in meter.figures()}


def test_what_a_kernel_takes_besides_its_operands_and_its_output() -> None:
    """By hand: 5 of passing (one stream shares it), 2 + 1 that stay, 4 outside."""
    device = FakeDevice()
    meter = Meter(device, "cuda", device.starting(300 * MIB, 300 * MIB))
    meter.watch("decode", Kernel(device, passing=5 * MIB, kept=2 * MIB, outside=4 * MIB))
    meter.watch("prefill", Kernel(device, passing=3 * MIB, kept=MIB))
    meter.watch("prefill", Kernel(device, passing=50 * MIB))  # not its first case
    meter.watch("step", Kernel(device, passing=50 * MIB))  # activations
    assert told(meter) == {
        "context_bytes": (300 * MIB, "H"),
        "workspace_bytes": (12 * MIB, "H"),
        "graph_step_bytes": (None, ""),
        "communicator_bytes": (None, ""),
    }


def _with_inputs(before: Held, with_output: Held, after: Held) -> Workspace:
    output = with_output.allocated - after.allocated
    return Workspace(with_output.peak - output, after.allocated - before.allocated, before.outside(after))


def _with_output(before: Held, with_output: Held, after: Held) -> Workspace:
    return Workspace(with_output.peak - before.allocated, after.allocated - before.allocated, before.outside(after))


def _with_pool(before: Held, with_output: Held, after: Held) -> Workspace:
    return bench_memory.Workspace(0, 0, before.free - after.free)


@pytest.mark.parametrize("planted", [_with_inputs, _with_output, _with_pool])
def test_inputs_outputs_or_the_pool_counted_as_workspace_are_caught(
    planted: Callable[..., Workspace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_memory, "workspace_of", planted)
    with pytest.raises(AssertionError, match="workspace_bytes"):
        test_what_a_kernel_takes_besides_its_operands_and_its_output()


def test_another_process_that_moves_takes_the_confidence() -> None:
    device = FakeDevice()
    meter = Meter(device, "cuda", device.starting(300 * MIB, 400 * MIB))
    meter.watch("decode", Kernel(device, moves=MIB))
    assert told(meter)["context_bytes"] == (300 * MIB, "L")
    assert told(meter)["workspace_bytes"] == (MIB, "L")
    some = told(Meter(device, "cuda", device.starting(300 * MIB, 302 * MIB)))["context_bytes"]
    assert some == (300 * MIB, "M")
    left = told(Meter(device, "cuda", device.starting(300 * MIB, 300 * MIB, left=100 * MIB)))["context_bytes"]
    assert left == (300 * MIB, "L")


def test_a_context_that_cannot_be_seen_is_absent() -> None:
    device = FakeDevice()
    name, size, how, confidence = Meter(device, "cuda", device.starting(0, 0)).figures()[0]
    assert (name, size, confidence) == ("context_bytes", None, "")
    assert "did not fall" in how

    def refused() -> Any:
        raise NotStarted("it ended before the device was initialised")

    assert "it ended before" in Meter(device, "cuda", refused).figures()[0].how


def test_a_step_is_captured_or_why_not_is_told() -> None:
    device = FakeDevice()
    device.refuses_capture = "operation not permitted\nwhen stream is capturing"
    assert captured(device, "cuda", Kernel(device)).how == "capture did not work: operation not permitted"
    device.refuses_capture = ""
    step = Kernel(device)
    step()
    assert captured(device, "cuda", step)[:2] == ("graph_step_bytes", 7 * MIB + 10 * MIB)
    assert captured(device, "npu", step).how == "this torch has no graphs of the device"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (
            "print('noise'); print('graph ' + json.dumps(dict(name='graph', bytes=5, how='h', confidence='M')))",
            "h",
        ),
        ("sys.stderr.write('first\\nlast\\n'); os.abort()", "capture did not work: its process ended with -6: last"),
    ],
)
def test_a_capture_that_kills_its_process_is_told(program: str, said: str) -> None:
    command = (sys.executable, "-c", f"import json, os, sys; {program}")
    figure = captured_elsewhere("npu", CASES[-1], "float16", command)
    assert figure.how == said
    assert figure.bytes == (5 if said == "h" else None)


def test_a_benchmark_measures_every_kernel_and_captures_its_last_step() -> None:
    """A CPU's kernels take nothing of the made-up device, and the file of a CPU says that there is none."""
    try:
        load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    device = FakeDevice()
    asked: list[tuple[Case, str]] = []

    def capture(step: Case, dtype: str) -> MemoryFigure:
        asked.append((step, dtype))
        return MemoryFigure("graph_step_bytes", 7 * MIB, "made up", "M")

    meter = Meter(device, "cuda", device.starting(300 * MIB, 300 * MIB), capture)
    made = run_bench(CASES, "cpu", dtype="float32", threads=1, rounds=1, meter=meter).memory
    assert [(figure.name, figure.bytes) for figure in made[:3]] == [
        ("context_bytes", 300 * MIB),
        ("workspace_bytes", 0),
        ("graph_step_bytes", 7 * MIB),
    ]
    assert asked == [(CASES[-1], "float32")]
    assert made[1].how.endswith(": matmul 0+0+0, prefill 0+0+0, decode 0+0+0, paged_decode 0+0+0")
    assert run_bench(CASES[:1], "cpu", dtype="float32", threads=1, rounds=1).memory == no_figures()


def test_the_process_that_captures_makes_the_step_and_says_that_a_cpu_has_no_graphs() -> None:
    try:
        load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    figure = captured_elsewhere("cpu", CASES[-1], "float32")
    assert figure == ("graph_step_bytes", None, "this torch has no graphs of the device", "")


def test_the_task_queue_is_told_of_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASK_QUEUE_ENABLE", "2")
    device = FakeDevice()
    meter = Meter(device, "npu", device.starting(MIB, MIB))
    meter.watch("decode", Kernel(device))
    assert meter.figures()[1].how.endswith("; TASK_QUEUE_ENABLE=2")


def test_a_fresh_process_waits_and_ends() -> None:
    ready = "import sys; sys.stdout.write('ready\\n'); sys.stdout.flush(); sys.stdin.read()"
    with fresh_process("cuda", (sys.executable, "-c", ready)):
        pass
    with pytest.raises(NotStarted, match="it ended before"), fresh_process("cuda", (sys.executable, "-c", "1")):
        pass


BENCH = Bench(
    backend="cuda",
    kernels="cuda-flash",
    device="NVIDIA H200",
    dtype="bfloat16",
    threads=0,
    torch="2.13",
    clock="events",
    points=(Point(case("copy", {"bytes": 1000}), 100.0, 90.0, 110.0, 15),),
    memory=(
        MemoryFigure("context_bytes", 500 * MIB, "a drop", "H"),
        MemoryFigure("workspace_bytes", 30 * MIB, "first calls", "L"),
        MemoryFigure("graph_step_bytes", 17 * MIB, "a capture", "M"),
        MemoryFigure("communicator_bytes", None, "one rank", ""),
    ),
)


def test_a_file_keeps_them_and_one_of_before_has_none(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    for bench in (BENCH, replace(BENCH, memory=()), replace(BENCH, memory=no_figures())):
        path.write_text(bench.to_json(), encoding="utf-8")
        assert read_bench(path) == bench
    assert "memory" not in replace(BENCH, memory=()).to_dict()
    assert {figure.bytes for figure in no_figures()} == {None}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "colour"}, "memory.0.name: colour is told twice, or none of"),
        ({"name": "workspace_bytes"}, "memory.1.name: workspace_bytes is told twice"),
        ({"bytes": -1}, "memory.0.bytes: -1 is no number of bytes"),
        ({"bytes": 1.5}, "memory.0.bytes: 1.5 is not of the right kind"),
        ({"bytes": None}, "memory.0.confidence: H; H, M or L, and empty without bytes"),
        ({"confidence": ""}, "memory.0.confidence"),
        ({"how": "x" * 401}, "memory.0.how"),
        ({"more": 1}, "memory.0.more: unknown key"),
    ],
)
def test_what_is_no_figure_is_refused(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    tree = BENCH.to_dict()
    tree["memory"][0] |= change
    (tmp_path / "b.json").write_text(json.dumps(tree))
    with pytest.raises(BenchError, match=said):
        read_bench(tmp_path / "b.json")


def test_a_profile_takes_what_is_trusted_and_the_budget_its_context() -> None:
    memory, left_out = memory_of_bench(BENCH)
    assert memory == {"context_bytes": 500 * MIB}
    assert left_out == (
        "workspace_bytes: 31,457,280 bytes; no term of a budget (docs/calibration.md)",
        "graph_step_bytes: 17,825,792 bytes; no term of a budget (docs/calibration.md)",
        "communicator_bytes: one rank",
    )
    unsure = replace(BENCH, memory=(MemoryFigure("context_bytes", 5, "others moved", "L"),))
    assert memory_of_bench(unsure) == ({}, ("context_bytes: 5 bytes, confidence L: others moved",))
    fitted = {"step_overhead_ns": Coefficient(5.0, 4.0, 6.0, 1.0, 12, "H")}
    profile = Profile(name="p", device="h200", made="now", source="b", coefficients=fitted, memory=memory)
    assert profile.applied_to(catalog.device("h200")).context_bytes == 500 * MIB


def test_a_benchmark_of_a_device_becomes_a_profile_with_its_memory() -> None:
    points = []
    for c in grid_of("small", "cuda"):
        work = work_of(c, 2)
        ns = 10_000 + work.read_bytes / 3000 + work.flops / 3e5
        points.append(Point(c, ns, ns, ns, 15))
    done = calibrate(replace(BENCH, points=tuple(points)), name="p", made="now")
    assert done.profile.device == "h200"
    assert done.profile.memory == {"context_bytes": 500 * MIB}
    assert parse_profile(done.profile.to_json().encode(), "here").memory == done.profile.memory
    assert done.left_out[-1] == "communicator_bytes: one rank"


def test_over_the_emulated_driver_the_real_allocator_tells_what_was_taken(tmp_path: Path) -> None:
    """300 MiB of somebody else's are the context. A temporary of 3 MiB has 32 bytes behind it in blocks of 512; a
    workspace of 5 MiB is taken of the driver in pieces of 2 MiB, beside the allocator."""
    try:
        build = build_emulator()
    except EmulatorUnavailable as missing:
        pytest.skip(str(missing))
    answer = tmp_path / "figures.json"
    script = Path(__file__).with_name("meter_over_driver.py")
    done = subprocess.run(
        [sys.executable, "-P", str(script), str(build.folder), str(answer)],
        env=os.environ | build.environment() | {"TASK_QUEUE_ENABLE": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.exists(), done.stderr[-2000:]
    told = json.loads(answer.read_text())
    context, workspace, *_ = [MemoryFigure(**figure) for figure in told["figures"]]
    assert (context.bytes, context.confidence) == (300 * MIB, "H")
    assert (workspace.bytes, workspace.confidence) == (3 * MIB + 512 + 6 * MIB, "H")
    assert "decode 3146240+0+0, prefill 0+0+6291456; TASK_QUEUE_ENABLE=0" in workspace.how
    assert (told["cap"], told["missing"]) == (200 * MIB, [])
    assert "Tried to allocate 302.00 MiB" in told["said"]
    assert "capture_error_mode" in told["graph"]
    assert "hccl" in told["groups"]
