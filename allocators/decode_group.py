"""Running sequences that do nothing but decode, planned together: a step, or a leap of them, touches none of them.

::

    running     | A  B  C  D | E  F       A to D decode; E computes its prompt, so F behind it is planned by itself
    group         A  B  C  D              in running order; newcomers join at its end, anybody may leave
    counts        a member's num_tokens = what stands in it + lead

Only the front of the running sequences can be a group: blocks go out in running order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import overload

from hbmtwin.allocators.records import KVSequence


class DecodeGroup(Sequence[KVSequence]):
    """Sequences that compute one token each in every step, as one object for as long as the scheduler keeps them.

    **A member's own counts are short by** :attr:`lead`, until it leaves or :meth:`fold` tells all of them.
    Joining and leaving are O(log members), a step or a leap is O(1).
    """

    __slots__ = ("_ends", "_joins", "_steps", "context_tokens", "joined", "lead", "left", "members")

    def __init__(self) -> None:
        self.members: dict[int, KVSequence] = {}
        """By id, in running order; only this class writes it."""
        self.joined: list[KVSequence] = []
        """Who joined since the KV policy looked; it takes them out as it looks."""
        self.context_tokens = 0
        """Computed tokens of all members."""
        self.lead = 0
        """Steps that the members' own counts do not know of."""
        self.left = 0
        """How many have left: they had their last token."""
        self._steps = 0
        self._joins = 0
        self._ends: list[tuple[int, int, KVSequence]] = []
        """A heap of (step after which it has its last token, how many joined before it, itself)."""

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[KVSequence]:
        return iter(self.members.values())

    @overload
    def __getitem__(self, index: int) -> KVSequence: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[KVSequence]: ...

    def __getitem__(self, index: int | slice) -> KVSequence | Sequence[KVSequence]:
        return list(self.members.values())[index]

    @property
    def steps_left(self) -> int:
        """Steps after which the first of them has its last token. Raise IndexError if there is nobody. O(1)."""
        return self._ends[0][0] - self._steps

    def places(self, ending_within: int | None = None) -> list[tuple[int, KVSequence]]:
        """Members in running order, each with how many joined before it; only those that have their last token within
        so many steps, if asked for. O(members)."""
        last = None if ending_within is None else self._steps + ending_within
        return sorted([(joined, s) for end, joined, s in self._ends if last is None or end <= last], key=_first)

    def join(self, s: KVSequence, final_tokens: int) -> None:
        """Take one in at the end that has all but its last token computed, and will have *final_tokens*."""
        self.members[s.id] = s
        self.joined.append(s)
        self.context_tokens += s.num_computed_tokens
        self._joins += 1
        heappush(self._ends, (self._steps + final_tokens - s.num_tokens, self._joins, s))
        s.num_tokens -= self.lead
        s.num_computed_tokens -= self.lead

    def go(self, steps: int) -> list[KVSequence]:
        """Each computes and samples *steps* tokens; those that have their last one then leave, in running order.

        *steps* is at most :attr:`steps_left`. O(1), and O(log members) for each that leaves.
        """
        self.lead += steps
        self._steps += steps
        self.context_tokens += steps * len(self.members)
        ends, ended = self._ends, []
        while ends and ends[0][0] <= self._steps:
            s = heappop(ends)[2]
            del self.members[s.id]
            s.num_tokens += self.lead
            s.num_computed_tokens += self.lead
            self.context_tokens -= s.num_computed_tokens
            ended.append(s)
        self.left += len(ended)
        return ended

    def fold(self) -> None:
        """Tell the members of the steps that their counts do not know of. O(members), O(1) if there are none."""
        if self.lead:
            lead, self.lead = self.lead, 0
            for s in self.members.values():
                s.num_tokens += lead
                s.num_computed_tokens += lead


def _first(place: tuple[int, KVSequence]) -> int:
    return place[0]
