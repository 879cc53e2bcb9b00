"""From what was read to one cause, its arithmetic, and what would help.

::

    findings --facts--> OomFacts --classify--> Cause --+--> arithmetic   the message's own books, line by line
                                                       +--> helps, does_not_help   each with its numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from hbmtwin.allocators.oom import Cause, OomFacts
from hbmtwin.sim.explain.circumstances import When
from hbmtwin.sim.phrases import Said


@dataclass(frozen=True, slots=True)
class Judgement:
    """Why one request for memory failed, as far as the text tells."""

    cause: Cause | None
    """None: the text tells that memory ran out and not enough to say why."""
    when: When | None
    """Before or after the server could answer; None: the text does not tell."""
    rank: str
    """Of the worker that failed, as its finding names it."""
    said: Said
    """The cause in one sentence."""
    arithmetic: tuple[Said, ...]
    helps: tuple[Said, ...]
    does_not_help: tuple[Said, ...]
    facts: OomFacts
    """What :func:`~hbmtwin.allocators.oom.classify` was asked; what the text does not tell is 0."""
