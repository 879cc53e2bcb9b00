"""Columns of a run, kept flat: machine integers in arrays, not objects.

Rows wait in a chunk until there are some thousands of them, then the books of all of them are compared, and they are
sorted into columns (:mod:`hbmtwin.sim.columns`): at the end of the run at the latest.

Timeline rows stand at step ends: on both sides of a change of the batch, where a request ends, and at the first step
end after each tick of a fixed interval of simulated time. Nothing here depends on how many steps an event took.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pandas as pd

from hbmtwin.allocators.contract import DeviceAllocator, KVPolicy
from hbmtwin.allocators.prefix_cache import CacheEvent
from hbmtwin.allocators.records import KVSequence, Tag
from hbmtwin.sim.books import DeviceTerms, Entry, Row, rows_of
from hbmtwin.sim.columns import Chunk, Columns
from hbmtwin.workloads.records import Request, Status

COUNT_COLUMNS = ("running", "waiting", "parked", "preemptions", "hit_tokens", "queried_tokens")
"""The columns of a timeline row that count things, not bytes: requests; sessions whose history waits for the next turn;
and so far preemptions, tokens found in memory at admission, and prompt tokens for which memory was searched then."""
Counts = tuple[int, int, int, int, int, int]
"""Their values; a plain tuple, as one is made at every step end."""


REQUEST_COLUMNS = (
    "id",
    "session",
    "turn",
    "sample",
    "tenant",
    "priority",
    "arrival_ns",
    "scheduled_ns",
    "first_token_ns",
    "end_ns",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "preemptions",
    "dropped_tokens",
)
TIMELINE_COLUMNS = ("time_ns", *Row._fields, *COUNT_COLUMNS)
MAX_MAPS = 16
"""Address maps kept of a run when no interval is given: when it is full, every second one is dropped."""


MapRow = tuple[int, int, str, int, int, int, str, str, int]
MAP_COLUMNS = ("time_ns", "op_index", "level", "address", "size", "requested", "state", "tag", "owner")


def device_rows(at: tuple[int, int], allocators: Sequence[DeviceAllocator]) -> Iterator[MapRow]:
    """Where every segment and block lies, at a moment and after so many operations. O(blocks)."""
    for allocator in allocators:
        for segment in allocator.walk():
            pool = f"{allocator.name}/{segment.pool}"
            requested = sum(b.requested for b in segment.blocks)
            yield (*at, "segment", segment.address, segment.size, requested, pool, "", -1)
            for b in segment.blocks:
                tag = "" if b.tag is None else b.tag.name.lower()
                yield (*at, "block", b.address, b.size, b.requested, b.state, tag, b.owner)


@dataclass(slots=True)
class RequestTimes:
    """What the engine notes of a request that is in the server; -1 = it has not happened."""

    request: Request
    scheduled_ns: int = -1
    first_token_ns: int = -1
    cached_tokens: int = 0
    preemptions: int = 0


@dataclass(slots=True)
class Recorder:
    """Collects rows; :meth:`timeline` and its sisters make the tables."""

    allocators: list[DeviceAllocator]
    """Watched from here on; make the recorder before anything is allocated, or the trace misses it."""
    interval_ns: int
    checkpoint_ns: int = 0
    steps_wanted: bool = False
    trace_wanted: bool = False
    events_wanted: bool = False
    op_index: int = 0
    step: int = 0
    """Of the run; the engine counts them."""
    now_ns: int = 0
    """Kept by the engine, so that operations can be stamped."""
    last_row_ns: int = -1
    """Time of the last timeline row, -1 before the first."""
    _rows: Chunk = field(default_factory=lambda: Chunk(0))
    """As wide as the first row."""
    _kv: KVPolicy | None = None
    """Whose numbers stand in them."""
    _devices: list[DeviceTerms] = field(default_factory=list)
    """Those of the rows that wait, in order."""
    _timeline: Columns = field(default_factory=lambda: Columns(TIMELINE_COLUMNS))
    _ended: Chunk = field(default_factory=lambda: Chunk(len(REQUEST_COLUMNS) + 1))
    _requests: Columns = field(default_factory=lambda: Columns((*REQUEST_COLUMNS, "how")))
    _ends: dict[tuple[Status, str], int] = field(default_factory=lambda: {(Status.COMPLETED, ""): 0})
    """How requests ended so far, by number."""
    _maps: list[list[MapRow]] = field(default_factory=list)
    _next_map_ns: int = 0
    _map_spacing_ns: int = 0
    _steps: dict[str, list[object]] = field(default_factory=dict)
    _trace: dict[str, list[object]] = field(default_factory=dict)
    _events: list[tuple[int, str, int, int, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._map_spacing_ns = self.checkpoint_ns or self.interval_ns
        self._steps = {name: [] for name in ("step", "start_ns", "duration_ns", "repeat", "seq_ids", "new_tokens")}
        self._steps |= {name: [] for name in ("context_tokens", "preempted", "step_ends_ns")}
        self._trace = {name: [] for name in ("op", "id", "size", "stream", "arg", "step", "time_ns", "tag", "owner")}
        self._trace["allocator"] = []
        allocators, self.allocators = self.allocators, []
        for allocator in allocators:
            self.watch(allocator)

    def watch(self, allocator: DeviceAllocator) -> None:
        """Count an allocator's operations from here on, and show it in address maps."""
        self.allocators.append(allocator)
        allocator.observer = partial(self._store, allocator.name) if self.trace_wanted else self._count

    def _count(self, op: str, id: int, size: int, stream: int, arg: str, tag: Tag | None, owner: int) -> None:
        self.op_index += 1

    def _store(
        self, allocator: str, op: str, id: int, size: int, stream: int, arg: str, tag: Tag | None, owner: int
    ) -> None:
        self.op_index += 1
        row = (op, id, size, stream, arg, self.step, self.now_ns, "" if tag is None else tag.name.lower(), owner)
        for column, value in zip(self._trace.values(), (*row, allocator), strict=True):
            column.append(value)

    def cache_event(self, event: CacheEvent) -> None:
        """Keep what happened to a key of the prefix cache."""
        self._events.append((self.now_ns, event.action, event.key, event.parent, event.block, event.group))

    def row(self, time_ns: int, row: Entry, counts: Counts, kv: KVPolicy) -> None:
        """Write a timeline row, and an address map when one is due. Raise BooksDoNotClose of a row that waited."""
        device, tokens, padding, num_running, numbers = row
        devices = self._devices
        if not devices or device is not devices[-1]:
            devices.append(device)
        self.last_row_ns = time_ns
        moment = (time_ns, len(devices) - 1, tokens, padding, num_running)
        values = moment + numbers + counts
        if self._kv is None:
            self._kv, self._rows = kv, Chunk(len(values))
        rows = self._rows
        rows.packed += rows.pack(*values)
        if len(rows.packed) >= rows.full_bytes:
            self.close_rows()
        if time_ns >= self._next_map_ns:
            self.address_map(time_ns, kv)
            if self.checkpoint_ns == 0 and len(self._maps) > MAX_MAPS:
                del self._maps[1::2]
                self._map_spacing_ns *= 2
            self._next_map_ns = (time_ns // self._map_spacing_ns + 1) * self._map_spacing_ns

    def close_rows(self) -> None:
        """Check that every row so far closes, and sort those that waited for it. O(rows). Raise BooksDoNotClose."""
        if not self._devices:
            return
        time_ns, *waiting = self._rows.columns()
        entries, counts = waiting[: -len(COUNT_COLUMNS)], waiting[-len(COUNT_COLUMNS) :]
        self._timeline.extend((time_ns, *rows_of(time_ns, self._devices, entries, self._kv), *counts))
        self._rows.clear()
        self._devices.clear()

    def address_map(self, time_ns: int, kv: KVPolicy) -> None:
        """Keep where every segment, block and KV block lies at this moment."""
        at = (time_ns, self.op_index)
        rows = list(device_rows(at, self.allocators))
        rows.extend((*at, "kv_block", k.address, k.size, k.token_bytes, k.state, "kv", k.owner) for k in kv.walk())
        if self._maps and self._maps[-1][0][0] == time_ns:
            self._maps.pop()  # the later one of the same moment is the truth
        self._maps.append(rows)

    def end_request(
        self,
        times: RequestTimes,
        end_ns: int,
        output_tokens: int,
        status: Status,
        reason: str,
        dropped_tokens: int = 0,
    ) -> None:
        """Write the row of a request that ended; *dropped_tokens* of its own were not held any more then."""
        id, session, turn, arrival_ns, prompt_tokens, _, _, _, tenant, _, sample, priority = times.request
        if self._ended.append(
            id,
            session,
            turn,
            sample,
            tenant,
            priority,
            arrival_ns,
            times.scheduled_ns,
            times.first_token_ns,
            end_ns,
            prompt_tokens,
            times.cached_tokens,
            output_tokens,
            times.preemptions,
            dropped_tokens,
            self._how(status, reason),
        ):
            self._sort_ended()

    def _how(self, status: Status, reason: str) -> int:
        if status is Status.COMPLETED and not reason:  # nearly all: hashing an enum's member is a call of Python's
            return 0
        return self._ends.setdefault((status, reason), len(self._ends))

    def _sort_ended(self) -> None:
        self._requests.extend(self._ended.columns())
        self._ended.clear()

    def leap(
        self,
        start_ns: int,
        duration_ns: int,
        repeat: int,
        scheduled: Sequence[tuple[KVSequence, int]],
        preempted: Sequence[KVSequence],
        end_of: Callable[[int], int],
    ) -> None:
        """Keep *repeat* equal steps, if ``steps_wanted``. Called before their counts are committed.

        *end_of* tells when a step of them ends, from 1.
        """
        s = self._steps
        s["step"].append(self.step)
        s["start_ns"].append(start_ns)
        s["duration_ns"].append(duration_ns)
        s["repeat"].append(repeat)
        s["seq_ids"].append([q.id for q, _ in scheduled])
        s["new_tokens"].append([new for _, new in scheduled])
        s["context_tokens"].append([q.num_computed_tokens for q, _ in scheduled])
        s["preempted"].append([q.id for q in preempted])
        s["step_ends_ns"].append([end_of(step) for step in range(1, repeat + 1)])

    def timeline(self) -> pd.DataFrame:
        """One row a moment: where every byte was, and what the server did. To be asked once, at the end.

        Raise BooksDoNotClose.
        """
        self.close_rows()
        return self._timeline.frame()

    def requests(self) -> pd.DataFrame:
        """One row a request, in order of its end. To be asked once, at the end."""
        self._sort_ended()
        frame = self._requests.frame()
        how = frame.pop("how").to_numpy()
        for name, texts in (
            ("status", [status.value for status, _ in self._ends]),
            ("reason", [reason for _, reason in self._ends]),
        ):
            frame[name] = pd.Series(np.array(texts, dtype=object)[how], dtype="str")
        return frame

    def checkpoints(self) -> pd.DataFrame:
        """Address maps of several moments, one row a segment, block or KV block."""
        return pd.DataFrame([row for rows in self._maps for row in rows], columns=MAP_COLUMNS)

    def steps(self) -> pd.DataFrame | None:
        """One row a leap, None unless asked for."""
        if not self.steps_wanted:
            return None
        frame = pd.DataFrame(self._steps, dtype="object")  # a run without steps has no values to guess the types from
        return frame.astype(dict.fromkeys(("step", "start_ns", "duration_ns", "repeat"), "int64"))

    def memory_trace(self) -> pd.DataFrame | None:
        """One row an operation, None unless asked for."""
        return pd.DataFrame(self._trace) if self.trace_wanted else None

    def cache_events(self) -> pd.DataFrame | None:
        """One row a key that was stored or removed, or a reset; None unless asked for."""
        names = ("time_ns", "action", "key", "parent", "block", "group")
        if not self.events_wanted:
            return None
        kinds = {name: "str" if name == "action" else "int64" for name in names}
        return pd.DataFrame(self._events, columns=names).astype(kinds)
