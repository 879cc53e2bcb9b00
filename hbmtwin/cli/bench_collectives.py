"""``hbmtwin bench collectives``: all-reduces of several ranks timed on this machine, and what a communicator takes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hbmtwin.cli.bench import (
    BackendOption,
    Dtype,
    MemoryGib,
    NotHere,
    Side,
    Unusable,
    cap_bytes,
    check_dtype,
    told_of_grid,
)
from hbmtwin.cli.exits import OK, UsageError
from hbmtwin.cli.options import Json
from hbmtwin.cli.output import json_text, stdout, write_whole
from hbmtwin.cli.places import check_file_place

if TYPE_CHECKING:
    from hbmtwin.validation.bench.records import Bench, Case


def bench_collectives(
    backend: BackendOption = Side.CPU,
    ranks: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...", help="Ranks of a group, a device each; default: 2, 4, 8, ... as devices allow."
        ),
    ] = None,
    grid: Annotated[
        str, typer.Option(metavar="small|full|FILE", help="Sizes of messages, or those, and ranks, of a JSON file.")
    ] = "small",
    dtype: Dtype = "bfloat16",
    memory_gib: MemoryGib = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File for the times, which `hbmtwin calibrate` reads beside kernels'; an older one is replaced."
        ),
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="HTML page: time and bandwidth against the message.")] = None,
    json_: Json = False,
) -> int:
    """Time all-reduces by size and ranks, and measure what a communicator takes."""
    check_dtype(dtype)
    for option, path in (("--out", out), ("--picture", picture)):
        if path is not None:
            check_file_place(option, path)
    begin = time.monotonic()
    bench = _measured(backend, ranks, grid, dtype, cap_bytes(backend, memory_gib))
    wall_s = time.monotonic() - begin
    if json_:
        print(json_text(bench.to_dict() | {"wall_s": round(wall_s, 3)}))
    else:
        _print(bench, wall_s)
    if out is not None:  # after the screen, which has the times even where the disk is full
        write_whole(out, bench.to_json())
    if picture is not None:
        from hbmtwin.dashboard.bench_figure import write_bench_page

        write_bench_page(bench, picture)
    return OK


def _measured(backend: Side, ranks: str | None, grid: str, dtype: str, memory_bytes: int) -> Bench:
    from hbmtwin.cli.progress import progress_of_runs
    from hbmtwin.kernels.attention.backends import BackendUnavailable
    from hbmtwin.validation.bench.collectives import GroupFailed, run_collectives
    from hbmtwin.validation.bench.kernels import ROUNDS
    from hbmtwin.validation.bench.records import BenchError

    try:
        cases = _cases(backend, ranks, grid, dtype)
        with progress_of_runs(ROUNDS * len(cases)) as done:
            return run_collectives(cases, backend.value, dtype=dtype, memory_bytes=memory_bytes, done=done)
    except (BackendUnavailable, GroupFailed) as error:
        raise NotHere(str(error)) from None
    except BenchError as error:
        raise Unusable(str(error)) from None


def _cases(backend: Side, ranks: str | None, grid: str, dtype: str) -> tuple[Case, ...]:
    from hbmtwin.validation.bench.collectives import groups_of
    from hbmtwin.validation.bench.grid import collectives_of
    from hbmtwin.validation.bench.records import DTYPE_BYTES, MAX_RANKS

    groups: tuple[int, ...] = ()
    if ranks is not None:
        words = [word.strip() for word in ranks.split(",")]
        if not all(word.isdecimal() and 2 <= int(word[:9]) <= MAX_RANKS for word in words):
            raise UsageError(f"--ranks: numbers from 2 to {MAX_RANKS} with commas, such as 2,4,8, not {ranks!r}")
        groups = tuple(sorted({int(word) for word in words}))
    if grid not in ("small", "full") and groups:
        raise UsageError(f"--ranks: {grid} tells its own; leave it out")
    if grid in ("small", "full") and not groups:
        groups = groups_of(backend.value)
    with told_of_grid(grid):
        return collectives_of(grid, backend.value, groups, DTYPE_BYTES[dtype])


def _print(bench: Bench, wall_s: float) -> None:
    from hbmtwin.cli.tables import print_table
    from hbmtwin.validation.bench.peaks import bytes_and_flops_per_s

    console = stdout()
    console.print(f"[bold]{bench.kernels}[/bold], {bench.dtype}, on {bench.device}, torch {bench.torch}", markup=True)
    cells = []
    for p in bench.points:
        n = p.case.named()
        sent, _ = bytes_and_flops_per_s(p, bench.dtype_bytes)
        quartiles = f"{p.p25_ns / 1e3:,.1f} to {p.p75_ns / 1e3:,.1f}"
        speeds = [f"{n['bytes'] / p.median_ns:,.2f}", f"{sent / 1e9:,.2f}"]
        cells.append([p.case.op, str(n["ranks"]), f"{n['bytes']:,}", f"{p.median_ns / 1e3:,.1f}", quartiles, *speeds])
    header = ("op", "ranks", "bytes", "median\n(us)", "quartiles\n(us)", "GB/s", "bus\nGB/s")
    print_table(console, header, cells, words=("op", "quartiles\n(us)"))
    console.print(
        f"Bus GB/s: what each rank of a ring sends, 2 (ranks - 1) / ranks of the message. Times are medians over "
        f"{bench.points[0].runs} samples by {bench.clock} time, each the mean over ranks. Took {wall_s:.1f} s.",
        style="dim",
    )
    for name, size, how, confidence in bench.memory:
        if size is not None:
            console.print(f"{name}: {size:,} bytes (confidence {confidence}): {how}", style="dim")
