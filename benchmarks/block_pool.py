"""What block pools cost, ``paged``, ``paged_groups`` and ``radix``: blocks a second, a decode's reserve, a leap.

    python benchmarks/block_pool.py [paged | groups | radix]

Blocks of 16 tokens; ``groups`` are one that sees all and six that see 64 tokens, as Gemma's do. ``blocks``: 64
sequences at a time of 500 tokens in and 200 out come, decode and go; one operation is one block taken or given back,
``steps`` reserves every token, ``leaps`` advances by 20. ``prefix`` is the part of a prompt that all have in common;
only half of the pool is needed at once, so cached blocks are evicted all the time. ``reserve``: one decode of one
sequence, in a step of 256. ``leap``: ``horizon`` and ``advance`` by so many steps, on a list that the policy knows and
on a new one; the pool is short, so that ``horizon`` must count. In seconds of the processor, the best of five runs.
"""

from __future__ import annotations

import sys
import time

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.contract import KVPolicy
from hbmtwin.allocators.kv_groups import Grouping, KVGroup
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.paged_groups import PagedGroupsConfig, PagedGroupsPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.radix import RadixConfig, RadixPolicy
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Release

RUNS = 5
BLOCK_SIZE = 16
PROMPT, OUTPUT = 500, 200
LONGEST = 1 << 20
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
BATCHES = (16, 64, 256, 1024, 4096)


WINDOW = 64
GROUPS = (
    KVGroup(block_size=BLOCK_SIZE, token_bytes=LAYOUT.token_bytes),
    *[KVGroup(kind="sliding_window", window=WINDOW, block_size=BLOCK_SIZE, token_bytes=LAYOUT.token_bytes)] * 6,
)
TABLES = {"paged": 1, "groups": len(GROUPS), "radix": 1}
"""Of a sequence."""
SHORT = {"paged": 20, "groups": 6, "radix": 20}
"""Blocks for each table of a batch, so that not all steps up to the limit have theirs whatever is given back."""
LIMIT = {"paged": 100_000, "groups": 20, "radix": 100_000}
"""Of ``horizon``: groups try all steps that they promise."""
STEPS = {"paged": 160, "groups": 32, "radix": 160}
"""Of one run, all leaps together."""


def pool(kind: str, num_blocks: int, caching: bool) -> KVPolicy:
    """A policy over an arena of its own."""
    size = (num_blocks * BLOCK_SIZE * LAYOUT.token_bytes) + (1 << 20)
    arena = PooledAllocator(HbmDriver(size), PooledConfig(limit_bytes=size))
    if kind == "groups":
        grouping = Grouping(groups=GROUPS, group_length=1, page_bytes=BLOCK_SIZE * LAYOUT.token_bytes)
        groups = PagedGroupsConfig(
            num_blocks=num_blocks, max_model_len=LONGEST, grouping=grouping, enable_prefix_caching=caching
        )
        return PagedGroupsPolicy(LAYOUT, arena, groups)
    if kind == "radix":
        radix = RadixConfig(
            num_blocks=num_blocks, max_model_len=LONGEST, block_size=BLOCK_SIZE, enable_prefix_caching=caching
        )
        return RadixPolicy(LAYOUT, arena, radix)
    paged = PagedConfig(
        num_blocks=num_blocks, max_model_len=LONGEST, block_size=BLOCK_SIZE, enable_prefix_caching=caching
    )
    return PagedPolicy(LAYOUT, arena, paged)


def sequence(id: int, tokens: int, shared: int = 0) -> KVSequence:
    """One whose first *shared* tokens all have."""
    return KVSequence(id, id, 0, tokens, LONGEST, spans=(("all", 0, shared), (id, 0, LONGEST)))


def admit(policy: KVPolicy, s: KVSequence) -> None:
    """With what it finds."""
    hit = policy.lookup(s)
    assert isinstance(policy.reserve(s, s.num_tokens - hit, hit=hit, admitting=True), Granted)
    s.num_computed_tokens, s.num_tokens = s.num_tokens, s.num_tokens + 1


def decode(policy: KVPolicy, batch: list[KVSequence], steps: int, leap: int) -> None:
    """So many steps, *leap* at a time."""
    for _ in range(steps // leap):
        for s in batch:
            policy.reserve(s, 1, others_running=True)
        policy.end_step()
        policy.advance(batch, leap - 1)
        for s in batch:
            s.num_computed_tokens += leap
            s.num_tokens += leap


def blocks_a_second(kind: str, caching: bool, shared: int, leap: int) -> float:
    """Taken and given back, 20 batches of 64."""
    most = -(-(PROMPT + OUTPUT) // BLOCK_SIZE) * TABLES[kind]
    policy = pool(kind, 2 * 64 * most, caching)
    operations = 0
    start = time.process_time()
    for first in range(0, 20 * 64, 64):
        batch = [sequence(id, PROMPT, shared) for id in range(first, first + 64)]
        for s in batch:
            admit(policy, s)
        policy.end_step()
        decode(policy, batch, OUTPUT, leap)
        operations += 2 * 64 * most
        for s in batch:
            policy.release(s, Release.FINISH)
    return operations / (time.process_time() - start)


def reserve_ns(kind: str, caching: bool) -> float:
    """Of one decode, blocks and keys that fall due included."""
    policy, batch = running(kind, 256, caching, blocks_each=200)
    seconds = 0.0
    for _ in range(64):
        start = time.process_time()
        for s in batch:
            policy.reserve(s, 1, others_running=True)
        seconds += time.process_time() - start
        policy.end_step()
        for s in batch:
            s.num_computed_tokens += 1
            s.num_tokens += 1
    return seconds / 64 / len(batch) * 1e9


def running(kind: str, count: int, caching: bool, blocks_each: int) -> tuple[KVPolicy, list[KVSequence]]:
    """Sequences at every place of a block."""
    policy = pool(kind, count * blocks_each * TABLES[kind], caching)
    batch = [sequence(id, WINDOW + id % BLOCK_SIZE) for id in range(count)]
    for s in batch:
        admit(policy, s)
    policy.end_step()
    policy.end_step()  # what the first put into a tree is there for the look-ups of the second
    return policy, batch


def leap_us(kind: str, count: int, caching: bool, steps: int, known: bool) -> float:
    """``horizon`` and ``advance`` of a batch of *count*."""
    policy, batch = running(kind, count, caching, blocks_each=SHORT[kind])
    policy.advance(batch, 1)
    repeats = STEPS[kind] // steps
    lists = [batch if known else list(batch) for _ in range(repeats)]
    start = time.process_time()
    for decoding in lists:
        policy.horizon(decoding, LIMIT[kind])
        policy.advance(decoding, steps)
    return (time.process_time() - start) / repeats * 1e6


def main() -> None:
    """Print the three tables."""
    kinds = [(kind, caching) for kind in sys.argv[1:] or TABLES for caching in (False, True)]
    print(f"{'blocks a second':40}{'steps':>12}{'leaps':>12}")
    for kind, caching in kinds:
        for shared in (0, 400) if caching else (0,):
            label = f"{kind}, prefix {shared} of {PROMPT}" if caching else f"{kind}, no prefix caching"
            speeds = [max(blocks_a_second(kind, caching, shared, leap) for _ in range(RUNS)) for leap in (1, 20)]
            print(f"{label:40}" + "".join(f"{speed:12,.0f}" for speed in speeds))
    print(f"\n{'reserve, ns a decode':40}")
    for kind, caching in kinds:
        print(f"{named(kind, caching):40}{min(reserve_ns(kind, caching) for _ in range(RUNS)):12,.0f}")
    print(f"\n{'horizon and advance, us':40}" + "".join(f"{f'{count} seqs':>12}" for count in BATCHES))
    for kind, caching in kinds:
        for steps in (1, 16):
            for known in (True, False):
                label = f"{named(kind, caching)}, {steps} steps, {'known' if known else 'new'} list"
                costs = [min(leap_us(kind, count, caching, steps, known) for _ in range(RUNS)) for count in BATCHES]
                print(f"{label:40}" + "".join(f"{cost:12,.1f}" for cost in costs))


def named(kind: str, caching: bool) -> str:
    """The beginning of a row's label."""
    return f"{kind}, caching" if caching else kind


if __name__ == "__main__":
    main()
