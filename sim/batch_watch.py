"""Whether a step computes for others than the one before it: a row of the timeline stands on both sides of that.

::

    plan      group        one by one          compared as
    before    | A  B  C |  E:512               3 members, none has left, nothing single, [(E, 512)]
    now       | A  B  C |  E:512               the same
    next      | A  B  C    E |                 5 <> 3 members: E has joined

Two plans are alike if they compute one token for the same sequences in the same order, and as many for the others. Most
that differ do so in a number; ids of members, of which there may be hundreds, are compared only where no number tells.
"""

from __future__ import annotations

from itertools import islice

from hbmtwin.allocators.decode_group import DecodeGroup
from hbmtwin.sim.scheduler import Plan


class BatchWatch:
    """Remembers the last plan by numbers; its group changes with the steps that follow."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """The next plan is unlike any other."""
        self._group: DecodeGroup | None = None
        self._members = self._left = -1
        self._single: list[int] = []
        self._several: list[tuple[int, int]] = []

    def changed(self, plan: Plan) -> bool:
        """Compare with the plan before. O(those behind the group); O(members) where one joined for whom one token was
        computed already, or the group was broken up."""
        group, old = plan.group, self._group
        members, left = (0, 0) if group is None else (len(group.members), group.left)
        single: list[int] = []
        several: list[tuple[int, int]] = []
        for s, new in plan.scheduled:
            if new == 1:
                single.append(s.id)
            elif new > 1:
                several.append((s.id, new))
        changed = (
            several != self._several
            or members + len(single) != self._members + len(self._single)
            or (old is not None and old.left != self._left)  # who has had its last token is in no later plan
        )
        if not changed:
            if group is old and members == self._members:
                changed = single != self._single
            else:  # nobody has left the old group, and who joined stands behind
                before = [*islice(() if old is None else old.members, self._members), *self._single]
                changed = before != [*(() if group is None else group.members), *single]
        self._group, self._members, self._left = group, members, left
        self._single, self._several = single, several
        return changed
