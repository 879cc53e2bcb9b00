"""``memory_summary()`` of torch and torch_npu, and ``memory_stats()`` pasted as a dictionary.

::

    |                  PyTorch CUDA memory summary, device ID 0                 |
    |            CUDA OOMs: 1            |        cudaMalloc retries: 3         |
    |        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |
    | Allocated memory      |  21860 MiB |  22100 MiB |  91234 MiB |  69374 MiB |
    |       from large pool |  ...

Torch divides and drops the rest, so a size is up to one unit more than it says. Older releases and torch_npu write KB,
MB, GB for the same units.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.printed import SHIFTS, Printed

_TITLE = re.compile(r"PyTorch (CUDA|HIP|XPU|NPU) memory summary, device ID (\d{1,4})")
_COUNTS = re.compile(r"OOMs: (\d{1,12})\s{1,40}\|\s{1,40}\w{1,20}Malloc retries: (\d{1,12})")
_ROW = re.compile(r"\|\s{0,4}([A-Z][A-Za-z-]{1,20}(?: [a-z]{1,10}){1,3})\s{0,30}\|([^|]{1,40})\|([^|]{1,40})\|")
_CELL = re.compile(r"\s{0,20}(\d{1,15}) ([KMGT]?i?B)\s{0,20}$")
_ROWS = {
    "Allocated memory": "allocated",
    "Active memory": "active",
    "Requested memory": "requested",
    "GPU reserved memory": "reserved",
    "NPU reserved memory": "reserved",
    "XPU reserved memory": "reserved",
    "Non-releasable memory": "inactive_split",
}

_STAT = re.compile(
    r"[\"'](?:(allocated|active|requested|reserved|inactive_split)_bytes\.all\.(current|peak)"
    r"|(num_ooms|num_alloc_retries))[\"']\s{0,4}[:,]\s{0,4}(\d{1,20})"
)


def read(lines: Sequence[Line]) -> list[Finding]:
    """Every table (``memory_summary``) and every dictionary (``memory_stats``), one finding each. O(characters)."""
    found: list[Finding] = []
    tables: dict[str, dict[str, int | float]] = {}
    stats: dict[str, dict[str, int | float]] = {}
    for line in lines:
        if title := _TITLE.search(line.text):
            tables[line.rank] = {"device": int(title[2])}
            words = {"family": title[1]}
            found.append(Finding("memory_summary", line.number, line.rank, tables[line.rank], words, rounded=True))
        elif line.rank in tables:
            _table_line(line.text, tables[line.rank])
        for stat in _STAT.finditer(line.text):
            name = stat[3] or f"{stat[1]}{'_peak' if stat[2] == 'peak' else ''}_bytes"
            numbers = stats.get(line.rank)
            if numbers is None or name in numbers:
                numbers = stats[line.rank] = {}
                found.append(Finding("memory_stats", line.number, line.rank, numbers))
            numbers[name] = int(stat[4])
    return found


def _table_line(text: str, numbers: dict[str, int | float]) -> None:
    """One row of a table: the first of its kind counts, which is that of all pools."""
    if counts := _COUNTS.search(text):
        numbers.setdefault("num_ooms", int(counts[1]))
        numbers.setdefault("num_alloc_retries", int(counts[2]))
        return
    row = _ROW.search(text)
    name = _ROWS.get(row[1]) if row else None
    if row is None or name is None:
        return
    for suffix, cell in (("", row[2]), ("_peak", row[3])):
        if (size := _CELL.match(cell)) and size[2] in SHIFTS:
            unit = 1 << SHIFTS[size[2]]
            numbers.setdefault(f"{name}{suffix}_bytes", Printed(int(size[1]) * unit, unit if unit > 1 else 0))
