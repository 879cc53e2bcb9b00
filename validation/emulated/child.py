"""What a forked child does: one job on a fresh device, then it ends without running anybody's destructors."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
import torch

from hbmtwin.validation.emulated.job import AT, ERRORS, OUTPUT, RESULTS, START, STATS, TABLES, TIMING, Job
from hbmtwin.validation.emulated.observe import Observer, stat_names, stat_values
from hbmtwin.validation.emulated.real_allocator import C, EmulatedDriver, RealAllocator
from hbmtwin.validation.emulated.records import BLOCK, CALL, CALLS, ENTRY, EVENT_CALLS, OUTCOMES, RESULT, SEGMENT, Table

ALLOC_CONF = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where the real one looks for its settings; both set is an error."""
STAMP = "\n[ERROR]"
"""Begins the line that torch_npu puts behind some messages."""
DONE, OOM, ERROR = range(len(OUTCOMES))


def run_job(folder: Path, library: ctypes.CDLL, workspace: Path) -> NoReturn:
    """Do the job in *folder* and end the process: code 0, or 1 when we ourselves failed."""
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    try:
        job = Job.read(folder)
        driver = EmulatedDriver(library)
        use_workspace = ctypes.CDLL(str(workspace)).hbmtwin_workspace
        cell = _operation_cell(folder)
        driver.configure(job.settings)
        driver.set_operation_cell(cell)
        for name in ALLOC_CONF:
            os.environ.pop(name, None)
        if job.settings.alloc_conf:
            os.environ[ALLOC_CONF[0]] = job.settings.alloc_conf
        os.environ.update(job.settings.environment)
        try:
            real = RealAllocator(driver, use_workspace, job.num_streams)
            names = stat_names()
        except (RuntimeError, ValueError) as refused:
            (folder / START).write_text(json.dumps({"setup_error": _described(refused)}))
        else:
            (folder / START).write_text(json.dumps({"stat_names": names}))
            do = _replay if job.kind == "replay" else _time
            do(job, real, folder, cell)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _replay(job: Job, real: RealAllocator, folder: Path, cell: ctypes.c_int64) -> None:
    rows = job.rows
    observer = Observer([stream.npu_stream for stream in real.streams])
    first = stat_values()
    stats = np.lib.format.open_memmap(folder / STATS, "w+", np.int64, (len(rows) + 1, len(first)))
    results = np.lib.format.open_memmap(folder / RESULTS, "w+", RESULT, (len(rows) + 1,))
    stats[0] = first
    if job.entries or job.snapshot_every:
        observer.start()
    with (folder / ERRORS).open("w") as errors:
        for i, row in enumerate(rows):
            cell.value = i
            try:
                address, outcome = real.do(*row), DONE
            except (RuntimeError, ValueError) as error:
                address, outcome = -1, OOM if isinstance(error, torch.OutOfMemoryError) else ERROR
                print(json.dumps([i, *_described(error)]), file=errors, flush=True)
            results[i] = address, outcome, real.driver.used_bytes()
            stats[i + 1] = stat_values()
            snapshot = job.snapshot_every > 0 and (i + 1) % job.snapshot_every == 0
            if snapshot or job.entries:
                observer.observe(i, entries=job.entries, snapshot=snapshot)
    cell.value = len(rows)
    if not (rows and snapshot):
        observer.start()
        observer.observe(len(rows) - 1, entries=False, snapshot=True)
    np.savez(
        folder / TABLES,
        segments=np.array(observer.segments, SEGMENT),
        blocks=np.array(observer.blocks, BLOCK),
        entries=np.array(observer.entries, ENTRY),
        calls=_calls(real),
    )


def _time(job: Job, real: RealAllocator, folder: Path, cell: ctypes.c_int64) -> None:
    """Raw pointers, no tensors, nothing read in between. The loop itself costs tens of nanoseconds a step."""
    handles = [stream.npu_stream for stream in real.streams]
    slots = {id: slot for slot, id in enumerate({row[1] for row in job.rows})}
    steps = [(op, slots[id], size, handles[stream or 0]) for op, id, size, stream, _ in job.rows]
    pointers = [0] * len(slots)
    raw_alloc: Callable[[int, int], int] = C._npu_npuCachingAllocator_raw_alloc
    raw_delete: Callable[[int], None] = C._npu_npuCachingAllocator_raw_delete
    ooms = 0
    start = time.perf_counter_ns()
    for op, slot, size, stream in steps:
        if op == "malloc":
            try:
                pointers[slot] = raw_alloc(size, stream)
            except torch.OutOfMemoryError:
                ooms += 1
        elif op == "free":
            pointer = pointers[slot]
            if pointer:
                raw_delete(pointer)
        else:
            C._npu_emptyCache()
    elapsed = time.perf_counter_ns() - start
    cell.value = len(steps)
    (folder / TIMING).write_text(json.dumps({"elapsed_ns": elapsed, "ooms": ooms}))


def _operation_cell(folder: Path) -> ctypes.c_int64:
    """A number that the client can read even if we die."""
    path = folder / AT
    path.write_bytes((-1).to_bytes(8, "little", signed=True))
    with path.open("r+b") as file:
        return ctypes.c_int64.from_buffer(mmap.mmap(file.fileno(), 8))


def _calls(real: RealAllocator) -> Table:
    """The driver's log with streams by index."""
    calls = np.frombuffer(real.driver.log(), CALL).copy()
    of_streams = np.isin(calls["call"], [CALLS.index(call) for call in EVENT_CALLS])
    objects = calls["object"]
    index = np.full(len(calls), -1)
    for i, stream in enumerate(real.streams):
        index[objects == stream.npu_stream] = i
    objects[of_streams] = index[of_streams]
    return calls


def _described(error: Exception) -> list[str]:
    return [type(error).__name__, str(error).partition(STAMP)[0].rstrip()]
