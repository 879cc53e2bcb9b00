"""A decode step of a benchmark captured into a graph of the device, in a process of its own.

::

    {"backend": ..., "dtype": ..., "op": "step", ...} --operands, warm calls, capture--> graph {"name": ...}
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from hbmtwin.kernels.attention.backends import kernels_for, load
from hbmtwin.kernels.attention.interface import Backend
from hbmtwin.validation.bench.kernels import WARM_UPS, operands_of
from hbmtwin.validation.bench.memory import ANSWER, held, shortened
from hbmtwin.validation.bench.memory_cap import cap_memory
from hbmtwin.validation.bench.records import MemoryFigure, case

HOW = "free memory lost to the capture of the grid's last decode step; an engine captures many sizes"


def captured(module: Any, backend: Backend, call: Callable[[], object]) -> MemoryFigure:
    """The bytes of a warm *call*'s graph; where it cannot be captured, why not."""
    absent = MemoryFigure("graph_step_bytes", None, "this torch has no graphs of the device", "")
    kind = getattr(module, "CUDAGraph" if backend == "cuda" else "NPUGraph", None)
    if kind is None:
        return absent
    try:
        module.empty_cache()
        first, before = held(module), held(module)
        graph = kind()
        with module.graph(graph):
            output = call()
        after = held(module)
        del output
    except (RuntimeError, ValueError, TypeError) as refused:
        why = (str(refused) or type(refused).__name__).strip().splitlines()[0]
        return absent._replace(how=shortened(f"capture did not work: {why}"))
    lost = before.free - after.free
    quiet = first.free == before.free and lost >= 0
    return MemoryFigure("graph_step_bytes", max(0, lost), HOW, "M" if quiet else "L")


def main() -> None:
    """Write the answer. Argument: the task."""
    task = json.loads(sys.argv[1])
    backend: Backend = task["backend"]
    torch = load(backend)
    if task["memory_bytes"]:
        cap_memory(getattr(torch, backend), task["memory_bytes"])
    with torch.inference_mode():
        call = operands_of(torch, kernels_for(backend), task["dtype"], backend).call_of(case(task["op"], task["sizes"]))
        for _ in range(WARM_UPS):
            call()
        figure = captured(getattr(torch, backend), backend, call)
    print(f"{ANSWER}{json.dumps(figure._asdict())}", flush=True)


if __name__ == "__main__":
    main()
