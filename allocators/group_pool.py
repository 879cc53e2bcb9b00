"""The tables of all sequences in all groups, over one prefix cache: what one reserve, release or undo does to them.

::

    sequence 1    group 0   | 1 | 2 | 3 | 7 |     entries 6   distinct 6 ...      counted by group: entries that are
                  group 1   | 0 | 0 | 6 | 8 |     entries 2   nulls 2             not null, blocks they name, and nulls
    sequence 2    group 0   | 1 | 2 | 9 |         blocks 1 and 2 are shared: 2 entries more than distinct blocks

Groups are gone through in order, each to its end. Every verb is O(groups + entries that change).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from math import gcd, lcm

from hbmtwin.allocators.block_keys import NO_KEY
from hbmtwin.allocators.group_lookup import GroupLookup
from hbmtwin.allocators.group_managers import NEVER, NULL, GroupTable, manager_of
from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.allocators.prefix_cache import PrefixCache
from hbmtwin.allocators.records import KVSequence


class Held:
    """What a sequence holds: a table for each group, and its tokens: the target of the last reserve, lookahead not
    included (less the ``lead`` of its batch)."""

    __slots__ = ("next_key", "quiet", "releases", "tables", "takes", "tokens")

    def __init__(self, num_groups: int) -> None:
        self.tables = [GroupTable() for _ in range(num_groups)]
        self.tokens = 0
        self.takes = self.releases = 0
        """The fewest computed tokens at which a step of one token takes, or gives back, a block of some group."""
        self.next_key = 0
        """The fewest tokens that may fill a block which has no key yet; ``NEVER`` without prefix caching."""
        self.quiet = 0
        """Up to so many tokens nothing is taken, forgotten or registered."""


Marks = list[tuple[int, int, bool, int, list[int]]]
"""Of each table before a step: its length, what was keyed, grown and previous, and the drafts' states at its end."""


class GroupPool:
    """Blocks for groups of layers; it knows sequences, and nothing of steps or of admission."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        num_blocks: int,
        *,
        max_model_len: int,
        max_num_batched_tokens: int,
        caching: bool,
    ) -> None:
        self.groups = groups
        sizes = [group.block_size for group in groups]
        self.alignment = lcm(*sizes)
        self.managers = [
            manager_of(
                group,
                alignment=self.alignment,
                max_model_len=max_model_len,
                max_num_batched_tokens=max_num_batched_tokens,
            )
            for group in groups
        ]
        kinds: dict[KVGroup, list[int]] = {}
        for index, group in enumerate(groups):
            kinds.setdefault(replace(group, num_layers=1), []).append(index)
        self.kinds = [(self.managers[indices[0]], indices[0], len(indices)) for indices in kinds.values()]
        """Of each kind of groups the manager and place of one of them, and how many there are: what a sequence holds
        of them is equally long, and is forgotten alike."""
        # Without keys there is one order of freeing: to the tail.
        self.cache = PrefixCache(num_blocks, gcd(*sizes), num_groups=len(sizes), bare_first=caching)
        self.lookup = GroupLookup(self.managers, self.cache) if caching else None
        self.keyed: list[int] = []
        """Blocks that got a key in this step."""
        self.fresh: set[int] = set()
        """Keys, with their group, of Mamba states that are computed in this step."""
        self.entries = [0] * len(sizes)
        """Of each group the entries of all tables that are not null; then the distinct blocks, and the null entries."""
        self.distinct = [0] * len(sizes)
        self.nulls = [0] * len(sizes)

    @property
    def num_free(self) -> int:
        """Blocks in the queue."""
        return len(self.cache.free)

    # -- before anything changes -------------------------------------------------------------------------------------

    def is_fresh(self, adopted: Sequence[Sequence[int]]) -> bool:
        """Whether a state among them is promised in this very step: it can be copied only once it is computed."""
        return any(
            group.kind == "mamba" and self.cache.key_of[blocks[-1]] in self.fresh
            for group, blocks in zip(self.groups, adopted, strict=True)
        )

    def need(
        self,
        held: Held | None,
        slots: int,
        scheduled: int,
        adopted: Sequence[Sequence[int]] | None,
        computed: int,
        *,
        gate: bool = False,
    ) -> tuple[int, int]:
        """Blocks to take for *slots* tokens, *scheduled* without look-ahead, and adopted ones that leave the queue.

        *gate*: of groups with windows the most that they ever hold.
        """
        need = idle = 0
        for index, manager in enumerate(self.managers):
            required = manager.required(slots, scheduled)
            if gate:
                required = min(required, manager.cap)
            table = held.tables[index] if held is not None else None
            hit = adopted[index] if adopted is not None else ()
            need += manager.new_blocks(table, required, len(hit), computed)
            if hit:
                idle += self.cache.idle(filter(None, manager.counted(hit, computed)))
        return need, idle

    def marks(self, held: Held) -> Marks:
        """What :meth:`undo` goes back to."""
        marks = []
        for group, table in zip(self.groups, held.tables, strict=True):
            length, drafts = len(table.blocks), group.speculative_blocks if table.grown else 0
            marks.append((length, table.keyed, table.grown, table.previous, table.blocks[length - drafts :]))
        return marks

    def settle(self, held: Held) -> None:
        """Say anew how far it is quiet, after its tables or keys have changed. O(kinds of groups)."""
        tables = held.tables
        held.takes = min([manager.next_take(tables[index]) for manager, index, _ in self.kinds])
        held.releases = min([manager.next_release(tables[index]) for manager, index, _ in self.kinds])
        held.quiet = min(held.takes, held.releases, held.next_key - 1)

    # -- what changes tables -----------------------------------------------------------------------------------------

    def forget(self, held: Held, computed: int) -> None:
        """Give back what no token behind the *computed* ones reads. O(1) if there is nothing."""
        if computed < held.releases:
            return
        for index, (manager, table) in enumerate(zip(self.managers, held.tables, strict=True)):
            for blocks in manager.forget(table, computed):
                self.nulls[index] += len(blocks)
                self._give_back(index, blocks)
        self.settle(held)

    def _give_back(self, index: int, blocks: Sequence[int]) -> None:
        """One call of one group."""
        self.cache.put_back(blocks)
        self._gone(index, blocks)

    def _gone(self, index: int, blocks: Sequence[int]) -> None:
        self.entries[index] -= len(blocks)
        self.distinct[index] -= self.cache.idle(blocks)

    def adopt(self, held: Held, adopted: Sequence[Sequence[int]], computed: int) -> None:
        """Empty tables start with what a look-up found."""
        for index, (manager, table) in enumerate(zip(self.managers, held.tables, strict=True)):
            manager.adopt(table, adopted[index], computed)
            blocks = [block for block in table.blocks if block != NULL]
            self.distinct[index] += self.cache.idle(blocks)
            self.entries[index] += len(blocks)
            self.nulls[index] += len(table.blocks) - len(blocks)
            self.cache.touch(blocks)
        self.settle(held)

    def grow(self, held: Held, slots: int, scheduled: int) -> None:
        """Take the blocks that :meth:`need` counted. O(1) if there are none."""
        if slots <= held.takes and scheduled <= held.takes:
            return
        take = self.cache.take
        for index, (manager, table) in enumerate(zip(self.managers, held.tables, strict=True)):
            required, before = manager.required(slots, scheduled), len(table.blocks)
            if required > before:
                taken = manager.grow(table, required, take)
                self.entries[index] += taken
                self.distinct[index] += taken
                self.nulls[index] += required - before - taken
        self.settle(held)

    def register(self, s: KVSequence, held: Held, tokens: int) -> None:
        """Give blocks that the first *tokens* fill their keys, as far as spans say what they hold.

        With several groups only as far as a look-up over all of them can find: to a multiple of the common block size.
        O(1) if they fill none.
        """
        if tokens < held.next_key:
            return
        held.next_key = (tokens // self.alignment + 1) * self.alignment if self.lookup is not None else NEVER
        held.quiet = min(held.takes, held.releases, held.next_key - 1)
        if self.lookup is None:
            return
        if len(self.groups) > 1:
            tokens -= tokens % self.alignment
        cache = self.cache
        for index, (manager, table) in enumerate(zip(self.managers, held.tables, strict=True)):
            full = tokens // manager.size
            if full <= table.keyed:
                continue
            ratio = manager.size // cache.block_size
            keys = cache.keys.of(s, full * ratio)
            full = min(full, len(keys) // ratio)
            places = [
                place for place in range(table.keyed, full) if table.blocks[place] != NULL and manager.keeps_key(place)
            ]
            blocks = [table.blocks[place] for place in places]
            cache.register(blocks, [keys[(place + 1) * ratio - 1] for place in places], index)
            self.keyed += blocks
            if manager.group.kind == "mamba":
                self.fresh.update([cache.key_of[block] for block in blocks])
            table.keyed = max(table.keyed, full)

    def release(self, held: Held) -> None:
        """Give all back, group by group, in each the last one first."""
        for index, table in enumerate(held.tables):
            blocks = [block for block in reversed(table.blocks) if block != NULL]
            self.nulls[index] -= len(table.blocks) - len(blocks)
            self._give_back(index, blocks)

    # -- the end of a step -------------------------------------------------------------------------------------------

    def end_step(self) -> None:
        """What was promised in the step is computed."""
        self.keyed.clear()
        self.fresh.clear()

    def withdraw_keys(self) -> None:
        """Nobody computes what the keys of this step promise."""
        for block in self.keyed:
            self.cache.withdraw(block)

    def undo(self, held: Held, marks: Marks | None) -> None:
        """Tables become what the marks say, empty without any; the last group's blocks go first, so that the queue is
        as it was. What was forgotten stays so."""
        for index in reversed(range(len(self.groups))):
            table = held.tables[index]
            length, keyed, grown, previous, drafts = marks[index] if marks is not None else (0, 0, False, -1, [])
            nulls = table.blocks.count(NULL)
            taken = [block for block in table.blocks[length:] if block != NULL and block not in drafts]
            table.blocks[length - len(drafts) :] = drafts
            table.keyed, table.grown, table.previous = keyed, grown, previous
            self.nulls[index] += table.blocks.count(NULL) - nulls
            self.cache.take_back(taken)
            self._gone(index, taken)
        held.next_key = 0
        self.settle(held)

    # -- books -------------------------------------------------------------------------------------------------------

    def check(self, sequences: Collection[Held]) -> None:
        """Assert the invariants of queue, references, keys and tables. O(blocks)."""
        key_of = self.cache.key_of
        referred = [b for held in sequences for table in held.tables for b in table.blocks if b != NULL]
        self.cache.check(((block,), int(key_of[block] != NO_KEY)) for block in referred)
        owners: dict[int, int] = {}
        for index, manager in enumerate(self.managers):
            tables = [(held, held.tables[index]) for held in sequences]
            blocks = Counter(block for _, table in tables for block in table.blocks)
            assert self.nulls[index] == blocks.pop(NULL, 0)
            assert (self.entries[index], self.distinct[index]) == (sum(blocks.values()), len(blocks))
            for block in blocks:
                assert owners.setdefault(block, index) == index, "a block belongs to one group at a time"
                assert key_of[block] == NO_KEY or key_of[block] % len(self.groups) == index
            for held, table in tables:
                assert table.keyed <= len(table.blocks)
                assert table.keyed * manager.size <= held.tokens <= len(table.blocks) * manager.size
                if manager.group.kind != "mamba":
                    assert NULL not in table.blocks[held.tokens // manager.size :], "whatever comes has its slots"
        for held in sequences:
            changes = [
                (m.next_take(table), m.next_release(table)) for m, table in zip(self.managers, held.tables, strict=True)
            ]
            assert held.takes == min([takes for takes, _ in changes])
            assert held.releases == min([releases for _, releases in changes])
            assert held.quiet == min(held.takes, held.releases, held.next_key - 1)
