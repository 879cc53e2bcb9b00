"""One benchmark from the files of several: of kernels and of collectives, taken on the same machine.

::

    bench.json          matmul ... step     context, workspace, graph       \\
    collectives.json    all_reduce          communicator                     -> all points, each figure once

What is told of the whole (dtype, threads) is that of the first with kernels; other texts stand beside each other.
:func:`by_case` makes one point of what was measured several times: a repeat is no further size to fit to, and on both
sides of a fold it would predict itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hbmtwin.validation.bench.records import COLLECTIVES, MEMORY_FIGURES, Bench, BenchError, Case, MemoryFigure, Point

_TRUST = ("", "L", "M", "H")


def joined(benches: Sequence[Bench]) -> Bench:
    """All points and figures of them. Raise BenchError for benchmarks of two devices, or of kernels in two dtypes or
    with two numbers of threads."""
    first = next((b for b in benches if _kernels(b)), benches[0])
    for other in benches:
        for name in ("backend", "device"):
            if getattr(other, name) != getattr(first, name):
                raise BenchError(
                    f"--from-bench: {name} {getattr(first, name)!r} and {getattr(other, name)!r}: a profile is of one "
                    "device; leave one of the files out"
                )
        for name in ("dtype", "threads"):
            if _kernels(other) and getattr(other, name) != getattr(first, name):
                raise BenchError(
                    f"--from-bench: kernels with {name} {getattr(first, name)} and {getattr(other, name)}: a profile "
                    "is of one; leave one of the files out"
                )
    if len(benches) == 1:
        return first
    kernels, torch, clock = (
        " and ".join(dict.fromkeys(getattr(b, name) for b in benches)) for name in ("kernels", "torch", "clock")
    )
    return replace(
        first,
        kernels=kernels,
        torch=torch,
        clock=clock,
        points=tuple(p for b in benches for p in b.points),
        memory=_figures([f for b in benches for f in b.memory]),
    )


def by_case(bench: Bench) -> tuple[Bench, int]:
    """The benchmark with one point a case, and how many cases had several: mean of medians, the outermost quartiles,
    all runs. In order of the first. O(points)."""
    found: dict[Case, list[Point]] = {}
    for point in bench.points:
        found.setdefault(point.case, []).append(point)
    repeated = sum(len(own) > 1 for own in found.values())
    if not repeated:
        return bench, 0
    points = (own[0] if len(own) == 1 else _one(own) for own in found.values())
    return replace(bench, points=tuple(points)), repeated


def _one(own: Sequence[Point]) -> Point:
    mean = sum(p.median_ns for p in own) / len(own)
    low, high = min(p.p25_ns for p in own), max(p.p75_ns for p in own)
    return Point(own[0].case, mean, low, high, sum(p.runs for p in own))


def _kernels(bench: Bench) -> bool:
    return any(p.case.op not in COLLECTIVES for p in bench.points)


def _figures(found: Sequence[MemoryFigure]) -> tuple[MemoryFigure, ...]:
    """Of each name the one that is trusted most, the first of such."""
    best = {}
    for name in MEMORY_FIGURES:
        own = [figure for figure in found if figure.name == name]
        if own:
            best[name] = max(own, key=lambda figure: _TRUST.index(figure.confidence))
    return tuple(best.values())
