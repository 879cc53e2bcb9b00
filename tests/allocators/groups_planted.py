"""Mistakes for the naive model of groups to make on purpose, a rule each: a comparison that meets one must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hbmtwin.allocators.kv_groups import KVGroup
from hbmtwin.allocators.records import KVSequence, Release

from .groups_model import Held, Hits, NaiveGroups, blocks_for


class RunOfTheWholeWindow(NaiveGroups):
    """W for W - 1."""

    def run(self, group: KVGroup) -> int:
        return blocks_for(group.window, group.block_size)


class ForgetsOneTokenLate(NaiveGroups):
    """No + 1 in S(c)."""

    def skipped(self, group: KVGroup, computed: int) -> int:
        if group.kind == "sliding_window":
            return max(0, computed - group.window)
        return super().skipped(group, computed)


class ForgetsOnSuccessOnly(NaiveGroups):
    """A refusal takes back what was forgotten before the check."""

    def reserve(self, s: KVSequence, new: int, **said: Any) -> bool:
        queue, refs = list(self.free), list(self.refs)
        tables = [list(held.table) for held in self.of(s)]
        granted = super().reserve(s, new, **said)
        if not granted:
            self.free, self.refs = queue, refs
            for held, table in zip(self.of(s), tables, strict=True):
                held.table = table
        return granted


class NoCap(NaiveGroups):
    def cap(self, group: KVGroup) -> int | None:
        return None


class CapOfAlignedWindows(NaiveGroups):
    """No + 1 in the cap of windows."""

    def cap(self, group: KVGroup) -> int | None:
        cap = super().cap(group)
        return cap - 1 if cap is not None and group.kind == "sliding_window" else cap


class CapOfTheWindowAlone(NaiveGroups):
    """Forgets the tokens of a step in the caps."""

    def batched(self) -> int:
        return 0


class KeysOfEveryWindowBlock(NaiveGroups):
    def keeps_key(self, group: KVGroup, index: int) -> bool:
        return True


class RegistersUnrounded(NaiveGroups):
    def rounded(self, tokens: int) -> int:
        return tokens


class ForgetsLowToHigh(NaiveGroups):
    def put_back(self, blocks: list[int]) -> None:
        super().put_back(blocks[::-1] if self.forgetting else blocks)

    forgetting = False

    def forget(self, g: int, held: Held, computed: int) -> None:
        self.forgetting = True
        super().forget(g, held, computed)
        self.forgetting = False


class FreesLowToHigh(NaiveGroups):
    def release(self, s: KVSequence, why: Release = Release.FINISH) -> None:
        for held in self.held.get(s.id, []):
            held.table.reverse()
        super().release(s, why)


class FreesAllGroupsAtOnce(NaiveGroups):
    def release(self, s: KVSequence, why: Release = Release.FINISH) -> None:
        blocks = [block for held in self.held.pop(s.id, []) for block in held.table[::-1]]
        super().release(s, why)
        self.put_back(blocks)


class FreesInReverseOrderOfGroups(NaiveGroups):
    def release(self, s: KVSequence, why: Release = Release.FINISH) -> None:
        if s.id in self.held:
            self.held[s.id].reverse()
        super().release(s, why)


class HitsStatesOfThisStep(NaiveGroups):
    """No same-step rule."""

    def just_registered(self, s: KVSequence, g: int, hits: list[int]) -> bool:
        return False


class NeverFreesPrev(NaiveGroups):
    def forget_prev(self, group: KVGroup, held: Held, computed: int) -> None:
        pass


class ChunksAreLookedUp(NaiveGroups):
    """What lies before the current chunk must be cached too."""

    def find_in_class(
        self, group: KVGroup, cached: Callable[[int], list[int] | None], limit: int
    ) -> list[list[int] | None]:
        found = super().find_in_class(group, cached, limit)
        if group.kind == "chunked_local":
            for index in range(len(found)):
                if not cached(index):
                    return found[:index]
        return found


class OnePassOverTheGroups(NaiveGroups):
    """Looks every class up once, though a later one may shorten what an earlier one said."""

    def find(self, s: KVSequence) -> tuple[Hits, int]:
        classes = self.classes
        self.classes = [*classes[:1], *classes[1:2]]
        hits, length = super().find(s)
        self.classes = classes
        return hits, length


WINDOW, CHUNKED, MAMBA = "window", "chunked", "mamba"
MISTAKES: dict[type[NaiveGroups], str] = {
    RunOfTheWholeWindow: WINDOW,
    ForgetsOneTokenLate: WINDOW,
    ForgetsOnSuccessOnly: WINDOW,
    NoCap: CHUNKED,
    CapOfAlignedWindows: WINDOW,
    CapOfTheWindowAlone: WINDOW,
    KeysOfEveryWindowBlock: WINDOW,
    RegistersUnrounded: WINDOW,
    ForgetsLowToHigh: WINDOW,
    FreesLowToHigh: CHUNKED,
    FreesAllGroupsAtOnce: MAMBA,
    FreesInReverseOrderOfGroups: CHUNKED,
    HitsStatesOfThisStep: MAMBA,
    NeverFreesPrev: MAMBA,
    ChunksAreLookedUp: CHUNKED,
    OnePassOverTheGroups: WINDOW,
}
"""Each mistake, and the kind of pools that shows it."""
