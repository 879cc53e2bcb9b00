"""What the block pool of ``paged`` costs: blocks a second, a decode's reserve, a leap against the size of the batch.

    python benchmarks/block_pool.py

Blocks of 16 tokens. ``blocks``: 64 sequences at a time of 500 tokens in and 200 out come, decode and go; one operation
is one block taken or given back, ``steps`` reserves every token, ``leaps`` advances by 20. ``prefix`` is the part of a
prompt that all have in common; only half of the pool is needed at once, so cached blocks are evicted all the time.
``reserve``: one decode of one sequence, in a step of 256. ``leap``: ``horizon`` and ``advance`` by so many steps, on
a list that the policy knows and on a new one; the pool is short, so that ``horizon`` must count. In seconds of the
processor, the best of five runs.
"""

from __future__ import annotations

import time

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import Granted, KVLayout, KVSequence, Release

RUNS = 5
BLOCK_SIZE = 16
PROMPT, OUTPUT = 500, 200
LONGEST = 1 << 20
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
BATCHES = (16, 64, 256, 1024, 4096)


def pool(num_blocks: int, caching: bool) -> PagedPolicy:
    """A policy over an arena of its own."""
    size = (num_blocks * BLOCK_SIZE * LAYOUT.token_bytes) + (1 << 20)
    arena = PooledAllocator(HbmDriver(size), PooledConfig(limit_bytes=size))
    config = PagedConfig(
        num_blocks=num_blocks, max_model_len=LONGEST, block_size=BLOCK_SIZE, enable_prefix_caching=caching
    )
    return PagedPolicy(LAYOUT, arena, config)


def sequence(id: int, tokens: int, shared: int = 0) -> KVSequence:
    """One whose first *shared* tokens all have."""
    return KVSequence(id, id, 0, tokens, LONGEST, spans=(("all", 0, shared), (id, 0, LONGEST)))


def admit(policy: PagedPolicy, s: KVSequence) -> None:
    """With what it finds."""
    hit = policy.lookup(s)
    assert isinstance(policy.reserve(s, s.num_tokens - hit, hit=hit, admitting=True), Granted)
    s.num_computed_tokens, s.num_tokens = s.num_tokens, s.num_tokens + 1


def decode(policy: PagedPolicy, batch: list[KVSequence], steps: int, leap: int) -> None:
    """So many steps, *leap* at a time."""
    for _ in range(steps // leap):
        for s in batch:
            policy.reserve(s, 1, others_running=True)
        policy.end_step()
        policy.advance(batch, leap - 1)
        for s in batch:
            s.num_computed_tokens += leap
            s.num_tokens += leap


def blocks_a_second(caching: bool, shared: int, leap: int) -> float:
    """Taken and given back, 20 batches of 64."""
    most = -(-(PROMPT + OUTPUT + 1) // BLOCK_SIZE)
    policy = pool(2 * 64 * most, caching)
    operations = 0
    start = time.process_time()
    for first in range(0, 20 * 64, 64):
        batch = [sequence(id, PROMPT, shared) for id in range(first, first + 64)]
        for s in batch:
            admit(policy, s)
        policy.end_step()
        decode(policy, batch, OUTPUT, leap)
        operations += 2 * sum(len(policy.block_ids(s)) for s in batch)
        for s in batch:
            policy.release(s, Release.FINISH)
    return operations / (time.process_time() - start)


def reserve_ns(caching: bool) -> float:
    """Of one decode, blocks and keys that fall due included."""
    policy, batch = running(256, caching, blocks_each=200)
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


def running(count: int, caching: bool, blocks_each: int) -> tuple[PagedPolicy, list[KVSequence]]:
    """Sequences at every place of a block."""
    policy = pool(count * blocks_each, caching)
    batch = [sequence(id, 32 + id % BLOCK_SIZE) for id in range(count)]
    for s in batch:
        admit(policy, s)
    policy.end_step()
    return policy, batch


def leap_us(count: int, caching: bool, steps: int, known: bool) -> float:
    """``horizon`` and ``advance`` of a batch of *count*."""
    policy, batch = running(count, caching, blocks_each=20)
    policy.advance(batch, 1)
    repeats = 160 // steps
    lists = [batch if known else list(batch) for _ in range(repeats)]
    start = time.process_time()
    for decoding in lists:
        policy.horizon(decoding, 100_000)
        policy.advance(decoding, steps)
    return (time.process_time() - start) / repeats * 1e6


def main() -> None:
    """Print the three tables."""
    print(f"{'blocks a second':32}{'steps':>12}{'leaps':>12}")
    for label, caching, shared in (
        ("no prefix caching", False, 0),
        ("prefix caching, nothing shared", True, 0),
        ("prefix caching, prefix 400 of 500", True, 400),
    ):
        speeds = [max(blocks_a_second(caching, shared, leap) for _ in range(RUNS)) for leap in (1, 20)]
        print(f"{label:32}" + "".join(f"{speed:12,.0f}" for speed in speeds))
    print(f"\n{'reserve, ns a decode':32}")
    for label, caching in (("no prefix caching", False), ("prefix caching", True)):
        print(f"{label:32}{min(reserve_ns(caching) for _ in range(RUNS)):12,.0f}")
    print(f"\n{'horizon and advance, us':32}" + "".join(f"{f'{count} seqs':>12}" for count in BATCHES))
    for caching in (False, True):
        for steps in (1, 16):
            for known in (True, False):
                label = f"{'caching, ' if caching else ''}{steps} steps, {'known' if known else 'new'} list"
                costs = [min(leap_us(count, caching, steps, known) for _ in range(RUNS)) for count in BATCHES]
                print(f"{label:32}" + "".join(f"{cost:12,.1f}" for cost in costs))


if __name__ == "__main__":
    main()
