"""What one group of layers asks of the pool: its look-up, its need, what it forgets and which of its blocks get a key.

::

    block size 4, window W = 6, c = 13 tokens computed        tokens 0..7 are out of every later token's reach: S(c) = 8
    full             | 1 | 2 | 3 | 7 |                        nothing is forgotten
    sliding_window   | 0 | 0 | 6 | 8 |                        0 is the null block: its tokens are gone for this group
    chunked_local    | 0 | 0 | 0 | 8 |   K = 12               only the present chunk is read
    mamba, all       | 0 | 0 | 0 | 8 |                        a block is a state, and only the last is read
    mamba, none      | 5 |                                    one state for all of a request's life

S(c) are the first tokens that no later one reads, once c are computed. The rules are vLLM 0.27's
``single_type_kv_cache_manager``. Managers know no request and no other group: tables and hits are handed to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hbmtwin.allocators.kv_groups import KVGroup

NULL = 0
"""The null block's id: it stands in tables where nothing is held."""
NEVER = 1 << 62
"""More tokens than any sequence has."""

Cached = Callable[[int], tuple[int, ...] | None]
"""Blocks that hold a place of the prefix in all groups of a class, None if one of them lacks it."""


class GroupTable:
    """The blocks of one sequence in one group."""

    __slots__ = ("blocks", "grown", "keyed", "previous", "skipped")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.keyed = 0
        """Blocks that had their chance of a key: registered, adopted or passed over."""
        self.skipped = 0
        """Blocks that S(c) covered when blocks were last forgotten."""
        self.grown = False
        """Mamba, align: it took blocks of its own, so that the last ones are the running state and the drafts'."""
        self.previous = -1
        """Mamba, align: place of the state that the running one was copied from."""


class GroupManager:
    """Full attention, and what the other kinds share with it."""

    def __init__(self, group: KVGroup, alignment: int, cap: int = NEVER) -> None:
        """*alignment* is the least common multiple of all groups' block sizes."""
        self.group = group
        self.size = group.block_size
        self.alignment = alignment
        self.cap = cap
        """The most blocks that the full-sequence gate counts: no request ever holds more at once."""

    # -- what tokens are read ----------------------------------------------------------------------------------------

    def skipped_tokens(self, computed: int) -> int:
        """S(c): how many of the first tokens no later token reads, once so many are computed."""
        return 0

    def skipped_blocks(self, computed: int) -> int:
        """Whole blocks of :meth:`skipped_tokens`."""
        return self.skipped_tokens(computed) // self.size

    # -- look-up -----------------------------------------------------------------------------------------------------

    def find(self, cached: Cached, limit: int, nulls: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Blocks of the longest usable prefix of at most *limit* tokens, *nulls* where nothing is needed.

        From the left up to the first miss, cut to an aligned length.
        """
        found: list[tuple[int, ...]] = []
        for index in range(limit // self.size):
            blocks = cached(index)
            if blocks is None:
                break
            found.append(blocks)
        return self._cut(found)

    def _cut(self, found: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
        del found[len(found) - len(found) % (self.alignment // self.size) :]
        return found

    def _aligned(self, index: int) -> bool:
        return (index + 1) * self.size % self.alignment == 0

    # -- need --------------------------------------------------------------------------------------------------------

    def required(self, tokens: int, scheduled: int) -> int:
        """Places of a table that has room for *tokens*; *scheduled* are those without look-ahead, not clamped."""
        return -(-tokens // self.size)

    def new_blocks(self, table: GroupTable | None, required: int, hit: int, computed: int) -> int:
        """Blocks to take for so many places, *hit* of them adopted, at *computed* tokens (adopted ones among them)."""
        held = len(table.blocks) if table is not None else 0
        return max(0, required - max(self.skipped_blocks(computed), hit + held))

    def counted(self, hit: Sequence[int], computed: int) -> Sequence[int]:
        """Of adopted blocks those that leave the free queue, nulls perhaps among them."""
        return hit[self.skipped_blocks(computed) :]

    # -- growing and forgetting --------------------------------------------------------------------------------------

    def adopt(self, table: GroupTable, hit: Sequence[int], computed: int) -> None:
        """An empty table starts with *hit*; what is out of reach already is null."""
        skipped = self.skipped_blocks(computed)
        table.blocks = [NULL] * skipped + list(hit[skipped:])
        table.keyed = len(table.blocks)
        table.skipped = skipped

    def grow(self, table: GroupTable, required: int, take: Callable[[], int]) -> int:
        """Take blocks up to *required* places; return how many."""
        more = required - len(table.blocks)
        if more == 1:
            table.blocks.append(take())
        else:
            table.blocks += [take() for _ in range(more)]
        return more

    def forget(self, table: GroupTable, computed: int) -> list[list[int]]:
        """Take out what no later token reads, high places first, down to the first that is null already.

        Each list is to be given back in a call of its own.
        """
        skipped = self.skipped_blocks(computed)
        if skipped <= table.skipped:
            return []
        table.skipped = skipped
        blocks = table.blocks
        forgotten = []
        for index in range(min(skipped, len(blocks)) - 1, self._sink_blocks() - 1, -1):
            if blocks[index] == NULL:
                break
            forgotten.append(blocks[index])
            blocks[index] = NULL
        return [forgotten] if forgotten else []

    def _sink_blocks(self) -> int:
        return 0

    def keeps_key(self, index: int) -> bool:
        """Whether the block at a place gets a key when it is full: whether a look-up could ever use it."""
        return True

    # -- leaps -------------------------------------------------------------------------------------------------------

    def next_take(self, table: GroupTable) -> int:
        """The fewest computed tokens at which a step of one token takes a block. O(1)."""
        return len(table.blocks) * self.size

    def next_release(self, table: GroupTable) -> int:
        """The fewest computed tokens at which a step gives a block back, or might. O(1)."""
        return self._next_skip(table.skipped + 1)

    def _next_skip(self, skipped: int) -> int:
        """The fewest computed tokens at which *skipped* blocks are out of reach."""
        return NEVER


class WindowManager(GroupManager):
    """A token attends to the last W, itself included."""

    def skipped_tokens(self, computed: int) -> int:
        """All but the last W - 1: the next token is the window's last."""
        return max(0, computed - self.group.window + 1)

    @property
    def run(self) -> int:
        """Cached blocks in a row that a hit needs."""
        return -(-(self.group.window - 1) // self.size)

    def find(self, cached: Cached, limit: int, nulls: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The rightmost run that fills the window and ends aligned; failing that, one that touches the start."""
        count, run = limit // self.size, 0
        found = [nulls] * count
        for index in range(count - 1, -1, -1):
            blocks = cached(index)
            if blocks is None:
                run = 0
                continue
            if not run and not self._aligned(index):
                continue
            found[index] = blocks
            run += 1
            if run >= self.run:
                return found[: index + run]
        return self._cut(found[:run])

    def keeps_key(self, index: int) -> bool:
        """Only the last of every aligned stretch, as many as a hit needs, where the stretch is longer than that."""
        stretch = self.alignment // self.size
        return self.run >= stretch or index % stretch >= stretch - self.run

    def _sink_blocks(self) -> int:
        return -(-self.group.sinks // self.size)

    def _next_skip(self, skipped: int) -> int:
        return skipped * self.size + self.group.window - 1


class ChunkedManager(GroupManager):
    """A token attends to its chunk of K tokens only, from the chunk's start."""

    def skipped_tokens(self, computed: int) -> int:
        """Whole chunks."""
        return computed // self.group.window * self.group.window

    def find(self, cached: Cached, limit: int, nulls: tuple[int, ...]) -> list[tuple[int, ...]]:
        """All chunks before the present one without looking, then up to the first miss."""
        found = [nulls] * self.skipped_blocks(limit)
        for index in range(len(found), limit // self.size):
            blocks = cached(index)
            if blocks is None:
                break
            found.append(blocks)
        return found

    def _next_skip(self, skipped: int) -> int:
        chunk = self.group.window
        return -(-skipped * self.size // chunk) * chunk


class MambaManager(GroupManager):
    """Modes ``none`` and ``all``: a block is a state, and only the last computed token's is read."""

    def skipped_tokens(self, computed: int) -> int:
        """All but the last."""
        return max(0, computed - 1)

    def find(self, cached: Cached, limit: int, nulls: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The rightmost aligned state; nothing before it is needed."""
        for index in range(limit // self.size - 1, -1, -1):
            if self._aligned(index):
                blocks = cached(index)
                if blocks is not None:
                    return [nulls] * index + [blocks]
        return []

    def required(self, tokens: int, scheduled: int) -> int:
        """As attention, and the drafts' states."""
        return -(-tokens // self.size) + self.group.speculative_blocks

    def next_take(self, table: GroupTable) -> int:
        """Behind the drafts' states."""
        return (len(table.blocks) - self.group.speculative_blocks) * self.size

    def _next_skip(self, skipped: int) -> int:
        return skipped * self.size + 1


class AlignedMambaManager(MambaManager):
    """Mode ``align``: places by tokens, but only the newest states are real.

    ::

        block size 4, one draft's state   | 0 | 0 | 5 | 6 |        5 runs, 6 is the draft's
        a fourth block of tokens begins   | 0 | 0 | 5 | 6 | 9 |    6 runs, copied from 5 (*previous*); 9 is taken
        once it is computed               | 0 | 0 | 0 | 6 | 9 |
    """

    def required(self, tokens: int, scheduled: int) -> int:
        """Of scheduled tokens only: draft models have no Mamba layers."""
        return -(-scheduled // self.size) + self.group.speculative_blocks

    def new_blocks(self, table: GroupTable | None, required: int, hit: int, computed: int) -> int:
        """One, and at first the drafts'. None where refused drafts of the last step left too many places.

        vLLM subtracts those places from what other groups need, and then fails where that made the difference.
        """
        if required - hit - (len(table.blocks) if table is not None else 0) <= 0:
            return 0
        return 1 if table is not None and table.grown else 1 + self.group.speculative_blocks

    def counted(self, hit: Sequence[int], computed: int) -> Sequence[int]:
        """All: there is but one that is not null."""
        return hit

    def grow(self, table: GroupTable, required: int, take: Callable[[], int]) -> int:
        """Null places up to the last, the drafts' old states moved behind them, and the rest from the pool."""
        blocks, drafts = table.blocks, self.group.speculative_blocks
        before = len(blocks)
        if required <= before:
            return 0
        if table.grown:
            table.previous = before - 1 - drafts
        elif before:
            table.previous = before - 1
        running = required - drafts - 1
        blocks += [NULL] * (running - before)
        if table.grown:
            for index in range(before - drafts, min(before, running)):
                blocks.append(blocks[index])
                blocks[index] = NULL
        table.grown = True
        return super().grow(table, required, take)

    def forget(self, table: GroupTable, computed: int) -> list[list[int]]:
        """And the state that the running one was copied from, once that is computed."""
        calls = super().forget(table, computed)
        previous, blocks = table.previous, table.blocks
        if 0 <= previous < -(-computed // self.size) - 1 and blocks[previous] != NULL:
            calls.append([blocks[previous]])
            blocks[previous] = NULL
        return calls

    def next_release(self, table: GroupTable) -> int:
        """When the copied state goes, if that is sooner."""
        held = table.previous >= 0 and table.blocks[table.previous] != NULL
        copied = (table.previous + 1) * self.size + 1 if held else NEVER
        return min(super().next_release(table), copied)


def manager_of(group: KVGroup, *, alignment: int, max_model_len: int, max_num_batched_tokens: int) -> GroupManager:
    """The manager of a group's kind. What attention with a window holds at once is capped."""
    kinds: dict[str, type[GroupManager]] = {
        "full": GroupManager,
        "sliding_window": WindowManager,
        "chunked_local": ChunkedManager,
        "mamba": AlignedMambaManager if group.mamba_mode == "align" else MambaManager,
    }
    cap = group.max_blocks(max_model_len, max_num_batched_tokens) if group.window else NEVER
    return kinds[group.kind](group, alignment, cap)
