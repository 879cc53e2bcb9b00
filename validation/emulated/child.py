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
from hbmtwin.validation.emulated.probe import Probe, replace_handles, stat_names, stat_values
from hbmtwin.validation.emulated.real_allocator import C, EmulatedDriver, RealAllocator
from hbmtwin.validation.emulated.records import CALL, CALLS, EVENT_CALLS, OUTCOMES, RESULT

ALLOC_CONF = ("PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Where the real one looks for its settings; both set is an error."""
STAMP = "\n[ERROR]"
"""Begins the line that torch_npu puts behind some messages."""
DONE, OOM, ERROR = range(len(OUTCOMES))


def run_job(folder: Path, library: ctypes.CDLL, probe: Path) -> NoReturn:
    """Do the job in *folder* and end the process: code 0, or 1 when we ourselves failed."""
    output = os.open(folder / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(folder)
    try:
        job = Job.read(folder)
        driver = EmulatedDriver(library)
        inside = ctypes.CDLL(str(probe))
        cell = _operation_cell(folder)
        driver.configure(job.settings)
        driver.set_operation_cell(cell)
        for name in ALLOC_CONF:
            os.environ.pop(name, None)
        if job.settings.alloc_conf:
            os.environ[ALLOC_CONF[0]] = job.settings.alloc_conf
        os.environ.update(job.settings.environment)
        try:
            real = RealAllocator(driver, inside.hbmtwin_workspace, job.num_streams)
            names = stat_names()
        except (RuntimeError, ValueError) as refused:
            (folder / START).write_text(json.dumps({"setup_error": _described(refused)}))
        else:
            (folder / START).write_text(json.dumps({"stat_names": names}))
            if job.kind == "replay":
                _replay(job, real, folder, cell, inside)
            else:
                _time(job, real, folder, cell)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _replay(job: Job, real: RealAllocator, folder: Path, cell: ctypes.c_int64, library: ctypes.CDLL) -> None:
    rows = job.rows
    streams = [stream.npu_stream for stream in real.streams]
    probe = Probe(library, streams, workspaces=any(row[0] == "workspace" for row in rows))
    stats = np.lib.format.open_memmap(folder / STATS, "w+", np.int64, (len(rows) + 1, len(stat_names())))
    results = np.lib.format.open_memmap(folder / RESULTS, "w+", RESULT, (len(rows) + 1,))
    at, stride = stats.ctypes.data, stats.strides[0]
    probe.read_stats(at)
    if job.entries:
        probe.watch_entries()
    snapshot = False
    with (folder / ERRORS).open("w") as errors:
        for i, row in enumerate(rows):
            cell.value = i
            try:
                address, outcome = real.do(*row), DONE
            except (RuntimeError, ValueError) as error:
                address, outcome = -1, OOM if isinstance(error, torch.OutOfMemoryError) else ERROR
                print(json.dumps([i, *_described(error)]), file=errors, flush=True)
            results[i] = address, outcome, real.driver.used_bytes()
            at += stride
            probe.read_stats(at)
            snapshot = job.snapshot_every > 0 and (i + 1) % job.snapshot_every == 0
            if snapshot:
                probe.take_snapshot(i)
    if not snapshot:
        probe.take_snapshot(len(rows) - 1)
    if stats[-1].tolist() != stat_values():
        raise AssertionError("the probe reads other statistics than torch_npu's Python")
    cell.value = len(rows)
    calls = np.frombuffer(real.driver.log(), CALL).copy()
    of_streams = np.isin(calls["call"], [CALLS.index(call) for call in EVENT_CALLS])
    objects = calls["object"][of_streams]
    replace_handles(objects, streams)
    calls["object"][of_streams] = objects
    segments, blocks, entries = probe.tables()
    np.savez(folder / TABLES, calls=calls, segments=segments, blocks=blocks, entries=entries)


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


def _described(error: Exception) -> list[str]:
    return [type(error).__name__, str(error).partition(STAMP)[0].rstrip()]
