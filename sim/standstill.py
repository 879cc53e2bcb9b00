"""A run that would never end: who is in it, since when, and why nothing can change any more.

::

    pool of 10 blocks; a scheduler under which the newcomer takes the memory of the first

    A computes its prompt    A 6, B 0      |
    B is admitted, A gives way    B 6      |  nobody samples a token, nobody ends, and this state was there before:
    A is admitted, B gives way    A 6      v  a deterministic server does the same again, for ever

**Live-lock**: steps in which somebody gave way and nobody sampled a token, and which leave everyone who ever ran with
the same tokens, computed tokens and place as before. Proof by recurrence: such a state that comes :data:`RECURRENCES`
times more (a pool may remember what was in it, so once is not enough), with no token in between, comes for ever; a
request that arrives later could but join it. A server that preempts and still samples is slow, not locked, however
little gets done (:mod:`hbmtwin.sim.recompute` tells by how much); its states never recur, as tokens are never lost.

**Deadlock**: requests run or wait, the scheduler plans nothing for them, and nothing is to come.

None of the schedulers here can live-lock while a pool holds the longest request: each preempts those behind one that it
lets go on (the last admitted, by arrival, by priority, or with the fewest tokens), and that one samples. It is for
schedulers and policies that are being tried out, where it is the first thing to go wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from hbmtwin.sim.scheduler import Plan, Scheduler, Unfinished

RECURRENCES = 3
"""How often the same state must come back."""

State = tuple[int, tuple[tuple[int, int, int], ...]]
"""How many run; id, tokens and computed tokens of everyone who has run, running ones first, in order."""


class Standstill(NamedTuple):
    """Why a run was stopped."""

    kind: Literal["live_lock", "deadlock"]
    time_ns: int
    since_ns: int
    """When the state that came back was first seen."""
    preemptions: int
    """Since then."""
    requests: tuple[int, ...]
    """Ids of those who run, give way and come back; of a deadlock, of those who run or wait."""
    tokens: int
    """Of these at full length, prompt and max_tokens, all together: with room for so many all of them would go on."""

    def to_dict(self, token_bytes: int, pool_bytes: int) -> dict[str, Any]:
        """The record of the summary, with the KV of ``tokens`` and the pool's; of many requests the first hundred."""
        return {
            "kind": self.kind,
            "time_s": self.time_ns / 1e9,
            "since_s": self.since_ns / 1e9,
            "preemptions": self.preemptions,
            "num_requests": len(self.requests),
            "requests": list(self.requests[:100]),
            "tokens": self.tokens,
            "kv_bytes": self.tokens * token_bytes,
            "kv_pool_bytes": pool_bytes,
        }


class LiveLockWatch:
    """Told of every step in which somebody gave way; knows when such steps go round in a circle.

    O(1) for a step that samples a token as well, as all do that only run short; else O(running + waiting).
    """

    def __init__(self) -> None:
        self._seen: dict[State, int] = {}
        self._tokens: dict[int, int] = {}
        self._since_ns = 0
        self._preemptions = 0

    def gave_way(self, plan: Plan | None, count: int, scheduler: Scheduler, now_ns: int) -> Standstill | None:
        """Note a step in which *count* sequences gave way, planned but not committed; None: it failed altogether.

        Return the live-lock that it is part of, if it is.
        """
        if plan is not None and _samples(plan):
            self._seen.clear()
            return None
        there = [u for u in scheduler.unfinished() if u.sequence.num_computed_tokens or u.sequence.lost_tokens]
        tokens = {u.sequence.id: u.sequence.num_tokens for u in there}
        if not self._seen or tokens != self._tokens:  # somebody sampled, ended, or ran for the first time
            self._seen.clear()
            self._tokens, self._since_ns, self._preemptions = tokens, now_ns, 0
        self._preemptions += count
        sequences = tuple((u.sequence.id, u.sequence.num_tokens, u.sequence.num_computed_tokens) for u in there)
        state = scheduler.num_running, sequences
        self._seen[state] = self._seen.get(state, -1) + 1
        if self._seen[state] < RECURRENCES:
            return None
        return Standstill(
            kind="live_lock",
            time_ns=now_ns,
            since_ns=self._since_ns,
            preemptions=self._preemptions,
            requests=tuple(sorted(tokens)),
            tokens=sum(u.sequence.max_tokens for u in there),
        )


def deadlock(unfinished: Iterable[Unfinished], now_ns: int) -> Standstill:
    """The end of a run in which nothing is to come, with requests that nobody plans anything for."""
    there = [u.sequence for u in unfinished]
    return Standstill(
        kind="deadlock",
        time_ns=now_ns,
        since_ns=now_ns,
        preemptions=0,
        requests=tuple(s.id for s in there),
        tokens=sum(s.max_tokens for s in there),
    )


def _samples(plan: Plan) -> bool:
    """Whether somebody gets a token by a step. O(1) if somebody decodes, as a rule."""
    return bool(plan.decodes or plan.forked) or any(
        s.num_computed_tokens + new >= s.num_tokens for s, new in plan.scheduled
    )
