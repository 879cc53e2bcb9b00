"""The lines of a trace, whatever its format and however it is packed: CSV, JSON lines or Parquet, as checked rows.

::

    first bytes    PAR1            Parquet, read by row groups; its columns name the format
    first sign     {               JSON lines; the keys of the first object name it
                   anything else   CSV; its header names it
    (gzip)         1F 8B           unpacked on the way

Errors name a line of the file; of Parquet, a row, from 1.

Nothing is held but a line (of Parquet, some rows), what a format has to remember of sessions, and for files with turns
the last of each session.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from decimal import Decimal
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from hbmtwin.workloads.formats.format import Format, Parse, Settings, Tally, check_columns, format_of
from hbmtwin.workloads.formats.lines import bad_line, is_parquet, text_lines
from hbmtwin.workloads.formats.rows import BadRow, Row
from hbmtwin.workloads.formats.ticks import spread
from hbmtwin.workloads.plural import counted, were
from hbmtwin.workloads.records import WorkloadError

_ROWS_AT_ONCE = 1 << 12
_Lines = Generator[tuple[int, Sequence[Any] | BadRow], None, None]


class TraceReader:
    """Reads one file anew on each call of :meth:`rows`, in one of *formats*, or in *format* whatever its names say.

    With *skip_bad_lines* a line that is no request is left out and counted; a file that is broken as a whole (its
    header, its packing, its encoding) is refused all the same. With *jitter* requests that share a tick are spread
    over it by draws of *seed*. Raise WorkloadError where these do not go with the format.
    """

    def __init__(
        self,
        path: Path,
        formats: Sequence[Format],
        settings: Settings,
        *,
        format: Format | None = None,
        jitter: bool = False,
        skip_bad_lines: bool = False,
        seed: int = 0,
    ) -> None:
        self.path = path
        self.tally = Tally()
        """What the latest pass left out so far."""
        self.format: Format | None = format
        self.has_times = True
        """Whether the file says when; known from the first row on."""
        self._formats = formats
        self._settings = settings
        self._told = format
        self._jitter = jitter
        self._skip = skip_bad_lines
        self._seed = seed

    def rows(self) -> Generator[Row, None, None]:
        """Checked rows in order of time; blank lines are passed over.

        Raise WorkloadError with file and line when no format is known by its names, a column is missing, unknown or
        there twice, a line has too many or too few fields, a value is not what it must be, a time lies before the one
        above it, or the turns of a session do not rise.
        """
        rows = self._checked()
        with closing(rows):
            first = next(rows, None)
            if first is None:
                raise WorkloadError(f"{self.path}: {self._why_empty()}")
            tick_ns = self.format.tick_ns if self.format is not None else 0
            if not self._jitter:
                yield first
                yield from rows
            elif tick_ns and self.has_times:
                yield from spread(chain((first,), rows), tick_ns, self._seed)
            else:
                title = "this file" if self.format is None else self.format.title
                raise WorkloadError(f"{self.path}: jitter spreads times that are ticks; those of {title} are exact")

    def _why_empty(self) -> str:
        if self.tally.bad_lines:
            if self.tally.bad_lines == 1:
                return f"no requests in it; its only line is bad: {self.tally.first_bad}"
            return (
                f"no requests in it; all of its {self.tally.bad_lines} lines are bad, the first: {self.tally.first_bad}"
            )
        if self.tally.failed_calls:
            calls = "its only call" if self.tally.failed_calls == 1 else f"all of its {self.tally.failed_calls} calls"
            return f"no requests in it; {calls} failed; keep_failed sends them too"
        return "no requests in it; it has a header only"

    def notes(self) -> tuple[str, ...]:
        """What the latest pass left out, and what the format has to be known for, a sentence each."""
        told = []
        if self.tally.bad_lines:
            skipped = f"{counted(self.tally.bad_lines, 'bad line')} {were(self.tally.bad_lines)} skipped"
            told.append(f"{skipped}; the first: {self.tally.first_bad}")
        if self.tally.failed_calls:
            dropped = f"{counted(self.tally.failed_calls, 'failed call')} {were(self.tally.failed_calls)} dropped"
            told.append(f"{self.path}: {dropped}")
        if self.format is not None and self.format.note:
            told.append(f"{self.path}: {self.format.note}")
        return tuple(told)

    def _checked(self) -> Generator[Row, None, None]:
        one = _Pass(self.path, self._formats, self._settings, self._told)
        self.tally = tally = one.tally
        last_ns, last_line = 0, 0
        turns: dict[int, int] = {}
        with closing(one.lines()) as lines:
            for line, values in lines:
                try:
                    if isinstance(values, BadRow):
                        raise values
                    row = one.parse(line, values)
                    if row is None:
                        tally.failed_calls += 1
                        continue
                    if row.time_ns < last_ns:
                        early = f"{one.time} is {(last_ns - row.time_ns) / 1e9:g} s before line {last_line}"
                        raise BadRow(early, f"sort the file by {one.time}")
                    if row.turn is not None and row.session is not None:
                        last = turns.get(row.session, -1)
                        if row.turn <= last:
                            what = f"turn {row.turn} of session {row.session} follows its turn {last}"
                            raise BadRow(what, "the turns of a session must rise with time")
                        turns[row.session] = row.turn
                except BadRow as bad:
                    error = bad_line(self.path, line, bad.what, bad.cure)
                    if not self._skip:
                        raise error from None
                    tally.bad_lines += 1
                    tally.first_bad = tally.first_bad or str(error)
                    continue
                if not last_line:
                    self.format, self.has_times = one.format, one.has_times
                last_ns, last_line = row.time_ns, line
                yield row


class _Pass:
    """One pass over a file: its lines as values, and the function that makes rows of them."""

    def __init__(self, path: Path, formats: Sequence[Format], settings: Settings, format: Format | None) -> None:
        self.tally = Tally()
        self.format = format
        self.has_times = True
        self.time = ""
        self.parse: Parse
        self._path = path
        self._formats = formats
        self._settings = settings

    def lines(self) -> _Lines:
        if is_parquet(self._path):
            yield from self._parquet()
            return
        with closing(text_lines(self._path)) as text:
            first, skipped = "", 0
            while not first.strip():
                line = next(text, None)
                if line is None:
                    example = self._formats[0].example
                    raise bad_line(self._path, 1, "the file is empty", f"it needs a header such as {example}")
                first, skipped = line, skipped + 1
            again = chain(repeat("\n", skipped - 1), (first,), text)
            start = first.lstrip()[0]
            if start == "[":
                raise bad_line(
                    self._path,
                    skipped,
                    "this is a JSON array",
                    "write one object a line; texts such as ShareGPT's must be counted in tokens first",
                )
            yield from self._json(again) if start == "{" else self._csv(again)

    def _choose(self, names: Sequence[str]) -> Format:
        """Settle the format by the names of the columns, in the order in which the values will stand."""
        if self.format is None:
            self.format = format_of(names, self._formats)
        else:
            check_columns(names, self.format)
        format = self.format
        self.time = format.time
        self.has_times = format.time in names
        self.parse = format.parser({name: names.index(name) for name in names}, self._settings)
        return format

    def _csv(self, lines: Iterator[str]) -> _Lines:
        reader = csv.reader(lines)
        try:
            header = [name.strip() for name in next(filter(None, reader), [])]
            try:
                self._choose(header)
            except BadRow as bad:
                raise bad_line(self._path, reader.line_num, bad.what, bad.cure) from None
            width = len(header)
            for fields in reader:
                if len(fields) == width:
                    yield reader.line_num, fields
                elif fields:
                    what = f"{len(fields)} fields where the header has {width}"
                    yield reader.line_num, BadRow(what, f"write {','.join(header)}")
        except csv.Error as error:
            raise bad_line(self._path, reader.line_num, f"this is no CSV ({error})", "check the quotes") from None

    def _json(self, lines: Iterator[str]) -> _Lines:
        names: tuple[str, ...] = ()
        known: frozenset[str] = frozenset()
        for line, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                record = json.loads(text, parse_float=Decimal, parse_constant=_no_constant, object_pairs_hook=_no_twins)
            except (ValueError, ArithmeticError, RecursionError) as error:
                cure = f"write an object such as {_example(self.format or self._formats[0])}"
                yield line, BadRow(f"this is no JSON ({error})", cure)
                continue
            if not isinstance(record, dict):
                cure = f"write an object such as {_example(self.format or self._formats[0])}"
                yield line, BadRow(f"this is {_kind(record)} where an object is needed", cure)
                continue
            if not names:
                try:
                    format = self._choose(list(record))
                except BadRow as bad:
                    raise bad_line(self._path, line, bad.what, bad.cure) from None
                # Not only the columns of this object: another may have more of them.
                known = frozenset(format.columns)
                names = tuple(name for name in format.columns if name != format.time or self.has_times)
                self._choose(names)
            elif not record.keys() <= known:
                try:
                    check_columns(list(record), format)
                except BadRow as bad:
                    yield line, bad
                    continue
            yield line, [record.get(name) for name in names]

    def _parquet(self) -> _Lines:
        try:
            with pq.ParquetFile(self._path) as file:
                names = file.schema_arrow.names
                try:
                    self._choose(names)
                except BadRow as bad:
                    raise WorkloadError(f"{self._path}: {bad.what}; {bad.cure}") from None
                line = 0
                for batch in file.iter_batches(_ROWS_AT_ONCE):
                    for values in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                        line += 1
                        yield line, values
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            what = " ".join(str(error).split())[:200]
            raise WorkloadError(f"{self._path}: this Parquet file is damaged ({what}); write it again") from None


def _kind(value: object) -> str:
    """What kind of JSON value it is."""
    return "a list" if isinstance(value, list) else f"the value {str(value)[:40]!r}"


def _example(format: Format) -> str:
    return "{" + ", ".join(f'"{name}": ...' for name in format.example.split(",")) + "}"


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"two values are called {next(name for name in names if names.count(name) > 1)!r}")
    return record
