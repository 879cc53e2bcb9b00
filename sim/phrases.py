"""What is said to people, in English and in Chinese: both stand side by side, with the same numbers.

::

    SHORT = Phrase("{need} are needed and {free} are free", "需要 {need}，可用 {free}")
    Said.of(SHORT, need=Size(need_bytes), free=Size(free_bytes)).text("zh")

A test holds the two languages of every phrase to the same places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Lang = Literal["en", "zh"]
LANGUAGES: tuple[Lang, ...] = ("en", "zh")

GIB = 1 << 30
MIB = 1 << 20


class Phrase(NamedTuple):
    """A sentence, or a piece of one, with places in braces."""

    en: str
    zh: str


class Size(int):
    """Bytes, written as people read them: in GiB, below 0.1 GiB in MiB."""

    def __format__(self, spec: str) -> str:
        if spec:
            return format(int(self), spec)
        if abs(self) * 10 >= GIB or self == 0:
            return f"{int(self) / GIB:.2f} GiB"
        return f"{int(self) / MIB:.1f} MiB"


class Count(int):
    """A number of tokens or blocks, with commas."""

    def __format__(self, spec: str) -> str:
        return format(int(self), spec or ",")


@dataclass(frozen=True, slots=True)
class Said:
    """A phrase with what stands in its places: numbers, names, or another that was said."""

    phrase: Phrase
    values: tuple[tuple[str, object], ...] = ()

    @classmethod
    def of(cls, phrase: Phrase, **values: object) -> Said:
        """*phrase* with its places filled by name."""
        return cls(phrase, tuple(values.items()))

    def text(self, lang: Lang = "en") -> str:
        """In that language. Raise KeyError for a place that nothing fills."""
        filled = {name: value.text(lang) if isinstance(value, Said) else value for name, value in self.values}
        return (self.phrase.en if lang == "en" else self.phrase.zh).format(**filled)

    def __str__(self) -> str:
        return self.text()
