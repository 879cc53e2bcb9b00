"""The name of a run: a hash of everything that its row depends on, and of nothing else.

::

    in   every key of the scenario, memory.oom with its default; what the files that it names hold; the release, and
         the source of the simulator (whoever changes a policy gets new names)
    out  what is only stored, the name of a KV preset, how files are spelled
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from hbmtwin.allocators.registry import UnknownPolicy
from hbmtwin.sim.legality import effective_oom
from hbmtwin.sim.scenario import FILES, PROFILE, Scenario, is_profile_file

ONLY_STORED = (
    *("results.steps", "results.memory_trace", "results.cache_events", "results.checkpoint_s"),
    *("results.alert_kv_used_bytes", "results.alert_kv_usage", "results.alert_hit_rate"),
)
"""Keys that say what is kept of a run and change none of its numbers."""
OTHER_NAMES = ("kv_cache.preset", "schema_version")
"""``kv_cache.preset`` is a name for other keys, which stand for themselves."""
SOURCES = ("allocators", "kernels", "sim", "workloads")
"""Folders of the package that a run depends on."""
KINDS = (".py", ".toml", ".json", ".c", ".cpp", ".h")
LATER = ("sim/capacity", "sim/explain")
"""What only looks at runs."""
HEX_DIGITS = 32


def scenario_key(scenario: Scenario) -> str:
    """32 hexadecimal digits: the same run has the same, another never. O(size of the scenario and of its files).

    A file that cannot be read counts by its name: the run will say so.
    """
    keys = {key: value for key, value in _keys(scenario).items() if key not in (*ONLY_STORED, *OTHER_NAMES)}
    with suppress(UnknownPolicy):  # the run will say so
        keys["memory.oom"] = effective_oom(scenario)
    for key in (*FILES, PROFILE, "model.name"):
        if (name := keys[key]) is not None and (key != PROFILE or is_profile_file(name)):
            keys[key] = _contents(name, model=key == "model.name")
    text = json.dumps([_release(), _source_digest(), keys], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:HEX_DIGITS]


def _keys(scenario: Scenario) -> dict[str, Any]:
    """Every dotted key, its value as JSON has it."""
    keys: dict[str, Any] = {}
    for name, value in scenario.model_dump(mode="json").items():
        keys |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return keys


def _contents(name: str, *, model: bool = False) -> str:
    """What a file holds, as a digest; the name itself where there is no such file, or one without an end."""
    path = Path(name, "config.json") if model and os.path.isdir(name) else Path(name)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            return name
        digest = _digest(os.path.abspath(path), status.st_size, status.st_mtime_ns)
    except (OSError, ValueError):
        return name
    # a result tells which model ran by the name of its directory, and how a trace is read may hang on its ending
    return f"{digest} {path.suffixes}"


@lru_cache(maxsize=64)
def _digest(path: str, size: int, mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def _release() -> str:
    """The version, which is milliseconds to read."""
    return version("hbmtwin")


@cache
def _source_digest() -> str:
    """Of every file of the folders that a run depends on. Once a process, O(size of the package)."""
    digest = hashlib.sha256()
    for folder in SOURCES:
        for name, entry in sorted(_walk(files(f"hbmtwin.{folder}"), folder)):
            digest.update(f"{name}\0".encode())
            digest.update(hashlib.sha256(entry.read_bytes()).digest())
    return digest.hexdigest()


def _walk(folder: Traversable, name: str) -> list[tuple[str, Traversable]]:
    found: list[tuple[str, Traversable]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            inner = f"{name}/{entry.name}"
            found += [] if entry.name == "__pycache__" or inner in LATER else _walk(entry, inner)
        elif entry.name.endswith(KINDS):
            found.append((f"{name}/{entry.name}", entry))
    return found
