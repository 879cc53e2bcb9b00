"""The memory that the allocator holds: segments cut into blocks, and what can be done to a block.

Segments come from the driver; blocks tile them, linked in address order, and two free neighbours never stay apart::

    segment  | allocated | free | allocated | waiting | free             |
               <-- prev                                 next -->

Everything here keeps statistics, trace entries and the driver in step; *when* it is done is the allocator's business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from hbmtwin.allocators.base import WorkMeter
from hbmtwin.allocators.caching.blocks import FREE, Block, FreeBlocks
from hbmtwin.allocators.caching.events import EventTable
from hbmtwin.allocators.caching.releases import ReleaseRules
from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.free_lists import ADDRESS_BITS
from hbmtwin.allocators.stats import RESERVED_BYTES, StatsGrid

TraceObserver = Callable[[str, int, int, int, int], None]
"""Called as ``trace_observer(action, address, size, stream, pool_id)`` with the entries of torch's memory history, in
its order; of ``oom`` *address* is what the device has free. *pool_id* is n of a private pool (0, n), else 0."""


class UnsafeState(RuntimeError):
    """From here on the real allocator corrupts memory, aborts or asserts; the simulation stops and says why."""


class Segments:
    """Segments and their blocks over one driver."""

    def __init__(self, driver: Driver, grid: StatsGrid, work: WorkMeter, rules: ReleaseRules) -> None:
        self.driver = driver
        self.grid = grid
        self.work = work
        self.rules = rules
        self.events = EventTable(rules.flavour)
        self.trace_observer: TraceObserver | None = None
        self.sizes: dict[int, int] = {}
        """Address and size of each ordinary segment."""
        self.uncounted_cuts = False
        """A piece was cut off an ordinary segment and the statistics of split segments do not know."""

    @property
    def total_allocated_memory(self) -> int:
        """Bytes obtained from the driver: segments and mapped pages of all pools."""
        return self.grid.total(RESERVED_BYTES)

    def record(self, action: str, block: Block, address: int, size: int) -> None:
        """Write a trace entry about a block's segment or stream."""
        if self.trace_observer is not None:
            self.trace_observer(action, address, size, block.stream, block.home.pool.pool_id)

    def synchronize_device(self) -> None:
        """Wait for all streams: every event recorded so far has completed."""
        self.work.syncs += 1
        self.events.complete()

    # -- segments --------------------------------------------------------------------------------------------------

    def new_segment(self, size: int, home: FreeBlocks) -> Block | None:
        """A segment of the driver as one block, or None where the driver refuses."""
        self.work.driver_calls += 1
        address = self.driver.alloc(size)
        if address is None:
            return None
        self.sizes[address] = size
        self.grid.segment_alloc(home.kind, size)
        if home.pool.private is not None:
            home.pool.private.device_allocations += 1
        block = Block(address, size, home, FREE)
        self.record("segment_alloc", block, address, size)
        return block

    def release_segment(self, block: Block) -> None:
        """Give the segment of a free block back. Raise UnsafeState unless the block is all of it."""
        if block.expandable is not None or block.is_split:
            kind = "of an expandable segment" if block.expandable is not None else "of a split segment"
            raise UnsafeState(
                f"a piece {kind} at {block.address:#x}, {block.size} bytes and not below max_split_size, would go "
                "to the driver: the real allocator frees a segment under its live tensors here, or fails an assertion. "
                "Do not lower max_split_size_mb in mid-run, nor set it after expandable segments were in use"
            )
        self.record("segment_free", block, block.address, block.size)
        block.home.drop(block)
        del self.sizes[block.address]
        self.work.driver_calls += 1
        self.driver.free(block.address)
        if block.home.pool.private is not None:
            block.home.pool.private.count_free()
        self.grid.segment_free(block.home.kind, block.size)

    # -- blocks ----------------------------------------------------------------------------------------------------

    def split(self, block: Block, size: int) -> Block:
        """Cut the low *size* bytes off a block that is in no list; the rest becomes free. Return the new, low block."""
        home = block.home
        low = Block(block.address, size, home, FREE, block.expandable)
        before = block.prev
        was_split = before is not None or block.next is not None
        if before is not None:
            before.next = low
            low.prev = before
        low.next = block
        block.prev = low
        block.address += size
        block.size -= size
        block.state = FREE
        home.put(block)
        if block.expandable is None:
            if was_split:
                self.grid.shrink_split(home.kind, size)
            else:
                self.grid.inactive_split(home.kind, 1, block.size)
        return low

    def cut_off_below(self, block: Block, offset: int) -> Block:
        """Cut a block that is in no list at *offset*; the low part becomes free. Return the new, high block.

        Of an ordinary segment the statistics of split segments do not see the low part, as in torch.
        """
        self.uncounted_cuts |= block.expandable is None
        high = Block(block.address + offset, block.size - offset, block.home, FREE, block.expandable)
        high.next = block.next
        if high.next is not None:
            high.next.prev = high
        high.prev = block
        block.next = high
        block.size = offset
        block.state = FREE
        block.home.put(block)
        return high

    def free_block(self, block: Block) -> None:
        """Make a block free that nobody uses any more: it absorbs its free neighbours and goes into its list.

        A block object that is absorbed is gone, the freed one survives with the size that was last requested of it.
        """
        if self.trace_observer is not None:
            self.record("free_completed", block, block.address, block.requested)
        block.state = FREE
        home = block.home
        count = gained = 0
        before = block.prev
        if before is not None and before.state == FREE:
            i = bisect_left(home.keys, before.size << ADDRESS_BITS | before.address)
            del home.keys[i], home.blocks[i]
            count -= 1
            gained -= before.size
            block.address = before.address
            block.size += before.size
            block.prev = before = before.prev
            if before is not None:
                before.next = block
        after = block.next
        if after is not None and after.state == FREE:
            i = bisect_left(home.keys, after.size << ADDRESS_BITS | after.address)
            del home.keys[i], home.blocks[i]
            count -= 1
            gained -= after.size
            block.size += after.size
            block.next = after = after.next
            if after is not None:
                after.prev = block
        home.put(block)
        if block.expandable is None:
            if before is not None or after is not None:
                count += 1
                gained += block.size
            # One net change, so that the running sums move as torch's do.
            if count or gained:
                self.grid.inactive_split(home.kind, count, gained)

    def merge(self, block: Block, neighbour: Block | None) -> None:
        """Let *block*, which is in no list, absorb a neighbour in the same state (free or unmapped)."""
        if neighbour is None or neighbour.state != block.state:
            return
        if neighbour.state == FREE:
            neighbour.home.drop(neighbour)
        else:
            neighbour.home.unmapped.remove(neighbour)
        if block.prev is neighbour:
            block.address = neighbour.address
            block.prev = neighbour.prev
            if block.prev is not None:
                block.prev.next = block
        else:
            block.next = neighbour.next
            if block.next is not None:
                block.next.prev = block
        block.size += neighbour.size

    @staticmethod
    def insert_after(block: Block, before: Block | None, after: Block | None) -> None:
        """Link a new block between two neighbours."""
        block.prev, block.next = before, after
        if before is not None:
            before.next = block
        if after is not None:
            after.prev = block
