"""Paged KV by the rules of vLLM's old engine (v0): copy-on-write, swapping to the host, and a watermark.

::

    pool tensors         | block 0 | block 1 | ... | block num_blocks - 1 |     no null block: all of them are used
    samples of a prompt  3 7 9 | 3 7 9     a fork shares all blocks of its parent; 9 is partly filled
    after a token each   3 7 4 | 3 7 9     who writes first to 9 takes a copy of its own, the last one writes in place
    host pool            sequences that were swapped out, block by block

The rules, read in v0's ``core/block_manager.py`` (commit 006a839) and ``core/block/*``, not run:

- *Admission* takes the blocks of the whole prompt at once, R of them. Cached blocks that the prompt will share are not
  subtracted. ``n - R < watermark``: never; ``free - R >= watermark``: ok; else later.
- *Decode* goes on if the blocks that unseen tokens touch are free, one each, though most need no new block: a sequence
  in the middle of a block needs a free one. For samples of one prompt that is asked of all together
  (:meth:`PagedV0Policy.append_refusal`). The watermark does not count here.
- *Swapping* copies whole blocks. What samples share is copied for each of them, and is not shared any more when it
  comes back, unless prefix caching finds it. Full and touched blocks must be free there, and on the device the
  watermark must stay free.
- *Prefix caching* (off by default) keeps one block for each content: a full block whose content is cached already is
  given up for the cached one (:mod:`hbmtwin.allocators.shared_blocks`).

Different: a block that decode has filled is exchanged for the cached one at the end of its step (v0: at its start);
host blocks are never shared (v0: with prefix caching they are); a sequence whose swapped blocks and watermark are more
than the pool can never come back (v0 waits for ever unless the blocks alone are). v0 never takes a step back:
:meth:`PagedV0Policy.abort_step` is ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import ClassVar

from hbmtwin.allocators.block_map import Held, block_map, enter
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.pool_policy import GRANTED, TABLE_ENTRY_BYTES, PoolPolicy
from hbmtwin.allocators.records import Granted, KVBlock, KVLayout, KVSequence, KVUsage, Refused, Release, Work
from hbmtwin.allocators.registry import kv_policies
from hbmtwin.allocators.shared_tables import SharedTables, Table


class AllocStatus(Enum):
    """v0's answer to who wants room: now, when others have left, or not even then."""

    OK = "ok"
    LATER = "later"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedV0Config:
    """Settings of :class:`PagedV0Policy`, with v0's defaults."""

    num_blocks: int
    max_model_len: int
    block_size: int = 16
    watermark: float = 0.01
    """Part of the pool that admitting and swapping in leave free."""
    enable_prefix_caching: bool = False
    swap_space_bytes: int = 4 << 30
    """Host memory for sequences that are swapped out."""

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 1), ("max_model_len", 1), ("block_size", 1), ("swap_space_bytes", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be from 0 to below 1, not {self.watermark}")


@kv_policies.register("paged_v0")
class PagedV0Policy(PoolPolicy):
    """A block pool as in vLLM before its v1 engine: forks share blocks until one writes, and sequences may be swapped.

    The pool tensors are taken from the arena once, at construction (raises OutOfMemory, nothing kept). Copies of blocks
    and swapped blocks go to :meth:`take_work`, whole ones, as v0's kernels move them.
    """

    name: ClassVar[str] = "paged_v0"
    requires: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str]] = frozenset({"preempt", "reject", "prefix_cache"})
    Config: ClassVar[type[PagedV0Config]] = PagedV0Config

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: PagedV0Config) -> None:
        super().__init__(layout, arena, config.num_blocks, layout.block_tensors(config.block_size))
        self.config = config
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._tables = SharedTables(config.num_blocks, config.block_size, caching=config.enable_prefix_caching)
        self._pool = self._tables.pool
        self._swapped: dict[int, Table] = {}
        """On the host; of their blocks only the number matters."""
        self._host_blocks = config.swap_space_bytes // self._block_bytes
        self._host_used = 0
        self._swapped_bytes = 0
        """In either direction, since the work was last taken."""

    # -- room for tokens ---------------------------------------------------------------------------------------------

    def lookup(self, s: KVSequence) -> int:
        """Tokens of the full blocks that hold its prefix and are computed, its last token never among them.

        O(blocks found); 0 without prefix caching.
        """
        return self._tables.cached_prefix(s) * self.config.block_size

    def can_allocate(self, s: KVSequence) -> AllocStatus:
        """Whether the whole prompt may come in; of a preempted sequence its output, too. O(1)."""
        return self._status(self._blocks_for(s.num_tokens))

    def append_refusal(self, sequences: Sequence[KVSequence]) -> Refused | None:
        """Why the samples of one prompt may not all go on, None if they may: a free block for each that they touch.

        v0's ``can_append_slots``. O(samples).
        """
        touched = sum(self._touched(self._tables.of[s.id].seen, s.num_tokens) for s in sequences)
        if touched <= self._pool.free:
            return None
        return self._refused(touched, self._pool.free, "fewer blocks are free than the samples touch")

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
        """Take the blocks of *new* tokens behind the computed ones; when admitting, of the whole prompt.

        Refused leaves everything as it was; when admitting, ``need_bytes`` has the watermark in it, and is more than
        the whole pool where the prompt can never come in. The watermark counts whether others run or not. Admitting a
        sequence that was swapped in asks for new blocks only: :meth:`can_swap_in` has counted what it touches. Raise
        ValueError for a *hit* that :meth:`lookup` does not promise, and for a sequence that is swapped out.
        O(blocks taken).
        """
        if s.id in self._swapped:
            raise ValueError(f"sequence {s.id} is swapped out; swap it in first")
        table, longest = self._tables.of.get(s.id), self.config.max_model_len
        if hit and (table is not None or hit < 0 or hit % self.config.block_size or hit > self.lookup(s)):
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: {self.lookup(s)} of its prefix are cached")
        tokens, free = min(s.num_computed_tokens + hit + new, longest), self._pool.free
        if table is not None:
            blocks = self._blocks_for(tokens + lookahead)
            need = self._touched(table.seen, tokens + lookahead)
            if admitting:
                need = max(0, blocks - len(table.blocks)) + self._tables.copies_next(table)
            if need > free:
                return self._refused(need, free, "fewer blocks are free than the tokens touch")
            self._tables.append(table, tokens=tokens, blocks=blocks)
            return GRANTED
        seen = min(max(tokens, s.num_tokens if admitting else 0), longest)
        blocks = self._blocks_for(seen + lookahead)
        need = blocks + self._watermark_blocks if admitting else blocks
        if need > free:
            never = need > self.config.num_blocks
            return self._refused(need, free, f"the whole prompt {'can never' if never else 'does not'} fit")
        self._tables.admit(s, tokens=tokens, seen=seen, blocks=blocks)
        return Granted(hit) if hit else GRANTED

    def _blocks_for(self, tokens: int) -> int:
        return -(-min(tokens, self.config.max_model_len) // self.config.block_size)

    def _touched(self, seen: int, tokens: int) -> int:
        """Blocks in which the slots from *seen* up to *tokens* lie."""
        return max(0, self._blocks_for(tokens) - seen // self.config.block_size) if tokens > seen else 0

    def _status(self, blocks: int) -> AllocStatus:
        need = blocks + self._watermark_blocks
        if need <= self._pool.free:
            return AllocStatus.OK
        return AllocStatus.LATER if need <= self.config.num_blocks else AllocStatus.NEVER

    def fork(self, parent: KVSequence, child: KVSequence) -> Granted | Refused:
        """Let *child* share all blocks of *parent*; it needs no memory. O(blocks).

        Refused if the parent holds nothing here, or if its prompt is in memory only in part. Raise ValueError if the
        child has blocks.
        """
        table = self._tables.of.get(parent.id)
        if child.id in self._tables.of or child.id in self._swapped:
            raise ValueError(f"sequence {child.id} has started already and cannot be a fork of {parent.id}")
        if table is None or table.tokens < table.seen:
            return Refused(0, 0, "only a sequence whose whole prompt is in memory can be forked")
        self._tables.fork(table, child)
        return GRANTED

    # -- swapping ----------------------------------------------------------------------------------------------------

    def can_swap_out(self, sequences: Sequence[KVSequence]) -> bool:
        """Whether the host has room for all of them. O(samples)."""
        need = sum(self._swap_blocks(self._tables.of[s.id]) for s in sequences)
        return need <= self._host_blocks - self._host_used

    def can_swap_in(self, sequences: Sequence[KVSequence]) -> AllocStatus:
        """Whether all of them, and the blocks that they touch next, fit and leave the watermark free. O(samples)."""
        return self._status(sum(self._swap_blocks(self._swapped[s.id]) for s in sequences))

    def swap_out(self, s: KVSequence) -> Granted | Refused:
        """Copy a sequence's blocks to the host, and give up its references on the device. O(blocks).

        Raise RuntimeError if it got room in the step that is under way: what would be copied is not computed.
        """
        table = self._tables.of.get(s.id)
        if table is None:
            return Refused(0, 0, "the sequence holds no blocks on the device")
        if self._tables.in_step(s.id):
            raise RuntimeError(f"sequence {s.id} is part of the step that is under way and cannot be swapped out")
        need, free = self._swap_blocks(table), self._host_blocks - self._host_used
        if need > free:
            return self._refused(need, free, "lack of CPU swap space: raise swap_space_bytes")
        self._swapped[s.id] = self._tables.remove(s.id)
        self._move(len(table.blocks))
        return GRANTED

    def swap_in(self, s: KVSequence) -> Granted | Refused:
        """Copy them back, to blocks of its own; with prefix caching, full ones may be cached and shared. O(blocks)."""
        table = self._swapped.get(s.id)
        if table is None:
            return Refused(0, 0, "the sequence is not swapped out")
        need, free = self._swap_blocks(table) + self._watermark_blocks, self._pool.free
        if need > free:
            return self._refused(need, free, "the sequence does not fit on the device")
        self._tables.place_again(self._swapped.pop(s.id))
        self._move(-len(table.blocks))
        return GRANTED

    def _swap_blocks(self, table: Table) -> int:
        """Full blocks, and those that unseen tokens touch."""
        return self._blocks_for(max(table.seen, table.sequence.num_tokens))

    def _move(self, blocks: int) -> None:
        """Count blocks that go to the host, or come back."""
        self._host_used += blocks
        self._swapped_bytes += abs(blocks) * self._block_bytes

    # -- a step ------------------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """The step's reservations stand, its copies are made, and blocks that it filled get their keys."""
        self._tables.end_step()

    def abort_step(self) -> None:
        """Give back what this step took, newcomers and forks with all they have; what was swapped stays so.

        Without a release in between, free blocks are as they were; keys that were evicted stay lost.
        """
        self._tables.abort_step()

    def horizon(self, decoding: Sequence[KVSequence], limit: int) -> int:
        """Steps that are certain to find, for the samples of any prompt, a free block for each of them.

        0 where a last block is shared, for it will be copied. With prefix caching it ends before a block fills whose
        content is cached, as a block is freed then. O(sequences * log(limit)), and O(blocks that fill) with caching.
        """
        size = self.config.block_size
        if not decoding or not limit:
            return limit
        tables = [self._tables.of[s.id] for s in decoding]
        if any(map(self._tables.copies_next, tables)):
            return 0
        samples = max(len(list(group)) for _, group in groupby(decoding, key=lambda s: (s.session, s.turn)))
        spare = self._pool.free - samples
        if len(tables) * -(-limit // size) > spare:
            places = Counter(len(table.blocks) * size - table.tokens for table in tables).items()

            def need(steps: int) -> int:
                return sum(count * -(-(steps - slots) // size) for slots, count in places if slots < steps)

            limit = bisect_right(range(1, limit + 1), spare, key=need)
        met: set[int] = set()
        for filling in self._tables.fillings(tables, limit, self.config.max_model_len):
            if filling.key in met or filling.key in self._pool.block_of:
                return filling.step - 1
            met.add(filling.key)
        return limit

    def advance(self, decoding: Sequence[KVSequence], k: int) -> None:
        """Take *k* steps at once: blocks go out, and get their keys, by (step, running order), as in single steps.

        Raise ValueError, and change nothing, if *k* is over the horizon. O(sequences + blocks taken * log).
        """
        if not k:
            return
        if k > (horizon := self.horizon(decoding, k)):
            raise ValueError(f"{k} steps are over the horizon of {horizon}")
        self._tables.advance([self._tables.of[s.id] for s in decoding], k, self.config.max_model_len)

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """Give up the sequence's blocks, whatever the reason and wherever they are. O(blocks).

        Raise KeyError for PARK if it holds none.
        """
        if s.id in self._tables.of:
            self._tables.remove(s.id)
        elif (table := self._swapped.pop(s.id, None)) is not None:
            self._host_used -= len(table.blocks)
        elif why is Release.PARK:
            raise KeyError(f"sequence {s.id} holds no KV that could be parked")
        if why is not Release.PREEMPT:
            self._pool.keys.forget(s.id)

    # -- books -------------------------------------------------------------------------------------------------------

    def take_work(self) -> Work:
        """Bytes of copied blocks, and of swapped ones in either direction."""
        work = Work(copied_bytes=self._tables.copied_blocks * self._block_bytes, swapped_bytes=self._swapped_bytes)
        self._tables.copied_blocks = self._swapped_bytes = 0
        return work

    def block_ids(self, s: KVSequence) -> tuple[int, ...]:
        """Ids of its blocks in token order; empty if it holds none on the device."""
        table = self._tables.of.get(s.id)
        return tuple(table.blocks) if table else ()

    @property
    def swapped_blocks(self) -> int:
        """Blocks of the host pool that are in use."""
        return self._host_used

    def usage(self) -> KVUsage:
        """The books of the device, O(1). Each block and each slot counts once, each table entry by itself."""
        pool, token_bytes = self._pool, self.layout.token_bytes
        shared = self._tables.shared_tokens * token_bytes
        return KVUsage(
            token=self._tables.tokens * token_bytes - shared,
            parked=0,
            held=pool.held * self._block_bytes,
            growth_copy=0,
            cached=pool.cached * self._block_bytes,
            pool=(pool.free - pool.cached) * self._block_bytes,
            table=pool.entries * TABLE_ENTRY_BYTES,
            shared=shared,
        )

    def walk(self) -> Iterator[KVBlock]:
        """Blocks by id, alike neighbours in one piece. A shared block is the one's who got room first."""
        held: Held = {}
        for owner, table in self._tables.of.items():
            enter(held, owner, table.blocks, table.tokens, self.config.block_size, self.layout.token_bytes)
        yield from block_map(self.config.num_blocks, self._block_bytes, held, self._pool.keyed_blocks())

    def check(self) -> None:
        """Assert references against tables, the host pool, and the books against the walk and the arena. O(blocks)."""
        self._tables.check()
        assert not self._tables.of.keys() & self._swapped.keys()
        assert self._host_used == sum(len(table.blocks) for table in self._swapped.values())
        assert self._host_used <= self._host_blocks
        self._check_books(self.usage(), list(self.walk()))
