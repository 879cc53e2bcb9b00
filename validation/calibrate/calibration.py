"""From a benchmark's points to a calibration profile: fitted, judged on points held back, with the range it holds in.

::

    points --by op--> matrices: matmul, layer          -> weights, FLOPs, what does not overlap, small ops, layers
                      attention: paged_decode, prefill -> KV reads, FLOPs of attention, launches, sequences
                      copy                             -> peaks, where no catalog knows the device
                      all_reduce                       -> latency by ranks, bandwidth of the link

    5 folds: fit on four, predict the fifth            -> the error that is told; the profile is fitted on all
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, isfinite
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from hbmtwin.kernels.profile import Coefficient, Profile, ProfileError, allreduce_key
from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.sim import catalog
from hbmtwin.validation.bench.joined import by_case
from hbmtwin.validation.bench.peaks import measured_peaks
from hbmtwin.validation.bench.records import COLLECTIVES, OPS, Bench, BenchError, Op, Point, held_out
from hbmtwin.validation.calibrate.collectives import LinkFit, fit_links
from hbmtwin.validation.calibrate.memory import memory_of_bench
from hbmtwin.validation.calibrate.model import (
    ATTENTION,
    BLOCKS,
    LAYER,
    MATMUL,
    MATRICES,
    PREFILL,
    STEP,
    Cases,
    Parameter,
)
from hbmtwin.validation.least_squares import Solution, fit_logarithms

Floats = npt.NDArray[np.float64]

FOLDS = 5
MIN_POINTS = 4
"""Of an op, to fit it; fewer would be met by the parameters alone."""

CPU = DeviceSpec(
    name="cpu",
    vendor="cpu",
    memory_bytes=1 << 30,
    memory_bandwidth_bytes_per_s=1e10,
    peak_flops_per_s=1e11,
    weight_bandwidth_efficiency=1.0,
    kv_bandwidth_efficiency=1.0,
    prefill_flops_efficiency=1.0,
    attention_launch_ns=0,
    layer_overhead_ns=0,
    step_overhead_ns=0,
    sources=dict.fromkeys(
        ("memory_bandwidth_bytes_per_s", "peak_flops_per_s"), "no CPU's: every profile of one replaces it"
    ),
)
"""What a CPU's profile is of, with nothing but what a profile sets: the peaks are no CPU's. The catalog's device of
that name has what a server on one costs besides."""


class OpErrors(NamedTuple):
    """How far predictions of one op lie from what was measured, in percent."""

    op: Op
    points: int
    mape_percent: float
    p50_percent: float
    p95_percent: float
    worst: str
    """The case."""
    worst_percent: float


class Calibration(NamedTuple):
    """A profile, and how well it does."""

    profile: Profile
    fitted: tuple[OpErrors, ...]
    """On the points that it was fitted to."""
    cross_validated: tuple[OpErrors, ...]
    """On points held back, fold by fold."""
    left_out: tuple[str, ...]
    """What was measured and not used, and why."""

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "profile": self.profile.name,
            "device": self.profile.device,
            "coefficients": {key: c._asdict() for key, c in self.profile.coefficients.items()},
            "fitted": [row._asdict() for row in self.fitted],
            "cross_validated": [row._asdict() for row in self.cross_validated],
            "cross_validated_percent": self.profile.cross_validated_percent,
            "left_out": list(self.left_out),
        }


class Fitted(NamedTuple):
    """Values of the parameters, their spread, and the residuals by op."""

    values: dict[str, float]
    spread: dict[str, float]


class _Group(NamedTuple):
    ops: tuple[Op, ...]
    parameters: tuple[Parameter, ...]


def calibrate(bench: Bench, *, name: str, made: str, device: str | None = None) -> Calibration:
    """Fit a profile to the benchmark. *device* is the catalog's id; None: by what the runtime calls it, or ``cpu``.

    Raise BenchError where too little was measured, or the device is not known. Deterministic.
    """
    spec = device_of(bench, device)
    bench, repeated = by_case(bench)
    points, left_out = usable(bench)
    if repeated:
        left_out += (f"repeats of {repeated} cases, each of which is one point: the mean of its medians",)
    check_times(points)
    link, no_link = fit_links(bench, FOLDS)
    left_out += no_link
    fitted = fit(points, bench.dtype_bytes)
    judged = [
        (point, guess)
        for fold in range(FOLDS)
        for kept, held in [held_out(points, FOLDS, fold)]
        for point, guess in zip(held, predict(fit(kept, bench.dtype_bytes), held, bench.dtype_bytes), strict=True)
    ]
    own = errors(points, predict(fitted, points, bench.dtype_bytes))
    coefficients = _coefficients(bench, spec, fitted, own)
    validity = validity_of(points, bench.dtype_bytes)
    if link is not None:
        judged += link.held_back
        of_links = errors(link.points, link.links.times_ns(link.points))
        own += of_links
        coefficients |= _link_coefficients(link, of_links, spec)
        validity |= link.validity()
    crossed = errors([point for point, _ in judged], [guess for _, guess in judged])
    memory, not_measured = memory_of_bench(bench)
    counted = f"{len(points)} points" + (f" and {len(link.points)} of all-reduces" if link is not None else "")
    try:
        profile = Profile(
            name=name,
            device=spec.name,
            made=made,
            source=f"hbmtwin bench kernels: {counted} of {bench.kernels}, {bench.dtype}, on {bench.device}"
            + (f", threads {bench.threads}" if bench.threads else "")
            + f", torch {bench.torch}, {bench.clock} time",
            coefficients=coefficients,
            memory=memory,
            validity=validity,
            cross_validated_percent=round(sum(e.mape_percent * e.points for e in crossed) / len(judged), 2),
        )
    except ProfileError as error:
        raise BenchError(
            f"{error}; these times do not go by the cost model: measure again, on a device that nobody else uses"
        ) from None
    return Calibration(profile, own, crossed, left_out + (not_measured if spec is not CPU else ()))


def device_of(bench: Bench, device: str | None) -> DeviceSpec:
    """The device whose figures the profile replaces. Raise BenchError."""
    if bench.backend == "cpu" and device not in (None, CPU.name):
        raise BenchError(
            f"times of a CPU say nothing of {device}; leave out --device, or time the device's own kernels"
        )
    if bench.backend == "cpu":
        return CPU
    if device is not None:
        return catalog.device(device)
    called = catalog.devices_called(bench.device)
    if not called:
        raise BenchError(f"the catalog knows no device called {bench.device!r}; say which it is with --device")
    return catalog.device(called[0])


def usable(bench: Bench) -> tuple[list[Point], tuple[str, ...]]:
    """The points that the cost model has a formula for: of decode the paged ones, if there are any.

    Raise BenchError where there are too few of an op that is needed.
    """
    by_op = {op: [p for p in bench.points if p.case.op == op] for op in OPS}
    if all(p.case.op in COLLECTIVES for p in bench.points):
        raise BenchError(
            "--from-bench: no times of kernels, and a profile needs them beside those of all-reduces; make them on the "
            "same machine with hbmtwin bench kernels --out bench.json, and name both: --from-bench bench.json"
        )
    left_out = []
    decode: Op = "paged_decode" if by_op["paged_decode"] else "decode"
    if decode == "paged_decode" and by_op["decode"]:
        left_out.append(f"decode: {len(by_op['decode'])} points, since an engine's cache is paged")
    kept: list[Point] = []
    for op in ("matmul", "layer", decode, "prefill"):
        if len(by_op[op]) < MIN_POINTS:
            raise BenchError(
                f"{op}: {len(by_op[op])} points, at least {MIN_POINTS} are needed; run a larger grid of hbmtwin bench "
                "kernels"
            )
        kept += by_op[op]
    if len(by_op["step"]) >= MIN_POINTS:
        kept += by_op["step"]
    elif by_op["step"]:
        left_out.append(f"step: {len(by_op['step'])} points, fewer than {MIN_POINTS}")
    if not by_op["copy"] and bench.backend == "cpu":
        raise BenchError("copy: no point, and a CPU's peak is told by nothing else; put one into the grid")
    return kept, tuple(left_out)


def check_times(points: Sequence[Point]) -> None:
    """Raise BenchError where the times of an op say nothing of its sizes: all the same, as a broken clock's are."""
    for op in OPS:
        times = {p.median_ns for p in points if p.case.op == op}
        own = [p for p in points if p.case.op == op]
        if len(own) >= MIN_POINTS and len(times) == 1:
            raise BenchError(
                f"{op}: all {len(own)} points took {times.pop():g} ns, whatever their size, and nothing can be fitted "
                "to that; measure again, on a device that nobody else uses"
            )


def fit(points: Sequence[Point], dtype_bytes: int) -> Fitted:
    """Least squares in relative error of matrices, and of attention."""
    decode: Op = "paged_decode" if any(p.case.op == "paged_decode" for p in points) else "decode"
    values: dict[str, float] = {}
    spread: dict[str, float] = {}
    groups = [_Group(("matmul", "layer"), MATMUL + LAYER), _Group((decode, "prefill"), ATTENTION + PREFILL)]
    if any(p.case.op == "step" for p in points):
        groups.append(_Group(("step",), STEP))
    for group in groups:
        blocks = BLOCKS if "prefill" in group.ops else (0,)
        solved, block = min(
            ((_solve(group, points, dtype_bytes, values | {"block_tokens": b}), b) for b in blocks),
            key=lambda s: _size(s[0]),
        )
        if "prefill" in group.ops:
            values["block_tokens"] = block
        names = [p.name for p in group.parameters]
        values |= dict(zip(names, map(float, solved.values), strict=True))
        spread |= dict(zip(names, map(float, solved.spread), strict=True))
    return Fitted(values, spread)


def _size(solved: Solution) -> float:
    """Of its residuals, by which solutions are compared."""
    return float(np.abs(solved.residuals).mean())


def _solve(group: _Group, points: Sequence[Point], dtype_bytes: int, known: Mapping[str, float]) -> Solution:
    chosen = [[p for p in points if p.case.op == op] for op in group.ops]
    cases = [Cases(op, [p.case for p in own], dtype_bytes) for op, own in zip(group.ops, chosen, strict=True)]
    measured = np.array([p.median_ns for own in chosen for p in own], np.float64)
    names = [p.name for p in group.parameters]

    def predicted(x: Floats) -> Floats:
        coefficients = {**known, **dict(zip(names, map(float, x), strict=True))}
        return np.concatenate([c.times_ns(coefficients) for c in cases])

    start, low, high = (np.array(column, np.float64) for column in list(zip(*group.parameters, strict=True))[1:])
    return fit_logarithms(predicted, measured, start, low, high)


def predict(fitted: Fitted, points: Sequence[Point], dtype_bytes: int) -> list[float]:
    """The time of each point's case, in ns."""
    return [float(Cases(p.case.op, [p.case], dtype_bytes).times_ns(fitted.values)[0]) for p in points]


def errors(points: Sequence[Point], predicted_ns: Sequence[float]) -> tuple[OpErrors, ...]:
    """By op, in percent of what was measured."""
    rows = []
    for op in OPS:
        own = [(p, 100 * abs(ns - p.median_ns) / p.median_ns) for p, ns in zip(points, predicted_ns, strict=True)]
        own = [(p, e) for p, e in own if p.case.op == op]
        if own:
            found = np.array([e for _, e in own])
            worst = int(found.argmax())
            p50, p95 = (float(q) for q in np.percentile(found, [50, 95]))
            rows.append(
                OpErrors(op, len(own), float(found.mean()), p50, p95, str(own[worst][0].case), float(found[worst]))
            )
    return tuple(rows)


def _coefficients(bench: Bench, spec: DeviceSpec, fitted: Fitted, own: Sequence[OpErrors]) -> dict[str, Coefficient]:
    bandwidth, flops = spec.memory_bandwidth_bytes_per_s, spec.peak_flops_per_s
    found: dict[str, Coefficient] = {}
    by_op = {row.op: row for row in own}
    if spec is CPU:
        bandwidth, flops, _ = measured_peaks(bench)
        copies = sum(p.case.op == "copy" for p in bench.points)
        found["memory_bandwidth_bytes_per_s"] = Coefficient(bandwidth, bandwidth, bandwidth, 0.0, copies, "M")
        found["peak_flops_per_s"] = Coefficient(flops, flops, flops, 0.0, by_op["matmul"].points, "M")
    v = fitted.values
    scaled = {
        "weight_bandwidth_efficiency": ("weight_bytes_per_ns", 1e9 / bandwidth, ("matmul", "layer")),
        "prefill_flops_efficiency": ("flops_per_ns", 1e9 / flops, ("matmul", "layer")),
        "elementwise_bytes_per_s": ("elementwise_bytes_per_ns", 1e9, ("layer",)),
        "kv_bandwidth_efficiency": ("kv_bytes_per_ns", 1e9 / bandwidth, ("paged_decode", "decode")),
        "attention_flops_efficiency": ("attention_flops_per_ns", 1e9 / flops, ("prefill",)),
        "attention_launch_ns": ("attention_ns", 1.0, ("paged_decode", "decode", "prefill")),
        "attention_sequence_ns": ("sequence_ns", 1.0, ("paged_decode", "decode", "prefill")),
    }
    for key, (name, factor, ops) in scaled.items():
        found[key] = _coefficient(v[name] * factor, fitted.spread[name], [by_op[op] for op in ops if op in by_op])
    prompts = by_op["prefill"]
    block = int(v["block_tokens"])
    found["attention_block_tokens"] = Coefficient(
        block, block, block, round(prompts.p50_percent, 2), prompts.points, "M" if prompts.p50_percent < 20 else "L"
    )
    layer_ns = MATRICES * v["launch_ns"] + v["extra_ns"]
    if "step" in by_op:
        found["step_overhead_ns"] = _coefficient(v["step_ns"], fitted.spread["step_ns"], [by_op["step"]])
        found["layer_overhead_ns"] = _coefficient(
            layer_ns + v["in_step_ns"], fitted.spread["in_step_ns"], [by_op["layer"], by_op["step"]]
        )
    else:
        found["layer_overhead_ns"] = _coefficient(layer_ns, fitted.spread["extra_ns"], [by_op["layer"]])
    apart = _coefficient(v["serial"], fitted.spread["serial"], [by_op["matmul"], by_op["layer"]])
    found["matmul_overlap"] = apart._replace(
        value=1 - apart.value, low=max(0.0, 1 - apart.high), high=min(1.0, 1 - apart.low)
    )
    return found


def _link_coefficients(link: LinkFit, rows: Sequence[OpErrors], spec: DeviceSpec) -> dict[str, Coefficient]:
    """Of the link, and of each number of ranks, whose points are its own. On CUDA engines have an all-reduce of their
    own for small messages, so that NCCL's latency is a bound, and has the letter L."""
    found = {}
    if link.keeps_latency:
        for ranks, ns in link.links.latency_ns.items():
            own = link.of_ranks(ranks)
            judged = errors(own, link.links.times_ns(own))
            one = _coefficient(ns, link.links.latency_spread[ranks], judged)
            found[allreduce_key(ranks)] = one._replace(confidence="L") if spec.vendor == "nvidia" else one
    bandwidth = _coefficient(link.links.bytes_per_ns * 1e9, link.links.bytes_spread, rows)
    return found | {"link_bandwidth_bytes_per_s": bandwidth}


def _coefficient(value: float, spread: float, rows: Sequence[OpErrors]) -> Coefficient:
    """A value within two standard errors. H: a dozen points and a median error below 10 %, M: below 20 %, else L."""
    apart = exp(min(2 * spread, 3.0)) if isfinite(spread) else exp(3.0)
    points = sum(row.points for row in rows)
    residual = sum(row.p50_percent * row.points for row in rows) / points
    confidence = "L"
    if points >= 12 and residual < 20 and apart < 2:
        confidence = "H" if residual < 10 and apart < 1.25 else "M"
    return Coefficient(value, value / apart, value * apart, round(residual, 2), points, confidence)


def validity_of(points: Sequence[Point], dtype_bytes: int) -> dict[str, tuple[float, float]]:
    """What was measured, in the quantities of a profile."""
    named: Mapping[str, list[dict[str, int]]] = {op: [p.case.named() for p in points if p.case.op == op] for op in OPS}
    decodes, layers, prompts = named["paged_decode"] or named["decode"], named["layer"], named["prefill"]
    values = {
        "step_tokens": [n["tokens"] for n in layers],
        "prefill_tokens": [n["batch"] * n["new_tokens"] for n in prompts],
        "prefill_context_tokens": [n["new_tokens"] + n["context_tokens"] for n in prompts],
        "decode_count": [n["batch"] for n in decodes],
        "kv_read_tokens": [n["batch"] * n["context_tokens"] for n in decodes],
        "hidden_size": [n["hidden_size"] for n in layers],
        "head_dim": [n["head_dim"] for n in decodes],
        "num_attention_heads": [n["num_heads"] for n in decodes],
        "num_kv_heads": [n["num_kv_heads"] for n in decodes],
        "dtype_bytes": [dtype_bytes],
        "tensor_parallel_size": [1],
    }
    return {key: (float(min(found)), float(max(found))) for key, found in values.items()}
