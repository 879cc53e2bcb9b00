"""A scenario as the settings in which it differs from the default: what an address bar and a command line carry.

::

    scenario  <->  ("kv_cache.preset=doubling", "workload.users=64")  <->  ?set=...&set=...
                                                                      <->  hbmtwin run --set ... --set ...

The settings are those of ``--set``, and read by the same function.
"""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import tomli_w
from pydantic import BaseModel

from hbmtwin.api import PRESETS, Scenario

SECTIONS = frozenset(name for name, field in Scenario.model_fields.items() if isinstance(field.default, BaseModel))
POLICY = "kv_cache.policy"


def settings_of(scenario: Scenario) -> tuple[str, ...]:
    """The ``a.b=c`` settings which make the default scenario this one, in the order of the file.

    What a KV preset or a traffic preset sets is told by its name. O(keys).
    """
    preset = scenario.kv_cache.preset
    governed = frozenset(key for keys in PRESETS.values() for key in keys)
    default = dict(_keys(Scenario() if preset is None else Scenario.load()))
    own = {key: value for key, value in _keys(scenario) if preset is None or key not in PRESETS[preset]}
    told = {key: value for key, value in own.items() if key not in default or default[key] != value}
    if preset is None and not governed & told.keys():
        told[POLICY] = own[POLICY]  # a key that presets set, and none of them is meant
    return tuple(f"{key}={_text(value)}" for key, value in told.items())


def command(verb: str, settings: Sequence[str], *more: str) -> str:
    """The command line that computes the same, to be pasted into a shell."""
    return shlex.join(["hbmtwin", verb, *more, *(word for setting in settings for word in ("--set", setting))])


def _keys(scenario: Scenario) -> Iterator[tuple[str, Any]]:
    """Its dotted keys as its file has them: none without a value, none that a traffic preset fills in."""
    for name, value in tomllib.loads(scenario.to_toml()).items():
        if name in SECTIONS:
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def _text(value: Any) -> str:
    """As TOML writes it on one line; a word needs no quotes where ``--set`` takes it for nothing else."""
    if isinstance(value, str):
        try:
            tomllib.loads(f"value = {value}")
        except tomllib.TOMLDecodeError:
            return value if value == value.strip() and value else _inline(value)
        except ValueError:  # as a number it is longer than Python reads
            return _inline(value)
    return _inline(value)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_inline_key(name)} = {_inline(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")


def _inline_key(name: str) -> str:
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")
