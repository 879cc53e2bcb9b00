"""The calibration profile of a scenario: where it is read from, and which steps of a run lie outside of it.

::

    calibration.profile = "mine.json"    a file, written by `hbmtwin calibrate`: from the scenario's folder
    calibration.profile = "name"         one that comes along (:data:`FOLDER`)

    leap of k steps   kv_read_tokens   read, read + growth, ... read + growth (k - 1)      counted in O(1)
                      all others       the same in each step
    several ranks     tensor_parallel_size, allreduce_bytes: a step's tokens, each of hidden_size elements
"""

from __future__ import annotations

import difflib
from importlib.resources import files
from math import ceil, floor
from pathlib import Path
from typing import Any

from hbmtwin.kernels.profile import (
    Profile,
    ProfileError,
    batch_quantities,
    model_quantities,
    outside,
    parse_profile,
    read_profile,
)
from hbmtwin.kernels.records import BatchShape, DeviceSpec, ModelShape
from hbmtwin.sim.budget.memory_budget import MemoryBudget
from hbmtwin.sim.scenario import Scenario, ScenarioError, is_profile_file

FOLDER = files("hbmtwin.sim.catalog").joinpath("profiles")


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come along, sorted."""
    if not FOLDER.is_dir():
        return ()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in FOLDER.iterdir() if entry.name.endswith(".json")))


def shipped_profile(name: str) -> Profile:
    """The one of that name. Raise ProfileError, with the nearest name."""
    known = shipped_profiles()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        there = ", ".join(known) or "none"
        raise ProfileError(f"no profile {name!r} comes along; {hint}there are: {there}; a file's name ends in .json")
    return parse_profile(FOLDER.joinpath(f"{name}.json").read_bytes(), name)


def profile_of(scenario: Scenario) -> Profile | None:
    """The scenario's profile; None: it names none. Raise ScenarioError."""
    wanted = scenario.calibration.profile
    if wanted is None:
        return None
    try:
        return read_profile(Path(wanted)) if is_profile_file(wanted) else shipped_profile(wanted)
    except ProfileError as error:
        raise ScenarioError(f"calibration.profile: {error}") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        raise ScenarioError(f"calibration.profile: {wanted}: cannot be read: {error}") from None


def calibrated(profile: Profile | None, device: DeviceSpec) -> DeviceSpec:
    """*device* with the figures of the profile, if there is one. Raise ScenarioError where it is another's."""
    try:
        return device if profile is None else profile.applied_to(device)
    except ProfileError as error:
        raise ScenarioError(f"calibration.profile: {error}") from None


def memory_notes(budget: MemoryBudget) -> tuple[str, ...]:
    """Which lines of the budget a profile measured, in whole or in part."""
    found = [(line.profile, f"{line.item} {line.bytes / 2**30:.2f} GiB") for line in budget.lines if line.profile]
    if not found:
        return ()
    lines = ", ".join(words for _, words in found)
    return (f"memory budget: {lines} measured, in whole or in part (calibration.profile {found[0][0]})",)


class ValidityWatch:
    """Counts the steps of a run that lie outside of what a profile was measured for."""

    def __init__(self, profile: Profile, model: ModelShape, tensor_parallel_size: int = 1) -> None:
        self.profile = profile
        self._ranks = tensor_parallel_size
        self._token_bytes = model.hidden_size * model.dtype_bytes if tensor_parallel_size > 1 else 0
        """What an all-reduce sends of a token; 0: there is one rank."""
        self.steps = 0
        self.steps_outside = 0
        asked = model_quantities(model) | {"tensor_parallel_size": tensor_parallel_size}
        self._model = {key: asked[key] for key in outside(profile, asked)}
        self._found: dict[str, list[int]] = {}
        """By quantity: steps outside, and the lowest and highest value of them."""

    def count(self, b: BatchShape, steps: int) -> None:
        """Take in *steps* steps of a batch. O(prompts)."""
        self.steps += steps
        most = 0
        quantities = batch_quantities(b)
        if self._token_bytes and b.tokens:
            quantities["allreduce_bytes"] = b.tokens * self._token_bytes
        for key, value in quantities.items():
            if (span := self.profile.validity.get(key)) is None:
                continue
            first, rise = int(value), b.kv_read_growth if key == "kv_read_tokens" else 0
            low, high = ceil(span[0]), floor(span[1])
            below = _steps_until(first, rise, low, steps)
            above = steps - _steps_until(first, rise, high + 1, steps)
            if below or above:
                lowest = first if below else first + rise * (steps - above)
                highest = first + rise * (steps - 1) if above else first + rise * (below - 1)
                old = self._found.setdefault(key, [0, lowest, highest])
                old[:] = old[0] + below + above, min(old[1], lowest), max(old[2], highest)
                most = max(most, below + above)
        self.steps_outside += most

    def summary(self) -> dict[str, Any]:
        """What a result says of its profile."""
        p = self.profile
        return {
            "profile": p.name,
            "device": p.device,
            "made": p.made,
            "source": p.source,
            "cross_validated_percent": p.cross_validated_percent,
            "steps": self.steps,
            "steps_outside": self.steps_outside,
            "outside": {
                key: {"steps": steps, "lowest": lowest, "highest": highest, "measured": list(p.validity[key])}
                for key, (steps, lowest, highest) in sorted(self._found.items())
            },
            "model_outside": {
                key: {"is": value, "measured": list(p.validity[key])} for key, value in self._model.items()
            },
        }

    def notes(self) -> tuple[str, ...]:
        """What every report tells of it."""
        p, found = self.profile, []
        own = [f"{key} {value:g} (measured {_span(p, key)})" for key, value in self._model.items()]
        if own:
            found.append(
                f"calibration.profile {p.name}: the model or its split lies outside of what was measured on "
                f"{p.device}, so that all times are extrapolated: {', '.join(own)}"
            )
        latencies = p.allreduce_ns
        if latencies and self._ranks > 1 and self._ranks not in latencies and "tensor_parallel_size" not in self._model:
            counts = ", ".join(map(str, latencies))
            found.append(
                f"calibration.profile {p.name}: all-reduces were measured of {counts} ranks; the latency of "
                f"{self._ranks} is the catalog's"
            )
        if self.steps_outside:
            what = [
                f"{key} {lowest:,} to {highest:,} in {steps:,} (measured {_span(p, key)})"
                for key, (steps, lowest, highest) in sorted(self._found.items())
            ]
            found.append(
                f"calibration.profile {p.name}: {self.steps_outside:,} of {self.steps:,} steps lie outside of what was "
                f"measured on {p.device}, and their times are extrapolated: {'; '.join(what)}"
            )
        return tuple(found)


def _steps_until(first: int, rise: int, limit: int, steps: int) -> int:
    """How many of the values first, first + rise, ... are below *limit*; *rise* is not negative."""
    if first >= limit:
        return 0
    return min(steps, -((first - limit) // rise)) if rise else steps


def _span(profile: Profile, key: str) -> str:
    low, high = profile.validity[key]
    return f"{low:g}" if low == high else f"{low:,.6g} to {high:,.6g}"
