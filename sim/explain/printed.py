"""Sizes as programs print them, and messages that a terminal or a logger broke into lines.

::

    "Tried to allocate 2.0"            one rank's lines, white space gone, joined
    "0 GiB (GPU 0; 23.69 GiB tot"  ->  "Triedtoallocate2.00GiB(GPU0;23.69GiBtotalcapacity..."
    "al capacity; ..."                   ^ a passage begins where its message begins, and ends before the next one

A size with two decimals is known to half a unit of the last one: "23.69 GiB" is 23.69 GiB give or take 5.1 MiB.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from hbmtwin.allocators.size_text import format_size
from hbmtwin.sim.explain.findings import Line

PASSAGE_CHARACTERS = 2_000
"""More than the longest message of an allocator without its white space."""

MOST_PASSAGES = 2_000
"""Of one text and kind: one failure has up to ten on each rank, and the first failures are those that matter."""

SHIFTS = {"bytes": 0, "byte": 0, "B": 0, "KiB": 10, "KB": 10, "MiB": 20, "MB": 20, "GiB": 30, "GB": 30, "TiB": 40}
"""Torch, npu-smi and nvidia-smi write MB and GB for units of 1024."""

SIZE = r"(?<!\d)(\d{1,20}(?:\.\d{1,6})?)(bytes|[KMGT]iB|[KMG]B)"
"""Two groups; no nested quantifier, and a run of digits is tried once."""


class Printed(int):
    """Bytes as they were printed, known to *give* bytes in both directions."""

    give: int

    def __new__(cls, value: int, give: int = 0) -> Printed:
        """*value* bytes, give or take *give*."""
        self = super().__new__(cls, value)
        self.give = give
        return self

    @classmethod
    def of(cls, digits: str, unit: str) -> Printed:
        """What ``digits unit`` says, in whole numbers: no float can overflow. Raise KeyError for an unknown unit."""
        whole, _, decimals = digits.partition(".")
        scale = 10 ** len(decimals)
        shift = SHIFTS[unit]
        twice = (int(whole + decimals) << (shift + 1)) // scale
        give = -((-1 << shift) // (2 * scale)) if shift else 0
        return cls((twice + 1) // 2, give)

    @property
    def low(self) -> int:
        """The least that it can be."""
        return max(0, self - self.give)

    @property
    def high(self) -> int:
        """The most that it can be."""
        return self + self.give


def give_of(number: int | float) -> int:
    """How far a number may be off; 0 for one that was not rounded. O(1)."""
    return number.give if isinstance(number, Printed) else 0


def shown(size: Printed) -> str:
    """As torch prints it, with what the rounding of its parts leaves open when that shows in the digits.

    >>> shown(Printed(268435456, 10737420)), shown(Printed(1202590843, 5368710))
    ('256.00 MiB ±10.24 MiB', '1.12 GiB')
    """
    unit = next((1 << shift for shift in (30, 20, 10) if size > 1 << shift), 1)
    open_bytes = f" ±{format_size(size.give)}" if 100 * size.give > unit else ""
    return format_size(size) + open_bytes


def size_before(text: str, words: str) -> Printed | None:
    """The size that stands right before *words* (a pattern) in a passage; None when none does. O(len(text))."""
    found = re.search(SIZE + words, text)
    return Printed.of(found[1], found[2]) if found else None


def size_after(text: str, words: str) -> Printed | None:
    """The size that stands right behind *words* (a pattern without groups) in a passage. O(len(text))."""
    found = re.search(words + SIZE, text)
    return Printed.of(found[1], found[2]) if found else None


class Passage(NamedTuple):
    """One message and what follows it, without white space."""

    line: int
    rank: str
    before: str
    """What stands in front of it on the same rank: the last few characters."""
    text: str


def passages(lines: Sequence[Line], begin: re.Pattern[str]) -> Iterator[Passage]:
    """The first :data:`MOST_PASSAGES` places where *begin* matches a rank's text, each up to the next place.

    White space counts for nothing, so that a message is found wherever it was broken. O(characters).
    """
    by_rank: dict[str, list[Line]] = {}
    left = MOST_PASSAGES
    for line in lines:
        by_rank.setdefault(line.rank, []).append(line)
    for rank, own in by_rank.items():
        pieces = ["".join(line.text.split()) for line in own]
        text = "".join(pieces)
        starts: list[int] = []
        end = 0
        for piece in pieces:
            starts.append(end)
            end += len(piece)
        places = [found.start() for found in islice(begin.finditer(text), left + 1)]
        if len(places) <= left:
            places.append(len(text))
        left -= len(places) - 1
        for place, stop in pairwise(places):
            number = own[bisect_right(starts, place) - 1].number
            message = text[place : min(stop, place + PASSAGE_CHARACTERS)]
            yield Passage(number, rank, text[max(0, place - 40) : place], message)
