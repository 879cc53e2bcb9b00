"""Numbers as people write them: bytes with a unit, and vLLM's short forms of tokens.

::

    512MiB, 29.5GiB, 3e10        bytes            binary with an i, decimal without
    32768, 32k, 25.6k, 32K       tokens           vLLM's: k, m, g, t are powers of 1000; K, M, G, T of 1024, whole only
"""

from __future__ import annotations

import re
from decimal import Decimal

_UNITS = {"": 1, "b": 1}
for _power, _prefix in enumerate("kmgt", start=1):
    _UNITS[f"{_prefix}ib"] = 1024**_power
    _UNITS[f"{_prefix}b"] = 1000**_power

_SHORT = {prefix: 1000**power for power, prefix in enumerate("kmgt", start=1)}
_SHORT |= {prefix.upper(): 1024**power for power, prefix in enumerate("kmgt", start=1)}


def parse_bytes(value: object) -> object:
    """Read ``"29.5GiB"`` and ``3e10`` as bytes; other values pass through. Raise ValueError for an unknown unit."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError("write bytes as a number, or with a unit such as 512MiB or 29.5GiB")
    return int(Decimal(match[1]) * _UNITS[match[2].lower()])


def parse_count(text: str) -> int:
    """Read ``32768``, ``32k`` (32,000), ``25.6k`` or ``32K`` (32,768), as vLLM does. Raise ValueError for others."""
    match = re.fullmatch(r"\s*(\d+)(\.\d+)?([kmgtKMGT]?)\s*", text)
    if match is None or (match[2] and not match[3].islower()):
        raise ValueError("write a whole number, or one such as 32k (32,000), 25.6k or 32K (32,768)")
    scaled = Decimal(match[1] + (match[2] or "")) * _SHORT.get(match[3], 1)
    if scaled != int(scaled):
        raise ValueError(f"{text} is no whole number")
    return int(scaled)
