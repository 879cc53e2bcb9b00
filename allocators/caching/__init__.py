"""The caching allocators of torch_npu and PyTorch, rule for rule."""

from hbmtwin.allocators.caching.allocator import CachingAllocator
from hbmtwin.allocators.caching.conf import AllocatorConf
from hbmtwin.allocators.caching.conf_text import ConfError, ConfRuntimeError, ConfValueError
from hbmtwin.allocators.caching.config import CachingConfig
from hbmtwin.allocators.caching.facts import RULES
from hbmtwin.allocators.caching.segments import TraceObserver, UnsafeState

__all__ = [
    "RULES",
    "AllocatorConf",
    "CachingAllocator",
    "CachingConfig",
    "ConfError",
    "ConfRuntimeError",
    "ConfValueError",
    "TraceObserver",
    "UnsafeState",
]
