"""Mistakes for the policy of several groups to make on purpose, a rule each: a comparison must find them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from hbmtwin.allocators.group_managers import (
    NEVER,
    AlignedMambaManager,
    ChunkedManager,
    GroupManager,
    GroupTable,
    WindowManager,
)
from hbmtwin.allocators.group_pool import GroupPool, Held
from hbmtwin.allocators.paged_groups import PagedGroupsPolicy
from hbmtwin.allocators.records import Granted, KVSequence, Refused


class RunOfTheWholeWindow(WindowManager):
    """Asks for W cached tokens, where the next one needs W - 1."""

    @property
    def run(self) -> int:
        """A block more, where W - 1 is a whole number of blocks."""
        return -(-self.group.window // self.size)


class ForgetsOneTokenLate(WindowManager):
    """Keeps W tokens besides the next one."""

    def skipped_tokens(self, computed: int) -> int:
        """Without the + 1."""
        return max(0, computed - self.group.window)


class KeysOfEveryWindowBlock(WindowManager):
    """Gives keys to blocks that no look-up can use."""

    def keeps_key(self, index: int) -> bool:
        """Always."""
        return True


class ForgetsLowToHigh(WindowManager):
    """Frees what left the window from its start."""

    def forget(self, table: GroupTable, computed: int) -> list[list[int]]:
        """The other way round."""
        return [blocks[::-1] for blocks in super().forget(table, computed)]


class NeverFreesPrevious(AlignedMambaManager):
    """Keeps the state that the running one was copied from."""

    def forget(self, table: GroupTable, computed: int) -> list[list[int]]:
        """As other Mamba modes do."""
        previous, table.previous = table.previous, -1
        calls = super().forget(table, computed)
        table.previous = previous
        return calls


class ChunksAreLookedUp(ChunkedManager):
    """Asks for what lies before the present chunk, too."""

    def find(
        self, cached: Callable[[int], tuple[int, ...] | None], limit: int, nulls: tuple[int, ...]
    ) -> list[tuple[int, ...]]:
        """Up to the first miss anywhere."""
        found = super().find(cached, limit, nulls)
        misses = [index for index in range(len(found)) if cached(index) is None]
        return found[: misses[0]] if misses else found


class RegistersUnrounded(GroupPool):
    """Gives keys to blocks beyond what all groups together can find."""

    def register(self, s: KVSequence, held: Held, tokens: int) -> None:
        """As if blocks of all groups ended everywhere."""
        self.alignment, alignment = 1, self.alignment
        super().register(s, held, tokens)
        self.alignment = alignment


class FreesAllGroupsAtOnce(GroupPool):
    """Lets the blocks of all groups go in one call."""

    def release(self, held: Held) -> None:
        """The books still go by group."""
        blocks_of = [[block for block in reversed(table.blocks) if block] for table in held.tables]
        self.cache.put_back([block for blocks in blocks_of for block in blocks])
        for index, (table, blocks) in enumerate(zip(held.tables, blocks_of, strict=True)):
            self.nulls[index] -= len(table.blocks) - len(blocks)
            self._gone(index, blocks)


class FreesLowToHigh(GroupPool):
    """Lets the first block of a table go first."""

    def release(self, held: Held) -> None:
        """The other way round."""
        for table in held.tables:
            table.blocks.reverse()
        super().release(held)


class HitsStatesOfThisStep(GroupPool):
    """Adopts a state that is only promised."""

    def is_fresh(self, adopted: Sequence[Sequence[int]]) -> bool:
        """Never."""
        return False


class ForgetsOnSuccessOnly(PagedGroupsPolicy):
    """Takes back what was forgotten, where the check then refuses."""

    def reserve(self, s: KVSequence, new: int, **said: Any) -> Granted | Refused:
        """Tried on a copy first, of which nobody hears."""
        observer, self.on_cache_event = self.on_cache_event, None
        tried = super(ForgetsOnSuccessOnly, copy.deepcopy(self)).reserve(s, new, **said)
        self.on_cache_event = observer
        return tried if isinstance(tried, Refused) else super().reserve(s, new, **said)


def _no_cap(manager: GroupManager) -> None:
    manager.cap = NEVER


def _cap_of_aligned_windows(manager: GroupManager) -> None:
    """Without the + 1: a window need not start with a block."""
    manager.cap -= isinstance(manager, WindowManager)


CAPS: dict[str, Callable[[GroupManager], None]] = {"no-cap": _no_cap, "aligned-cap": _cap_of_aligned_windows}
PLANTED_GROUPS: dict[str, type[GroupManager] | type[GroupPool] | type[PagedGroupsPolicy] | None] = {
    "window-run": RunOfTheWholeWindow,
    "late-window": ForgetsOneTokenLate,
    "every-key": KeysOfEveryWindowBlock,
    "forget-forward": ForgetsLowToHigh,
    "previous": NeverFreesPrevious,
    "chunk-look-up": ChunksAreLookedUp,
    "unrounded": RegistersUnrounded,
    "one-call": FreesAllGroupsAtOnce,
    "free-forward": FreesLowToHigh,
    "same-step": HitsStatesOfThisStep,
    "forget-on-success": ForgetsOnSuccessOnly,
    **dict.fromkeys(CAPS),
}


def plant_groups(policy: PagedGroupsPolicy, name: str) -> None:
    """Make a new policy make the mistake called *name*; one of a kind of layers only where it has that kind."""
    mistaken = PLANTED_GROUPS[name]
    for manager in policy.pool.managers:
        if mistaken is None:
            CAPS[name](manager)
        elif issubclass(mistaken, GroupManager) and type(manager) is mistaken.__base__:
            manager.__class__ = mistaken
    if mistaken is not None and issubclass(mistaken, GroupPool):
        policy.pool.__class__ = mistaken
    elif mistaken is not None and issubclass(mistaken, PagedGroupsPolicy):
        policy.__class__ = mistaken
