"""What scripts/gpu_check does, in its order: each step a command with a limit, and what is told of its result.

::

    numerics   bench   collectives   calibrate   traces   allocator-*   run-*   replay-*
                       (two devices    |
                        or more)       bench.json, collectives.json
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

CAPPED = """
import runpy, sys, torch
torch.cuda.set_per_process_memory_fraction(min(0.9, int(sys.argv[1]) / torch.cuda.mem_get_info()[1]))
sys.argv = sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""A module under a cap, where it sets none of its own."""

TRACES = """
import sys
from pathlib import Path
from hbmtwin.validation.configurations import CONFIGURATIONS
from hbmtwin.workloads.formats.memory_trace import write_memory_trace
for c in CONFIGURATIONS:
    if c.name in sys.argv[2:]:
        write_memory_trace(c.trace(800, 1), Path(sys.argv[1]) / (c.name.replace(" ", "_") + ".csv"))
"""

MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
SIMULATED = (
    "memory.activations=per_layer",
    "results.steps=true",
    "results.memory_trace=true",
    "results.interval_s=0.001",
    "workload.request_rate=inf",
    "workload.system_prompt_tokens=0",
    "session.turns=1",
    "engine.max_model_len=1024",
)
TO_ITS_END = (
    "kv_cache.preset=paged",  # whose steps a decoder does
    "device.memory_bytes=8589934592",
    "engine.gpu_memory_utilization=0.14",
    "workload.num_prompts=16",
    "workload.prompt_tokens=200",
    "workload.output_tokens=12",
)
OUT_OF_MEMORY = (
    "kv_cache.preset=caching",
    "device.memory_bytes=1740000000",
    "engine.gpu_memory_utilization=0.66",
    "workload.num_prompts=64",
    "workload.prompt_tokens=700",
    "workload.output_tokens=20",
)


class Given(NamedTuple):
    """What the steps depend on."""

    backend: str
    """``cuda`` or ``cpu``."""
    out: Path
    grid: str
    memory_bytes: int
    """Cap of the first steps on a device."""
    devices: int
    """That can be seen; of a CPU ranks."""


class Step(NamedTuple):
    """One command."""

    name: str
    limit_s: int
    argv: tuple[str, ...]
    result: str = ""
    """Name in OUT of what it writes, removed before."""
    stdout: bool = False
    """Standard output is the result; the log has standard error alone."""
    needs: str = ""
    """Path, from OUT, without which it cannot begin."""
    words: Callable[[Path], str] = lambda path: ""
    """From the result."""


def steps_of(given: Given, device: str, work: Path) -> list[Step]:
    """In order. *device* is the catalog's id for the simulated runs, *work* a folder for traces."""
    out, cuda = given.out, given.backend == "cuda"
    module = ("-P", "-c", CAPPED, str(given.memory_bytes)) if cuda else ("-P", "-m")
    cap = ("--memory-gib", f"{given.memory_bytes / 2**30:g}") if cuda else ()
    verb = ("-P", "-m", "hbmtwin")
    allocator = (*verb, "validate", "allocator", "--backend", "cuda" if cuda else "emulated", "--json")
    capacity = ("--capacity-bytes", str(512 << 20))
    timed = ("--backend", given.backend, *cap, "--grid", given.grid, "--out")
    times, profile = ["bench.json"] + ["collectives.json"] * (given.devices > 1), out / "profile.json"
    benches = [word for name in times for word in ("--from-bench", str(out / name))]
    made = [
        Step("numerics", 45, (*module, "hbmtwin.validation.attention_numerics", given.backend)),
        Step(
            "bench", 150, (*verb, "bench", "kernels", *timed, str(out / "bench.json")), "bench.json", words=points_words
        ),
        Step(
            "collectives",
            45,
            (*verb, "bench", "collectives", *timed, str(out / "collectives.json")),
            "collectives.json",
            words=points_words,
        ),
        Step(
            "calibrate",
            20,
            (*verb, "calibrate", *benches, "--out", str(profile), "--made", "scripts/gpu_check"),
            "profile.json",
            needs="bench.json",
            words=lambda path: f"{read(path)['cross_validated_percent']} % off on points held back",
        ),
        Step("traces", 10, ("-P", "-c", TRACES, str(work), *dict.fromkeys(n for _, names in TRAFFIC for n in names))),
    ]
    for conf, names in TRAFFIC:
        name = f"allocator-{conf.partition(':')[0] or 'default'}"
        files = [str(work / (n.replace(" ", "_") + ".csv")) for n in names]
        made.append(
            Step(
                name,
                30,
                (*allocator, *capacity, "--alloc-conf", conf, *files),
                f"{name}.json",
                stdout=True,
                needs=files[0],
                words=allocator_words,
            )
        )
    for name, settings in (("run-end", TO_ITS_END), ("run-oom", OUT_OF_MEMORY)):
        keys = (*SIMULATED, *settings, f"model.name='{work / 'config.json'}'", f"device.name={device}")
        run = out / name
        sets = [word for one in keys for word in ("--set", one)]
        made.append(Step(name, 10, (*verb, "run", *sets, "--out", str(run)), name))
        for backend in ("cuda",) if cuda else ("emulated", "cpu"):
            replay = f"replay-{name[4:]}" if cuda else f"replay-{name[4:]}-{backend}"
            more = ("--backend", backend, "--steps", "8", "--limit-s", "15", "--out", str(out / replay))
            made.append(
                Step(
                    replay,
                    40,
                    (*verb, "validate", "run", str(run), *more),
                    replay,
                    needs=f"{name}/memory_trace.parquet",
                    words=replay_words,
                )
            )
    return [step for step in made if step.name != "collectives" or given.devices > 1]


TRAFFIC = (
    ("", ("default", "events", "pools")),
    ("expandable_segments:True", ("expandable", "three streams")),
    ("max_split_size_mb:40", ("max_split", "empty_cache often")),
)
"""Settings of CUDA's allocator, and the made-up traffic, each trace in a process of its own."""


def read(path: Path) -> Any:
    """A JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def points_words(path: Path) -> str:
    """How many were timed."""
    return f"{len(read(path)['points'])} points"


def allocator_words(path: Path) -> str:
    """How many traces and operations, and what was skipped."""
    said = read(path)
    words = f"{len(said['cases'])} traces, {said['operations']:,} operations, {said['ooms']} out of memory"
    words += f", {said['differences']} differ" if said["differences"] else ""
    return words + "".join(f"; skipped {Path(name).stem}: {why}" for name, why in said["skipped"].items())


def replay_words(path: Path) -> str:
    """What was compared, and what was not."""
    said = read(path / "validate_run.json")
    parts = [f"on {', '.join(filter(None, said['measured_on'].values()))}"]
    memory, kernels, steps = said["memory"], said["kernels"], said["step_times"]
    if memory is not None:
        parts.append(f"{memory['operations']:,} operations, {memory['ooms']} out of memory")
    if kernels is not None:
        parts.append(f"attention of {len(kernels['steps']['step'])} steps")
    if steps is not None:
        parts.append(f"{len(steps['steps']['step'])} whole steps, {steps['factor']:.3g} times the predicted ones")
    absent = (said["memory_absent"], said["kernels_absent"], said["step_times_absent"])
    return "; ".join([*parts, *filter(None, absent)])
