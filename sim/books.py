"""The books of the device: where every byte of it is, each term counted by a different party.

The driver counts what it gave and what it has, allocators count their blocks, the KV policy its buffers, and the
scheduler its tokens and sequences. A row whose terms do not sum to the capacity is an error of the program, and stops
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import NamedTuple

from hbmtwin.allocators.contract import DeviceAllocator, Driver, KVPolicy
from hbmtwin.allocators.records import AllocatorUsage, Tag


class Row(NamedTuple):
    """One row of the timeline's byte columns; the terms sum to the capacity."""

    tenants: int
    static: int
    weights: int
    activations: int
    kv_tokens: int
    kv_padding: int
    """Slots filled with padding, to the length of the longest sequence of a static batch."""
    kv_state: int
    """States of Mamba-2 layers, of the same size whatever the tokens of their sequence."""
    kv_parked: int
    kv_unfilled: int
    growth_copy: int
    rounding: int
    external: int
    pending_events: int
    kv_cached: int
    kv_pool_free: int
    driver_free: int


class BooksDoNotClose(AssertionError):
    """Two parties count the same bytes differently: a bug of a policy, an allocator or the engine."""


class Books:
    """Reads every party and checks that they agree. O(allocators) a row."""

    def __init__(
        self,
        driver: Driver,
        allocators: Sequence[DeviceAllocator],
        kv: KVPolicy,
        *,
        static_bytes: int,
        token_bytes: int,
        sequence_state_bytes: int | None = 0,
    ) -> None:
        """*sequence_state_bytes*: of the states that every running sequence has; None: how many it has varies."""
        self.driver = driver
        self.allocators = tuple(allocators)
        self.kv = kv
        self.static_bytes = static_bytes
        self.token_bytes = token_bytes
        self.sequence_state_bytes = sequence_state_bytes

    def row(self, running_tokens: int, padding_tokens: int = 0, num_running: int = 0) -> Row:
        """The row of this moment; all counts are the scheduler's. Raise BooksDoNotClose."""
        arenas, kv = self._allocators_usage(), self.kv.usage()
        by_tag = arenas.requested_by_tag
        free, total = self.driver.mem_info()
        kv_padding = padding_tokens * self.token_bytes
        kv_tokens = running_tokens * self.token_bytes - kv.dropped - kv.shared
        row = Row(
            tenants=self.driver.tenants_bytes,
            static=self.static_bytes,
            weights=by_tag[Tag.WEIGHT],
            activations=by_tag[Tag.ACTIVATION] + by_tag[Tag.WORKSPACE] + arenas.workspace,
            kv_tokens=kv_tokens,
            kv_padding=kv_padding,
            kv_state=kv.state,
            kv_parked=kv.parked,
            kv_unfilled=kv.unfilled,
            growth_copy=kv.growth_copy,
            rounding=arenas.allocated - arenas.requested,
            external=arenas.reserved - arenas.allocated - arenas.pending - arenas.pool_free,
            pending_events=arenas.pending,
            kv_cached=kv.cached,
            kv_pool_free=kv.pool + arenas.pool_free,
            driver_free=free,
        )
        if (slots := kv_tokens + kv_padding) != kv.token:
            raise BooksDoNotClose(f"the scheduler counts {slots} bytes of tokens, the KV policy {kv.token}")
        state_bytes = self.sequence_state_bytes
        if state_bytes is not None and (states := num_running * state_bytes) != kv.state:
            raise BooksDoNotClose(f"the scheduler counts {states} bytes of states, the KV policy {kv.state}")
        if (policy := kv.held + kv.growth_copy + kv.cached + kv.pool) != by_tag[Tag.KV]:
            raise BooksDoNotClose(f"the KV policy counts {policy} bytes, its arena {by_tag[Tag.KV]}")
        if sum(row) != total or min(row) < 0:
            raise BooksDoNotClose(f"the row sums to {sum(row)} bytes of {total}: {row}")
        return row

    def _allocators_usage(self) -> AllocatorUsage:
        """All allocators together."""
        usage, *others = [a.usage() for a in self.allocators]
        for other in others:
            usage = AllocatorUsage(
                reserved=usage.reserved + other.reserved,
                allocated=usage.allocated + other.allocated,
                requested=usage.requested + other.requested,
                pending=usage.pending + other.pending,
                pool_free=usage.pool_free + other.pool_free,
                largest_free=max(usage.largest_free, other.largest_free),
                requested_by_tag=tuple(map(add, usage.requested_by_tag, other.requested_by_tag)),
                workspace=usage.workspace + other.workspace,
            )
        return usage
