"""The books close at every row, and a planted leak in any one party's count is an error, not a row."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.allocators.contract import CountsInBlocks
from hbmtwin.allocators.driver import HbmDriver
from hbmtwin.allocators.paged import PagedConfig, PagedPolicy
from hbmtwin.allocators.pooled import PooledAllocator, PooledConfig
from hbmtwin.allocators.records import KVLayout, KVSequence, KVUsage, Release, Tag
from hbmtwin.sim.books import Books, BooksDoNotClose, DeviceTerms, Entry, Row, rows_of
from hbmtwin.sim.columns import CHUNK_ROWS
from hbmtwin.sim.recorder import Recorder
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


def usage_of(numbers: tuple[int, ...]) -> KVUsage:
    """What stands in an entry are a policy's counts, or its usage."""
    return numbers if isinstance(numbers, KVUsage) else Bench().kv.usage_of(numbers)


def checked(*entries: Entry) -> list[Row]:
    """Rows of the moments 0, 1000, 2000 ..."""
    devices = list(dict.fromkeys(device for device, *_ in entries))
    numbers = [(devices.index(device), *counts, *usage_of(kv)) for device, *counts, kv in entries]
    times = np.arange(len(entries), dtype=np.int64) * 1000
    return [Row(*row) for row in rows_of(times, devices, list(np.array(numbers, dtype=np.int64).T)).T.tolist()]


def test_a_row_says_where_every_byte_is() -> None:
    token = LAYOUT.token_bytes
    assert token == 1024
    bench = Bench()
    (row,) = checked(bench.books.row(9))
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
    (leak_of_the_scheduler, "at 0 ns the scheduler counts 9216 bytes of tokens, the KV policy 10240"),
    (leak_of_the_policys_tokens, "at 0 ns the scheduler counts 9216 bytes of tokens, the KV policy 10240"),
    (leak_of_the_policys_blocks, "at 0 ns the KV policy counts 262144 bytes, its arena 266240"),
    (leak_of_an_allocators_tags, "at 0 ns the row sums to 67109376 bytes of 67108864"),
    (leak_of_the_driver, "at 0 ns the row sums to 66060288 bytes of 67108864"),
    (leak_of_static_bytes, "at 0 ns the row sums to 67108863 bytes of 67108864"),
    (an_allocator_left_out, "at 0 ns the row sums to 50331648 bytes of 67108864"),
]


@pytest.mark.parametrize(("leak", "said"), LEAKS, ids=lambda x: getattr(x, "__name__", ""))
def test_a_leak_in_any_party_is_found(leak: Callable[[Bench], None], said: str) -> None:
    bench = Bench()
    leak(bench)
    with pytest.raises(BooksDoNotClose) as caught:
        checked(bench.books.row(9))
    assert str(caught.value).startswith(said)


def test_a_lost_block_of_a_sequence_is_found() -> None:
    bench = Bench()
    bench.kv._free.append(bench.kv._tables[0].blocks.pop())
    bench.kv._tokens -= 4
    with pytest.raises(BooksDoNotClose):
        checked(bench.books.row(9))


def test_sequences_without_their_states_are_found() -> None:
    bench = Bench()
    bench.books.sequence_state_bytes = 100
    assert checked(bench.books.row(9))  # as many states as the policy counts: none
    with pytest.raises(BooksDoNotClose, match="at 1000 ns the scheduler counts 200 bytes of states, the KV policy 0: "):
        checked(bench.books.row(9), bench.books.row(9, num_running=2))
    bench.books.sequence_state_bytes = None
    assert checked(bench.books.row(9, num_running=2))


# -- reading once, checking many -------------------------------------------------------------------------------------


def naive(entry: Entry) -> tuple[Row, str]:
    """A row by hand, and what does not close in it."""
    device, tokens, padding, num_running, numbers = entry
    kv = usage_of(numbers)
    here = device._asdict() | {
        "kv_tokens": tokens * device.token_bytes - (kv.dropped + kv.shared),
        "kv_padding": padding * device.token_bytes,
        "kv_state": kv.state,
        "kv_parked": kv.parked,
        "kv_unfilled": kv.unfilled,
        "growth_copy": kv.growth_copy,
        "kv_cached": kv.cached,
        "kv_pool_free": device.arena_free + kv.pool,
    }
    row = Row(**{name: here[name] for name in Row._fields})
    if row.kv_tokens + row.kv_padding != kv.token:
        return row, "of tokens"
    if device.sequence_state_bytes != -1 and num_running * device.sequence_state_bytes != kv.state:
        return row, "of states"
    if device.kv != kv.held + kv.growth_copy + kv.cached + kv.pool:
        return row, "its arena"
    return row, "the row sums to" if sum(row) != device.total or min(row) < 0 else ""


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    """One that closes, and may then be wrong by a byte in one place, or by two."""
    size = st.integers(0, 2**36)
    token_bytes, state_bytes = draw(st.integers(1, 2**20)), draw(st.sampled_from([-1, 0, 1000]))
    tokens, padding, num_running = (draw(st.integers(0, 1000)) for _ in range(3))
    dropped = shared = draw(st.integers(0, tokens)) // 2 * token_bytes
    kv: dict[str, Any] = {name: draw(size) for name in ("parked", "growth_copy", "cached", "pool", "table")}
    kv |= {"dropped": dropped, "shared": shared, "token": (tokens + padding) * token_bytes - dropped - shared}
    kv |= {"state": num_running * state_bytes if state_bytes >= 0 else draw(size), "parked_sessions": draw(size)}
    kv["held"] = kv["token"] + kv["parked"] + kv["state"] + draw(size)
    held_by_kv = sum(kv[name] for name in ("held", "growth_copy", "cached", "pool"))
    names = ("tenants", "static", "weights", "activations", "rounding", "external", "pending_events", "arena_free")
    device: dict[str, Any] = {name: draw(size) for name in (*names, "driver_free")}
    device |= {"total": sum(device.values()) + held_by_kv, "kv": held_by_kv}
    device |= {"token_bytes": token_bytes, "sequence_state_bytes": state_bytes}
    terms = [(device, name) for name in DeviceTerms._fields if name != "sequence_state_bytes"]  # -1 has a meaning
    terms += [(kv, name) for name in KVUsage._fields]
    for where, name in draw(st.lists(st.sampled_from(terms), max_size=2)):
        where[name] += draw(st.sampled_from([-1, 1]))
    return DeviceTerms(**device), tokens, padding, num_running, KVUsage(**kv)


@given(st.lists(entries(), min_size=1, max_size=6))
def test_many_rows_are_what_each_is_by_itself_and_the_first_wrong_one_stops(given_entries: list[Entry]) -> None:
    by_hand = [naive(entry) for entry in given_entries]
    wrong = [(place, what) for place, (_, what) in enumerate(by_hand) if what]
    if not wrong:
        assert checked(*given_entries) == [row for row, _ in by_hand]
        return
    place, what = wrong[0]
    with pytest.raises(BooksDoNotClose, match=rf"^at {place * 1000} ns .*{what}") as caught:
        checked(*given_entries)
    assert str(caught.value).endswith(str(by_hand[place][0]))


def test_what_no_operation_changed_is_not_read_again_and_what_one_did_is() -> None:
    bench, counted = Bench(), SimpleNamespace(op_index=0)
    books = Books(
        bench.driver,
        [bench.general, bench.arena],
        bench.kv,
        static_bytes=2 * MIB,
        token_bytes=LAYOUT.token_bytes,
        counted=counted,
    )
    first = books.row(9)
    bench.general.malloc(MIB, tag=Tag.WEIGHT)
    assert books.row(9)[0] is first[0]
    with pytest.raises(BooksDoNotClose, match=r"without an operation .*weights=3145728.* became .*weights=4194304"):
        books.check_kept()
    counted.op_index += 1
    second = books.row(9)
    books.check_kept()
    assert [row.weights for row in checked(first, second)] == [3 * MIB, 4 * MIB]
    counted.op_index += 1
    assert books.row(9)[0] is second[0]  # read again, and found as it was


@pytest.mark.parametrize("at", [1, CHUNK_ROWS // 2, CHUNK_ROWS + 1])
def test_a_token_that_a_policy_miscounts_once_among_thousands_of_rows_stops_the_run(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: seen when the rows that wait are compared, in the middle or at the end, and told with its time."""
    scenario = Scenario.load(
        preset="paged",
        overrides=[
            "workload.request_rate=1",
            "workload.num_prompts=140",
            "workload.output_tokens=100",
            "session.turns=1",
            "results.interval_s=0.01",
        ],
    )
    times: list[int] = []
    row = Recorder.row

    def miscounting(self: Recorder, time_ns: int, entry: Entry, *rest: Any) -> None:
        device, tokens, padding, num_running, (counted, *others) = entry
        times.append(time_ns)
        counted += len(times) == at
        row(self, time_ns, (device, tokens, padding, num_running, (counted, *others)), *rest)

    monkeypatch.setattr(Recorder, "row", miscounting)
    twin = Twin(scenario)
    with pytest.raises(BooksDoNotClose) as caught:
        twin.run()
    said = r"at (\d+) ns the scheduler counts (\d+) bytes of tokens, the KV policy (\d+): Row"
    found = re.match(said, str(caught.value))
    assert found is not None
    time_ns, scheduler, policy = map(int, found.groups())
    assert (time_ns, policy) == (times[at - 1], scheduler + twin.token_bytes)
    assert len(times) == CHUNK_ROWS if at <= CHUNK_ROWS else len(times) > CHUNK_ROWS


def test_rows_that_wait_are_told_before_the_error_that_came_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    row = Books.row

    def miscounting(self: Books, *args: int) -> Entry:
        device, tokens, padding, num_running, (counted, *others) = row(self, *args)
        return device, tokens, padding, num_running, (counted + 1, *others)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("the engine ran into it")

    monkeypatch.setattr(Books, "row", miscounting)
    monkeypatch.setattr(Recorder, "end_request", fails)
    with pytest.raises(BooksDoNotClose, match=r"^at 0 ns the scheduler counts ") as caught:
        Twin(Scenario.load(preset="paged", overrides=["workload.num_prompts=1"])).run()
    assert isinstance(caught.value.__context__, RuntimeError)


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


def test_a_term_that_a_policy_never_has_is_compared_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Twin(Scenario.load(preset="paged", overrides=["workload.num_prompts=1"]))
    terms = Books._device_terms
    monkeypatch.setattr(Books, "_device_terms", lambda self: terms(self)._replace(sequence_state_bytes=100))
    with pytest.raises(BooksDoNotClose, match="the scheduler counts 100 bytes of states, the KV policy 0: Row"):
        twin.run()


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_counts_of_many_moments_are_the_usage_of_each(enable_prefix_caching: bool) -> None:
    """Of a policy that says its books in few numbers: of one moment they are its usage, and of many in columns too."""
    config = PagedConfig(num_blocks=64, max_model_len=64, block_size=4, enable_prefix_caching=enable_prefix_caching)
    policy = PagedPolicy(LAYOUT, PooledAllocator(HbmDriver(64 * MIB), PooledConfig(limit_bytes=32 * MIB)), config)
    assert isinstance(policy, CountsInBlocks)
    usages, counts = [policy.usage()], [policy.counts()]
    for id, tokens in ((0, 9), (1, 9), (2, 4)):
        spans = (("shared", 0, 8), (id, 0, 1))
        s = KVSequence(id=id, session=id, turn=0, num_tokens=tokens, max_tokens=64, spans=spans)
        hit = policy.lookup(s)
        policy.reserve(s, tokens - hit, hit=hit, admitting=True)
        policy.end_step()
        usages.append(policy.usage())
        counts.append(policy.counts())
        if id == 1:
            policy.release(s, Release.FINISH)
    columns = np.broadcast_arrays(*policy.usage_of(list(np.array(counts, dtype=np.int64).T)))
    assert [KVUsage(*map(int, values)) for values in zip(*columns, strict=True)] == usages
    assert any(usage.shared for usage in usages) == enable_prefix_caching
    policy.check()
