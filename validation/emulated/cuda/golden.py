"""Traces with what the real CUDA allocator made of them, small enough to be kept: CI replays them without the wheel.

A folder holds, for each configuration, ``NAME.trace.csv.gz`` (operations) and ``NAME.results.csv.gz`` (a row per
operation, :data:`COLUMNS`), and an ``index.csv`` with the settings and a digest of the segments and blocks at the end.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from hbmtwin.validation.allocator import Case
from hbmtwin.validation.comparison import base_address, segment_lines
from hbmtwin.validation.emulated.cuda.real import EmulatedCuda
from hbmtwin.validation.emulated.records import NpuSettings, RealRun
from hbmtwin.workloads.formats.memory_trace import MemoryOp, read_memory_trace, write_memory_trace

STATISTICS: Final = {
    "reserved_bytes": "reserved_bytes.all.current",
    "allocated_bytes": "allocated_bytes.all.current",
    "requested_bytes": "requested_bytes.all.current",
    "active_bytes": "active_bytes.all.current",
    "inactive_split": "inactive_split.all.current",
    "inactive_split_bytes": "inactive_split_bytes.all.current",
    "num_device_alloc": "num_device_alloc",
    "num_device_free": "num_device_free",
    "num_alloc_retries": "num_alloc_retries",
    "num_ooms": "num_ooms",
    "num_sync_all_streams": "num_sync_all_streams",
}
COLUMNS: Final = ("address", "outcome", *STATISTICS, "all_statistics")
"""``address`` counts from the first one of the run, -1 is none; ``all_statistics`` is a CRC-32 over every number of
``memory_stats()`` in order of its keys, eight bytes each, the lowest first."""
GOLDEN: Final = (
    *("default", "three streams", "kv, doubling", "max_split, three streams", "roundup by size"),
    *(
        "gc and fraction, three streams",
        "large segment and max_split",
        "max_split, gc and fraction",
        "fraction in mid-run",
        "settings in mid-run",
    ),
    *("expandable", "expandable, three streams", "expandable and max_split", "expandable, gc and fraction"),
    *("expandable, other memory", "events on three streams", "events and expandable", "pools with options"),
)
"""Names of the configurations that are recorded."""
_INDEX: Final = ("file", "name", "capacity_bytes", "alloc_conf", "snapshot_sha256")


@dataclass(frozen=True, slots=True)
class Golden:
    """A recorded run of the real allocator."""

    name: str
    settings: NpuSettings
    ops: list[MemoryOp]
    results: NDArray[np.int64]
    """A row per operation, in the columns of COLUMNS."""
    snapshot_sha256: str
    """Of the segments and blocks at the end."""


def results_of(run: RealRun) -> NDArray[np.int64]:
    """What is kept of a run, or compared with what was kept."""
    addresses = run.results["address"]
    table = [np.where(addresses < 0, -1, addresses - base_address(run)), run.results["outcome"]]
    table += [run.stat(key) for key in STATISTICS.values()]
    table.append(np.array([zlib.crc32(row.astype("<i8").tobytes()) for row in run.stats]))
    return np.stack(table, axis=1)


def snapshot_sha256(run: RealRun) -> str:
    """A digest of the segments and blocks at the end of a run."""
    return hashlib.sha256("\n".join(segment_lines(run)).encode()).hexdigest()


def record(cases: Iterable[Case], cuda: EmulatedCuda, folder: Path) -> None:
    """Have the real allocator do each case, and write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for case in cases:
        run = cuda.replay(case.ops, case.settings)
        file = "_".join(case.name.replace(",", "").split())
        write_memory_trace(case.ops, folder / f"{file}.trace.csv.gz")
        text = "".join(",".join(map(str, row)) + "\n" for row in (COLUMNS, *results_of(run).tolist()))
        (folder / f"{file}.results.csv.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
        settings = case.settings
        rows.append((file, case.name, settings.capacity_bytes, settings.alloc_conf, snapshot_sha256(run)))
    with (folder / "index.csv").open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(_INDEX)
        writer.writerows(rows)


def read_golden(folder: Path) -> Iterator[Golden]:
    """The recorded runs of a folder, in the order of its index."""
    with (folder / "index.csv").open(encoding="utf-8", newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row in rows:
        with gzip.open(folder / f"{row['file']}.results.csv.gz", "rt", encoding="utf-8") as results:
            header, *values = csv.reader(results)
        if tuple(header) != COLUMNS:
            raise ValueError(f"{folder}: {row['file']} was recorded with other columns; record the folder anew")
        yield Golden(
            name=row["name"],
            settings=NpuSettings(int(row["capacity_bytes"]), alloc_conf=row["alloc_conf"]),
            ops=list(read_memory_trace(folder / f"{row['file']}.trace.csv.gz")),
            results=np.array(values, np.int64),
            snapshot_sha256=row["snapshot_sha256"],
        )
