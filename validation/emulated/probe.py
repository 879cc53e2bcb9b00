"""What is read from the real allocator after an operation: statistics, snapshots, entries. For the worker only."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch_npu

from hbmtwin.validation.emulated.records import BLOCK, BLOCK_STATES, ENTRY, SEGMENT, Table

C: Any = torch_npu._C

Row = tuple[int, ...]


def stat_names() -> list[str]:
    """torch's flat keys in the order of torch_npu's nested dictionary, which is that of :meth:`Probe.read_stats`."""
    return [name for name, _ in _flat(C._npu_memoryStats(0))]


def stat_values() -> list[int]:
    """The same statistics as torch_npu's Python tells them."""
    return [value for _, value in _flat(C._npu_memoryStats(0))]


class Probe:
    """``probe.cpp`` by ctypes. *streams* are handles by index; *workspaces* says that the trace uses some."""

    def __init__(self, library: ctypes.CDLL, streams: list[int], *, workspaces: bool) -> None:
        self._library = library
        self._streams = streams
        self._has_workspaces = workspaces
        self._workspaces: list[Row] = []
        self._workspace_blocks: list[Row] = []
        library.hbmtwin_read_stats.argtypes = [ctypes.c_void_p]
        library.hbmtwin_take_snapshot.restype = ctypes.c_size_t
        library.hbmtwin_table.restype = ctypes.c_void_p

    def read_stats(self, address: int) -> None:
        """Write all statistics as int64 from *address* on."""
        self._library.hbmtwin_read_stats(address)

    def watch_entries(self) -> None:
        """Collect trace entries from here on."""
        self._library.hbmtwin_watch_entries()

    def take_snapshot(self, operation: int) -> None:
        """Collect all segments and blocks as they stand. O(blocks)."""
        segments = self._library.hbmtwin_take_snapshot()
        if self._has_workspaces:
            # Only torch_npu's Python tells these; they stand behind the segments.
            for workspace in C._npu_memorySnapshot(None)["segments"][segments:]:
                self._add_workspace(operation, workspace)

    def _add_workspace(self, operation: int, workspace: dict[str, Any]) -> None:
        start, size = workspace["address"], workspace["total_size"]
        sizes = (workspace["allocated_size"], workspace["active_size"], workspace["requested_size"])
        self._workspaces.append((operation, start, size, *sizes, workspace["stream"], 0, 1, 0, 1))
        for block in workspace["blocks"]:
            state = BLOCK_STATES.index(block["state"])
            row = (operation, start, block["address"], block["size"], block["requested_size"], state)
            self._workspace_blocks.append(row)

    def tables(self) -> tuple[Table, Table, Table]:
        """Segments, blocks and entries that were collected, with streams by index."""
        segments, blocks, entries = (self._table(*table) for table in enumerate((SEGMENT, BLOCK, ENTRY)))
        segments = _with(segments, self._workspaces)
        blocks = _with(blocks, self._workspace_blocks)
        for table in (segments, entries):
            replace_handles(table["stream"], self._streams)
        return segments, blocks, entries

    def _table(self, number: int, columns: np.dtype[np.void]) -> Table:
        """Rows of a table by its number in ``probe.cpp``."""
        length = ctypes.c_size_t()
        start = self._library.hbmtwin_table(number, ctypes.byref(length))
        return np.frombuffer(ctypes.string_at(start, 8 * length.value) if length.value else b"", columns).copy()


def replace_handles(column: np.ndarray, streams: list[int]) -> None:
    """Put the index in *streams* in place of each handle, -1 where it is none of them."""
    by_handle = {handle: index for index, handle in enumerate(streams)}
    handles, which = np.unique(column, return_inverse=True)
    column[:] = np.array([by_handle.get(handle, -1) for handle in handles.tolist()], np.int64)[which]


def _with(table: Table, rows: list[Row]) -> Table:
    """The rows behind those of the same operation."""
    both = np.concatenate([table, np.array(rows, table.dtype)])
    return both[np.argsort(both["operation"], kind="stable")]


def _flat(nested: dict[str, Any], prefix: str = "") -> list[tuple[str, int]]:
    pairs: list[tuple[str, int]] = []
    for name, value in nested.items():
        pairs += [(prefix + name, value)] if isinstance(value, int) else _flat(value, f"{prefix}{name}.")
    return pairs
