"""Paged KV: one pool of equal blocks, handed out as vLLM's block manager does with prefix caching off.

::

    pool tensors (K and V of each layer)   | block 0 | block 1 | ... | block num_blocks - 1 |
    block 0                                the null block: never handed out, never free
    free queue                             head -> 1 2 3 ... ; blocks are taken at the head, given back at the tail
    a sequence                             block ids in token order; the last block may be partly filled

The rules are vLLM 0.27's (``BlockPool``, ``KVCacheManager.allocate_slots``), meant to give the ids that vLLM would.
They were compared, id by id, with a second model written from the same rules, and not with vLLM itself yet.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.oom import OutOfMemory
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

    def __post_init__(self) -> None:
        for name, least in (("num_blocks", 2), ("max_model_len", 1), ("block_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark must be from 0 to below 1, not {self.watermark}")


_GRANTED = Granted()
"""The same answer to every sequence in every step: making it anew was an eighth of a run."""


class _Table:
    """The blocks of one sequence, and its tokens: the target of the last reserve, lookahead not included."""

    __slots__ = ("blocks", "tokens")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.tokens = 0


@kv_policies.register("paged")
class PagedPolicy:
    """A block pool with a first-in first-out free queue, as in vLLM with prefix caching off.

    The pool tensors are taken from the arena once, at construction (raises OutOfMemory, nothing kept), so a step never
    asks the arena for anything. PARK gives the blocks back: without a prefix cache nothing is found again.
    Bytes of tables: 4 for each block id that a sequence holds.
    """

    name: ClassVar[str] = "paged"
    requires: ClassVar[frozenset[str]] = frozenset()
    offers: ClassVar[frozenset[str]] = frozenset({"preempt", "reject"})
    Config: ClassVar[type[PagedConfig]] = PagedConfig

    def __init__(self, layout: KVLayout, arena: DeviceAllocator, config: PagedConfig) -> None:
        self.layout = layout
        self.arena = arena
        self.config = config
        self._block_bytes = config.block_size * layout.token_bytes
        self._watermark_blocks = int(config.watermark * config.num_blocks)
        self._free: deque[int] = deque(range(1, config.num_blocks))
        self._tables: dict[int, _Table] = {}
        self._step: dict[int, tuple[int, int]] = {}
        """Tokens and blocks before this step of each sequence reserved in it; (-1, 0) if it was admitted in it."""
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
        """0: nothing is kept for a prefix."""
        return 0

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
        run. Refused leaves everything as it was. Raise ValueError for a *hit*: nothing was promised.
        """
        if hit:
            raise ValueError(f"sequence {s.id} cannot adopt {hit} tokens: this pool has no prefix cache")
        size, longest = self.config.block_size, self.config.max_model_len
        table = self._tables.get(s.id)
        held = len(table.blocks) if table else 0
        free = len(self._free)
        tokens = min(s.num_computed_tokens + new, longest)
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
        if need > 0:
            pop = self._free.popleft
            table.blocks += [pop() for _ in range(need)]
        self._tokens += tokens - table.tokens
        table.tokens = tokens
        return _GRANTED

    def _refused(self, need: int, free: int, reason: str) -> Refused:
        return Refused(need * self._block_bytes, max(0, free) * self._block_bytes, reason)

    # -- a step ------------------------------------------------------------------------------------------------------

    def grow_layer(self, layer: int) -> None:
        """Nothing: the pool is there already."""

    def end_step(self) -> None:
        """The step's reservations stand."""
        self._step.clear()

    def abort_step(self) -> None:
        """Give back this step's blocks, to the head of the queue in the order in which they were taken.

        Without a release in between, the queue is as it was before the step.
        """
        for owner, (tokens, held) in reversed(self._step.items()):
            table = self._tables[owner]
            self._free.extendleft(reversed(table.blocks[held:]))
            del table.blocks[held:]
            self._tokens += max(tokens, 0) - table.tokens
            table.tokens = tokens
            if tokens < 0:
                del self._tables[owner]
        self._step.clear()

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
        """Take *k* steps at once: blocks go out by (step, running order), as in single steps.

        Raise ValueError, and change nothing, if *k* is over the horizon. O(sequences + blocks taken * log).
        """
        if not k:
            return
        self._step.clear()
        size, longest = self.config.block_size, self.config.max_model_len
        tables = self._tables_of(decoding)
        taken: list[tuple[int, int]] = []
        for place, (table, slots) in enumerate(zip(tables, self._unfilled_slots(tables), strict=True)):
            if slots < k:
                last = min(k, longest - table.tokens)
                taken += [(step, place) for step in range(slots + 1, last + 1, size)]
        if len(taken) > len(self._free):
            raise ValueError(f"{k} steps need {len(taken)} blocks and {len(self._free)} are free: over the horizon")
        for _, place in sorted(taken):
            tables[place].blocks.append(self._free.popleft())
        before = sum([table.tokens for table in tables])
        for table in tables:
            table.tokens = min(table.tokens + k, longest)
        self._tokens += sum([table.tokens for table in tables]) - before

    def _tables_of(self, sequences: Sequence[KVSequence]) -> list[_Table]:
        tables = self._tables
        return [tables[s.id] for s in sequences]

    def _unfilled_slots(self, tables: Sequence[_Table]) -> list[int]:
        size = self.config.block_size
        return [len(table.blocks) * size - table.tokens for table in tables]

    # -- giving back -------------------------------------------------------------------------------------------------

    def release(self, s: KVSequence, why: Release) -> None:
        """Append the sequence's blocks to the free queue, last one first, whatever the reason. O(blocks).

        Raise KeyError for PARK if it holds none.
        """
        table = self._tables.pop(s.id, None)
        if table is None:
            if why is Release.PARK:
                raise KeyError(f"sequence {s.id} holds no KV that could be parked")
            return
        self._step.pop(s.id, None)
        self._free.extend(reversed(table.blocks))
        self._tokens -= table.tokens

    # -- what this pool cannot do ------------------------------------------------------------------------------------

    def fork(self, parent: KVSequence, child: KVSequence) -> Refused:
        """Always refused: blocks are not shared without a prefix cache."""
        return Refused(0, 0, "blocks are not shared without a prefix cache; a child must be computed anew")

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
        """The books, O(1)."""
        unheld = len(self._free) + 1
        held = self.config.num_blocks - unheld
        return KVUsage(
            token=self._tokens * self.layout.token_bytes,
            parked=0,
            held=held * self._block_bytes,
            growth_copy=0,
            cached=0,
            pool=unheld * self._block_bytes,
            table=held * TABLE_ENTRY_BYTES,
        )

    def walk(self) -> Iterator[KVBlock]:
        """Every block by id, the null block as free."""
        size = self.config.block_size
        held = {
            block: (max(0, min(size, table.tokens - index * size)), owner)
            for owner, table in self._tables.items()
            for index, block in enumerate(table.blocks)
        }
        for block in range(self.config.num_blocks):
            tokens, owner = held.get(block, (0, -1))
            state = "running" if block in held else "free"
            yield KVBlock(block * self._block_bytes, self._block_bytes, tokens * self.layout.token_bytes, state, owner)

    def check(self) -> None:
        """Assert that every block but the null one is in one place, and the books against the walk and the arena."""
        held = [block for table in self._tables.values() for block in table.blocks]
        assert sorted([*held, *self._free]) == list(range(1, self.config.num_blocks))
        for table in self._tables.values():
            assert 0 <= table.tokens <= len(table.blocks) * self.config.block_size
        usage, blocks = self.usage(), list(self.walk())
        assert usage.token == sum(block.token_bytes for block in blocks)
        assert usage.held == sum(block.size for block in blocks if block.state == "running")
        assert usage.pool == sum(block.size for block in blocks if block.state == "free")
        assert usage.unfilled >= 0
        assert self.arena.usage().requested_by_tag[Tag.KV] == self.config.num_blocks * self._block_bytes
