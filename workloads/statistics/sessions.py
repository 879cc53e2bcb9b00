"""Sessions measured in one pass: how many turns they have, how long users wait between two, and who sends how much.

A request of turn t says that its session has t + 1 turns or more, so a count for each turn is enough:

    requests of turn     0    1    2            sessions of 1 turn: 10 - 4 = 6, of 2: 4 - 1 = 3, of 3: 1
                        10    4    1

Gaps need the last arrival of each session that may go on; nothing is kept for the others.
Where a trace records no sessions but tells which prompts begin alike, :class:`SessionFinder` makes them out.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

_GAP_BITS: Final = 12


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Turns of sessions, and the time between their arrivals."""

    inferred: bool
    """Made out from prompts that begin with whole earlier ones, as the trace records no sessions."""
    sessions: int
    turns_mean: float
    turns_p50: float
    turns_p95: float
    turns_most: int
    turn_mean: float
    """Mean over *requests* of the turn they are, from 1: long sessions weigh more here."""
    turn_p95: float
    later_turns_share: float
    """Share of the requests that are no first turn."""
    gap_mean_s: float | None
    """From the arrival of one turn to that of the next; None where none is known."""
    gap_p50_s: float | None
    """Quantiles of gaps are right to 1 / 4096."""
    gap_p95_s: float | None


@dataclass(frozen=True, slots=True)
class TenantStatistics:
    """How unequal the clients are."""

    tenants: int
    top_1: float
    """Share of the requests of the one with the most."""
    top_10: float
    make_90_percent: int
    """How many of the largest send nine tenths of the requests."""


def tenant_statistics(counted: Mapping[int, int]) -> TenantStatistics | None:
    """From the requests of each tenant; None where there are not two."""
    if len(counted) < 2:
        return None
    held = sorted(counted.values(), reverse=True)
    up_to = np.cumsum(held)
    n = int(up_to[-1])
    make = int(np.searchsorted(10 * up_to, 9 * n)) + 1
    return TenantStatistics(len(held), held[0] / n, int(up_to[min(10, len(held)) - 1]) / n, make)


class SessionMeter:
    """Takes turns in order of arrival. O(1) a turn; memory: the turns of the longest session, and one time for each
    session that may go on."""

    def __init__(self) -> None:
        self._turns: list[int] = []
        self._last_ns: dict[int, int] = {}
        self._gaps: dict[int, int] = {}
        self._gap_count = 0
        self._gap_ns = 0

    def add(self, session: int, turn: int, arrival_ns: int, may_go_on: bool) -> None:
        """One more request, of *turn* from 0."""
        while len(self._turns) <= turn:
            self._turns.append(0)
        self._turns[turn] += 1
        before_ns = self._last_ns.pop(session, None)
        if before_ns is not None and turn:
            self.add_gap(arrival_ns - before_ns)
        if may_go_on:
            self._last_ns[session] = arrival_ns

    def add_gap(self, gap_ns: int) -> None:
        """The time between two turns of a session."""
        self._gap_count += 1
        self._gap_ns += gap_ns
        low = max(0, gap_ns.bit_length() - _GAP_BITS)
        key = (gap_ns >> low << low) + (1 << low) // 2  # the middle of those with the same leading bits
        self._gaps[key] = self._gaps.get(key, 0) + 1

    @property
    def has_turns(self) -> bool:
        """Whether a session has more than one turn."""
        return len(self._turns) > 1

    def statistics(self, *, inferred: bool) -> SessionStatistics:
        """Of all requests so far; at least one."""
        at_least = [*self._turns, 0]
        sessions = at_least[0]
        requests = sum(at_least)
        turns = {t + 1: n - more for t, (n, more) in enumerate(pairwise(at_least)) if n > more}
        turn_of = {t + 1: n for t, n in enumerate(self._turns)}
        gaps = [quantile(self._gaps, q) / 1e9 if self._gap_count else None for q in (0.5, 0.95)]
        return SessionStatistics(
            inferred=inferred,
            sessions=sessions,
            turns_mean=requests / sessions,
            turns_p50=quantile(turns, 0.5),
            turns_p95=quantile(turns, 0.95),
            turns_most=len(self._turns),
            turn_mean=sum(turn * n for turn, n in turn_of.items()) / requests,
            turn_p95=quantile(turn_of, 0.95),
            later_turns_share=1 - sessions / requests,
            gap_mean_s=self._gap_ns / self._gap_count / 1e9 if self._gap_count else None,
            gap_p50_s=gaps[0],
            gap_p95_s=gaps[1],
        )


def quantile(counted: Mapping[int, int], q: float) -> float:
    """The *q*-quantile of values that occur so many times each, straight lines between two. O(values log values)."""
    values = sorted(counted)
    up_to = np.cumsum([counted[value] for value in values])
    place = q * (int(up_to[-1]) - 1)
    low, high = (values[int(np.searchsorted(up_to, rank, side="right"))] for rank in (int(place), -int(-place // 1)))
    return low + (place - int(place)) * (high - low)


class SessionFinder:
    """Makes out sessions from chains of blocks: a turn begins with the whole prompt of the turn before it.

    A prompt's last block may be a partial one, which the next turn fills up, so it is left out. A request is the next
    turn of the latest request whose remaining blocks, the longest such run, are at least two and are how its own chain
    begins; one block in common may be the system prompt. Memory: one entry a request.
    """

    def __init__(self) -> None:
        self._ends: dict[Hashable, tuple[int, int]] = {}
        self._meter = SessionMeter()

    def add(self, chain: Sequence[Hashable], arrival_ns: int) -> None:
        """One more request, in order of arrival. O(blocks)."""
        turn = 0
        for block in reversed(chain[1:]):
            before = self._ends.get(block)
            if before is not None:
                turn = before[0] + 1
                self._meter.add_gap(arrival_ns - before[1])
                break
        self._meter.add(0, turn, arrival_ns, False)
        if len(chain) > 2:
            self._ends[chain[-2]] = (turn, arrival_ns)

    def add_private(self) -> None:
        """One more request, which begins as no other does."""
        self._meter.add(0, 0, 0, False)

    def statistics(self) -> SessionStatistics | None:
        """None where no request is a later turn."""
        return self._meter.statistics(inferred=True) if self._meter.has_turns else None
