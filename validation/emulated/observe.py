"""What is read from the real allocator after an operation: statistics, snapshot, trace entries. Only for the worker."""

from __future__ import annotations

from typing import Any

import torch_npu

from hbmtwin.validation.emulated.records import ACTIONS, BLOCK_STATES

C: Any = torch_npu._C
MAX_ENTRIES = 10**7
"""Of the ring that holds one operation's entries; an operation makes a few thousand at most."""
ENTRIES_PER_WORKSPACE = 3
ACTION_CODES = {action: code for code, action in enumerate(ACTIONS)}
STATE_CODES = {state: code for code, state in enumerate(BLOCK_STATES)}

Row = tuple[int, ...]


def stat_names() -> list[str]:
    """torch's flat keys in the order of :func:`stat_values`."""
    names: list[str] = []
    for name, value in C._npu_memoryStats(0).items():
        if isinstance(value, int):
            names.append(name)
            continue
        for part, inner in value.items():
            names += [f"{name}.{part}"] if isinstance(inner, int) else [f"{name}.{part}.{kind}" for kind in inner]
    return names


def stat_values() -> list[int]:
    """All statistics of device 0, without the cost of flattening by name."""
    values: list[int] = []
    for value in C._npu_memoryStats(0).values():
        if isinstance(value, int):
            values.append(value)
            continue
        for inner in value.values():
            if isinstance(inner, int):
                values.append(inner)
            else:
                values += inner.values()
    return values


class Observer:
    """Takes snapshots and entries as rows of the tables in ``records.py``; *streams* are handles by index."""

    def __init__(self, streams: list[int]) -> None:
        self._streams = {handle: index for index, handle in enumerate(streams)}
        self.segments: list[Row] = []
        self.blocks: list[Row] = []
        self.entries: list[Row] = []

    def start(self) -> None:
        """Record a history from here, with an empty ring."""
        C._npu_record_memory_history("all", None, "python", MAX_ENTRIES)

    def observe(self, operation: int, *, entries: bool, snapshot: bool) -> None:
        """Append what is asked for as it stands after *operation*; the history must be on. O(all blocks)."""
        state = C._npu_memorySnapshot(None)
        self.start()
        trace = state["device_traces"][0]
        # A snapshot puts the workspaces in front of the trace, three entries each, and behind the other segments.
        workspaces = sum(entry["action"] == "workspace_snapshot" for entry in trace)
        if entries:
            for entry in trace[ENTRIES_PER_WORKSPACE * workspaces :]:
                address = entry["device_free"] if entry["action"] == "oom" else entry["addr"]
                stream = self._streams.get(entry["stream"], -1)
                action = ACTION_CODES[entry["action"]]
                self.entries.append((operation, action, address, entry["size"], stream, entry["pool_id"][1]))
        if snapshot:
            segments = state["segments"]
            for i, segment in enumerate(segments):
                self._add_segment(operation, segment, i >= len(segments) - workspaces)

    def _add_segment(self, operation: int, segment: dict[str, Any], is_workspace: bool) -> None:
        address = segment["address"]
        self.segments.append(
            (
                operation,
                address,
                segment["total_size"],
                segment["allocated_size"],
                segment["active_size"],
                segment["requested_size"],
                self._streams.get(segment["stream"], -1),
                segment["segment_pool_id"][1],
                segment["segment_type"] == "large",
                segment["is_expandable"],
                is_workspace,
            )
        )
        for block in segment["blocks"]:
            state = STATE_CODES[block["state"]]
            self.blocks.append((operation, address, block["address"], block["size"], block["requested_size"], state))
