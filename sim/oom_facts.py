"""The facts of a death that only the server knows: who refused whom, and what stands beside the arena that failed."""

from __future__ import annotations

from dataclasses import replace

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.oom import OomFacts
from hbmtwin.allocators.records import AllocatorUsage, KVSequence, Refused, Tag
from hbmtwin.sim.books import Books
from hbmtwin.sim.forward import Forward


def refused_facts(
    s: KVSequence, refused: Refused, arena: DeviceAllocator, books: Books, *, limit_bytes: int, fixed_pool: bool
) -> OomFacts:
    """The facts of a sequence that its KV policy refused, as an allocator would state them. O(KV blocks).

    *limit_bytes* is what the arena may have; a policy with a *fixed_pool* has all of its memory from the start.
    """
    usage, kv = arena.usage(), books.kv.usage()
    return OomFacts(
        allocator=f"{arena.name} ({refused.reason})",
        asked_bytes=refused.need_bytes,
        need_bytes=refused.need_bytes,
        tag=Tag.KV,
        owner=s.id,
        stream=0,
        capacity_bytes=books.driver.capacity_bytes,
        limit_bytes=limit_bytes,
        reserved_bytes=usage.reserved,
        allocated_bytes=usage.allocated,
        requested_bytes=usage.requested,
        largest_free_bytes=refused.free_bytes,
        cached_free_bytes=refused.free_bytes,
        driver_free_bytes=0,
        owner_bytes=sum(b.size for b in books.kv.walk() if b.owner == s.id),
        growth_copy_bytes=kv.growth_copy,
        unfilled_bytes=kv.unfilled,
        parked_bytes=kv.parked,
        fixed_pool=fixed_pool,
    )


def complete_facts(facts: OomFacts, books: Books, forward: Forward, arena: DeviceAllocator) -> OomFacts:
    """*facts* with what stands beside the allocator that was asked, so that the record speaks of the whole device.

    Activations and workspaces are asked of the general allocator, everything else of the KV *arena*.
    """
    asked = forward.general if facts.tag in (Tag.ACTIVATION, Tag.WORKSPACE) else arena
    usages = [(a, a.usage()) for a in books.allocators]
    beside = [usage for a, usage in usages if a is not asked]
    every = [usage for _, usage in usages]

    def loaded(usage: AllocatorUsage) -> int:
        """Held from start to end: weights, and an activation reserve."""
        reserve = usage.requested_by_tag[Tag.ACTIVATION] if forward.activations == "none" else 0
        return usage.requested_by_tag[Tag.WEIGHT] + reserve

    return replace(
        facts,
        limit_bytes=facts.limit_bytes + books.static_bytes + sum(map(loaded, beside)),
        weights_bytes=sum(u.requested_by_tag[Tag.WEIGHT] for u in every),
        static_bytes=books.static_bytes,
        rounding_bytes=sum(u.allocated - u.requested for u in every),
        other_arenas_free_bytes=sum(u.reserved - u.allocated for u in beside),
        tenants_bytes=books.driver.tenants_bytes,
        transient_bytes=sum(
            u.requested_by_tag[Tag.ACTIVATION] + u.requested_by_tag[Tag.WORKSPACE] + u.workspace for u in every
        ),
        pending_bytes=sum(u.pending for u in every),
    )
