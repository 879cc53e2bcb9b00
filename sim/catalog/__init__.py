"""Devices and models as data files, with a source per number; models also from a Hugging Face ``config.json``."""

from hbmtwin.sim.catalog.device_table import device, devices
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.catalog.model_table import model, models

__all__ = ["CatalogError", "device", "devices", "model", "models"]
