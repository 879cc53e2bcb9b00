"""What a benchmark's points reached, and the peaks that this is a share of."""

from __future__ import annotations

from typing import NamedTuple

from hbmtwin.sim import catalog
from hbmtwin.sim.phrases import Phrase, Said
from hbmtwin.validation.bench.records import Bench, Point, work_of

OWN = Phrase("of its own fastest copy and product", "取自身最快的拷贝和矩阵乘")
OWN_COPY = Phrase("of its own fastest copy", "取自身最快的拷贝")
OWN_PRODUCT = Phrase("of its own fastest product", "取自身最快的矩阵乘")
OF_CATALOG = Phrase("as the catalog has them of {device}", "目录中 {device} 的参数")


class Peaks(NamedTuple):
    """Bytes and FLOPs a second that a device can do at best; 0: not known."""

    bytes_per_s: float
    flops_per_s: float
    whose: Said


def bytes_and_flops_per_s(point: Point, dtype_bytes: int) -> tuple[float, float]:
    """What a point reached: bytes that it had to read (a copy: and to write) and FLOPs, a second."""
    work = work_of(point.case, dtype_bytes)
    moved = work.read_bytes * (2 if point.case.op == "copy" else 1)
    return moved / point.median_ns * 1e9, work.flops / point.median_ns * 1e9


def measured_peaks(bench: Bench) -> Peaks:
    """The fastest copy, both ways, and the fastest matrix product."""
    reached = [(p.case.op, *bytes_and_flops_per_s(p, bench.dtype_bytes)) for p in bench.points]
    moved = max((moved for op, moved, _ in reached if op == "copy"), default=0.0)
    flops = max((flops for op, _, flops in reached if op == "matmul"), default=0.0)
    return Peaks(moved, flops, Said.of(OWN if bool(moved) == bool(flops) else OWN_COPY if moved else OWN_PRODUCT))


def peaks_of(bench: Bench) -> Peaks:
    """Those of the catalog's device of that name; of one that it does not have, and of a CPU, those measured."""
    called = catalog.devices_called(bench.device) if bench.backend != "cpu" else ()
    if not called:
        return measured_peaks(bench)
    device = catalog.device(called[0])
    whose = Said.of(OF_CATALOG, device=device.name)
    return Peaks(device.memory_bandwidth_bytes_per_s, device.peak_flops_per_s, whose)
