"""Paged KV: one pool of equal blocks, handed out as vLLM's block manager does, with or without prefix caching.

::

    pool tensors (K and V of each layer)   | block 0 | block 1 | ... | block num_blocks - 1 |
    block 0                                the null block: never handed out, never free
    free queue                             head -> 1 2 3 ... ; blocks are taken at the head, given back at the tail
                                           (with prefix caching those without a key at the head)
    a sequence                             block ids in token order; the last block may be partly filled;
                                           with prefix caching sequences share the full blocks of a prefix

The rules are vLLM 0.27's (``BlockPool``, ``KVCacheManager.allocate_slots``), meant to give the ids that vLLM would;
where 0.18 and 0.22 differ, ``version`` says so. It gives them: ``scripts/validate_paged`` runs vLLM 0.27.1's own
``KVCacheManager`` beside it, and finds no difference in ids, hits or free queue. CI holds it to a second model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

from hbmtwin.allocators.admission import Admission
from hbmtwin.allocators.block_map import Held, block_map, enter
from hbmtwin.allocators.block_pool import BlockPool
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.decode_batch import NEVER, NOWHERE, BlockTable, DecodeBatch
from hbmtwin.allocators.decode_group import DecodeGroup
from hbmtwin.allocators.paged_config import PagedConfig
from hbmtwin.allocators.pool_policy import GRANTED, TABLE_ENTRY_BYTES, PoolPolicy
from hbmtwin.allocators.prefix_cache import CacheEvent, PrefixCache, PrefixStats
from hbmtwin.allocators.prefix_counter import PrefixCounter
from hbmtwin.allocators.records import Granted, KVBlock, KVLayout, KVSequence, KVUsage, Refused, Release
from hbmtwin.allocators.registry import kv_policies

__all__ = ["PagedConfig", "PagedPolicy"]


@kv_policies.register("paged")
class PagedPolicy(PoolPolicy):
    """A block pool with a first-in first-out free queue, as in vLLM; with prefix caching, its blocks are shared.

    The pool tensors are taken from the arena once, at construction (raises OutOfMemory, nothing kept), so a step never
    asks the arena for anything. PARK gives the blocks back: what is found again is what the prefix cache keeps.
    ``admission = "reserve"`` admits by full length, as TensorRT-LLM does: nobody is preempted then.
    Bytes of tables: 4 for each block id that a sequence holds.
    """

    name: ClassVar[str] = "paged"
    requires: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str]] = frozenset({"preempt", "reject", "prefix_cache", "plan_ahead"})
    Config: ClassVar[type[PagedConfig]] = PagedConfig

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: PagedConfig) -> None:
        super().__init__(layout, arena, config.num_blocks, layout.block_tensors(config.block_size))
        self.config = config
        self._admission = Admission(config)
        self._cache: PrefixCache | None = None
        if config.enable_prefix_caching:
            bare_first = config.frees_bare_blocks_first
            self._cache = PrefixCache(config.num_blocks, config.block_size, bare_first=bare_first)
        self._pool = self._cache or BlockPool(config.num_blocks)
        self._free = self._pool.free
        self._token_bytes = layout.token_bytes
        self._tables: dict[int, BlockTable] = {}
        self._batch: DecodeBatch[BlockTable] | None = None
        """Those of the last leap or group, until one of them reserves by itself; from a list, until one is released."""
        self._stepped = False
        """Whether the batch took a token each in this step, which :meth:`abort_step` would take back."""
        self._step: dict[int, int] = {}
        """Tokens before this step of each sequence reserved in it; -1 if it was admitted in it."""
        self._took: dict[int, int] = {}
        """Blocks before this step of each sequence that took or adopted some in it."""
        self._keyed: list[tuple[BlockTable, int]] = []
        """Blocks that got a key in this step, and for whom."""
        self._tokens = 0
        self.unsampled: Collection[int] | None = None
        """Of a server that plans ahead: see ``KeysFollow``."""
        self.under_way: Mapping[int, int] = {}
        """The same; nothing is given back here while a sequence runs."""
        self._prefixes = PrefixCounter(at_look_up=config.counts_look_ups)

    # -- room for tokens ---------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        """Tokens of the full blocks that hold its prefix, its last token never among them. O(blocks found).

        0 without prefix caching, and for a sequence without spans. Keys that are made to find them are kept until the
        sequence is released, admitted or not.
        """
        if self._cache is None:
            return 0
        hit = len(self._cache.find(s)) * self.config.block_size
        self._prefixes.looked_up(s, hit)
        return hit

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

        When admitting, the gates of :class:`PagedConfig` must be passed. Refused leaves everything as it was. With
        prefix caching, a block popped from the queue loses its key, and blocks that become full get theirs now, before
        they are computed: who is admitted next can share them.
        Raise ValueError for a *hit* that :meth:`lookup` does not promise.
        """
        table = self._tables.get(s.id)
        if table is not None and table.place != NOWHERE:
            self._leave_batch()
        tokens = s.num_computed_tokens + hit + new
        if table is not None and tokens + lookahead <= table.quiet and not admitting and not hit:
            before = table.tokens
            if s.id not in self._step:
                self._step[s.id] = before
            self._tokens += tokens - before
            table.tokens = tokens
            return GRANTED
        size, longest, cache = self.config.block_size, self.config.max_model_len, self._cache
        held = len(table.blocks) if table else 0
        free = len(self._free)
        adopted: Sequence[int] = ()
        if hit:
            if cache is None:
                raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: this pool has no prefix cache")
            if table is not None or s.num_computed_tokens:
                raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: it has started already")
            adopted = cache.adoptable(s, hit)
            held = len(adopted)
            free -= cache.idle(adopted)  # they stand in the queue, and are taken out of it
        if tokens > longest:
            tokens = longest
        slots = tokens + lookahead
        need = -(-(slots if slots < longest else longest) // size) - held
        if admitting:
            free -= self._admission.watermark(others_running)
            if (short := self._admission.shortage(s, held, free, self._pool.shared, lookahead)) is not None:
                return self._refused(*short)
        if need > free:
            return self._refused(need, free, "not enough free blocks")
        if table is None:
            table = self._newcomer(s, lookahead)
            if cache is not None and admitting:
                self._prefixes.admitted(s, hit)
        else:
            self._step.setdefault(s.id, table.tokens)
            if need > 0:
                self._took.setdefault(s.id, held)
        if cache is not None and adopted:
            cache.touch(adopted)
            table.blocks += adopted
            table.keyed = len(adopted)
            table.next_key = hit + size
        table.blocks += self._pool.take_many(need)
        if cache is not None and (told := min(tokens, s.num_tokens)) >= table.next_key:  # drafts get no key
            if self.unsampled and s.id in self.unsampled:
                told = min(tokens, s.num_tokens - 1)
            if told >= table.next_key:
                self._register(cache, table, s, told // size)
        self._changed(table)
        self._tokens += tokens - table.tokens
        table.tokens = tokens
        return Granted(hit) if hit else GRANTED

    def reserve_together(self, group: DecodeGroup) -> bool:
        """Take the block that one more token needs, for each of a group in its order; False, and nothing, if blocks are
        short. O(blocks taken * log(block_size)), and O(log(block_size)) for each that joined since the last time."""
        batch, joined = self._batch, group.joined
        if batch is None or batch.decoding is not group:
            batch = self._batch_of(group)
            joined.clear()
        elif joined:
            known = self.unsampled is None
            for s in joined:
                table = self._tables[s.id]
                due = table.next_key if known else self._key_due(table)
                table.place = batch.join(table, len(table.blocks), due)
            joined.clear()
        if batch.need_now() > len(self._free):
            return False
        self._stepped = True
        self._go(batch, 1)
        return True

    def cache_blocks(self, s: KVSequence) -> None:
        """Give the full blocks of its computed tokens their keys, as all of these are known. O(keys)."""
        table, computed = self._tables.get(s.id), s.num_computed_tokens
        if self._cache is None or table is None or computed < table.next_key:
            return
        if table.place != NOWHERE:
            self._leave_batch()
        self._register(self._cache, table, s, computed // self.config.block_size)
        self._changed(table)

    def rest(self, s: KVSequence) -> None:
        """Take a sequence out of the group that it decoded with; it keeps what it holds. O(log(block_size))."""
        table, batch = self._tables[s.id], self._batch
        if batch is not None and table.place != NOWHERE:
            batch.leave(table.place, len(table.blocks), self._key_due(table))
            table.place = NOWHERE

    def _key_due(self, table: BlockTable) -> int:
        """Tokens with which the next key of one that decodes is given: with the token behind the block, where that of
        a step is known only when the one after it is planned."""
        late = self.unsampled is not None and table.next_key != NEVER
        return table.next_key + 1 if late else table.next_key

    def _newcomer(self, s: KVSequence, lookahead: int) -> BlockTable:
        """An empty table for a sequence that has none."""
        next_key = NEVER if self._cache is None else self.config.block_size
        table = self._tables[s.id] = BlockTable(s, next_key, self._admission.full_length(s, lookahead))
        self._admission.promised += table.promised
        self._step[s.id], self._took[s.id] = -1, 0
        return table

    def _changed(self, table: BlockTable) -> None:
        """Its blocks or keys have changed."""
        table.settle(self.config.block_size, self.config.max_model_len)
        if (more := len(table.blocks) - table.promised) > 0:
            table.promised += more
            self._admission.promised += more

    def _register(self, cache: PrefixCache, table: BlockTable, s: KVSequence, full: int) -> None:
        """Give the first *full* blocks of a table their keys, as far as its spans say what they hold."""
        keyed, keys = table.keyed, cache.keys.of(s, full)
        given = min(full, len(keys))
        if given > keyed:
            blocks = table.blocks[keyed:given]
            cache.register(blocks, keys[keyed:given])
            self._keyed += [(table, block) for block in blocks]
            table.keyed = given
        table.next_key = (full + 1) * self.config.block_size if table.keyed == full else NEVER

    # -- a step ------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The step's reservations stand."""
        self._step.clear()
        self._took.clear()
        self._stepped = False
        if self._cache is not None:
            self._keyed.clear()
            self._prefixes.end_step()

    def abort_step(self) -> None:
        """Give back this step's blocks, to the head of the queue in the order in which they were taken.

        Without a release in between, the queue is as it was before the step. With prefix caching, keys that were given
        in the step are taken away, for nobody computes what they promise; keys that were evicted stay lost; and
        adopted blocks that are free again go to the tail of the queue, as the used ones they are.
        """
        self._leave_batch()
        cache, size, tables = self._cache, self.config.block_size, self._tables
        if cache is not None:
            for table, block in self._keyed:
                cache.withdraw(block)
                table.keyed -= 1
                table.next_key = (table.keyed + 1) * size
        for owner, held in reversed(self._took.items()):
            blocks = tables[owner].blocks
            self._pool.take_back(blocks[held:])
            del blocks[held:]
        for owner, tokens in self._step.items():
            table = tables[owner]
            self._tokens += max(tokens, 0) - table.tokens
            table.tokens = tokens
            table.settle(size, self.config.max_model_len)
            if tokens < 0:
                self._admission.promised -= tables.pop(owner).promised
        self._prefixes.abort_step()
        self.end_step()

    # -- a leap ------------------------------------------------------------------------------------------------------

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """The most steps whose blocks are all free now: a block boundary does not end a leap.

        O(1) when blocks are plenty, else O(block_size * log(block_size)), and O(sequences) for a list that it has not
        seen since one of it reserved. ``max_model_len`` is the scheduler's business and not looked at.
        """
        free = len(self._free)
        if len(decoding) * -(-limit // self.config.block_size) <= free:
            return limit
        return self._batch_of(decoding).horizon(free, limit)

    def steps_unseen(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """*limit*; 0 in releases whose statistics count each look-up of a request that waits. O(1)."""
        return 0 if self._cache is not None and self._prefixes.at_look_up else limit

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Take *k* steps at once: blocks go out, and get their keys, by (step, running order), as in single steps.

        O(block_size + blocks taken * log(block_size)), and O(sequences) for a new list, as :meth:`horizon`.
        Raise ValueError, and change nothing, if *k* is over the horizon or leads past ``max_model_len``.
        """
        if not k:
            return
        batch = self._batch_of(decoding)
        free = len(self._free)
        if len(batch.tables) * -(-k // self.config.block_size) > free and (need := batch.need(k)) > free:
            raise ValueError(f"{k} steps need {need} blocks and {free} are free: over the horizon")
        if (longest := batch.longest + k) > self.config.max_model_len:
            raise ValueError(f"{k} steps lead to {longest} tokens, past max_model_len {self.config.max_model_len}")
        self.end_step()
        self._go(batch, k)
        self._took.clear()
        self._keyed.clear()

    def _go(self, batch: DecodeBatch[BlockTable], steps: int) -> None:
        cache, take = self._cache, self._pool.take
        for place, fills in batch.go(steps):
            table = batch.tables[place]
            if not fills:
                if table.sequence.id not in self._took:
                    self._took[table.sequence.id] = len(table.blocks)
                table.blocks.append(take())
            elif cache is not None:
                self._register(cache, table, table.sequence, table.keyed + 1)
            self._changed(table)
        self._tokens += steps * len(batch.tables)

    def _batch_of(self, decoding: Sequence[KVSequence]) -> DecodeBatch[BlockTable]:
        """The batch of the last leap if this is its list, else a new one. Raise KeyError for who holds nothing."""
        batch = self._batch
        if batch is None or batch.decoding is not decoding:
            self._leave_batch()
            tables = [self._tables[s.id] for s in decoding]
            for place, table in enumerate(tables):
                table.place = place
            keys = [self._key_due(table) for table in tables] if self._cache is not None else ()
            num_blocks = [len(table.blocks) for table in tables]
            batch = self._batch = DecodeBatch(decoding, tables, num_blocks, self.config.block_size, keys)
        return batch

    def _leave_batch(self) -> None:
        batch = self._batch
        if batch is None:
            return
        batch.fold()
        for table in batch.tables.values():
            table.place = NOWHERE
            if self._stepped:
                self._step.setdefault(table.sequence.id, table.tokens - 1)
        self._batch, self._stepped = None, False

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """Append the sequence's blocks to the free queue, last one first, whatever the reason. O(blocks).

        With prefix caching those that others share stay, and those without a key go to the head of the queue.
        Raise KeyError for PARK if it holds none.
        """
        table = self._tables.pop(s.id, None)
        if (batch := self._batch) is not None and table is not None and table.place != NOWHERE:
            if type(batch.decoding) is DecodeGroup:
                due = table.next_key if self.unsampled is None else self._key_due(table)
                batch.leave(table.place, len(table.blocks), due)
            else:
                self._leave_batch()
        cache = self._cache
        if cache is not None:
            if why is Release.PREEMPT:
                self._prefixes.preempted(s)
            else:
                self._prefixes.gone(s)
                cache.keys.forget(s.id)
        if table is None:
            if why is Release.PARK:
                raise KeyError(f"sequence {s.id} holds no KV that could be parked")
            return
        self._step.pop(s.id, None)
        self._took.pop(s.id, None)
        self._pool.put_back(table.blocks[::-1])
        self._tokens -= table.tokens
        self._admission.promised -= table.promised

    def reset_prefix_cache(self) -> bool:
        """Forget all keys, if no sequence holds a block; the queue keeps its order. False, and nothing, otherwise."""
        return self._pool.clear()

    # -- what happened to prefixes -----------------------------------------------------------------------------------

    @property
    def on_cache_event(self) -> Callable[[CacheEvent], None] | None:
        """Called for every key that a block gets or loses, in vLLM's order; never without prefix caching."""
        return self._cache.observer if self._cache is not None else None

    @on_cache_event.setter
    def on_cache_event(self, observer: Callable[[CacheEvent], None] | None) -> None:
        if self._cache is not None:
            self._cache.observer = observer

    def prefix_stats(self) -> PrefixStats:
        """Queried and found tokens so far, as ``version`` counts them; all 0 without prefix caching."""
        return self._prefixes.stats

    # -- for schedulers that count blocks ----------------------------------------------------------------------------

    @property
    def free_blocks(self) -> int:
        """Blocks that may be taken, cached ones that nobody refers to included. O(1)."""
        return len(self._free)

    def is_computing(self, s: KVSequence, hit: int) -> bool:
        """Whether blocks of the first *hit* tokens of *s* got their keys in this step. O(blocks found + keys)."""
        if self._cache is None or not hit or not self._keyed:
            return False
        fresh = {block for _, block in self._keyed}
        return any(block in fresh for block in self._cache.adoptable(s, hit))

    # -- books -------------------------------------------------------------------------------------------------------

    def block_ids(self, s: KVSequence) -> tuple[int, ...]:
        """Ids of its blocks in token order, empty if it holds none."""
        table = self._tables.get(s.id)
        return tuple(table.blocks) if table else ()

    def free_queue(self) -> tuple[int, ...]:
        """Free blocks, the next one to be taken first."""
        return tuple(self._free)

    def counts(self) -> tuple[int, int, int, int]:
        """Tokens, free blocks, those of them with a key, and references to blocks beside the first. O(1)."""
        pool = self._pool
        return self._tokens, len(self._free), pool.cached, pool.shared

    def usage_of(self, counts: Sequence[Any]) -> KVUsage:
        """The books at such counts: each block and each slot once, however many share it; each table entry."""
        tokens, free, cached, entries = counts
        held, size = self.config.num_blocks - 1 - free, self._block_bytes
        return KVUsage(
            token=tokens * self._token_bytes - entries * size,
            parked=0,
            held=held * size,
            growth_copy=0,
            cached=cached * size,
            pool=(free + 1 - cached) * size,
            table=(held + entries) * TABLE_ENTRY_BYTES,
            shared=entries * size,
        )

    def usage(self) -> KVUsage:
        """The books, O(1)."""
        return self.usage_of(self.counts())

    def walk(self) -> Iterator[KVBlock]:
        """Blocks by id, alike neighbours in one piece, the null block as free. A shared one is its first owner's.

        ``token_bytes`` are those of running sequences: a cached block has none.
        """
        if self._batch is not None:
            self._batch.fold()
        held: Held = {}
        for owner, table in self._tables.items():
            enter(held, owner, table.blocks, table.tokens, self.config.block_size, self.layout.token_bytes)
        yield from block_map(self.config.num_blocks, self._block_bytes, held, self._pool.keyed_blocks())

    def check(self) -> None:
        """Assert that every block but the null one is in one place, and the books against the walk and the arena."""
        self._check_books(self.usage(), list(self.walk()))  # first: the walk tells the tables of a leap's tokens
        tables = self._tables.values()
        self._pool.check([(table.blocks, table.keyed) for table in tables])
        for table in tables:
            table.check(self.config.block_size, self.config.max_model_len)
        assert self._admission.promised == sum(table.promised for table in tables)
