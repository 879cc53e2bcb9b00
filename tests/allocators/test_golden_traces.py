"""Golden numbers: every device allocator on three small committed traces, so that no placement changes unseen.

Run as a program it prints the table for the allocators that are registered; put a new one's rows into golden.json:

    python tests/allocators/test_golden_traces.py
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.allocators import HbmDriver, pooled
from hbmtwin.allocators.free_lists import ByAddress, BySize, LargestFirst, LinkedBlock, NextFit
from hbmtwin.allocators.registry import device_allocators
from hbmtwin.sim.replay import make_allocator, replay
from hbmtwin.workloads.formats.memory_trace import MemoryOp, read_memory_trace, write_memory_trace

FOLDER = Path(__file__).parents[1] / "golden" / "traces"
TABLE = FOLDER / "golden.json"
MIB = 1 << 20
CAPACITY = {"chats": 48 * MIB, "doubling": 280 * MIB, "mixed": 100 * MIB}
"""Bytes of the device, by trace: each is so small that some allocators run out, and so large that others do not."""
VARIANTS: list[tuple[str, dict[str, str]]] = [
    ("pooled", {"fit": "first"}),
    ("pooled", {"fit": "next"}),
    ("pooled", {"fit": "worst"}),
    ("pooled", {"coalescing": "deferred"}),
    ("caching", {"flavour": "torch_cuda"}),
    ("caching", {"alloc_conf": "expandable_segments:True"}),
]


# -- how the traces were made ------------------------------------------------------------------------------------------


def chats() -> Iterator[MemoryOp]:
    """Five chats at a time whose K and V, in each of two layers, are concatenated with every token; others follow."""
    chance = random.Random(1)
    next_id = 0
    owner = 0
    live: list[tuple[int, int, int, list[int]]] = []
    while owner < 12 or live:
        while len(live) < 5 and owner < 12:
            tokens = chance.randint(20, 160)
            yield from (_malloc(next_id + i, tokens * 16384, owner) for i in range(4))
            live.append((owner, tokens, chance.randint(5, 20), [next_id + i for i in range(4)]))
            next_id += 4
            owner += 1
        still = []
        for chat, tokens, left, tensors in live:
            if not left:
                yield from (MemoryOp("free", tensor) for tensor in tensors)
                continue
            grown = []
            for tensor in tensors:
                yield _malloc(next_id, (tokens + 1) * 16384, chat)
                yield MemoryOp("free", tensor)
                grown.append(next_id)
                next_id += 1
            still.append((chat, tokens + 1, left - 1, grown))
        live = still


def doubling() -> Iterator[MemoryOp]:
    """Sixteen chats at a time in one buffer each, made for 64 tokens and doubled; old buffers die at the step's end."""
    chance = random.Random(2)
    next_id = 0
    owner = 0
    live: list[list[int]] = []  # owner, tokens, room, tokens to come, tensor
    while owner < 60 or live:
        while len(live) < 16 and owner < 60:
            live.append([owner, chance.randint(10, 500), 0, chance.randint(2, 30), -1])
            owner += 1
        old = []
        for chat in live:
            chat[1] += 20
            if chat[1] > chat[2]:
                old.append(chat[4])
                chat[2] = max(64, chat[2])
                while chat[2] < chat[1]:
                    chat[2] *= 2
                chat[4] = next_id
                yield _malloc(next_id, chat[2] * 16384, chat[0])
                next_id += 1
            chat[3] -= 1
        yield from (MemoryOp("free", tensor) for tensor in old if tensor >= 0)
        yield from (MemoryOp("free", chat[4]) for chat in live if not chat[3])
        live = [chat for chat in live if chat[3]]


def mixed() -> Iterator[MemoryOp]:
    """600 tensors of 512 bytes to 8 MiB; each lives for up to 120 more requests."""
    chance = random.Random(3)
    due: dict[int, list[int]] = {}
    for id in range(600):
        yield from (MemoryOp("free", tensor) for tensor in due.pop(id, ()))
        yield MemoryOp("malloc", id, round(2 ** chance.uniform(9, 23)), 0, tag="activation")
        due.setdefault(id + chance.randint(1, 120), []).append(id)
    for tensors in due.values():
        yield from (MemoryOp("free", tensor) for tensor in tensors)


def _malloc(id: int, size: int, owner: int) -> MemoryOp:
    return MemoryOp("malloc", id, size, 0, tag="kv", owner=owner)


TRACES = {"chats": chats, "doubling": doubling, "mixed": mixed}


# -- how the numbers are made ------------------------------------------------------------------------------------------


def measure(allocator: str, settings: dict[str, str], trace: str) -> dict[str, Any]:
    """The row of one allocator on one trace.

    ``fragmentation`` is (reserved - requested - pool_free) / reserved after the first operation at which the requested
    bytes are at their peak, rounded to four digits: what is reserved, neither asked for nor the largest free run of a
    region. ``driver_calls`` counts refused ones too. ``first_oom_index`` is a row of the trace, from 0.
    """
    driver = HbmDriver(CAPACITY[trace])
    a = make_allocator(allocator, driver, settings)
    peak_reserved = peak_requested = 0
    fragmentation = 0.0
    first_oom: int | None = None
    for result in replay(read_memory_trace(FOLDER / f"{trace}.csv"), a, driver):
        usage = a.usage()
        peak_reserved = max(peak_reserved, usage.reserved)
        if usage.requested > peak_requested:
            peak_requested = usage.requested
            fragmentation = (usage.reserved - usage.requested - usage.pool_free) / usage.reserved
        if result.oom and first_oom is None:
            first_oom = result.index
    a.check()
    return {
        "allocator": allocator,
        "settings": settings,
        "trace": trace,
        "peak_reserved_bytes": peak_reserved,
        "fragmentation": round(fragmentation, 4),
        "driver_calls": a.take_work().driver_calls,
        "first_oom_index": first_oom,
    }


def table() -> list[dict[str, Any]]:
    """All rows, of the allocators that are registered and of the variants."""
    kinds: list[tuple[str, dict[str, str]]] = [(name, {}) for name in sorted(device_allocators.names())]
    kinds += VARIANTS
    return [measure(name, settings, trace) for name, settings in kinds for trace in TRACES]


# -- the tests ---------------------------------------------------------------------------------------------------------

GOLDEN: list[dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("trace", TRACES)
def test_the_committed_traces_are_what_their_generators_make(trace: str, tmp_path: Path) -> None:
    write_memory_trace(TRACES[trace](), tmp_path / "again.csv", stamps=True)
    assert (tmp_path / "again.csv").read_bytes() == (FOLDER / f"{trace}.csv").read_bytes()


@pytest.mark.parametrize("name", device_allocators.names())
def test_each_allocator_has_a_golden_row_for_each_trace(name: str) -> None:
    traces = [row["trace"] for row in GOLDEN if row["allocator"] == name and not row["settings"]]
    if not traces:
        pytest.skip(f"no golden rows for {name!r}: print them with python tests/allocators/{Path(__file__).name}")
    assert sorted(traces) == sorted(TRACES)


def _name(row: dict[str, Any]) -> str:
    return "-".join((row["allocator"], *row["settings"].values(), row["trace"]))


@pytest.mark.parametrize("row", GOLDEN, ids=_name)
def test_golden_numbers(row: dict[str, Any]) -> None:
    assert measure(row["allocator"], row["settings"], row["trace"]) == row


def test_what_can_be_said_without_an_allocator() -> None:
    """Peaks of what is asked for, and what each bound on it means for the rows."""
    live: dict[int | str | None, int] = {}
    peak: dict[str, int] = {}
    for trace in TRACES:
        for op in read_memory_trace(FOLDER / f"{trace}.csv"):
            if op.op == "malloc":
                live[op.id] = op.size
                peak[trace] = max(peak.get(trace, 0), sum(live.values()))
            else:
                del live[op.id]
        assert not live, "all is given back"
    assert peak == {"chats": 42_516_480, "doubling": 247_463_936, "mixed": 95_962_602}
    for row in GOLDEN:
        if row["first_oom_index"] is None:
            assert peak[row["trace"]] <= row["peak_reserved_bytes"]
        assert row["peak_reserved_bytes"] <= CAPACITY[row["trace"]]


class Restarting(NextFit):
    """Next fit whose every search begins at the lowest address."""

    def take(self, size: int) -> LinkedBlock | None:
        self.rover = 0
        return super().take(size)


class HighestOfEquals(LargestFirst):
    """Worst fit whose ties go to the highest address."""

    def _key(self, block: LinkedBlock) -> int:
        return BySize._key(self, block)


@pytest.mark.parametrize(
    ("fit", "bug", "moved"),
    [
        ("best", ByAddress, ["chats", "doubling", "mixed"]),
        ("next", Restarting, ["chats", "doubling", "mixed"]),
        ("worst", HighestOfEquals, ["doubling"]),
    ],
)
def test_another_placement_moves_the_numbers(
    fit: str, bug: Any, moved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(pooled._FITS, fit, bug)
    settings = {} if fit == "best" else {"fit": fit}
    rows = [row for row in GOLDEN if row["allocator"] == "pooled" and row["settings"] == settings]
    assert [row["trace"] for row in rows if measure("pooled", settings, row["trace"]) != row] == moved


if __name__ == "__main__":
    print("[\n" + ",\n".join(json.dumps(row) for row in table()) + "\n]")
