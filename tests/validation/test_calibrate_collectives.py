"""Latency and bandwidth of a link come back from made-up times, beside those of kernels, and become a profile's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

from hbmtwin.kernels.profile import Coefficient, parse_profile
from hbmtwin.kernels.records import BatchShape, ModelShape
from hbmtwin.kernels.roofline import RooflineCost
from hbmtwin.validation.bench.joined import joined
from hbmtwin.validation.bench.records import Bench, BenchError, Case, MemoryFigure, Op, Point
from hbmtwin.validation.calibrate import collectives
from hbmtwin.validation.calibrate.calibration import CPU, calibrate
from hbmtwin.validation.calibrate.collectives import fit_links

from .test_calibrate import bench as kernels

LATENCY = {2: 9_000.0, 4: 14_000.0, 8: 25_000.0}
BYTES_PER_NS = 40.0
SIZES = [8192 * 4**n for n in range(7)]
MIB = 1 << 20


def naive_ns(ranks: int, size: int) -> float:
    """From the words of the specification: a ring sends 2 (n - 1) / n of the message."""
    return LATENCY[ranks] + 2 * size * (1 - 1 / ranks) / BYTES_PER_NS


def measured(
    noise: float = 0.0,
    op: Op = "all_reduce",
    ranks: tuple[int, ...] = (2, 4, 8),
    extra: float = 0.0,
    sizes: Sequence[int] = SIZES,
) -> Bench:
    random = Random(1)
    points = []
    for n in ranks:
        for size in sizes:
            ns = (naive_ns(n, size) + extra) * np.exp(random.gauss(0, noise))
            points.append(Point(Case(op, (n, size)), ns, ns, ns, 15))
    return Bench(
        backend="cpu",
        kernels="gloo",
        device="made up",
        dtype="bfloat16",
        threads=1,
        torch="-",
        clock="wall",
        points=tuple(points),
    )


def values(of: dict[str, Coefficient]) -> dict[str, float]:
    return {key: c.value for key, c in of.items() if key.startswith(("allreduce", "link"))}


def test_latencies_and_bandwidth_come_back_beside_the_kernels() -> None:
    alone, both = (calibrate(b, name="p", made="m") for b in (kernels(), joined([kernels(), measured()])))
    found = dict(both.profile.coefficients)
    assert values(found) == pytest.approx(
        {**{f"allreduce_ns.{n}": ns for n, ns in LATENCY.items()}, "link_bandwidth_bytes_per_s": 40e9}, rel=1e-3
    )
    assert {key: c for key, c in found.items() if key in alone.profile.coefficients} == alone.profile.coefficients
    assert both.profile.validity["tensor_parallel_size"] == (1, 8)
    assert both.profile.validity["allreduce_bytes"] == (0, SIZES[-1])
    assert alone.profile.validity["tensor_parallel_size"] == (1, 1)
    assert [row.op for row in both.cross_validated][-1] == "all_reduce"
    assert both.cross_validated[-1].points == 21
    assert both.cross_validated[-1].mape_percent < 0.1
    assert "and 21 of all-reduces of cpu-flash and gloo" in both.profile.source
    assert parse_profile(both.profile.to_json().encode(), "p") == both.profile


def test_they_come_back_through_noise_within_their_ranges() -> None:
    found = calibrate(joined([measured(0.05), kernels()]), name="p", made="m").profile.coefficients
    for n, ns in LATENCY.items():
        c = found[f"allreduce_ns.{n}"]
        assert c.low < ns < c.high
        assert c.points == 7
        assert c.confidence == "L"  # of seven points
    link = found["link_bandwidth_bytes_per_s"]
    assert link.low < 40e9 < link.high
    assert (link.points, link.confidence) == (21, "H")


def test_bytes_of_a_message_in_place_of_those_of_a_ring_are_told_by_the_residual(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One bandwidth cannot be that of two ranks and of eight, whose rings send 1 and 1.75 of the message."""
    good = calibrate(joined([kernels(), measured(0.02)]), name="p", made="m").cross_validated[-1].mape_percent
    monkeypatch.setattr(collectives, "_sent", lambda p: p.case.named()["bytes"])
    bad = calibrate(joined([kernels(), measured(0.02)]), name="p", made="m").cross_validated[-1].mape_percent
    assert good < 3
    assert bad > 2 * good


def test_the_cost_model_gives_an_all_reduce_the_time_of_its_point() -> None:
    """Through the simulator: two ranks less one, whose matrices and attention are taken away."""
    profile = calibrate(joined([kernels(), measured()]), name="p", made="m").profile
    device = profile.applied_to(CPU)
    model = ModelShape("toy", 1, 4096, 1408, 8, 2, 64, 8192, 4096)
    with_link = RooflineCost(model, device, tensor_parallel_size=2, kv_token_bytes=256)
    without = RooflineCost(
        model,
        replace(device, allreduce_ns={2: 0}, link_bandwidth_bytes_per_s=1e18),
        tensor_parallel_size=2,
        kv_token_bytes=256,
    )
    batch = BatchShape((), 4, 400, 4)
    took = with_link.steps(batch).first_ns - without.steps(batch).first_ns
    assert took == pytest.approx(2 * naive_ns(2, 4 * 4096 * 2), rel=2e-3)  # behind attention and behind the MLP


def test_a_device_s_eager_calls_tell_no_latency_and_graphs_tell_both() -> None:
    eager = replace(measured(extra=20_000), backend="cuda")
    fit, left_out = fit_links(eager, 5)
    assert fit is not None
    assert not fit.keeps_latency
    assert left_out == (
        "all_reduce: latencies of 21 eager calls, which are the host's: no graph was captured; the catalog's stay",
    )
    graphed = measured(op="all_reduce_in_graph")
    fit, left_out = fit_links(replace(eager, points=eager.points + graphed.points), 5)
    assert fit is not None
    assert fit.keeps_latency
    assert fit.links.latency_ns == pytest.approx(LATENCY, rel=1e-3)
    assert left_out == ("all_reduce: 21 points of eager calls, since an engine replays graphs",)
    assert fit_links(kernels(), 5) == (None, ())


def test_nccl_s_latency_is_a_bound_and_hccl_s_a_figure() -> None:
    """Fourteen sizes of two ranks, without noise, are an H, but where engines have a kernel of their own."""
    letters = {}
    for backend, device in (("cuda", "h200"), ("npu", "ascend-910b2")):
        sizes = [8192 * 2**n for n in range(14)]
        own = replace(measured(op="all_reduce_in_graph", ranks=(2,), sizes=sizes), backend=backend)
        both = joined([replace(kernels(), backend=backend), own])
        found = calibrate(both, name="p", made="m", device=device).profile.coefficients
        letters[backend] = (found["allreduce_ns.2"].confidence, found["link_bandwidth_bytes_per_s"].confidence)
    assert letters == {"cuda": ("L", "H"), "npu": ("H", "H")}


def test_sizes_that_were_measured_twice_are_no_more_sizes() -> None:
    """Of two ranks seven points, which are an L, and not fourteen, which would be an H."""
    own = measured(0.02, ranks=(2,))
    once, twice = (calibrate(joined([kernels(), *files]), name="p", made="m") for files in ([own], [own, own]))
    assert twice.profile.coefficients == once.profile.coefficients
    assert twice.profile.coefficients["allreduce_ns.2"].confidence == "L"


def test_too_little_is_refused() -> None:
    few = measured()
    few = replace(few, points=tuple(p for p in few.points if p.case.sizes[0] != 4 or p.case.sizes[1] > 1 << 20))
    with pytest.raises(BenchError, match="all_reduce: 3 sizes of 4 ranks, at least 4 are needed"):
        calibrate(joined([kernels(), few]), name="p", made="m")
    with pytest.raises(BenchError, match=r"--from-bench: no times of kernels, .* name both: --from-bench bench\.json"):
        calibrate(measured(), name="p", made="m")


def test_what_is_joined_is_of_one_device() -> None:
    with pytest.raises(BenchError, match="device 'made up' and 'another': a profile is of one device"):
        joined([kernels(), replace(measured(), device="another")])
    with pytest.raises(BenchError, match="backend 'cpu' and 'cuda'"):
        joined([kernels(), replace(measured(), backend="cuda")])
    with pytest.raises(BenchError, match="kernels with dtype bfloat16 and float16"):
        joined([kernels(), replace(kernels(), dtype="float16")])
    made = joined([replace(measured(), dtype="float16", torch="2.1"), kernels()])
    assert (made.dtype, made.kernels, made.torch, made.clock) == (
        "bfloat16",
        "gloo and cpu-flash",
        "2.1 and -",
        "wall and thread",
    )


def test_of_a_figure_that_two_files_have_the_surer_one_is_taken() -> None:
    unsure, sure, absent = (
        MemoryFigure("context_bytes", size, "h", letter) for size, letter in ((5, "L"), (7, "H"), (None, ""))
    )
    own = MemoryFigure("communicator_bytes", 9 * MIB, "h", "M")
    benches = [replace(kernels(), memory=(f,)) for f in (absent, unsure, sure)] + [replace(measured(), memory=(own,))]
    assert joined(benches).memory == (sure, own)


def test_times_that_say_nothing_are_told_with_a_cure() -> None:
    b = kernels()
    same = tuple(p._replace(median_ns=100.0, p25_ns=100.0, p75_ns=100.0) for p in b.points)
    with pytest.raises(BenchError, match=r"matmul: all 80 points took 100 ns, whatever their size, .* measure again"):
        calibrate(replace(b, points=same), name="p", made="m")
    nearly = tuple(p._replace(median_ns=1e15 - i) for i, p in enumerate(b.points))
    with pytest.raises(BenchError, match=r"coefficients\..* is not within .*measure again, on a device that nobody"):
        calibrate(replace(b, points=nearly), name="p", made="m")
