"""Devices, models and workloads as data files, with a source per number; models also from a Hugging Face
``config.json``."""

from hbmtwin.sim.catalog.device_table import Figure, device, device_figures, device_name, devices, devices_called
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.catalog.model_table import hugging_face_ids, model, model_name, models
from hbmtwin.sim.catalog.quantization import QUANTIZATIONS, with_quantization
from hbmtwin.sim.catalog.workload_table import WorkloadPreset, workload_preset, workload_presets

__all__ = [
    "QUANTIZATIONS",
    "CatalogError",
    "Figure",
    "WorkloadPreset",
    "device",
    "device_figures",
    "device_name",
    "devices",
    "devices_called",
    "hugging_face_ids",
    "model",
    "model_name",
    "models",
    "with_quantization",
    "workload_preset",
    "workload_presets",
]
