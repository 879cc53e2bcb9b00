"""How fast whole serving runs go through the allocator, with the forward pass tensor by tensor and without.

    python benchmarks/forward_per_layer.py [--profile]

32 requests at once of 300 tokens in and 120 out, Llama-2-7B on an Ascend 910B2. ``exact`` concatenates K and V of every
layer at each step, ``doubling`` has one buffer per sequence, ``paged`` a pool. An operation is one malloc, free or use
of a workspace, those that a leap only counts included; a step is one decode or prefill of the batch. Time is that of
the processor, the best of three runs, everything recorded but the operations. ``alone`` is the allocator without the
simulator: the run's own operations, carried out in a bare loop. ``--profile`` tells where ``exact`` with ``per_layer``
spends its time.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from typing import Any

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

RUNS = 3
GIB = 1 << 30
TRAFFIC = (
    "device.name=ascend-910b2",
    "workload.num_prompts=32",
    "workload.request_rate=inf",
    "workload.prompt_tokens=300",
    "workload.output_tokens=120",
    "workload.system_prompt_tokens=0",
    "session.turns=1",
)
CASES = [
    ("exact", "caching", activations, settings)
    for activations, settings in (
        ("per_layer", ()),
        ("per_layer", ("engine.task_queue_enable=2",)),
        ("per_layer", ("memory.alloc_conf=expandable_segments:True",)),
        ("peak", ()),
        ("none", ()),
    )
]
CASES += [
    (preset, preset, activations, ())
    for preset in ("doubling", "paged")
    for activations in ("per_layer", "peak", "none")
]


def scenario(preset: str, activations: str, settings: tuple[str, ...]) -> Scenario:
    """One of the cases."""
    return Scenario.load(preset=preset, overrides=[*TRAFFIC, f"memory.activations={activations}", *settings])


def measure(of: Scenario) -> tuple[int, int, float]:
    """Operations, steps and seconds of a run."""
    seconds = []
    for _ in range(RUNS):
        twin = Twin(of)
        loaded = twin.recorder.op_index
        start = time.process_time()
        result = twin.run()
        seconds.append(time.process_time() - start)
        assert result.summary["requests_completed"] == 32, "the server died: give it more memory"
    return twin.recorder.op_index - loaded, twin.recorder.step, min(seconds)


def alone(of: Scenario) -> float:
    """Operations a second of the caching allocator on the operations of a run, and nothing else."""
    sets = of.model_copy(update={"results": of.results.model_copy(update={"memory_trace": True})})
    trace = Twin(sets).run().memory_trace
    assert trace is not None
    ops = list(zip(trace["op"], trace["id"], trace["size"], strict=True))
    make: Any = device_allocators.get("caching")
    seconds = []
    for _ in range(RUNS):
        allocator = make(HbmDriver(64 * GIB), make.Config(alloc_conf=of.memory.alloc_conf))
        handles: dict[int, int] = {}
        start = time.process_time()
        for op, id, size in ops:
            if op == "malloc":
                handles[id] = allocator.malloc(size, tag=Tag.KV)
            elif op == "free":
                allocator.free(handles.pop(id))
            else:
                allocator.workspace(size)
        seconds.append(time.process_time() - start)
    return len(ops) / min(seconds)


def profile() -> None:
    """The functions in which ``exact`` with ``per_layer`` spends most."""
    twin = Twin(scenario("caching", "per_layer", ()))
    profiler = cProfile.Profile()
    profiler.runcall(twin.run)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def main() -> None:
    """Print a row per case."""
    if "--profile" in sys.argv[1:]:
        profile()
        return
    print(
        f"{'':10}{'activations':12}{'settings':28}{'operations':>12}{'steps':>7}{'s':>8}{'ops/s':>10}{'steps/s':>9}{'alone':>10}"
    )
    for name, preset, activations, settings in CASES:
        of = scenario(preset, activations, settings)
        operations, steps, seconds = measure(of)
        label = " ".join(text.rpartition(".")[2].removeprefix("alloc_conf=") for text in settings)
        print(
            f"{name:10}{activations:12}{label:28}{operations:12,}{steps:7,}{seconds:8.2f}"
            f"{operations / seconds:10,.0f}{steps / seconds:9,.0f}"
            + (f"{alone(of):10,.0f}" if activations == "per_layer" else "")
        )


if __name__ == "__main__":
    main()
