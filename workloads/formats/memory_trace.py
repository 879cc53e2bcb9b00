"""The operation trace: one row is one call that a program makes of a device allocator.

Columns ``op,id,size,stream,arg``; an ``index`` may stand in front, more columns behind, of which ``step``, ``time_ns``,
``tag`` and ``owner`` are ours. What an operation does not use is empty (a recorded run writes -1 or 0 there). A row's
number, from 0, is its index. CSV, plain or gzip, and Parquet hold the same; both are read as a stream.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from hbmtwin.workloads.formats.lines import bad_line, text_lines
from hbmtwin.workloads.formats.whole_file import replaced
from hbmtwin.workloads.records import WorkloadError
from hbmtwin.workloads.suggest import did_you_mean

COLUMNS: Final = ("op", "id", "size", "stream", "arg")
STAMPS: Final = ("step", "time_ns", "tag", "owner")
"""Columns behind the five that say when, for what and for whom; a replay hands the last two to the allocator."""
POOL_FLAGS: Final = ("use_on_oom", "no_split")
_ROWS_AT_ONCE: Final = 1 << 16
_LARGEST: Final = 1 << 63


class MemoryOp(NamedTuple):
    """One operation; a field that the operation does not use has its default."""

    op: str
    id: int | str | None = None
    """Number of a tensor, never used again for another; for ``mempool_*`` the pool's name."""
    size: int = 0
    """Bytes."""
    stream: int | None = None
    """Index of a stream, 0 the default one; None is all streams for ``event_complete``."""
    arg: str = ""
    step: int = -1
    time_ns: int = -1
    tag: str = ""
    owner: int = -1


class Uses(NamedTuple):
    """Which columns an operation uses, and what stands there."""

    id: Literal["", "tensor", "pool"] = ""
    size: bool = False
    stream: Literal["", "one", "one or all"] = ""
    arg: Literal["", "stream", "count or all", "settings", "fraction", "pool flags"] = ""


OPERATIONS: Final[Mapping[str, Uses]] = {
    "malloc": Uses(id="tensor", size=True, stream="one"),
    "free": Uses(id="tensor"),
    "record_stream": Uses(id="tensor", stream="one"),
    "erase_stream": Uses(id="tensor", stream="one", arg="stream"),
    "event_complete": Uses(stream="one or all", arg="count or all"),
    "synchronize": Uses(),
    "empty_cache": Uses(),
    "empty_virt_addr_cache": Uses(),
    "set_conf": Uses(arg="settings"),
    "set_fraction": Uses(arg="fraction"),
    "reset_peak": Uses(),
    "reset_accumulated": Uses(),
    "mempool_begin": Uses(id="pool", arg="pool flags"),
    "mempool_end": Uses(id="pool"),
    "mempool_delete": Uses(id="pool"),
    "workspace": Uses(size=True, stream="one"),
    "other_memory": Uses(size=True),
}
"""Every operation there is; a reader refuses others."""


class MemoryTrace(Iterator[MemoryOp]):
    """The operations of a file, in order, and where the last one stands."""

    def __init__(self, path: Path, allocator: str | None) -> None:
        self.path = path
        self._is_parquet = _is_parquet(path)
        self._line: int | None = None
        self._ops = self._checked(allocator)

    def __next__(self) -> MemoryOp:
        return next(self._ops)

    @property
    def place(self) -> str:
        """``FILE:LINE`` of CSV, ``FILE: row N`` (from 0) of Parquet, for the operation that was read last."""
        return str(self.path) if self._line is None else _place(self.path, self._line, self._is_parquet)

    def close(self) -> None:
        """Close the file; there are no further operations."""
        self._ops.close()

    def _checked(self, allocator: str | None) -> Generator[MemoryOp, None, None]:
        only = _Only(allocator)
        with closing(_parquet_rows(self.path) if self._is_parquet else _csv_rows(self.path)) as rows:
            for self._line, row in rows:
                try:
                    if only.keeps(row.get("allocator")):
                        yield _operation(row)
                except ValueError as error:
                    raise WorkloadError(f"{self.place}: {error}") from None


def read_memory_trace(path: str | Path, *, allocator: str | None = None) -> MemoryTrace:
    """The operations of a CSV (plain or gzip) or Parquet file, in order, checked; nothing is held but some rows.

    *allocator* keeps the operations of that one where a recorded run had several. Reading on raises WorkloadError with
    file and line (Parquet: row from 0) on a missing column, an unknown operation, or a value that its operation cannot
    have.
    """
    return MemoryTrace(Path(path), allocator)


def write_memory_trace(ops: Iterable[MemoryOp], path: str | Path, *, stamps: bool = False) -> None:
    """Write operations as Parquet if the name ends in ``.parquet``, else as CSV, gzip if it ends in ``.gz``.

    With *stamps* the columns of :data:`STAMPS` stand behind. Same operations, same bytes; the file appears whole or not
    at all. Raise OSError if it cannot be written.
    """
    path = Path(path)
    width = len(COLUMNS) + len(STAMPS) * stamps
    with replaced(path) as partial:
        if path.suffix == ".parquet":
            _write_parquet(ops, partial, width)
        else:
            with _text(partial, packed=path.suffix == ".gz") as out:
                writer = csv.writer(out, lineterminator="\n")
                writer.writerow(MemoryOp._fields[:width])
                writer.writerows(_cells(op)[:width] for op in ops)


# -- rows of both kinds of files: line or row number, and values by column ------------------------------------------

_Values = Mapping[str, object]


def _is_parquet(path: Path) -> bool:
    try:
        with path.open("rb") as raw:
            return path.suffix == ".parquet" or raw.read(4) == b"PAR1"
    except OSError:
        return False  # whoever opens it next says what is wrong


def _place(path: Path, line: int, is_parquet: bool) -> str:
    return f"{path}: row {line}" if is_parquet else f"{path}:{line}"


def _csv_rows(path: Path) -> Generator[tuple[int, _Values], None, None]:
    with closing(text_lines(path)) as lines:
        reader = csv.reader(lines)
        try:
            header = [name.strip() for name in next(reader, [])]
            _check_header(f"{path}:1", header)
            for fields in reader:
                if not fields:
                    continue
                if len(fields) != len(header):
                    what = f"{len(fields)} fields where the header has {len(header)}"
                    raise bad_line(path, reader.line_num, what, "put a value with commas between double quotes")
                yield reader.line_num, dict(zip(header, fields, strict=True))
        except csv.Error as error:
            raise bad_line(path, reader.line_num, f"this is no CSV ({error})", "check the quotes") from None


def _parquet_rows(path: Path) -> Generator[tuple[int, _Values], None, None]:
    with path.open("rb") as raw:
        if raw.read(4) != b"PAR1":
            raise WorkloadError(f"{path}: this is not a Parquet file; if it is CSV, let its name end in .csv")
    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            _check_header(str(path), names)
            for field in file.schema_arrow:
                if field.name in COLUMNS and pa.types.is_nested(field.type):
                    what = f"column {field.name!r} is of type {field.type}"
                    raise WorkloadError(f"{path}: {what}; write one number or text a row")
            wanted = [name for name in (*COLUMNS, *STAMPS, "allocator") if name in names]
            row = 0
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=wanted):
                columns = batch.to_pydict()
                for values in zip(*(columns[name] for name in wanted), strict=True):
                    yield row, dict(zip(wanted, values, strict=True))
                    row += 1
    except pa.ArrowException as error:
        raise WorkloadError(f"{path}: this Parquet file is damaged ({error}); fetch or write it again") from None


def _check_header(place: str, names: Sequence[str]) -> None:
    for name in COLUMNS:
        if name not in names:
            raise WorkloadError(f"{place}: no column {name!r}; an operation trace needs {','.join(COLUMNS)}")
    for name in names:
        if names.count(name) > 1:
            raise WorkloadError(f"{place}: two columns are called {name!r}; remove one")


class _Only:
    """Keeps the rows of one allocator. Raise ValueError where a trace holds several and none was chosen."""

    def __init__(self, wanted: str | None) -> None:
        self.wanted = wanted
        self.first: object = None

    def keeps(self, name: object) -> bool:
        if self.wanted is not None:
            return name == self.wanted
        if self.first is None:
            self.first = name
        if name != self.first:
            raise ValueError(f"operations of {name!r} among those of {self.first!r}; choose one of the two allocators")
        return True


# -- one row -----------------------------------------------------------------------------------------------------------


def _operation(row: _Values) -> MemoryOp:
    """The record of a row. Raise ValueError, ``what; cure``."""
    op = str(row["op"] or "").strip()
    uses = OPERATIONS.get(op)
    if uses is None:
        raise ValueError(f"unknown operation {op!r}; {did_you_mean(op, OPERATIONS)}")
    identity: int | str | None = None
    if uses.id == "tensor":
        identity = _whole(op, "id", row["id"], least=0)
    elif uses.id == "pool":
        identity = "" if row["id"] is None else str(row["id"]).strip()
        if not identity:
            raise ValueError(f"{op} without an id; write the pool's name there")
    stream = None
    if uses.stream and (uses.stream == "one" or row["stream"] not in (None, "", -1, "-1")):
        stream = _whole(op, "stream", row["stream"] or 0, least=0)
    return MemoryOp(
        op,
        identity,
        _whole(op, "size", row["size"], least=0) if uses.size else 0,
        stream,
        _arg(op, uses, "" if row["arg"] is None else str(row["arg"]).strip()),
        _stamp("step", row),
        _stamp("time_ns", row),
        str(row.get("tag") or ""),
        _stamp("owner", row),
    )


def _arg(op: str, uses: Uses, text: str) -> str:
    if uses.arg == "stream" or (uses.arg == "count or all" and text):
        return str(_whole(op, "arg", text, least=0))
    if uses.arg == "fraction":
        try:
            fraction = float(text)
        except ValueError:
            fraction = math.nan
        if not 0 <= fraction <= 1:
            raise ValueError(f"arg of {op} is {text!r}; it must be a number from 0 to 1")
    elif uses.arg == "pool flags":
        for flag in text.split("|") if text else ():
            if flag not in POOL_FLAGS:
                raise ValueError(f"arg of {op} is {text!r}; write use_on_oom, no_split, both joined by |, or nothing")
    return text if uses.arg else ""


def _whole(op: str, column: str, value: object, *, least: int) -> int:
    try:
        if isinstance(value, float) and not value.is_integer():
            raise ValueError
        number = int(cast("int | float | str", "" if value is None else value))
    except (TypeError, ValueError):
        raise ValueError(f"{column} of {op} is {value!r}; it must be a whole number") from None
    if not least <= number < _LARGEST:
        raise ValueError(f"{column} of {op} is {number}; it must be at least {least} and below 2^63")
    return number


def _stamp(column: str, row: _Values) -> int:
    value = row.get(column)
    return -1 if value is None or value == "" else _whole(str(row["op"]), column, value, least=-1)


# -- writing ---------------------------------------------------------------------------------------------------------

_SCHEMA: Final = pa.schema(
    [
        ("op", pa.string()),
        ("id", pa.string()),  # numbers of tensors and names of pools
        ("size", pa.int64()),
        ("stream", pa.int64()),
        ("arg", pa.string()),
        ("step", pa.int64()),
        ("time_ns", pa.int64()),
        ("tag", pa.string()),
        ("owner", pa.int64()),
    ]
)


def _cells(op: MemoryOp) -> tuple[object, ...]:
    """The row of an operation, None where nothing stands."""
    uses = OPERATIONS[op.op]
    return (
        op.op,
        None if op.id is None else str(op.id),
        op.size if uses.size else None,
        op.stream,
        op.arg or None,
        None if op.step < 0 else op.step,
        None if op.time_ns < 0 else op.time_ns,
        op.tag or None,
        None if op.owner < 0 else op.owner,
    )


def _write_parquet(ops: Iterable[MemoryOp], path: Path, width: int) -> None:
    schema = pa.schema(list(_SCHEMA)[:width])
    rows = iter(ops)
    with pq.ParquetWriter(path, schema) as writer:
        while chunk := list(islice(rows, _ROWS_AT_ONCE)):
            columns = list(zip(*map(_cells, chunk), strict=True))
            arrays = [pa.array(values, field.type) for values, field in zip(columns, schema, strict=False)]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))


@contextmanager
def _text(path: Path, *, packed: bool) -> Iterator[io.TextIOWrapper]:
    with path.open("wb") as raw:
        binary = gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if packed else raw
        with io.TextIOWrapper(cast(BinaryIO, binary), encoding="utf-8", newline="\n") as out:
            yield out
