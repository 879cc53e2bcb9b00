"""A line in English of what somebody got wrong, or of a run's notes, in Chinese: by phrases with places for the rest.

::

    "seed: input should be a valid integer, not 'x'"
     ----   head, a key path or a file: stays
            -------------------------------  "{said}, not {value}"      "{said}，不能是 {value}"
                                             said: "input should be a valid integer"    "须为整数"

Most of what is raised names a key and reads the same on the command line, where it is English. So it is translated as
it arrives, by tables of phrases: what is raised elsewhere changes in one place, and a test that provokes each phrase by
a setting turns red. Places called as in :data:`TOLD` hold English of their own; others (names, numbers, what somebody
typed) stay letter by letter. Nothing is guessed: a line of which a piece is not known has no translation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from string import Formatter
from typing import NamedTuple

from hbmtwin.dashboard.app.run_notes import NOTES
from hbmtwin.dashboard.app.wrong_capacity import CAPACITY
from hbmtwin.dashboard.app.wrong_files import FILES
from hbmtwin.dashboard.app.wrong_policies import POLICIES
from hbmtwin.dashboard.app.wrong_server import SERVER
from hbmtwin.dashboard.app.wrong_settings import JOINED, SETTINGS
from hbmtwin.dashboard.app.wrong_traffic import TRAFFIC
from hbmtwin.kernels.capability_rows import ROWS
from hbmtwin.sim.budget import objections
from hbmtwin.sim.phrases import Phrase

TOLD = frozenset(("said", "what", "why", "whose", "cure"))
"""Places that hold English, which is translated by the same tables."""
ONE_WORD = frozenset(("key", "distribution", "low"))
"""Places that hold a word without a blank."""
LONGEST = 4_000
"""Letters of a line that is read: the longest that is raised lists the devices of the catalog, in a tenth of it."""
DEEPEST = 10
"""Pieces within pieces, and keys before keys: ``workload.trace: file:3: what; cure`` has four, a list one a part."""
HEAD = re.compile(r"--.+|\w+\([\w, ]+\)|[^\s：'\"`][^\s：]*( = \S+)?")
"""What may stand before a colon: an option, a rule or a key path, with what was given for it; a file. Not a quote."""
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
SENTENCE = re.compile(r"[a-z]+ [a-z]+ [a-z]+")
"""Words in a row: no name, list or number has them."""


class Pattern(NamedTuple):
    """A phrase taken apart: what stands before, between and behind its places."""

    literals: tuple[str, ...]
    places: tuple[str, ...]
    zh: str

    def values(self, line: str) -> dict[str, str] | None:
        """What stands in the places of *line*, each as short as can be, the last one to the end. O(len(line)).

        None where it is another line. Nothing goes back over the line, so that no text makes it slow.
        """
        first, *others = self.literals
        if not line.startswith(first):
            return None
        if not others:
            return {} if line == first else None
        if not line.endswith(others[-1]):
            return None
        at, end = len(first), len(line) - len(others[-1])
        found: dict[str, str] = {}
        for place, literal in zip(self.places[:-1], others[:-1], strict=True):
            begin, at = at, line.find(literal, at + 1, end)
            if at < 0:
                return None
            found[place] = line[begin:at]
            at += len(literal)
        found[self.places[-1]] = line[at:end]
        return found if at < end else None


def pattern_of(en: str, zh: str) -> Pattern:
    """A phrase, to be looked for. Raise ValueError where two places touch, for then nobody knows where one ends."""
    literals, places = [""], []
    for literal, place, _, _ in Formatter().parse(en):
        literals[-1] += literal
        if place is not None:
            places.append(place)
            literals.append("")
    if not all(literals[1:-1]):
        raise ValueError(f"two places touch in {en!r}")
    return Pattern(tuple(literals), tuple(places), zh)


def _all() -> Iterator[tuple[str, str]]:
    """In the order in which they are tried: what joins two pieces first, else a place at the end takes both."""
    yield from JOINED
    yield from SETTINGS
    yield from POLICIES
    yield from SERVER
    yield from TRAFFIC
    yield from FILES
    yield from CAPACITY
    yield from NOTES
    yield from ((row.en, row.zh) for row in ROWS)
    yield from (said for said in vars(objections).values() if isinstance(said, Phrase))


PATTERNS = tuple(pattern_of(en, zh) for en, zh in _all())


def in_chinese(line: str) -> str | None:
    """*line* in Chinese; None where a piece of it is not known. O(patterns x len(line)) a piece, each read once."""
    return _Reading(PATTERNS).told(line, DEEPEST) if len(line) <= LONGEST else None


class _Reading:
    """One line as it is read: a piece that several phrases leave over is translated once, else their ways multiply."""

    def __init__(self, patterns: Sequence[Pattern]) -> None:
        self._patterns = patterns
        self._known: dict[tuple[str, int], str | None] = {}

    def told(self, line: str, deepest: int) -> str | None:
        if deepest == 0:
            return None
        piece = line, deepest
        if piece not in self._known:
            self._known[piece] = self._read(line, deepest - 1)
        return self._known[piece]

    def _read(self, line: str, deeper: int) -> str | None:
        head, colon, rest = line.partition(": ")
        if colon and HEAD.fullmatch(head) and (said := self.told(rest, deeper)) is not None:
            return f"{head}：{said}"
        for pattern in self._patterns:
            if (values := pattern.values(line)) is None:
                continue
            told = {
                place: self.told(value, deeper) if place in TOLD else _as_it_is(place, value)
                for place, value in values.items()
            }
            if None not in told.values():
                return pattern.zh.format(**told)
        return None


def _as_it_is(place: str, value: str) -> str | None:
    """*value*, unless it says something in English: then the phrase took more than it means."""
    if place in ONE_WORD and " " in value:
        return None
    return None if SENTENCE.search(QUOTED.sub("", value)) else value
