"""The caching allocators of torch_npu and PyTorch, rule for rule."""

from hbmtwin.allocators.caching.allocator import CachingAllocator, CachingConfig
from hbmtwin.allocators.caching.conf import AllocatorConf, UnsupportedSetting, parse_alloc_conf
from hbmtwin.allocators.caching.conf_text import ConfError, ConfRuntimeError, ConfValueError
from hbmtwin.allocators.caching.facts import RULES

__all__ = [
    "RULES",
    "AllocatorConf",
    "CachingAllocator",
    "CachingConfig",
    "ConfError",
    "ConfRuntimeError",
    "ConfValueError",
    "UnsupportedSetting",
    "parse_alloc_conf",
]
