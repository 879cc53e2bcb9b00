"""Devices, models and workloads as data files, with a source per number; models also from a Hugging Face
``config.json``."""

from hbmtwin.sim.catalog.device_table import device, devices
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.catalog.model_table import model, models
from hbmtwin.sim.catalog.workload_table import WorkloadPreset, workload_preset, workload_presets

__all__ = [
    "CatalogError",
    "WorkloadPreset",
    "device",
    "devices",
    "model",
    "models",
    "workload_preset",
    "workload_presets",
]
