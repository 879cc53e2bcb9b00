"""The caching allocator of torch_npu and PyTorch, byte for byte: what ``malloc`` and ``free`` do, in order.

Segments come from the driver and are cut into blocks; freed blocks stay cached and merge with free neighbours::

    small pool   2 MiB segments    | 512 | 1024 | free ...                    |     requests up to 1 MiB
    large pool   20 MiB segments   | 3 MiB | 5 MiB | free 12 MiB              |     up to 10 MiB
                 own segments      | 37.5 MiB | free, if more than 1 MiB is over |  from 10 MiB, whole 2 MiB
    expandable   one growing range per pool and stream (see expandable.py)

Complexity, n free blocks of one pool and stream: malloc and free O(log n), a miss O(all free blocks).
"""

from __future__ import annotations

from bisect import bisect_left

from hbmtwin.allocators.caching import messages
from hbmtwin.allocators.caching.blocks import ALLOCATED, UNMAPPED, WAITING, Block, FreeBlocks
from hbmtwin.allocators.caching.events import LAZY_RECLAIM_LIMIT
from hbmtwin.allocators.caching.garbage import collect_garbage
from hbmtwin.allocators.caching.private_pools import PrivatePool
from hbmtwin.allocators.caching.release import release_available_cached_blocks, release_blocks
from hbmtwin.allocators.caching.sizes import (
    LARGE_BUFFER,
    MIN_BLOCK_SIZE,
    ROUND_LARGE,
    SMALL_SIZE,
    SPLIT_REMAINDER,
    TOO_LARGE,
    round_size,
)
from hbmtwin.allocators.caching.state import CachingState
from hbmtwin.allocators.free_lists import ADDRESS_BITS
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.stats import SMALL


class CachingPolicy(CachingState):
    """Where a request goes, and what becomes of a block that its caller gives back."""

    # -- malloc ----------------------------------------------------------------------------------------------------

    def _place(self, size: int, stream: int, tag: Tag, owner: int) -> Block:
        """Reap events, round, choose a pool, find a block or get memory, align it, split it. Raise OutOfMemory."""
        if size >= self._ordinary_below:
            return self._place_uncached(size, stream, tag, owner)
        reaped = False
        if self._queues or self._deferred:
            reaped = self._process_events_before_the_search()
        conf = self.conf
        divisions = conf.roundup_power2_divisions
        if divisions is None:
            rounded = -(-(size + self._pad) // MIN_BLOCK_SIZE) * MIN_BLOCK_SIZE
        else:
            rounded = round_size(size, self._pad, divisions)
        pools = self._scopes[-1]
        pool = pools.small if rounded <= SMALL_SIZE else pools.large
        home = pool.streams.get(stream) or pool.home(stream)
        block = self._get_free_block(home, rounded) or self._miss(size, rounded, home, tag, owner, reaped)
        expandable = conf.expandable_segments
        if expandable and rounded >= ROUND_LARGE:
            block = self._align(block, rounded)
        home = block.home
        remaining = block.size - rounded
        if (
            remaining >= MIN_BLOCK_SIZE
            and (home.kind == SMALL or expandable or (remaining > SPLIT_REMAINDER and rounded < conf.max_split_size))
            and (home.pool.private is None or not home.pool.private.no_split)
        ):
            block = self._segments.split(block, rounded)
        elif block.expandable is None and (block.prev is not None or block.next is not None):
            self.grid.inactive_split(home.kind, -1, -block.size)
        block.state = ALLOCATED
        self.grid.malloc(home.kind, block.size, size)
        if self._segments.trace_observer is not None:
            self._segments.record("alloc", block, block.address, size)
        return block

    def _place_uncached(self, size: int, stream: int, tag: Tag, owner: int) -> Block:
        if size >= TOO_LARGE:
            raise self._out_of_memory(size, stream, tag, owner, messages.too_large(self.rules))
        assert self._uncached is not None, "only without caching are other sizes placed here"
        block = self._uncached.malloc(size, stream)
        if block is None:
            raise self._out_of_memory(size, stream, tag, owner)
        return block

    def _get_free_block(self, home: FreeBlocks, rounded: int) -> Block | None:
        """Best fit, lowest address among equals. Only that one candidate is held to the oversize rules."""
        if self._ages:
            home.pool.searches += 1  # every free block of the pool has become one search older
        keys = home.keys
        i = bisect_left(keys, rounded << ADDRESS_BITS)
        if i == len(keys):
            return None
        block = home.blocks[i]
        conf = self.conf
        if block.expandable is not None:
            i = self._step_among_expandable(home, i)
            if i == len(keys):
                return None
            block = home.blocks[i]
        if block.size >= conf.max_split_size:
            tolerance = LARGE_BUFFER if self.rules.oversize_tolerance_is_fixed else conf.max_non_split_rounding
            if rounded < conf.max_split_size or block.size >= rounded + tolerance:
                return None
        del keys[i], home.blocks[i]
        return block

    def _step_among_expandable(self, home: FreeBlocks, i: int) -> int:
        """With expandable segments on, a block counts as large as it could grow: step on while the next one is smaller.

        Off, blocks of expandable segments are passed by.
        """
        blocks = home.blocks
        if not self.conf.expandable_segments:
            while i < len(blocks) and blocks[i].expandable is not None:
                i += 1
            return i
        while blocks[i].expandable is not None and i + 1 < len(blocks) and _reach(blocks[i + 1]) < _reach(blocks[i]):
            i += 1
        return i

    def _miss(self, size: int, rounded: int, home: FreeBlocks, tag: Tag, owner: int, reaped: bool) -> Block:
        """Get memory, from the gentlest way to the hardest. Raise OutOfMemory."""
        conf = self.conf
        if conf.multi_stream_lazy_reclaim and not reaped and not self._capturing:
            self._process_events()
            block = self._get_free_block(home, rounded)
            if block is not None:
                return block
        if self._ages:
            limit = int(conf.garbage_collection_threshold * (self._cap or 0))
            collect_garbage(self._segments, self._default.large, limit)
        block = self._alloc_block(size, rounded, home, tag, owner)
        if block is None and home.pool.private is None:
            block = self._search_pools_on_oom(rounded, home)
        if block is None and release_available_cached_blocks(self._segments, home, rounded, conf.max_split_size):
            block = self._alloc_block(size, rounded, home, tag, owner)
        if block is None and not self._capturing:
            if self.rules.synchronizes_device:
                self._segments.synchronize_device()
                self._workspace.empty_cache()
            self._release_cached_blocks()
            # Blocks whose events were waited for just now are free, and torch does not look: pytorch#189504.
            if self.config.research_after_sync:
                block = self._get_free_block(home, rounded)
            if block is None:
                self.grid.num_alloc_retries += 1
                block = self._alloc_block(size, rounded, home, tag, owner)
        if block is None:
            self.grid.num_ooms += 1
            if self._segments.trace_observer is not None:
                free = self.driver.mem_info()[0]
                self._segments.trace_observer("oom", free, rounded, home.stream, home.pool.pool_id)
            raise self._out_of_memory(size, home.stream, tag, owner)
        return block

    def _alloc_block(self, size: int, rounded: int, home: FreeBlocks, tag: Tag, owner: int) -> Block | None:
        """New memory, or None where the cap or the driver refuses."""
        conf = self.conf
        segment_size = self._allocation_size(rounded)
        held = self._segments.total_allocated_memory
        if self._cap is not None and held + segment_size > self._cap:
            return None
        if conf.throw_on_npumalloc_oom or conf.throw_on_cudamalloc_oom:
            allowed = int(conf.per_process_memory_fraction * self.driver.mem_info()[1])
            if held + segment_size > allowed:
                self.grid.num_oom_rejections += 1
                raise self._out_of_memory(size, home.stream, tag, owner, messages.preempted(size), "preempted")
        if not conf.expandable_segments:
            return self._segments.new_segment(segment_size, home)
        block = self._expandable.try_allocate(home, rounded, conf.expandable_page_size)
        if block is not None and home.pool.private is not None:
            home.pool.private.device_allocations += 1
        return block

    def _search_pools_on_oom(self, rounded: int, home: FreeBlocks) -> Block | None:
        """A free block of a private pool that opted in to serve others before they fail."""
        for pool in self._pools.on_oom():
            theirs = (pool.small if home.kind == SMALL else pool.large).home(home.stream)
            block = self._get_free_block(theirs, rounded)
            if block is not None:
                return block
        return None

    def _align(self, block: Block, rounded: int) -> Block:
        """Cut a block where its address becomes a multiple of ``base_addr_aligned_kb``, if it is large enough."""
        alignment = self.conf.base_addr_aligned_bytes
        if not self.rules.aligns_addresses or not alignment:
            return block
        offset = -block.address % alignment
        if offset and offset + rounded <= block.size:
            return self._segments.cut_off_below(block, offset)
        return block

    # -- free ------------------------------------------------------------------------------------------------------

    def _give_back(self, block: Block) -> None:
        """Free a block now, or when all streams that used it are done with it."""
        if self._uncached is not None:
            self._uncached.free(block)
            return
        if self._segments.trace_observer is not None:
            self._segments.record("free_requested", block, block.address, block.requested)
        if not block.stream_uses:
            self.grid.free(block.home.kind, block.size, block.requested)
            self._segments.free_block(block)
            return
        self.grid.free_requested(block.home.kind, block.size)
        block.state = WAITING
        self._waiting[block] = None
        if self._capturing:
            self._deferred.append(block)
        else:
            self._events.insert(block)

    def _free_completed(self, block: Block) -> None:
        """The last event of a waiting block has completed."""
        del self._waiting[block]
        self.grid.free_completed(block.home.kind, block.size, block.requested)
        self._segments.free_block(block)

    # -- events ----------------------------------------------------------------------------------------------------

    @property
    def _capturing(self) -> bool:
        return self.rules.scope_is_capture and len(self._scopes) > 1

    def _process_events_before_the_search(self) -> bool:
        """Reap, unless that is put off; say whether it was done."""
        if self._capturing:
            return False
        if self.conf.multi_stream_lazy_reclaim and self._events.outstanding <= LAZY_RECLAIM_LIMIT:
            return False
        self._process_events()
        return True

    def _process_events(self) -> None:
        self._insert_deferred_events()
        self._events.reap(self._free_completed)

    def _insert_deferred_events(self) -> None:
        for block in self._deferred:
            if block in self._captured_uses:
                self._events.forget_uses(block, self._captured_uses.pop(block))
            self._events.insert(block)
            if block.event_count == 0:
                self._free_completed(block)
        self._deferred.clear()

    # -- release ---------------------------------------------------------------------------------------------------

    def _release_cached_blocks(self, *, keep_pages: bool = False) -> None:
        """Wait for all events, then release what is free: the large pool, the small one, and dead private pools."""
        if not self._capturing:
            self.grid.num_sync_all_streams += 1
            self._insert_deferred_events()
            if not self.rules.synchronizes_device:
                self.work.syncs += self._events.outstanding > 0
            self._events.wait_for_all(self._free_completed)
        if not self._capturing or self.rules.flavour != "torch_cuda":  # CUDA 2.11 leaves the default pools alone then
            for pool in (self._default.large, self._default.small):
                release_blocks(self._segments, self._expandable, pool, keep_pages=keep_pages)
        self._release_dead_pools(keep_pages=keep_pages)

    def _release_dead_pools(self, only: PrivatePool | None = None, *, keep_pages: bool = False) -> None:
        def release(dead: PrivatePool) -> None:
            if only is None or dead is only:
                for pool in (dead.small, dead.large):
                    release_blocks(self._segments, self._expandable, pool, keep_pages=keep_pages)

        if self._pools.freeable:
            self._pools.release_dead(release, self._active_blocks, self._expandable.forget)


def _reach(block: Block) -> int:
    """How large a free block could grow: its size and that of the unmapped range behind it."""
    after = block.next
    return block.size + (after.size if after is not None and after.state == UNMAPPED else 0)
