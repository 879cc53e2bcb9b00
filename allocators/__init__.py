"""Who holds which bytes: the driver model, device allocators, KV-cache policies, and the causes of out of memory.

Knows nobody: every record that it computes on is its own (:mod:`hbmtwin.allocators.records`).
"""

from hbmtwin.allocators import contiguous, paged

__all__ = ["contiguous", "paged"]
