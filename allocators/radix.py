"""SGLang's token pool: pages of tokens, and a radix tree of prefixes that running and past sequences share.

::

    pool tensors (K and V of each layer)   | page 0 | page 1 | ... | page num_blocks - 1 |     a page: block_size tokens
    a sequence                             | the tree's pages, which it locks | its own | partly filled |
    radix tree, free list                  see radix_tree and page_pool: nodes that nobody locks are evicted when the
                                           list runs short

The rules are SGLang 0.5.23's (``TokenToKVPoolAllocator``, ``PagedTokenToKVPoolAllocator``, ``RadixCache``). What a step
has computed of a prompt enters the tree at the end of the step, as there after the forward pass: so two equal prompts
in one step are both computed, and the pages of the second are freed then. Two things differ. SGLang takes pages, and
evicts for them, batch by batch, here it is sequence by sequence; and what it reserves when it admits
(``new_token_ratio``) is a scheduler's matter: here one is admitted whose present tokens fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import ClassVar

from hbmtwin.allocators.block_map import Held, block_map, enter
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.decode_batch import DecodeBatch
from hbmtwin.allocators.page_pool import PagePool
from hbmtwin.allocators.pool_policy import GRANTED, TABLE_ENTRY_BYTES
from hbmtwin.allocators.prefix_cache import PrefixStats
from hbmtwin.allocators.prefix_counter import PrefixCounter
from hbmtwin.allocators.radix_config import RadixConfig
from hbmtwin.allocators.radix_tree import Node
from hbmtwin.allocators.records import Granted, KVBlock, KVLayout, KVSequence, KVUsage, Refused, Release
from hbmtwin.allocators.registry import kv_policies

__all__ = ["RadixConfig", "RadixPolicy"]

RETRACT_DECODE_STEPS = 20
"""When one is preempted, the tree gives way to so many further tokens of each that stays."""


class _Table:
    """The pages of one sequence: the first ``cached`` are the tree's, on the path of ``node``, which it locks."""

    __slots__ = ("cached", "counted", "node", "pages", "prefill", "tokens")

    def __init__(self, root: Node, prefill: int) -> None:
        self.pages: list[int] = []
        self.tokens = 0
        """The target of the last reserve, lookahead not included (less the ``lead`` of its batch)."""
        self.prefill = prefill
        """Tokens that it came with: a step that begins below computes a chunk of them."""
        self.node = root
        self.cached = 0
        self.counted = 0
        """Tokens that it has put into the tree itself: nodes below have counted it."""


@kv_policies.register("radix")
class RadixPolicy(PagePool):
    """SGLang's token pool: pages that sequences share through a radix tree, which is evicted leaf by leaf.

    The pool tensors are taken from the arena once, at construction (raises OutOfMemory, nothing kept), so a step never
    asks the arena for anything. The tree is there with ``enable_prefix_caching``; a sequence that finishes or parks
    leaves its tokens in it, one that is preempted or dropped only the prompt that it had put there.

    Complexity: reserve O(pages taken), with a hit, at the end of a prefill and when a sequence ends also O(pieces of
    its spans + its pages); horizon and advance as in :class:`~hbmtwin.allocators.paged.PagedPolicy`.
    """

    name: ClassVar[str] = "radix"
    requires: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str]] = frozenset({"preempt", "reject", "prefix_cache"})
    Config: ClassVar[type[RadixConfig]] = RadixConfig

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: RadixConfig) -> None:
        super().__init__(layout, arena, config)
        self._tables: dict[int, _Table] = {}
        self._batch: DecodeBatch[_Table] | None = None
        """Those of the last leap, until anybody reserves, is released, or enters the tree."""
        self._prefilling = False
        """Whether one of them has a part of its prompt still to put into the tree."""
        self._step: dict[int, tuple[int, int]] = {}
        """Tokens and pages before this step of each sequence reserved in it; -1 tokens if it was admitted in it."""
        self._prefills: dict[int, tuple[KVSequence, _Table]] = {}
        """Who computes a part of its prompt in this step."""
        self._inserted = False
        """Whether the last step's end put something into the tree."""
        self._tokens = 0
        self._prefixes = PrefixCounter(at_look_up=False)

    # -- room for tokens ---------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        """Tokens of whole pages that the tree has of its prefix, its last token never among them; touches their nodes.

        0 without prefix caching, and for a sequence without spans.
        """
        if not self.config.enable_prefix_caching:
            return 0
        return self._tree.match(s.spans, s.num_tokens - 1)[1] * self.config.block_size

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
        """Take the pages that *new* tokens behind the computed ones need, evicting what is short.

        When admitting, all present tokens must fit into what is free or could be evicted once its own prefix is locked.
        Refused leaves everything as it was. Raise ValueError for a *hit* that :meth:`lookup` does not promise.
        """
        if self._batch is not None:
            self._leave_batch()
        if self._ended:
            self._end_group()
        size, longest = self.config.block_size, self.config.max_model_len
        table = self._tables.get(s.id)
        held = len(table.pages) if table else 0
        room = self._room()
        node = self._tree.root
        if hit:
            node = self._adoptable(s, hit)
            held = hit // size
            room -= self._tree.idle(node)
        tokens = min(s.num_computed_tokens + hit + new, longest)
        need = -(-min(tokens + lookahead, longest) // size) - held
        if admitting:
            whole = -(-min(s.num_tokens, longest) // size) - held
            if whole > room:
                return self._refused(whole, room, "the whole prompt does not fit")
        if need > room:
            return self._refused(need, room, "not enough free or evictable pages")
        if table is None:
            table = self._tables[s.id] = _Table(self._tree.root, s.num_tokens)
            self._step[s.id] = (-1, 0)
            if admitting and self.config.enable_prefix_caching:
                self._prefixes.admitted(s, hit)
        else:
            self._step.setdefault(s.id, (table.tokens, held))
        if hit:
            self._tree.lock(node)
            table.node, table.cached, table.pages = node, held, self._tree.pages_of(node)
        if need > 0:
            table.pages += self._take(need)
        if self.config.enable_prefix_caching and s.num_computed_tokens + hit < table.prefill:
            self._prefills[s.id] = (s, table)
        self._tokens += tokens - table.tokens
        table.tokens = tokens
        return Granted(hit) if hit else GRANTED

    def _adoptable(self, s: KVSequence, hit: int) -> Node:
        """The node where the first *hit* tokens end. Raise ValueError if they are not there."""
        if not self.config.enable_prefix_caching:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: this pool has no prefix cache")
        if s.id in self._tables or s.num_computed_tokens:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: it has started already")
        node, pages = self._tree.match(s.spans, min(hit, s.num_tokens - 1))
        if pages * self.config.block_size != hit:
            raise ValueError(
                f"sequence {s.id} cannot adopt {hit} tokens: the tree has {pages} of their pages of "
                f"{self.config.block_size} tokens"
            )
        return node

    def available_tokens(self, s: KVSequence | None = None, hit: int = 0) -> int:
        """Slots that could be had, free or evicted, if *s* adopted *hit* tokens. ValueError if it cannot adopt them."""
        pages = self._room()
        if s is not None and hit:
            pages -= self._tree.idle(self._adoptable(s, hit))
        return pages * self.config.block_size

    # -- a step ------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The step's reservations stand, and what it computed of prompts enters the tree, in running order."""
        self._step.clear()
        self._prefixes.end_step()
        self._inserted = bool(self._prefills)
        if self._inserted:
            self._leave_batch()
        for s, table in self._prefills.values():
            node, had, whole = self._insert(s, table, min(table.tokens, s.num_tokens))
            if had > table.cached:
                table.pages[table.cached : had] = self._tree.pages_of(node)[table.cached : had]
            self._tree.unlock(table.node)
            self._tree.lock(node)
            table.node, table.cached = node, whole
        self._prefills.clear()

    def _insert(self, s: KVSequence, table: _Table, tokens: int) -> tuple[Node, int, int]:
        """Put the whole pages of its first *tokens* into the tree, and free its own of those that were there before."""
        node, had, whole = self._tree.insert(s.spans, tokens, table.pages, table.counted)
        self._ended += table.pages[table.cached : had]
        table.counted = max(table.counted, whole * self.config.block_size)
        return node, had, whole

    def abort_step(self) -> None:
        """Give back this step's pages, to the head of the list in the order in which they were taken.

        Nothing has entered the tree yet. What was evicted stays lost; adopted pages lose a lock.
        """
        self._leave_batch()
        self._prefills.clear()
        self._prefixes.abort_step()
        for owner, (tokens, held) in reversed(self._step.items()):
            table = self._tables[owner]
            first = max(held, table.cached)
            self._free.extendleft(reversed(table.pages[first:]))
            del table.pages[first:]
            self._tokens += max(tokens, 0) - table.tokens
            table.tokens = tokens
            if tokens < 0:
                self._tree.unlock(table.node)
                del self._tables[owner]
        self._step.clear()

    # -- a leap ------------------------------------------------------------------------------------------------------

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """The most steps whose pages are free or can be evicted: neither a page boundary nor an eviction ends a leap.

        Steps that only decode put nothing into the tree, and who waits is looked up in each of them to the same effect,
        so the order of leaves is settled before they begin. Not so after a step that put something in: the look-ups of
        the next come after that, those of the step itself came before. There the answer is 0, as for the last token of
        a prompt, which is still to be put in.

        O(1) without prefix caching when pages are plenty, else O(block_size * log(block_size)), and O(sequences) for a
        list that it has not seen since anybody reserved.
        """
        if not decoding:
            return limit
        room = self._room()
        plenty = len(decoding) * -(-limit // self.config.block_size) <= room
        if plenty and not self.config.enable_prefix_caching:
            return limit
        batch = self._batch_of(decoding)
        if self._inserted or self._prefilling:
            return 0
        return limit if plenty else batch.horizon(room, limit)

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Take *k* steps at once: pages go out by (step, running order), and leaves are evicted when the list is empty.

        That is what single steps do, each of whose reservations lacks one page at most. Who is as long as
        ``max_model_len`` takes no more. O(block_size + pages taken * log(block_size)), and O(sequences) for a new list.
        Raise ValueError, and change nothing, if *k* is over the horizon.
        """
        if not k:
            return
        if k > (horizon := self.horizon(decoding, k)):
            raise ValueError(f"{k} steps are over the horizon of {horizon}")
        self._end_group()
        longest = self.config.max_model_len
        while k and decoding:
            batch = self._batch_of(decoding)
            steps = min(k, longest - batch.longest)
            if steps:
                self._go(batch, steps)
                k -= steps
                continue
            self._leave_batch()
            decoding = [s for s in decoding if self._tables[s.id].tokens < longest]

    def _go(self, batch: DecodeBatch[_Table], steps: int) -> None:
        tables, count = batch.tables, len(batch.tables)
        self._tokens += steps * count
        if batch.takes_always:
            pages = self._take(steps * count)
            for place, table in tables.items():
                table.pages += pages[place::count]
            batch.pass_over(steps)
            return
        for place, _ in batch.go(steps):
            tables[place].pages += self._take(1)

    def _batch_of(self, decoding: Sequence[KVSequence]) -> DecodeBatch[_Table]:
        """The batch of the last leap if this is its list, else a new one. Raise KeyError for who holds nothing."""
        batch = self._batch
        if batch is None or batch.decoding is not decoding:
            self._leave_batch()
            tables = self._tables_of(decoding)
            pages = [len(table.pages) for table in tables]
            batch = self._batch = DecodeBatch(decoding, tables, pages, self.config.block_size)
            caching = self.config.enable_prefix_caching
            self._prefilling = caching and any(table.tokens < table.prefill for table in tables)
        return batch

    def _leave_batch(self) -> None:
        if self._batch is not None:
            self._batch.fold()
            self._batch = None

    def _tables_of(self, sequences: Sequence[KVSequence]) -> list[_Table]:
        tables = self._tables
        return [tables[s.id] for s in sequences]

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """FINISH and PARK put its computed tokens into the tree and free the rest; PREEMPT and DROP free all its own.

        Its locks go in any case. PREEMPT also evicts, as a retraction does, until those that stay have room for 20
        tokens each. Raise KeyError for PARK if it holds none.
        """
        self._leave_batch()
        if why is Release.PREEMPT:
            self._prefixes.preempted(s)
        else:
            self._prefixes.gone(s)
        table = self._tables.pop(s.id, None)
        if table is None:
            if why is Release.PARK:
                raise KeyError(f"sequence {s.id} holds no KV that could be parked")
            return
        self._step.pop(s.id, None)
        self._prefills.pop(s.id, None)
        self._tokens -= table.tokens
        kept = table.cached
        if why in (Release.FINISH, Release.PARK):
            if self.config.enable_prefix_caching:
                kept = max(kept, self._insert(s, table, min(table.tokens, s.num_computed_tokens))[2])
            self._ended += table.pages[kept:]
        else:
            self._end_group()
            self._put(table.pages[kept:])
        self._tree.unlock(table.node)
        if why is Release.PREEMPT:
            staying = len(self._tables) * RETRACT_DECODE_STEPS
            self._evict_for(-(-staying // self.config.block_size))

    def prefix_stats(self) -> PrefixStats:
        """Tokens of requests admitted so far, and those found of them; all 0 without prefix caching.

        They are the terms of SGLang's ``cache_hit_rate`` (``PrefillAdder``): cached tokens over cached and computed
        ones, and retracted ones that come again stand apart. There what a chunk computes is rounded up to whole pages.
        """
        return self._prefixes.stats

    # -- books -------------------------------------------------------------------------------------------------------

    def block_ids(self, s: KVSequence) -> tuple[int, ...]:
        """Ids of its pages in token order, empty if it holds none."""
        table = self._tables.get(s.id)
        return tuple(table.pages) if table else ()

    def usage(self) -> KVUsage:
        """The books, O(1). Each page and each slot counts once, however many share it; each table entry counts."""
        tree = self._tree
        unheld = self._room() + 1
        shared = (tree.references - tree.locked) * self._block_bytes
        return KVUsage(
            token=self._tokens * self.layout.token_bytes - shared,
            parked=0,
            held=(self.config.num_blocks - unheld) * self._block_bytes,
            growth_copy=0,
            cached=tree.evictable * self._block_bytes,
            pool=(unheld - tree.evictable) * self._block_bytes,
            table=self._tokens * TABLE_ENTRY_BYTES,  # req_to_token: a slot a token, whatever the page
            shared=shared,
        )

    def walk(self) -> Iterator[KVBlock]:
        """Pages by id, alike neighbours in one piece, the dummy as free. A shared one is its first owner's.

        ``token_bytes`` are those of running sequences: a cached page has none.
        """
        if self._batch is not None:
            self._batch.fold()
        cached = [page for node in self._tree.nodes() for page in node.pages]
        held: Held = {}
        for owner, table in self._tables.items():
            enter(held, owner, table.pages, table.tokens, self.config.block_size, self.layout.token_bytes)
        yield from block_map(self.config.num_blocks, self._block_bytes, held, cached)

    def check(self) -> None:
        """Assert that every page but the dummy is in one place, and the books against tree, walk and arena."""
        self._check_books(self.usage(), list(self.walk()))  # first: the walk tells the tables of a leap's tokens
        self._tree.check()
        locks: Counter[Node] = Counter()
        in_tree = [page for node in self._tree.nodes() for page in node.pages]
        own: list[int] = []
        for table in self._tables.values():
            locks.update(table.node.path())
            assert table.pages[: table.cached] == self._tree.pages_of(table.node)
            assert table.cached * self.config.block_size <= table.tokens <= len(table.pages) * self.config.block_size
            own += table.pages[table.cached :]
        assert all(node.locks == locks[node] for node in self._tree.nodes())
        assert sorted([*in_tree, *own, *self._free, *self._ended]) == list(range(1, self.config.num_blocks))
