"""Bytes for a profile: those that an engine's log says it measured at its start, and those of a benchmark.

::

    boot log  --explain's readers--> activation_bytes, non_torch_bytes, graph_bytes    what it does not tell is absent
    benchmark --confidence H or M--> context_bytes, communicator_bytes                 and so is what is not trusted

A benchmark's workspaces and its one captured step stay in its file: no term of a budget is made of them. Workspaces are
a sum of what passes within the activations' peak, what stays with them and what libraries take beside torch, of torch's
kernels and not of an engine's. A first graph has the pool that all later ones share, so that it times the number of
sizes is many times an engine's. A log has both as the engine has them.
"""

from __future__ import annotations

from pathlib import Path

from hbmtwin.kernels.profile import MEMORY
from hbmtwin.sim.explain.explaining import explain
from hbmtwin.validation.bench.records import Bench

MAX_LOG_BYTES = 64 << 20
TOLD = ("activation_bytes", "non_torch_bytes", "graph_bytes")


def memory_of_log(path: Path) -> dict[str, int]:
    """What the log tells of one rank. Its numbers are rounded as it prints them. O(characters). Raise OSError."""
    with path.open("rb") as file:
        server = explain(file.read(MAX_LOG_BYTES)).server
    sizes = {name: server.size(name) for name in TOLD}
    return {name: size for name, size in sizes.items() if size is not None and size >= 0}


def memory_of_bench(bench: Bench) -> tuple[dict[str, int], tuple[str, ...]]:
    """What was measured well enough, and of the rest why it is not there."""
    found: dict[str, int] = {}
    left_out = []
    for figure in bench.memory:
        if figure.bytes is None:
            left_out.append(f"{figure.name}: {figure.how}")
        elif figure.name not in MEMORY:
            left_out.append(f"{figure.name}: {figure.bytes:,} bytes; no term of a budget (docs/calibration.md)")
        elif figure.confidence == "L":
            left_out.append(f"{figure.name}: {figure.bytes} bytes, confidence {figure.confidence}: {figure.how}")
        else:
            found[figure.name] = figure.bytes
    return found, tuple(left_out)
