"""What is said in sessions: how many turns, how long, and which tokens; not when.

::

    | system prompt | tenant's | prefix of a group | user, turn 0 | answer | user, turn 1 | ...
      all share it    its sessions do   its group does   new, or one of so many distinct prompts

Everything is keyed by (session, turn), so it is the same under every policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hbmtwin.workloads.drawn_ahead import DrawnAhead
from hbmtwin.workloads.draws import IntArray, Purpose
from hbmtwin.workloads.lengths import MAX_TOKENS, Fixed, Length, tokens_many
from hbmtwin.workloads.prefixes import Prefixes
from hbmtwin.workloads.records import Request, Span, WorkloadError, merge_spans, output_stream, user_stream
from hbmtwin.workloads.think_times import ConstantTime, ThinkTime

SYSTEM_STREAM = "system"
CLIENT_SESSIONS = 2**32
"""Sessions of client c are numbered from c times this on: no client's numbers depend on how many clients there are."""
_ONE_TURN = Fixed(1)
_NO_WAIT = ConstantTime(0)
_LAST_NS = 2**62
"""The end of the clock's range, some 146 years."""


def tenant_stream(tenant: int) -> str:
    """Name of the token stream of a tenant's own system prompt."""
    return f"tenant/{tenant}"


def prefix_stream(prefix: int) -> str:
    """Name of the token stream that the sessions of one group begin with."""
    return f"prefix/{prefix}"


@dataclass(frozen=True, kw_only=True)
class Conversations:
    """A population of sessions. Raise WorkloadError on bad figures."""

    seed: int = 0
    prompt_tokens: Length
    """New tokens that the user adds in a turn, without system prompt and history."""
    output_tokens: Length
    first_prompt_tokens: Length | None = None
    """The same of turn 0, where a task or a document opens the session; None: as in every turn."""
    turns: Length = _ONE_TURN
    think_time: ThinkTime = _NO_WAIT
    """From the end of a turn to the arrival of the next."""
    system_prompt_tokens: int = 0
    """Shared by all sessions of all tenants."""
    tenant: int = 0
    tenant_prompt_tokens: int = 0
    """A system prompt of this tenant, behind the one that all share."""
    prefixes: Prefixes | None = None
    distinct_prompts: int | None = None
    """After so many sessions their first prompts are sent again, in the same order; None: all are new."""
    max_tokens: int | None = None
    """What the server is told, and where it cuts the answer; by default exactly the answer's length, as a benchmark
    that ignores the stop token does."""

    def __post_init__(self) -> None:
        for name in ("system_prompt_tokens", "tenant_prompt_tokens"):
            if not 0 <= (tokens := getattr(self, name)) <= MAX_TOKENS:
                raise WorkloadError(f"{name} is from 0 to 2^40, not {tokens}")
        if self.distinct_prompts is not None and not 1 <= self.distinct_prompts <= CLIENT_SESSIONS:
            raise WorkloadError(f"distinct_prompts is from 1 to 2^32, not {self.distinct_prompts}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise WorkloadError(f"max_tokens must be at least 1, not {self.max_tokens}")

    def turn_count(self, session: int) -> int:
        """How many turns a session has. O(1)."""
        return self._turns.at(session, 0)

    def turn_counts(self, sessions: IntArray) -> IntArray:
        """:meth:`turn_count` of each. O(sessions)."""
        return tokens_many(self.turns, self.seed, Purpose.TURNS, sessions, 0)

    def think_ns(self, session: int, turn: int) -> int:
        """The wait before a turn. O(1)."""
        return self._waits.at(session, turn)

    def first_turn(self, session: int, *, id: int, arrival_ns: int, has_next: bool) -> Request:
        """Turn 0 of a session. O(1)."""
        said = self._said(session)
        new, output = self._first_prompts.at(said, 0), self._outputs.at(session, 0)
        opening, length = self._opening if self.prefixes is None else self._with_prefix(self._prefix.at(said, 0))
        return self._request(id, session, 0, arrival_ns, opening, length, said, new, output, has_next)

    def first_turns(
        self, sessions: IntArray, *, ids: IntArray, arrivals_ns: IntArray, has_next: IntArray
    ) -> Iterator[Request]:
        """:meth:`first_turn` of each, the same requests; about three times as fast."""
        said = sessions
        if self.distinct_prompts is not None:
            client = sessions // CLIENT_SESSIONS * CLIENT_SESSIONS
            said = client + (sessions - client) % self.distinct_prompts
        prefixes = said if self.prefixes is None else tokens_many(self.prefixes, self.seed, Purpose.PREFIX, said, 0)
        (opening, length), plain = self._opening, self.prefixes is None
        columns = (
            ids,
            sessions,
            arrivals_ns,
            said,
            prefixes,
            tokens_many(self._opening_tokens, self.seed, Purpose.PROMPT_TOKENS, said, 0),
            tokens_many(self.output_tokens, self.seed, Purpose.OUTPUT_TOKENS, sessions, 0),
            has_next,
        )
        lists = (column.tolist() for column in columns)
        for id, session, arrival_ns, key, prefix, new, output, more in zip(*lists, strict=True):
            if not plain:
                opening, length = self._with_prefix(prefix)
            yield self._request(id, session, 0, arrival_ns, opening, length, key, new, output, more > 0)

    def following_turn(self, r: Request, *, id: int, arrival_ns: int, has_next: bool) -> Request:
        """The turn after *r*, with *r*'s prompt and answer as its history. O(turns so far)."""
        session, turn = r.session, r.turn + 1
        history = (*r.spans, (output_stream(session, r.turn), 0, r.output_tokens))
        new, output = self._prompts.at(session, turn), self._outputs.at(session, turn)
        length = r.prompt_tokens + r.output_tokens
        return self._request(id, session, turn, arrival_ns, history, length, session, new, output, has_next)

    def _said(self, session: int) -> int:
        """The session whose first prompt this one sends."""
        if self.distinct_prompts is None:
            return session
        client = session // CLIENT_SESSIONS * CLIENT_SESSIONS
        return client + (session - client) % self.distinct_prompts

    @cached_property
    def _turns(self) -> DrawnAhead:
        return DrawnAhead(self.turns, self.seed, Purpose.TURNS)

    @cached_property
    def _waits(self) -> DrawnAhead:
        return DrawnAhead(self.think_time, self.seed, Purpose.THINK_TIME)

    @cached_property
    def _prompts(self) -> DrawnAhead:
        return DrawnAhead(self.prompt_tokens, self.seed, Purpose.PROMPT_TOKENS)

    @property
    def _opening_tokens(self) -> Length:
        return self.prompt_tokens if self.first_prompt_tokens is None else self.first_prompt_tokens

    @cached_property
    def _first_prompts(self) -> DrawnAhead:
        return DrawnAhead(self._opening_tokens, self.seed, Purpose.PROMPT_TOKENS)

    @cached_property
    def _outputs(self) -> DrawnAhead:
        return DrawnAhead(self.output_tokens, self.seed, Purpose.OUTPUT_TOKENS)

    @cached_property
    def _prefix(self) -> DrawnAhead:
        assert self.prefixes is not None
        return DrawnAhead(self.prefixes, self.seed, Purpose.PREFIX)

    @cached_property
    def _prefix_tokens(self) -> list[int]:
        return [] if self.prefixes is None else self.prefixes.tokens(self.seed).tolist()

    @cached_property
    def _opening(self) -> tuple[tuple[Span, ...], int]:
        own = (tenant_stream(self.tenant), 0, self.tenant_prompt_tokens)
        spans = merge_spans(((SYSTEM_STREAM, 0, self.system_prompt_tokens), own))
        return spans, self.system_prompt_tokens + self.tenant_prompt_tokens

    def _with_prefix(self, prefix: int) -> tuple[tuple[Span, ...], int]:
        spans, length = self._opening
        tokens = self._prefix_tokens[prefix]
        return (*spans, (prefix_stream(prefix), 0, tokens)), length + tokens

    def _request(
        self,
        id: int,
        session: int,
        turn: int,
        arrival_ns: int,
        history: tuple[Span, ...],
        history_tokens: int,
        said: int,
        new: int,
        output: int,
        has_next: bool,
    ) -> Request:
        if arrival_ns > _LAST_NS:
            raise WorkloadError(
                f"turn {turn} of session {session} would be sent {arrival_ns / 1e9:,.0f} s after the start, that is "
                "over 146 years: shorten session.think_time_s, or take fewer workload.num_prompts"
            )
        max_tokens = output if self.max_tokens is None else self.max_tokens
        return tuple.__new__(  # by place, and not by a call of Python's: half the time of a short run's traffic is here
            Request,
            (
                id,
                session,
                turn,
                arrival_ns,
                history_tokens + new,
                output if output < max_tokens else max_tokens,
                max_tokens,
                (*history, (user_stream(said, turn), 0, new)),
                self.tenant,
                has_next,
                0,
                0,
            ),
        )
