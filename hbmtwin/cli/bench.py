"""``hbmtwin bench kernels`` and ``hbmtwin calibrate``: kernels timed on this machine, and a profile of their times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hbmtwin.cli.exits import FAILURE, OK, USAGE, UsageError
from hbmtwin.cli.options import Json
from hbmtwin.cli.output import json_text, stdout, write_whole
from hbmtwin.cli.places import check_file_place

if TYPE_CHECKING:
    from hbmtwin.kernels.profile import Profile
    from hbmtwin.validation.bench.records import Bench
    from hbmtwin.validation.calibrate.calibration import Calibration


class Side(StrEnum):
    """Whose kernels are timed."""

    CPU = "cpu"
    CUDA = "cuda"
    NPU = "npu"


class Unusable(typer.TyperException):
    """A grid, a benchmark or a log that makes no sense; the message names the file and the key."""

    exit_code = USAGE


class NotHere(typer.TyperException):
    """The backend's library or device is missing; the message has the cure."""

    exit_code = FAILURE


BackendOption = Annotated[Side, typer.Option(help="Whose kernels: torch's on the CPU, a CUDA device's, an NPU's.")]
Grid = Annotated[
    str, typer.Option(metavar="small|full|FILE", help="Which sizes: a minute, some minutes, or those of a JSON file.")
]
Dtype = Annotated[str, typer.Option(help="bfloat16, float16 or float32.")]
MemoryGib = Annotated[
    float | None,
    typer.Option(min=0.25, max=1024, help="Most of a device that torch's tensors may take; default: 16, at most 90 %."),
]
Threads = Annotated[int, typer.Option(min=0, max=1024, help="Of a CPU; 0: as torch has them.")]


def bench_kernels(
    backend: BackendOption = Side.CPU,
    grid: Grid = "small",
    dtype: Dtype = "bfloat16",
    threads: Threads = 1,
    memory_gib: MemoryGib = None,
    out: Annotated[
        Path | None, typer.Option(help="File for the times, which `hbmtwin calibrate` reads; an older one is replaced.")
    ] = None,
    picture: Annotated[Path | None, typer.Option(help="HTML page: what was reached of the device's peak.")] = None,
    json_: Json = False,
) -> int:
    """Time attention, matrix products and whole steps of a small decoder."""
    for option, path in (("--out", out), ("--picture", picture)):
        if path is not None:
            check_file_place(option, path)
    begin = time.monotonic()
    bench = _measured(backend, grid, dtype, threads, cap_bytes(backend, memory_gib))
    wall_s = time.monotonic() - begin
    if json_:
        print(json_text(bench.to_dict() | {"wall_s": round(wall_s, 3)}))
    else:
        _print_bench(bench, wall_s)
    if out is not None:  # after the screen, which has the times even where the disk is full
        write_whole(out, bench.to_json())
    if picture is not None:
        from hbmtwin.dashboard.bench_figure import write_bench_page

        write_bench_page(bench, picture)
    return OK


def calibrate(
    out: Annotated[
        Path, typer.Option(help="File of the profile, for calibration.profile of a scenario; an older one is replaced.")
    ],
    backend: BackendOption = Side.CPU,
    grid: Grid = "full",
    dtype: Dtype = "bfloat16",
    threads: Threads = 1,
    from_bench: Annotated[
        list[Path] | None,
        typer.Option(help="Times of `hbmtwin bench kernels --out`, and again for those of `bench collectives`."),
    ] = None,
    from_engine_log: Annotated[
        Path | None, typer.Option(help="Log of a vLLM server, with --model and --device, in place of a benchmark.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model of the log: a name of the catalog or a config.json.")] = None,
    device: Annotated[
        str | None, typer.Option(help="The catalog's id of the device; default: as it calls itself.")
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, max=64, help="Ranks of the log's server.")] = 1,
    name: Annotated[str | None, typer.Option(help="Name of the profile; default: that of its file.")] = None,
    made: Annotated[str, typer.Option(help="When it was made, in your words.")] = "not told",
    json_: Json = False,
) -> int:
    """Fit the cost model to measured times, and write the profile."""
    check_file_place("--out", out)
    for source in (*(from_bench or ()), *filter(None, [from_engine_log])):
        if source.exists() and out.exists() and source.samefile(out):
            raise UsageError(f"--out: {out} is what the profile is made from; name another file")
    _check_twice(from_bench or [])
    name = name or out.stem
    if from_engine_log is not None:
        if from_bench:
            raise UsageError("--from-engine-log: leave out --from-bench; a profile is made from one of them")
        if model is None or device is None:
            raise UsageError("--from-engine-log: say which server it is of with --model and --device")
        profile = _of_log(from_engine_log, model, device, tensor_parallel_size, name, made)
        write_whole(out, profile.to_json())
        if json_:
            print(profile.to_json(), end="")
        else:
            _print_profile(profile, out)
        return OK
    if model is not None or tensor_parallel_size != 1:
        option = "--model" if model is not None else "--tensor-parallel-size"
        raise UsageError(f"{option}: belongs to --from-engine-log; leave it out")
    done = _calibrated(from_bench or [], backend, grid, dtype, threads, name, made, device)
    write_whole(out, done.profile.to_json())
    if json_:
        print(json_text(done.to_dict() | {"written": str(out)}))
    else:
        _print_calibration(done, out)
    return OK


def _check_twice(files: list[Path]) -> None:
    """Raise UsageError for a file that is named twice, by whatever names: its points are no others."""
    for i, path in enumerate(files):
        for before in files[:i]:
            if path == before or (path.exists() and before.exists() and path.samefile(before)):
                what = "is named twice" if path == before else f"is the file {before} again"
                raise UsageError(f"--from-bench: {path} {what}, whose points are no further ones; name it once")


def _read(path: Path) -> Bench:
    from hbmtwin.validation.bench.records import read_bench

    try:
        return read_bench(path)
    except OSError as error:
        raise Unusable(f"--from-bench: {path}: cannot be read: {error.strerror}") from None


def cap_bytes(backend: Side, memory_gib: float | None) -> int:
    """What a device's allocator may take; 0: a CPU has no cap. Raise UsageError where one is asked of it."""
    if backend is Side.CPU:
        if memory_gib is not None:
            raise UsageError("--memory-gib: caps a device's memory, and a CPU has none of its own; leave it out")
        return 0
    from hbmtwin.validation.bench.memory_cap import DEFAULT_BYTES

    return DEFAULT_BYTES if memory_gib is None else int(memory_gib * 2**30)


def check_dtype(dtype: str) -> None:
    """Raise UsageError for one that is not timed."""
    from hbmtwin.validation.bench.records import DTYPE_BYTES

    if dtype not in DTYPE_BYTES:
        raise UsageError(f"--dtype: {dtype!r} is none; choose one of {', '.join(DTYPE_BYTES)}")


@contextmanager
def told_of_grid(grid: str) -> Iterator[None]:
    """What is wrong with a grid, or its file, as a word about the option."""
    from hbmtwin.validation.bench.records import BenchError

    try:
        yield
    except FileNotFoundError:
        raise Unusable(f"--grid: {grid}: no such file; choose small, full, or write one") from None
    except OSError as error:
        raise Unusable(f"--grid: {grid}: cannot be read: {error.strerror}") from None
    except BenchError as error:
        raise Unusable(f"--grid: {error}") from None


def _measured(backend: Side, grid: str, dtype: str, threads: int, memory_bytes: int) -> Bench:
    from hbmtwin.cli.progress import progress_of_runs
    from hbmtwin.kernels.attention.backends import BackendUnavailable
    from hbmtwin.validation.bench.grid import grid_of
    from hbmtwin.validation.bench.kernels import ROUNDS, run_bench
    from hbmtwin.validation.bench.records import BenchError

    check_dtype(dtype)
    with told_of_grid(grid):
        cases = grid_of(grid, backend.value)
    try:
        with progress_of_runs(ROUNDS * len(cases)) as done:
            return run_bench(cases, backend.value, dtype=dtype, threads=threads, memory_bytes=memory_bytes, done=done)
    except BackendUnavailable as error:
        raise NotHere(str(error)) from None
    except BenchError as error:
        raise Unusable(f"--grid: {error}") from None


def _calibrated(
    from_bench: list[Path],
    backend: Side,
    grid: str,
    dtype: str,
    threads: int,
    name: str,
    made: str,
    device: str | None,
) -> Calibration:
    from hbmtwin.validation.bench.joined import joined
    from hbmtwin.validation.bench.records import BenchError
    from hbmtwin.validation.calibrate.calibration import calibrate as fit_profile

    try:
        files = [_read(path) for path in from_bench]
        bench = joined(files) if files else _measured(backend, grid, dtype, threads, cap_bytes(backend, None))
        return fit_profile(bench, name=name, made=made, device=device)
    except BenchError as error:
        raise Unusable(str(error)) from None


def _of_log(log: Path, model: str, device: str, ranks: int, name: str, made: str) -> Profile:
    from hbmtwin.sim import catalog
    from hbmtwin.validation.calibrate.memory import memory_of_log
    from hbmtwin.validation.served_runs.fit import fit_engine_log
    from hbmtwin.validation.served_runs.served_run import ServerSettings

    settings = None if log.is_dir() or ranks == 1 else ServerSettings(tensor_parallel_size=ranks)
    try:
        profile = fit_engine_log(log, catalog.model(model), catalog.device(device), settings, name=name, made=made)
        return profile if log.is_dir() else replace(profile, memory=memory_of_log(log))
    except catalog.CatalogError:
        raise
    except ValueError as error:  # of the log, of the profile, and of a split that the model does not have
        raise Unusable(f"--from-engine-log: {error}") from None


def _print_bench(bench: Bench, wall_s: float) -> None:
    from hbmtwin.cli.tables import print_table
    from hbmtwin.validation.bench.peaks import bytes_and_flops_per_s, peaks_of

    console = stdout()
    peak_bytes, peak_flops, _ = peaks_of(bench)
    console.print(f"[bold]{bench.kernels}[/bold], {bench.dtype}, on {bench.device}, torch {bench.torch}", markup=True)
    cells = []
    for p in bench.points:
        moved, flops = bytes_and_flops_per_s(p, bench.dtype_bytes)
        quartiles = f"{p.p25_ns / 1e3:,.1f} to {p.p75_ns / 1e3:,.1f}"
        shares = [
            f"{100 * moved / peak_bytes:.0f}" if peak_bytes else "-",
            f"{100 * flops / peak_flops:.0f}" if peak_flops else "-",
        ]
        sizes = str(p.case).partition(" ")[2]
        speeds = [f"{moved / 1e9:,.2f}", shares[0], f"{flops / 1e9:,.1f}", shares[1] if flops else "-"]
        cells.append([p.case.op, sizes, f"{p.median_ns / 1e3:,.1f}", quartiles, *speeds])
    header = ("op", "sizes", "median\n(us)", "quartiles\n(us)", "GB/s", "% of\npeak", "GFLOP/s", "% of\npeak")
    print_table(console, header, cells, words=("op", "sizes", "quartiles\n(us)"))
    console.print(
        f"{_peaks_in_words(bench)} Times are medians over {bench.points[0].runs} samples "
        f"by {bench.clock} time; operands are in no cache. Took {wall_s:.1f} s.",
        style="dim",
    )
    for name, size, _, confidence in bench.memory:
        if size is not None:
            console.print(f"{name}: {size:,} bytes (confidence {confidence}; how is in the file)", style="dim")


def _peaks_in_words(bench: Bench) -> str:
    """A peak that was not measured is not told, and neither are shares of it."""
    from hbmtwin.validation.bench.peaks import peaks_of

    peak_bytes, peak_flops, whose = peaks_of(bench)
    gigabytes, gigaflops = f"{peak_bytes / 1e9:,.1f} GB/s", f"{peak_flops / 1e9:,.0f} GFLOP/s"
    if peak_bytes and peak_flops:
        return f"Peaks: {gigabytes} and {gigaflops}, {whose}."
    if peak_flops:
        return f"Peak: {gigaflops}, {whose}; that of GB/s is not known, since the grid has no copy."
    if peak_bytes:
        return f"Peak: {gigabytes}, {whose}; that of GFLOP/s is not known, since the grid has no matmul."
    return "No peak is known, since the grid has neither copy nor matmul."


def _print_calibration(done: Calibration, out: Path) -> None:
    from hbmtwin.cli.tables import print_table

    _print_profile(done.profile, out)
    cells = [
        [
            *(e.op, str(e.points), f"{f.mape_percent:.1f}", f"{e.mape_percent:.1f}", f"{e.p50_percent:.1f}"),
            *(f"{e.p95_percent:.1f}", f"{e.worst_percent:.0f}: {e.worst.partition(' ')[2]}"),
        ]
        for e, f in zip(done.cross_validated, done.fitted, strict=True)
    ]
    header = ("op", "points", "fitted\nMAPE %", "held back\nMAPE %", "p50 %", "p95 %", "worst %, and its case")
    print_table(stdout(), header, cells, words=("op", header[-1]))
    for left in done.left_out:
        stdout().print(f"left out: {left}", style="dim")


def _print_profile(profile: Profile, out: Path) -> None:
    from rich.markup import escape

    from hbmtwin.cli.tables import print_table

    console = stdout()
    error = profile.cross_validated_percent
    held_back = "" if error is None else f", {error:.1f} % off on points held back"
    console.print(f"[bold]{escape(profile.name)}[/bold] of {escape(profile.device)}{held_back}")
    cells = [
        [
            key,
            f"{c.value:,.4g}",
            f"{c.low:,.4g} to {c.high:,.4g}",
            f"{c.residual_percent:.1f}",
            str(c.points),
            c.confidence,
        ]
        for key, c in profile.coefficients.items()
    ]
    header = ("figure", "value", "range", "residual %", "points", "trust")
    print_table(console, header, cells, words=("figure", "range", "trust"))
    for key, size in profile.memory.items():
        console.print(f"{key}: {size:,} bytes, measured")
    above = [key for key, c in profile.coefficients.items() if key.endswith("_efficiency") and c.low > 1]
    if above and profile.device != "cpu":
        found = f"more than the peak of {profile.device}: {', '.join(above)}; it, its ranks or the model are others"
        console.print(f"note: {escape(found)}")
    use = f"a scenario of this device names it: calibration.profile = {str(out)!r}"
    console.print(f"Written to {escape(str(out))}; {escape(use)}.", style="dim")
