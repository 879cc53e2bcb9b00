"""Work that preemptions undid: tokens that were computed, and those of them that a request had had before.

::

    a request's stays in the batch        computed       lost at its end       found again (prefix cache)
    1  admitted with hit 0, preempted     0 .. 1,000     1,000
    2  admitted with hit 896, preempted   896 .. 1,016   1,016                 896: 104 of 120 are computed again
    3  admitted with hit 0, ended         0 .. 1,200                           0: 1,016 of 1,200 are computed again

    computed_tokens    1,000 + 120 + 1,200 = 2,320
    recomputed_tokens  104 + 1,016 = 1,120

What a request has had and does not find is counted when it comes back, and taken back if it does not get there again.

A server *thrashes* in a minute in which at least half of what it computed had been computed before, for ten requests
that came back or more: it still gets on, but the better part of its time goes into undoing preemptions. A live-lock
(:mod:`hbmtwin.sim.standstill`) is more: nobody gets on at all.

Each verb is O(1), and none is called for a step or a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hbmtwin.allocators.records import KVSequence

WINDOW_S = 60
"""Simulated time over which shares are judged: long enough that one long prompt which comes back does not decide."""
_WINDOW_NS = WINDOW_S * 10**9
THRASHING_SHARE = 0.5
"""From here on the server computes more to get back to where it was than to get on."""
THRASHING_RETURNS = 10
"""A minute of fewer preempted requests that come back is no verdict: it may be one long prompt in an idle server."""


class RecomputeCounter:
    """The books of a run: what was computed in all, and again, minute by minute once somebody was preempted."""

    def __init__(self) -> None:
        self.recomputed_tokens = 0
        self._reached: dict[int, int] = {}
        """By id: the most tokens that a request had in memory, once it was preempted and until it ends."""
        self._gone = 0
        """Computed tokens of sequences that do not run any more, less those that running ones found in memory."""
        self._counted = -1
        """Computed tokens in all when they were last added to a window; -1: nobody was preempted yet."""
        self._windows: dict[int, list[int]] = {}
        """By number: tokens computed in it, those of them that had been computed before, and who came back for that."""
        self._number, self._window_now = -1, [0, 0, 0]
        """The window of the last moment."""

    def computed_tokens(self, running_tokens: int) -> int:
        """All that was computed so far, given what running sequences hold."""
        return max(0, self._gone + running_tokens)

    def admitted(self, s: KVSequence, hit: int, now_ns: int, running_tokens: int) -> None:
        """A sequence begins to run with *hit* tokens found; one that was preempted computes anew what it lost."""
        self._gone -= hit
        if (again := self._reached.get(s.id, 0) - hit) > 0:
            self.recomputed_tokens += again
            window = self._window(now_ns, running_tokens)
            window[1] += again
            window[2] += 1

    def preempted(self, s: KVSequence, now_ns: int, running_tokens: int) -> None:
        """A sequence lost its KV; one that was swapped out did not."""
        if s.num_computed_tokens:
            return
        self._gone += s.lost_tokens
        self._take_back(s.id, s.lost_tokens, self._window(now_ns, running_tokens))
        self._reached[s.id] = max(self._reached.get(s.id, 0), s.lost_tokens)

    def ended(self, s: KVSequence, most_tokens: int, now_ns: int, running_tokens: int) -> None:
        """A sequence that ran is done, or gives up, with *most_tokens* of its own at most."""
        computed = s.num_computed_tokens
        if computed > most_tokens:
            computed = most_tokens
        self._gone += computed
        if self._counted >= 0:
            window = self._window(now_ns, running_tokens)
            if s.id in self._reached:
                if computed:  # else it ended while it waited: none of it was to be computed again
                    self._take_back(s.id, computed, window)
                del self._reached[s.id]

    def _take_back(self, id: int, computed: int, window: list[int]) -> None:
        """Of one that leaves before it is back where it was, what it has not computed again."""
        if (missing := self._reached.get(id, 0) - computed) > 0:
            self.recomputed_tokens -= missing
            window[1] -= missing

    def _window(self, now_ns: int, running_tokens: int) -> list[int]:
        """The window of this moment, with all in it that was computed since the last one of the same kind."""
        if (number := now_ns // _WINDOW_NS) != self._number:
            self._number, self._window_now = number, self._windows.setdefault(number, [0, 0, 0])
        window, computed = self._window_now, self.computed_tokens(running_tokens)
        if computed > self._counted:
            if self._counted >= 0:
                window[0] += computed - self._counted
            self._counted = computed
        return window

    def summary(self, running_tokens: int, unfinished: Iterable[KVSequence] = ()) -> dict[str, Any]:
        """Keys of the summary: tokens computed and recomputed, their share, and the minutes of thrashing.

        *unfinished* are those that the end of the run cut off.
        """
        running = (s for s in unfinished if s.num_computed_tokens)
        missing = sum(max(0, self._reached.get(s.id, 0) - s.num_computed_tokens) for s in running)
        computed, again = self.computed_tokens(running_tokens), self.recomputed_tokens - missing
        return {
            "computed_tokens": computed,
            "recomputed_tokens": again,
            "recomputed_share": again / computed if computed else None,
            "thrashing": self._thrashing(),
        }

    def _thrashing(self) -> dict[str, Any] | None:
        over = {
            number: min(1.0, again / max(1, computed))
            for number, (computed, again, returns) in self._windows.items()
            if returns >= THRASHING_RETURNS and again >= THRASHING_SHARE * computed
        }
        if not over:
            return None
        worst = max(sorted(over), key=lambda number: over[number])
        return {
            "minutes": len(over),
            "first_s": min(over) * WINDOW_S,
            "worst_s": worst * WINDOW_S,
            "worst_share": over[worst],
        }
