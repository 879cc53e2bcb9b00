"""The books of the device: where every byte of it is, each term counted by a different party.

The driver counts what it gave and what it has, allocators count their blocks, the KV policy its buffers, and the
scheduler its tokens and sequences. A row whose terms do not sum to the capacity is an error of the program, and stops
it.

::

    moment     device terms                     scheduler              KV policy
    12.5 s     #0: weights, rounding, free ...  tokens, padding, seqs  KVUsage        an entry, as it is read
    13.1 s     #0 (no operation since)          tokens, padding, seqs  KVUsage
    14.0 s     #1                               ...
                     |                                |                   |
                     +------------ rows_of -----------+-------------------+           4,096 at a time, with numpy:
                                      |                                               columns, or BooksDoNotClose
                                   Row columns

Reading is done at each moment, since only then can it be; sorting into columns and comparing is done for many rows at
once, since that takes a tenth of the time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from hbmtwin.allocators.contract import CountsInBlocks, DeviceAllocator, Driver, KVPolicy
from hbmtwin.allocators.records import AllocatorUsage, KVUsage, Tag

Ints = npt.NDArray[np.int64]


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


class DeviceTerms(NamedTuple):
    """What driver and allocators say of a moment, and what they are to be compared with; bytes."""

    tenants: int
    static: int
    weights: int
    activations: int
    rounding: int
    external: int
    pending_events: int
    arena_free: int
    """Free runs of region arenas."""
    driver_free: int
    kv: int
    """Requested under the tag of KV."""
    total: int
    """The capacity."""
    token_bytes: int
    sequence_state_bytes: int
    """-1: varies, and is not compared."""


Entry = tuple[DeviceTerms, int, int, int, tuple[int, ...]]
"""What every party said at one moment, a row before it is checked: driver and allocators (the same object as before
while there was no operation), tokens, padding and running sequences of the scheduler, and the KV policy's usage, or its
counts where these are fewer. A plain tuple: one is made at every step end."""


class BooksDoNotClose(AssertionError):
    """Two parties count the same bytes differently: a bug of a policy, an allocator or the engine."""


class CountsOperations(Protocol):
    """Whoever watches the allocators."""

    @property
    def op_index(self) -> int:
        """Operations so far."""
        ...


class Books:
    """Reads every party; :func:`rows_of` checks that they agree. O(1) a row, and O(allocators) after an operation."""

    def __init__(
        self,
        driver: Driver,
        allocators: Sequence[DeviceAllocator],
        kv: KVPolicy,
        *,
        static_bytes: int,
        token_bytes: int,
        sequence_state_bytes: int | None = 0,
        counted: CountsOperations | None = None,
    ) -> None:
        """*sequence_state_bytes*: of the states that every running sequence has; None: how many it has varies.

        *counted* knows what the allocators and the driver were asked for so far: while it stands still, their terms
        are not read again. None: they are read for each row.
        """
        self.driver = driver
        self.allocators = tuple(allocators)
        self.kv = kv
        self._kv_numbers: Callable[[], tuple[int, ...]] = kv.counts if isinstance(kv, CountsInBlocks) else kv.usage
        self.static_bytes = static_bytes
        self.token_bytes = token_bytes
        self.sequence_state_bytes = sequence_state_bytes
        self._counted = counted
        self._read_at = -1
        self._device: DeviceTerms | None = None

    def row(self, running_tokens: int, padding_tokens: int = 0, num_running: int = 0) -> Entry:
        """What stands in the row of this moment; all counts are the scheduler's."""
        if self._counted is None or self._counted.op_index != self._read_at:
            self._read_again()
        assert self._device is not None
        return self._device, running_tokens, padding_tokens, num_running, self._kv_numbers()

    def _read_again(self) -> None:
        self._read_at = -1 if self._counted is None else self._counted.op_index
        read = self._device_terms()
        if read != self._device:
            self._device = read

    def check_kept(self) -> None:
        """Read the kept terms again: nothing may have changed without an operation. Raise BooksDoNotClose."""
        kept = self._device
        if kept is None or self._counted is None or self._counted.op_index != self._read_at:
            return
        if (read := self._device_terms()) != kept:
            raise BooksDoNotClose(f"without an operation of an allocator {kept} became {read}")

    def _device_terms(self) -> DeviceTerms:
        usages = [a.usage() for a in self.allocators]
        by_tag = [sum(column) for column in zip(*(u.requested_by_tag for u in usages), strict=True)]
        free, total = self.driver.mem_info()
        state_bytes = self.sequence_state_bytes
        return DeviceTerms(
            tenants=self.driver.tenants_bytes,
            static=self.static_bytes,
            weights=by_tag[Tag.WEIGHT],
            activations=by_tag[Tag.ACTIVATION] + by_tag[Tag.WORKSPACE] + sum(u.workspace for u in usages),
            rounding=sum(u.allocated - u.requested for u in usages),
            external=sum(map(_external, usages)),
            pending_events=sum(u.pending for u in usages),
            arena_free=sum(u.pool_free for u in usages),
            driver_free=free,
            kv=by_tag[Tag.KV],
            total=total,
            token_bytes=self.token_bytes,
            sequence_state_bytes=-1 if state_bytes is None else state_bytes,
        )


def _external(usage: AllocatorUsage) -> int:
    return usage.reserved - usage.allocated - usage.pending - usage.pool_free


def rows_of(
    time_ns: Ints, devices: Sequence[DeviceTerms], entries: Sequence[Ints], policy: KVPolicy | None = None
) -> Ints:
    """The byte columns of many entries, one a line in the order of :class:`Row`; each row is checked to close.

    *entries* has a line for each number of an entry: for the device terms their place in *devices*, at the end those of
    KVUsage, or the counts of *policy*. O(entries). Raise BooksDoNotClose, with the time, at the first row that does not
    close.
    """
    place, tokens, padding, num_running, *usage = entries
    if isinstance(policy, CountsInBlocks):
        usage = list(np.broadcast_arrays(*policy.usage_of(usage)))  # what is always 0 is a column, too
    kept = np.array(devices, dtype=np.int64).T.take(place, axis=1)
    d = dict(zip(DeviceTerms._fields, kept, strict=True))
    kv = dict(zip(KVUsage._fields, usage, strict=True))
    columns = {
        **d,
        "kv_tokens": tokens * d["token_bytes"] - kv["dropped"] - kv["shared"],
        "kv_padding": padding * d["token_bytes"],
        "kv_state": kv["state"],
        "kv_parked": kv["parked"],
        "kv_unfilled": kv["held"] - kv["token"] - kv["parked"] - kv["state"],
        "growth_copy": kv["growth_copy"],
        "kv_cached": kv["cached"],
        "kv_pool_free": kv["pool"] + d["arena_free"],
    }
    table = np.stack([columns[name] for name in Row._fields])
    slots, states = columns["kv_tokens"] + columns["kv_padding"], num_running * d["sequence_state_bytes"]
    held_by_kv = kv["held"] + kv["growth_copy"] + kv["cached"] + kv["pool"]
    sums = table.sum(axis=0)
    states_differ = (states != kv["state"]) & (d["sequence_state_bytes"] >= 0)
    checks = (
        (slots != kv["token"], "the scheduler counts {} bytes of tokens, the KV policy {}", slots, kv["token"]),
        (states_differ, "the scheduler counts {} bytes of states, the KV policy {}", states, kv["state"]),
        (held_by_kv != d["kv"], "the KV policy counts {} bytes, its arena {}", held_by_kv, d["kv"]),
        ((sums != d["total"]) | (table.min(axis=0) < 0), "the row sums to {} bytes of {}", sums, d["total"]),
    )
    wrong = np.logical_or.reduce([which for which, *_ in checks])
    if wrong.any():
        first = int(wrong.argmax())
        text, one, other = next(rest for which, *rest in checks if which[first])
        row = Row(*table[:, first].tolist())
        raise BooksDoNotClose(f"at {time_ns[first]} ns {text.format(one[first], other[first])}: {row}")
    return table
