"""A figure with its range and its source: what every estimate of an engine's overhead is told as."""

from __future__ import annotations

from typing import NamedTuple

GIB = 1 << 30
MIB = 1 << 20


class Span(NamedTuple):
    """Bytes, with the range that a source allows."""

    bytes: int
    low: int
    high: int

    def plus(self, other: Span) -> Span:
        """Both together, each at its worst or best at the same time."""
        return Span(self.bytes + other.bytes, self.low + other.low, self.high + other.high)


NOTHING = Span(0, 0, 0)


def hundredths(figure: int, low: int, high: int) -> Span:
    """A span given in hundredths of a GiB, as boot logs round."""
    return Span(figure * GIB // 100, low * GIB // 100, high * GIB // 100)


class Estimate(NamedTuple):
    """A figure with the range that its source allows, in bytes."""

    bytes: int
    low: int
    high: int
    source: str


def exactly(size: int, source: str) -> Estimate:
    """A figure without a range: given, measured, or computed from shapes."""
    return Estimate(size, size, size, source)
