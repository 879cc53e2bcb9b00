"""Paged KV for models whose layers keep different things: several groups of layers over one pool of blocks.

::

    pool tensors         group_length tensors of num_blocks pages; a block id is one page in each of them
    a sequence           full            | 1 | 2 | 3 | 7 |      one table for each group, 0 is the null block:
                         sliding_window  | 0 | 0 | 6 | 8 |      what left the window was given back
    free queue           head -> 12 13 ... 4 5                  one for all groups; a block belongs to one at a time
    keys                 chained every h tokens (greatest common divisor of the block sizes); a block's key is the
                         chain's at its last token, and its group: two groups never share a block

Everything goes group by group in order: forgetting, adopting, taking, registering, freeing. The rules are vLLM 0.27's
(``HybridKVCacheCoordinator`` and its single-type managers); with one full group it is
:class:`~hbmtwin.allocators.paged.PagedPolicy`, operation by operation. ``scripts/validate_paged`` runs vLLM's own
``KVCacheManager`` beside it. K and V of a layer lie in one page, as in vLLM's raw tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import ClassVar

from hbmtwin.allocators.block_map import Held as BlocksHeld
from hbmtwin.allocators.block_map import block_map, enter
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.group_leaps import GroupBatch
from hbmtwin.allocators.group_managers import NULL
from hbmtwin.allocators.group_pool import GroupPool, Held, Marks
from hbmtwin.allocators.paged_groups_config import PagedGroupsConfig
from hbmtwin.allocators.pool_policy import GRANTED, TABLE_ENTRY_BYTES, PoolPolicy
from hbmtwin.allocators.prefix_cache import CacheEvent, PrefixStats
from hbmtwin.allocators.prefix_counter import PrefixCounter
from hbmtwin.allocators.records import Granted, KVBlock, KVLayout, KVSequence, KVUsage, Refused, Release
from hbmtwin.allocators.registry import kv_policies

__all__ = ["PagedGroupsConfig", "PagedGroupsPolicy"]


@kv_policies.register("paged_groups")
class PagedGroupsPolicy(PoolPolicy):
    """A block pool for layers of several kinds (full, windows, chunks, Mamba states), as in vLLM.

    The pool tensors are taken from the arena once, at construction (raises OutOfMemory, nothing kept), so a step never
    asks the arena for anything. PARK gives the blocks back: what is found again is what the prefix cache keeps.
    Bytes of tables: 4 for each entry, null or not.
    """

    name: ClassVar[str] = "paged_groups"
    requires: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str]] = frozenset({"preempt", "reject", "prefix_cache", "plan_ahead"})
    Config: ClassVar[type[PagedGroupsConfig]] = PagedGroupsConfig

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: PagedGroupsConfig) -> None:
        grouping = config.grouping
        super().__init__(layout, arena, config.num_blocks, [grouping.page_bytes] * grouping.group_length)
        self.config = config
        self.groups = grouping.groups
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        attention = [group for group in self.groups if group.kind != "mamba"]
        windowed = bool(attention) and all(group.kind != "full" for group in attention)
        self._bound = max(group.sinks + group.window for group in attention) if windowed else None
        """The most tokens that some layer still reads; None where one reads all, or none keeps tokens."""
        self.pool = GroupPool(
            self.groups,
            config.num_blocks,
            max_model_len=config.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            caching=config.enable_prefix_caching,
        )
        self._held: dict[int, Held] = {}
        self._batch: GroupBatch | None = None
        """Those of the last leap, until anybody reserves or is released."""
        self._step: dict[int, tuple[int, Marks | None]] = {}
        """Tokens and tables before this step of each sequence reserved in it: (-1, None) if it was admitted in it, None
        for tables that did not change."""
        self._boundaries: dict[int, int] = {}
        self._tokens = 0
        self.unsampled: Collection[int] | None = None
        """Of a server that plans ahead: see ``KeysFollow``."""
        self.under_way: Mapping[int, int] = {}
        self._prefixes = PrefixCounter(at_look_up=False)

    # -- room for tokens ---------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        """Tokens of the longest prefix that all groups hold, its last token never among them.

        0 without prefix caching. :meth:`shared_boundary` remembers what it saw besides.
        """
        if self.pool.lookup is None:
            return 0
        hit = self.pool.lookup.find(s, s.num_tokens - 1)
        self._boundaries[s.id] = hit.shared_boundary
        return hit.tokens

    def shared_boundary(self, s: KVSequence) -> int:
        """Tokens that the last :meth:`lookup` found in some groups beyond its answer; 0 if there were none.

        With Mamba states in mode ``align``, vLLM's scheduler ends a chunk there, so that the next one finds a state.
        """
        return self._boundaries.get(s.id, 0)

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
        """Give back what left the windows, then take what *new* tokens behind the computed ones need in each group.

        When admitting, all present tokens must fit (``reserve_full_sequence``; of groups with windows the most that
        they ever hold), and the watermark stays free if others run. Refused leaves everything as it was but for the
        blocks that were given back before. O(groups) where no block changes, else O(groups + blocks that do).
        Raise ValueError for a *hit* that :meth:`lookup` does not promise.
        """
        if self._batch is not None:
            self._leave_batch()
        held, computed, longest = self._held.get(s.id), s.num_computed_tokens, self.config.max_model_len
        if held is not None and computed + new <= held.quiet and not (hit or lookahead or admitting):
            self._step.setdefault(s.id, (held.tokens, None))
            self._set_tokens(held, min(computed + new, longest))
            return GRANTED
        adopted = self._adoptable(s, hit) if hit else None
        if adopted is not None and self.pool.is_fresh(adopted):
            return self._refused(self.config.num_blocks + 1, self.pool.num_free, "its state is computed in this step")
        computed += hit
        scheduled = min(computed, longest) + new
        tokens = min(scheduled, longest)
        slots = min(scheduled + lookahead, longest)
        reserved = self._watermark_blocks if admitting and others_running else 0
        if admitting and self.config.reserve_full_sequence:
            whole = min(s.num_tokens, longest)
            need, idle = self.pool.need(held, whole, whole, adopted, computed, gate=True)
            free = self.pool.num_free - idle - reserved
            if need > free:
                return self._refused(need, free, "the whole prompt does not fit")
        if held is not None:
            done = computed - self.under_way.get(s.id, 0) if self.under_way else computed
            self.pool.forget(held, min(done, longest))
        need, idle = self.pool.need(held, slots, scheduled, adopted, computed)
        free = self.pool.num_free - idle - reserved
        if need > free:
            return self._refused(need, free, "not enough free blocks")
        if held is None:
            held = self._held[s.id] = Held(len(self.groups))
            self._step[s.id] = (-1, None)
            if admitting and self.pool.lookup is not None:
                self._prefixes.admitted(s, hit)
        else:
            tokens_before, marks = self._step.get(s.id, (held.tokens, None))
            if tokens_before >= 0 and marks is None:
                self._step[s.id] = (tokens_before, self.pool.marks(held))
        if adopted is not None:
            self.pool.adopt(held, adopted, computed)
        self.pool.grow(held, slots, scheduled)
        known = s.num_tokens - 1 if self.unsampled and s.id in self.unsampled else s.num_tokens
        self.pool.register(s, held, min(tokens, known))
        self._set_tokens(held, tokens)
        return Granted(hit) if hit else GRANTED

    def cache_blocks(self, s: KVSequence) -> None:
        """Give the full blocks of its computed tokens their keys, as all of these are known. O(groups + keys)."""
        held = self._held.get(s.id)
        if held is not None and self.pool.lookup is not None:
            self._leave_batch()
            self.pool.register(s, held, s.num_computed_tokens)

    def _adoptable(self, s: KVSequence, hit: int) -> tuple[Sequence[int], ...]:
        """Blocks of the first *hit* tokens in each group. Raise ValueError if they are not there."""
        if self.pool.lookup is None:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: this pool has no prefix cache")
        if s.id in self._held or s.num_computed_tokens:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: it has started already")
        found = self.pool.lookup.find(s, s.num_tokens - 1)
        if 0 < hit < found.tokens:
            found = self.pool.lookup.find(s, hit)
        if found.tokens != hit:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: {found.tokens} tokens of its prefix are held")
        return found.blocks

    def _set_tokens(self, held: Held, tokens: int) -> None:
        self._tokens += tokens - held.tokens
        held.tokens = tokens

    # -- a step ------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The step's reservations stand."""
        self._step.clear()
        self.pool.end_step()
        self._prefixes.end_step()

    def abort_step(self) -> None:
        """Give back this step's blocks, to the head of the queue in the order in which they were taken.

        Blocks that were given back in the step, because no later token reads them, stay so, as they do after a refusal:
        that depends only on tokens computed before. Keys that were given in the step are taken away, keys that were
        evicted stay lost, and adopted blocks that are free again go to the tail, as with
        :class:`~hbmtwin.allocators.paged.PagedPolicy`.
        """
        self._leave_batch()
        self.pool.withdraw_keys()
        for owner, (tokens, marks) in reversed(self._step.items()):
            held = self._held[owner]
            if tokens < 0:
                self.pool.undo(held, None)
                self._tokens -= held.tokens
                del self._held[owner]
                continue
            if marks is not None:
                self.pool.undo(held, marks)
            self._set_tokens(held, tokens)
        self._prefixes.abort_step()
        self.end_step()

    # -- a leap ------------------------------------------------------------------------------------------------------

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """The most steps whose blocks are free when they come, those given back in between among them.

        ``max_model_len`` is the scheduler's business and not looked at. Where no layer sees everything, :meth:`kept`
        bends at the longest window, and a leap ends there. O(groups) when blocks are plenty, else O(block size *
        groups), or O(changes of the steps that were not tried before) when blocks are short; and O(sequences) for a
        list that it has not seen since anybody reserved.
        """
        if self._bound is not None:
            limit = self._batch_of(decoding).unbent(self._bound, limit)
        if self._are_plenty(decoding, limit):
            return limit
        return self._batch_of(decoding).fitting(limit)

    def _are_plenty(self, decoding: Sequence[KVSequence], steps: int) -> bool:
        """Whether blocks are free for *steps*, even if none has a free slot now. O(groups)."""
        return len(decoding) * sum([-(-steps // m.size) for m in self.pool.managers]) <= self.pool.num_free

    def steps_unseen(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """The most further steps, at most *limit*, none of which gives a block back. O(1) for a known list.

        0 where the first chunk of a prompt must fit and no more, and there is a prefix cache: once a decode step has
        taken the blocks that it would have found, less is counted for the chunk, which may then fit.
        """
        if self.pool.lookup is not None and not self.config.reserve_full_sequence:
            return 0
        return self._batch_of(decoding).unseen(limit)

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Take *k* steps at once: blocks are given back, go out and get their keys by (step, running order).

        Only steps in which a sequence's tables change are carried out: O(groups + log(k)) for each, and what
        :meth:`horizon` costs. Raise ValueError, and change nothing, if *k* is over the horizon.
        """
        if not k:
            return
        longest, batch = self.config.max_model_len, self._batch_of(decoding)
        if capped := batch.longest + k > longest:
            self._leave_batch()
            batch = GroupBatch(self.pool, decoding, list(batch.tables.values()), longest, lag=self._lag)
        if not self._are_plenty(decoding, k) and (fitting := batch.fitting(k)) < k:
            raise ValueError(f"blocks are free for {fitting} of {k} steps: over the horizon")
        self.end_step()
        before = sum([held.tokens for held in batch.tables.values()]) if capped else 0
        batch.go(k)
        if capped:
            batch.fold()
            self._tokens += sum([held.tokens for held in batch.tables.values()]) - before
        else:
            self._tokens += k * len(decoding)
        self.pool.end_step()

    def _batch_of(self, decoding: Sequence[KVSequence]) -> GroupBatch:
        """The batch of the last leap if this is its list, else a new one. Raise KeyError for who holds nothing."""
        batch = self._batch
        if batch is None or batch.decoding is not decoding:
            self._leave_batch()
            batch = self._batch = GroupBatch(self.pool, decoding, [self._held[s.id] for s in decoding], lag=self._lag)
        return batch

    @property
    def _lag(self) -> int:
        """Tokens of a decoding sequence that are under way, and not known, when its next one is planned."""
        return 0 if self.unsampled is None else 1

    def _leave_batch(self) -> None:
        if self._batch is not None:
            self._batch.fold()
            self._batch = None

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """Free the sequence's blocks group by group, in each the last one first, whatever the reason. O(blocks).

        Raise KeyError for PARK if it holds none.
        """
        self._leave_batch()
        held = self._held.pop(s.id, None)
        if why is Release.PREEMPT:
            self._prefixes.preempted(s)
        else:
            self._prefixes.gone(s)
            self.pool.cache.keys.forget(s.id)
            self._boundaries.pop(s.id, None)
        if held is None:
            if why is Release.PARK:
                raise KeyError(f"sequence {s.id} holds no KV that could be parked")
            return
        self._step.pop(s.id, None)
        self.pool.release(held)
        self._tokens -= held.tokens

    def reset_prefix_cache(self) -> bool:
        """Forget all keys, if no sequence holds a block; the queue keeps its order. False, and nothing, otherwise."""
        return self.pool.cache.clear()

    # -- what happened to prefixes -----------------------------------------------------------------------------------

    @property
    def on_cache_event(self) -> Callable[[CacheEvent], None] | None:
        """Called for every key that a block gets or loses; never without prefix caching."""
        return self.pool.cache.observer

    @on_cache_event.setter
    def on_cache_event(self, observer: Callable[[CacheEvent], None] | None) -> None:
        self.pool.cache.observer = observer

    def prefix_stats(self) -> PrefixStats:
        """Queried and found tokens of requests admitted so far; all 0 without prefix caching."""
        return self._prefixes.stats

    # -- books -------------------------------------------------------------------------------------------------------

    def kept(self, tokens: int) -> int:
        """*tokens* where a layer sees them all, else at most the longest window: what *some* layer still reads.

        Blocks hold more, up to one beside the window and a chunk that is computed; ``usage`` counts those.
        """
        bound = self._bound
        return tokens if bound is None else min(tokens, bound)

    def block_ids(self, s: KVSequence) -> tuple[int, ...]:
        """Ids of its blocks, group after group, in token order and without nulls; empty if it holds none."""
        return tuple(block for table in self.tables(s) for block in table if block != NULL)

    def tables(self, s: KVSequence) -> tuple[tuple[int, ...], ...]:
        """Its block table in each group, with 0 for the null block; empty ones if it holds nothing."""
        held = self._held.get(s.id)
        return tuple(tuple(table.blocks) for table in held.tables) if held else ((),) * len(self.groups)

    def free_queue(self) -> tuple[int, ...]:
        """Free blocks, the next one to be taken first."""
        return tuple(self.pool.cache.free)

    def usage(self) -> KVUsage:
        """The books, O(groups). Each block and slot counts once, however many share it; each table entry counts.

        ``token`` are slots in held blocks, ``dropped`` tokens whose block is null, and ``state`` the Mamba states.
        """
        unheld = self.pool.num_free + 1
        held, cached = self.config.num_blocks - unheld, self.pool.cache.cached
        shared = dropped = state = 0
        for index, group in enumerate(self.groups):
            if group.kind == "mamba":
                state += self.pool.distinct[index] * group.num_layers * group.state_bytes
                continue
            block_bytes = group.block_size * group.num_layers * group.token_bytes
            shared += (self.pool.entries[index] - self.pool.distinct[index]) * block_bytes
            dropped += self.pool.nulls[index] * block_bytes
        return KVUsage(
            token=self._tokens * self.config.grouping.token_bytes - shared - dropped,
            parked=0,
            held=held * self._block_bytes,
            growth_copy=0,
            cached=cached * self._block_bytes,
            pool=(unheld - cached) * self._block_bytes,
            table=(sum(self.pool.entries) + sum(self.pool.nulls)) * TABLE_ENTRY_BYTES,
            dropped=dropped,
            shared=shared,
            state=state,
        )

    def walk(self) -> Iterator[KVBlock]:
        """Blocks by id, alike neighbours in one piece, the null block as free. A shared one is its first owner's.

        ``token_bytes`` are those of running sequences: a cached block has none, and neither has a Mamba state.
        """
        if self._batch is not None:
            self._batch.fold()
        found: BlocksHeld = {}
        for owner, held in self._held.items():
            for group, table in zip(self.groups, held.tables, strict=True):
                token_bytes = group.num_layers * group.token_bytes
                enter(found, owner, table.blocks, held.tokens, group.block_size, token_bytes)
        found.pop(NULL, None)
        yield from block_map(self.config.num_blocks, self._block_bytes, found, self.pool.cache.keyed_blocks())

    def check(self) -> None:
        """Assert the invariants of queue, references, keys and tables, and the books against the walk and the arena."""
        self._check_books(self.usage(), list(self.walk()))  # first: the walk tells the tables of a leap's tokens
        self.pool.check(self._held.values())
