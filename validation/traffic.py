"""Traces that are hard on a caching allocator, each with the settings it is for: random ones and KV-shaped ones.

A trace is made without looking at any allocator: it keeps as many bytes alive as its *pressure* says, requests that may
have failed among them, so that some per cent of its operations end in OutOfMemory. Same name and seed, same trace.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from hbmtwin.workloads.formats.memory_trace import MemoryOp

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30

THRESHOLDS: Final = (512, 4 * KIB, *(m * MIB for m in (1, 2, 4, 10, 11, 12, 19, 20, 22)))
"""Sizes at which a rule changes, beside those that a configuration sets; 11 and 19 leave just 1 MiB of a segment."""
NEARBY: Final = (-513, -512, -481, -33, -32, -31, -1, 0, 1, 31, 32, 480, 481, 512, 513)
WAVE: Final = 400
"""Operations between two choices of how full the device shall be; half way through there is a storm of requests."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a random trace does besides malloc and free; weights are per 1000 operations."""

    streams: int = 1
    pressure: float = 1.0
    """Bytes kept alive at the fullest, as a share of the capacity."""
    greed: int = 30
    """Requests of up to the whole device that are made in each storm, as a server makes that tries again and again."""
    weights: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({"empty_cache": 2}))
    texts: tuple[str, ...] = ()
    """What ``set_conf`` sets in mid-run."""
    pool_flags: tuple[str, ...] = ("",)
    dead_pools_only: bool = False
    """A pool is deleted only when nothing of it lives: with expandable segments the real one may crash otherwise."""
    thresholds: tuple[int, ...] = THRESHOLDS


@dataclass(frozen=True, slots=True)
class Configuration:
    """A named pair of settings and traffic."""

    name: str
    alloc_conf: str = ""
    traffic: Traffic = Traffic()
    capacity_bytes: int = 512 * MIB
    growth: str = ""
    """Not empty: KV-shaped traffic with this growth rule."""
    soc: str = "Ascend910B2"
    cann: str = "8.5.0"

    def trace(self, operations: int, seed: int = 0) -> list[MemoryOp]:
        """That many operations."""
        chance = random.Random(f"{self.name}/{seed}")
        make = _kv_shaped if self.growth else _random
        ops = make(self, chance)
        return [next(ops) for _ in range(operations)]


# -- random traffic ----------------------------------------------------------------------------------------------------


def _random(c: Configuration, chance: random.Random) -> Iterator[MemoryOp]:
    made = _Made(c, chance)
    others = list(c.traffic.weights)
    shares = [*c.traffic.weights.values()]
    shares.append(1000 - sum(shares))
    while True:
        (what,) = chance.choices([*others, ""], shares)
        yield from made.by_name[what]() if what else made.malloc_or_free()


class _Made:
    """What the trace has made so far, and how it makes more."""

    def __init__(self, c: Configuration, chance: random.Random) -> None:
        self.c = c
        self.traffic = c.traffic
        self.chance = chance
        self.next_id = 0
        self.count = 0
        self.live: list[tuple[int, int, int, str]] = []
        """id, size, stream, pool."""
        self.live_bytes = 0
        self.wanted_bytes = 0
        self.storm = 0
        self.transients: list[int] = []
        self.popular = [self.new_size() for _ in range(12)]
        self.scopes: list[str] = []
        self.pools: list[str] = []
        self.next_pool = 0
        self.by_name: dict[str, Callable[[], Iterator[MemoryOp]]] = {
            "record_stream": self.record_stream,
            "erase_stream": self.erase_stream,
            "event_complete": self.event_complete,
            "set_conf": self.set_conf,
            "set_fraction": self.set_fraction,
            "pools": self.change_pools,
            "workspace": self.workspace,
            "other_memory": self.other_memory,
            **{name: self.plain(name) for name in PLAIN},
        }

    def new_size(self) -> int:
        largest = self.c.capacity_bytes // 3
        kind = self.chance.random()
        if kind < 0.25:
            size = self.chance.choice(self.traffic.thresholds) + self.chance.choice(NEARBY)
        else:
            size = int(2 ** self.chance.uniform(6, largest.bit_length() - 4))
        return min(max(1, size), largest)

    def stream(self) -> int:
        return self.chance.randrange(self.traffic.streams)

    def malloc_or_free(self) -> Iterator[MemoryOp]:
        if self.count % WAVE == 0:
            self.wanted_bytes = int(self.c.capacity_bytes * self.traffic.pressure * self.chance.uniform(0.4, 1))
        self.count += 1
        full = self.live_bytes / self.wanted_bytes
        if self.count % WAVE == WAVE // 2:
            self.storm = self.traffic.greed
        if self.transients and self.chance.random() < 0.4:
            yield MemoryOp("free", self.transients.pop(self.chance.randrange(len(self.transients))))
            return
        if self.storm and self.chance.random() < 0.7:
            self.storm -= 1
            self.transients.append(self.next_id)
            self.next_id += 1
            size = self.chance.randrange(self.c.capacity_bytes // 8, self.c.capacity_bytes)
            yield MemoryOp("malloc", self.transients[-1], size, self.stream())
            return
        if not self.live or self.chance.random() < 0.5 + 0.45 * max(-1.0, min(1.0, 4 * (1 - full))):
            yield self.malloc()
        else:
            yield self.free(self.chance.randrange(len(self.live)))

    def malloc(self) -> MemoryOp:
        size = self.chance.choice(self.popular) if self.chance.random() < 0.35 else self.new_size()
        if self.chance.random() < 0.01:
            self.popular[self.chance.randrange(len(self.popular))] = self.new_size()
        stream = self.stream()
        identity = self.next_id
        self.next_id += 1
        self.live.append((identity, size, stream, self.scopes[-1] if self.scopes else ""))
        self.live_bytes += size
        return MemoryOp("malloc", identity, size, stream)

    def free(self, position: int) -> MemoryOp:
        self.live[position], self.live[-1] = self.live[-1], self.live[position]
        identity, size, _, _ = self.live.pop()
        self.live_bytes -= size
        return MemoryOp("free", identity)

    def record_stream(self) -> Iterator[MemoryOp]:
        if self.live:
            identity = self.chance.choice(self.live)[0]
            yield MemoryOp("record_stream", identity, stream=self.stream())
        else:
            yield self.malloc()

    def erase_stream(self) -> Iterator[MemoryOp]:
        if self.live:
            identity, _, own, _ = self.chance.choice(self.live)
            current = own if self.chance.random() < 0.8 else self.stream()
            yield MemoryOp("erase_stream", identity, stream=self.stream(), arg=str(current))
        else:
            yield self.malloc()

    def event_complete(self) -> Iterator[MemoryOp]:
        stream = self.stream() if self.chance.random() < 0.7 else None
        yield MemoryOp("event_complete", stream=stream, arg=self.chance.choice(("1", "1", "2", "5", "")))

    def set_conf(self) -> Iterator[MemoryOp]:
        yield MemoryOp("set_conf", arg=self.chance.choice(self.traffic.texts))

    def set_fraction(self) -> Iterator[MemoryOp]:
        yield MemoryOp("set_fraction", arg=self.chance.choice(("1", "0.9", "0.75", "0.6", "0.5", "1.0", "0.33")))

    def workspace(self) -> Iterator[MemoryOp]:
        yield MemoryOp("workspace", None, min(self.new_size(), self.c.capacity_bytes // 8), self.stream())

    def other_memory(self) -> Iterator[MemoryOp]:
        share = self.chance.choice((0.0, 0.05, 0.1, 0.2, 0.3))
        yield MemoryOp("other_memory", None, int(share * self.c.capacity_bytes))

    def plain(self, name: str) -> Callable[[], Iterator[MemoryOp]]:
        return lambda: iter((MemoryOp(name),))

    def change_pools(self) -> Iterator[MemoryOp]:
        outside = [pool for pool in self.pools if pool not in self.scopes]
        kind = self.chance.random()
        if self.scopes and (kind < 0.45 or len(self.scopes) == 3):
            yield MemoryOp("mempool_end", self.scopes.pop(self.chance.randrange(len(self.scopes))))
        elif outside and kind < 0.65:
            yield from self.delete_pool(self.chance.choice(outside))
        elif outside and kind < 0.85:
            self.scopes.append(self.chance.choice(outside))
            yield MemoryOp("mempool_begin", self.scopes[-1])
        else:
            name = f"pool-{self.next_pool}"
            self.next_pool += 1
            self.pools.append(name)
            self.scopes.append(name)
            yield MemoryOp("mempool_begin", name, arg=self.chance.choice(self.traffic.pool_flags))

    def delete_pool(self, name: str) -> Iterator[MemoryOp]:
        if self.traffic.dead_pools_only:
            for position in range(len(self.live) - 1, -1, -1):
                if self.live[position][3] == name:
                    yield self.free(position)
        self.pools.remove(name)
        yield MemoryOp("mempool_delete", name)


PLAIN: Final = ("synchronize", "empty_cache", "empty_virt_addr_cache", "reset_peak", "reset_accumulated")


# -- KV-shaped traffic -------------------------------------------------------------------------------------------------

LAYERS: Final = 4
TOKEN_BYTES: Final = 8 * KIB
"""Of K or V in one layer."""


def _kv_shaped(c: Configuration, chance: random.Random) -> Iterator[MemoryOp]:
    """Sequences whose K and V tensors grow, each replaced by a larger one; prompts, activations, ends and new ones."""
    grow = GROWTHS[c.growth]
    room = int(c.capacity_bytes * c.traffic.pressure)
    sequences: list[tuple[int, int, list[int]]] = []
    held = next_id = 0
    while True:
        for _ in range(3):
            tokens = chance.randint(8, 600)
            capacity = grow(tokens)
            if sequences and held + 2 * LAYERS * capacity * TOKEN_BYTES > room:
                break
            tensors = list(range(next_id, next_id + 2 * LAYERS))
            next_id += 2 * LAYERS + 1
            yield MemoryOp("malloc", next_id - 1, tokens * 4 * KIB * chance.randint(1, 4), 0)  # activations
            yield from (MemoryOp("malloc", tensor, capacity * TOKEN_BYTES, 0) for tensor in tensors)
            yield MemoryOp("free", next_id - 1)
            sequences.append((tokens, capacity, tensors))
            held += 2 * LAYERS * capacity * TOKEN_BYTES
        for position, (tokens, capacity, tensors) in enumerate(sequences):
            larger = grow(tokens + 1)
            if larger > capacity:
                grown = list(range(next_id, next_id + len(tensors)))
                next_id += len(tensors)
                for old, new in zip(tensors, grown, strict=True):
                    yield MemoryOp("malloc", new, larger * TOKEN_BYTES, 0)
                    yield MemoryOp("free", old)
                held += 2 * LAYERS * (larger - capacity) * TOKEN_BYTES
                tensors = grown
            sequences[position] = (tokens + 1, larger, tensors)
        for tokens, capacity, tensors in [s for s in sequences if chance.random() < 0.02 or held > room]:
            yield from (MemoryOp("free", tensor) for tensor in tensors)
            sequences.remove((tokens, capacity, tensors))
            held -= 2 * LAYERS * capacity * TOKEN_BYTES


def _doubled(tokens: int) -> int:
    return 64 << max(0, (tokens - 1) // 64).bit_length()


GROWTHS: Final[Mapping[str, Callable[[int], int]]] = {
    "exact": lambda tokens: tokens,
    "doubling": _doubled,
    "step": lambda tokens: -(-tokens // 32) * 32,
    "static": lambda tokens: -(-tokens // 1024) * 1024,
}
"""Tokens that a buffer has room for."""
