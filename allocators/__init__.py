"""Who holds which bytes: the driver model, device allocators, KV-cache policies, and the causes of out of memory.

Knows nobody: every record that it computes on is its own (:mod:`hbmtwin.allocators.records`). Importing this package
imports all its modules, so that a policy is registered by being a file of this folder.
"""

from importlib import import_module
from pkgutil import iter_modules

from hbmtwin.allocators.driver import HbmDriver

__all__ = ["HbmDriver"]

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
