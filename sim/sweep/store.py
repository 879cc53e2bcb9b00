"""Rows of finished runs in a directory: each lands at once, by one rename, and is there for whoever starts again.

::

    DIR/runs/hbmtwin.json                   says that these are ours, and in which form
    DIR/runs/9e892673f2ac3c...parquet       one row, named by its run
    DIR/runs/.9e892673f2ac3c...partial      being written, or left by a process that was killed
    DIR/runs/.lock                          held by the one process that adds rows; the system lets go of it

A row is written once. What is half-written has another name and is removed; a file that holds no row of its name is
told and left out, and the run runs again. Whoever fails before the first row leaves no directory that was not there.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from errno import ENOSPC
from pathlib import Path
from types import TracebackType

import pyarrow as pa
import pyarrow.parquet as pq

from hbmtwin.sim.result import ResultError
from hbmtwin.sim.sweep.run_row import ROW_COLUMNS, Row
from hbmtwin.sim.sweep.scenario_key import HEX_DIGITS

FOLDER, MARK, LOCK = "runs", "hbmtwin.json", ".lock"
FORM = {"rows": 1}
"""What the mark says: raised when a row's columns change their meaning."""
_KINDS = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
SCHEMA = pa.schema([(name, _KINDS[kind]) for name, kind in ROW_COLUMNS.items()])
"""Said outright, so that a column without a value has its type."""


class RunStore:
    """The rows of a directory, which is made if need be. One process at a time has it open.

    Opening is O(rows), :meth:`add` O(1). Raise ResultError for a directory that is none of runs, that another process
    has open, or that cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        check_runs_directory(directory)
        self.directory = directory
        self.folder = directory / FOLDER
        self.remarks: tuple[str, ...] = ()
        """What lies among the runs and is none, in words."""
        self._made = [path for path in (self.folder, *self.folder.parents) if not path.exists()]
        """Directories that come to be with this, the innermost first."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.folder / LOCK)
            if not (self.folder / MARK).exists():
                with writing(self.folder / MARK) as staging:
                    staging.write_text(json.dumps(FORM) + "\n", encoding="utf-8")
            self._rows = self._read()
        except OSError as error:
            raise ResultError(f"{self.folder}: cannot be used: {error.strerror or error}") from None

    def finished(self) -> dict[str, Row]:
        """The rows so far, by the keys of their runs."""
        return dict(self._rows)

    def add(self, row: Row) -> None:
        """Let a row land. Raise ResultError if it cannot be written; the rows before it stand."""
        key = str(row["key"])
        sink = pa.BufferOutputStream()
        pq.write_table(table_of([row]), sink, use_dictionary=False, write_statistics=False, store_schema=False)
        with writing(self.folder / f"{key}.parquet") as staging:
            staging.write_bytes(sink.getvalue())
        self._rows[key] = row

    def close(self) -> None:
        """Let other processes have the directory. May be called again."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._leave_no_empty_one()
        self.close()

    def _leave_no_empty_one(self) -> None:
        """Remove what was made here, if no row landed and nobody put anything beside; we still hold the lock."""
        with suppress(OSError):
            if self._made and self._lock is not None and {p.name for p in self.folder.iterdir()} <= {MARK, LOCK}:
                (self.folder / MARK).unlink()
                (self.folder / LOCK).unlink()
                for path in self._made:
                    path.rmdir()  # fails for one that is not empty, and so for those around it

    def _read(self) -> dict[str, Row]:
        rows: dict[str, Row] = {}
        remarks: list[str] = []
        for path in sorted(self.folder.iterdir()):
            if path.name in (MARK, LOCK):
                continue
            if path.name.endswith(".partial"):
                if self._lock is not None:  # so nobody else writes here
                    path.unlink()
            elif re.fullmatch(rf"[0-9a-f]{{{HEX_DIGITS}}}\.parquet", path.name) is None:
                remarks.append(f"{path}: is no run of hbmtwin, and is left alone")
            elif (row := _row_of(path)) is None:
                remarks.append(f"{path}: does not hold the row of that run; the run runs again where it is wanted")
            else:
                rows[path.stem] = row
        self.remarks = tuple(remarks)
        return rows


def check_runs_directory(directory: Path) -> None:
    """Say whether runs may be stored in a directory: a new one, an empty one, or one of runs. Raise ResultError."""
    folder = directory / FOLDER
    try:
        if not directory.exists():
            return
        if not directory.is_dir():
            raise ResultError(f"{directory}: is no directory; choose another --out")
        mark = folder / MARK
        if mark.exists():
            form = json.loads(mark.read_text(encoding="utf-8"))
        elif _just_made(directory):
            return
        else:
            form = None
    except (OSError, ValueError) as error:
        raise ResultError(f"{directory}: cannot be read: {error}; choose another --out") from None
    if form is None:
        raise ResultError(f"{directory}: exists and holds no runs of hbmtwin; choose another --out or empty it")
    if form != FORM:
        raise ResultError(f"{directory}: its runs were stored by another release of hbmtwin; choose another --out")


def _just_made(directory: Path) -> bool:
    """Whether nothing is in a directory but what we make before the mark."""
    runs = [path.name for path in (directory / FOLDER).iterdir()] if (directory / FOLDER).is_dir() else []
    others = {path.name for path in directory.iterdir()} - {FOLDER}
    return not others and all(name == LOCK or name.startswith(f".{MARK}.") for name in runs)


def table_of(rows: Iterable[Row]) -> pa.Table:
    """Rows as a table; the same rows are the same bytes of Parquet."""
    return pa.Table.from_pylist(list(rows), schema=SCHEMA)


def _row_of(path: Path) -> Row | None:
    """The row in a file, None where it holds none of its name."""
    try:
        table = pq.ParquetFile(path).read(use_threads=False)
        rows = table.to_pylist() if table.schema.equals(SCHEMA) else []
    except (OSError, ValueError, pa.ArrowException):
        return None
    row: Row | None = rows[0] if len(rows) == 1 else None
    return row if row is not None and row["key"] == path.stem else None


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """A file to write, which is *path* once it is written; nothing is left if it is not. Raise ResultError."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        try:
            yield staging
            staging.replace(path)
        finally:
            staging.unlink(missing_ok=True)
    except OSError as error:
        what = "the disk is full; what has landed stays" if error.errno == ENOSPC else error.strerror or error
        raise ResultError(f"{path.parent}: cannot be written: {what}") from None


def _locked(path: Path) -> int | None:
    """An open file that no other process has locked; None where the file system knows no locks. Raise ResultError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise ResultError(
            f"{path.parent.parent}: another process adds runs to it; wait for its end, or choose another --out"
        ) from None
    except OSError:  # of a network without them: two processes would write the same bytes
        os.close(file)
        return None
    return file
