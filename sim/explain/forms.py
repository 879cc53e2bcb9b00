"""Messages as they are printed, with places for their numbers: one line here is one form of one release.

::

    "Maximum concurrency for {max_model_len} tokens per request: {max_concurrency}x"

    {name}          a whole number or a decimal one; commas are passed over
    {name_bytes}    a size with its unit, also a negative one
    {name_bytes:G}  the same without a unit, in GiB (:M in MiB, :B in bytes)
    {name:%}        per cent, kept as a ratio
    {name:w}        a word, up to a comma, quote, bracket or white space
    {*}             anything, up to what follows it
    [...]           may be missing

White space counts for nothing, so that a message is found wherever a terminal broke it. A form is found by its first
words; what is behind them is looked for piece by piece, each time from where the last one ended, never again from an
earlier place: O(characters), whatever the text. What a cut paste no longer has is left out of the finding.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.printed import Printed

_NUMBER = r"(-?\d[\d,]{0,24}(?:\.\d{1,9})?)"
_UNIT = r"(GiB|MiB|KiB|TiB|GB|MB|KB|bytes|B)"
_WORD = r"([^\s,;'\"()\[\]{}]{1,200})"
_SHIFTED = {"G": "GiB", "M": "MiB", "B": "B"}
_NESTED = 4
"""So many other messages' first words may stand within a message."""
_TELLING = 24
"""Characters of first words that no other message has, so that they count also where the rest was cut off."""
_MOST_DIGITS = 24
_POSITIVE = ("total_bytes", "usable_bytes", "need_bytes", "max_model_len", "max_num_seqs")
"""What is divided by, and what no server can have none of: of a damaged text such a number is not kept."""
_PLACE = re.compile(r"\{(\*|[a-z_0-9]+(?::[GMBw%])?)\}|(\[)|(\])")


class Place(NamedTuple):
    """Where a form has a number or a word."""

    name: str
    kind: str


class Form(NamedTuple):
    """One form of one message."""

    kind: str
    trigger: str
    """Its first words without white space."""
    pieces: tuple[re.Pattern[str], ...]
    places: tuple[tuple[Place, ...], ...]
    """Of each piece, one for a group (two groups for a size with its unit)."""
    ends_at_line: bool
    """Whether its last place is its end: then the line's end is the place's."""
    begun: tuple[re.Pattern[str], ...]
    """Beginnings of the first piece, the longest first, each up to one of its places: what a cut paste may have."""
    literals: str
    """All of its words without white space."""
    reach: int
    """Characters that it fills at most."""
    words: Mapping[str, str]


def form(kind: str, text: str, *, reach: int = 2_000, engine: str = "") -> Form:
    """The form that *text* writes down, of which only *engine* prints it. Raise ValueError without first words."""
    pieces: list[re.Pattern[str]] = []
    places: list[tuple[Place, ...]] = []
    trigger = _without_blanks(re.split(r"[{\[]", text, maxsplit=1)[0])
    if not trigger:
        raise ValueError(f"a form begins with words, not {text!r}")
    for piece in text.split("{*}"):
        pattern, own = _compiled(piece)
        if pattern:
            pieces.append(re.compile(pattern))
            places.append(tuple(own))
    begun = _beginnings(text.split("{*}")[0]) if len(trigger) >= _TELLING else ()
    literals = _without_blanks(_PLACE.sub("\0", text))
    ends = text.rstrip().endswith("}") and not text.rstrip().endswith("{*}")
    return Form(
        kind, trigger, tuple(pieces), tuple(places), ends, begun, literals, reach, {"engine": engine} if engine else {}
    )


def _compiled(text: str) -> tuple[str, list[Place]]:
    """The pattern of a piece without ``{*}``, and its places."""
    pattern, places, at = "", [], 0
    for found in _PLACE.finditer(text):
        pattern += re.escape(_without_blanks(text[at : found.start()]))
        at = found.end()
        if found[2] or found[3]:
            pattern += "(?:" if found[2] else ")?"
            continue
        name, _, kind = found[1].partition(":")
        kind = kind or ("size" if name.endswith("_bytes") else "number")
        pattern += _WORD if kind == "w" else _NUMBER + _UNIT if kind == "size" else _NUMBER
        places.append(Place(name, kind))
    return pattern + re.escape(_without_blanks(text[at:])), places


def _beginnings(text: str) -> tuple[re.Pattern[str], ...]:
    """Patterns of a piece cut behind each of its places but the last, with what ends the place: a number that is itself
    cut must not be read."""
    ends = [found.end() for found in _PLACE.finditer(text) if found[1]]
    cut = [text[: end + _past_number(text[end:])] for end in ends[:-1]]
    return tuple(re.compile(_compiled(piece)[0]) for piece in reversed(cut) if piece.count("[") == piece.count("]"))


def _past_number(text: str) -> int:
    """How many characters of *text* tell that a number before it has ended: full stops and commas do not."""
    return next((at + 1 for at, character in enumerate(text) if character not in " .,"), 0)


def _without_blanks(text: str) -> str:
    return "".join(text.split())


class Joined(NamedTuple):
    """What one rank wrote, without white space."""

    rank: str
    text: str
    starts: Sequence[int]
    """Where each line begins."""
    numbers: Sequence[int]

    def line(self, place: int) -> int:
        """Number of the line that a place lies in. O(log lines)."""
        return self.numbers[bisect_right(self.starts, place) - 1]

    def line_end(self, place: int) -> int:
        """Where the line that a place lies in ends. O(log lines)."""
        at = bisect_right(self.starts, place)
        return self.starts[at] if at < len(self.starts) else len(self.text)


def joined(lines: Sequence[Line]) -> list[Joined]:
    """The text of each rank, in the order in which they first speak. O(characters)."""
    by_rank: dict[str, list[Line]] = {}
    for line in lines:
        by_rank.setdefault(line.rank, []).append(line)
    texts = []
    for rank, own in by_rank.items():
        pieces = ["".join(text.split()) if " " in text or "\t" in text else text for _, text, _ in own]
        starts, end = [], 0
        for piece in pieces:
            starts.append(end)
            end += len(piece)
        texts.append(Joined(rank, "".join(pieces), starts, [line.number for line in own]))
    return texts


class Hit(NamedTuple):
    """A place where a form begins, or several forms with the same first words."""

    forms: tuple[Form, ...]
    by: Joined
    place: int
    end: int
    """Where the next one begins, or its reach ends."""


def hits(texts: Iterable[Joined], forms: Sequence[Form]) -> Iterator[Hit]:
    """Every place where one of *forms* begins; of two at the same place the one with the longer first words.

    O(forms x characters), each a search for plain words.
    """
    alike: dict[str, tuple[Form, ...]] = {}
    for one in forms:
        alike[one.trigger] = (*alike.get(one.trigger, ()), one)
    for by in texts:
        at: dict[int, str] = {}
        for trigger in sorted(alike, key=len):
            place = by.text.find(trigger)
            while place >= 0:
                at[place] = trigger
                place = by.text.find(trigger, place + len(trigger))
        places = sorted(at)
        for which, place in enumerate(places):
            same = alike[at[place]]
            end = min(len(by.text), place + max(one.reach for one in same))
            for later in places[which + 1 : which + 1 + _NESTED]:
                if at[later] == at[place] or not any(at[later] in one.literals for one in same):
                    end = min(end, later)
                    break
            yield Hit(same, by, place, end)


def finding(hit: Hit) -> Finding | None:
    """What is told at a place, by the form that tells most; None where not even a first number is.

    O(characters of the passage).
    """
    told = [found for one in hit.forms if (found := _told(one, hit)) is not None]
    return max(told, key=lambda found: len(found.numbers) + len(found.words), default=None)


def _told(one: Form, hit: Hit) -> Finding | None:
    numbers: dict[str, int | float] = {}
    words = dict(one.words)
    at, complete, broken = hit.place, 0, False
    for pattern, places in zip(one.pieces, one.places, strict=True):
        found = pattern.search(hit.by.text, at, hit.end) if complete else pattern.match(hit.by.text, at, hit.end)
        if found is None and not complete:
            found = next((cut for begun in one.begun if (cut := begun.match(hit.by.text, at, hit.end))), None)
            broken = True
        if found is None:
            break
        complete += 1
        at = found.end()
        groups = iter(range(1, found.re.groups + 1))
        last = one.ends_at_line and complete == len(one.pieces) and not broken
        for place in places:
            group = next(groups, 0)
            if not group:
                break
            text = found[group]
            unit = found[next(groups)] if place.kind == "size" else ""
            if text is None:
                continue
            if last and place is places[-1] and not unit:
                text = text[: hit.by.line_end(found.start(group)) - found.start(group)]
            if place.kind == "w":
                words[place.name] = text
            else:
                _put(numbers, place, text, unit)
        if broken:
            break
    if not complete or any(place.kind != "w" and place.name not in numbers for place in one.places[0][:1]):
        return None  # its first number is what a message is known by
    rounded = any(isinstance(number, Printed) and number.give for number in numbers.values())
    return Finding(one.kind, hit.by.line(hit.place), hit.by.rank, numbers, words, rounded)


def _put(numbers: dict[str, int | float], place: Place, text: str, unit: str) -> None:
    digits = text.replace(",", "").rstrip(".")
    if len(digits) > _MOST_DIGITS or not digits.strip("-"):
        return
    if place.kind in _SHIFTED or unit:
        number: int | float = Printed.of(digits, unit or _SHIFTED[place.kind])
    elif place.kind == "%":
        number = float(digits) / 100
    else:
        number = float(digits) if "." in digits else int(digits)
    if number >= 1 or place.name not in _POSITIVE:
        numbers[place.name] = number


def read_forms(texts: Iterable[Joined], forms: Sequence[Form]) -> list[Finding]:
    """Every message that one of *forms* writes down."""
    return [told for hit in hits(texts, forms) if (told := finding(hit)) is not None]
