"""``hbmtwin replay`` and ``hbmtwin validate allocator``: operation traces, on an allocator and on the real one."""

from __future__ import annotations

import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from hbmtwin.cli.exits import DIFFERS, OK
from hbmtwin.cli.options import Json
from hbmtwin.cli.output import json_text, stdout


class RealSide(StrEnum):
    """What ``hbmtwin validate allocator`` compares with."""

    EMULATED = "emulated"
    NPU = "npu"
    CUDA = "cuda"


def replay(
    trace: Annotated[Path, typer.Argument(help="Operation trace, CSV (plain or gzip) or Parquet.")],
    capacity_bytes: Annotated[int, typer.Option(min=1, help="Bytes of the device.")],
    allocator: Annotated[str, typer.Option(help="Device allocator: see `hbmtwin catalog policies`.")] = "caching",
    flavour: Annotated[str | None, typer.Option(help="torch_npu or torch_cuda; default: torch_npu.")] = None,
    release: Annotated[str | None, typer.Option(help="Release whose rules hold, e.g. 2.13.0.")] = None,
    alloc_conf: Annotated[
        str | None, typer.Option(help="Settings as in PYTORCH_NPU_ALLOC_CONF, e.g. max_split_size_mb:64.")
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Operations of this allocator, where a recorded run had several.")
    ] = None,
    per_op: Annotated[
        Path | None, typer.Option(help="Table with one row per operation: .csv, .csv.gz or .parquet.")
    ] = None,
    json_: Json = False,
) -> int:
    """Replay an operation trace on a device allocator."""
    from hbmtwin.cli.replay import print_replay, replay_trace, summary
    from hbmtwin.workloads.plural import counted, were

    given = {"flavour": flavour, "release": release, "alloc_conf": alloc_conf}
    settings = {name: value for name, value in given.items() if value is not None}
    begin = time.monotonic()
    tally, stats = replay_trace(trace, allocator, settings, capacity_bytes, only=only, per_op=per_op)
    wall_s = time.monotonic() - begin
    if tally.errors:
        refused = f"{counted(tally.errors, 'operation')} {were(tally.errors)} refused"
        print(f"note: {refused}; the first: {tally.first_error}", file=sys.stderr)
    if json_:
        print(json_text(summary(tally, stats, wall_s)))
    else:
        print_replay(stdout(), allocator, tally, stats, wall_s)
    return OK


def validate_allocator(
    traces: Annotated[
        list[Path] | None, typer.Argument(metavar="[TRACE]...", help="Operation traces; without any they are made up.")
    ] = None,
    backend: Annotated[
        RealSide, typer.Option(help="emulated: the real torch_npu on an emulated driver; npu, cuda: a device.")
    ] = RealSide.EMULATED,
    capacity_bytes: Annotated[int, typer.Option(min=1, help="Bytes of the device, for trace files.")] = 64 << 30,
    alloc_conf: Annotated[str, typer.Option(help="Settings as in PYTORCH_NPU_ALLOC_CONF, for trace files.")] = "",
    operations: Annotated[int, typer.Option(min=1, help="Of all made-up traces together.")] = 240_000,
    seed: Annotated[int, typer.Option(help="Seed of the made-up traces.")] = 0,
    json_: Json = False,
) -> int:
    """Compare the caching allocator with the real one, every counter at every operation."""
    from hbmtwin.cli.validate import print_report
    from hbmtwin.cli.validate import validate_allocator as compare_both
    from hbmtwin.validation.emulated import NpuSettings

    settings = NpuSettings(capacity_bytes=capacity_bytes, alloc_conf=alloc_conf)
    begin = time.monotonic()
    report = compare_both(traces or (), backend.value, settings, operations, seed)
    wall_s = time.monotonic() - begin
    if json_:
        print(json_text(report.to_dict() | {"wall_s": round(wall_s, 3)}))
    else:
        print_report(stdout(), report, wall_s)
    return DIFFERS if report.differing else OK
