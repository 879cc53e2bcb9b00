"""Scenario, catalog, memory budget, schedulers, engine, results: the twin itself. Knows the three ground folders.

Importing this package registers the schedulers that it brings.
"""

from hbmtwin.sim import continuous, static_batch, vllm_v0

__all__ = ["continuous", "static_batch", "vllm_v0"]
