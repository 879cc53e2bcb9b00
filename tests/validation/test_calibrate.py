"""Calibration from made-up times: known coefficients come back, and a wrong count of the work shows in its residual."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from hbmtwin.kernels.fixed_point import TICKS_PER_NS
from hbmtwin.kernels.profile import parse_profile
from hbmtwin.kernels.records import BatchShape, ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.validation.bench.grid import grid_of
from hbmtwin.validation.bench.joined import by_case
from hbmtwin.validation.bench.records import Bench, BenchError, Case, Point, Work, held_out, work_of
from hbmtwin.validation.calibrate import model as calibrate_model
from hbmtwin.validation.calibrate.calibration import CPU, Calibration, calibrate
from hbmtwin.validation.least_squares import fit_logarithms

GRID = grid_of("full", "cpu")
TRUE = {
    "launch": 9_000.0,
    "weights": 8.0,
    "flops": 180.0,
    "serial": 0.6,
    "extra": 120_000.0,
    "small": 3.0,
    "attention": 30_000.0,
    "sequence": 40_000.0,
    "kv": 2.5,
    "attention_flops": 45.0,
    "block": 256,
    "step": 700_000.0,
    "in_step": 200_000.0,
}
COPY_BYTES_PER_NS = 20.0


def matrices(read: float, flops: float) -> float:
    a, b = read / TRUE["weights"], flops / TRUE["flops"]
    return max(a, b) + TRUE["serial"] * min(a, b)


def naive_ns(c: Case) -> float:
    """A time from the words of the specification, case by case, in plain floats."""
    n, (read, flops) = c.named(), work_of(c, 2)
    if c.op == "copy":
        return 2 * read / COPY_BYTES_PER_NS
    if c.op == "matmul":
        return TRUE["launch"] + matrices(read, flops)
    kv = 2 * n["num_kv_heads"] * n["head_dim"] * 2
    if c.op in ("layer", "step"):
        values = 10 * n["hidden_size"] + 3 * n["intermediate_size"]
        values += 2 * (n["num_heads"] + n["num_kv_heads"]) * n["head_dim"]
        layer = 4 * TRUE["launch"] + TRUE["extra"] + n.get("tokens", n.get("batch", 0)) * values * 2 / TRUE["small"]
        if c.op == "layer":
            return layer + matrices(read, flops)
        context = n["batch"] * n["context_tokens"]
        layer += TRUE["in_step"] + TRUE["attention"] + n["batch"] * TRUE["sequence"] + context * kv / TRUE["kv"]
        weights = read - n["num_layers"] * context * kv
        return TRUE["step"] + n["num_layers"] * layer + matrices(weights, weights * n["batch"])
    fixed = TRUE["attention"] + n["batch"] * TRUE["sequence"]
    if c.op == "prefill":
        new, context = n["new_tokens"], n["context_tokens"]
        pairs = min(new * (new + context), new * context + new * (new + 1) / 2 + new * min(TRUE["block"], new) / 2)
        computed = n["batch"] * pairs * 4 * n["num_heads"] * n["head_dim"]
        return fixed + max(computed / TRUE["attention_flops"], n["batch"] * (new + context) * kv / TRUE["kv"])
    return fixed + n["batch"] * n["context_tokens"] * kv / TRUE["kv"]


def bench(noise: float = 0.0, seed: int = 1, cases: tuple[Case, ...] = GRID) -> Bench:
    random = Random(seed)
    points = []
    for c in cases:
        ns = naive_ns(c) * np.exp(random.gauss(0, noise))
        points.append(Point(c, ns, ns, ns, 15))
    return Bench(
        backend="cpu",
        kernels="cpu-flash",
        device="made up",
        dtype="bfloat16",
        threads=1,
        torch="-",
        clock="thread",
        points=tuple(points),
    )


def fitted(b: Bench) -> Calibration:
    return calibrate(b, name="p", made="m")


def of_profile(done: Calibration) -> dict[str, float]:
    return {key: c.value for key, c in done.profile.coefficients.items()}


def expected() -> dict[str, float]:
    peak = max(work_of(c, 2).flops / naive_ns(c) for c in GRID if c.op == "matmul")
    return {
        "memory_bandwidth_bytes_per_s": COPY_BYTES_PER_NS * 1e9,
        "peak_flops_per_s": peak * 1e9,
        "weight_bandwidth_efficiency": TRUE["weights"] / COPY_BYTES_PER_NS,
        "prefill_flops_efficiency": TRUE["flops"] / peak,
        "elementwise_bytes_per_s": TRUE["small"] * 1e9,
        "kv_bandwidth_efficiency": TRUE["kv"] / COPY_BYTES_PER_NS,
        "attention_flops_efficiency": TRUE["attention_flops"] / peak,
        "attention_launch_ns": TRUE["attention"],
        "attention_sequence_ns": TRUE["sequence"],
        "attention_block_tokens": TRUE["block"],
        "step_overhead_ns": TRUE["step"],
        "layer_overhead_ns": 4 * TRUE["launch"] + TRUE["extra"] + TRUE["in_step"],
        "matmul_overlap": 1 - TRUE["serial"],
    }


def test_known_coefficients_come_back() -> None:
    done = fitted(bench())
    assert of_profile(done) == pytest.approx(expected(), rel=1e-3)
    assert done.profile.cross_validated_percent == pytest.approx(0, abs=0.01)


def test_they_come_back_through_noise_within_their_ranges() -> None:
    done = fitted(bench(noise=0.05))
    want = expected()
    for key, c in done.profile.coefficients.items():
        if key not in ("peak_flops_per_s", "memory_bandwidth_bytes_per_s"):
            assert c.value == pytest.approx(want[key], rel=0.25), key
    error = done.profile.cross_validated_percent
    assert error is not None
    assert 3 < error < 6  # of 5 % noise the mean is 4


def test_the_same_points_give_the_same_profile_and_it_can_be_read() -> None:
    one, other = fitted(bench(0.05)), fitted(bench(0.05))
    assert one == other
    assert parse_profile(one.profile.to_json().encode(), "p") == one.profile
    json.dumps(one.to_dict(), allow_nan=False)


def test_bytes_that_are_counted_twice_are_told_by_the_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers only: one bandwidth cannot be that of a matrix alone and of the same in a layer."""

    def twice(c: Case, dtype_bytes: int) -> Work:
        work = work_of(c, dtype_bytes)
        return work._replace(read_bytes=2 * work.read_bytes) if c.op == "layer" else work

    before = fitted(bench(0.02)).cross_validated
    monkeypatch.setattr(calibrate_model, "work_of", twice)
    after = fitted(bench(0.02)).cross_validated
    errors = {row.op: (row.mape_percent, was.mape_percent) for row, was in zip(after, before, strict=True)}
    assert errors["layer"][1] < 3
    assert errors["matmul"][1] < 3
    assert max(errors["layer"][0], errors["matmul"][0]) > 8


def test_a_burst_of_load_does_not_move_the_figures() -> None:
    b = bench(0.02)
    spoilt = tuple(p._replace(median_ns=3 * p.median_ns) if i % 12 == 0 else p for i, p in enumerate(b.points))
    done = of_profile(fitted(replace(b, points=spoilt)))
    want = expected()
    for key in ("weight_bandwidth_efficiency", "kv_bandwidth_efficiency", "attention_sequence_ns"):
        assert done[key] == pytest.approx(want[key], rel=0.15), key


def test_what_was_measured_is_the_range_it_holds_in() -> None:
    spans = fitted(bench()).profile.validity
    assert spans["step_tokens"] == (1, 512)
    assert spans["decode_count"] == (1, 16)
    assert spans["kv_read_tokens"] == (64, 16 * 2048)
    assert spans["prefill_tokens"] == (32, 1024)
    assert spans["hidden_size"] == (512, 1024)


def test_repeats_of_cases_are_no_further_points_and_predict_nothing() -> None:
    """The same times twice: nothing is fitted or judged otherwise, and no point is predicted from its twin."""
    once, twice = fitted(bench(0.05)), fitted(replace(bench(0.05), points=bench(0.05).points * 2))
    assert (twice.fitted, twice.cross_validated) == (once.fitted, once.cross_validated)
    assert twice.profile.coefficients == once.profile.coefficients
    assert twice.profile.source == once.profile.source
    assert twice.left_out == (
        *once.left_out,
        f"repeats of {len(GRID)} cases, each of which is one point: the mean of its medians",
    )


def test_two_measurements_of_a_case_are_their_mean() -> None:
    """By hand: medians 100 and 300 in 15 and 5 runs."""
    b = bench()
    c = b.points[0].case
    pair = (Point(c, 100.0, 90.0, 120.0, 15), Point(c, 300.0, 250.0, 400.0, 5))
    merged, repeated = by_case(replace(b, points=(pair[0], b.points[1], pair[1])))
    assert repeated == 1
    assert merged.points == (Point(c, 200.0, 90.0, 400.0, 20), b.points[1])


def test_a_case_is_on_one_side_of_every_fold() -> None:
    points = bench(0.05).points + bench(0.05, seed=2).points
    for fold in range(5):
        kept, held = held_out(points, 5, fold)
        assert not {p.case for p in kept} & {p.case for p in held}
        assert len(kept) + len(held) == len(points)


def test_too_little_is_refused() -> None:
    with pytest.raises(BenchError, match="prefill: 0 points, at least 4 are needed"):
        fitted(bench(cases=tuple(c for c in GRID if c.op != "prefill")))
    with pytest.raises(BenchError, match="copy: no point"):
        fitted(bench(cases=tuple(c for c in GRID if c.op != "copy")))
    with pytest.raises(BenchError, match="times of a CPU say nothing of h200"):
        calibrate(bench(), name="p", made="m", device="h200")
    with pytest.raises(BenchError, match="the catalog knows no device called 'made up'"):
        fitted(replace(bench(), backend="cuda"))


MODEL = ModelShape("toy", 6, 512, 1408, 8, 2, 64, 8192, 4096)


def test_the_cost_model_gives_a_step_the_time_of_its_case() -> None:
    """The profile through the simulator's own cost model, against the case that was fitted: nothing lies between."""
    device = fitted(bench()).profile.applied_to(CPU)
    cost = RooflineCost(MODEL, device, kv_token_bytes=6 * 2 * 2 * 64 * 2)
    for c in GRID:
        n: Mapping[str, int] = c.named()
        if c.op == "step" and n["num_layers"] == 6 and n["hidden_size"] == 512:
            batch = BatchShape((), n["batch"], n["batch"] * n["context_tokens"], n["batch"])
            assert cost.steps(batch).first_ns == pytest.approx(naive_ns(c), rel=2e-3)
    assert cost.basis == "calibrated on cpu, profile p"
    attention = cost.attention
    ticks = attention.launch_ticks + attention.sequence_ticks + attention.prefill_ticks(256, 512)
    sizes = {"batch": 1, "new_tokens": 256, "context_tokens": 512, "num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
    assert ticks / TICKS_PER_NS / 6 == pytest.approx(naive_ns(Case("prefill", tuple(sizes.values()))), rel=2e-3)


def test_least_squares_find_a_line_through_points_and_its_bounds() -> None:
    x = np.arange(1, 30, dtype=np.float64)
    args: dict[str, Any] = {"low": np.array([1e-3, 1e-3]), "high": np.array([1e6, 1e6])}
    solved = fit_logarithms(lambda p: p[0] + p[1] * x, 5 + 2 * x, np.array([1.0, 1.0]), **args)
    assert solved.values == pytest.approx([5, 2])
    at_bound = fit_logarithms(lambda p: p[0] + p[1] * x, 2 * x, np.array([1.0, 1.0]), **args)
    assert at_bound.values[1] == pytest.approx(2, rel=1e-3)
    assert at_bound.values[0] < 0.01
