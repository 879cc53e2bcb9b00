"""A process that does one operation trace on a real device through torch's public Python, and writes down what came.

``python -P -m hbmtwin.validation.device_worker npu|cuda FOLDER``. Without a job in FOLDER it only says what is there.
The settings must stand in the environment before torch first uses the device, so each trace has its own process.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from hbmtwin.validation.emulated.job import JOB, Job
from hbmtwin.validation.emulated.records import ACTIONS, BLOCK, BLOCK_STATES, ENTRY, OUTCOMES, RESULT, SEGMENT

ABOUT = "about.json"
"""What is there: version, device, total_bytes, cann; or why not."""
RUN = "run.npz"
NOTES = "run.json"
"""Names of the statistics, errors by operation, the error of the set-up."""
MAX_ENTRIES = 1_000_000
DONE, OOM, ERROR = range(len(OUTCOMES))
_ACTIONS = {action: code for code, action in enumerate(ACTIONS)}
_STATES = {state: code for code, state in enumerate(BLOCK_STATES)}


def main() -> None:
    """Say what is there, and do the job if there is one."""
    backend, folder = sys.argv[1], Path(sys.argv[2])
    about, memory = open_device(backend)
    (folder / ABOUT).write_text(json.dumps(about))
    if memory is not None and (folder / JOB).exists():
        DeviceRun(backend, memory, Job.read(folder)).write(folder)


def open_device(backend: str) -> tuple[dict[str, Any], Any]:
    """What is there, and torch's module of the device; None where there is none."""
    try:
        import torch

        if backend == "npu":
            import torch_npu

            assert torch_npu is not None
    except ModuleNotFoundError as missing:
        extra = "npu" if backend == "npu" else "torch"
        return {"unavailable": f"{missing}; pip install 'hbmtwin[{extra}]'"}, None
    except (ImportError, OSError) as missing:
        return {"unavailable": f"torch_npu cannot be loaded ({missing}); source CANN's set_env.sh first"}, None
    device: Any = getattr(torch, backend)
    if not device.is_available():
        return {"unavailable": f"torch {torch.__version__} sees no device of the kind {backend!r}"}, None
    package = version("torch-npu" if backend == "npu" else "torch").partition("+")[0]
    about = {
        "version": package,
        "device": device.get_device_name(0),
        "total_bytes": device.mem_get_info()[1],
        "cann": "",
    }
    if backend == "npu":
        from torch_npu.npu.utils import get_cann_version

        about["cann"] = get_cann_version("CANN")
    return about, device


class DeviceRun:
    """One trace. Every event is complete after the operation that recorded it: the device is waited for each time."""

    def __init__(self, backend: str, device: Any, job: Job) -> None:
        import torch

        self.torch = torch
        self.backend = backend
        self.device = device
        self.job = job
        self.c: Any = torch._C if backend == "cuda" else sys.modules["torch_npu"]._C
        self.streams: list[Any] = []
        self.tensors: dict[Any, Any] = {}
        self.pools: dict[Any, Any] = {}
        self.errors: dict[int, tuple[str, str]] = {}
        self.entries: list[tuple[int, ...]] = []
        self.segments: list[tuple[int, ...]] = []
        self.blocks: list[tuple[int, ...]] = []

    def write(self, folder: Path) -> None:
        """Do the job and write its files."""
        rows = self.job.rows
        try:
            self.streams = [
                self.device.default_stream(),
                *(self.device.Stream() for _ in range(self.job.num_streams - 1)),
            ]
            first = self.stats()
        except (RuntimeError, ValueError) as refused:
            (folder / NOTES).write_text(json.dumps({"setup_error": self._described(refused)}))
            return
        results = np.full(len(rows), -1, RESULT)
        stats = np.empty((1 + len(rows), len(first)), np.int64)
        stats[0] = list(first.values())
        self._take_snapshot(-1)
        for i, (op, id, size, stream, arg) in enumerate(rows):
            try:
                results[i]["address"] = self.do(op, id, size, stream or 0, arg)
                results[i]["outcome"] = DONE
            except self.torch.OutOfMemoryError as error:
                results[i]["outcome"] = OOM
                self.errors[i] = ("OutOfMemoryError", str(error))
            except (RuntimeError, ValueError) as error:
                results[i]["outcome"] = ERROR
                self.errors[i] = self._described(error)
            self.device.synchronize()
            stats[i + 1] = list(self.stats().values())
            self._take_snapshot(i, blocks=i == len(rows) - 1)
        notes = {"stat_names": list(first), "errors": [[i, *error] for i, error in self.errors.items()]}
        (folder / NOTES).write_text(json.dumps(notes))
        np.savez(
            folder / RUN,
            stats=stats,
            results=results,
            entries=np.array(self.entries, ENTRY),
            segments=np.array(self.segments, SEGMENT),
            blocks=np.array(self.blocks, BLOCK),
        )

    def do(self, op: str, id: Any, size: int, stream: int, arg: str) -> int:
        """Do one operation; return the address it concerns, or -1."""
        device = self.device
        match op:
            case "malloc":
                with device.stream(self.streams[stream]):
                    tensor = self.torch.empty(size, dtype=self.torch.uint8, device=self.backend)
                self.tensors[id] = tensor
                return int(tensor.data_ptr()) if size else -1
            case "free":
                tensor = self.tensors.pop(id, None)
                return -1 if tensor is None or not tensor.numel() else int(tensor.data_ptr())
            case "record_stream":
                if id in self.tensors:
                    self.tensors[id].record_stream(self.streams[stream])
            case "erase_stream":
                if id in self.tensors:
                    with device.stream(self.streams[int(arg)]):
                        sys.modules["torch_npu"].erase_stream(self.tensors[id], self.streams[stream])
            case "empty_cache":
                device.empty_cache()
            case "empty_virt_addr_cache":
                device.empty_virt_addr_cache()
            case "set_conf":
                device.memory._set_allocator_settings(arg)
            case "set_fraction":
                device.set_per_process_memory_fraction(float(arg))
            case "reset_peak":
                device.reset_peak_memory_stats()
            case "reset_accumulated":
                device.reset_accumulated_memory_stats()
            case "mempool_begin":
                if id not in self.pools:
                    self.pools[id] = device.MemPool(**dict.fromkeys(filter(None, arg.split("|")), True))
                getattr(self.c, f"_{self.backend}_beginAllocateCurrentThreadToPool")(0, self.pools[id].id)
            case "mempool_end":
                getattr(self.c, f"_{self.backend}_endAllocateToPool")(0, self.pools[id].id)
                getattr(self.c, f"_{self.backend}_releasePool")(0, self.pools[id].id)
            case "mempool_delete":
                del self.pools[id]
        return -1

    def stats(self) -> dict[str, int]:
        """``memory_stats()``, its whole numbers, by name."""
        found = self.device.memory_stats()
        return {name: found[name] for name in sorted(found) if isinstance(found[name], int)}

    def _take_snapshot(self, operation: int, *, blocks: bool = False) -> None:
        """Add the entries since the last one, and empty the ring; the blocks where wanted."""
        state = {"device_traces": [[]], "segments": []} if operation < 0 else self.device.memory._snapshot()
        self.device.memory._record_memory_history(None)
        self.device.memory._record_memory_history("all", context=None, stacks="python", max_entries=MAX_ENTRIES)
        handles = {getattr(stream, f"{self.backend}_stream"): i for i, stream in enumerate(self.streams)}
        for e in state["device_traces"][0]:
            if e["action"] in _ACTIONS and e["action"] != "snapshot":
                address = e["device_free"] if e["action"] == "oom" else e["addr"]
                pool = e["pool_id"][1] if "pool_id" in e else -1
                where = handles.get(e["stream"], -1)
                self.entries.append((operation, _ACTIONS[e["action"]], address, e["size"], where, pool))
        for s in state["segments"] if blocks else ():
            sizes = (s["total_size"], s["allocated_size"], s["active_size"], s["requested_size"])
            kinds = (s["segment_type"] == "large", s["is_expandable"], 0)
            where = handles.get(s["stream"], -1)
            self.segments.append((operation, s["address"], *sizes, where, s["segment_pool_id"][1], *kinds))
            for b in s["blocks"]:
                state_code = _STATES[b["state"]]
                row = (operation, s["address"], b["address"], b["size"], b["requested_size"], state_code)
                self.blocks.append(row)

    @staticmethod
    def _described(error: Exception) -> tuple[str, str]:
        return ("ValueError" if isinstance(error, ValueError) else "RuntimeError", str(error).partition("\n")[0])


if __name__ == "__main__":
    main()
