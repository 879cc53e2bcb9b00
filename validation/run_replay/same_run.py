"""Whether a result's summary and its scenario are of one run: the plan is made again, and says what the summary says.

::

    scenario.toml --ServerPlan, ServerMemory--> seed, capacity, KV's budget and blocks, basis, profile  ==  summary.json

A scenario of another run would predict other times for these steps, and nothing else of a replay on a CPU asks it.
"""

from __future__ import annotations

from typing import Any

from hbmtwin.kernels.profile import Profile
from hbmtwin.sim.result import ResultError
from hbmtwin.sim.server_memory import ServerMemory
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.run_replay.source import RecordedRun

_OF_PROFILE = ("profile", "device", "made", "source", "cross_validated_percent")


def check_same_run(run: RecordedRun, plan: ServerPlan, memory: ServerMemory) -> None:
    """Raise ResultError where *plan* and *memory*, made from the run's scenario, are not what its summary tells."""
    made = {
        "seed": run.scenario.seed,
        "capacity_bytes": memory.driver.capacity_bytes,
        "kv_budget_bytes": memory.kv_budget_bytes,
        "kv_block_bytes": memory.block_bytes,
        "basis": plan.cost.basis,
        "calibration": _of_profile(plan.profile),
    }
    summary = {**run.summary, "calibration": _of_summary(run.summary.get("calibration"))}
    wrong = [f"{key}: {summary[key]!r} and {value!r}" for key, value in made.items() if summary[key] != value]
    if wrong:
        raise ResultError(
            f"{run.directory}: summary.json and scenario.toml are not of one run ({'; '.join(wrong)}), or a file that "
            "the scenario names has changed since: put back the run's own scenario.toml and files, or run it again "
            f"into another directory: hbmtwin run {run.directory / 'scenario.toml'} --out OTHER"
        )


def _of_profile(profile: Profile | None) -> dict[str, Any] | None:
    if profile is None:
        return None
    texts = (profile.name, profile.device, profile.made, profile.source, profile.cross_validated_percent)
    return dict(zip(_OF_PROFILE, texts, strict=True))


def _of_summary(told: Any) -> Any:
    return {key: told.get(key) for key in _OF_PROFILE} if isinstance(told, dict) else told
