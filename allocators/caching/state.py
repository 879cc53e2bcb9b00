"""What a caching allocator has: its settings, pools and tables, and what it tells when it fails."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from hbmtwin.allocators.base import BlockAllocator
from hbmtwin.allocators.caching import messages
from hbmtwin.allocators.caching.blocks import Block, BlockPool, FreeBlocks, PoolPair
from hbmtwin.allocators.caching.config import CachingConfig
from hbmtwin.allocators.caching.expandable import ExpandableSegments
from hbmtwin.allocators.caching.facts import barring_rule
from hbmtwin.allocators.caching.private_pools import PrivatePools
from hbmtwin.allocators.caching.segments import Segments
from hbmtwin.allocators.caching.sizes import SMALL_SIZE, TOO_LARGE, allocation_size, round_size
from hbmtwin.allocators.caching.uncached import UncachedBlocks
from hbmtwin.allocators.caching.workspace import WorkspaceAllocator
from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.oom import OomFacts, OutOfMemory
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.stats import ACTIVE_BYTES, ALLOCATED_BYTES, RESERVED_BYTES


class CachingState(BlockAllocator[Block]):
    """One process on one device."""

    def __init__(self, driver: Driver, config: CachingConfig) -> None:
        self.conf = config.read_alloc_conf()
        super().__init__(driver, max_split_size=self.conf.max_split_size)
        self.config = config
        self.rules = config.rules()
        self._pad = self.rules.pad
        self._segments = Segments(driver, self.grid, self.work, self.rules)
        self._events = self._segments.events
        self._queues = self._events.queues
        self._expandable = ExpandableSegments(self._segments, hccl_zero_copy=config.hccl_zero_copy)
        self._workspace = WorkspaceAllocator(self._segments)
        self._default = PoolPair()
        self._pools = PrivatePools(self._default)
        self._scopes = self._pools.scopes
        self._waiting: dict[Block, None] = {}
        """Freed, and in use by some stream, in the order of the frees."""
        self._deferred: list[Block] = []
        """Waiting blocks whose events are recorded when no capture is under way any more."""
        self._captured_uses: dict[Block, set[int]] = {}
        """Streams that were recorded during a capture; their work is over when the capture is."""
        self._cap = config.limit_bytes
        if self.conf.per_process_memory_fraction < 1:
            cap = int(self.conf.per_process_memory_fraction * driver.mem_info()[1])
            self._cap = cap if self._cap is None else min(cap, self._cap)
        self._uncached = UncachedBlocks(self._segments) if config.no_caching else None
        self._ordinary_below = 0 if config.no_caching else TOO_LARGE
        self._ages = False
        self._settings_changed()

    def _settings_changed(self) -> None:
        """Keep what follows from the settings and the cap."""
        self.grid.oversize = self.conf.max_split_size
        self._ages = self._cap is not None and self.conf.garbage_collection_threshold > 0

    def _allocation_size(self, rounded: int) -> int:
        return allocation_size(rounded, self.conf.large_segment_size, page_size_1g=self.conf.page_size_1g)

    # -- failure ---------------------------------------------------------------------------------------------------

    def _out_of_memory(
        self, size: int, stream: int, tag: Tag, owner: int, text: str = "", rule: str = ""
    ) -> OutOfMemory:
        """The failure of a request, with torch's text (by default the usual one) and our facts."""
        rounded = round_size(size, self._pad, self.conf.roundup_power2_divisions)
        free, total = self.driver.mem_info()
        grid = self.grid
        if not text:
            text = messages.out_of_memory(
                self.rules,
                allocation_size=self._allocation_size(rounded),
                total=total,
                free=free,
                allowed=self._cap,
                allocated=grid.total(ALLOCATED_BYTES),
                active=grid.total(ACTIVE_BYTES),
                reserved=grid.total(RESERVED_BYTES),
                private_free=sum(block.size for pool in self._pools for home in pool.homes() for block in home.blocks),
            )
        return OutOfMemory(self._facts(size, rounded, stream, tag, owner, rule), torch_message=text)

    def _facts(self, size: int, rounded: int, stream: int, tag: Tag, owner: int, rule: str) -> OomFacts:
        reserved = self.grid.total(RESERVED_BYTES)
        active = self.grid.total(ACTIVE_BYTES)
        cap = self._cap
        free, capacity = self.driver.mem_info()
        limit_left = None if cap is None else max(0, cap - reserved)
        driver_free = free if limit_left is None else min(free, limit_left)
        largest = max(driver_free, self._largest_free())
        return OomFacts(
            allocator="caching",
            asked_bytes=size,
            need_bytes=rounded,
            tag=tag,
            owner=owner,
            stream=stream,
            capacity_bytes=capacity,
            limit_bytes=capacity if cap is None else min(capacity, cap),
            reserved_bytes=reserved,
            allocated_bytes=self.grid.total(ALLOCATED_BYTES),
            requested_bytes=sum(self._requested_by_tag),
            largest_free_bytes=largest,
            cached_free_bytes=reserved - active,
            driver_free_bytes=driver_free,
            rule=rule if rule and largest >= rounded else self._barring_rule(rounded, stream, free, limit_left),
            weights_bytes=self._weights_bytes(),
            owner_bytes=self._owner_bytes(owner),
            tenants_bytes=self.driver.tenants_bytes,
            pending_bytes=active - self.grid.total(ALLOCATED_BYTES),
        )

    def _barring_rule(self, rounded: int, stream: int, driver_free: int, limit_left: int | None) -> str:
        return barring_rule(
            self._pool(rounded).home(stream),
            self._free_lists(),
            need=rounded,
            allocation_size=self._allocation_size(rounded),
            driver_free=driver_free,
            limit_left=limit_left,
            expandable=self.conf.expandable_segments,
            max_split_size=self.conf.max_split_size,
        )

    # -- what is there ---------------------------------------------------------------------------------------------

    def _pool(self, rounded: int) -> BlockPool:
        """Where a request goes: into the pools whose scope was entered last, else the default ones; by rounded size."""
        return self._scopes[-1].small if rounded <= SMALL_SIZE else self._scopes[-1].large

    def _free_lists(self) -> Iterator[FreeBlocks]:
        yield from self._default.homes()
        for pool in self._pools:
            yield from pool.homes()

    def _largest_free(self) -> int:
        return max((home.largest() for home in self._free_lists()), default=0)

    def _active_blocks(self) -> Iterator[Block]:
        """In use, or freed and waiting."""
        return chain(self._live.values(), self._waiting)
