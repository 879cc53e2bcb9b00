"""Which rules hold: those of an engine's newest release, or of the one that is named.

::

    "0.18.0", "v0.18.1rc2", "0.18"     the profile of the newest release that is not above      vLLM 0.18
    "V0", "0.9 V0"                     vLLM's first engine, whatever its number                 vLLM V0
    none, or no number in it           the newest profile
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.sim.engines import mindie, sglang, tensorrt_llm, vllm, vllm_ascend, vllm_cpu
from hbmtwin.sim.engines.rules import EngineRules

ENGINES: Mapping[str, Sequence[EngineRules]] = {
    "vllm": vllm.PROFILES,
    "vllm-ascend": vllm_ascend.PROFILES,
    "vllm-cpu": vllm_cpu.PROFILES,
    "sglang": sglang.PROFILES,
    "mindie": mindie.PROFILES,
    "tensorrt-llm": tensorrt_llm.PROFILES,
}
"""Profiles of each engine, from the oldest to the newest."""

_NUMBER = re.compile(r"(?<![\d.])v?(\d{1,9}(?:\.\d{1,9})*)", re.IGNORECASE)
_V0 = re.compile(r"(?<![\w.])v0(?![\w.])", re.IGNORECASE)


def engine_rules(engine: str, version: str | None = None) -> EngineRules:
    """The rules of *engine* in that version; of the newest where none is given, or it is no number.

    Raise ValueError for an unknown engine, with the nearest known one.
    """
    profiles = ENGINES.get(engine)
    if profiles is None:
        near = get_close_matches(engine, ENGINES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"engine: {engine!r} is not known; {hint}known: {', '.join(ENGINES)}")
    if version is None:
        return profiles[-1]
    if _V0.search(version):
        return profiles[0]
    number = _NUMBER.search(version)
    if number is None:
        return profiles[-1]
    release = tuple(int(part) for part in number.group(1).split("."))
    return next((rules for rules in reversed(profiles) if rules.since <= release), profiles[0])


def rules_for(device: DeviceSpec, engine: str | None = None, version: str | None = None) -> EngineRules:
    """The rules of the engine that serves on *device*: vLLM in its form for that vendor, where none is named.

    Raise ValueError for a vendor without any, and for an engine that does not serve on such devices.
    """
    usual = {"nvidia": "vllm", "ascend": "vllm-ascend", "cpu": "vllm-cpu"}.get(device.vendor)
    if usual is None:
        raise ValueError(f"{device.name}: no engine rules for vendor {device.vendor!r}; known: ascend, cpu, nvidia")
    rules = engine_rules(engine or usual, version)
    if device.vendor not in rules.vendors:
        able = [name for name, profiles in ENGINES.items() if device.vendor in profiles[-1].vendors]
        raise ValueError(f"engine: {engine} does not serve on {device.name}; use one of {', '.join(able)}")
    return vllm_ascend.on_device(rules, device) if rules.engine == "vllm-ascend" else rules
