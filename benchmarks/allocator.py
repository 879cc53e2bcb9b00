"""How many operations a second every device allocator does, and the real torch_npu beside them, on the same traces.

    python benchmarks/allocator.py

``kv``: 64 sequences of 32 layers append one token at a time: per layer K and V, each replaced by a tensor one token
larger (malloc, free); finished sequences leave and new ones come. ``random``: sizes around the thresholds, a few
thousand tensors alive. One operation is one malloc or one free; the best of three runs, in seconds of the processor.
An allocator that never reuses what was freed gets a region in which the whole trace has room, the others share the
device. The real one is the unmodified binary over the emulated driver, called by raw pointers, with nothing read, by
the clock; it needs torch 2.13.0 and torch-npu 2.13.0.
"""

from __future__ import annotations

import random
import time
from typing import Any

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.contract import DeviceAllocator
from hbmtwin.allocators.records import Tag
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.validation.emulated import EmulatedNpu, EmulatorUnavailable
from hbmtwin.workloads.formats.memory_trace import MemoryOp

GIB = 1 << 30
CAPACITY = 64 * GIB
LIMIT = 60 * GIB
TOKEN_BYTES = 8192
TENSORS = 64
SEQUENCES = 64
RUNS = 3
VARIANTS: dict[str, list[dict[str, str]]] = {
    "caching": [{"flavour": "torch_npu"}, {"flavour": "torch_cuda"}, {"alloc_conf": "expandable_segments:True"}],
    "pooled": [
        {"fit": fit, "coalescing": coalescing}
        for fit in ("best", "first", "next", "worst")
        for coalescing in ("immediate", "deferred")
    ],
}
"""Settings that are measured apart; every other registered allocator is measured with its defaults."""

Trace = list[tuple[int, int]]
"""``(id, size)``: a malloc of *size* bytes, or with size 0 the free of that id."""


def kv_trace(steps: int = 25) -> Trace:
    """Concatenated KV buffers of 64 sequences."""
    chance = random.Random(7)
    trace: Trace = []
    next_id = 0
    sequences: list[tuple[int, list[int]]] = []

    def malloc(size: int) -> int:
        nonlocal next_id
        trace.append((next_id, size))
        next_id += 1
        return next_id - 1

    for _ in range(steps):
        while len(sequences) < SEQUENCES:
            tokens = chance.randint(16, 400)
            sequences.append((tokens, [malloc(tokens * TOKEN_BYTES) for _ in range(TENSORS)]))
        alive = []
        for tokens, handles in sequences:
            if chance.random() < 0.02:
                trace.extend((handle, 0) for handle in handles)
                continue
            grown = []
            for handle in handles:
                grown.append(malloc((tokens + 1) * TOKEN_BYTES))
                trace.append((handle, 0))
            alive.append((tokens + 1, grown))
        sequences = alive
    return trace


def random_trace(operations: int = 200_000) -> Trace:
    """Sizes around the thresholds of the small and the large pool, freed in any order."""
    chance = random.Random(11)
    sizes = [512, 4000, 65_536, 1 << 20, (1 << 20) + 1, 3 << 20, 10 << 20, 12 << 20]
    trace: Trace = []
    alive: list[int] = []
    for id in range(operations):
        if alive and (len(alive) > 3000 or chance.random() < 0.45):
            trace.append((alive.pop(chance.randrange(len(alive))), 0))
        else:
            trace.append((id, chance.choice(sizes) + chance.randrange(-500, 500)))
            alive.append(id)
    return trace


def make(name: str, settings: dict[str, str], trace: Trace) -> DeviceAllocator:
    """A fresh allocator on a fresh device."""
    cls: Any = device_allocators.get(name)
    capacity, limit = CAPACITY, LIMIT
    if "monotonic" in cls.features:
        capacity = limit = sum(size + 4096 for _, size in trace)
    allocator: DeviceAllocator = cls(HbmDriver(capacity), cls.Config(limit_bytes=limit, **settings))
    return allocator


def ours(allocator: DeviceAllocator, trace: Trace) -> float:
    """Operations a second of one of our allocators."""
    handles: dict[int, int] = {}
    start = time.process_time()
    for id, size in trace:
        if size:
            handles[id] = allocator.malloc(size, tag=Tag.KV)
        else:
            allocator.free(handles.pop(id))
    return len(trace) / (time.process_time() - start)


def real(npu: EmulatedNpu, trace: Trace) -> float:
    """Operations a second of the real torch_npu."""
    ops = [MemoryOp("malloc", id, size, 0) if size else MemoryOp("free", id) for id, size in trace]
    return npu.time_raw(ops).operations_per_second


def main() -> None:
    """Print a table: a row per allocator, a column per trace."""
    traces = {"kv": kv_trace(), "random": random_trace()}
    print(f"{'operations a second':34}" + "".join(f"{f'{n} ({len(t):,})':>18}" for n, t in traces.items()))
    for name in device_allocators.names():
        for settings in VARIANTS.get(name, [{}]):
            speeds = [max(ours(make(name, settings, t), t) for _ in range(RUNS)) for t in traces.values()]
            label = ", ".join((name, *settings.values()))
            print(f"{label:34}" + "".join(f"{speed:18,.0f}" for speed in speeds))
    try:
        with EmulatedNpu(capacity_bytes=CAPACITY) as npu:
            print(f"{'the real torch_npu':34}" + "".join(f"{real(npu, trace):18,.0f}" for trace in traces.values()))
    except EmulatorUnavailable as error:
        print(f"the real torch_npu: {error}")


if __name__ == "__main__":
    main()
