"""Paged KV: one pool of equal blocks, handed out as vLLM's block manager does, with or without prefix caching.

::

    pool tensors (K and V of each layer)   | block 0 | block 1 | ... | block num_blocks - 1 |
    block 0                                the null block: never handed out, never free
    free queue                             head -> 1 2 3 ... ; blocks are taken at the head, given back at the tail
                                           (with prefix caching those without a key at the head)
    a sequence                             block ids in token order; the last block may be partly filled;
                                           with prefix caching sequences share the full blocks of a prefix

The rules are vLLM 0.27's (``BlockPool``, ``KVCacheManager.allocate_slots``), meant to give the ids that vLLM would.
They are: ``scripts/validate_paged`` runs vLLM 0.27.1's own ``KVCacheManager`` beside this one, and 500,085 operations
in 14 pools, caching off and on, had no difference in ids, hits or free queue. CI holds it to a second model.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.prefix_cache import NO_KEY, FreeQueue, PrefixCache
from hbmtwin.allocators.records import Granted, KVBlock, KVLayout, KVSequence, KVUsage, Refused, Release, Tag, Work
from hbmtwin.allocators.registry import kv_policies

TABLE_ENTRY_BYTES = 4
"""A block id in the device's table is an int32, in vLLM and in the NPU attention ops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedConfig:
    """Settings of :class:`PagedPolicy`. ``num_blocks`` counts the null block, as vLLM's ``num_gpu_blocks`` does."""

    num_blocks: int
    max_model_len: int
    block_size: int = 128
    watermark: float = 0.0
    """Part of the pool that admitting leaves free while others run."""
    reserve_full_sequence: bool = True
    """Admit a sequence only if all its present tokens fit, though a chunk of them is scheduled."""
    enable_prefix_caching: bool = False
    """Full blocks keep their key when they are freed, and are found again by a sequence with the same prefix."""

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 2), ("max_model_len", 1), ("block_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be from 0 to below 1, not {self.watermark}")


_GRANTED = Granted()
"""The same answer to every sequence in every step: making it anew was an eighth of a run."""


class _Table:
    """The blocks of one sequence, how many of them got a key, and its tokens: the target of the last reserve, lookahead
    not included."""

    __slots__ = ("blocks", "keyed", "tokens")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.keyed = 0
        self.tokens = 0


@kv_policies.register("paged")
class PagedPolicy:
    """A block pool with a first-in first-out free queue, as in vLLM; with prefix caching, its blocks are shared.

    The pool tensors are taken from the arena once, at construction (raises OutOfMemory, nothing kept), so a step never
    asks the arena for anything. PARK gives the blocks back: what is found again is what the prefix cache keeps.
    Bytes of tables: 4 for each block id that a sequence holds.
    """

    name: ClassVar[str] = "paged"
    requires: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str]] = frozenset({"preempt", "reject", "prefix_cache"})
    Config: ClassVar[type[PagedConfig]] = PagedConfig

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: PagedConfig) -> None:
        self.layout = layout
        self.arena = arena
        self.config = config
        self._block_bytes = config.block_size * layout.token_bytes
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._cache = PrefixCache(config.num_blocks, config.block_size) if config.enable_prefix_caching else None
        self._free: deque[int] | FreeQueue = self._cache.free if self._cache else deque(range(1, config.num_blocks))
        self._tables: dict[int, _Table] = {}
        self._step: dict[int, tuple[int, int]] = {}
        """Tokens and blocks before this step of each sequence reserved in it; (-1, 0) if it was admitted in it."""
        self._keyed: list[tuple[_Table, int]] = []
        """Blocks that got a key in this step, and for whom."""
        self._tokens = 0
        self._handles: list[int] = []
        try:
            for token_bytes in layout.tensor_bytes * layout.num_layers:
                size = config.num_blocks * config.block_size * token_bytes
                self._handles.append(arena.malloc(size, tag=Tag.KV))
        except OutOfMemory:
            for handle in self._handles:
                arena.free(handle)
            raise

    # -- room for tokens ---------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        """Tokens of the full blocks that hold its prefix, its last token never among them. O(blocks found).

        0 without prefix caching, and for a sequence without spans.
        """
        return len(self._cache.find(s)) * self.config.block_size if self._cache is not None else 0

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
        """Take the blocks that *new* tokens behind the computed ones need. O(blocks taken).

        When admitting, all present tokens must fit (``reserve_full_sequence``), and the watermark stays free if others
        run. Refused leaves everything as it was. With prefix caching, a block popped from the queue loses its key, and
        blocks that become full get theirs now, before they are computed: who is admitted next can share them.
        Raise ValueError for a *hit* that :meth:`lookup` does not promise.
        """
        size, longest = self.config.block_size, self.config.max_model_len
        table = self._tables.get(s.id)
        held = len(table.blocks) if table else 0
        free = len(self._free)
        adopted: Sequence[int] = ()
        if hit:
            adopted, idle = self._adoptable(s, hit)
            held = len(adopted)
            free -= idle  # they stand in the queue, and are taken out of it
        tokens = min(s.num_computed_tokens + hit + new, longest)
        need = -(-min(tokens + lookahead, longest) // size) - held
        if admitting:
            if others_running:
                free -= self._watermark_blocks
            if self.config.reserve_full_sequence:
                whole = -(-min(s.num_tokens, longest) // size) - held
                if whole > free:
                    return self._refused(whole, free, "the whole prompt does not fit")
        if need > free:
            return self._refused(need, free, "not enough free blocks")
        if table is None:
            table = self._tables[s.id] = _Table()
            self._step[s.id] = (-1, 0)
        else:
            self._step.setdefault(s.id, (table.tokens, held))
        if self._cache is not None:
            self._take_cached(self._cache, table, s, adopted, need, min(tokens, s.num_tokens) // size)
        elif need > 0:
            pop = self._free.popleft
            table.blocks += [pop() for _ in range(need)]
        self._tokens += tokens - table.tokens
        table.tokens = tokens
        return Granted(hit) if hit else _GRANTED

    def _take_cached(
        self, cache: PrefixCache, table: _Table, s: KVSequence, adopted: Sequence[int], need: int, full: int
    ) -> None:
        """Adopt, take *need* blocks more, and give the first *full* ones their keys."""
        if adopted:
            cache.touch(adopted)
            table.blocks += adopted
            table.keyed = len(adopted)
        table.blocks += [cache.take() for _ in range(need)]
        if full > table.keyed:
            self._register(cache, table, s, full)

    def _adoptable(self, s: KVSequence, hit: int) -> tuple[Sequence[int], int]:
        """Blocks of the first *hit* tokens, and how many of them are free. Raise ValueError if they are not there."""
        size, cache = self.config.block_size, self._cache
        if cache is None:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: this pool has no prefix cache")
        if s.id in self._tables or s.num_computed_tokens:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: it has started already")
        found = cache.find(s)
        if hit < 0 or hit % size or hit > len(found) * size:
            raise ValueError(
                f"sequence {s.id} cannot adopt {hit} tokens: {len(found)} blocks of {size} tokens hold its prefix"
            )
        adopted = found[: hit // size]
        return adopted, cache.idle(adopted)

    def _register(self, cache: PrefixCache, table: _Table, s: KVSequence, full: int) -> None:
        """Give the first *full* blocks of a table their keys, as far as its spans say what they hold."""
        keys = cache.keys.of(s, full)
        for index in range(table.keyed, min(full, len(keys))):
            block = table.blocks[index]
            cache.register(block, keys[index])
            self._keyed.append((table, block))
            table.keyed = index + 1

    def _refused(self, need: int, free: int, reason: str) -> Refused:
        return Refused(need * self._block_bytes, max(0, free) * self._block_bytes, reason)

    # -- a step ------------------------------------------------------------------------------------------------------

    def grow_layer(self, layer: int) -> None:
        """Nothing: the pool is there already."""

    def end_step(self) -> None:
        """The step's reservations stand."""
        self._step.clear()
        self._keyed.clear()

    def abort_step(self) -> None:
        """Give back this step's blocks, to the head of the queue in the order in which they were taken.

        Without a release in between, the queue is as it was before the step. With prefix caching, keys that were given
        in the step are taken away, for nobody computes what they promise; keys that were evicted stay lost; and
        adopted blocks that are free again go to the tail of the queue, as the used ones they are.
        """
        cache = self._cache
        if cache is not None:
            for table, block in self._keyed:
                cache.withdraw(block)
                table.keyed -= 1
            self._keyed.clear()
        for owner, (tokens, held) in reversed(self._step.items()):
            table = self._tables[owner]
            if cache is None:
                self._free.extendleft(reversed(table.blocks[held:]))
            else:
                self._undo(cache, table.blocks[held:])
            del table.blocks[held:]
            self._tokens += max(tokens, 0) - table.tokens
            table.tokens = tokens
            if tokens < 0:
                del self._tables[owner]
        self._step.clear()

    def _undo(self, cache: PrefixCache, blocks: list[int]) -> None:
        """Adopted blocks have a key, and are let go last one first; taken ones return to where they came from."""
        cache.put_back([block for block in reversed(blocks) if cache.key_of[block] != NO_KEY])
        cache.put_back([block for block in blocks if cache.key_of[block] == NO_KEY])

    # -- a leap ------------------------------------------------------------------------------------------------------

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """The most steps whose blocks are all free now: a block boundary does not end a leap.

        O(sequences + block_size * log(limit)), O(1) when blocks are plenty. ``max_model_len`` is the scheduler's
        business and not looked at.
        """
        size, free, count = self.config.block_size, len(self._free), len(decoding)
        if count * -(-limit // size) <= free:
            return limit
        unfilled = self._unfilled_slots(self._tables_of(decoding))
        places = Counter(unfilled).items()

        def need(steps: int) -> int:
            return sum(tables * -(-(steps - slots) // size) for slots, tables in places if slots < steps)

        # Between as many steps as fit if no slot is free now and if the last blocks may stay unfilled.
        low = free // count * size
        high = min(limit, (free * size + sum(unfilled)) // count)
        return low + bisect_right(range(low + 1, high + 1), free, key=need)

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Take *k* steps at once: blocks go out, and get their keys, by (step, running order), as in single steps.

        Raise ValueError, and change nothing, if *k* is over the horizon. O(sequences + blocks taken * log).
        """
        if not k:
            return
        self.end_step()
        size, longest = self.config.block_size, self.config.max_model_len
        tables = self._tables_of(decoding)
        taken: list[tuple[int, int]] = []
        for place, (table, slots) in enumerate(zip(tables, self._unfilled_slots(tables), strict=True)):
            if slots < k:
                last = min(k, longest - table.tokens)
                taken += [(step, place) for step in range(slots + 1, last + 1, size)]
        if len(taken) > len(self._free):
            raise ValueError(f"{k} steps need {len(taken)} blocks and {len(self._free)} are free: over the horizon")
        cache = self._cache
        pop = self._free.popleft if cache is None else cache.take
        for _, place in sorted(taken):
            tables[place].blocks.append(pop())
        if cache is not None:
            self._register_by_steps(cache, decoding, tables, k)
        before = sum([table.tokens for table in tables])
        for table in tables:
            table.tokens = min(table.tokens + k, longest)
        self._tokens += sum([table.tokens for table in tables]) - before

    def _register_by_steps(
        self, cache: PrefixCache, decoding: Sequence[KVSequence], tables: Sequence[_Table], k: int
    ) -> None:
        """Keys of blocks that fill in *k* steps. Among equal keys the first given counts, hence the order.

        A key goes to a block that is held, so that which blocks were taken in between does not matter.
        """
        size, longest = self.config.block_size, self.config.max_model_len
        filling = [
            (max(1, full * size - table.tokens), place, full)
            for place, table in enumerate(tables)
            for full in range(table.keyed + 1, min(table.tokens + k, longest) // size + 1)
        ]
        for _, place, full in sorted(filling):
            self._register(cache, tables[place], decoding[place], full)
        self._keyed.clear()

    def _tables_of(self, sequences: Sequence[KVSequence]) -> list[_Table]:
        tables = self._tables
        return [tables[s.id] for s in sequences]

    def _unfilled_slots(self, tables: Sequence[_Table]) -> list[int]:
        size = self.config.block_size
        return [len(table.blocks) * size - table.tokens for table in tables]

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """Append the sequence's blocks to the free queue, last one first, whatever the reason. O(blocks).

        With prefix caching those that others share stay, and those without a key go to the head of the queue.
        Raise KeyError for PARK if it holds none.
        """
        table = self._tables.pop(s.id, None)
        cache = self._cache
        if cache is not None and why is not Release.PREEMPT:
            cache.keys.forget(s.id)
        if table is None:
            if why is Release.PARK:
                raise KeyError(f"sequence {s.id} holds no KV that could be parked")
            return
        self._step.pop(s.id, None)
        if cache is None:
            self._free.extend(reversed(table.blocks))
        else:
            cache.put_back(table.blocks[::-1])
        self._tokens -= table.tokens

    def reset_prefix_cache(self) -> bool:
        """Forget all keys, if no sequence holds a block; the queue keeps its order. False, and nothing, otherwise."""
        return self._cache.clear() if self._cache is not None else not self._tables

    # -- what this pool cannot do ------------------------------------------------------------------------------------

    def fork(self, parent: KVSequence, child: KVSequence) -> Refused:
        """Always refused: blocks are shared only by the prefix cache, which a child finds by itself."""
        return Refused(0, 0, "blocks are shared only by the prefix cache; a child must be computed anew")

    def swap_out(self, s: KVSequence) -> Refused:
        """Always refused: vLLM's present engine preempts by recomputing."""
        return Refused(0, 0, "this pool preempts by recomputing; it does not swap")

    def swap_in(self, s: KVSequence) -> Refused:
        """Always refused, as :meth:`swap_out`."""
        return self.swap_out(s)

    # -- books -------------------------------------------------------------------------------------------------------

    def take_work(self) -> Work:
        """No work: nothing is copied or swapped."""
        return Work()

    def kept(self, tokens: int) -> int:
        """*tokens*: nothing is dropped."""
        return tokens

    def block_ids(self, s: KVSequence) -> tuple[int, ...]:
        """Ids of its blocks in token order, empty if it holds none."""
        table = self._tables.get(s.id)
        return tuple(table.blocks) if table else ()

    def usage(self) -> KVUsage:
        """The books, O(1). Each block and each slot counts once, however many share it; each table entry counts."""
        unheld = len(self._free) + 1
        held = self.config.num_blocks - unheld
        cache = self._cache
        cached, entries = (cache.cached, cache.shared) if cache is not None else (0, 0)
        shared = entries * self._block_bytes
        return KVUsage(
            token=self._tokens * self.layout.token_bytes - shared,
            parked=0,
            held=held * self._block_bytes,
            growth_copy=0,
            cached=cached * self._block_bytes,
            pool=(unheld - cached) * self._block_bytes,
            table=(held + entries) * TABLE_ENTRY_BYTES,
            shared=shared,
        )

    def walk(self) -> Iterator[KVBlock]:
        """Every block by id, the null block as free. A shared block is the one's who got room first.

        ``token_bytes`` are those of running sequences: a cached block has none.
        """
        size, cache = self.config.block_size, self._cache
        held: dict[int, tuple[int, int]] = {}
        for owner, table in self._tables.items():
            for index, block in enumerate(table.blocks):
                held.setdefault(block, (max(0, min(size, table.tokens - index * size)), owner))
        for block in range(self.config.num_blocks):
            tokens, owner = held.get(block, (0, -1))
            free = "cached" if cache is not None and cache.key_of[block] != NO_KEY else "free"
            state = "running" if block in held else free
            yield KVBlock(block * self._block_bytes, self._block_bytes, tokens * self.layout.token_bytes, state, owner)

    def check(self) -> None:
        """Assert that every block but the null one is in one place, and the books against the walk and the arena."""
        held: Collection[int] = [block for table in self._tables.values() for block in table.blocks]
        if self._cache is not None:
            self._cache.check([table.blocks for table in self._tables.values()])
            for table in self._tables.values():
                keys = [self._cache.key_of[block] for block in table.blocks]
                assert NO_KEY not in keys[: table.keyed]
                assert all(key == NO_KEY for key in keys[table.keyed :])
                assert table.keyed * self.config.block_size <= table.tokens
            held = set(held)
        assert sorted([*held, *self._free]) == list(range(1, self.config.num_blocks))
        for table in self._tables.values():
            assert 0 <= table.tokens <= len(table.blocks) * self.config.block_size
        usage, blocks = self.usage(), list(self.walk())
        assert usage.token == sum(block.token_bytes for block in blocks)
        assert usage.held == sum(block.size for block in blocks if block.state == "running")
        assert usage.cached == sum(block.size for block in blocks if block.state == "cached")
        assert usage.pool == sum(block.size for block in blocks if block.state == "free")
        assert usage.unfilled >= 0
        assert self.arena.usage().requested_by_tag[Tag.KV] == self.config.num_blocks * self._block_bytes
