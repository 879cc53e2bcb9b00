"""What a scenario file says of memory, in the words of ``fit``: the same question that ``run`` asks of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hbmtwin.sim import catalog
from hbmtwin.sim.fit.options import FitError, Origin
from hbmtwin.sim.model_states import mamba_mode
from hbmtwin.sim.model_windows import with_windows
from hbmtwin.sim.resolve import max_model_len_of, max_num_batched_tokens_of
from hbmtwin.sim.scenario import Scenario, ScenarioError
from hbmtwin.sim.sections import Section

KEYS = {
    "device": "device.name",
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


def keys_of(path: Path) -> dict[str, tuple[Any, Origin]]:
    """The options that the file at *path* comes to, each with whether it says so or leaves it at the scenario's
    default. Raise FitError where it is no scenario, CatalogError for a model that is not known."""
    try:
        scenario = Scenario.load(path)
        model = catalog.model(scenario.model.name)
        kept, sinks = with_windows(scenario, model)
        length = max_model_len_of(scenario, model)
        tokens = max_num_batched_tokens_of(scenario, length)
    except ScenarioError as error:
        raise FitError(str(error)) from None
    told: dict[str, tuple[Any, Origin]] = {
        "model": (kept, _origin(scenario.model, "name")),
        "max_model_len": (length, _origin(scenario.engine, "max_model_len")),
        "max_num_batched_tokens": (tokens, _origin(scenario.scheduler, "max_num_batched_tokens")),
        "sinks": (sinks, "default"),
        "mamba_mode": (mamba_mode(scenario, model), "default"),
    }
    for name, key in KEYS.items():
        section, _, field = key.partition(".")
        table = getattr(scenario, section)
        value = getattr(table, field)
        if value is not None:
            told[name] = (value, _origin(table, field))
    return told


def _origin(table: Section, field: str) -> Origin:
    return "scenario" if field in table.model_fields_set else "default"
