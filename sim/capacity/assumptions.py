"""What an answer leans on: figures that nobody knows exactly, each with its range, and a scenario with one at an end.

::

    figure                         range from                                     set through
    kv_bandwidth_efficiency, ...   the catalog's low and high, or those that a    a profile made on the fly
                                   calibration profile gives
    allreduce_ns                   half and one and a half: no table of it        layer_overhead_ns: a layer has two
    memory_bytes                   the catalog's                                  device.memory_bytes
    activations, non-torch,        the memory budget's lines                      the profile's memory
    graphs

Weights, KV of a token and block sizes are computed exactly and are no assumption.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from hbmtwin.kernels.profile import COEFFICIENTS, Coefficient, Profile
from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.sim import catalog
from hbmtwin.sim.calibration import profile_of
from hbmtwin.sim.capacity.plan_targets import with_keys
from hbmtwin.sim.phrases import Lang, Phrase, Said
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.server_plan import ServerPlan

BUDGET = {"activations": "activation_bytes", "non-torch": "non_torch_bytes", "graphs": "graph_bytes"}
"""Lines of the memory budget that are estimates, and what a profile calls them."""
ALLREDUCE_SPREAD = 0.5
"""Of a time that was inferred from the remainder of a step: the catalog's words give about as much either way."""
WORDS = {
    "memory_bandwidth_bytes_per_s": Phrase("the device's memory bandwidth", "设备的显存带宽"),
    "peak_flops_per_s": Phrase("the device's peak FLOPs", "设备的峰值算力"),
    "weight_bandwidth_efficiency": Phrase(
        "the share of the bandwidth with which weights are read", "读取权重达到的带宽比例"
    ),
    "kv_bandwidth_efficiency": Phrase("the share of the bandwidth with which KV is read", "读取 KV 达到的带宽比例"),
    "prefill_flops_efficiency": Phrase(
        "the share of the peak FLOPs that prefill reaches", "prefill 达到的峰值算力比例"
    ),
    "attention_flops_efficiency": Phrase(
        "the share of the peak FLOPs that attention reaches in prefill", "prefill 中 attention 达到的峰值算力比例"
    ),
    "attention_launch_ns": Phrase("the fixed time of an attention call", "单次 attention 调用的固定时间"),
    "layer_overhead_ns": Phrase("the time of a layer's small operators", "每层小算子的时间"),
    "step_overhead_ns": Phrase("the fixed time of a step", "每步的固定时间"),
    "host_step_ns": Phrase("the host's time of a decode step", "主机侧每个 decode 步的时间"),
    "host_layer_ns": Phrase("the host's time of a layer in a step that prefills", "含 prefill 的步中主机侧每层的时间"),
    "driver_call_ns": Phrase("the time of a driver call", "一次驱动调用的时间"),
    "sync_ns": Phrase("the time of a synchronisation", "一次同步的时间"),
    "host_bandwidth_bytes_per_s": Phrase("the bandwidth to the host", "到主机的带宽"),
    "link_bandwidth_bytes_per_s": Phrase("the bandwidth between devices", "设备之间的带宽"),
    "send_ns": Phrase("the time of a message between stages", "流水级之间一次消息的时间"),
    "send_bandwidth_bytes_per_s": Phrase("the bandwidth between stages", "流水级之间的带宽"),
    "context_bytes": Phrase("what the device's context holds", "设备的运行时上下文"),
    "memory_bytes": Phrase("the memory that the device reports", "设备报告的显存"),
    "allreduce_ns": Phrase("the time of a small all-reduce", "一次小 AllReduce 的时间"),
    "activation_bytes": Phrase("the activation peak", "激活峰值"),
    "non_torch_bytes": Phrase("what libraries hold outside torch", "非 torch 显存"),
    "graph_bytes": Phrase("the memory of captured graphs", "图捕获占用的显存"),
}


class Ends(NamedTuple):
    """A figure, and how low and high it may be."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Assumption:
    """One figure that an answer rests on."""

    name: str
    ends: Ends
    basis: str
    """``default: <source>`` or ``calibrated: ...``."""

    def words(self, lang: Lang = "en") -> str:
        """What it is, in words."""
        known = WORDS.get(self.name)
        return self.name.removesuffix("_ns").replace("_", " ") if known is None else Said.of(known).text(lang)

    @property
    def calibrated(self) -> bool:
        """Whether it was measured on the device, and is no default."""
        return self.basis.startswith("calibrated")


def assumptions_of(scenario: Scenario) -> tuple[Assumption, ...]:
    """Every figure with a range that a run of *scenario* depends on. Raise what a ServerPlan does."""
    plan = ServerPlan(scenario)
    found = [*_of_the_device(scenario, plan.device, plan.profile)]
    for line in plan.budget.lines:
        if line.item in BUDGET and line.low != line.high:
            ends = Ends(line.bytes, line.low, line.high)
            found.append(Assumption(BUDGET[line.item], ends, f"default: {line.source}"))
    return tuple(found)


def _of_the_device(scenario: Scenario, device: DeviceSpec, profile: Profile | None) -> list[Assumption]:
    measured: Mapping[str, Coefficient] = {} if profile is None else profile.coefficients
    held = {} if profile is None else profile.memory
    found = []
    for name, c in measured.items():
        if c.low != c.high:
            basis = (
                f"calibrated: profile {profile.name}, {c.points} points, confidence {c.confidence}" if profile else ""
            )
            found.append(Assumption(name, Ends(c.value, c.low, c.high), basis))
    for name, figure in catalog.device_figures(scenario.device.name).items():
        known = name in COEFFICIENTS or name == "context_bytes" or name == "memory_bytes"
        given = (
            name in measured or name in held or (name == "memory_bytes" and scenario.device.memory_bytes is not None)
        )
        if known and not given and figure.low is not None and figure.high is not None and figure.low != figure.high:
            ends = Ends(float(figure.value), figure.low, figure.high)
            found.append(Assumption(name, ends, f"default: {figure.source} (confidence {figure.confidence})"))
    tp = scenario.engine.tensor_parallel_size
    if (allreduce := device.allreduce_ns.get(tp)) and "layer_overhead_ns" not in measured:
        ends = Ends(allreduce, allreduce * (1 - ALLREDUCE_SPREAD), allreduce * (1 + ALLREDUCE_SPREAD))
        source = device.sources.get("allreduce_ns", "the catalog")
        found.append(Assumption("allreduce_ns", ends, f"default: {source}; half less or more is assumed"))
    return found


def applied(scenario: Scenario, figures: Mapping[str, float], folder: Path) -> Scenario:
    """*scenario* with other values of its uncertain figures; a profile that says so is written into *folder*.

    The profile's name is a hash of what it says: the same figures are the same file, and the same runs.
    """
    figures = dict(figures)
    if (memory := figures.pop("memory_bytes", None)) is not None:
        scenario = with_keys(scenario, {"device.memory_bytes": int(memory)})
    if not figures:
        return scenario
    device = catalog.device(scenario.device.name)
    profile = profile_of(scenario)
    if (allreduce := figures.pop("allreduce_ns", None)) is not None:
        own = device.layer_overhead_ns if profile is None else profile.applied_to(device).layer_overhead_ns
        change = 2 * (allreduce - device.allreduce_ns[scenario.engine.tensor_parallel_size])
        figures["layer_overhead_ns"] = max(0.0, figures.get("layer_overhead_ns", own) + change)
    measured = {} if profile is None else dict(profile.coefficients)
    held = {} if profile is None else dict(profile.memory)
    for name, value in figures.items():
        if name in COEFFICIENTS:
            measured[name] = _exactly(value)
        else:
            held[name] = round(value)
    if not measured:  # a profile has one figure of the device at least
        measured["layer_overhead_ns"] = _exactly(device.layer_overhead_ns)
    base = profile or Profile(
        name="assumed", device=device.name, made="-", source="plan", coefficients=measured, memory=held
    )
    text = replace(base, coefficients=measured, memory=held).to_json()
    file = folder / f"assumed-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    file.write_text(text, encoding="utf-8")
    return scenario.model_copy(update={"calibration": scenario.calibration.model_copy(update={"profile": str(file)})})


def _exactly(value: float) -> Coefficient:
    return Coefficient(value, value, value, 0.0, 1, "L")
