"""``hbmtwin replay``: one trace on one allocator, and how it went."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from hbmtwin.api import (
    HbmDriver,
    OutOfMemory,
    ReplayError,
    Tally,
    make_allocator,
    per_op_rows,
    read_memory_trace,
    replay,
    write_per_op,
)
from hbmtwin.dashboard.verdict import bytes_text
from hbmtwin.sim.sections import MAX_BYTES


def replay_trace(
    trace: Path,
    allocator: str,
    settings: Mapping[str, object],
    capacity_bytes: int,
    *,
    only: str | None = None,
    per_op: Path | None = None,
) -> tuple[Tally, dict[str, int]]:
    """Carry the trace out, write the table where one is wanted, and return the counts and the final statistics.

    Operations on ids that no malloc before them has are told on stderr. Raise ReplayError for more than 16 TiB.
    """
    if capacity_bytes > MAX_BYTES:
        raise ReplayError(
            f"--capacity-bytes is {capacity_bytes}, more than {MAX_BYTES} (16 TiB); give the bytes of one device"
        )
    if per_op is not None and per_op.exists():
        for stream in (1, 2):  # a shell's redirection, or a link to /dev/stdout under one
            if os.path.samestat(per_op.stat(), os.fstat(stream)):
                raise ReplayError(f"{per_op}: is where this program prints to; choose another name for the table")
    driver = HbmDriver(capacity_bytes)
    try:
        device_allocator = make_allocator(allocator, driver, settings)
    except OutOfMemory as error:
        raise ReplayError(f"{error}; give it more --capacity-bytes") from None
    tally = Tally()
    results = tally.count(replay(read_memory_trace(trace, allocator=only), device_allocator, driver))
    if per_op is None:
        for _ in results:
            pass
    else:
        write_per_op(per_op_rows(results, device_allocator), per_op, trace=trace)
    if tally.strays:
        print(
            f"note: {tally.strays:,} operations are on ids that no malloc before them has, and did nothing; "
            f"the first: {tally.first_stray}",
            file=sys.stderr,
        )
    return tally, device_allocator.stats()


def summary(tally: Tally, stats: Mapping[str, int], wall_s: float) -> dict[str, Any]:
    """What ``--json`` prints: torch's keys (``num_ooms`` among them), and counts of the trace."""
    return {
        **stats,
        "operations": tally.operations,
        "oom_operations": tally.ooms,
        "first_oom_index": tally.first_oom_index,
        "first_oom_message": tally.first_oom_message or None,
        "refused_operations": tally.errors,
        "operations_on_unknown_ids": tally.strays,
        "operations_per_second": round(tally.operations / wall_s, 1) if wall_s else 0.0,
    }


def print_replay(console: Console, name: str, tally: Tally, stats: Mapping[str, int], wall_s: float) -> None:
    """How many operations, where memory ran out first, and what was held at the end and at the peak."""
    fate = "none ran out of memory"
    if tally.first_oom_index is not None:
        fate = f"{tally.ooms:,} ran out of memory, operation {tally.first_oom_index:,} first"
    console.print(f"[bold]{escape(name)}: {tally.operations:,} operations, {fate}[/bold]")
    if tally.first_oom_message:
        console.print(f"  {escape(tally.first_oom_message)}", soft_wrap=True)
    for family in ("reserved_bytes", "allocated_bytes", "requested_bytes"):
        now, peak = stats[f"{family}.all.current"], stats[f"{family}.all.peak"]
        console.print(
            f"  {family.removesuffix('_bytes'):<10} {bytes_text(now)} at the end, {bytes_text(peak)} at the peak"
        )
    if "num_device_alloc" in stats:  # older releases do not count them
        console.print(
            f"  driver     {stats['num_device_alloc']:,} allocations, {stats['num_device_free']:,} frees, "
            f"{stats['num_alloc_retries']:,} retries"
        )
    console.print(f"GiB = 2^30 bytes. Took {wall_s:.1f} s.", style="dim")
