"""Open traffic as a sum of clients of unequal rate, each with its own gaps and lengths (ServeGen's model).

::

    client 0   . . .  .    . .   .      sessions 0, 1, 2, ...                  tenant 0
    client 1      ....         ...      sessions 2^32, 2^32 + 1, ...           tenant 1
    merged     . .....  .  . . ...      ids in order of arrival, as many turns as there are prompts

One stream with pooled lengths loses the bursts of the largest clients, and with them what memory has to bear. Draws
are keyed by a client's place in the list: a client that is added behind moves no other's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

import numpy as np

from hbmtwin.workloads import draws
from hbmtwin.workloads.arrivals import CHUNK, Arrivals
from hbmtwin.workloads.conversations import CLIENT_SESSIONS, Conversations
from hbmtwin.workloads.draws import Purpose
from hbmtwin.workloads.records import Request, Status, WorkloadError

_LEAST_CHUNK = 64
_DRAWN = 8 * CHUNK
"""Sessions of all clients that are drawn ahead of their arrival, some 30 MiB."""
_AHEAD_S = 2**60 / 1e9
"""A quarter of what the clock holds: sessions of a client that seldom comes are drawn ahead for so long at most."""


@dataclass(frozen=True, slots=True)
class Client:
    """When one client's sessions arrive, and what is said in them."""

    arrivals: Arrivals
    conversations: Conversations


class Clients:
    """A :class:`~hbmtwin.workloads.records.Source` of *clients*, merged in order of arrival; ties go to the first.

    ``num_prompts`` counts requests, all turns together: sessions open until their turns make that many, and the last
    session is cut to fit. When a turn is rejected or fails its session ends. Keeps a few arrays a client. Raise
    WorkloadError without clients, for a rate that is no rate of its own, or if *num_prompts* is below 1.
    """

    def __init__(self, clients: Sequence[Client], *, num_prompts: int, seed: int = 0) -> None:
        if not clients:
            raise WorkloadError("give one client or more")
        if num_prompts < 1:
            raise WorkloadError(f"num_prompts must be at least 1, not {num_prompts}")
        if num_prompts > CLIENT_SESSIONS:
            raise WorkloadError(f"num_prompts of clients is up to 2^32, not {num_prompts}")
        for client in clients:
            if math.isinf(client.arrivals.request_rate) or client.arrivals.rescale_gaps:
                raise WorkloadError("a client has a finite request_rate, and neither a ramp nor rescale_gaps")
        self.clients = tuple(clients)
        self.seed = seed
        self.total_requests: int | None = num_prompts
        self._num_prompts = num_prompts

    def open(self) -> Iterator[Request]:
        """First turns in order of arrival. O(log clients) each."""
        id, end = 0, self._num_prompts
        for _, _, turns, r in merge(*map(self._first_turns, range(len(self.clients)))):
            yield r._replace(id=id, has_next=turns > 1 and id + 1 < end)
            id += turns
            if id >= end:
                return

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        """The next turn, a think time after *r* ended; None after the last one, or if *r* was not completed."""
        if status is not Status.COMPLETED or not r.has_next:
            return None
        said = self.clients[r.session // CLIENT_SESSIONS].conversations
        return said.following_turn(
            r,
            id=r.id + 1,
            arrival_ns=end_ns + said.think_ns(r.session, r.turn + 1),
            has_next=r.turn + 2 < said.turn_count(r.session) and r.id + 2 < self._num_prompts,
        )

    def _first_turns(self, client: int) -> Iterator[tuple[int, int, int, Request]]:
        """``(arrival, client, turns, first turn)`` of one client; ids are not yet known."""
        arrivals, said = self.clients[client].arrivals, self.clients[client].conversations
        seed = draws.bits(self.seed, Purpose.CLIENT, client, 0)
        chunk = min(max(_DRAWN // len(self.clients), _LEAST_CHUNK), CHUNK)
        chunk = max(1, min(chunk, int(arrivals.request_rate * _AHEAD_S)))
        first = client * CLIENT_SESSIONS
        for times_ns in arrivals.times_ns(seed, self._num_prompts, chunk=chunk):  # a session has a turn at least
            sessions = np.arange(first, first + len(times_ns), dtype=np.int64)
            first += len(times_ns)
            turns = said.turn_counts(sessions)
            requests = said.first_turns(sessions, ids=sessions, arrivals_ns=times_ns, has_next=turns - 1)
            for r, count in zip(requests, turns.tolist(), strict=True):
                yield r.arrival_ns, client, count, r
