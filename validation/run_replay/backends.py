"""Which part of a run each backend can do again, and doing it.

::

    backend    allocator                                  whole steps     attention kernels
    emulated   the real torch_npu on an emulated driver   -               -   there is no device to compute on
    cpu        -          a CPU's torch has none          a decoder       alone, where no decoder can do the steps
    npu, cuda  the real one of the device                 a decoder       in their place between the operations
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from hbmtwin.kernels.attention.interface import Backend
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.server_memory import ServerMemory
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.allocator import EmulatedBackend
from hbmtwin.validation.device import DeviceBackend
from hbmtwin.validation.emulated import EmulatedNpu
from hbmtwin.validation.run_replay.case import set_up
from hbmtwin.validation.run_replay.decodable import NoDecoder
from hbmtwin.validation.run_replay.interleaved import interleave
from hbmtwin.validation.run_replay.kernels import KernelReplay, NoKernels, check_attention, replay_kernels
from hbmtwin.validation.run_replay.memory import MemoryReplay, replay_memory
from hbmtwin.validation.run_replay.report import RunReplay
from hbmtwin.validation.run_replay.same_run import check_same_run
from hbmtwin.validation.run_replay.source import MAX_DEVICE_OPERATIONS, MAX_OPERATIONS, RecordedRun, load_run
from hbmtwin.validation.run_replay.step_report import StepReplay
from hbmtwin.validation.run_replay.steps import StepOptions, replay_steps

BackendName = Literal["emulated", "cpu", "cuda", "npu"]
DEFAULT = StepOptions()

NO_KERNELS = (
    "The emulated driver computes nothing: no kernel was run and no time measured. --backend cpu times attention."
)
NO_STEPS = "The emulated driver computes nothing. --backend cpu runs whole steps on a decoder."
NOT_ASKED = "Not asked for: --attention-only."
IN_STEPS = "Attention was timed in its place, within whole steps."
NO_MEMORY = (
    "A CPU has no caching allocator to ask, so memory was not replayed. --backend emulated asks the real torch_npu."
)


def replay_run(
    directory: Path,
    backend: BackendName,
    *,
    max_operations: int | None = None,
    options: StepOptions = DEFAULT,
    attention_only: bool = False,
    told: Callable[[str], None] = print,
    done: Callable[[str], None] = lambda name: None,
) -> RunReplay:
    """Do a finished run again, as far as *backend* can. What will take its time is *told* in front.

    Raise ResultError, NotReplayable, NoKernels,
    ReplayError, what a scenario raises that cannot be planned, and EmulatorUnavailable, DeviceUnavailable,
    BackendUnavailable or WorkerDied where the real thing is not there.
    """
    most = max_operations or (MAX_OPERATIONS if backend == "emulated" else MAX_DEVICE_OPERATIONS)
    run = load_run(directory, trace=backend != "cpu", max_operations=most)
    memory: MemoryReplay | None = None
    kernels: KernelReplay | None = None
    steps: StepReplay | None = None
    memory_absent = kernels_absent = steps_absent = ""
    if backend == "cpu":
        memory_absent, plan = NO_MEMORY, ServerPlan(run.scenario)
        check_same_run(run, plan, ServerMemory(plan))
        steps, steps_absent = _steps(run, plan, backend, options, attention_only, told, done)
        if steps is None:
            kernels = replay_kernels(run, plan, "cpu", max_steps=options.steps, done=done, threads=options.threads)
        else:
            kernels_absent = IN_STEPS
    elif backend == "emulated":
        kernels_absent, steps_absent = NO_KERNELS, NO_STEPS
        setup = set_up(run, backend)
        check_same_run(run, setup.plan, setup.memory)
        with EmulatedNpu() as npu:
            memory = replay_memory(run, EmulatedBackend(npu), setup)
    else:
        setup, device = set_up(run, backend), DeviceBackend(backend)
        check_same_run(run, setup.plan, setup.memory)
        memory = replay_memory(run, device, setup)
        try:
            check_attention(setup.plan)
            both = interleave(run, setup, memory, device, max_steps=options.steps)
            memory = replace(memory, checks=(*memory.checks, both.check))
            kernels = replay_kernels(
                run, setup.plan, backend, max_steps=options.steps, done=done, times_ns=both.times_ns
            )
        except NoKernels as why:
            kernels_absent = f"{why}."
        steps, steps_absent = _steps(run, setup.plan, backend, options, attention_only, told, done)
    return RunReplay(
        directory=str(directory),
        run=_in_words(run.scenario),
        backend=backend,
        versions=_versions(backend),
        memory=memory,
        memory_absent=memory_absent,
        kernels=kernels,
        kernels_absent=kernels_absent,
        steps=steps,
        steps_absent=steps_absent,
    )


def _steps(
    run: RecordedRun,
    plan: ServerPlan,
    backend: Backend,
    options: StepOptions,
    attention_only: bool,
    told: Callable[[str], None],
    done: Callable[[str], None],
) -> tuple[StepReplay | None, str]:
    """Whole steps, or why there are none."""
    if attention_only:
        return None, NOT_ASKED
    try:
        return replay_steps(run, plan, backend, options, told=told, done=done), ""
    except NoDecoder as why:
        return None, f"{why}."


def _in_words(s: Scenario) -> str:
    kv = s.kv_cache.preset or f"{s.kv_cache.policy} in {s.memory.kv_arena}"
    return f"{s.model.name} on {s.device.name}, {kv}, activations {s.memory.activations}"


def _versions(backend: BackendName) -> dict[str, str]:
    names = {"emulated": ("torch", "torch-npu"), "npu": ("torch", "torch-npu"), "cpu": ("torch",), "cuda": ("torch",)}
    found = {"hbmtwin": version("hbmtwin")}
    for name in names[backend]:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found
