"""Retention rules: which tokens of a sequence a contiguous cache still holds when the sequence grows long.

::

    tokens computed    0 . . . . . . . . . . . . . . . . . . . . . t
    full               |kkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkkk|   all
    truncate(n)                            |kkkkkkkkkkk n kkkkkkkkk|   the last n; what stays moves to the front
    forget(over, drop)                |kkk over - drop + 1 to over |   `drop` go at a time; what stays moves
    sliding_window(w)                              |kkkkkkk w kkkkk|   the last w, in a ring: overwritten in place
    sink_recent(s, r)  |k s k|                         |kkkk r kkkk|   the first s, and the last r in a ring

A rule says *how many* tokens are held once so many are computed, whatever way the sequence came there. A scenario
writes it as text, ``kv_cache.retention = "truncate(4096)"``; :func:`retention_rule` reads it. All verbs are O(1).

**Dropped tokens of a turn**: when it ends with n tokens computed, history, prompt and answer together,
``n - kept(n)`` of them are no longer held. A turn lost tokens if that is more than 0.
"""

from __future__ import annotations

import difflib
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar


@dataclass(frozen=True, slots=True)
class Retention(ABC):
    """How many of a sequence's tokens are held. Its fields, in order, are the numbers of its text."""

    name: ClassVar[str]
    moves: ClassVar[bool] = False
    """Whether what stays is moved to the front when tokens are dropped, which copies it; else a drop copies nothing."""

    @property
    @abstractmethod
    def bound(self) -> int | None:
        """The most tokens that are ever held; up to there, all are. None: no end."""

    @abstractmethod
    def kept(self, tokens: int) -> int:
        """How many of the first *tokens* tokens are still held once they are computed."""

    def staying(self, before: int, after: int) -> int:
        """How many of the tokens held at *before* are held at *after* as well, when that many are computed."""
        return max(0, before - (after - self.kept(after)))

    @classmethod
    def signature(cls) -> str:
        """How it is written, with the names of its numbers: ``forget(over, drop)``."""
        names = ", ".join(field.name for field in fields(cls))
        return f"{cls.name}({names})" if names else cls.name

    def __str__(self) -> str:
        """The text that :func:`retention_rule` reads."""
        numbers = ", ".join(str(getattr(self, field.name)) for field in fields(self))
        return f"{self.name}({numbers})" if numbers else self.name

    def _require(self, field: str, low: int, high: int | None = None) -> None:
        value = getattr(self, field)
        if value < low or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ValueError(f"{self.signature()}: {field} must be {wanted}, not {value}")


@dataclass(frozen=True, slots=True)
class Full(Retention):
    """Everything is held."""

    name: ClassVar[str] = "full"

    @property
    def bound(self) -> None:
        """None: a sequence is held whole."""
        return None

    def kept(self, tokens: int) -> int:
        """*tokens*."""
        return tokens


@dataclass(frozen=True, slots=True)
class Truncate(Retention):
    """Past *n* tokens the oldest go at once: the last *n* are held (claim A4)."""

    name: ClassVar[str] = "truncate"
    moves: ClassVar[bool] = True
    n: int

    def __post_init__(self) -> None:
        self._require("n", 1)

    @property
    def bound(self) -> int:
        """*n*."""
        return self.n

    def kept(self, tokens: int) -> int:
        """*tokens*, at most *n*."""
        return min(tokens, self.n)


@dataclass(frozen=True, slots=True)
class Forget(Retention):
    """One token past *over*, the oldest *drop* go together: a saw-tooth (claim B6)."""

    name: ClassVar[str] = "forget"
    moves: ClassVar[bool] = True
    over: int
    drop: int

    def __post_init__(self) -> None:
        self._require("over", 1)
        self._require("drop", 1, self.over)

    @property
    def bound(self) -> int:
        """*over*."""
        return self.over

    def kept(self, tokens: int) -> int:
        """*tokens* less as many times *drop* as bring it to *over* or below; past *over*, more than ``over - drop``."""
        times = -((self.over - tokens) // self.drop)
        return tokens - max(0, times) * self.drop


@dataclass(frozen=True, slots=True)
class SlidingWindow(Retention):
    """A ring of *window* slots: each token past it overwrites the oldest, in place (claim C11)."""

    name: ClassVar[str] = "sliding_window"
    window: int

    def __post_init__(self) -> None:
        self._require("window", 1)

    @property
    def bound(self) -> int:
        """*window*."""
        return self.window

    def kept(self, tokens: int) -> int:
        """*tokens*, at most *window*."""
        return min(tokens, self.window)


@dataclass(frozen=True, slots=True)
class SinkRecent(Retention):
    """The first *sinks* tokens stay for ever, and a ring holds the *recent* last ones (claim A5, StreamingLLM)."""

    name: ClassVar[str] = "sink_recent"
    sinks: int
    recent: int

    def __post_init__(self) -> None:
        self._require("sinks", 1)
        self._require("recent", 1)

    @property
    def bound(self) -> int:
        """``sinks + recent``."""
        return self.sinks + self.recent

    def kept(self, tokens: int) -> int:
        """*tokens*, at most ``sinks + recent``."""
        return min(tokens, self.sinks + self.recent)

    def staying(self, before: int, after: int) -> int:
        """The sinks among the first *before*, and what the ring still has of the others."""
        return min(before, self.sinks) + max(0, before - max(self.sinks, after - self.recent))


RETENTIONS: dict[str, type[Retention]] = {
    rule.name: rule for rule in (Full, Truncate, Forget, SlidingWindow, SinkRecent)
}

_TEXT = re.compile(r"\s*(\w+)\s*(?:\(([^()]*)\)\s*)?")


def retention_rule(text: str) -> Retention:
    """Read a rule as a scenario writes it, blanks aside. Raise ValueError that says how it should be written."""
    written = _TEXT.fullmatch(text)
    name = written[1] if written else text
    if name not in RETENTIONS:
        near = difflib.get_close_matches(name, RETENTIONS, n=1)
        hint = f"; did you mean {RETENTIONS[near[0]].signature()}?" if near else ""
        known = ", ".join(rule.signature() for rule in RETENTIONS.values())
        raise ValueError(f"{text!r} is no retention; write one of {known}{hint}")
    rule = RETENTIONS[name]
    numbers = [part.strip() for part in (written[2] or "").split(",")] if written else []
    if numbers == [""]:
        numbers = []
    if len(numbers) != len(fields(rule)) or not all(re.fullmatch("[0-9]+", number) for number in numbers):
        raise ValueError(f"{text!r}: write {rule.signature()}, each number a whole number of tokens")
    return rule(*map(int, numbers))
