"""The last operations before memory ran out, with the map of the device before each: the run again, watched at its end.

::

    result (died, after N operations)  ->  the same run; from operation N - count on, each with segments and blocks
                                           as they lie when it begins; last of all what lay there at the death

A run counts its operations and keeps none: a trace of all of them takes a hundred times the memory. The last ones are
had by running it once more, which is exact, as the same scenario makes the same operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import pandas as pd

from hbmtwin.allocators.contract import DeviceAllocator, Observer
from hbmtwin.allocators.records import Tag
from hbmtwin.sim.recorder import MAP_COLUMNS, MapRow, device_rows
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin

MOST = 256
"""Operations that may be asked for: each comes with a map of the device."""
COLUMNS = ("op_index", "allocator", "op", "id", "size", "stream", "tag", "owner", "time_ns", "step")
BOOKS = ("reserved_bytes", "used_bytes", "free_bytes", "largest_free_bytes")
"""Of all allocators together, before the operation: free is what they keep and nobody uses."""


class LastOperations(NamedTuple):
    """Two tables: an operation a row, and of each (and of the end) where segments and blocks lie."""

    operations: pd.DataFrame
    maps: pd.DataFrame
    """As ``checkpoints.parquet``, without KV blocks; ``op_index`` is the number of operations before that moment."""


def last_operations(result: Result, count: int = 48) -> LastOperations:
    """The *count* last operations of a run that ran out of memory, in order. As long as the run, and O(count blocks).

    Raise ValueError for a run that did not, and for a *count* that is not from 1 to :data:`MOST`.
    """
    if result.oom is None:
        raise ValueError("this run did not run out of memory: there is no last operation to look at")
    if not 1 <= count <= MOST:
        raise ValueError(f"from 1 to {MOST} operations, not {count}")
    total = int(result.checkpoints["op_index"].max())
    twin = Twin(result.scenario)
    watch = _Watch(twin, total - count)
    for allocator in twin.memory.allocators:
        assert allocator.observer is not None
        allocator.observer = partial(watch.see, allocator, allocator.observer)
    died = twin.run()
    watch.map()
    if died.summary["oom"] != result.oom:
        raise ValueError("the run did not end as it did: the result is of another release; run the scenario again")
    return LastOperations(
        pd.DataFrame(watch.operations, columns=[*COLUMNS, *BOOKS]), pd.DataFrame(watch.maps, columns=MAP_COLUMNS)
    )


def operation_lines(result: Result) -> Iterator[str]:
    """The table of operations as lines of CSV."""
    yield last_operations(result).operations.to_csv(index=False, lineterminator="\n")


class _Watch:
    """Keeps what comes after the first *skipped* operations."""

    def __init__(self, twin: Twin, skipped: int) -> None:
        self._twin, self._skipped = twin, skipped
        self.operations: list[tuple[object, ...]] = []
        self.maps: list[MapRow] = []

    def see(
        self,
        allocator: DeviceAllocator,
        observer: Observer,
        op: str,
        id: int,
        size: int,
        stream: int,
        arg: str,
        tag: Tag | None,
        owner: int,
    ) -> None:
        recorder = self._twin.recorder
        if recorder.op_index >= self._skipped:  # before it is carried out: all books close
            name = "" if tag is None else tag.name.lower()
            row = (recorder.op_index, allocator.name, op, id, size, stream, name, owner, recorder.now_ns, recorder.step)
            self.operations.append((*row, *self.map()))
        observer(op, id, size, stream, arg, tag, owner)

    def map(self) -> tuple[int, int, int, int]:
        """Keep where everything lies; return the books."""
        recorder = self._twin.recorder
        rows = list(device_rows((recorder.now_ns, recorder.op_index), recorder.allocators))
        self.maps += rows
        free = [size for _, _, level, _, size, _, state, _, _ in rows if (level, state) == ("block", "inactive")]
        reserved = sum(size for _, _, level, _, size, *_ in rows if level == "segment")
        return reserved, reserved - sum(free), sum(free), max(free, default=0)
