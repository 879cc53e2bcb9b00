"""A cap of what torch's allocator takes of a device, for machines that others share.

::

    wanted 16 GiB of 64:  set_per_process_memory_fraction(0.25)     of 12: 0.9 of it, as the driver needs the rest
"""

from __future__ import annotations

from typing import Any

MOST = 0.9
"""Of a device: libraries and contexts are beside the allocator."""
DEFAULT_BYTES = 16 << 30


def cap_memory(module: Any, wanted_bytes: int) -> int:
    """Cap ``torch.cuda`` or ``torch.npu`` on its present device, and return at how many bytes."""
    total = int(module.mem_get_info()[1])
    capped = min(wanted_bytes, int(MOST * total))
    module.set_per_process_memory_fraction(capped / total)
    return capped
