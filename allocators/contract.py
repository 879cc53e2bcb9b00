"""The three contracts of this folder: a driver, device allocators over it, and KV policies over those.

A driver does what the hardware's runtime does. A device allocator places bytes over a driver, or inside one region
of it. A KV policy gives sequences room for tokens. Whoever writes a new one writes one file, registers it
(:mod:`hbmtwin.allocators.registry`), and is then held to the contract tests with all the others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

from hbmtwin.allocators.decode_group import DecodeGroup
from hbmtwin.allocators.prefix_cache import CacheEvent, PrefixStats
from hbmtwin.allocators.records import (
    AllocatorUsage,
    Granted,
    KVBlock,
    KVSequence,
    KVUsage,
    Refused,
    Release,
    Segment,
    Tag,
    Work,
)
from hbmtwin.allocators.stats import Counters

Observer = Callable[[str, int, int, int, str, Tag | None, int], None]
"""Called as ``observer(op, id, size, stream, arg, tag, owner)`` for each operation that a caller asks of a device
allocator, before it is carried out; ``op`` is a word of the operation trace (``malloc``, ``free``, ...)."""


class Driver(Protocol):
    """What the device's runtime does: gives out address ranges and physical pages, and refuses when full."""

    capacity_bytes: int
    tenants_bytes: int
    page_bytes: int
    """Granularity of physical memory."""
    num_alloc: int
    num_free: int

    def alloc(self, size: int) -> int | None:
        """Return the address of *size* new bytes, or None when they do not fit."""
        ...

    def free(self, addr: int) -> None:
        """Give a range of :meth:`alloc` back. Raise KeyError if *addr* is none."""
        ...

    def reserve(self, size: int) -> int:
        """Return the address of a new virtual range without memory."""
        ...

    def release_range(self, addr: int) -> None:
        """Give a virtual range back. Raise ValueError while pages are mapped in it."""
        ...

    def create(self, size: int) -> int | None:
        """Return a handle of new physical memory, or None when it does not fit."""
        ...

    def destroy(self, page: int) -> None:
        """Give physical memory back. Raise ValueError while it is mapped."""
        ...

    def map(self, addr: int, page: int) -> None:
        """Put physical memory behind *addr*, inside a reserved range."""
        ...

    def unmap(self, addr: int) -> int:
        """Undo :meth:`map`; return the page's handle."""
        ...

    def mem_info(self) -> tuple[int, int]:
        """Return ``(free, total)`` bytes, as ``aclrtGetMemInfo`` and ``cudaMemGetInfo`` do."""
        ...

    def set_tenants(self, held_bytes: int) -> None:
        """Say how many bytes other processes hold from now on; more than is free makes free read 0."""
        ...

    def check(self) -> None:
        """Assert all invariants."""
        ...


class DeviceAllocator(Protocol):
    """Places tensors in device memory. Handles are integers that are never reused."""

    name: ClassVar[str]
    features: ClassVar[frozenset[str]]
    """What it offers to policies and traces: ``streams``, ``empty_cache``, ``region``, ...

    ``monotonic`` says that freed bytes are never given again; all others reuse them.
    """
    observer: Observer | None

    def malloc(self, size: int, *, stream: int = 0, tag: Tag, owner: int = -1) -> int:
        """Return a handle of *size* bytes. Raise OutOfMemory with the allocator's facts when they do not fit."""
        ...

    def free(self, handle: int) -> None:
        """Give a handle back. Raise KeyError if it is not live."""
        ...

    def regrow(self, handles: Sequence[int], size: int) -> list[int]:
        """Replace tensors by new ones of *size* bytes, one by one: new, copy, free. Return the new handles in order.

        The copied bytes, the smaller of both sizes, go to :meth:`take_work`. On shortage raise OutOfMemory whose
        ``done`` holds the new handles of those already replaced.
        """
        ...

    def address(self, handle: int) -> int:
        """Address of a live handle."""
        ...

    def empty_cache(self) -> None:
        """Give unused cached memory back to the driver, as ``torch.npu.empty_cache`` does."""
        ...

    def take_work(self) -> Work:
        """Return the work since the last call, and start a new account."""
        ...

    def usage(self) -> AllocatorUsage:
        """The books, kept incrementally. O(number of tags)."""
        ...

    def stats(self) -> dict[str, int]:
        """Statistics under torch's flat keys, ``allocated_bytes.all.current`` and so on, sorted."""
        ...

    def counters(self) -> Counters:
        """What is there and what was freed so far, for :meth:`repeat`. O(1)."""
        ...

    def repeat(self, before: Counters, times: int) -> None:
        """Count what was taken and given back since *before* *times* times more, without doing it. O(1).

        Raise ValueError unless as much is there as then.
        """
        ...

    def reset_peak_memory_stats(self) -> None:
        """Set every peak to the current value."""
        ...

    def walk(self) -> Iterator[Segment]:
        """Segments in address order, each with its blocks. O(blocks)."""
        ...

    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(blocks)."""
        ...


class WorkspaceAllocator(Protocol):
    """Gives operators their workspace from memory of its own (feature ``workspace``)."""

    def workspace(self, size: int, stream: int = 0) -> int:
        """One use of *size* bytes, acquired and given back: the address. Raise OutOfMemory."""
        ...


class PageAllocator(DeviceAllocator, Protocol):
    """Keeps addresses and memory apart (feature ``pages``): ranges cost nothing, pages are put behind them.

    A page in use is a live block like any other, all of it requested; ``free`` takes it out of its range and gives
    its memory back, without waiting for the device: only the caller knows that no kernel reads it any more. Observers
    see ``malloc`` and ``free`` of its size.
    """

    @property
    def page_bytes(self) -> int:
        """Pages are multiples of this."""
        ...

    @property
    def free_bytes(self) -> int:
        """Bytes that pages may still take: free at the driver, and allowed by the cap. O(1)."""
        ...

    def reserve_range(self, size: int) -> int:
        """Return the address of a new range without memory."""
        ...

    def release_range(self, addr: int) -> None:
        """Give a range back. Raise KeyError if *addr* is none, ValueError while pages are mapped in it."""
        ...

    def map_page(self, addr: int, size: int, *, tag: Tag, owner: int = -1) -> int:
        """Put *size* bytes of new memory behind *addr*, and return their handle.

        Raise OutOfMemory when there are none, ValueError if *size* is no multiple of ``page_bytes`` or the place is not
        free inside one range.
        """
        ...


class KVPolicy(Protocol):
    """Gives sequences room for tokens. One step is: ``reserve`` for each sequence in running order, ``grow_layer``
    for each layer in program order, ``end_step``; a leap adds ``advance``."""

    name: ClassVar[str]
    requires: ClassVar[frozenset[str]]
    """Features that its arena must offer."""
    offers: ClassVar[frozenset[str]]
    """What a server may ask of it: ``park`` (buffers kept between turns), ``preempt`` and ``reject`` (a step without
    room can be undone, so that the server need not die), ``prefix_cache`` (blocks of a prefix are found again, where
    its Config switches that on), ``one_piece`` (a sequence's K lies in one piece of addresses, and its V: kernels
    without a block table can read it)."""

    def lookup(self, s: KVSequence) -> int:
        """Tokens already held for its prefix (cache or parked), at most ``s.num_tokens - 1``; pins nothing.

        Who looks a sequence up and never admits it says so with ``release(s, DROP)``: a policy may keep what it made to
        find the prefix.
        """
        ...

    def reserve(
        self,
        s: KVSequence,
        new: int,
        *,
        hit: int = 0,
        lookahead: int = 0,
        admitting: bool = False,
        others_running: bool = False,
    ) -> Granted | Refused:
        """Make room, in the books, for *new* tokens behind those computed (and the *hit* ones, adopted here)."""
        ...

    def grow_layer(self, layer: int) -> None:
        """Do what this step's reservations need physically in one layer. Raise OutOfMemory."""
        ...

    def end_step(self) -> None:
        """The step's kernels are done: old copies of ``copy_scope = "step"`` die here."""
        ...

    def abort_step(self) -> None:
        """The step is not carried out: its new buffers and reservations are given back."""
        ...

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """How many *further* decode steps, at most *limit*, are certain to succeed without copy, free or look-up.

        The list *decoding* is not changed while its plan is in use: the same list, with nothing but horizon, advance,
        end_step and questions in between, means the same sequences.
        """
        ...

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Same state as *k* single decode steps (reserve 1, end_step) of *decoding* in running order."""
        ...

    def release(self, s: KVSequence, why: Release) -> None:
        """Take a sequence's memory back, or park it. Raise KeyError if it holds none and *why* is PARK."""
        ...

    def fork(self, parent: KVSequence, child: KVSequence) -> Granted | Refused:
        """Let *child* start from *parent*'s tokens."""
        ...

    def swap_out(self, s: KVSequence) -> Granted | Refused:
        """Move a sequence's KV to the host."""
        ...

    def swap_in(self, s: KVSequence) -> Granted | Refused:
        """Move it back."""
        ...

    def take_work(self) -> Work:
        """Bytes swapped, and bytes copied by the policy itself; allocators count the rest."""
        ...

    def kept(self, tokens: int) -> int:
        """How many of a sequence's first *tokens* it still holds: all, unless its retention drops some. Pure; O(1).

        Within a :meth:`horizon` it rises by 0 or by 1 a step, the same for all steps.
        """
        ...

    def block_ids(self, s: KVSequence) -> tuple[int, ...]:
        """Ids of its blocks in order; empty for policies without blocks."""
        ...

    def usage(self) -> KVUsage:
        """The books, kept incrementally."""
        ...

    def walk(self) -> Iterator[KVBlock]:
        """All KV memory in address order: buffers, or the blocks of a pool, where alike neighbours may be one piece.

        O(blocks).
        """
        ...

    def check(self) -> None:
        """Assert all invariants, the books against the walk among them. O(blocks)."""
        ...


@runtime_checkable
class ReservesTogether(Protocol):
    """A KV policy that gives a whole group of decoding sequences room at once; its ``horizon`` and ``advance`` take the
    group for a list. It does not read the counts of members, which lag behind."""

    def reserve_together(self, group: DecodeGroup) -> bool:
        """Same as ``reserve(s, 1)`` for each of *group* in its order, if all of them are granted; else False, and
        nothing is taken."""
        ...


@runtime_checkable
class KeysFollow(Protocol):
    """A KV policy of a server that plans a step before it has the tokens of the one before: a block whose last token is
    not known yet gets its key later."""

    unsampled: Collection[int] | None
    """Ids of sequences whose newest token is not known while a step is planned; those of a group are, without being
    among them. None: every token is known. Only a scheduler writes it."""
    under_way: Mapping[int, int]
    """By id the last computed tokens of those that the step before computes while this one is planned, where there are
    any: what they still read is not given back. Only a scheduler writes it."""

    def cache_blocks(self, s: KVSequence) -> None:
        """Give the full blocks of its computed tokens their keys, as all of these are known by now."""
        ...


@runtime_checkable
class LetsRest(ReservesTogether, Protocol):
    """One that knows how many blocks are free, and lets a member leave the group before it gives its own back."""

    @property
    def free_blocks(self) -> int:
        """Blocks that may be taken."""
        ...

    def rest(self, s: KVSequence) -> None:
        """Take a sequence, which has left the group, out of what the group is given; it keeps what it holds."""
        ...


@runtime_checkable
class CountsInBlocks(Protocol):
    """A KV policy whose usage follows from a few numbers: timelines keep these, and make bytes of thousands at once."""

    def counts(self) -> tuple[int, ...]:
        """The numbers of this moment. O(1)."""
        ...

    def usage_of(self, counts: Sequence[Any]) -> KVUsage:
        """``usage()`` at such numbers, or a column of each field at columns of them. Pure."""
        ...


@runtime_checkable
class ReportsCacheEvents(Protocol):
    """A KV policy whose prefix cache tells what happens to its keys."""

    on_cache_event: Callable[[CacheEvent], None] | None
    """Called with each event, in vLLM's order; None: nobody listens."""


@runtime_checkable
class CountsPrefixes(Protocol):
    """A KV policy that counts what its prefix cache was asked for and found, as vLLM does."""

    def prefix_stats(self) -> PrefixStats:
        """The counts so far."""
        ...


@runtime_checkable
class SeenByWaiting(Protocol):
    """A KV policy in which decode steps may matter to whoever waits: blocks are given back, or its look-ups counted."""

    def steps_unseen(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """How many *further* decode steps, at most *limit*, give nothing back and count no look-up of who waits."""
        ...


@runtime_checkable
class FindsSharedBoundaries(Protocol):
    """A KV policy whose look-up sees more of a prefix than it can give, as some layers lack their state there."""

    def shared_boundary(self, s: KVSequence) -> int:
        """Tokens that the last look-up found in some layers beyond its answer; 0 if there were none."""
        ...
