"""What is said in sessions: how many turns, how long, and which tokens; not when.

A prompt is the system prompt, which all share, then all earlier turns of the session with their answers, then what
the user says now. Everything is keyed by (session, turn), so it is the same under every policy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from hbmtwin.workloads.drawn_ahead import DrawnAhead
from hbmtwin.workloads.draws import IntArray, Purpose
from hbmtwin.workloads.lengths import MAX_TOKENS, Fixed, Length, tokens_many
from hbmtwin.workloads.records import Request, Span, WorkloadError, merge_spans, output_stream, user_stream
from hbmtwin.workloads.think_times import ConstantTime, ThinkTime

SYSTEM_STREAM = "system"
_ONE_TURN = Fixed(1)
_NO_WAIT = ConstantTime(0)
_LAST_NS = 2**62
"""The end of the clock's range, some 146 years."""


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
    max_tokens: int | None = None
    """What the server is told, and where it cuts the answer; by default exactly the answer's length, as a benchmark
    that ignores the stop token does."""

    def __post_init__(self) -> None:
        if not 0 <= self.system_prompt_tokens <= MAX_TOKENS:
            raise WorkloadError(f"system_prompt_tokens is from 0 to 2^40, not {self.system_prompt_tokens}")
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
        new, output = self._first_prompts.at(session, 0), self._outputs.at(session, 0)
        return self._request(
            id, session, 0, arrival_ns, self._opening, self.system_prompt_tokens, new, output, has_next
        )

    def first_turns(
        self, sessions: IntArray, *, ids: IntArray, arrivals_ns: IntArray, has_next: IntArray
    ) -> Iterator[Request]:
        """:meth:`first_turn` of each, the same requests; about three times as fast."""
        opening, length = self._opening, self.system_prompt_tokens
        columns = (
            ids,
            sessions,
            arrivals_ns,
            tokens_many(self._opening_tokens, self.seed, Purpose.PROMPT_TOKENS, sessions, 0),
            tokens_many(self.output_tokens, self.seed, Purpose.OUTPUT_TOKENS, sessions, 0),
            has_next,
        )
        for id, session, arrival_ns, new, output, more in zip(*(column.tolist() for column in columns), strict=True):
            yield self._request(id, session, 0, arrival_ns, opening, length, new, output, more > 0)

    def following_turn(self, r: Request, *, id: int, arrival_ns: int, has_next: bool) -> Request:
        """The turn after *r*, with *r*'s prompt and answer as its history. O(turns so far)."""
        session, turn = r.session, r.turn + 1
        history = (*r.spans, (output_stream(session, r.turn), 0, r.output_tokens))
        new, output = self._prompts.at(session, turn), self._outputs.at(session, turn)
        length = r.prompt_tokens + r.output_tokens
        return self._request(id, session, turn, arrival_ns, history, length, new, output, has_next)

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
    def _opening(self) -> tuple[Span, ...]:
        return merge_spans(((SYSTEM_STREAM, 0, self.system_prompt_tokens),))

    def _request(
        self,
        id: int,
        session: int,
        turn: int,
        arrival_ns: int,
        history: tuple[Span, ...],
        history_tokens: int,
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
        return Request(  # by place: half the time of a short run's traffic is here
            id,
            session,
            turn,
            arrival_ns,
            history_tokens + new,
            output if output < max_tokens else max_tokens,
            max_tokens,
            (*history, (user_stream(session, turn), 0, new)),
            0,
            has_next,
        )
