"""Bytes that an engine's log says it measured at its start, for a profile.

::

    boot log --explain's readers--> activation_bytes, non_torch_bytes, graph_bytes     what it does not tell is absent
"""

from __future__ import annotations

from pathlib import Path

from hbmtwin.sim.explain.explaining import explain

MAX_LOG_BYTES = 64 << 20
TOLD = ("activation_bytes", "non_torch_bytes", "graph_bytes")


def memory_of_log(path: Path) -> dict[str, int]:
    """What the log tells of one rank. Its numbers are rounded as it prints them. O(characters). Raise OSError."""
    with path.open("rb") as file:
        server = explain(file.read(MAX_LOG_BYTES)).server
    sizes = {name: server.size(name) for name in TOLD}
    return {name: size for name, size in sizes.items() if size is not None and size >= 0}
