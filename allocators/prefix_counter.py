"""When a request counts in the prefix statistics: vLLM's releases differ.

::

    0.18, 0.22    every look-up, that of a request which is then refused again and again among them
    0.27          every admission

Requests that were preempted before stand apart, and are left out of the hit rate, in all of them.
"""

from __future__ import annotations

from hbmtwin.allocators.prefix_cache import PrefixStats
from hbmtwin.allocators.records import KVSequence


class PrefixCounter:
    """Counts for one policy. Each verb is O(1)."""

    def __init__(self, *, at_look_up: bool) -> None:
        self.at_look_up = at_look_up
        self.stats = PrefixStats()
        self._before_step = self.stats
        self._preempted: set[int] = set()

    def looked_up(self, s: KVSequence, hit: int) -> None:
        """*hit* tokens of *s* were found; whatever becomes of the step, they were asked for."""
        if self.at_look_up:
            self._count(s, hit)
            self._before_step = self.stats

    def admitted(self, s: KVSequence, hit: int) -> None:
        """*s* begins to run with *hit* tokens."""
        if not self.at_look_up:
            self._count(s, hit)

    def preempted(self, s: KVSequence) -> None:
        """It will come again."""
        self._preempted.add(s.id)

    def gone(self, s: KVSequence) -> None:
        """It will not."""
        self._preempted.discard(s.id)

    def end_step(self) -> None:
        """The step's admissions stand."""
        self._before_step = self.stats

    def abort_step(self) -> None:
        """Nobody was admitted in this step."""
        self.stats = self._before_step

    def _count(self, s: KVSequence, hit: int) -> None:
        self.stats = self.stats.with_request(s.num_tokens, hit, preempted=s.id in self._preempted)
