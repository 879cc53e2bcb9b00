"""Bytes as torch writes them in its messages: observed on torch_npu 2.13.0 and torch 2.11.0.

It stands apart from the allocators, so that whoever reads messages need not load them.
"""

from __future__ import annotations


def format_size(size: int) -> str:
    """``512 bytes``, ``1.50 KiB``, ``28.00 MiB``, ``1024.00 MiB`` (exactly 1 GiB), ``2.00 GiB``."""
    if size <= 1 << 10:
        return f"{size} bytes"
    for unit, shift in (("KiB", 10), ("MiB", 20)):
        if size <= 1 << (shift + 10):
            return f"{size / (1 << shift):.2f} {unit}"
    return f"{size / (1 << 30):.2f} GiB"
