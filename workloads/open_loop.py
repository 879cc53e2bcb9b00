"""Open traffic: sessions arrive whatever the server does; only the later turns of a session wait for it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hbmtwin.workloads.arrivals import CHUNK, Arrivals
from hbmtwin.workloads.conversations import Conversations
from hbmtwin.workloads.draws import IntArray
from hbmtwin.workloads.records import Request, Status, WorkloadError


class OpenLoop:
    """A :class:`~hbmtwin.workloads.records.Source` whose sessions open at ``arrivals.request_rate`` a second.

    ``num_prompts`` counts requests, all turns together: sessions open until their turns make that many, and the
    last session is cut to fit. So a server sees the request rate times the mean number of turns. When a turn is
    rejected or fails its session ends, and fewer requests are made. Keeps nothing but 8 bytes a session, so that
    it can be opened as often as one likes. Raise WorkloadError if *num_prompts* is below 1.
    """

    def __init__(self, conversations: Conversations, arrivals: Arrivals, *, num_prompts: int) -> None:
        if num_prompts < 1:
            raise WorkloadError(f"num_prompts must be at least 1, not {num_prompts}")
        self.conversations = conversations
        self.arrivals = arrivals
        self.total_requests: int | None = num_prompts
        self._first_ids = _first_ids(conversations, num_prompts)

    @property
    def num_sessions(self) -> int:
        """How many sessions open."""
        return len(self._first_ids) - 1

    def open(self) -> Iterator[Request]:
        """First turns in order of arrival. O(1) each, amortised."""
        first = 0
        for times_ns in self.arrivals.times_ns(self.conversations.seed, self.num_sessions):
            last = first + len(times_ns)
            ids = self._first_ids[first:last]
            yield from self.conversations.first_turns(
                np.arange(first, last, dtype=np.int64),
                ids=ids,
                arrivals_ns=times_ns,
                has_next=self._first_ids[first + 1 : last + 1] - ids - 1,
            )
            first = last

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        """The next turn, a think time after *r* ended; None after the last one, or if *r* was not completed."""
        if not r.has_next or status is not Status.COMPLETED:
            return None
        return self.conversations.following_turn(
            r,
            id=r.id + 1,
            arrival_ns=end_ns + self.conversations.think_ns(r.session, r.turn + 1),
            has_next=r.id + 2 < int(self._first_ids[r.session + 1]),
        )


def _first_ids(conversations: Conversations, num_prompts: int) -> IntArray:
    """Id of the first turn of each session, and behind the last session *num_prompts*."""
    chunks = [np.zeros(1, dtype=np.int64)]
    sessions, made = 0, 0
    while made < num_prompts:
        ids = np.arange(sessions, sessions + min(CHUNK, num_prompts - made), dtype=np.int64)
        chunk = np.minimum(made + np.cumsum(conversations.turn_counts(ids)), num_prompts)
        chunks.append(chunk)
        sessions, made = sessions + len(ids), int(chunk[-1])
    ids = np.concatenate(chunks)
    return ids[: int(np.searchsorted(ids, num_prompts)) + 1]
