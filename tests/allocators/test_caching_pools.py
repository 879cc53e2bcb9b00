"""Private pools (MemPool): scopes, options, deletion, and what is unsafe about them."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig, UnsafeState
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag

MIB = 1 << 20


def make(capacity_mib: int = 200, **settings: object) -> CachingAllocator:
    return CachingAllocator(HbmDriver(capacity_mib * MIB), CachingConfig(**settings))


def mib(a: CachingAllocator, size: float, stream: int = 0) -> int:
    return a.malloc(round(size * MIB), stream=stream, tag=Tag.KV)


def inside(a: CachingAllocator, name: str, *sizes: float, **options: bool) -> list[int]:
    a.mempool_begin(name, **options)
    handles = [mib(a, size) for size in sizes]
    a.mempool_end(name)
    return handles


def pools(a: CachingAllocator) -> list[tuple[int, int]]:
    a.check()
    return [(s.pool_id, s.size // MIB) for s in a.walk()]


def test_pools_are_numbered_as_they_are_made_and_never_share() -> None:
    a = make()
    (one,) = inside(a, "b", 3)
    inside(a, "a", 3)
    a.free(one)
    mib(a, 4)
    assert pools(a) == [(1, 20), (2, 20), (0, 20)]
    assert a.memory_snapshot()[1]["segment_pool_id"] == (0, 2)
    (again,) = inside(a, "b", 5)
    assert a.address(again) == 2 * MIB
    assert a.stats()["segment.large_pool.current"] == 3, "statistics do not tell pools apart"


def test_requests_go_to_the_pool_entered_last_and_scopes_need_not_nest() -> None:
    a = make()
    a.mempool_begin("one")
    a.mempool_begin("two")
    mib(a, 3, stream=5)
    a.mempool_end("one")
    mib(a, 12)
    a.mempool_end("two")
    mib(a, 14)
    assert pools(a) == [(2, 20), (2, 14), (0, 16)]


def test_words_that_make_no_sense_are_refused() -> None:
    a = make()
    a.mempool_begin("p")
    with pytest.raises(RuntimeError, match="already recording to mempool_id"):
        a.mempool_begin("p")
    with pytest.raises(RuntimeError, match="is entered; end its scope"):
        a.mempool_delete("p")
    a.mempool_end("p")
    with pytest.raises(RuntimeError, match="is not entered"):
        a.mempool_end("p")
    a.mempool_delete("p")
    for verb in (a.mempool_begin, a.mempool_end, a.mempool_delete):
        with pytest.raises(RuntimeError, match="is deleted"):
            verb("p")
    with pytest.raises(RuntimeError, match="does not exist"):
        a.mempool_delete("q")


def test_entering_twice_fails_and_counts_so_that_the_pool_is_never_released() -> None:
    a = make()
    (free,) = inside(a, "p", 12)
    a.free(free)
    a.mempool_begin("p")
    with pytest.raises(RuntimeError, match="already recording"):
        a.mempool_begin("p")
    a.mempool_end("p")
    a.mempool_delete("p")
    a.empty_cache()
    assert pools(a) == [(1, 14)]
    assert a.stats()["num_sync_all_streams"] == 1, "of empty_cache"


def test_no_split_gives_every_request_a_whole_segment() -> None:
    a = make()
    a.mempool_begin("whole", no_split=True)
    a.malloc(100, tag=Tag.KV)
    a.malloc(100, tag=Tag.KV)
    mib(a, 3)
    a.mempool_end("whole")
    assert pools(a) == [(1, 2), (1, 2), (1, 20)]
    assert a.usage().allocated == 24 * MIB


def test_a_living_pool_keeps_its_memory_even_when_a_request_fails() -> None:
    a = make(40)
    (free,) = inside(a, "p", 30)
    a.free(free)
    a.empty_cache()
    assert pools(a) == [(1, 32)]
    with pytest.raises(OutOfMemory) as failed:
        mib(a, 20)
    assert failed.value.facts.rule == "private_pool"
    a.mempool_begin("p")
    with pytest.raises(OutOfMemory):
        mib(a, 35)
    a.mempool_end("p")
    assert pools(a) == [(1, 32)], "its own free segment was not released for it either"


def test_use_on_oom_lends_free_blocks_to_the_default_pools() -> None:
    a = make(40)
    (free,) = inside(a, "p", 30, use_on_oom=True)
    a.free(free)
    borrowed = mib(a, 20)
    assert pools(a) == [(1, 32)]
    assert a.stats()["num_alloc_retries"] == 0, "it comes before anything is released"
    a.free(borrowed)
    inside(a, "q")
    a.mempool_begin("q")
    with pytest.raises(OutOfMemory):
        mib(a, 20)
    a.mempool_end("q")


def test_pools_that_lend_are_searched_in_the_order_of_their_hash_table() -> None:
    """With numbers 1 to 3 in a table of 8 slots: 2, 1, 3 (wanted slots 1, 4, 6 by the golden ratio: 5, 1, 6)."""
    a = make(100)
    free = [inside(a, name, 30, use_on_oom=True)[0] for name in "abc"]
    for handle in free:
        a.free(handle)
    order = []
    for _ in range(3):
        handle = mib(a, 30)
        order.append((a.address(handle) - 2 * MIB) // (32 * MIB) + 1)
    assert order == [2, 1, 3]


def test_a_dead_pool_gives_up_what_is_free_and_the_rest_later() -> None:
    a = make()
    free, live = inside(a, "p", 12, 14)
    a.free(free)
    a.mempool_delete("p")
    assert pools(a) == [(1, 16)]
    assert a.stats()["num_sync_all_streams"] == 1
    a.free(live)
    assert pools(a) == [(1, 16)], "not by the free"
    a.empty_cache()
    assert pools(a) == []


def test_a_dying_pool_takes_back_only_its_own_waiting_blocks() -> None:
    a = make()
    handles = [*inside(a, "p", 12), mib(a, 14)]
    for handle in handles:
        a.record_stream(handle, 1)
        a.free(handle)
    a.mempool_delete("p")
    assert [(s.pool_id, s.blocks[0].state) for s in a.walk()] == [(0, "active_pending_free")]
    mib(a, 14)
    assert [(s.pool_id, s.blocks[0].state) for s in a.walk()] == [(0, "active_allocated")], "its event is complete"


def test_expandable_segments_in_a_pool_work_if_its_tensors_die_first() -> None:
    a = make(alloc_conf="expandable_segments:True")
    for handle in inside(a, "p", 3, 24, 0.1):
        a.free(handle)
    a.mempool_delete("p")
    assert pools(a) == []
    assert a.driver.mem_info()[0] == 200 * MIB


def test_a_pool_that_would_be_destroyed_under_its_tensors_stops_the_simulation() -> None:
    """One request mapped 60 MiB (+1); unmapping the free middle of it (-1) makes 0 with a live block left."""
    a = make(alloc_conf="expandable_segments:True")
    large, live = inside(a, "p", 45, 3)
    a.free(large)
    with pytest.raises(UnsafeState, match="pool 'p' would be destroyed under its blocks"):
        a.mempool_delete("p")
    assert a.address(live)


def test_a_count_below_0_stops_the_simulation() -> None:
    a = make(alloc_conf="expandable_segments:True")
    one, wall, two, end = inside(a, "p", 50, 9, 30, 1.5)
    assert a.usage().reserved == 100 * MIB
    a.free(one)
    a.free(two)
    with pytest.raises(UnsafeState):
        a.mempool_delete("p")
    assert a.address(wall) < a.address(end)


def test_older_releases_have_no_options() -> None:
    a = make(release="2.12.0")
    with pytest.raises(RuntimeError, match="no use_on_oom and no_split"):
        a.mempool_begin("p", use_on_oom=True)


@pytest.mark.parametrize("settings", [{"release": "2.12.0"}, {"flavour": "torch_cuda"}])
def test_where_a_scope_counts_as_a_capture_nothing_is_reaped_or_released_inside(settings: dict[str, str]) -> None:
    a = make(40, **settings)
    a.free(mib(a, 12))
    waiting = mib(a, 3)
    a.record_stream(waiting, 1)
    a.free(waiting)
    a.complete_events()
    late, both = inside(a, "p", 1.5, 1.5)
    assert a.stats()["active.all.current"] == 3, "the completed event was not looked at"
    a.record_stream(both, 1)
    a.mempool_begin("p")
    a.record_stream(late, 1)
    a.record_stream(both, 2)
    a.free(late)
    a.free(both)
    with pytest.raises(OutOfMemory):
        mib(a, 30)
    assert a.stats()["num_alloc_retries"] == 0
    a.mempool_end("p")
    a.check()
    assert a.stats()["active.all.current"] == 3
    mib(a, 3)
    assert a.stats()["active.all.current"] == 2, "what was recorded in the scope is over; stream 1 still uses the other"
    a.complete_events(1)
    mib(a, 0.1)
    assert a.stats()["active.all.current"] == 2
