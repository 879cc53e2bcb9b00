"""Plain records of a run on the emulated driver, and the columns of its tables.

All tables are numpy arrays of named int64 columns, one row per thing, in the order in which it happened; ``operation``
is the index of the operation in the trace. Addresses are absolute; streams are the trace's indexes (0 the default one).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hbmtwin.allocators.driver import PAGE_UNIT

GIB = 1 << 30


def _columns(names: str) -> np.dtype[np.void]:
    return np.dtype([(name, np.int64) for name in names.split()])


OUTCOMES = ("done", "oom", "error")
RESULT = _columns("address outcome driver_bytes")
"""``address`` of malloc, free and workspace, -1 where there is none; ``outcome`` is an index into OUTCOMES;
``driver_bytes`` is what the process holds at the driver after the operation."""
SEGMENT = _columns(
    "operation address total_size allocated_size active_size requested_size stream pool is_large is_expandable"
    " is_workspace"
)
"""``pool`` is n of torch's id (0, n), 0 for the default pools; ``is_workspace``: a block of the workspace
allocator, which stands behind the others, with address 0 where its driver call failed."""
BLOCK_STATES = ("inactive", "active_allocated", "active_pending_free")
BLOCK = _columns("operation segment address size requested_size state")
"""``segment`` is the address of its segment; ``state`` is an index into BLOCK_STATES."""
ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap"),
    *("snapshot", "oom"),
)
"""torch's; a snapshot of ours makes no entry."""
ENTRY = _columns("operation action address size stream pool")
"""``action`` is an index into ACTIONS; in an oom entry ``address`` is the driver's free bytes."""
CALLS = (
    *("malloc", "free", "reserve", "release", "create", "destroy", "map", "unmap"),
    *("sync_device", "sync_stream", "sync_event", "record_event", "query_event"),
)
"""As in ``driver.h``: aclrtMallocAlign32, aclrtFree, aclrtReserveMemAddress, aclrtReleaseMemAddress,
aclrtMallocPhysical, aclrtFreePhysical, aclrtMapMem, aclrtUnmapMem, aclrtSynchronizeDevice, aclrtSynchronizeStream,
aclrtSynchronizeEvent, aclrtRecordEvent, aclrtQueryEventStatus."""
EVENT_CALLS = ("sync_stream", "sync_event", "record_event", "query_event")
CALL = _columns("operation call object size result")
"""``call`` is an index into CALLS. ``object`` is an address, a page's handle, or a stream; ``size`` is bytes or the
number of an event on its stream; ``result`` is the driver's answer, 0 for success, of query_event 1 complete and 0 not
yet."""

Table = NDArray[np.void]


@dataclass(frozen=True, slots=True)
class NpuSettings:
    """An emulated device and the settings in force when the process first uses it."""

    capacity_bytes: int = GIB
    tenants_bytes: int = 0
    """What other processes hold."""
    alloc_conf: str = ""
    """Text of ``PYTORCH_NPU_ALLOC_CONF``; empty means not set."""
    soc: str = "Ascend910B2"
    cann: str = "8.5.0"
    driver: str = "25.5.0"
    page_bytes: int = PAGE_UNIT
    """Granularity of physical memory behind virtual ranges."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables, such as ``PYTORCH_NO_NPU_MEMORY_CACHING``."""

    def __post_init__(self) -> None:
        if self.capacity_bytes < 1 or self.page_bytes < 1:
            raise ValueError(
                f"capacity_bytes and page_bytes must be at least 1, not {self.capacity_bytes} and {self.page_bytes}"
            )
        if self.tenants_bytes < 0:
            raise ValueError(f"other processes cannot hold {self.tenants_bytes} bytes")


@dataclass(frozen=True, slots=True)
class RealError:
    """An exception of the real allocator."""

    kind: str
    """Name of its Python type: ``OutOfMemoryError``, ``ValueError``, ``RuntimeError``."""
    text: str
    """Without the stamp (time, process id, error code) that torch_npu puts behind some messages."""


@dataclass(frozen=True, slots=True)
class Crash:
    """The process died."""

    operation: int
    """Index of the operation under way; -1 before the first, the number of operations after the last."""
    signal: int
    """Number of the signal, 0 if the process ended by itself."""
    text: str
    """The last lines it wrote."""


@dataclass(frozen=True, slots=True)
class RealRun:
    """What the real allocator did with a trace."""

    stat_names: tuple[str, ...] = field(repr=False, default=())
    """torch's flat keys, sorted."""
    initial_stats: NDArray[np.int64] = field(repr=False, default_factory=lambda: np.empty(0, np.int64))
    """One value per key, before the first operation."""
    stats: NDArray[np.int64] = field(repr=False, default_factory=lambda: np.empty((0, 0), np.int64))
    """A row per operation, taken after it."""
    results: Table = field(repr=False, default_factory=lambda: np.empty(0, RESULT))
    """RESULT, a row per operation."""
    errors: dict[int, RealError] = field(default_factory=dict)
    """By operation, OutOfMemory included."""
    segments: Table = field(repr=False, default_factory=lambda: np.empty(0, SEGMENT))
    blocks: Table = field(repr=False, default_factory=lambda: np.empty(0, BLOCK))
    """SEGMENT and BLOCK of every snapshot that was asked for, and after the last operation."""
    entries: Table = field(repr=False, default_factory=lambda: np.empty(0, ENTRY))
    """ENTRY, if asked for: what the trace recorded in each operation."""
    calls: Table = field(repr=False, default_factory=lambda: np.empty(0, CALL))
    """CALL: what reached the driver; operation -1 is the set-up."""
    setup_error: RealError | None = None
    """The device could not be used at all, as when the settings are refused: no operation was done."""
    crash: Crash | None = None
    """The process died: results, statistics and errors reach to there, the other tables are lost."""

    def driver_calls(self) -> Table:
        """Calls that concern memory or the whole device."""
        of_events = [CALLS.index(call) for call in EVENT_CALLS]
        chosen: Table = self.calls[~np.isin(self.calls["call"], of_events)]
        return chosen

    def event_queries(self) -> Table:
        """Every question whether an event is complete."""
        chosen: Table = self.calls[self.calls["call"] == CALLS.index("query_event")]
        return chosen

    def stat(self, name: str) -> NDArray[np.int64]:
        """One statistic after each operation, by torch's flat key. Raise ValueError if there is none of this name."""
        column: NDArray[np.int64] = self.stats[:, self.stat_names.index(name)]
        return column


@dataclass(frozen=True, slots=True)
class RawTiming:
    """The bare allocator's speed: raw_alloc and raw_delete without tensors."""

    operations: int
    ooms: int
    elapsed_ns: int

    @property
    def operations_per_second(self) -> float:
        """0.0 when nothing was done."""
        return self.operations * 1e9 / self.elapsed_ns if self.elapsed_ns else 0.0
