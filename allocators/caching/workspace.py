"""torch_npu's workspace allocator: one growing block per stream, beside the caching allocator's books.

Operators take their workspace here when ``TASK_QUEUE_ENABLE`` is 2. Source: ``NPUWorkspaceAllocator.cpp``.
"""

from __future__ import annotations

from dataclasses import dataclass

from hbmtwin.allocators.caching.segments import Segments
from hbmtwin.allocators.caching.sizes import NPU_PAD, ROUND_LARGE


@dataclass(slots=True)
class WorkspaceBlock:
    """What a stream has. After a failure *size* is what was asked for, and there is no memory."""

    size: int = 0
    address: int | None = None
    requested: int = 0


def workspace_size(size: int) -> int:
    """Bytes that the driver is asked for when an operator wants a workspace of *size*."""
    return -(-(size + NPU_PAD) // ROUND_LARGE) * ROUND_LARGE


class WorkspaceAllocator:
    """One block per stream; it never shrinks and is never kept beside its successor."""

    def __init__(self, segments: Segments) -> None:
        self._s = segments
        self.blocks: dict[int, WorkspaceBlock] = {}

    def use(self, size: int, stream: int) -> int | None:
        """One use of *size* bytes, acquired and given back; return the address, None where the driver refused.

        After a refusal the stream's entry keeps the size that failed: every later request up to it fails at once, until
        :meth:`empty_cache`. A larger one asks the driver again.
        """
        need = size + NPU_PAD
        block = self.blocks.setdefault(stream, WorkspaceBlock())
        if block.size < need:
            if block.address is not None:
                self._s.synchronize_device()
                self._free(block)
            block.size = workspace_size(size)
            self._s.work.driver_calls += 1
            block.address = self._s.driver.alloc(block.size)
            if block.address is not None:
                block.requested = size
        return block.address

    def empty_cache(self) -> None:
        """Give all blocks back to the driver, after the device has stopped."""
        self._s.events.complete()
        for block in self.blocks.values():
            if block.address is not None:
                self._free(block)
        self.blocks.clear()

    @property
    def reserved_bytes(self) -> int:
        """Memory held."""
        return sum(block.size for block in self.blocks.values() if block.address is not None)

    def _free(self, block: WorkspaceBlock) -> None:
        assert block.address is not None, "only memory can be given back"
        self._s.work.driver_calls += 1
        self._s.driver.free(block.address)
        block.address = None
