"""Block tables of sequences that share blocks: by a fork, or (prefix caching) because their content is the same.

::

    A, prompt of 10    3 7 9           block 9 holds two tokens
    B, fork of A       3 7 9           every block has two references
    A writes           3 7 4           9 has two references: A gives its own up and takes 4, a copy
    B writes           3 7 9           9 has one: B writes in place

What is here: who has which blocks, how a table grows, and how a step is taken back. Who may grow is the policy's
business (:mod:`hbmtwin.allocators.paged_v0`). Every verb is O(blocks that it names) unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hbmtwin.allocators.block_keys import NO_KEY
from hbmtwin.allocators.records import KVSequence
from hbmtwin.allocators.shared_blocks import SharedBlocks


class Filling(NamedTuple):
    """A block that fills in a leap, in the order in which keys are given."""

    step: int
    key: int
    place: int
    """Of the table among those that leap."""
    block: int
    """Its number in the table."""


class _Before(NamedTuple):
    """What a sequence had before the step."""

    tokens: int
    seen: int
    blocks: int
    last_use: int


class Table:
    """The blocks of one sequence."""

    __slots__ = ("blocks", "keyed", "last_use", "seen", "sequence", "tokens")

    def __init__(self, sequence: KVSequence) -> None:
        self.sequence = sequence
        self.blocks: list[int] = []
        self.tokens = 0
        """Computed ones, those of the step that is under way included."""
        self.seen = 0
        """Tokens that have a slot: more than computed ones while a prompt comes in chunks."""
        self.keyed = 0
        """Blocks at the start that have a key."""
        self.last_use = 0

    def fill(self, index: int, size: int) -> int:
        """Tokens in its block of that number."""
        return max(0, min(size, self.tokens - index * size))


class SharedTables:
    """All tables over one pool, and what the step that is under way has changed."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        self.block_size = block_size
        self.caching = caching
        self.pool = SharedBlocks(num_blocks, block_size)
        self.of: dict[int, Table] = {}
        """By sequence."""
        self.tokens = 0
        """Over all tables, each slot as often as it is shared."""
        self.shared_tokens = 0
        """Slots that ``tokens`` counts again."""
        self.copied_blocks = 0
        """Copies made so far; who reports them sets it back."""
        self._now = 0
        """Steps so far, where v0 reads the clock."""
        self._step: dict[int, _Before | None] = {}
        """Who got blocks in this step, in running order; None for newcomers."""
        self._copies: dict[int, tuple[int, int]] = {}
        """Of each sequence that copies in this step: the block's place in its table, and the block left."""
        self._fresh: set[int] = set()
        """Blocks with a key of this step: nobody has computed what it promises."""

    def cached_prefix(self, s: KVSequence) -> int:
        """Blocks that hold its prefix and are computed, its last token never among them."""
        if not self.caching:
            return 0
        most, found = max(0, s.num_tokens - 1) // self.block_size, 0
        for key in self.pool.keys.of(s, most)[:most]:
            block = self.pool.block_of.get(key)
            if block is None or block in self._fresh:
                break
            found += 1
        return found

    # -- growing -----------------------------------------------------------------------------------------------------

    def admit(self, s: KVSequence, *, tokens: int, seen: int, blocks: int) -> None:
        """A newcomer of this step, with *blocks* of which it computes *tokens*."""
        table = Table(s)
        table.tokens, table.seen = tokens, seen
        self._fresh.update(self._place(table, blocks, min(tokens, s.num_tokens) // self.block_size))
        self._step[s.id] = None

    def place_again(self, table: Table) -> None:
        """A table that was given up comes back, on as many blocks; its content is there at once."""
        blocks, table.blocks = len(table.blocks), []
        self._place(table, blocks, table.tokens // self.block_size)

    def _place(self, table: Table, blocks: int, full: int) -> list[int]:
        """Fill an empty table, and return the blocks that got a key.

        The first *full* ones are shared where their content is cached, and get a key where not.
        """
        pool = self.pool
        keys = pool.keys.of(table.sequence, full)[:full] if self.caching else ()
        fresh = []
        for key in keys:
            block = pool.block_of.get(key)
            if block is not None:
                self.shared_tokens += self.block_size if pool.share(block) else 0
            else:
                block = pool.take()
                pool.register(block, key)
                fresh.append(block)
            table.blocks.append(block)
        table.keyed = len(keys)
        table.blocks += [pool.take() for _ in range(blocks - len(keys))]
        table.last_use = self._now
        self.of[table.sequence.id] = table
        self.tokens += table.tokens
        return fresh

    def fork(self, parent: Table, child: KVSequence) -> None:
        """A newcomer of this step that shares all blocks of another."""
        table = self.of[child.id] = Table(child)
        table.blocks = parent.blocks[:]
        table.tokens, table.seen, table.keyed, table.last_use = parent.tokens, parent.seen, parent.keyed, self._now
        for block in table.blocks:
            self.pool.share(block)
        self.tokens += table.tokens
        self.shared_tokens += table.tokens
        self._step[child.id] = None

    def append(self, table: Table, *, tokens: int, blocks: int) -> None:
        """Grow a table to *tokens* computed ones and at least *blocks*; a shared block that is written to is copied."""
        pool, owner = self.pool, table.sequence.id
        self._step.setdefault(owner, _Before(table.tokens, table.seen, len(table.blocks), table.last_use))
        if tokens > table.seen and self.copies_next(table):
            index = table.seen // self.block_size
            source = table.blocks[index]
            table.blocks[index] = pool.take()
            pool.drop(source, self._now, index + 1)
            self.shared_tokens -= table.fill(index, self.block_size)
            self._copies[owner] = (index, source)
        table.blocks += [pool.take() for _ in range(blocks - len(table.blocks))]
        self.tokens += tokens - table.tokens
        table.tokens, table.seen, table.last_use = tokens, max(table.seen, tokens), self._now

    def copies_next(self, table: Table) -> bool:
        """Whether its next token goes into a block that others refer to. O(1)."""
        index, inside = divmod(table.seen, self.block_size)
        return inside > 0 and self.pool.refs[table.blocks[index]] > 1

    # -- giving up ---------------------------------------------------------------------------------------------------

    def remove(self, owner: int) -> Table:
        """Give up a sequence's references; the table keeps the ids. A copy of this step counts as made."""
        table = self.of.pop(owner)
        self._step.pop(owner, None)
        self.copied_blocks += self._copies.pop(owner, None) is not None
        for index, block in enumerate(table.blocks):
            self._withdraw(block)
            if self.pool.drop(block, table.last_use, index + 1):
                self.shared_tokens -= table.fill(index, self.block_size)
        self.tokens -= table.tokens
        return table

    def _withdraw(self, block: int) -> None:
        """Take a key of this step away whose block nobody else refers to: it will not be computed."""
        if block in self._fresh and self.pool.refs[block] == 1:
            self.pool.unregister(block)
            self._fresh.remove(block)

    # -- a step ------------------------------------------------------------------------------------------------------

    def in_step(self, owner: int) -> bool:
        """Whether it got blocks in the step that is under way."""
        return owner in self._step

    def end_step(self) -> None:
        """The step's copies are made, and blocks that it filled get their keys."""
        self.copied_blocks += len(self._copies)
        if self.caching:
            for owner in self._step:
                self._settle(self.of[owner])
        self._forget_step()
        self._now += 1

    def _forget_step(self) -> None:
        self._step.clear()
        self._copies.clear()
        self._fresh.clear()

    def _settle(self, table: Table) -> None:
        """Give full blocks their keys, or exchange them for those that have their content already."""
        pool, size = self.pool, self.block_size
        full = min(table.tokens, table.sequence.num_tokens) // size
        keys = pool.keys.of(table.sequence, full)
        for index in range(table.keyed, min(full, len(keys))):
            own, cached = table.blocks[index], pool.block_of.get(keys[index])
            if cached is None:
                pool.register(own, keys[index])
            elif cached != own:
                self.shared_tokens += size if pool.share(cached) else 0
                self.shared_tokens -= size if pool.drop(own, self._now, index + 1) else 0
                table.blocks[index] = cached
            table.keyed = index + 1

    def abort_step(self) -> None:
        """Give back what this step took, newcomers and forks with all they have.

        Without a removal in between, the plain free list is as it was; keys that were evicted stay lost. A copy whose
        source is gone stays, and counts as made.
        """
        for owner, before in reversed(self._step.items()):
            if before is None:
                self._undo_newcomer(self.of.pop(owner))
            else:
                self._undo(self.of[owner], before)
        self._forget_step()

    def _undo_newcomer(self, table: Table) -> None:
        pool, taken = self.pool, []
        for index, block in enumerate(table.blocks):
            self._withdraw(block)
            if pool.refs[block] == 1 and pool.key_of[block] == NO_KEY:
                taken.append(block)
            elif pool.drop(block, table.last_use, index + 1):
                self.shared_tokens -= table.fill(index, self.block_size)
        pool.put_back(taken)
        self.tokens -= table.tokens

    def _undo(self, table: Table, before: _Before) -> None:
        pool, owner = self.pool, table.sequence.id
        pool.put_back(table.blocks[before.blocks :])
        del table.blocks[before.blocks :]
        self.tokens += before.tokens - table.tokens
        table.tokens, table.seen, table.last_use = before.tokens, before.seen, before.last_use
        if owner not in self._copies:
            return
        index, source = self._copies[owner]
        if not pool.refs[source]:
            self.copied_blocks += 1
            return
        pool.put_back([table.blocks[index]])
        pool.share(source)
        table.blocks[index] = source
        self.shared_tokens += table.fill(index, self.block_size)

    # -- a leap ------------------------------------------------------------------------------------------------------

    def fillings(self, tables: Sequence[Table], steps: int, longest: int) -> list[Filling]:
        """Blocks that fill, and get a key, within *steps* of one token each; none without prefix caching."""
        found: list[Filling] = []
        for place, table in enumerate(tables if self.caching else ()):
            full = min(table.tokens + steps, longest) // self.block_size
            if full > table.keyed:
                keys = self.pool.keys.of(table.sequence, full)
                found += [
                    Filling((index + 1) * self.block_size - table.tokens, keys[index], place, index)
                    for index in range(table.keyed, min(full, len(keys)))
                ]
        return sorted(found)

    def advance(self, tables: Sequence[Table], steps: int, longest: int) -> None:
        """As many steps of one token each, without a copy or an exchange: blocks go out by (step, place)."""
        if self._step:
            self.end_step()
        taken = [
            (step, place)
            for place, table in enumerate(tables)
            for step in range(
                len(table.blocks) * self.block_size - table.tokens + 1,
                min(steps, longest - table.tokens) + 1,
                self.block_size,
            )
        ]
        for _, place in sorted(taken):
            tables[place].blocks.append(self.pool.take())
        for filling in self.fillings(tables, steps, longest):
            table = tables[filling.place]
            self.pool.register(table.blocks[filling.block], filling.key)
            table.keyed = filling.block + 1
        for table in tables:
            more = min(steps, longest - table.tokens)
            table.tokens += more
            table.seen = max(table.seen, table.tokens)
            table.last_use = self._now + steps - 1
            self.tokens += more
        self._now += steps

    def check(self) -> None:
        """Assert references against tables, and keys against what is full. O(blocks)."""
        size, pool = self.block_size, self.pool
        pool.check([table.blocks for table in self.of.values()])
        slots: dict[int, int] = {}
        for table in self.of.values():
            assert 0 <= table.tokens <= table.seen <= len(table.blocks) * size
            assert table.keyed * size <= table.tokens
            assert all(pool.key_of[block] != NO_KEY for block in table.blocks[: table.keyed])
            for index, block in enumerate(table.blocks):
                assert slots.setdefault(block, table.fill(index, size)) == table.fill(index, size), "shared is equal"
        assert self.tokens == sum(table.tokens for table in self.of.values())
        assert self.tokens - self.shared_tokens == sum(slots.values())
