"""What a scenario file says of memory, in the words of ``fit``: the same question that ``run`` asks of it.

::

    keys of the file                    as they stand, or the scenario's defaults
    calibration.profile                 its bytes in place of estimates, its context in the device's; for that device
    memory.activation_bytes             before the profile's, as in a run
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hbmtwin.kernels.profile import Profile
from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.sim import catalog
from hbmtwin.sim.budget.question import Measured
from hbmtwin.sim.calibration import calibrated, profile_of
from hbmtwin.sim.fit.options import FitError, Origin
from hbmtwin.sim.model_states import mamba_mode
from hbmtwin.sim.model_windows import with_windows
from hbmtwin.sim.phrases import Phrase, Said
from hbmtwin.sim.resolve import max_model_len_of, max_num_batched_tokens_of
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sections import Section

OTHER_DEVICE = Phrase(
    "calibration.profile {profile} was measured on {own}: none of it is used for {device}",
    "calibration.profile {profile} 是在 {own} 上测得的，不用于 {device}",
)
KEYS = {
    "total_memory_bytes": "device.memory_bytes",
    "other_tenant_bytes": "device.other_tenant_bytes",
    "tensor_parallel_size": "engine.tensor_parallel_size",
    "pipeline_parallel_size": "engine.pipeline_parallel_size",
    "layer_partition": "engine.layer_partition",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "max_num_seqs": "scheduler.max_num_seqs",
    "enable_chunked_prefill": "scheduler.enable_chunked_prefill",
    "activation_bytes": "memory.activation_bytes",
    "block_size": "kv_cache.block_size",
    "kv_cache_dtype": "kv_cache.dtype",
    "v_dtype": "kv_cache.v_dtype",
    "enable_prefix_caching": "kv_cache.enable_prefix_caching",
}
"""Keys that mean the same in both."""


def keys_of(
    path: Path, device: str | DeviceSpec | None = None
) -> tuple[dict[str, tuple[Any, Origin]], tuple[Said, ...]]:
    """The options that the file at *path* comes to, each with whether it says so or leaves it at the scenario's
    default, and what is not used of it. *device* takes the place of the file's.

    Raise FitError where it is no scenario or its profile cannot be used, CatalogError for a name that is not known.
    """
    try:
        scenario = Scenario.load(path)
        model = catalog.model(scenario.model.name)
        kept, sinks = with_windows(scenario, model)
        length = max_model_len_of(scenario, model)
        tokens = max_num_batched_tokens_of(scenario, length)
        profile = profile_of(scenario)
        own = calibrated(profile, catalog.device(scenario.device.name))
    except ScenarioError as error:
        raise FitError(str(error)) from None
    told: dict[str, tuple[Any, Origin]] = {
        "model": (kept, _origin(scenario.model, "name")),
        "device": (own, _origin(scenario.device, "name")) if device is None else (device, "given"),
        "max_model_len": (length, _origin(scenario.engine, "max_model_len")),
        "max_num_batched_tokens": (tokens, _origin(scenario.scheduler, "max_num_batched_tokens")),
        "sinks": (sinks, "default"),
        "mamba_mode": (mamba_mode(scenario, model), "default"),
    }
    notes: tuple[Said, ...] = ()
    if profile is not None and (device is None or _is(device, own)):
        told["device"] = own, told["device"][1]
        told |= _measured(profile)
    elif profile is not None:
        other = device.name if isinstance(device, DeviceSpec) else device
        notes = (Said.of(OTHER_DEVICE, profile=profile.name, own=own.name, device=other),)
    for name, key in KEYS.items():
        section, _, field = key.partition(".")
        table = getattr(scenario, section)
        value = getattr(table, field)
        if value is not None:
            told[name] = (value, _origin(table, field))
    return told, notes


def _is(device: str | DeviceSpec, own: DeviceSpec) -> bool:
    """Whether the catalog's *own* is meant, and not a device with figures of somebody's."""
    return isinstance(device, str) and catalog.device(device).name == own.name


def _measured(profile: Profile) -> dict[str, tuple[Any, Origin]]:
    """Terms of the budget that the profile has; its context is the device's."""
    return {name: (profile.memory[name], "profile") for name in Measured.__dataclass_fields__ if name in profile.memory}


def _origin(table: Section, field: str) -> Origin:
    return "scenario" if field in table.model_fields_set else "default"
