"""Expandable segments: one long range of addresses per pool and stream, with memory put behind it as it is needed.

::

    reserved range, 1 1/8 of the device
    | allocated | free | allocated | free |  unmapped ...              | free |  unmapped ... |
    |<- page ->|<- page ->|<- page ->|<- page ->|                    |<- page ->|

Pages are mapped whole, so that the end of a mapped range is free memory; they are unmapped (never by a free) where a
free block covers them wholly. A block of the range is cut and merged like any other.
"""

from __future__ import annotations

from typing import Final

from hbmtwin.allocators.caching.blocks import FREE, UNMAPPED, Block, BlockPool, FreeBlocks
from hbmtwin.allocators.caching.segments import Segments
from hbmtwin.allocators.caching.sizes import SMALL_BUFFER
from hbmtwin.allocators.contract import Driver
from hbmtwin.allocators.stats import SMALL

ZERO_COPY_SMALL: Final = 2 << 30
ZERO_COPY_LARGE: Final = 10 << 30
"""Address space of the small pool, and of the large pool on any but the default stream, with HCCL zero copy."""


class ExpandableSegment:
    """A reserved range, and the physical page behind each of its places that has one."""

    def __init__(self, driver: Driver, address_space: int, page_size: int) -> None:
        self.page_size = page_size
        self.size = -(-address_space // page_size) * page_size
        self.address = driver.reserve(self.size)
        self.pages: dict[int, int] = {}
        """Physical page by place, counted from the start in pages."""


class ExpandableSegments:
    """All expandable segments of a device."""

    def __init__(self, segments: Segments, *, hccl_zero_copy: bool = False) -> None:
        self._s = segments
        self._hccl_zero_copy = hccl_zero_copy
        self.live: list[ExpandableSegment] = []

    # -- growing ---------------------------------------------------------------------------------------------------

    def try_allocate(self, home: FreeBlocks, rounded: int, large_page_size: int) -> Block | None:
        """A free block of at least *rounded* bytes in no list, with new pages behind it; None where memory is short.

        What was mapped before the shortage stays mapped and free.
        """
        block = self._find(home, rounded)
        if block is None:
            block = self._new_segment(home, SMALL_BUFFER if home.kind == SMALL else large_page_size)
        if block.state == UNMAPPED and not self._map(block, min(block.size, rounded)):
            return None
        while block.size < rounded:
            # The block is free and the one behind it unmapped; that one absorbs it.
            after = block.next
            if after is None or not self._map(after, min(rounded - block.size, after.size)):
                return None
            block = after
        home.drop(block)
        return block

    def _find(self, home: FreeBlocks, rounded: int) -> Block | None:
        """The lowest unmapped range (or the free block before it) that starts enough free and unmapped addresses."""
        for block in home.unmapped:
            start = block.prev if block.prev is not None and block.prev.state == FREE else block
            room = 0
            at: Block | None = start
            while at is not None and at.state >= FREE and room < rounded:
                room += at.size
                at = at.next
            if room >= rounded:
                return start
        return None

    def _new_segment(self, home: FreeBlocks, page_size: int) -> Block:
        total = self._s.driver.mem_info()[1]
        space = total + total // 8
        if self._hccl_zero_copy:
            if page_size == SMALL_BUFFER:
                space = ZERO_COPY_SMALL
            elif home.stream != 0:
                space = ZERO_COPY_LARGE
        self._s.work.driver_calls += 1
        segment = ExpandableSegment(self._s.driver, space, page_size)
        self.live.append(segment)
        block = Block(segment.address, segment.size, home, UNMAPPED, segment)
        home.put_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first *size* bytes, up to the next page boundary, of an unmapped range."""
        segment, home = block.expandable, block.home
        assert segment is not None, "only expandable segments have unmapped ranges"
        mapped = self._map_pages(segment, block.address, size, home.pool)
        if not mapped:
            return False
        address = block.address
        home.unmapped.remove(block)
        block.state = FREE
        if mapped < block.size:
            rest = Block(address + mapped, block.size - mapped, home, UNMAPPED, segment)
            self._s.insert_after(rest, block, block.next)
            home.put_unmapped(rest)
            block.size = mapped
        self._s.merge(block, block.prev)
        self._s.merge(block, block.next)
        home.put(block)
        self._s.grid.segment_map(home.kind, mapped)
        self._s.work.mapped_bytes += mapped
        self._s.record("segment_map", block, address, mapped)
        return True

    def _map_pages(self, segment: ExpandableSegment, address: int, size: int, pool: BlockPool) -> int:
        """Map whole pages from *address* on; return the bytes, 0 where memory is short and nothing was mapped.

        Pages that the pool kept are taken first, the last one kept before the others.
        """
        driver, work = self._s.driver, self._s.work
        first = (address - segment.address) // segment.page_size
        end = -(-(address - segment.address + size) // segment.page_size)
        pages: list[int] = []
        for _ in range(first, end):
            if pool.cached_pages:
                pages.append(pool.cached_pages.pop())
                continue
            work.driver_calls += 1
            page = driver.create(segment.page_size)
            if page is None:
                for collected in pages:
                    work.driver_calls += 1
                    driver.destroy(collected)
                return 0
            pages.append(page)
        for place, page in enumerate(pages, first):
            work.driver_calls += 1
            driver.map(segment.address + place * segment.page_size, page)
            segment.pages[place] = page
        return (end - first) * segment.page_size

    # -- unmapping -------------------------------------------------------------------------------------------------

    def unmap(self, block: Block, *, keep_pages: bool) -> None:
        """Take the memory away from every page that lies wholly inside a free block.

        A part of a page at either end stays as a free block. A segment without any memory is given up. Kept pages
        still occupy the device, and serve the pool's next mappings.
        """
        segment, home = block.expandable, block.home
        assert segment is not None, "only expandable segments are unmapped"
        offset = block.address - segment.address
        first = -(-offset // segment.page_size)
        end = (offset + block.size) // segment.page_size
        if first >= end:
            return
        self._unmap_pages(segment, first, end, block, keep_pages=keep_pages)
        address, size = segment.address + first * segment.page_size, (end - first) * segment.page_size
        home.drop(block)
        before, after = address - block.address, block.address + block.size - address - size
        if before:
            head = Block(block.address, before, home, FREE, segment)
            self._s.insert_after(head, block.prev, block)
            home.put(head)
        if after:
            tail = Block(address + size, after, home, FREE, segment)
            self._s.insert_after(tail, block, block.next)
            home.put(tail)
        block.address, block.size, block.state = address, size, UNMAPPED
        self._s.merge(block, block.prev)
        self._s.merge(block, block.next)
        home.put_unmapped(block)
        self._s.grid.segment_unmap(home.kind, size)
        if home.pool.private is not None:
            home.pool.private.count_free()
        self._s.record("segment_unmap", block, address, size)
        if not block.is_split:
            self._give_up(segment, block)

    def _unmap_pages(self, segment: ExpandableSegment, first: int, end: int, block: Block, *, keep_pages: bool) -> None:
        if self._s.rules.synchronizes_device:
            self._s.synchronize_device()
        else:
            self._s.work.syncs += 1
            self._s.events.complete(block.stream)
        for place in range(first, end):
            page = segment.pages.pop(place)
            self._s.work.driver_calls += 1
            self._s.driver.unmap(segment.address + place * segment.page_size)
            if keep_pages:
                block.home.pool.cached_pages.append(page)
            else:
                self._s.work.driver_calls += 1
                self._s.driver.destroy(page)

    def _give_up(self, segment: ExpandableSegment, block: Block) -> None:
        self._s.work.driver_calls += 1
        self._s.driver.release_range(segment.address)
        self.live.remove(segment)
        block.home.unmapped.remove(block)

    def forget(self, home: FreeBlocks) -> None:
        """The list's pool is deleted: its segments hold no memory, and keep their addresses for good, as in torch."""
        for block in home.unmapped:
            assert block.expandable is not None, "only expandable segments have unmapped ranges"
            self.live.remove(block.expandable)

    def destroy_cached_pages(self, pool: BlockPool) -> None:
        """Give kept pages back to the driver."""
        while pool.cached_pages:
            self._s.work.driver_calls += 1
            self._s.driver.destroy(pool.cached_pages.pop())
