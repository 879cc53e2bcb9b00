"""Who holds which bytes: the driver model, device allocators, KV-cache policies, and the causes of out of memory.

Knows nobody: every record that it computes on is its own (:mod:`hbmtwin.allocators.records`). Importing this package
registers the policies that it brings.
"""

from hbmtwin.allocators import buddy, bump, caching, contiguous, direct, paged, pooled, tlsf, virtual
from hbmtwin.allocators.driver import HbmDriver

__all__ = ["HbmDriver", "buddy", "bump", "caching", "contiguous", "direct", "paged", "pooled", "tlsf", "virtual"]
