"""One request of a trace: the record that every reader yields, and what its numbers may be.

::

    file ->  (line, values)  ->  Row            one format's ``parser``, :mod:`hbmtwin.workloads.formats.format`
                             ->  BadRow         what is wrong with this line, and the cure
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any, NamedTuple

from hbmtwin.workloads.records import Span

_SECOND_NS = 10**9
_LATEST_S = 2**33
"""The year 2242 in Unix time; later is milliseconds, and past 64 bits of nanoseconds."""


class Row(NamedTuple):
    """One line, as it stands in the file."""

    line: int
    time_ns: int
    prompt_tokens: int
    output_tokens: int
    session: int | None = None
    turn: int | None = None
    spans: tuple[Span, ...] | None = None
    """The prompt, where the format tells which prompts share tokens; else None."""
    tenant: int = 0


class BadRow(ValueError):
    """One line that is no request: what is wrong, and the cure."""

    def __init__(self, what: str, cure: str) -> None:
        super().__init__(what, cure)
        self.what, self.cure = what, cure


def shown(value: object) -> str:
    """A value as an error shows it: what was written, cut to 40 characters."""
    return repr(str("" if value is None else value)[:40])


def whole(name: str, value: Any, least: int, *, bits: int = 40) -> int:
    """A whole number from *least* to 2^bits, written as text or a number. Raise BadRow."""
    try:
        if type(value) is not str and type(value) is not int:  # JSON's true is an int to Python, and would pass for 1
            raise ValueError
        number = int(value)
    except ValueError:
        raise BadRow(f"{name} is {shown(value)}", "it must be a whole number") from None
    if number < least:
        raise BadRow(f"{name} is {number}", f"it must be at least {least}; drop lines of failed calls")
    if number > 1 << bits:
        raise BadRow(f"{name} is {number}", f"it must be at most 2^{bits}")
    return number


def seconds_ns(value: Any) -> int:
    """Nanoseconds of decimal seconds, exactly; digits past the ninth are rounded.

    Raise ValueError that says what is needed when it is no number, not finite, negative or too large.
    """
    if type(value) is str:
        # Nearly all times look so, and whole numbers are four times as fast as Decimal.
        full, _, part = value.partition(".")
        if full.isdecimal() and len(full) <= 10 and len(part) < 10 and (part.isdecimal() or not part):
            ns = int(full) * _SECOND_NS + int(part.ljust(9, "0"))
            if ns <= _LATEST_S * _SECOND_NS:
                return ns
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
            raise InvalidOperation
        seconds = Decimal(str(value) if isinstance(value, float) else value)
        if not seconds.is_finite() or seconds < 0:
            raise ValueError("it must be a finite number of seconds, not negative")
        if seconds > _LATEST_S:
            raise ValueError(f"it must be at most {_LATEST_S} seconds; is it in milliseconds?")
        return round(seconds.scaleb(9))
    except ArithmeticError:
        raise ValueError("it must be a number of seconds") from None


def moment(name: str, value: Any) -> int:
    """:func:`seconds_ns` of a column. Raise BadRow."""
    try:
        return seconds_ns(value)
    except ValueError as error:
        raise BadRow(f"{name} is {shown(value)}", str(error)) from None
