"""Who holds which bytes: the driver model, device allocators, KV-cache policies, and the causes of out of memory.

Knows nobody: every record that it computes on is its own (:mod:`hbmtwin.allocators.records`). A policy is registered by
being a file of this folder: all are imported when a registry is first read (:mod:`hbmtwin.allocators.registry`).
"""

from hbmtwin.allocators.driver import HbmDriver

__all__ = ["HbmDriver"]
