"""Devices of the catalog: ``devices.toml``, read into :class:`DeviceSpec`."""

from __future__ import annotations

import tomllib
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any

from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.sim.catalog.errors import CatalogError, unknown

CONFIDENCE = {
    "H": "several independent points",
    "M": "one good source",
    "L": "inferred or uncalibrated",
}
"""How far a figure can be trusted, by its letter."""

WORDS = ("name", "vendor", "family", "runtime_names", "sources")
FIGURES = tuple(f.name for f in fields(DeviceSpec) if f.name not in WORDS)
"""The fields of a device that are numbers: each stands in the file with its source."""


def devices() -> tuple[str, ...]:
    """Ids of all devices, sorted."""
    return tuple(sorted(_table()))


def device(name: str) -> DeviceSpec:
    """The device of that id. Raise CatalogError for an unknown one, with the nearest id."""
    table = _table()
    if name not in table:
        raise unknown("device", name, table)
    return table[name]


@cache
def _table() -> dict[str, DeviceSpec]:
    text = files("hbmtwin.sim.catalog").joinpath("devices.toml").read_text(encoding="utf-8")
    return {name: spec_of(name, entry) for name, entry in tomllib.loads(text).items()}


def spec_of(name: str, entry: dict[str, Any]) -> DeviceSpec:
    """Read one entry: ``vendor``, and a table ``{value, source, confidence[, low, high]}`` per figure.

    Raise CatalogError when a figure is missing, unknown, without a source, or outside its own range.
    """
    figures = {key: value for key, value in entry.items() if key not in WORDS}
    if set(figures) != set(FIGURES) or "vendor" not in entry:
        wrong = sorted(set(figures) ^ set(FIGURES)) or ["vendor"]
        raise CatalogError(f"device {name}: missing or unknown: {', '.join(wrong)}")
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for key, figure in figures.items():
        values[key], sources[key] = _figure(f"device {name}, {key}", figure)
    values["allreduce_ns"] = {int(size): ns for size, ns in values["allreduce_ns"].items()}
    words = {"family": entry.get("family", ""), "runtime_names": tuple(entry.get("runtime_names", ()))}
    return DeviceSpec(name=name, vendor=entry["vendor"], **words, sources=sources, **values)


def _figure(where: str, figure: dict[str, Any]) -> tuple[Any, str]:
    value, low, high = figure["value"], figure.get("low"), figure.get("high")
    if not figure.get("source") or figure.get("confidence") not in CONFIDENCE:
        raise CatalogError(f"{where}: a source, and a confidence of {', '.join(CONFIDENCE)}, must stand beside it")
    text = f"{figure['source']} (confidence {figure['confidence']}"
    if low is not None and high is not None:
        if not low <= value <= high:
            raise CatalogError(f"{where}: {value} is outside its range {low}..{high}")
        text += f", range {low:g}..{high:g}"
    return value, text + ")"
