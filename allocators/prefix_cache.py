"""Blocks that keep their key when nobody refers to them any more, so that a later prefix finds them again.

::

    key -> block      k0: 1        k1: 2        (no de-duplication: a look-up takes the one inserted first)
    key -> twins                   k1: 9        (the others, oldest first)
    block             ref count, key or none
    free queue        blocks of ref 0: | without key (freed last) ... | ... | with key, oldest first ... |

The rules are vLLM 0.27's ``BlockPool`` and, in :meth:`PrefixCache.find`, its ``FullAttentionManager``. Releases before
0.27 put freed blocks without a key to the tail like all others (``bare_first=False``).
Where several groups of layers share the pool, a key carries its group: two groups never share a block.
Every verb is O(blocks it names), the queue's unlinking O(1).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from typing import Literal, NamedTuple

from hbmtwin.allocators.block_keys import NO_KEY, BlockKeys
from hbmtwin.allocators.records import KVSequence


class CacheEvent(NamedTuple):
    """What happened to a key: vLLM's ``BlockStored``, ``BlockRemoved`` (when a block is taken anew, not when it is
    freed) and ``AllBlocksCleared``, one for each block."""

    action: Literal["stored", "removed", "cleared"]
    key: int = NO_KEY
    """Number of the chained key; equal prefixes have equal ones."""
    parent: int = NO_KEY
    """Key of the block before it, of a stored one; -1 for the first."""
    block: int = -1
    group: int = 0


class PrefixStats(NamedTuple):
    """vLLM's ``PrefixCacheStats``: tokens asked for and found; the hit rate is ``hits / queries``. Requests that were
    preempted before stand apart."""

    requests: int = 0
    queries: int = 0
    """Tokens of those requests."""
    hits: int = 0
    """Those of them that were found."""
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0

    def with_request(self, tokens: int, hit: int, *, preempted: bool) -> PrefixStats:
        """One request more."""
        requests, queries, hits, *again = self
        if preempted:
            return PrefixStats(requests, queries, hits, again[0] + 1, again[1] + tokens, again[2] + hit)
        return PrefixStats(requests + 1, queries + tokens, hits + hit, *again)


class FreeQueue(OrderedDict[int, None]):
    """A deque of block ids, the keys of a dict, from which any one can be taken in O(1)."""

    __slots__ = ()

    def popleft(self) -> int:
        """Take the head. Raise KeyError if there is none."""
        return self.popitem(last=False)[0]

    def remove(self, block: int) -> None:
        """Unlink one. Raise KeyError if it is not here."""
        del self[block]

    def extend(self, blocks: Iterable[int]) -> None:
        """Append each at the tail."""
        for block in blocks:
            self[block] = None

    def extendleft(self, blocks: Iterable[int]) -> None:
        """Put each at the head, so that the last one given is first, as a deque does."""
        for block in blocks:
            self[block] = None
            self.move_to_end(block, last=False)


class PrefixCache:
    """References and keys of the blocks of one pool, and its free queue."""

    def __init__(self, num_blocks: int, block_size: int, *, num_groups: int = 1, bare_first: bool = True) -> None:
        """*block_size* is the tokens that a key covers beyond its parent."""
        self.block_size = block_size
        self.num_groups = num_groups
        self.bare_first = bare_first
        self.observer: Callable[[CacheEvent], None] | None = None
        self.free = FreeQueue(zip(range(1, num_blocks), repeat(None)))
        self.keys = BlockKeys(block_size)
        self.refs = [0] * num_blocks
        self.key_of = [NO_KEY] * num_blocks
        """Of each block ``key * num_groups + group``, as in ``block_of``."""
        self.block_of: dict[int, int] = {}
        """Of each key the block that was given it first."""
        self._twins: dict[int, list[int]] = {}
        self._found_for: KVSequence | None = None
        """Whom the last look-up was for; None once any block has lost its key since."""
        self._found: list[int] = []
        self.cached = 0
        """Free blocks that carry a key."""
        self.shared = 0
        """References beside the first one of each block."""

    def find(self, s: KVSequence) -> list[int]:
        """Blocks that hold its prefix, at most ``(num_tokens - 1) // block_size``: the last token is computed anew."""
        self._found = self._find(s)
        self._found_for = s
        return self._found

    def _find(self, s: KVSequence) -> list[int]:
        found: list[int] = []
        block_of, count = self.block_of, max(0, s.num_tokens - 1) // self.block_size
        for key in self.keys.of(s, count)[:count]:
            if key not in block_of:
                break
            found.append(block_of[key])
        return found

    def adoptable(self, s: KVSequence, hit: int) -> list[int]:
        """Blocks of its first *hit* tokens. Raise ValueError if they are not there."""
        found = self._found if self._found_for is s else self.find(s)
        if hit > len(found) * self.block_size:
            found = self.find(s)
        if hit < 0 or hit % self.block_size or hit > len(found) * self.block_size:
            raise ValueError(
                f"sequence {s.id} cannot adopt {hit} tokens: {len(found)} blocks of {self.block_size} tokens hold its "
                "prefix"
            )
        return found[: hit // self.block_size]

    def idle(self, blocks: Iterable[int]) -> int:
        """How many of them nobody refers to: they stand in the free queue."""
        refs = self.refs
        return sum([not refs[block] for block in blocks])

    def touch(self, blocks: Sequence[int]) -> None:
        """One reference more to each; idle ones leave the free queue."""
        refs, free = self.refs, self.free
        for block in blocks:
            others = refs[block]
            refs[block] = others + 1
            if others:
                self.shared += 1
            else:
                del free[block]
                self.cached -= 1

    def take(self) -> int:
        """The head of the queue for one sequence; its key is lost, and there is no other eviction."""
        block = self.free.popleft()
        self.refs[block] = 1
        if self.key_of[block] != NO_KEY:
            self.cached -= 1
            self.unregister(block)
        return block

    def register(self, blocks: Sequence[int], keys: Sequence[int], group: int = 0) -> None:
        """Full blocks of a sequence get their keys, each behind others that have the same."""
        key_of, block_of, count = self.key_of, self.block_of, self.num_groups
        for block, key in zip(blocks, keys, strict=True):
            carried = key * count + group
            key_of[block] = carried
            if block_of.setdefault(carried, block) != block:
                self._twins.setdefault(carried, []).append(block)
        self.keys.use_all(keys)
        if self.observer is not None:
            for block, key in zip(blocks, keys, strict=True):
                self.observer(CacheEvent("stored", key, self.keys.parent(key), block, group))

    def unregister(self, block: int) -> None:
        """Take a block's key away; who calls sees to ``cached``. O(blocks with its key)."""
        carried = self.key_of[block]
        self.key_of[block] = NO_KEY
        self._found_for = None
        if carried in self._twins:
            self._part(block, carried)
        else:
            del self.block_of[carried]
        key, group = divmod(carried, self.num_groups)
        if self.observer is not None:
            self.observer(CacheEvent("removed", key, block=block, group=group))
        self.keys.unuse(key)

    def _part(self, block: int, carried: int) -> None:
        """One of several blocks loses the key that they carry."""
        twins = self._twins[carried]
        if self.block_of[carried] == block:
            self.block_of[carried] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[carried]

    def carriers(self) -> dict[int, list[int]]:
        """Of each key, with its group, the blocks that carry it in the order in which they got it. O(keys)."""
        return {carried: [first, *self._twins.get(carried, ())] for carried, first in self.block_of.items()}

    def withdraw(self, block: int) -> None:
        """Take the key of a block away that was promised in a step which is not carried out."""
        if self.key_of[block] != NO_KEY:
            self.unregister(block)
            if not self.refs[block]:
                self.cached -= 1

    def take_many(self, count: int) -> list[int]:
        """So many from the head, in order; none for less than one."""
        return [self.take() for _ in range(count)]

    def put_back(self, blocks: Sequence[int]) -> None:
        """One reference less to each in this order. Of those without any left, ones with a key go to the tail in this
        order and ones without a key to the head, in this order too (to the tail with the others in older releases)."""
        refs, key_of = self.refs, self.key_of
        keyed, bare = [], []
        for block in blocks:
            left = refs[block] - 1
            refs[block] = left
            if left:
                self.shared -= 1
            elif key_of[block] != NO_KEY:
                keyed.append(block)
            else:
                bare.append(block)
        self.cached += len(keyed)
        if self.bare_first or not bare:
            self.free.extend(keyed)
            self.free.extendleft(reversed(bare))
        else:
            self.free.extend([block for block in blocks if not refs[block]])

    def take_back(self, blocks: Sequence[int]) -> None:
        """Undo a step that gave a sequence these: adopted ones have a key, and are let go last one first; taken ones
        return to the head of the queue, where they came from."""
        self.free.extend(self._unreferred([block for block in reversed(blocks) if self.key_of[block] != NO_KEY]))
        taken = self._unreferred([block for block in blocks if self.key_of[block] == NO_KEY])
        self.free.extendleft(reversed(taken))

    def _unreferred(self, blocks: Sequence[int]) -> list[int]:
        """Drop a reference of each; those that have none left."""
        refs = self.refs
        for block in blocks:
            refs[block] -= 1
        idle = [block for block in blocks if not refs[block]]
        self.shared -= len(blocks) - len(idle)
        self.cached += sum([self.key_of[block] != NO_KEY for block in idle])
        return idle

    def clear(self) -> bool:
        """Drop every key if every block is free, the queue keeps its order; else nothing, and False."""
        if len(self.free) != len(self.refs) - 1:
            return False
        observer, self.observer = self.observer, None  # one event tells of all
        for block in self.free:
            self.withdraw(block)
        self.observer = observer
        if observer is not None:
            observer(CacheEvent("cleared"))
        return True

    def keyed_blocks(self) -> Sequence[int]:
        """Those that carry a key, held or not, by id. O(blocks)."""
        return [block for block, key in enumerate(self.key_of) if key != NO_KEY]

    def check(self, tables: Iterable[tuple[Sequence[int], int]]) -> None:
        """Assert the invariants of references, keys and queue, for tables of which the first so many have keys.
        O(blocks)."""
        counted = [0] * len(self.refs)
        for table, keyed in tables:
            for block in table:
                counted[block] += 1
            assert all((self.key_of[block] != NO_KEY) == (index < keyed) for index, block in enumerate(table))
        assert counted == self.refs
        free = list(self.free)
        assert sorted(free) == [block for block in range(1, len(self.refs)) if not self.refs[block]]
        carried = sorted((key, block) for block, key in enumerate(self.key_of) if key != NO_KEY)
        assert carried == sorted((key, block) for key, blocks in self.carriers().items() for block in blocks)
        assert all(self._twins.values())
        assert self._twins.keys() <= self.block_of.keys()
        assert self.cached == sum(self.key_of[block] != NO_KEY for block in free)
        assert self.shared == sum(refs - 1 for refs in self.refs if refs)
        assert not self.refs[0]
        assert self.key_of[0] == NO_KEY
