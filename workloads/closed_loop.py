"""Closed traffic: a fixed number of users, each of whom sends its next request a think time after its last ended."""

from __future__ import annotations

from collections.abc import Iterator

from hbmtwin.workloads.conversations import Conversations
from hbmtwin.workloads.records import Request, Status, WorkloadError


class ClosedLoop:
    """A :class:`~hbmtwin.workloads.records.Source` of *users*, all of whom send their first request at time 0.

    ``num_prompts`` counts requests and is shared out: each user makes an equal part (the first ones one more where
    it does not divide), so that the traffic is the same under every policy, arrival times apart. A user goes
    through sessions of ``conversations.turns`` turns; the k-th session of user u is number u + k * users. When a
    turn is rejected or fails, the user gives that session up and opens the next. Keeps nothing. Raise
    WorkloadError if *users* or *num_prompts* is below 1.
    """

    def __init__(self, conversations: Conversations, *, users: int, num_prompts: int) -> None:
        for name, value in (("users", users), ("num_prompts", num_prompts)):
            if value < 1:
                raise WorkloadError(f"{name} must be at least 1, not {value}")
        self.conversations = conversations
        self.users = users
        self.total_requests: int | None = num_prompts
        self._num_prompts = num_prompts
        self._share, self._one_more = divmod(num_prompts, users)

    def open(self) -> Iterator[Request]:
        """The first request of each user, all at time 0. O(1) each."""
        for user in range(min(self.users, self._num_prompts)):  # others have no part in so few requests
            yield self._open_session(user, id=self._first_id(user), arrival_ns=0)

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        """The next request of *r*'s user: the next turn, or a new session; None once its part is made."""
        id = r.id + 1
        if status is Status.UNFINISHED or id >= self._end_id(r.session):
            return None
        if status is not Status.COMPLETED or not r.has_next:
            session = r.session + self.users
            return self._open_session(session, id=id, arrival_ns=end_ns + self.conversations.think_ns(session, 0))
        return self.conversations.following_turn(
            r,
            id=id,
            arrival_ns=end_ns + self.conversations.think_ns(r.session, r.turn + 1),
            has_next=self._has_next(r.session, r.turn + 1, id),
        )

    def _open_session(self, session: int, *, id: int, arrival_ns: int) -> Request:
        has_next = self._has_next(session, 0, id)
        return self.conversations.first_turn(session, id=id, arrival_ns=arrival_ns, has_next=has_next)

    def _has_next(self, session: int, turn: int, id: int) -> bool:
        return id + 1 < self._end_id(session) and turn + 1 < self.conversations.turn_count(session)

    def _first_id(self, user: int) -> int:
        return user * self._share + min(user, self._one_more)

    def _end_id(self, session: int) -> int:
        return self._first_id(session % self.users + 1)
