"""What KV policies over one pool of equal blocks share: its tensors, what most cannot do, and the check of their books.

::

    arena     | tensor 0: K of layer 0 | tensor 1: V of layer 0 | ...      taken once, when the policy is made
    block n   the n-th piece of each tensor; who has it stands in a table of ids

A policy on top keeps the tables: who gets which block, which blocks are shared, and what becomes of those given back.
"""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import NO_WORK, Granted, KVBlock, KVLayout, KVSequence, KVUsage, Refused, Tag, Work

TABLE_ENTRY_BYTES = 4
"""An id in the device's table is an int32, in vLLM, in SGLang and in the NPU attention ops."""
GRANTED = Granted()
"""The same answer to every sequence in every step: making it anew was an eighth of a run."""


class PoolPolicy:
    """A KV policy whose memory is a pool of *num_blocks* blocks; a step never asks the arena for anything."""

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, num_blocks: int, block_tensors: Sequence[int]) -> None:
        """*block_tensors*: bytes of a block in each tensor. Raise OutOfMemory, nothing kept, if they do not fit."""
        self.layout = layout
        self.arena = arena
        self._num_blocks = num_blocks
        self._block_bytes = sum(block_tensors)
        handles: list[int] = []
        for size in block_tensors:
            try:
                handles.append(arena.malloc(num_blocks * size, tag=Tag.KV))
            except OutOfMemory:
                for handle in handles:
                    arena.free(handle)
                raise

    def grow_layer(self, layer: int) -> None:
        """Nothing: the pool is there already."""

    def fork(self, parent: KVSequence, child: KVSequence) -> Granted | Refused:
        """Refused: blocks are shared only by the prefix cache, which a child finds by itself."""
        return Refused(0, 0, "blocks are shared only by the prefix cache; a child must be computed anew")

    def swap_out(self, s: KVSequence) -> Granted | Refused:
        """Refused: the present engines preempt by recomputing."""
        return Refused(0, 0, "this pool preempts by recomputing; it does not swap")

    def swap_in(self, s: KVSequence) -> Granted | Refused:
        """Refused, as :meth:`swap_out`."""
        return Refused(0, 0, "this pool preempts by recomputing; it does not swap")

    def take_work(self) -> Work:
        """No work: nothing is copied or swapped."""
        return NO_WORK

    def kept(self, tokens: int) -> int:
        """*tokens*: nothing is dropped."""
        return tokens

    def _refused(self, need: int, free: int, reason: str) -> Refused:
        """The answer to who needs *need* blocks where *free* are to be had."""
        return Refused(need * self._block_bytes, max(0, free) * self._block_bytes, reason)

    def _check_books(self, usage: KVUsage, blocks: Sequence[KVBlock]) -> None:
        """Assert the books against the walk and the arena. O(blocks)."""
        assert usage.token == sum(block.token_bytes for block in blocks)
        assert usage.held == sum(block.size for block in blocks if block.state == "running")
        assert usage.cached == sum(block.size for block in blocks if block.state == "cached")
        assert usage.pool == sum(block.size for block in blocks if block.state == "free")
        assert min(usage.unfilled, usage.dropped, usage.shared) >= 0
        assert self.arena.usage().requested_by_tag[Tag.KV] == self._num_blocks * self._block_bytes
