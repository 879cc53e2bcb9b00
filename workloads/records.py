"""The plain records that this folder owns: a request, how it ended, and where requests come from."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple, Protocol

Span = tuple[str | int, int, int]
"""``(stream, start, length)``: *length* tokens of the endless token stream *stream*, from position *start*."""


class Status(Enum):
    """How a request ended."""

    COMPLETED = "completed"
    REJECTED = "rejected"
    """The server answered that it will not serve it; the reason stands beside it."""
    FAILED = "failed"
    """It was in the server when the process died."""
    UNFINISHED = "unfinished"
    """It had not been submitted when the run ended."""


class Request(NamedTuple):
    """One request of one turn of one session, as the client knows it.

    ``output_tokens`` is the truth that a server does not know; ``max_tokens`` is what it is told. ``spans`` is the
    prompt as pieces of endless token streams, adjacent pieces merged, so that two prompts share a prefix exactly
    where their spans do; the output is the new stream that :func:`output_stream` names.
    """

    id: int
    session: int
    turn: int
    """From 0."""
    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    spans: tuple[Span, ...]
    tenant: int = 0
    has_next: bool = False
    """Whether a further turn of this session will follow, where that is known beforehand."""
    sample: int = 0
    """Which answer to the same prompt this is, from 0: samples share session, turn, prompt and arrival."""
    priority: int = 0
    """The smaller goes first, where the scheduler heeds it."""


def output_stream(session: int, turn: int, sample: int = 0) -> str:
    """Name of the token stream that a request's output is."""
    return f"out/{session}/{turn}/{sample}"


def user_stream(session: int, turn: int) -> str:
    """Name of the token stream that a user adds in one turn."""
    return f"user/{session}/{turn}"


def merge_spans(spans: tuple[Span, ...]) -> tuple[Span, ...]:
    """Merge adjacent pieces of one stream and drop empty ones. O(pieces)."""
    merged: list[Span] = []
    for stream, start, length in spans:
        if length == 0:
            continue
        if merged and merged[-1][0] == stream and merged[-1][1] + merged[-1][2] == start:
            merged[-1] = (stream, merged[-1][1], merged[-1][2] + length)
        else:
            merged.append((stream, start, length))
    return tuple(merged)


class Source(Protocol):
    """Where requests come from. Open traffic arrives whatever the server does; a session's next turn waits for its
    predecessor, so the engine asks for it when a turn ends."""

    total_requests: int | None
    """How many requests it makes if the server never dies; None when only the run can tell."""

    def open(self) -> Iterator[Request]:
        """First turns, or a replay: lazily, in order of arrival. Raise WorkloadError on bad input."""
        ...

    def next_turn(self, r: Request, end_ns: int, status: Status) -> Request | None:
        """The request that follows *r*, which ended at *end_ns*; None if the session is over."""
        ...


class WorkloadError(ValueError):
    """Traffic that cannot be read or makes no sense: what, where (file and line), and the cure."""
