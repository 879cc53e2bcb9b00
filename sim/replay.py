"""Replays an operation trace on any device allocator: what each operation got, and the books after it."""

from __future__ import annotations

import csv
import gzip
import io
import os
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Final

import pyarrow as pa
import pyarrow.parquet as pq

from hbmtwin.allocators.caching import ConfError, UnsafeState
from hbmtwin.allocators.contract import DeviceAllocator, Driver
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.allocators.stats import ACTIVE_BYTES, ALLOCATED_BYTES, REQUESTED_BYTES, RESERVED_BYTES, StatsGrid
from hbmtwin.workloads.formats.memory_trace import POOL_FLAGS, MemoryOp, MemoryTrace

FEATURES: Final[Mapping[str, str]] = {
    "record_stream": "streams",
    "erase_stream": "streams",
    "event_complete": "streams",
    "synchronize": "streams",
    "empty_cache": "empty_cache",
    "empty_virt_addr_cache": "virtual_memory",
    "set_conf": "settings",
    "set_fraction": "settings",
    "reset_peak": "statistics",
    "reset_accumulated": "statistics",
    "mempool_begin": "pools",
    "mempool_end": "pools",
    "mempool_delete": "pools",
    "workspace": "workspace",
}
"""The feature that an allocator must offer for an operation; those that are missing need none."""
_BYTES: Final = {
    "reserved_bytes": RESERVED_BYTES,
    "allocated_bytes": ALLOCATED_BYTES,
    "requested_bytes": REQUESTED_BYTES,
    "active_bytes": ACTIVE_BYTES,
}
_COUNTERS: Final = ("num_device_alloc", "num_device_free", "num_alloc_retries")
PER_OP: Final = ("index", "op", "id", "address", *_BYTES, *_COUNTERS, "oom")
"""Columns of the table with one row per operation."""
PER_OP_ENDINGS: Final = (".csv", ".csv.gz", ".parquet")
_TAGS: Final = {tag.name.lower(): tag for tag in Tag}


class ReplayError(ValueError):
    """A trace or a setting that this allocator cannot take: what, where, and the cure."""


@dataclass(frozen=True, slots=True)
class OpResult:
    """What one operation got."""

    index: int
    """Row of the trace, from 0."""
    op: str
    id: int | str | None
    address: int | None
    """Absolute, of malloc, free and workspace; None where nothing was given."""
    oom: bool
    """It ended in OutOfMemory."""
    error: str
    """``ValueError: text`` of a refusal after which the real one goes on, such as a bad setting; of an OutOfMemory
    torch's text, where the allocator has one; else empty."""
    stray: bool = False
    """It did nothing, since no malloc before it has its id."""


def make_allocator(name: str, driver: Driver, settings: Mapping[str, object]) -> DeviceAllocator:
    """A device allocator by its registered name, with those settings of its ``Config`` that are given.

    One that must be told its bytes (``limit_bytes``) gets the whole device. Raise UnknownPolicy, or ReplayError for a
    setting that it has not or refuses, OutOfMemory if its region does not fit.
    """
    make: Any = device_allocators.get(name)
    known = {field.name: field for field in fields(make.Config)}
    for setting in settings:
        if setting not in known:
            raise ReplayError(f"{name} has no setting {setting!r}; leave it out, or choose an allocator that has it")
    given = dict(settings)
    if "limit_bytes" in known and known["limit_bytes"].default is MISSING:
        given.setdefault("limit_bytes", driver.mem_info()[1])
    try:
        allocator: DeviceAllocator = make(driver, make.Config(**given))
    except (ValueError, ConfError) as error:
        raise ReplayError(f"{name}: {error}") from None
    return allocator


def replay(ops: Iterable[MemoryOp], allocator: DeviceAllocator, driver: Driver) -> Iterator[OpResult]:
    """Carry out each operation; yield what it got before the next is begun, so that the books can be read between.

    Operations on an id that owns nothing (its malloc failed, or asked for 0 bytes, or it was freed) do nothing. Raise
    ReplayError for an operation that the allocator lacks a feature for, for a malloc of an id that was used before, and
    where the real allocator would break its own memory; it names file and line where *ops* are a MemoryTrace. Ids that
    rise one by one cost no memory, others O(mallocs).
    """
    verbs = _Verbs(allocator, driver)
    carry_out = verbs.by_name()
    for index, op in enumerate(ops):
        feature = FEATURES.get(op.op)
        if feature is not None and feature not in allocator.features:
            offers = ", ".join(sorted(allocator.features))
            why = f"{allocator.name} has no feature {feature!r} (it offers {offers})"
            raise _stopped(ops, index, op, f"{why}; choose an allocator that has it, or leave such operations out")
        address, oom, error = None, False, ""
        stray = op.op in _OF_TENSOR and op.id not in verbs.used
        try:
            address = carry_out[op.op](op)
        except OutOfMemory as shortage:
            oom, error = True, shortage.torch_message
        except UnsafeState as unsafe:
            raise _stopped(ops, index, op, unsafe) from None
        except (ValueError, RuntimeError) as refusal:
            if op.op not in _REFUSABLE:
                raise _stopped(ops, index, op, refusal) from None
            kind = ValueError if isinstance(refusal, ValueError) else RuntimeError
            error = f"{kind.__name__}: {refusal}"
        yield OpResult(index, op.op, op.id, address, oom, error, stray)


def _stopped(ops: Iterable[MemoryOp], index: int, op: MemoryOp, why: object) -> ReplayError:
    place = f"{ops.place}: " if isinstance(ops, MemoryTrace) else ""
    return ReplayError(f"{place}operation {index}, {op.op}: {why}")


_REFUSABLE: Final = frozenset(
    ("set_conf", "set_fraction", "mempool_begin", "mempool_end", "mempool_delete", "empty_virt_addr_cache")
)
"""Operations that the real allocator refuses with an error and goes on."""
_OF_TENSOR: Final = frozenset(("free", "record_stream", "erase_stream"))


class _Ids:
    """Numbers that were given out: a run of neighbours as its two ends, and a set of what lies off it."""

    def __init__(self) -> None:
        self.low = self.end = 0
        self.others: set[int] = set()

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and (self.low <= number < self.end or number in self.others)

    def add(self, number: int) -> None:
        """Note a new number; O(1) amortized."""
        if self.low == self.end:
            self.low, self.end = number, number + 1
        elif number != self.end:
            self.others.add(number)
        else:
            self.end += 1
            while self.end in self.others:
                self.others.remove(self.end)
                self.end += 1


class _Verbs:
    """What each word of the trace calls, and who owns what."""

    def __init__(self, allocator: Any, driver: Driver) -> None:
        self.allocator = allocator
        self.driver = driver
        self.handles: dict[int | str | None, int] = {}
        self.used = _Ids()

    def by_name(self) -> dict[str, Callable[[MemoryOp], int | None]]:
        a = self.allocator
        return {
            "malloc": self.malloc,
            "free": self.free,
            "record_stream": self.record_stream,
            "erase_stream": self.erase_stream,
            "event_complete": lambda op: a.complete_events(op.stream, int(op.arg) if op.arg else None),
            "synchronize": lambda op: a.synchronize(),
            "empty_cache": lambda op: a.empty_cache(),
            "empty_virt_addr_cache": lambda op: a.empty_virt_addr_cache(),
            "set_conf": lambda op: a.set_allocator_settings(op.arg),
            "set_fraction": lambda op: a.set_per_process_memory_fraction(float(op.arg)),
            "reset_peak": lambda op: a.reset_peak_memory_stats(),
            "reset_accumulated": lambda op: a.reset_accumulated_memory_stats(),
            "mempool_begin": lambda op: a.mempool_begin(op.id, **{flag: flag in op.arg for flag in POOL_FLAGS}),
            "mempool_end": lambda op: a.mempool_end(op.id),
            "mempool_delete": lambda op: a.mempool_delete(op.id),
            # A request for nothing never reaches an allocator: the real one answers it with a null pointer.
            "workspace": lambda op: a.workspace(op.size, op.stream or 0) if op.size else None,
            "other_memory": lambda op: self.driver.set_tenants(op.size),
        }

    def malloc(self, op: MemoryOp) -> int | None:
        if not isinstance(op.id, int):
            raise ValueError(f"id is {op.id!r}; it must be a whole number")
        if op.id in self.used:
            raise ValueError(f"id {op.id} was used by a malloc before; give each malloc a number of its own")
        self.used.add(op.id)
        if op.size == 0:
            return None  # torch answers with a null pointer before any allocator sees it
        tag = _TAGS.get(op.tag, Tag.ACTIVATION)
        handle: int = self.allocator.malloc(op.size, stream=op.stream or 0, tag=tag, owner=op.owner)
        self.handles[op.id] = handle
        address: int = self.allocator.address(handle)
        return address

    def free(self, op: MemoryOp) -> int | None:
        handle = self.handles.pop(op.id, None)
        if handle is None:
            return None
        address: int = self.allocator.address(handle)
        self.allocator.free(handle)
        return address

    def record_stream(self, op: MemoryOp) -> None:
        if op.id in self.handles:
            self.allocator.record_stream(self.handles[op.id], op.stream)

    def erase_stream(self, op: MemoryOp) -> None:
        if op.id in self.handles:
            self.allocator.erase_stream(self.handles[op.id], op.stream, int(op.arg))


@dataclass(slots=True)
class Tally:
    """Counts what went by."""

    operations: int = 0
    ooms: int = 0
    first_oom_index: int | None = None
    first_oom_message: str = ""
    """torch's text, where the allocator has one."""
    errors: int = 0
    first_error: str = ""
    strays: int = 0
    """Operations on ids that no malloc before them has."""
    first_stray: str = ""

    def count(self, results: Iterable[OpResult]) -> Iterator[OpResult]:
        """Hand results on, counted."""
        for result in results:
            self.operations += 1
            if result.oom:
                self.ooms += 1
                if self.first_oom_index is None:
                    self.first_oom_index, self.first_oom_message = result.index, result.error
            elif result.error:
                self.errors += 1
                self.first_error = self.first_error or f"operation {result.index}, {result.op}: {result.error}"
            if result.stray:
                self.strays += 1
                self.first_stray = self.first_stray or f"operation {result.index}, {result.op} of id {result.id}"
            yield result


# -- the table with one row per operation ------------------------------------------------------------------------------


def per_op_rows(results: Iterable[OpResult], allocator: DeviceAllocator) -> Iterator[tuple[Any, ...]]:
    """A row of :data:`PER_OP` for each result; addresses are offsets from the first one that was given."""
    books = _books(allocator)
    first: int | None = None
    for r in results:
        if first is None:
            first = r.address
        offset = None if r.address is None or first is None else r.address - first
        yield (r.index, r.op, r.id, offset, *books(), int(r.oom))


def _books(allocator: DeviceAllocator) -> Callable[[], tuple[int, ...]]:
    """What reads the bytes and counters of a row: from the grid where there is one, since all statistics cost more."""
    grid = getattr(allocator, "grid", None)
    if isinstance(grid, StatsGrid):
        rows = tuple(_BYTES.values())
        return lambda: (*map(grid.total, rows), grid.num_device_alloc, grid.num_device_free, grid.num_alloc_retries)
    keys = (*(f"{name}.all.current" for name in _BYTES), *_COUNTERS)

    def from_statistics() -> tuple[int, ...]:
        stats = allocator.stats()
        return tuple(stats[key] for key in keys)

    return from_statistics


def write_per_op(rows: Iterable[tuple[Any, ...]], path: Path, *, trace: Path | None = None) -> None:
    """Write such rows as the name says: ``.csv``, ``.csv.gz`` or ``.parquet``; the file appears whole or not at all.

    Through a symbolic link its target is written. Raise ReplayError, before a row is taken, for another name, for
    what is there and no regular file, and for the *trace* that the rows are made from; OSError if it cannot be written.
    """
    target = _per_op_target(path, trace)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        raw = partial.open("wb")
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror}); choose another place") from None
    try:
        with raw:
            if path.name.endswith(".parquet"):
                pq.write_table(_table(rows), raw)
            elif path.name.endswith(".gz"):
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                    _write_csv(rows, packed)
            else:
                _write_csv(rows, raw)
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def _per_op_target(path: Path, trace: Path | None) -> Path:
    """The file that *path* leads to, if it may be written."""
    if not path.name.endswith(PER_OP_ENDINGS):
        raise ReplayError(f"{path}: the table's name must end in {', '.join(PER_OP_ENDINGS)}; choose such a name")
    target = Path(os.path.realpath(path))
    if target.is_symlink() or (target.exists() and not target.is_file()):
        raise ReplayError(f"{path}: is there and no regular file; choose another name for the table")
    if trace is not None and target.exists() and trace.exists() and target.samefile(trace):
        raise ReplayError(f"{path}: is the trace that is replayed; choose another name for the table")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {target.parent}; create it first, or choose another")
    return target


def _write_csv(rows: Iterable[tuple[Any, ...]], out: BinaryIO | gzip.GzipFile) -> None:
    with io.TextIOWrapper(out, encoding="utf-8", newline="\n") as text:
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(PER_OP)
        writer.writerows(rows)


def _table(rows: Iterable[tuple[Any, ...]]) -> pa.Table:
    """All rows as columns, eight bytes a number; names of pools among the ids make that column text."""
    numbers = {name: array("q") for name in PER_OP if name not in ("op", "id", "address")}
    others: dict[str, list[Any]] = {"op": [], "id": [], "address": []}
    for row in rows:
        for name, value in zip(PER_OP, row, strict=True):
            if name in others:
                others[name].append(value)
            else:
                numbers[name].append(value)
    if any(isinstance(identity, str) for identity in others["id"]):
        others["id"] = [None if identity is None else str(identity) for identity in others["id"]]
        id_type = pa.string()
    else:
        id_type = pa.int64()
    types = {"op": pa.string(), "id": id_type, "address": pa.int64()}
    columns = {
        name: pa.array(others[name], types[name]) if name in others else pa.array(numbers[name], pa.int64())
        for name in PER_OP
    }
    return pa.table(columns)
