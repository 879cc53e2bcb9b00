"""Cases of a kernel benchmark, their work, grids, and files that somebody else wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.validation.bench.grid import grid_of, read_grid
from hbmtwin.validation.bench.peaks import bytes_and_flops_per_s, measured_peaks, peaks_of
from hbmtwin.validation.bench.records import (
    COLLECTIVES,
    OPS,
    Bench,
    BenchError,
    Case,
    Point,
    case,
    held_out,
    read_bench,
    work_of,
)

HEADS = {"num_heads": 8, "num_kv_heads": 2, "head_dim": 64}
POINTS = (
    Point(case("copy", {"bytes": 1000}), 100.0, 90.0, 110.0, 15),
    Point(case("matmul", {"tokens": 4, "out_features": 3, "in_features": 5}), 12.0, 11.5, 13.0, 15),
    Point(case("decode", {"batch": 2, "context_tokens": 7, **HEADS}), 200.0, 150.0, 300.0, 15),
)
BENCH = Bench(
    backend="cpu",
    kernels="cpu-flash",
    device="a box",
    dtype="bfloat16",
    threads=1,
    torch="2.13",
    clock="thread",
    points=POINTS,
)


def test_work_is_what_cannot_be_done_without() -> None:
    """By hand: a token's K and V of 2 heads of 64 in 2 bytes are 512 bytes; a pair costs 4 * 8 * 64 FLOPs."""
    sizes = {"batch": 3, "new_tokens": 4, "context_tokens": 10, **HEADS}
    assert work_of(case("prefill", sizes), 2) == (3 * 14 * 512, 3 * (4 * 10 + 10) * 2048)
    assert work_of(case("decode", {"batch": 3, "context_tokens": 10, **HEADS}), 2) == (30 * 512, 30 * 2048)
    assert work_of(case("matmul", {"tokens": 4, "out_features": 3, "in_features": 5}), 4) == (60, 120)
    layer = {"hidden_size": 512, "intermediate_size": 1408, **HEADS}
    weights = 768 * 512 + 512 * 512 + 2816 * 512 + 512 * 1408
    assert work_of(case("layer", {"tokens": 5, **layer}), 2) == (2 * weights, 10 * weights)
    step = {"batch": 3, "context_tokens": 10, "block_size": 16, "num_layers": 2, "vocab_size": 1000, **layer}
    matrices = 2 * weights + 512_000
    assert work_of(case("step", step), 2) == (2 * matrices + 2 * 30 * 512, 6 * matrices + 2 * 30 * 2048)


def test_what_was_reached_and_of_which_peak() -> None:
    assert bytes_and_flops_per_s(POINTS[0], 2) == (20e9, 0.0)
    assert bytes_and_flops_per_s(POINTS[1], 2) == (2.5e9, 10e9)
    assert measured_peaks(BENCH)[:2] == (20e9, 10e9)
    known = Bench(**{**vars(BENCH), "backend": "cuda", "device": "NVIDIA H200"})
    assert peaks_of(known)[0] > 4e12
    assert peaks_of(BENCH) == measured_peaks(BENCH)


def test_a_benchmark_reads_back_as_itself(tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(BENCH.to_json(), encoding="utf-8")
    assert read_bench(tmp_path / "b.json") == BENCH
    assert json.loads(BENCH.to_json()) == BENCH.to_dict()


def changed(**changes: Any) -> dict[str, Any]:
    return BENCH.to_dict() | changes


def with_point(**changes: Any) -> dict[str, Any]:
    tree = BENCH.to_dict()
    return tree | {"points": [tree["points"][0], tree["points"][1] | changes]}


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ([], "an object is wanted"),
        (changed(format=2), "format: 2 is not 1"),
        (changed(colour=1), "colour: unknown key"),
        (changed(dtype="int4"), "dtype: int4 is none of"),
        (changed(backend="xyz"), "backend: xyz is none of cpu, cuda, npu"),
        (changed(threads=-1), "threads: -1 is below 0"),
        (changed(threads="1"), "threads: '1' is not of the right kind"),
        (changed(points=[]), "points: 1 to"),
        (changed(points=[1]), "points.0: an object is wanted"),
        (with_point(median_ns=0), "points.1: 0 < p25_ns"),
        (with_point(p75_ns=1), "points.1: 0 < p25_ns"),
        (with_point(runs=0), "runs 0 makes no sense"),
        (with_point(op="conv"), "points.1: op conv is none of copy, matmul"),
        (with_point(tokens=-1), "points.1: tokens is a whole number from 1, not -1"),
        (with_point(tokens=2**50), "tokens is a whole number from 1"),
        (with_point(tokens=1.5), "points.1.tokens: 1.5 is not of the right kind"),
        (with_point(batch=1), "matmul has the sizes tokens, out_features, in_features; missing or unknown: batch"),
        (with_point(out_features=2**39), "GiB to read"),
    ],
)
def test_what_is_no_benchmark_is_refused_with_the_file_and_the_key(tree: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "b.json").write_text(json.dumps(tree))
    with pytest.raises(BenchError, match=said) as caught:
        read_bench(tmp_path / "b.json")
    assert str(caught.value).startswith(f"{tmp_path / 'b.json'}: ")


@pytest.mark.parametrize("backend", ["cpu", "cuda", "npu"])
def test_grids_have_every_op_and_the_small_one_is_a_part_in_kind(backend: str) -> None:
    small, full = grid_of("small", backend), grid_of("full", backend)
    assert {c.op for c in small} == {c.op for c in full} == set(OPS) - set(COLLECTIVES)
    assert len(set(full)) == len(full) > 3 * len(small)
    assert all(work_of(c, 4).read_bytes < 16 << 30 for c in full)


def test_lists_in_a_grid_are_multiplied(tmp_path: Path) -> None:
    entries = [
        {"op": "matmul", "tokens": [1, 16], "out_features": 8, "in_features": [4, 2]},
        {"op": "copy", "bytes": 64},
        {"op": "copy", "bytes": [64]},
    ]
    (tmp_path / "g.json").write_text(json.dumps(entries))
    made = read_grid(tmp_path / "g.json")
    assert made == (
        Case("matmul", (1, 8, 4)),
        Case("matmul", (1, 8, 2)),
        Case("matmul", (16, 8, 4)),
        Case("matmul", (16, 8, 2)),
        Case("copy", (64,)),
    )


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "a list of cases is wanted"),
        ([], "a list of cases is wanted"),
        ([1], '0: an object with an "op" is wanted, not 1'),
        ([{"op": 1}], '0: an object with an "op"'),
        ([{"op": "copy", "bytes": [True]}], "bytes is a whole number, or a list of them"),
        ([{"op": "copy", "bytes": []}], "bytes is a whole number, or a list of them"),
        ([{"op": "copy"}], "copy has the sizes bytes"),
        ([{"op": "copy", "bytes": 1}], "bytes is a whole number from 4, not 1"),
        (
            [{"op": "layer", "tokens": 1, "hidden_size": 8, "intermediate_size": 8, **HEADS, "head_dim": 7}],
            "head_dim 7 is odd",
        ),
        ([{"op": "decode", "batch": 1, "context_tokens": 0, **HEADS}], "context_tokens is a whole number from 1"),
        ([{"op": "decode", "batch": 1, "context_tokens": 9, **HEADS, "num_heads": 3}], "2 KV heads do not divide 3"),
        ([{"op": "copy", "bytes": list(range(4, 10_005))}], "more than 10,000 cases"),
    ],
)
def test_what_is_no_grid_is_refused(entries: Any, said: str, tmp_path: Path) -> None:
    (tmp_path / "g.json").write_text(json.dumps(entries))
    with pytest.raises(BenchError, match=said):
        read_grid(tmp_path / "g.json")


def test_folds_hold_every_point_back_once_and_each_has_small_and_large() -> None:
    points = [Point(case("copy", {"bytes": 4 << i}), 1.0, 1.0, 1.0, 1) for i in (5, 3, 9, 1, 7, 2, 8, 4, 6, 0)]
    held: list[Point] = []
    for fold in range(5):
        kept, back = held_out(points, 5, fold)
        assert sorted(kept + back) == sorted(points)
        assert len(back) == 2
        assert back[1].case.sizes[0] == 32 * back[0].case.sizes[0]
        held += back
    assert sorted(held) == sorted(points)
