"""The books close at every row, and a planted leak in any one party's count is an error, not a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVLayout, KVSequence, Tag
from hbmtwin.sim.books import Books, BooksDoNotClose, Row
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=128)
MIB = 2**20


class Bench:
    """A driver of 64 MiB with two regions: one for weights, one with a pool of 63 blocks of 4 tokens, 8 KiB each."""

    def __init__(self) -> None:
        self.driver = HbmDriver(64 * MIB, tenants_bytes=MIB)
        self.driver.alloc(2 * MIB)
        self.general = PooledAllocator(self.driver, PooledConfig(limit_bytes=16 * MIB))
        self.arena = PooledAllocator(self.driver, PooledConfig(limit_bytes=32 * MIB))
        self.general.malloc(3 * MIB, tag=Tag.WEIGHT)
        self.general.malloc(1000, tag=Tag.ACTIVATION)
        self.general.malloc(24, tag=Tag.WORKSPACE)
        self.kv = PagedPolicy(LAYOUT, self.arena, PagedConfig(num_blocks=64, block_size=4, max_model_len=64))
        self.books = Books(
            self.driver,
            [self.general, self.arena],
            self.kv,
            static_bytes=2 * MIB,
            token_bytes=LAYOUT.token_bytes,
        )
        for id, tokens in ((0, 4), (1, 5)):
            self.kv.reserve(KVSequence(id=id, session=id, turn=0, num_tokens=tokens, max_tokens=64), tokens)
        self.kv.end_step()


def test_a_row_says_where_every_byte_is() -> None:
    token = LAYOUT.token_bytes
    assert token == 1024
    bench = Bench()
    row = bench.books.row(9)
    assert row == Row(
        tenants=MIB,
        static=2 * MIB,
        weights=3 * MIB,
        activations=1024,
        kv_tokens=9 * token,
        kv_padding=0,
        kv_state=0,
        kv_parked=0,
        kv_unfilled=3 * token,
        growth_copy=0,
        rounding=24 + 488,  # 1000 bytes take 1024, and 24 take 512
        external=0,
        pending_events=0,
        kv_cached=0,
        kv_pool_free=61 * 4 * token + (32 * MIB - 64 * 4 * token) + (16 * MIB - 3 * MIB - 1536),
        driver_free=(64 - 1 - 2 - 16 - 32) * MIB,
    )
    assert sum(row) == 64 * MIB


def leak_of_the_scheduler(b: Bench) -> None:
    b.kv.reserve(KVSequence(id=2, session=2, turn=0, num_tokens=1, max_tokens=64), 1)


def leak_of_the_policys_tokens(b: Bench) -> None:
    b.kv._tokens += 1


def leak_of_the_policys_blocks(b: Bench) -> None:
    b.arena.malloc(4096, tag=Tag.KV)


def leak_of_an_allocators_tags(b: Bench) -> None:
    b.general._requested_by_tag[Tag.WEIGHT] += 512


def leak_of_the_driver(b: Bench) -> None:
    assert b.driver.alloc(MIB) is not None


def leak_of_static_bytes(b: Bench) -> None:
    b.books.static_bytes -= 1


def an_allocator_left_out(b: Bench) -> None:
    b.books.allocators = (b.arena,)


LEAKS = [
    (leak_of_the_scheduler, "the scheduler counts 9216 bytes of tokens, the KV policy 10240"),
    (leak_of_the_policys_tokens, "the scheduler counts 9216 bytes of tokens, the KV policy 10240"),
    (leak_of_the_policys_blocks, "the KV policy counts 262144 bytes, its arena 266240"),
    (leak_of_an_allocators_tags, "the row sums to 67109376 bytes of 67108864"),
    (leak_of_the_driver, "the row sums to 66060288 bytes of 67108864"),
    (leak_of_static_bytes, "the row sums to 67108863 bytes of 67108864"),
    (an_allocator_left_out, "the row sums to 50331648 bytes of 67108864"),
]


@pytest.mark.parametrize(("leak", "said"), LEAKS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_leak_in_any_party_is_found(leak: Callable[[Bench], None], said: str) -> None:
    bench = Bench()
    leak(bench)
    with pytest.raises(BooksDoNotClose) as caught:
        bench.books.row(9)
    assert str(caught.value).startswith(said)


def test_a_lost_block_of_a_sequence_is_found() -> None:
    bench = Bench()
    bench.kv._free.append(bench.kv._tables[0].blocks.pop())
    bench.kv._tokens -= 4
    with pytest.raises(BooksDoNotClose):
        bench.books.row(9)


@pytest.mark.parametrize("preset", ["caching", "pooled", "doubling", "paged"])
def test_every_row_of_a_run_sums_to_the_capacity(preset: str) -> None:
    scenario = Scenario.load(
        preset=preset,
        overrides=[
            "engine.max_model_len=256",
            "engine.gpu_memory_utilization=0.47",
            "device.other_tenant_bytes=1GiB",
            "workload.request_rate=20",
            "workload.num_prompts=20",
            "workload.prompt_tokens={distribution='uniform',low=1,high=100}",
            "workload.output_tokens={distribution='uniform',low=1,high=60}",
            "workload.system_prompt_tokens=0",
            "session.turns=2",
            "session.think_time_s=1",
            "session.between_turns=keep",
            "results.interval_s=0.05",
            "kv_cache.tensors=merged",
        ],
    )
    result = Twin(scenario).run()
    timeline = result.timeline
    assert len(timeline) > 40
    assert set(timeline[list(Row._fields)].sum(axis=1)) == {result.summary["capacity_bytes"]}
    assert (timeline[list(Row._fields)] >= 0).all(axis=None)
    assert set(timeline["tenants"]) == {2**30}
