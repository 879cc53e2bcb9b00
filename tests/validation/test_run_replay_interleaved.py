"""Operations with kernels between them: the worker on the emulated driver, with kernels that only ask for memory."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from hbmtwin.dashboard.run_replay_page import write_run_replay
from hbmtwin.sim.run import run as simulate
from hbmtwin.sim.scenario import Scenario
from hbmtwin.validation.device import DeviceBackend, DeviceUnavailable
from hbmtwin.validation.emulated import EmulatorUnavailable
from hbmtwin.validation.emulated.build import Build, build_emulator
from hbmtwin.validation.run_replay import backends as run_replay_backends
from hbmtwin.validation.run_replay import kernels as run_replay_kernels
from hbmtwin.validation.run_replay.case import Setup, set_up
from hbmtwin.validation.run_replay.interleaved import Interleaved, interleave
from hbmtwin.validation.run_replay.kernels import NoKernels
from hbmtwin.validation.run_replay.memory import MemoryReplay, replay_memory
from hbmtwin.validation.run_replay.source import RecordedRun, load_run
from hbmtwin.validation.run_replay.steps import StepOptions

AS_A_DEVICE = """
import ctypes, sys
from hbmtwin.validation.emulated.build import build_emulator

driver, *_ = [ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL) for path in build_emulator().libraries]
driver.hbmtwin_set_cann(b"8.5.0")
driver.hbmtwin_set_capacity(ctypes.c_uint64(40 << 30), ctypes.c_uint64(2 << 20))
driver.hbmtwin_set_device(b"Ascend910B2", b"25.5.0")


class Kernels:
    steps = (0, 1)

    def __init__(self, backend, launches):
        self.log = open(launches.directory + "/launched.txt", "a")

    def calls(self, step):
        import torch

        held = torch.empty((3 + step) << 20, dtype=torch.uint8, device="npu")

        def call(layer):
            out = torch.empty(1 << 20, dtype=torch.uint8, device="npu")
            print(step, layer, held.numel() + out.numel(), file=self.log, flush=True)
            KEPT

        return [[lambda layer=layer: call(layer)] for layer in range(4)]
"""
DEVICE = (
    AS_A_DEVICE
    + """
from hbmtwin.validation.device_worker import main

main()
"""
)
INTERLEAVED = """
KEEP = []
from hbmtwin.validation.run_replay.worker import main

main(Kernels)
"""
SETTINGS = (
    "device.name=ascend-910b4",
    "memory.activations=per_layer",
    "results.memory_trace=true",
    "results.steps=true",
    "workload.request_rate=inf",
    "workload.num_prompts=16",
    "workload.prompt_tokens=344",
    "workload.output_tokens=40",
    "workload.system_prompt_tokens=0",
    "session.turns=1",
    "engine.max_model_len=1024",
    "engine.gpu_memory_utilization=0.018",
)
"""It dies in the third step."""
LAYERS = 4
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}


class Named:
    """Kernels that are only asked for their name."""

    name, device = "npu-flash", "npu"


class Recorded:
    """A run on the 'device', without kernels."""

    def __init__(self, folder: Path, build: Build) -> None:
        (folder / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
        overrides = [*SETTINGS, f"model.name='{folder / 'config.json'}'"]
        simulate(Scenario.load(preset="caching", overrides=overrides)).save(folder / "result")
        self.folder = folder
        self.run: RecordedRun = load_run(folder / "result")
        self.setup: Setup = set_up(self.run, "npu")
        self.device = DeviceBackend("npu", command=self.command(DEVICE), environment=build.environment())
        self.memory: MemoryReplay = replay_memory(self.run, self.device, self.setup)

    def command(self, script: str, kept: str = "pass") -> tuple[str, ...]:
        path = self.folder / ("interleaved.py" if INTERLEAVED in script else "as_a_device.py")
        path.write_text(script.replace("KEPT", kept), encoding="utf-8")
        return (sys.executable, "-P", str(path))

    def interleaved(self, kept: str = "pass") -> Interleaved:
        command = self.command(AS_A_DEVICE + INTERLEAVED, kept)
        return interleave(
            self.run,
            self.setup,
            self.memory,
            self.device,
            max_steps=2,
            command=command,
        )


@pytest.fixture(scope="module")
def build() -> Build:
    try:
        return build_emulator()
    except EmulatorUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def recorded(build: Build, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    return Recorded(tmp_path_factory.mktemp("interleaved"), build)


def test_on_a_device_too_nothing_differs(recorded: Recorded) -> None:
    assert recorded.memory.agrees, [check for check in recorded.memory.checks if check.differing]
    assert recorded.memory.against == "torch_npu 2.13.0 on Ascend910B2"
    assert recorded.memory.oom.predicted == recorded.memory.oom.measured > 0
    assert set(recorded.memory.measured) == {"reserved", "allocated", "requested"}


def test_kernels_run_in_every_layer_of_their_steps_and_leave_the_runs_memory_alone(recorded: Recorded) -> None:
    log = recorded.folder / "result" / "launched.txt"
    log.unlink(missing_ok=True)
    found = recorded.interleaved()
    assert found.check.differing == 0, found.check.first
    assert found.check.compared == 3 * len(recorded.memory.steps) + 1
    assert set(found.times_ns) == {0, 1}
    assert found.pool_bytes >= 4 << 20
    launched = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    warm_up, ran = launched[: 2 * LAYERS], launched[2 * LAYERS :]
    assert {step for step, _, _ in warm_up} == {0, 1}
    assert ran == [(step, layer, (4 + step) << 20) for step in (0, 1) for layer in range(LAYERS)]


def test_a_kernel_that_keeps_memory_of_the_run_is_told(recorded: Recorded) -> None:
    found = recorded.interleaved("KEEP.append(out)")
    assert found.check.differing > 0
    assert found.check.first.startswith(("allocated after step ", "reserved after step "))


def test_a_device_without_room_for_both_times_no_kernel(recorded: Recorded) -> None:
    full = "driver.hbmtwin_set_tenants(ctypes.c_uint64((40 << 30) - (200 << 20)))\n"
    command = recorded.command(AS_A_DEVICE + full + INTERLEAVED)
    with pytest.raises(NoKernels, match=r"bytes and \d+ are free beside the \d+ of the kernels' own tensors: simulate"):
        interleave(recorded.run, recorded.setup, recorded.memory, recorded.device, max_steps=2, command=command)


def test_a_worker_that_dies_is_told(recorded: Recorded) -> None:
    with pytest.raises(
        DeviceUnavailable, match=r"the worker died between operations and kernels: (.|\n)*no such kernel"
    ):
        recorded.interleaved("raise RuntimeError('no such kernel')")


def test_the_whole_of_a_device_in_one_report(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The device's own kernels cannot run on the emulated driver: those of the test stand in, and their name."""

    class Here:
        __version__ = "2.13.0"
        get_num_threads = staticmethod(lambda: 1)
        inference_mode = staticmethod(nullcontext)

    command = recorded.command(AS_A_DEVICE + INTERLEAVED)
    monkeypatch.setattr(run_replay_backends, "DeviceBackend", lambda kind: recorded.device)
    monkeypatch.setattr(run_replay_backends, "interleave", partial(interleave, command=command))
    monkeypatch.setattr(run_replay_kernels, "kernels_for", lambda backend, kind: Named())
    monkeypatch.setattr(run_replay_kernels, "load", lambda backend: Here())
    monkeypatch.setattr(run_replay_kernels, "device_called", lambda torch, backend: "Ascend910B2")
    report = run_replay_backends.replay_run(recorded.folder / "result", "npu", options=StepOptions(steps=2))
    assert report.agrees
    assert report.memory is not None
    assert report.memory.checks[-1].name == "bytes after each step, with kernels between the operations"
    assert report.measured_on == {
        "memory": "torch_npu 2.13.0 on Ascend910B2",
        "kernels": "npu-flash on Ascend910B2, torch 2.13.0",
        "steps": "",
    }
    assert "keeps KV in one piece a sequence, and the decoder here in blocks." in report.steps_absent
    assert report.kernels is not None
    assert not report.kernels.same_device, "the run is of another Ascend"
    assert report.kernels.steps.tolist() == [0, 1]
    assert any("ran in their place between the run's operations" in note for note in report.kernels.notes)
    assert [row.quantity for row in report.memory_errors()] == ["reserved", "allocated", "requested"]
    write_run_replay(report, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "npu-flash on Ascend910B2" in page
    assert "Not compared: The free bytes of mem_get_info" in page
