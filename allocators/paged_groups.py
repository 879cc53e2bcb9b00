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
:class:`~hbmtwin.allocators.paged.PagedPolicy`, operation by operation. K and V of a layer lie in one page, as in vLLM's
raw tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import ClassVar

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.group_leaps import Trial, run_steps
from hbmtwin.allocators.group_lookup import GroupLookup
from hbmtwin.allocators.group_managers import NEVER, NULL, GroupTable, manager_of
from hbmtwin.allocators.kv_groups import Grouping
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.prefix_cache import NO_KEY, PrefixCache
from hbmtwin.allocators.records import Granted, KVBlock, KVLayout, KVSequence, KVUsage, Refused, Release, Tag, Work
from hbmtwin.allocators.registry import kv_policies

TABLE_ENTRY_BYTES = 4
"""A block id in the device's table is an int32; null ones stand there too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedGroupsConfig:
    """Settings of :class:`PagedGroupsPolicy`. ``num_blocks`` counts the null block."""

    num_blocks: int
    max_model_len: int
    grouping: Grouping
    enable_prefix_caching: bool = False
    """Full blocks keep their key when they are freed, and are found again by a sequence with the same prefix."""
    watermark: float = 0.0
    """Part of the pool that admitting leaves free while others run."""
    reserve_full_sequence: bool = True
    """Admit a sequence only if all its present tokens fit, though a chunk of them is scheduled."""
    max_num_batched_tokens: int = 2048
    """The most tokens of a step: what a group with windows may hold beside its window."""

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 2), ("max_model_len", 1), ("max_num_batched_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be from 0 to below 1, not {self.watermark}")
        if not self.grouping.groups:
            raise ValueError("grouping has no group: a model without KV needs no pool")
        sizes = [group.block_size for group in self.grouping.groups]
        for group in self.grouping.groups:
            if group.kind == "mamba" and (group.mamba_mode == "none") == self.enable_prefix_caching:
                wanted = "'all' or 'align'" if self.enable_prefix_caching else "'none'"
                raise ValueError(
                    f"grouping: mamba_mode must be {wanted} with enable_prefix_caching = {self.enable_prefix_caching}, "
                    f"not {group.mamba_mode!r}; form_groups chooses it"
                )
            if not self.enable_prefix_caching:
                continue
            if group.sinks:
                raise ValueError(
                    "grouping: sinks go without prefix caching, for what a hit would have to hold is not known of any "
                    "engine; set enable_prefix_caching = False"
                )
            if group.kind == "chunked_local" and group.block_size != lcm(*sizes):
                raise ValueError(
                    f"grouping: vLLM looks chunked local attention up in blocks of the common size {lcm(*sizes)} only, "
                    f"not {group.block_size}; give all groups one block_size, or set enable_prefix_caching = False"
                )
            if group.mamba_mode == "align" and group.block_size != gcd(*sizes):
                raise ValueError(
                    f"grouping: with blocks of {gcd(*sizes)} tokens beside Mamba states every {group.block_size}, "
                    "hits of vLLM end inside a block and copy it, which is not modelled; give all groups one block_size"
                )


_GRANTED = Granted()
"""The same answer to every sequence in every step."""


class _Held:
    """What a sequence holds: a table for each group, and its tokens: the target of the last reserve, lookahead not
    included."""

    __slots__ = ("quiet", "tables", "tokens")

    def __init__(self, num_groups: int) -> None:
        self.tables = [GroupTable() for _ in range(num_groups)]
        self.tokens = 0
        self.quiet = 0
        """Up to so many tokens nothing is taken, forgotten or registered."""


_Marks = list[tuple[int, int, bool, int, list[int]]]
"""Of each table before a step: its length, what was keyed, grown and previous, and the drafts' states at its end."""


@kv_policies.register("paged_groups")
class PagedGroupsPolicy:
    """A block pool for layers of several kinds (full, windows, chunks, Mamba states), as in vLLM.

    The pool tensors are taken from the arena once, at construction (raises OutOfMemory, nothing kept), so a step never
    asks the arena for anything. PARK gives the blocks back: what is found again is what the prefix cache keeps.
    Bytes of tables: 4 for each entry, null or not.
    """

    name: ClassVar[str] = "paged_groups"
    requires: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str]] = frozenset({"preempt", "reject", "prefix_cache"})
    Config: ClassVar[type[PagedGroupsConfig]] = PagedGroupsConfig

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: PagedGroupsConfig) -> None:
        self.layout = layout
        self.arena = arena
        self.config = config
        self.groups = config.grouping.groups
        self._block_bytes = config.grouping.block_bytes
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        sizes = [group.block_size for group in self.groups]
        self._alignment = lcm(*sizes)
        self._managers = [
            manager_of(
                group,
                alignment=self._alignment,
                max_model_len=config.max_model_len,
                max_num_batched_tokens=config.max_num_batched_tokens,
            )
            for group in self.groups
        ]
        caching = config.enable_prefix_caching
        # Without keys there is one order of freeing: to the tail.
        self.cache = PrefixCache(config.num_blocks, gcd(*sizes), num_groups=len(sizes), bare_first=caching)
        self._lookup = GroupLookup(self._managers, self.cache) if caching else None
        self._held: dict[int, _Held] = {}
        self._step: dict[int, tuple[int, _Marks | None]] = {}
        """Tokens and tables before this step of each sequence reserved in it: (-1, None) if it was admitted in it, None
        for tables that did not change."""
        self._keyed: list[int] = []
        """Blocks that got a key in this step."""
        self._fresh: set[int] = set()
        """Keys, with their group, of Mamba states that are computed in this step."""
        self._boundaries: dict[int, int] = {}
        self._tokens = 0
        self._entries = [0] * len(sizes)
        """Of each group the entries of all tables that are not null; then the distinct blocks, and the null entries."""
        self._distinct = [0] * len(sizes)
        self._nulls = [0] * len(sizes)
        self._handles: list[int] = []
        try:
            for _ in range(config.grouping.group_length):
                self._handles.append(arena.malloc(config.num_blocks * config.grouping.page_bytes, tag=Tag.KV))
        except OutOfMemory:
            for handle in self._handles:
                arena.free(handle)
            raise

    # -- room for tokens ---------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        """Tokens of the longest prefix that all groups hold, its last token never among them.

        0 without prefix caching. :meth:`shared_boundary` remembers what it saw besides.
        """
        if self._lookup is None:
            return 0
        hit = self._lookup.find(s, s.num_tokens - 1)
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
        held, computed, longest = self._held.get(s.id), s.num_computed_tokens, self.config.max_model_len
        if held is not None and computed + new <= held.quiet and not (hit or lookahead or admitting):
            self._step.setdefault(s.id, (held.tokens, None))
            self._set_tokens(held, min(computed + new, longest))
            return _GRANTED
        adopted = self._adoptable(s, hit) if hit else None
        if adopted is not None and self._is_fresh(adopted):
            return self._refused(self.config.num_blocks + 1, len(self.cache.free), "its state is computed in this step")
        computed += hit
        scheduled = min(computed, longest) + new
        tokens = min(scheduled, longest)
        slots = min(scheduled + lookahead, longest)
        reserved = self._watermark_blocks if admitting and others_running else 0
        if admitting and self.config.reserve_full_sequence:
            whole = min(s.num_tokens, longest)
            need, idle = self._need(held, whole, whole, adopted, computed, gate=True)
            free = len(self.cache.free) - idle - reserved
            if need > free:
                return self._refused(need, free, "the whole prompt does not fit")
        if held is not None:
            self._forget(held, min(computed, longest))
        need, idle = self._need(held, slots, scheduled, adopted, computed)
        free = len(self.cache.free) - idle - reserved
        if need > free:
            return self._refused(need, free, "not enough free blocks")
        if held is None:
            held = self._held[s.id] = _Held(len(self.groups))
            self._step[s.id] = (-1, None)
        else:
            self._mark(s.id, held)
        if adopted is not None:
            self._adopt(held, adopted, computed)
        self._grow(held, slots, scheduled)
        self._register(s, held, min(tokens, s.num_tokens))
        self._set_tokens(held, tokens)
        return Granted(hit) if hit else _GRANTED

    def _adoptable(self, s: KVSequence, hit: int) -> tuple[Sequence[int], ...]:
        """Blocks of the first *hit* tokens in each group. Raise ValueError if they are not there."""
        if self._lookup is None:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: this pool has no prefix cache")
        if s.id in self._held or s.num_computed_tokens:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: it has started already")
        found = self._lookup.find(s, s.num_tokens - 1)
        if 0 < hit < found.tokens:
            found = self._lookup.find(s, hit)
        if found.tokens != hit:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: {found.tokens} tokens of its prefix are held")
        return found.blocks

    def _is_fresh(self, adopted: Sequence[Sequence[int]]) -> bool:
        """Whether a state among them is promised in this very step: it can be copied only once it is computed."""
        return any(
            group.kind == "mamba" and self.cache.key_of[blocks[-1]] in self._fresh
            for group, blocks in zip(self.groups, adopted, strict=True)
        )

    def _need(
        self,
        held: _Held | None,
        slots: int,
        scheduled: int,
        adopted: Sequence[Sequence[int]] | None,
        computed: int,
        *,
        gate: bool = False,
    ) -> tuple[int, int]:
        """Blocks to take for *slots* tokens over all groups, and adopted ones that leave the free queue."""
        need = idle = 0
        for index, manager in enumerate(self._managers):
            required = manager.required(slots, scheduled)
            if gate:
                required = min(required, manager.cap)
            table = held.tables[index] if held is not None else None
            hit = adopted[index] if adopted is not None else ()
            need += manager.new_blocks(table, required, len(hit), computed)
            if hit:
                idle += self.cache.idle(filter(None, manager.counted(hit, computed)))
        return need, idle

    def _refused(self, need: int, free: int, reason: str) -> Refused:
        return Refused(need * self._block_bytes, max(0, free) * self._block_bytes, reason)

    # -- what changes tables -----------------------------------------------------------------------------------------

    def _forget(self, held: _Held, computed: int) -> None:
        for index, (manager, table) in enumerate(zip(self._managers, held.tables, strict=True)):
            for blocks in manager.forget(table, computed):
                self._nulls[index] += len(blocks)
                self._give_back(index, blocks)

    def _give_back(self, index: int, blocks: Sequence[int]) -> None:
        """One call of one group."""
        self.cache.put_back(blocks)
        self._entries[index] -= len(blocks)
        self._distinct[index] -= self.cache.idle(blocks)

    def _adopt(self, held: _Held, adopted: Sequence[Sequence[int]], computed: int) -> None:
        for index, (manager, table) in enumerate(zip(self._managers, held.tables, strict=True)):
            manager.adopt(table, adopted[index], computed)
            blocks = [block for block in table.blocks if block != NULL]
            self._distinct[index] += self.cache.idle(blocks)
            self._entries[index] += len(blocks)
            self._nulls[index] += len(table.blocks) - len(blocks)
            self.cache.touch(blocks)

    def _grow(self, held: _Held, slots: int, scheduled: int) -> None:
        for index, (manager, table) in enumerate(zip(self._managers, held.tables, strict=True)):
            required = manager.required(slots, scheduled)
            before, free = len(table.blocks), len(self.cache.free)
            if required > before:
                manager.grow(table, required, self.cache.take)
                taken = free - len(self.cache.free)
                self._entries[index] += taken
                self._distinct[index] += taken
                self._nulls[index] += len(table.blocks) - before - taken

    def _register(self, s: KVSequence, held: _Held, tokens: int) -> None:
        """Give blocks that the first *tokens* fill their keys, as far as spans say what they hold.

        With several groups only as far as a look-up over all of them can find: to a multiple of the common block size.
        """
        next_change = min([m.next_change(table) for m, table in zip(self._managers, held.tables, strict=True)])
        if self._lookup is None:
            held.quiet = next_change
            return
        held.quiet = min(next_change, (tokens // self._alignment + 1) * self._alignment - 1)
        if len(self.groups) > 1:
            tokens -= tokens % self._alignment
        cache = self.cache
        for index, (manager, table) in enumerate(zip(self._managers, held.tables, strict=True)):
            full = tokens // manager.size
            if full <= table.keyed:
                continue
            ratio = manager.size // cache.block_size
            keys = cache.keys.of(s, full * ratio)
            full = min(full, len(keys) // ratio)
            for place in range(table.keyed, full):
                block = table.blocks[place]
                if block == NULL or not manager.keeps_key(place):
                    continue
                cache.register(block, keys[(place + 1) * ratio - 1], index)
                self._keyed.append(block)
                if manager.group.kind == "mamba":
                    self._fresh.add(cache.key_of[block])
            table.keyed = max(table.keyed, full)

    def _set_tokens(self, held: _Held, tokens: int) -> None:
        self._tokens += tokens - held.tokens
        held.tokens = tokens

    # -- a step ------------------------------------------------------------------------------------------------------

    def grow_layer(self, layer: int) -> None:
        """Nothing: the pool is there already."""

    def end_step(self) -> None:
        """The step's reservations stand."""
        self._step.clear()
        self._keyed.clear()
        self._fresh.clear()

    def abort_step(self) -> None:
        """Give back this step's blocks, to the head of the queue in the order in which they were taken.

        Blocks that were given back in the step, because no later token reads them, stay so, as they do after a refusal:
        that depends only on tokens computed before. Keys that were given in the step are taken away, keys that were
        evicted stay lost, and adopted blocks that are free again go to the tail, as with
        :class:`~hbmtwin.allocators.paged.PagedPolicy`.
        """
        for block in self._keyed:
            self.cache.withdraw(block)
        for owner, (tokens, marks) in reversed(self._step.items()):
            held = self._held[owner]
            if tokens < 0:
                self._undo(held, [(0, 0, False, -1, [])] * len(self.groups))
                self._tokens -= held.tokens
                del self._held[owner]
                continue
            if marks is not None:
                self._undo(held, marks)
            self._set_tokens(held, tokens)
            held.quiet = 0
        self.end_step()

    def _mark(self, owner: int, held: _Held) -> None:
        tokens, marks = self._step.get(owner, (held.tokens, None))
        if tokens < 0 or marks is not None:
            return
        marks = []
        for group, table in zip(self.groups, held.tables, strict=True):
            length, drafts = len(table.blocks), group.speculative_blocks if table.grown else 0
            marks.append((length, table.keyed, table.grown, table.previous, table.blocks[length - drafts :]))
        self._step[owner] = (tokens, marks)

    def _undo(self, held: _Held, marks: _Marks) -> None:
        """Tables become what the marks say; the last group's blocks go first, so that the queue is as it was."""
        for index in reversed(range(len(marks))):
            table, (length, keyed, grown, previous, drafts) = held.tables[index], marks[index]
            nulls = table.blocks.count(NULL)
            taken = [block for block in table.blocks[length:] if block != NULL and block not in drafts]
            table.blocks[length - len(drafts) :] = drafts
            table.keyed, table.grown, table.previous = keyed, grown, previous
            self._nulls[index] += table.blocks.count(NULL) - nulls
            cache = self.cache
            if self._lookup is None:
                for block in taken:
                    cache.refs[block] = 0
                cache.free.extendleft(reversed(taken))
                self._entries[index] -= len(taken)
                self._distinct[index] -= len(taken)
                continue
            self._give_back(index, [block for block in reversed(taken) if cache.key_of[block] != NO_KEY])
            self._give_back(index, [block for block in taken if cache.key_of[block] == NO_KEY])

    # -- a leap ------------------------------------------------------------------------------------------------------

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """The most steps whose blocks are free when they come, those given back in between among them.

        O(groups) when blocks are plenty, else O(blocks of *decoding*, and changes within the leap). ``max_model_len``
        is the scheduler's business and not looked at. Where no layer sees everything, :meth:`kept` bends at the
        longest window, and a leap ends there.
        """
        held = [self._held[s.id] for s in decoding]
        bound = self._bound
        if bound is not None:
            limit = min([limit, *(bound - h.tokens for h in held if h.tokens < bound)])
        return self._steps_that_fit(held, limit, NEVER)

    def _steps_that_fit(self, decoding: Sequence[_Held], limit: int, longest: int) -> int:
        if len(decoding) * sum(-(-limit // m.size) for m in self._managers) <= len(self.cache.free):
            return limit
        need = sum(
            max(0, manager.required(tokens, tokens) - len(table.blocks))
            for h in decoding
            for tokens in (min(h.tokens + limit, longest),)
            for manager, table in zip(self._managers, h.tables, strict=True)
        )
        if need <= len(self.cache.free):
            return limit
        trial = Trial(self._managers, self.cache.refs, len(self.cache.free), [h.tables for h in decoding], longest)
        return run_steps([(h.tokens, h.quiet) for h in decoding], limit, longest, trial.step)

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Take *k* steps at once: blocks are given back, go out and get their keys by (step, running order).

        Only steps in which a sequence's tables change are carried out. Raise ValueError, and change nothing, if *k* is
        over the horizon.
        """
        if not k:
            return
        held = [self._held[s.id] for s in decoding]
        longest = self.config.max_model_len
        fitting = self._steps_that_fit(held, k, longest)
        if fitting < k:
            raise ValueError(f"blocks are free for {fitting} of {k} steps: over the horizon")
        self.end_step()

        def step(place: int, computed: int) -> int:
            h = held[place]
            self._forget(h, computed)
            tokens = min(computed + 1, longest)
            self._grow(h, tokens, tokens)
            self._register(decoding[place], h, tokens)
            return h.quiet

        run_steps([(h.tokens, h.quiet) for h in held], k, longest, step)
        for h in held:
            self._set_tokens(h, min(h.tokens + k, longest))
        self.end_step()

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """Free the sequence's blocks group by group, in each the last one first, whatever the reason. O(blocks).

        Raise KeyError for PARK if it holds none.
        """
        held = self._held.pop(s.id, None)
        if why is not Release.PREEMPT:
            self.cache.keys.forget(s.id)
            self._boundaries.pop(s.id, None)
        if held is None:
            if why is Release.PARK:
                raise KeyError(f"sequence {s.id} holds no KV that could be parked")
            return
        self._step.pop(s.id, None)
        for index, table in enumerate(held.tables):
            blocks = [block for block in reversed(table.blocks) if block != NULL]
            self._nulls[index] -= len(table.blocks) - len(blocks)
            self._give_back(index, blocks)
        self._tokens -= held.tokens

    def reset_prefix_cache(self) -> bool:
        """Forget all keys, if no sequence holds a block; the queue keeps its order. False, and nothing, otherwise."""
        return self.cache.clear()

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

    @property
    def _bound(self) -> int | None:
        """The most tokens that some layer still reads; None where one reads all, or none keeps tokens."""
        attention = [group for group in self.groups if group.kind != "mamba"]
        if not attention or any(group.kind == "full" for group in attention):
            return None
        return max(group.sinks + group.window for group in attention)

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
        return tuple(self.cache.free)

    def usage(self) -> KVUsage:
        """The books, O(groups). Each block and slot counts once, however many share it; each table entry counts.

        ``token`` are slots in held blocks, ``dropped`` tokens whose block is null, and ``state`` the Mamba states.
        """
        unheld = len(self.cache.free) + 1
        held, cached = self.config.num_blocks - unheld, self.cache.cached
        shared = dropped = state = 0
        for index, group in enumerate(self.groups):
            if group.kind == "mamba":
                state += self._distinct[index] * group.num_layers * group.state_bytes
                continue
            block_bytes = group.block_size * group.num_layers * group.token_bytes
            shared += (self._entries[index] - self._distinct[index]) * block_bytes
            dropped += self._nulls[index] * block_bytes
        return KVUsage(
            token=self._tokens * self.config.grouping.token_bytes - shared - dropped,
            parked=0,
            held=held * self._block_bytes,
            growth_copy=0,
            cached=cached * self._block_bytes,
            pool=(unheld - cached) * self._block_bytes,
            table=(sum(self._entries) + sum(self._nulls)) * TABLE_ENTRY_BYTES,
            dropped=dropped,
            shared=shared,
            state=state,
        )

    def walk(self) -> Iterator[KVBlock]:
        """Every block by id, the null block as free. A shared block is the one's who got room first.

        ``token_bytes`` are those of running sequences: a cached block has none, and neither has a Mamba state.
        """
        found: dict[int, tuple[int, int]] = {}
        for owner, held in self._held.items():
            for group, table in zip(self.groups, held.tables, strict=True):
                size, token_bytes = group.block_size, group.num_layers * group.token_bytes
                for place, block in enumerate(table.blocks):
                    tokens = max(0, min(size, held.tokens - place * size))
                    found.setdefault(block, (tokens * token_bytes, owner))
        found.pop(NULL, None)
        for block in range(self.config.num_blocks):
            token_bytes, owner = found.get(block, (0, -1))
            free = "cached" if self.cache.key_of[block] != NO_KEY else "free"
            state = "running" if block in found else free
            yield KVBlock(block * self._block_bytes, self._block_bytes, token_bytes, state, owner)

    def check(self) -> None:
        """Assert the invariants of queue, references, keys and tables, and the books against the walk and the arena."""
        tables = [held.tables for held in self._held.values()]
        key_of = self.cache.key_of
        referred = [block for each in tables for table in each for block in table.blocks if block != NULL]
        self.cache.check(((block,), int(key_of[block] != NO_KEY)) for block in referred)
        owners: dict[int, int] = {}
        for index, (manager, entries) in enumerate(zip(self._managers, self._entries, strict=True)):
            blocks = Counter(block for each in tables for block in each[index].blocks)
            assert self._nulls[index] == blocks.pop(NULL, 0)
            assert (entries, self._distinct[index]) == (sum(blocks.values()), len(blocks))
            for block in blocks:
                assert owners.setdefault(block, index) == index, "a block belongs to one group at a time"
                key = self.cache.key_of[block]
                assert key == NO_KEY or key % len(self.groups) == index
            for held in self._held.values():
                table = held.tables[index]
                assert table.keyed <= len(table.blocks)
                assert table.keyed * manager.size <= held.tokens
                assert held.tokens <= len(table.blocks) * manager.size
                assert all(block != NULL for block in table.blocks[held.tokens // manager.size :])
        usage, walk = self.usage(), list(self.walk())
        assert usage.token == sum(block.token_bytes for block in walk)
        assert usage.held == sum(block.size for block in walk if block.state == "running")
        assert usage.cached == sum(block.size for block in walk if block.state == "cached")
        assert usage.pool == sum(block.size for block in walk if block.state == "free")
        assert min(usage.unfilled, usage.dropped, usage.shared) >= 0
        requested = self.arena.usage().requested_by_tag[Tag.KV]
        assert requested == self.config.num_blocks * self._block_bytes
