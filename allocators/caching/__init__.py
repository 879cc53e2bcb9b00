"""The caching allocators of torch_npu and PyTorch, rule for rule."""

from hbmtwin.allocators.caching.allocator import CachingAllocator, CachingConfig
from hbmtwin.allocators.caching.conf import AllocConf, UnsupportedSetting, parse_alloc_conf
from hbmtwin.allocators.caching.facts import RULES

__all__ = ["RULES", "AllocConf", "CachingAllocator", "CachingConfig", "UnsupportedSetting", "parse_alloc_conf"]
