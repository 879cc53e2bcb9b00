"""Workloads of the catalog: ``workloads.toml``, read into :class:`WorkloadPreset`.

::

    [azure-conv]                              summary, credit
    [azure-conv."workload.request_rate"]      value, source, confidence       a table for each key that it sets
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from hbmtwin.sim.catalog.device_table import CONFIDENCE
from hbmtwin.sim.catalog.errors import CatalogError, unknown


@dataclass(frozen=True, slots=True)
class WorkloadPreset:
    """Traffic that a name stands for, as the keys of ``[workload]`` and ``[session]`` that it sets."""

    name: str
    summary: str
    credit: str
    """Whose data they are, and their licence."""
    keys: Mapping[str, Any]
    """Dotted keys of a scenario."""
    sources: Mapping[str, str]
    """Where the value of each comes from, and how far to trust it."""


def workload_presets() -> tuple[str, ...]:
    """Names of all workloads, in the order of the file: measured ones, then profiles."""
    return tuple(_table())


def workload_preset(name: str) -> WorkloadPreset:
    """The workload of that name. Raise CatalogError for an unknown one, with the nearest name."""
    table = _table()
    if name not in table:
        raise unknown("workload", name, table)
    return table[name]


@cache
def _table() -> dict[str, WorkloadPreset]:
    text = files("hbmtwin.sim.catalog").joinpath("workloads.toml").read_text(encoding="utf-8")
    return {name: preset_of(name, entry) for name, entry in tomllib.loads(text).items()}


def preset_of(name: str, entry: Mapping[str, Any]) -> WorkloadPreset:
    """Read one entry. Raise CatalogError when its summary or credit is missing, or a key has no value or source."""
    keys: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, figure in entry.items():
        if key in ("summary", "credit"):
            continue
        if "value" not in figure or not figure.get("source") or figure.get("confidence") not in CONFIDENCE:
            raise CatalogError(
                f"workload {name}, {key}: a value, a source and a confidence of {', '.join(CONFIDENCE)} are needed"
            )
        keys[key] = figure["value"]
        sources[key] = f"{figure['source']} (confidence {figure['confidence']})"
    if not entry.get("summary") or not entry.get("credit"):
        raise CatalogError(f"workload {name}: a summary and a credit are needed")
    return WorkloadPreset(name, entry["summary"], entry["credit"], keys, sources)
