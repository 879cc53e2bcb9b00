"""Scenario, catalog, memory budget, schedulers, engine, results: the twin itself. Knows the three ground folders.

Importing this package registers the schedulers that it brings.
"""

from hbmtwin.sim import scheduler, static_batch

__all__ = ["scheduler", "static_batch"]
