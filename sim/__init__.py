"""Scenario, catalog, memory budget, schedulers, engine, results: the twin itself. Knows the three ground folders.

Importing this package registers the schedulers that it brings.
"""

from hbmtwin.sim import guaranteed_no_evict, max_utilization, prefill_first, sglang, static_batch, vllm, vllm_v0

__all__ = ["guaranteed_no_evict", "max_utilization", "prefill_first", "sglang", "static_batch", "vllm", "vllm_v0"]
