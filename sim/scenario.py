"""A scenario is everything that a run depends on: one TOML file, one frozen tree of records.

Precedence: defaults < file < preset < ``--set a.b=c``; only ``workload.preset`` stands below the file. Unknown keys
are refused with the nearest known one, values with the key's path; types are not converted (``true`` is no number, nor
is ``"5"``). The same records feed the command line, ``hbmtwin init`` and the documentation.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, PrivateAttr, ValidationError

from hbmtwin.sim.catalog import CatalogError
from hbmtwin.sim.sections import (
    CalibrationSection,
    DeviceSection,
    EngineSection,
    KVCacheSection,
    MemorySection,
    ModelSection,
    ResultsSection,
    SchedulerSection,
    Section,
    SloSection,
)
from hbmtwin.sim.traffic_sections import SessionSection, WorkloadSection
from hbmtwin.sim.workload_presets import PRESET, with_workload_preset, without_preset_keys


class ScenarioError(ValueError):
    """A scenario that cannot be used: the key's path, what is wrong with it, and the cure."""


PRESETS: dict[str, dict[str, Any]] = {
    "caching": {
        "kv_cache.policy": "contiguous",
        "kv_cache.growth": "exact",
        "kv_cache.tensors": "per_layer",
        "kv_cache.copy_scope": "tensor",
        "memory.kv_arena": "caching",
        "memory.oom": "stop",
    },
    "pooled": {
        "kv_cache.policy": "contiguous",
        "kv_cache.growth": "exact",
        "kv_cache.tensors": "per_layer",
        "kv_cache.copy_scope": "tensor",
        "memory.kv_arena": "pooled",
        "memory.fit": "best",
        "memory.oom": "stop",
    },
    "doubling": {
        "kv_cache.policy": "contiguous",
        "kv_cache.growth": "doubling",
        "kv_cache.tensors": "merged",
        "kv_cache.copy_scope": "step",
        "memory.kv_arena": "caching",
        "memory.oom": "stop",
    },
    "paged": {
        "kv_cache.policy": "paged",
        "memory.kv_arena": "caching",
        "memory.oom": "preempt",
    },
}
"""The four names of the brief, as the keys that they set. All are capped at the same usable bytes."""

FILES = ("workload.trace", "workload.model", "workload.multi_turn")
"""Keys that name files of traffic."""
PROFILE = "calibration.profile"
"""Names a file, or a profile that comes along."""


def is_profile_file(profile: str) -> bool:
    """Whether ``calibration.profile`` names a file, and not a profile that comes along."""
    return profile.endswith(".json")


_GOVERNED = frozenset(key for preset in PRESETS.values() for key in preset)


class Scenario(Section):
    """Everything that a run depends on. Build it with :meth:`load`."""

    schema_version: Literal[1] = Field(1, description="version of this file's form")
    seed: int = Field(0, ge=0, lt=2**63, description="seed of every random draw")
    model: ModelSection = ModelSection()
    device: DeviceSection = DeviceSection()
    engine: EngineSection = EngineSection()
    scheduler: SchedulerSection = SchedulerSection()
    memory: MemorySection = MemorySection()
    kv_cache: KVCacheSection = KVCacheSection()
    workload: WorkloadSection = WorkloadSection()
    session: SessionSection = SessionSection()
    slo: SloSection = SloSection()
    results: ResultsSection = ResultsSection()
    calibration: CalibrationSection = CalibrationSection()
    _overridden: tuple[str, ...] = PrivateAttr(())
    _oom_preset: str | None = PrivateAttr(None)

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        *,
        overrides: Sequence[str] = (),
        preset: str | None = None,
        seed: int | None = None,
    ) -> Scenario:
        """Read a scenario file, apply a preset and ``a.b=c`` overrides. Raise ScenarioError.

        Without *path* the defaults stand. A *preset* given here wins over the file's, and its keys over the file's
        keys. It stays named in the scenario only while every key of it stands, so that a saved scenario reads back as
        itself. A relative path of :data:`FILES` and of a profile in a file is relative to that file, in an override to
        the working directory.
        """
        keys = dict(_flatten(_read(path))) if path is not None else {}
        for key in (*FILES, PROFILE):
            if path is not None and isinstance(file := keys.get(key), str) and file:
                keys[key] = str(path.parent / file) if key != PROFILE or is_profile_file(file) else file
        sets = dict(_parse_override(text) for text in overrides)
        wanted = sets.pop("kv_cache.preset", None)
        if None not in (wanted, preset) and wanted != preset:
            raise ScenarioError(
                f"kv_cache.preset: --set says {wanted!r} where {preset!r} is to run; leave it out of --set"
            )
        chosen = wanted or preset or keys.pop("kv_cache.preset", None)
        overridden: list[str] = []
        if chosen is None and not _GOVERNED & (keys.keys() | sets.keys()):
            chosen = "paged"
        if chosen is not None:
            governed = preset_keys(str(chosen))
            overridden = [
                f"{key} = {keys[key]!r} of the file gives way to the preset {chosen!r} ({value!r}); use --set {key}=..."
                for key, value in governed.items()
                if key in keys and keys[key] not in (value, _default(key)) and key not in sets
            ]
            keys.update(governed)
            changed = any(sets.get(key, value) != value for key, value in governed.items())
            keys["kv_cache.preset"] = None if changed else chosen
        keys.update(sets)
        if seed is not None:
            keys["seed"] = seed
        scenario = cls.of(keys)
        scenario._overridden = tuple(overridden)
        if chosen is not None and "memory.oom" not in sets and keys["kv_cache.policy"] != governed["kv_cache.policy"]:
            scenario._oom_preset = str(chosen)
        return scenario

    @property
    def overridden(self) -> tuple[str, ...]:
        """What the file said and the preset overruled: remarks for whoever reads the result."""
        return self._overridden

    @property
    def oom_preset(self) -> str | None:
        """The preset that ``memory.oom`` was taken from, where another policy than the preset's was then set."""
        return self._oom_preset

    @classmethod
    def of(cls, keys: Mapping[str, Any]) -> Scenario:
        """Build a scenario from dotted keys. Raise ScenarioError with the path of each bad key."""
        if too_long := [key for key, value in keys.items() if _too_long(value)]:
            raise ScenarioError("\n".join(f"{key}: {_TOO_LONG}" for key in too_long))
        try:
            keys = with_workload_preset(keys)
        except CatalogError as error:
            raise ScenarioError(f"{PRESET}: {error}") from None
        tree: dict[str, Any] = {}
        for key, value in keys.items():
            *sections, name = key.split(".")
            table = tree
            for section in sections:
                table = table.setdefault(section, {})
                if not isinstance(table, dict) and len(sections) == 1 and key in known_keys():
                    raise ScenarioError(_not_a_section(section, table))
                if not isinstance(table, dict):
                    raise ScenarioError(f"{key}: {section!r} is a value, not a section")
            table[name] = value
        try:
            return cls.model_validate(tree)
        except ValidationError as error:
            raise ScenarioError("\n".join(_explain_all(error.errors()))) from None

    def to_toml(self) -> str:
        """The scenario as the text of its file; keys without a value are left out.

        A file of traffic is named by its absolute path: the scenario may lie elsewhere than where the run was started.
        """
        tree = self.model_dump(exclude_none=True)
        without_preset_keys(tree, self.workload.preset)
        for section, _, name in (key.partition(".") for key in FILES):
            if name in tree[section]:
                tree[section][name] = os.path.abspath(tree[section][name])
        if (profile := self.calibration.profile) is not None and is_profile_file(profile):
            tree["calibration"]["profile"] = os.path.abspath(profile)
        return tomli_w.dumps(tree)


def preset_keys(name: str) -> dict[str, Any]:
    """The dotted keys that a preset sets. Raise ScenarioError if there is no such preset."""
    if name not in PRESETS:
        raise ScenarioError(
            f"kv_cache.preset: no preset is called {name!r} (there are {', '.join(PRESETS)}){_near(name, PRESETS)}"
        )
    return PRESETS[name]


def _default(key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(Scenario.model_fields[section].default, name)


def known_keys() -> list[str]:
    """Every dotted key of a scenario, in the order of the file."""
    keys: list[str] = []
    for name, info in Scenario.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            keys += [f"{name}.{field}" for field in kind.model_fields]
        else:
            keys.append(name)
    return keys


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise ScenarioError(f"{path}: no such file; `hbmtwin init {path}` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{path}: not valid TOML: {error}") from None
    except ValueError:  # of Python's own limit on digits
        raise ScenarioError(f"{path}: {_TOO_LONG}") from None
    except RecursionError:
        raise ScenarioError(f"{path}: nested too deeply for a scenario") from None


def _flatten(tree: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    sections = {
        n
        for n, f in Scenario.model_fields.items()
        if isinstance(f.annotation, type) and issubclass(f.annotation, Section)
    }
    for name, value in tree.items():
        if name in sections and isinstance(value, Mapping):
            for key, inner in value.items():
                yield f"{name}.{key}", inner
        else:
            yield name, value


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ScenarioError(f"--set {text}: write it as section.key=value")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except RecursionError:
        raise ScenarioError(f"--set {key}: nested too deeply for a value") from None
    except tomllib.TOMLDecodeError:
        return key, value.strip()  # a bare word needs no quotes on a command line
    except ValueError:  # of Python's own limit on digits
        raise ScenarioError(f"--set {key}: {_TOO_LONG}") from None


_MOST_BITS = 256
"""Of a whole number: products of a few such are still numbers that a float can hold."""
_TOO_LONG = "a whole number of more than 77 digits counts nothing; write a smaller one"


def _too_long(value: object) -> bool:
    """Whether a number in it has more bits than that. O(values)."""
    if isinstance(value, Mapping):
        return any(map(_too_long, value.values()))
    if isinstance(value, list):
        return any(map(_too_long, value))
    return isinstance(value, int) and value.bit_length() > _MOST_BITS


_UNION_BRANCH = re.compile(r"(function-|constrained-|dict\[)|(int|float)$")
"""Parts of an error's place that name the kind of a value, not a key."""


def _explain_all(errors: Iterable[Any]) -> Iterator[str]:
    """One line per key; a key that takes a number or a table has an error for each, of which one is told."""
    by_path: dict[str, list[Any]] = {}
    for error in errors:
        path = ".".join(part for part in map(str, error["loc"]) if not _UNION_BRANCH.match(part))
        by_path.setdefault(path, []).append(error)
    for path, found in by_path.items():
        told = next((e for e in found if e["type"].startswith(("greater_", "less_"))), found[0])
        if told["type"] == "extra_forbidden":
            known = [*Scenario.model_fields] if len(told["loc"]) == 1 else known_keys()
            yield f"{path}: unknown key{_near(path, known)}"
        elif told["type"] == "model_type" and "." not in path:
            yield _not_a_section(path, told["input"])
        elif told["type"] in ("dict_type", "model_type") and len(found) == 1:
            yield f"{path}: write a table, {{ name = value }}, not {told['input']!r}"
        elif len(found) > 1 and told is found[0] and not told["type"].startswith(("greater_", "less_")):
            yield f"{path}: write a number, or a table such as {{ distribution = ... }}, not {told['input']!r}"
        else:
            message = str(told["msg"]).removeprefix("Value error, ")
            yield f"{path}: {message[0].lower()}{message[1:]}, not {told['input']!r}"


def _not_a_section(section: str, value: object) -> str:
    first = next(key for key in known_keys() if key.startswith(f"{section}."))
    return f"{section}: this is a section; write its keys, {first} = ... and so on, not {value!r}"


def _near(name: str, known: Iterator[str] | Sequence[str] | Mapping[str, Any]) -> str:
    candidates = list(known)
    near = difflib.get_close_matches(name, candidates, n=1, cutoff=0.5)
    if not near:  # the right key in the wrong section
        near = [c for c in candidates if c.rpartition(".")[2] == name.rpartition(".")[2]][:1]
    return f"; did you mean {near[0]!r}?" if near else ""
