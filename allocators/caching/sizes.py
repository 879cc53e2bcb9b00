"""Sizes: what a request is rounded to, and how much is asked of the driver when the cache has no room.

Source of every number: ``NPUCachingAllocator.cpp`` of torch_npu and ``CUDACachingAllocator.cpp`` of PyTorch 2.11.
"""

from __future__ import annotations

from typing import Final, Literal

Flavour = Literal["torch_npu", "torch_cuda"]

KIB: Final = 1 << 10
MIB: Final = 1 << 20

MIN_BLOCK_SIZE: Final = 512
SMALL_SIZE: Final = 1 * MIB
"""Largest rounded size of the small pool."""
SPLIT_REMAINDER: Final = 1 * MIB
"""A large block is split if more than this would be left; a small one if at least a minimal block would be."""
SMALL_BUFFER: Final = 2 * MIB
LARGE_BUFFER: Final = 20 * MIB
"""Segment of a large request below 10 MiB; ``large_segment_size_mb`` changes it."""
MIN_LARGE_ALLOC: Final = 10 * MIB
"""From here on a request gets a segment of its own."""
ROUND_LARGE: Final = 2 * MIB
TOO_LARGE: Final = 1 << 60
"""Requests from here on are refused before anything else (torch: "more than 1EB")."""

NPU_PAD: Final = 32
"""torch_npu adds it to a request before rounding (not on Ascend950 with CANN 9.1 and later)."""
EXTRA_LARGE_BUFFER: Final = 1 << 30
"""Unit of the large pool under ``page_size:1g``."""

SLOTS: Final = 16
"""``roundup_power2_divisions`` has one number per power of two from 1 MiB to 32 GiB; the ends stand for all beyond."""


def slot(size: int) -> int:
    """Index of a size into the divisions."""
    return min(max(size.bit_length() - 21, 0), SLOTS - 1)


def round_size(size: int, pad: int, divisions: tuple[int, ...] | None = None) -> int:
    """Bytes that a request of *size* occupies: a multiple of 512, or a step between two powers of two."""
    size += pad
    if size < MIN_BLOCK_SIZE:
        return MIN_BLOCK_SIZE
    if divisions is not None:
        parts = divisions[slot(size)]
        if parts > 1 and size > MIN_BLOCK_SIZE * parts:
            return round_to_division(size, parts)
    return -(-size // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE


def round_to_division(size: int, parts: int) -> int:
    """Round up to the next of *parts* equal steps between the powers of two around *size*; a power of two stays."""
    power = 1 << (size.bit_length() - 1)
    if size == power:
        return size
    step = power >> (parts.bit_length() - 1)
    if step == 0:
        return power << 1
    return -(-size // step) * step


def allocation_size(rounded: int, large_segment: int = LARGE_BUFFER, *, page_size_1g: bool = False) -> int:
    """Bytes asked of the driver on a miss: the segment's size."""
    if rounded <= SMALL_SIZE:
        return SMALL_BUFFER
    if page_size_1g:
        return -(-rounded // EXTRA_LARGE_BUFFER) * EXTRA_LARGE_BUFFER
    if rounded < MIN_LARGE_ALLOC:
        return large_segment
    return -(-rounded // ROUND_LARGE) * ROUND_LARGE
