"""How many blocks of a traffic an ideal prefix cache of each size would hit: a bound to hold real caches against.

A chain is the ids of a prompt's blocks in order; an id stands for its block and all before it, so chains with equal
beginnings share a prefix. The rule, in order of the trace:

    1. a request hits the longest leading run of its chain that the cache holds;
    2. all its ids are inserted or touched, last to first or first to last;
    3. the least recently used ids go until the capacity holds.

    capacity 3      after a b c, then a d (least recent first)    the next a b c hits
    last to first   c b a        c | b d a                        a b
    first to last   a b c        b | c a d                        a

A cache is always the ids touched most recently, whatever its capacity; so a larger one holds all that a smaller one
does and never hits less. Last to first, a chain loses its tail before its root, and so never hits less than first to
last where ids are prefixes; first to last, a chain cut by the capacity is lost from its root on, and hits nothing.

No request takes time here and none holds its blocks, so there is nothing that a full memory could refuse.
``sim/serial_reuse.py`` puts the paged policy beside it, and names what makes the difference.
Complexity: a reference costs O(1) in each cache. Source of the rule: the order of freeing in vLLM's
``BlockPool.free_blocks`` and SGLang's radix cache, which evicts leaves only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from hbmtwin.workloads.records import WorkloadError


@dataclass(frozen=True, slots=True)
class ReuseCurve:
    """What ideal prefix caches hit of one trace."""

    capacities: tuple[int | None, ...]
    """In blocks, as asked; None has no end."""
    hits: tuple[int, ...]
    """References that hit, one for each capacity."""
    references: int
    """Ids in all chains, repeated ones counted each time."""
    distinct: int
    """Different ids among them."""


class IdealCache:
    """The ids touched most recently, least recent first. The values are unused: an OrderedDict is Python's list of keys
    with O(1) removal from the middle and the front."""

    __slots__ = ("_capacity", "_ids", "_last_to_first")

    def __init__(self, capacity: int | None, last_to_first: bool) -> None:
        if capacity is not None and capacity < 0:
            raise WorkloadError(f"a capacity is a number of blocks, at least 0, or None for no end, not {capacity}")
        self._ids: OrderedDict[Hashable, None] = OrderedDict()
        self._capacity = capacity
        self._last_to_first = last_to_first

    def serve(self, chain: Sequence[Hashable]) -> int:
        """How many of its ids a request hits; then they are the most recent ones."""
        ids = self._ids
        hits = sum(1 for _ in takewhile(ids.__contains__, chain))
        for block in reversed(chain) if self._last_to_first else chain:
            ids[block] = None
            ids.move_to_end(block)
        if self._capacity is not None:
            while len(ids) > self._capacity:
                ids.popitem(last=False)
        return hits


def reuse_curve(
    chains: Iterable[Sequence[Hashable]], capacities: Sequence[int | None], *, last_to_first: bool = True
) -> ReuseCurve:
    """Replay *chains* once, through a cache of each of *capacities* (blocks; None has no end; 0 holds nothing).

    O(references x capacities) time; memory O(distinct + sum of the capacities + longest chain), so *chains* may be a
    generator over a file larger than memory. Raise WorkloadError on a negative capacity.
    """
    caches = [IdealCache(capacity, last_to_first) for capacity in capacities]
    hits = [0] * len(caches)
    references = 0
    seen: set[Hashable] = set()
    for chain in chains:
        references += len(chain)
        seen.update(chain)
        for i, cache in enumerate(caches):
            hits[i] += cache.serve(chain)
    return ReuseCurve(tuple(capacities), tuple(hits), references, len(seen))


def reuse_hits(
    chains: Iterable[Sequence[Hashable]], capacity: int | None, *, last_to_first: bool = True
) -> Iterator[int]:
    """Yield what each request hits of a cache of *capacity*: the steps by which :func:`reuse_curve` grows.

    Raise WorkloadError on a negative capacity, when the first is asked for.
    """
    cache = IdealCache(capacity, last_to_first)
    for chain in chains:
        yield cache.serve(chain)
