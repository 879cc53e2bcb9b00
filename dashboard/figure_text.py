"""A figure of a device or of a profile with its unit."""

from __future__ import annotations

from hbmtwin.dashboard.verdict import bytes_text


def figure_text(name: str, value: float) -> str:
    """``22.2 GB/s``, ``63.8 µs``, ``49.0 %``, ``0.27 GiB``: by what its name says of its unit."""
    key = name.partition(".")[0]
    if key.endswith("_bytes"):
        return bytes_text(round(value))
    if key.endswith("bytes_per_s"):
        return f"{value / 1e9:,.4g} GB/s"
    if key.endswith("flops_per_s"):
        return f"{value / 1e12:,.4g} TFLOP/s"
    if key.endswith("_ns"):
        return f"{value / 1e3:,.4g} µs" if value < 1e7 else f"{value / 1e6:,.4g} ms"  # no 2e+04
    if key.endswith(("_efficiency", "_overlap")):
        return f"{100 * value:.1f} %"
    return f"{value:,.10g}"
