"""A CSV with one request a line: which columns a format has, and checked rows in order of time."""

from __future__ import annotations

import csv
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from hbmtwin.workloads.lengths import MAX_TOKENS
from hbmtwin.workloads.lines import bad_line, text_lines
from hbmtwin.workloads.suggest import did_you_mean


class Format(NamedTuple):
    """The columns of one format, under the names that its files give them."""

    name: str
    time: str
    prompt_tokens: str
    output_tokens: str
    time_ns: Callable[[str], int]
    """Turns what stands under *time* into nanoseconds. Raises ValueError that says what it should be."""
    session: str | None = None
    turn: str | None = None

    @property
    def required(self) -> tuple[str, ...]:
        """Columns that must be there."""
        return (self.time, self.prompt_tokens, self.output_tokens)

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns."""
        return self.required + tuple(name for name in (self.session, self.turn) if name is not None)


class Row(NamedTuple):
    """One line, as it stands in the file."""

    line: int
    time_ns: int
    prompt_tokens: int
    output_tokens: int
    session: int | None
    turn: int | None


def rows(path: Path, formats: Sequence[Format]) -> Generator[Row, None, None]:
    """Checked rows of a file in whichever of *formats* its header names; blank lines are passed over.

    Columns may stand in any order; unknown ones are refused, as a misspelt ``session`` would else go unseen. Raise
    WorkloadError with file and line when there is no header, a column is missing or unknown, a line has too many or
    too few fields, a number is no number, below its least or over 2^40, or a time lies before the one above it.
    """
    with closing(text_lines(path)) as lines:
        yield from _checked(path, lines, formats)


def _checked(path: Path, lines: Iterator[str], formats: Sequence[Format]) -> Iterator[Row]:
    reader = csv.reader(lines)
    try:
        header = next(reader, None)
        if header is None:
            raise bad_line(path, 1, "the file is empty", f"it needs a header such as {','.join(formats[0].required)}")
        header = [name.strip() for name in header]
        format = _format_of(path, header, formats)
        index = {name: header.index(name) for name in format.columns if name in header}
        time_at, prompt_at, output_at = (index[name] for name in format.required)
        session_at = index.get(format.session or "")
        turn_at = index.get(format.turn or "")
        last_ns, last_line = 0, 0
        for fields in reader:
            if not fields:
                continue
            line = reader.line_num
            if len(fields) != len(header):
                what = f"{len(fields)} fields where the header has {len(header)}"
                raise bad_line(path, line, what, f"write {','.join(header)}")
            try:
                time_ns = format.time_ns(fields[time_at])
            except ValueError as error:
                raise bad_line(path, line, f"{format.time} is {fields[time_at]!r}", str(error)) from None
            if last_line and time_ns < last_ns:
                what = f"{format.time} is {(last_ns - time_ns) / 1e9:g} s before line {last_line}"
                raise bad_line(path, line, what, f"sort the file by {format.time}")
            last_ns, last_line = time_ns, line
            yield Row(
                line,
                time_ns,
                _whole(path, line, format.prompt_tokens, fields[prompt_at], 1),
                _whole(path, line, format.output_tokens, fields[output_at], 1),
                None if session_at is None else _whole(path, line, header[session_at], fields[session_at], 0),
                None if turn_at is None else _whole(path, line, header[turn_at], fields[turn_at], 0),
            )
    except csv.Error as error:
        raise bad_line(path, reader.line_num, f"this is no CSV ({error})", "check the quotes") from None


def _format_of(path: Path, header: list[str], formats: Sequence[Format]) -> Format:
    format = max(formats, key=lambda f: len(set(header) & set(f.columns)))
    if not set(header) & set(format.columns):
        known = " or ".join(",".join(f.required) for f in formats)
        raise bad_line(path, 1, f"no known column in the header {','.join(header)[:200]!r}", f"write {known}")
    for name in format.required:
        if name not in header:
            others = [column for column in header if column not in format.columns]
            cure = f"is it {others[0]!r}?" if len(others) == 1 else f"{format.name} needs {','.join(format.required)}"
            raise bad_line(path, 1, f"no column {name!r}", cure)
    for name in header:
        if name not in format.columns:
            raise bad_line(path, 1, f"unknown column {name!r}", did_you_mean(name, format.columns))
        if header.count(name) > 1:
            raise bad_line(path, 1, f"two columns are called {name!r}", "remove one")
    if format.turn in header and format.session not in header:
        raise bad_line(path, 1, f"a column {format.turn!r} without {format.session!r}", f"add {format.session!r}")
    return format


def _whole(path: Path, line: int, name: str, text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        raise bad_line(path, line, f"{name} is {text[:40]!r}", "it must be a whole number") from None
    if value < least:
        raise bad_line(path, line, f"{name} is {value}", f"it must be at least {least}; drop lines of failed calls")
    if value > MAX_TOKENS:
        raise bad_line(path, line, f"{name} is {value}", "it must be at most 2^40")
    return value
