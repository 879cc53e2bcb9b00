"""Whether a kernel runs a model with its settings on a device, and what is to be known if one does.

::

    device, model, settings --use_of--> Use --every row of the table--> findings: refused, or a warning

The table stands in :mod:`hbmtwin.kernels.capability_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from hbmtwin.kernels.capability_rows import ROWS
from hbmtwin.kernels.capability_use import EIGHT_BIT, SIXTEEN_BIT, Row, Use, places, use_of
from hbmtwin.kernels.records import DeviceSpec, ModelShape


class CapabilityFinding(NamedTuple):
    """What one row of the table says of a use."""

    key: str
    """The row's name, which stays the same when its text changes."""
    setting: str
    """What is at fault, by vLLM's name: ``kv_cache_dtype``, ``v_dtype``, ``dtype``, ``quantization``, ``block_size``,
    ``engine``, ``model``."""
    refused: bool
    """Whether it cannot run; else it is to be known."""
    en: str
    zh: str
    """Both with the cure, where there is one."""
    source: str


def capability_findings(
    device: DeviceSpec,
    model: ModelShape,
    *,
    engine: str = "",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    v_dtype: str | None = None,
    paged: bool = True,
    enable_prefix_caching: bool = True,
    enable_chunked_prefill: bool = True,
    block_size: int | None = None,
) -> tuple[CapabilityFinding, ...]:
    """What the table says of *model* with these settings on *device*, in its order; empty where nothing is known.

    Of a setting that is refused the first reason is told, and no warning.
    *dtype* is that of computing, *v_dtype* that of V where it differs from K's. *engine* as ``--engine`` calls it;
    without one only rows on devices and ops count. *block_size* None is the engine's own. Names of dtypes that do not
    exist are left to others, and nothing is known of a device without a family. O(rows). Raise ValueError for a family
    that the table does not have.
    """
    if not device.family:
        return ()
    use = use_of(
        device,
        model,
        engine=engine,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        v_dtype=v_dtype,
        paged=paged,
        long_query=enable_prefix_caching or enable_chunked_prefill,
        block_size=block_size,
    )
    found = [finding for row in _rows(use) if (finding := _asked(row, use)) is not None]
    first = {finding.setting: finding for finding in reversed(found) if finding.refused}
    return tuple(finding for finding in found if first.get(finding.setting, finding) is finding)


def _rows(use: Use) -> Iterator[Row]:
    return (row for row in ROWS if use.family in row.families and (not row.engines or use.engine in row.engines))


NO_SUCH_VALUE = "int8_by_checkpoint"
"""The row of what runs, though the engine's option has no such value: nobody is told to set it."""


def _left(use: Use) -> tuple[str, ...]:
    """Dtypes of the cache that no row refuses: those of 8 bits, or where none is left those of 16."""

    def goes(name: str) -> bool:
        other = replace(use, k=name, v=name)
        against = (row for row in _rows(use) if row.refuses or row.key == NO_SUCH_VALUE)
        return not any(row.setting == "kv_cache_dtype" and row.holds(other, name) for row in against)

    return tuple(filter(goes, EIGHT_BIT[use.on.vendor])) or tuple(filter(goes, SIXTEEN_BIT))


def _asked(row: Row, use: Use) -> CapabilityFinding | None:
    """What the row says, of K before V. Nothing where it proposes other dtypes and another row refuses all of them."""
    asked = {"kv_cache_dtype": use.k, "v_dtype": use.v} if row.setting == "kv_cache_dtype" else {row.setting: use.k}
    for setting, kv in asked.items():
        if row.holds(use, kv):
            left = _left(use) if "{left}" in row.en else SIXTEEN_BIT
            if not left:
                continue
            filled = places(use, kv, left)
            return CapabilityFinding(
                row.key, setting, row.refuses, row.en.format(**filled), row.zh.format(**filled), row.source
            )
    return None
