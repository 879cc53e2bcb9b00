"""Parked histories: the KV of conversations that wait for their next turn, and how much of one a turn finds.

::

    turn 1  | system | a0 | answer 0 |                  parked under its session: buffers, and which tokens they hold
    turn 2  | system | a0 | answer 0 | a1 |             finds three pieces; the common prefix ends where they differ

A history of which tokens were dropped (:mod:`hbmtwin.allocators.retention`) serves a turn that goes on with all of it,
the dropped ones included, and no other: what an earlier point of the conversation would need is gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hbmtwin.allocators.buffers import Buffers
from hbmtwin.allocators.records import KVSequence, Span


class History(NamedTuple):
    """A parked conversation: buffers of a turn that ended, and which tokens they hold."""

    buffers: Buffers
    spans: tuple[Span, ...]
    """At least the tokens that were computed; often the last answer's end as well, not computed yet."""

    @property
    def tokens(self) -> int:
        """Tokens that are in the buffers."""
        return self.buffers.filled

    @property
    def dropped(self) -> int:
        """Tokens that were computed and are in the buffers no longer."""
        return self.buffers.dropped

    @property
    def computed(self) -> int:
        """Both: the first ones of ``spans``."""
        return self.buffers.filled + self.buffers.dropped

    def usable(self, tokens: int) -> int:
        """How many of its first *tokens* a turn that begins with just those may take over."""
        if self.dropped and tokens < self.computed:
            return 0
        return min(tokens, self.computed)


class ParkedHistories:
    """At most one history per session, least recently parked first, and the books over them.

    Frees nothing: what is taken out is the caller's. All verbs are O(1) but :meth:`lookup` and :meth:`check`.
    """

    def __init__(self) -> None:
        self._by_session: dict[int, History] = {}
        self.tokens = 0
        self.dropped_tokens = 0
        self.held_bytes = 0

    def __len__(self) -> int:
        """How many sessions have one."""
        return len(self._by_session)

    def __contains__(self, session: int) -> bool:
        """Whether the session has one."""
        return session in self._by_session

    def sessions(self) -> tuple[int, ...]:
        """Sessions with a history, least recently parked first. O(sessions)."""
        return tuple(self._by_session)

    def buffers(self) -> list[Buffers]:
        """The buffers of all histories, in the same order. O(sessions)."""
        return [history.buffers for history in self._by_session.values()]

    def usable(self, session: int, tokens: int) -> int:
        """:meth:`History.usable` of the session's history, 0 if there is none."""
        history = self._by_session.get(session)
        return 0 if history is None else history.usable(tokens)

    def held_bytes_of(self, session: int) -> int:
        """Bytes of the buffers of the session's history, 0 if there is none."""
        history = self._by_session.get(session)
        return 0 if history is None else history.buffers.held_bytes

    def lookup(self, s: KVSequence) -> int:
        """Tokens of the session's history that *s* need not compute, at most ``s.num_tokens - 1``. O(spans)."""
        history = self._by_session.get(s.session)
        if history is None:
            return 0
        return history.usable(min(common_prefix(history.spans, s.spans), s.num_tokens - 1))

    def park(self, session: int, history: History) -> None:
        """Keep a history as the most recent one. Raise ValueError if the session has one already."""
        if session in self._by_session:
            raise ValueError(f"session {session} has a parked history already; unpark it first")
        self._by_session[session] = history
        self.tokens += history.tokens
        self.dropped_tokens += history.dropped
        self.held_bytes += history.buffers.held_bytes

    def unpark(self, session: int) -> History:
        """Take the session's history out. Raise KeyError if there is none."""
        history = self._by_session.pop(session)
        self.tokens -= history.tokens
        self.dropped_tokens -= history.dropped
        self.held_bytes -= history.buffers.held_bytes
        return history

    def check(self) -> None:
        """Assert the books against the histories. O(sessions)."""
        assert self.tokens == sum(history.tokens for history in self._by_session.values())
        assert self.dropped_tokens == sum(history.dropped for history in self._by_session.values())
        assert self.held_bytes == sum(history.buffers.held_bytes for history in self._by_session.values())


def common_prefix(a: Sequence[Span], b: Sequence[Span]) -> int:
    """Tokens that two span lists begin with in common, however their pieces are cut. O(pieces)."""
    common, i, j, used_a, used_b = 0, 0, 0, 0, 0
    while i < len(a) and j < len(b):
        (stream_a, start_a, length_a), (stream_b, start_b, length_b) = a[i], b[j]
        if (stream_a, start_a + used_a) != (stream_b, start_b + used_b):
            break
        same = min(length_a - used_a, length_b - used_b)
        common, used_a, used_b = common + same, used_a + same, used_b + same
        if used_a == length_a:
            i, used_a = i + 1, 0
        if used_b == length_b:
            j, used_b = j + 1, 0
    return common
