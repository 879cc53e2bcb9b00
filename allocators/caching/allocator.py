"""The caching allocator of torch_npu and PyTorch, byte for byte (one process, ordinary segments, no deferred frees).

Segments come from the driver and are cut into blocks; freed blocks stay cached and merge with free neighbours::

    small pool   2 MiB segments    | 512 | 1024 | free ...                    |     requests up to 1 MiB
    large pool   20 MiB segments   | 3 MiB | 5 MiB | free 12 MiB              |     up to 10 MiB
                 own segments      | 37.5 MiB | free, if more than 1 MiB is over |  from 10 MiB, whole 2 MiB

A request goes to the best fit of its pool and stream. On a miss: ask the driver for a segment; release cached blocks of
the oversize range and ask again; release every whole free segment and ask a last time; give up.

Complexity, n free blocks of one pool and stream: malloc and free O(log n), a miss O(all free blocks), walk and check
O(blocks log blocks).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from hbmtwin.allocators.base import BlockAllocator
from hbmtwin.allocators.caching.conf import parse_alloc_conf
from hbmtwin.allocators.caching.facts import barring_rule
from hbmtwin.allocators.caching.sizes import (
    MIN_BLOCK_SIZE,
    PAD,
    SMALL_SIZE,
    SPLIT_REMAINDER,
    TOO_LARGE,
    Flavour,
    allocation_size,
    round_size,
)
from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.free_lists import ADDRESS_BITS, BySize, LinkedBlock
from hbmtwin.allocators.oom import OomFacts
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import ALLOCATED_BYTES, LARGE, REQUESTED_BYTES, RESERVED_BYTES, SMALL, UNLIMITED


@dataclass(frozen=True, slots=True)
class CachingConfig:
    """Settings of :class:`CachingAllocator`."""

    flavour: Flavour = "torch_npu"
    limit_bytes: int | None = None
    """Cap on what is taken from the driver, as ``set_per_process_memory_fraction`` sets; None is no cap."""
    alloc_conf: str = ""
    """Text of ``PYTORCH_NPU_ALLOC_CONF`` or ``PYTORCH_CUDA_ALLOC_CONF``."""

    def __post_init__(self) -> None:
        if self.flavour not in PAD:
            raise ValueError(f"flavour must be one of {', '.join(PAD)}, not {self.flavour!r}")
        if self.limit_bytes is not None and self.limit_bytes < 0:
            raise ValueError(f"limit_bytes must not be negative, but is {self.limit_bytes}")
        parse_alloc_conf(self.alloc_conf, self.flavour)


@device_allocators.register("caching")
class CachingAllocator(BlockAllocator):
    """The caching allocator of torch_npu or PyTorch: best fit over cached segments, byte for byte.

    Memory goes back to the driver only in :meth:`empty_cache` and when a request would fail. A free block that is part
    of a split segment cannot go back at all: that is the fragmentation that torch counts as ``inactive_split``.
    """

    Config = CachingConfig
    name: ClassVar[str] = "caching"
    features: ClassVar[frozenset[str]] = frozenset({"streams", "empty_cache", "statistics"})

    def __init__(self, driver: Driver, config: CachingConfig) -> None:
        conf = parse_alloc_conf(config.alloc_conf, config.flavour)
        super().__init__(driver, max_split_size=conf.max_split_size)
        self.config = config
        self._pad = PAD[config.flavour]
        self._divisions = conf.roundup_power2_divisions
        self._large_segment = conf.large_segment_size
        self._max_split_size = conf.max_split_size
        self._max_non_split_rounding = conf.max_non_split_rounding
        self._free: tuple[dict[int, BySize], dict[int, BySize]] = ({}, {})
        """Free blocks by pool and stream."""

    def empty_cache(self) -> None:
        """Give every free block that is a whole segment back to the driver. O(free blocks)."""
        if self.observer is not None:
            self.observer("empty_cache", -1, 0, 0, "", None, -1)
        self._release_cached_blocks()

    # -- malloc ----------------------------------------------------------------------------------------------------

    def _place(self, size: int, stream: int) -> LinkedBlock | None:
        rounded = round_size(size, self._pad, self._divisions)
        pool = SMALL if rounded <= SMALL_SIZE else LARGE
        lists = self._free[pool]
        free = lists.get(stream)
        if free is None:
            free = lists[stream] = BySize()
        block = self._get_free_block(rounded, free) or self._miss(size, rounded, pool, stream, free)
        if block is None:
            return None
        remaining = block.size - rounded
        if remaining >= MIN_BLOCK_SIZE and (
            pool == SMALL or (remaining > SPLIT_REMAINDER and rounded < self._max_split_size)
        ):
            return self._cut(block, rounded, free)
        if block.prev is not None or block.next is not None:
            self.grid.inactive_split(pool, -1, -block.size)
        return block

    def _get_free_block(self, rounded: int, free: BySize) -> LinkedBlock | None:
        """Best fit, lowest address among equals. Only that one candidate is held to the oversize rules."""
        keys = free.keys
        i = bisect_left(keys, rounded << ADDRESS_BITS)
        if i == len(keys):
            return None
        block = free.blocks[i]
        limit = self._max_split_size
        if block.size >= limit and (rounded < limit or block.size >= rounded + self._max_non_split_rounding):
            return None
        del keys[i], free.blocks[i]
        return block

    def _miss(self, size: int, rounded: int, pool: int, stream: int, free: BySize) -> LinkedBlock | None:
        """Ask the driver, three times at most, releasing cached memory in between."""
        if size >= TOO_LARGE:
            return None
        segment = allocation_size(rounded, self._large_segment)
        block = self._alloc_block(segment, pool, stream)
        if block is None and self._release_available_cached_blocks(rounded, free):
            block = self._alloc_block(segment, pool, stream)
        if block is None:
            self._release_cached_blocks()
            self.grid.num_alloc_retries += 1
            block = self._alloc_block(segment, pool, stream)
        if block is None:
            self.grid.num_ooms += 1
        return block

    def _alloc_block(self, size: int, pool: int, stream: int) -> LinkedBlock | None:
        """A new segment, or None where the cap or the driver refuses."""
        limit = self.config.limit_bytes
        if limit is not None and self.grid.total(RESERVED_BYTES) + size > limit:
            return None
        self._driver_calls += 1
        address = self.driver.alloc(size)
        if address is None:
            return None
        self._segments[address] = size
        self.grid.segment_alloc(pool, size)
        return LinkedBlock(address, size, pool, stream)

    # -- free and release ------------------------------------------------------------------------------------------

    def _free_list(self, block: LinkedBlock) -> BySize:
        return self._free[block.pool][block.stream]

    def _free_lists(self) -> Iterator[BySize]:
        yield from self._free[LARGE].values()
        yield from self._free[SMALL].values()

    def _release_available_cached_blocks(self, rounded: int, free: BySize) -> bool:
        """Release one oversize block that is large enough, else the largest ones until they add up to that."""
        if self._max_split_size == UNLIMITED:
            return False
        self._synchronize()
        wanted = max(rounded, self._max_split_size)
        i = bisect_left(free.keys, wanted << ADDRESS_BITS)
        if i < len(free.blocks):
            self._release_block(free.blocks[i], free)
            return True
        released = 0
        while released < wanted and free.largest() >= self._max_split_size:
            block = free.blocks[-1]
            released += block.size
            self._release_block(block, free)
        return released >= wanted

    def _release_cached_blocks(self) -> None:
        """Release every free block without neighbours: the large pool first, each pool by stream, size and address."""
        self._synchronize()
        self.grid.num_sync_all_streams += 1
        for pool in (LARGE, SMALL):
            for _, free in sorted(self._free[pool].items()):
                for block in [b for b in free.blocks if b.prev is None and b.next is None]:
                    self._release_block(block, free)

    def _release_block(self, block: LinkedBlock, free: BySize) -> None:
        assert block.prev is None, "only whole segments are released"
        assert block.next is None, "only whole segments are released"
        free.drop(block)
        del self._segments[block.address]
        self._driver_calls += 1
        self.driver.free(block.address)
        self.grid.segment_free(block.pool, block.size)

    def _synchronize(self) -> None:
        """torch_npu stops the whole device before it releases; PyTorch waits for events, of which there are none."""
        if self.config.flavour == "torch_npu":
            self._syncs += 1

    # -- failure ---------------------------------------------------------------------------------------------------

    def _facts(self, size: int, stream: int, tag: Tag | None, owner: int) -> OomFacts:
        rounded = round_size(size, self._pad, self._divisions)
        pool = SMALL if rounded <= SMALL_SIZE else LARGE
        reserved = self.grid.total(RESERVED_BYTES)
        allocated = self.grid.total(ALLOCATED_BYTES)
        limit = self.config.limit_bytes
        free, capacity = self.driver.mem_info()
        limit_left = None if limit is None else max(0, limit - reserved)
        driver_free = free if limit_left is None else min(free, limit_left)
        other_stream = max((f.largest() for s, f in self._free[pool].items() if s != stream), default=0)
        other_pool = max((f.largest() for f in self._free[1 - pool].values()), default=0)
        return OomFacts(
            allocator=self.name,
            asked_bytes=size,
            need_bytes=rounded,
            tag=tag,
            owner=owner,
            stream=stream,
            capacity_bytes=capacity,
            limit_bytes=capacity if limit is None else min(capacity, limit),
            reserved_bytes=reserved,
            allocated_bytes=allocated,
            requested_bytes=self.grid.total(REQUESTED_BYTES),
            largest_free_bytes=max(driver_free, max(f.largest() for f in self._free_lists())),
            cached_free_bytes=reserved - allocated,
            driver_free_bytes=driver_free,
            rule=barring_rule(
                need=rounded,
                allocation_size=allocation_size(rounded, self._large_segment),
                driver_free=free,
                limit_left=limit_left,
                other_stream=other_stream,
                other_pool=other_pool,
            ),
            weights_bytes=self._weights_bytes(),
            owner_bytes=self._owner_bytes(owner),
            tenants_bytes=self.driver.tenants_bytes,
        )
