"""Scenario, catalog, memory budget, schedulers, engine, results: the twin itself. Knows the three ground folders.

Importing this package registers the schedulers that it brings.
"""

from hbmtwin.sim import continuous, static_batch

__all__ = ["continuous", "static_batch"]
