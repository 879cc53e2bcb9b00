"""The same traffic through another simulator and through hbmtwin, side by side: CPU time and memory.

    python benchmarks/peers [--config FILE] [--requests N] [--rate R] [--runs N] [--aisimulate PROGRAM]

``aisimulate`` (PyPI) simulates vLLM as well. It is installed into an environment of its own in a temporary folder
(1.5 GB), unless a PROGRAM is named; where it cannot be had, that is said, and only ours is measured. Each run is a
fresh process, its children included, the best of several. A tenth of the requests runs too, which tells start-up from
the cost of a further request: ``further`` is requests a CPU second without start-up. ``kept`` is what was written.

What is alike: model, prompt and output lengths, Poisson arrivals at one rate, 8,192 tokens a step, 256 sequences at
once, blocks of 16 tokens, prefix caching (on in aisimulate unless told; no prompt repeats), one device. What differs is
printed with the figures.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from processes import Cost, Failed, run

CHECKOUT = Path(__file__).resolve().parents[2]
CONFIG = CHECKOUT.parent / "shared" / "bench" / "aisimulate_predict.yaml"
MIB = 1 << 20
MODELS = {"Llama-3.1-8B": "llama-3.1-8b", "Llama-2-7b": "llama-2-7b"}
"""The end of a model's name in a configuration, and its id in our catalog."""
FIGURES: dict[str, dict[str, float]] = {
    "a100_sxm": {},
    "h200_sxm": {"memory_bandwidth_bytes_per_s": 4.8e12, "peak_flops_per_s": 989e12},
}
"""Our catalog has the A100 of these devices: what the others have differently, by NVIDIA's data sheet."""
MEMORY = {"a100_sxm": "80GiB", "h200_sxm": "140GiB"}
DIFFERENCES = """\
What differs
  hardware  aisimulate: measured operator tables. Ours: a roofline with the A100's efficiencies, and the bandwidth, peak
            and memory of {hardware}. So durations, and with them requests in flight, are not the same: see the columns.
  time      aisimulate: compiled code, step by step. Ours: Python, a run of equal steps at once, to the same result.
  recorded  aisimulate: totals and percentiles; with --capture-per-request a record of each request.
            Ours, always: each request, every byte of the device over time, address maps with the ids of all blocks.
  start-up  aisimulate runs in a process of its own under one that watches it: two interpreters start."""


class Workload(NamedTuple):
    """What both are given."""

    input_tokens: int
    output_tokens: int
    model: str
    hardware: str
    rate: float


Simulate = Callable[[int, Path], tuple[Cost, float, float]]
"""One run of so many requests into a folder: its cost, mean seconds of a request, and simulated seconds in all."""


class Measured(NamedTuple):
    """One simulator at one size."""

    cost: Cost
    mean_s: float
    """From arrival to the last token, over requests."""
    duration_s: float
    kept_bytes: int


def read_config(path: Path, rate: float) -> Workload:
    """Lengths, model and device of an ``aisimulate predict`` configuration. Exit with the cure if it has none."""
    if not path.is_file():
        sys.exit(
            f"{path}: no such file; give --config FILE, a configuration of `aisimulate predict`, of which model, "
            "hardware, input_tokens and output_tokens are read"
        )
    text = path.read_text(encoding="utf-8")

    def value(key: str) -> str:
        match = re.search(rf"^[^#\n]*\b{key}:\s*([\w./-]+)", text, re.MULTILINE)
        if match is None:
            sys.exit(f"{path}: {key} is not there; write it in the form `{key}: VALUE`")
        return match[1]

    name, hardware = value("model"), value("hardware")
    model = next((ours for end, ours in MODELS.items() if name.endswith(end)), None)
    if model is None:
        sys.exit(f"{path}: model: {name!r} is not one of {', '.join(MODELS)}; add it to MODELS")
    if hardware not in FIGURES:
        sys.exit(f"{path}: hardware: {hardware!r} is not one of {', '.join(FIGURES)}; add it to FIGURES and MEMORY")
    lengths = [value(key) for key in ("input_tokens", "output_tokens")]
    if not all(length.isdecimal() for length in lengths):
        sys.exit(f"{path}: input_tokens and output_tokens must be numbers here, not {' and '.join(lengths)}")
    return Workload(int(lengths[0]), int(lengths[1]), model, hardware, rate)


def install(folder: Path) -> str | None:
    """The program, in a new environment; None, and the reason on screen, where it cannot be had.

    What PyPI has of a release may be a stub that fetches the real package from its vendor: then the newest whole one.
    """
    print("aisimulate is being installed (1.5 GB, minutes); --aisimulate PROGRAM names one that is there", flush=True)
    venv = folder / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    pip = [str(venv / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", "aisimulate"]
    reasons = []
    for more in ([], ["--only-binary", "aisimulate"]):
        try:
            run([*pip, *more], folder / "pip.log")
        except Failed as error:
            reasons.append(f"pip install aisimulate {' '.join(more)}: {error}")
        else:
            return str(venv / "bin" / "aisimulate")
    print("aisimulate could not be had, so only ours is measured:", *reasons, sep="\n  ")
    return None


def aisimulate(
    program: str, config: Path, workload: Workload, more: Sequence[str], requests: int, out: Path
) -> tuple[Cost, float, float]:
    """One prediction."""
    sets = (f"traffic.stop.requests={requests}", f"traffic.load.requests_per_second={workload.rate:g}")
    command = [program, "predict", "--config", str(config), "--output-dir", str(out), *more]
    for text in sets:
        command += ["--set", text]
    cost = run(command, out.with_suffix(".log"), {**os.environ, "HF_HUB_OFFLINE": "1"})
    said = json.loads((out / "prediction.json").read_text())
    if said["completed_requests"] != requests:
        raise Failed(f"{said['completed_requests']} of {requests} requests were completed")
    return cost, said["mean_e2e_latency_ms"] / 1e3, said["duration_ms"] / 1e3


def ours(workload: Workload, prefix_caching: bool, requests: int, out: Path) -> tuple[Cost, float, float]:
    """One run of hbmtwin."""
    overrides = [
        f"model.name={workload.model}",
        "device.name=a100-80gb",
        f"device.memory_bytes={MEMORY[workload.hardware]}",
        f"workload.prompt_tokens={workload.input_tokens}",
        f"workload.output_tokens={workload.output_tokens}",
        f"workload.request_rate={workload.rate}",
        f"workload.num_prompts={requests}",
        "workload.system_prompt_tokens=0",
        "session.turns=1",
        "scheduler.max_num_batched_tokens=8192",
        "scheduler.max_num_seqs=256",
        f"kv_cache.enable_prefix_caching={str(prefix_caching).lower()}",
    ]
    settings = json.dumps({"overrides": overrides, "figures": FIGURES[workload.hardware]})
    script = str(Path(__file__).with_name("ours.py"))
    cost = run([sys.executable, script, settings, str(out)], out.with_suffix(".log"))
    said: dict[str, Any] = json.loads(out.with_suffix(".log").read_text().splitlines()[-1])
    if said["completed"] != requests:
        raise Failed(f"{said['completed']} of {requests} requests were completed")
    return cost, said["mean_s"], said["duration_s"]


def best(simulate: Simulate, requests: int, runs: int, folder: Path) -> Measured:
    """The run that took least time; its memory is the most of all."""
    measured = []
    for number in range(runs):
        out = folder / f"{requests}-{number}"
        cost, mean_s, duration_s = simulate(requests, out)
        measured.append(
            Measured(cost, mean_s, duration_s, sum(f.stat().st_size for f in out.rglob("*") if f.is_file()))
        )
    fastest = min(measured, key=lambda m: m.cost.cpu_s)
    return fastest._replace(cost=Cost(fastest.cost.cpu_s, max(m.cost.peak_bytes for m in measured)))


def report(name: str, few: int, many: int, small: Measured, large: Measured) -> None:
    """A row."""
    further = (large.cost.cpu_s - small.cost.cpu_s) / (many - few)
    start = small.cost.cpu_s - few * further
    per_second = f"{1 / further:,.0f}" if further > 0 else "-"
    print(
        f"{name:34}{large.cost.cpu_s:8.2f}{many / large.cost.cpu_s:11,.0f}{start:10.2f}{per_second:>11}"
        f"{large.cost.peak_bytes / MIB:10,.0f}{small.cost.peak_bytes / MIB:10,.0f}"
        f"{large.mean_s:8.2f}{many * large.mean_s / large.duration_s:10.0f}{large.kept_bytes / MIB:10.1f}",
        flush=True,
    )


def main() -> None:
    """Measure both, print a row each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, default=CONFIG, help="of `aisimulate predict`; default: %(default)s")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--rate", type=float, default=30.0, help="requests a second")
    parser.add_argument("--runs", type=int, default=3, help="of each size; the fastest counts")
    parser.add_argument("--aisimulate", metavar="PROGRAM", help="an installed one")
    args = parser.parse_args()
    workload = read_config(args.config, args.rate)
    few, many = max(1, args.requests // 10), args.requests
    if few == many or args.runs < 1:
        parser.error("--requests must be at least 2, and --runs at least 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program: str | None = args.aisimulate or install(folder)
        print(
            f"{many:,} requests at {workload.rate:g} a second, {workload.input_tokens} tokens in, "
            f"{workload.output_tokens} out, {workload.model} on {workload.hardware}; the best of {args.runs} runs"
        )
        print(
            f"{'':34}{'CPU s':>8}{'per CPU s':>11}{'start-up':>10}{'further':>11}{'peak MiB':>10}{'a tenth':>10}"
            f"{'mean s':>8}{'in flight':>10}{'kept MiB':>10}"
        )
        rows: list[tuple[str, Simulate]] = []
        if program is not None:
            detailed = ("--capture-per-request",)
            rows.append(("aisimulate", partial(aisimulate, program, args.config, workload, ())))
            rows.append(("aisimulate, each request", partial(aisimulate, program, args.config, workload, detailed)))
        rows.append(("hbmtwin", partial(ours, workload, True)))
        rows.append(("hbmtwin without prefix caching", partial(ours, workload, False)))
        for number, (title, simulate) in enumerate(rows):
            place = folder / f"row{number}"
            place.mkdir()
            try:
                report(title, few, many, *(best(simulate, n, args.runs, place) for n in (few, many)))
            except (Failed, FileNotFoundError, PermissionError) as error:
                print(f"{title}: not measured: {error}")
    print(DIFFERENCES.format(hardware=workload.hardware))


if __name__ == "__main__":
    main()
