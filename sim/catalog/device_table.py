"""Devices of the catalog: ``devices_*.toml``, read into :class:`DeviceSpec`.

::

    devices_common.toml       [ascend], [nvidia]   figures of host and engine, the same for every device of a vendor
    devices_a2.toml, ...      [ascend-910b2]       a device's own figures
                              [ascend-910b3]       like = "ascend-910b2": those that are not known of it are taken over,
                                                   as uncalibrated
    devices_cpu.toml          [cpu]                the host itself: found by its id, and in no list of accelerators

A figure is ``{value, source, confidence[, low, high]}``.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from hbmtwin.kernels.capability_use import FAMILIES
from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.sim.catalog.errors import CatalogError, unknown

CONFIDENCE = {
    "H": "several independent points",
    "M": "one good source",
    "L": "inferred or uncalibrated",
}
"""How far a figure can be trusted, by its letter."""

FILES = ("devices_a2", "devices_ascend", "devices_ampere", "devices_ada_hopper", "devices_blackwell")
HOST_FILE = "devices_cpu"
WORDS = ("vendor", "family", "runtime_names", "like")
MEASURED_ONLY = (
    *("matmul_overlap", "attention_flops_efficiency", "attention_block_tokens", "elementwise_bytes_per_s"),
    *("attention_sequence_ns", "profile"),
)
"""What only a calibration profile sets: no figure is published of any device, and their defaults change nothing."""
FIGURES = tuple(f.name for f in fields(DeviceSpec) if f.name not in (*WORDS, *MEASURED_ONLY, "name", "sources"))
"""The fields of a device that are numbers: each stands in the file with its source."""


CARDS: Mapping[str, tuple[str, ...]] = {
    "300i duo": ("ascend-310p", "ascend-310p-24gb"),
    "300i pro": ("ascend-310p-24gb",),
    "300v": ("ascend-310p-24gb",),
    "800i a2": ("ascend-910b3", "ascend-910b4", "ascend-910b4-1"),
    "800t a2": ("ascend-910b1", "ascend-910b2", "ascend-910b3"),
    "800i a3": ("ascend-910c",),
    "900 a3": ("ascend-910c",),
}
"""What Atlas cards and servers have in them: a hint to who names one, for most come with several memories."""


class Figure(NamedTuple):
    """One number of a device, with what is known of it."""

    value: Any
    low: float | None
    high: float | None
    confidence: str
    source: str

    def __str__(self) -> str:
        """Where it comes from, in one line."""
        within = "" if self.low is None else f", range {self.low:g}..{self.high:g}"
        return f"{self.source} (confidence {self.confidence}{within})"


def devices() -> tuple[str, ...]:
    """Ids of all accelerators, sorted; ``cpu``, the host itself, is none."""
    return tuple(sorted(name for name, entry in _entries().items() if entry["vendor"] != "cpu"))


def device(name: str) -> DeviceSpec:
    """The device of that id, in any case, without the vendor before it, or called as its runtime calls it.

    Where a runtime calls several devices so, it is the first. Raise CatalogError for an unknown one, with the nearest
    id.
    """
    return _spec(device_name(name))


def device_name(name: str) -> str:
    """The catalog's id of a device that is called so. Raise CatalogError as :func:`device` does."""
    found = name if name in _entries() else _names().get(_plain(name))
    if found is None:
        raise unknown("device", name, _entries(), _in_cards(name))
    return found


def _in_cards(name: str) -> tuple[str, ...]:
    """Devices of the cards that *name* may be, by their words; empty where it is none."""
    wanted = set(_plain(name).split("-")) - {"atlas"}
    found: dict[str, None] = {}
    for card, inside in CARDS.items():
        words = set(card.split())
        if card.split()[0] in wanted and (wanted <= words or words <= wanted):
            found |= dict.fromkeys(inside)
    return tuple(found)


def devices_called(runtime_name: str) -> tuple[str, ...]:
    """Ids of the devices that a runtime or a vendor's tool calls so, in any case; sorted, empty where none is.

    Several where a name tells the cores and not the memory: a 310P has 24 or 48 GB.
    """
    wanted = _plain(runtime_name)
    return tuple(sorted(n for n in _entries() if wanted in {_plain(called) for called in _spec(n).runtime_names}))


def device_figures(name: str) -> dict[str, Figure]:
    """Every number of a device with its range, confidence and source. Raise CatalogError for an unknown id."""
    return _figures(name, _entries()[device_name(name)], _common())


def _plain(name: str) -> str:
    """A name without its vendor, so that those of the catalog, of torch and of the vendors' tools are one."""
    plain = name.strip().lower().replace("_", "-").replace(" ", "-")
    for vendor in ("nvidia-", "geforce-", "ascend-", "ascend"):
        plain = plain.removeprefix(vendor)
    return plain


@cache
def _names() -> dict[str, str]:
    """What devices may be called besides, and the first that is called so."""
    names: dict[str, str] = {}
    for name in (*devices(), *_read(HOST_FILE)):
        names.setdefault(_plain(name), name)
    for name in devices():
        for called in _spec(name).runtime_names:
            names.setdefault(_plain(called), name)
    return names


@cache
def _spec(name: str) -> DeviceSpec:
    return spec_of(name, _entries()[name], _common())


@cache
def _entries() -> dict[str, dict[str, Any]]:
    """Entries of all files, with what they take over from the device that they are like."""
    entries = {name: entry for file in (*FILES, HOST_FILE) for name, entry in _read(file).items()}
    return {name: _taken_over(name, entries) for name in entries}


@cache
def _common() -> dict[str, Any]:
    return _read("devices_common")


def _read(file: str) -> dict[str, Any]:
    return tomllib.loads(files("hbmtwin.sim.catalog").joinpath(f"{file}.toml").read_text(encoding="utf-8"))


def _taken_over(name: str, entries: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The entry with the figures of the device that it is like, of which the source and the doubt are told."""
    entry = entries[name]
    like = entry.get("like")
    if like is None:
        return entry
    if like not in entries or like == name:
        raise CatalogError(f"device {name}: like = {like!r}, which is no other device of these files")
    taken = {key: figure for key, figure in _taken_over(like, entries).items() if key not in WORDS and key not in entry}
    return entry | {key: figure | {"confidence": "L", "source": _as_on(like, figure)} for key, figure in taken.items()}


def _as_on(like: str, figure: Mapping[str, Any]) -> str:
    """The source of a figure that is taken over: of the device that it is of, through however many."""
    source: str = figure["source"]
    return source if source.startswith("as on the ") else f"as on the {like}: {source}"


def spec_of(name: str, entry: Mapping[str, Any], common: Mapping[str, Any]) -> DeviceSpec:
    """Read one entry: its words, its figures, and those of its vendor in *common*.

    Raise CatalogError when a figure is missing, unknown, without a source, or outside its own range, and for a family
    that the capability table does not have.
    """
    figures = _figures(name, entry, common)
    if entry.get("family") not in FAMILIES:
        raise CatalogError(f"device {name}: family must be one of {', '.join(FAMILIES)}, not {entry.get('family')!r}")
    values = {key: figure.value for key, figure in figures.items()}
    values["allreduce_ns"] = {int(size): ns for size, ns in values["allreduce_ns"].items()}
    return DeviceSpec(
        name=name,
        vendor=entry["vendor"],
        family=entry["family"],
        runtime_names=tuple(entry.get("runtime_names", ())),
        sources={key: str(figure) for key, figure in figures.items()},
        **values,
    )


def _figures(name: str, entry: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Figure]:
    if "vendor" not in entry:
        raise CatalogError(f"device {name}: missing or unknown: vendor")
    own = common.get(entry["vendor"], {}) | {key: value for key, value in entry.items() if key not in WORDS}
    if wrong := sorted(set(own) ^ set(FIGURES)):
        raise CatalogError(f"device {name}: missing or unknown: {', '.join(wrong)}")
    return {key: _figure(f"device {name}, {key}", own[key]) for key in FIGURES}


def _figure(where: str, figure: Mapping[str, Any]) -> Figure:
    read = Figure(figure["value"], figure.get("low"), figure.get("high"), figure.get("confidence", ""), "")
    if not figure.get("source") or read.confidence not in CONFIDENCE:
        raise CatalogError(f"{where}: a source, and a confidence of {', '.join(CONFIDENCE)}, must stand beside it")
    if (read.low is None) != (read.high is None):
        raise CatalogError(f"{where}: a range has both ends, low and high")
    if read.low is not None and read.high is not None and not read.low <= read.value <= read.high:
        raise CatalogError(f"{where}: {read.value} is outside its range {read.low}..{read.high}")
    return read._replace(source=figure["source"])
