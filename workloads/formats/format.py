"""What a reader knows of one format: its columns, and how a line of them becomes a row.

A format is told by its names: the columns of a CSV or Parquet file, or the keys of a JSON object. Columns may stand in
any order; unknown ones are refused, as a misspelt ``session`` would else go unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hbmtwin.workloads.formats.rows import BadRow, Row
from hbmtwin.workloads.suggest import did_you_mean

Columns = Mapping[str, int]
"""Where among the values of a line each column that is there stands."""
Parse = Callable[[int, Sequence[Any]], Row | None]
"""From a line's number and values to its row; None for a call that failed. Raises BadRow."""


@dataclass(slots=True)
class Tally:
    """What one pass over a file left out."""

    bad_lines: int = 0
    first_bad: str = ""
    """The error of the first of them."""
    failed_calls: int = 0


class Settings(NamedTuple):
    """What whoever reads a file may say about it."""

    block_size: int | None = None
    """Tokens that an id of the file stands for; None: the format's."""
    keep_failed: bool = False
    """Send failed calls too, each for one token."""


class Format(NamedTuple):
    """One format. A new one is one more of these in :mod:`hbmtwin.workloads.formats.traces`."""

    name: str
    """What ``workload.trace_format`` calls it."""
    title: str
    """What errors call a file of it."""
    required: tuple[str, ...]
    time: str
    """The column that says when; without it a file has lengths only."""
    parser: Callable[[Columns, Settings], Parse]
    """Makes the function for the lines of one pass; it may keep what later lines need."""
    optional: tuple[str, ...] = ()
    tick_ns: int = 0
    """Times are multiples of this, so that many requests share one; 0: they are exact."""
    block_size: int = 0
    """Tokens that an id stands for unless told otherwise; 0: there are none."""
    note: str = ""
    """What whoever runs it has to know."""

    @property
    def columns(self) -> tuple[str, ...]:
        """All columns, those of an example first."""
        return (*self.required, *self.optional)

    @property
    def example(self) -> str:
        """The columns of a file that can be replayed."""
        return ",".join(self.required if self.time in self.required else (self.time, *self.required))


NO_TRACES: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"client", "windows", "dataset"}),
        "this is a ServeGen file, a model of clients and no trace; make a model of it with `hbmtwin workload learn`",
    ),
    (
        frozenset({"id", "requests"}),
        "this is a conversation with all of its requests in one object, as upstream weka files are; write one line for "
        "each request, with id, t, in, out and hash_ids",
    ),
    (
        frozenset({"conversations"}),
        "these are ShareGPT's texts, and how many tokens a text has depends on a tokenizer, which hbmtwin does not "
        "have; count them with the model's own, and write prompt_tokens and output_tokens",
    ),
    (
        frozenset({"prompt_time", "token_time"}),
        "these are measured step times (splitwise-sim's perf_model.csv), no requests; take a file of arrivals",
    ),
    (
        frozenset({"running", "waiting"}),
        "this is an engine's log over time, no requests; take the file with one request a line",
    ),
)
"""Files that stand beside traces and are none: what gives them away, and what to say."""


def format_of(names: Sequence[str], formats: Sequence[Format]) -> Format:
    """The format that *names* belong to: all it requires is there, or as much as of no other. Raise BadRow."""
    found = set(names)
    for marks, said in NO_TRACES:
        if marks <= found:
            what, _, cure = said.partition("; ")
            raise BadRow(what, cure)
    format = max(formats, key=lambda f: (found >= set(f.required), len(found & set(f.columns))))
    if not found & set(format.columns):
        known = ", ".join(f.name for f in formats[1:])
        cure = f"write {formats[0].example}, or one of the formats {known}"
        raise BadRow(f"no known column in {','.join(names)[:200]!r}", cure)
    check_columns(names, format)
    return format


def check_columns(names: Sequence[str], format: Format) -> None:
    """Raise BadRow where a column is missing, unknown or there twice."""
    for name in format.required:
        if name not in names:
            others = [column for column in names if column not in format.columns]
            cure = f"is it {others[0]!r}?" if len(others) == 1 else f"{format.title} needs {format.example}"
            raise BadRow(f"no column {name!r}", cure)
    for name in names:
        if name not in format.columns:
            raise BadRow(f"unknown column {name!r}", did_you_mean(name, format.columns))
        if names.count(name) > 1:
            raise BadRow(f"two columns are called {name!r}", "remove one")
    if "session" in format.columns and "turn" in names and "session" not in names:
        raise BadRow("a column 'turn' without 'session'", "add 'session'")
