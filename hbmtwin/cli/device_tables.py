"""Devices of the catalog on the screen: one line each, or every figure with its range and source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from hbmtwin.cli.tables import print_table

if TYPE_CHECKING:
    from rich.console import Console

GIB = 1 << 30

UNITS = {
    "_bytes_per_s": (1e9, "GB/s"),
    "_flops_per_s": (1e12, "TFLOP/s"),
    "_bytes": (GIB, "GiB"),
    "_ns": (1e3, "us"),
}
"""What a figure is shown in, by the end of its name."""


def print_devices(console: Console, devices: Mapping[str, Mapping[str, Any]]) -> None:
    """The devices of the catalog."""
    header = (
        *("device", "family", "memory\n(GiB)", "bandwidth\n(GB/s)", "dense FP16\n(TFLOP/s)", "KV\nblock"),
        "called by its runtime",
    )
    cells = [
        (
            name,
            d["family"],
            f"{d['memory_bytes'] / GIB:.2f}",
            f"{d['memory_bandwidth_bytes_per_s'] / 1e9:,.0f}",
            f"{d['peak_flops_per_s'] / 1e12:,.0f}",
            str(d["default_block_size"]),
            ", ".join(d["runtime_names"]),
        )
        for name, d in devices.items()
    ]
    print_table(console, header, cells, words=header[-1:])
    console.print("cpu: the host itself, which serves to hold a run to this machine (hbmtwin validate run)")


def print_device_figures(console: Console, devices: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
    """A table a device: each figure with its range, how far to trust it, and where it comes from."""
    header = ("figure", "value", "range", "", "source")
    for name, figures in devices.items():
        console.print(f"[bold]{escape(name)}[/bold]")
        cells = [
            (key, value_text(key, f["value"]), range_text(key, f["low"], f["high"]), f["confidence"], f["source"])
            for key, f in figures.items()
        ]
        print_table(console, header, cells, words=header[-1:])
    console.print("H: several independent points, M: one good source, L: inferred or uncalibrated")


def value_text(key: str, value: float | Mapping[str, float]) -> str:
    """A figure in the unit that its name tells, as people read it; a table of them by number of ranks."""
    if isinstance(value, Mapping):
        return ", ".join(f"{size}: {value_text(key, figure)}" for size, figure in value.items())
    scale, unit = next((known for end, known in UNITS.items() if key.endswith(end)), (1, ""))
    if unit == "GiB":
        return f"{value / scale:.2f} GiB"
    return f"{value / scale:,.4g} {unit}".strip() if value < 10_000 * scale else f"{value / scale:,.0f} {unit}".strip()


def range_text(key: str, low: float | None, high: float | None) -> str:
    """The range of a figure in the same unit; empty where none is known, or it has no width."""
    return (
        ""
        if low is None or high is None or low == high
        else f"{value_text(key, low).partition(' ')[0]}..{value_text(key, high)}"
    )
