"""Deferred frees: who waits for what, when it comes back, and in which order."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.oom import Cause, OutOfMemory, classify
from hbmtwin.allocators.records import Tag

MIB = 1 << 20


def npu(capacity_mib: int = 100, **settings: object) -> CachingAllocator:
    return CachingAllocator(HbmDriver(capacity_mib * MIB), CachingConfig(**settings))


def states(a: CachingAllocator) -> list[str]:
    a.check()
    return [block.state for segment in a.walk() for block in segment.blocks]


def malloc(a: CachingAllocator, size: int = 512, stream: int = 0) -> int:
    return a.malloc(size, stream=stream, tag=Tag.KV)


def freed(a: CachingAllocator) -> list[int]:
    """Offsets of blocks whose free has completed, from now on."""
    seen: list[int] = []

    def observe(action: str, address: int, size: int, stream: int, pool: int) -> None:
        if action == "free_completed":
            seen.append(address - 2 * MIB)

    a.trace_observer = observe
    return seen


# -- record_stream -----------------------------------------------------------------------------------------------------


def test_on_an_npu_the_own_stream_defers_the_free_too() -> None:
    a = npu()
    handle = malloc(a)
    a.record_stream(handle, 0)
    a.free(handle)
    assert states(a) == ["active_pending_free", "inactive"]
    a.synchronize()
    assert states(a) == ["active_pending_free", "inactive"], "completed is not freed"
    stats = a.stats()
    assert (stats["allocation.all.current"], stats["active.all.current"]) == (0, 1)
    assert (stats["allocated_bytes.all.current"], stats["active_bytes.all.current"]) == (0, 1024)
    assert (stats["requested_bytes.all.current"], stats["requested_bytes.all.freed"]) == (512, 0)
    assert a.usage()[:4] == (2 * MIB, 0, 0, 1024)
    malloc(a, stream=3)
    assert states(a) == ["inactive", "active_allocated", "inactive"], "any malloc reaps, on any stream"
    assert a.stats()["requested_bytes.all.freed"] == 512
    assert a.stats()["active.all.peak"] == 1, "reaped before it was counted"


def test_on_cuda_the_own_stream_does_not_count() -> None:
    a = npu(flavour="torch_cuda")
    handle = malloc(a)
    a.record_stream(handle, 0)
    a.free(handle)
    assert states(a) == ["inactive"]
    other = malloc(a)
    a.record_stream(other, 1)
    a.free(other)
    assert states(a) == ["active_pending_free", "inactive"]


def test_a_block_waits_for_one_event_per_stream() -> None:
    a = npu()
    handle = malloc(a)
    for stream in (1, 2, 1):
        a.record_stream(handle, stream)
    a.free(handle)
    a.complete_events(1)
    malloc(a)
    assert states(a)[0] == "active_pending_free", "stream 2 still uses it"
    a.complete_events(2, 1)
    malloc(a)
    assert states(a)[0] == "active_allocated", "both events are done, and the block is taken again"


def test_events_complete_in_order_and_never_before_they_are_recorded() -> None:
    a = npu()
    one, two = malloc(a), malloc(a)
    a.complete_events(1, 5)
    for handle in (one, two):
        a.record_stream(handle, 1)
        a.free(handle)
    seen = freed(a)
    malloc(a)
    assert seen == []
    a.complete_events(1, 1)
    malloc(a)
    assert seen == [0]
    a.complete_events()
    malloc(a)
    assert seen == [0, 1024]


def test_a_dead_handle_cannot_be_recorded() -> None:
    a = npu()
    handle = malloc(a)
    a.free(handle)
    with pytest.raises(KeyError):
        a.record_stream(handle, 1)
    with pytest.raises(KeyError):
        a.erase_stream(handle, 1, 0)


# -- reaping -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("streams", "order"),
    [
        ([0, 1, 2], [2, 0, 1]),
        ([0, 1, 2, 3], [3, 2, 0, 1]),
        ([0, 1, 2, 3, 4], [3, 2, 0, 4, 1]),
        ([0, 1, 2, 3, 4, 5, 6, 7], [6, 3, 5, 2, 0, 7, 4, 1]),
    ],
)
def test_streams_are_reaped_in_the_order_of_the_hash_table(streams: list[int], order: list[int]) -> None:
    a = npu()
    for stream in streams:
        handle = malloc(a)
        assert a.address(handle) == 2 * MIB + 1024 * stream
        a.record_stream(handle, stream)
        a.free(handle)
    seen = freed(a)
    a.complete_events()
    malloc(a)
    assert [offset // 1024 for offset in seen] == order


def test_which_block_survives_a_merge_depends_on_that_order() -> None:
    """All three merge; the last one reaped absorbs the others, and its stale size is what a snapshot shows."""
    a = npu()
    keep = malloc(a, 50)
    for stream, size in ((0, 100), (1, 200), (2, 300)):
        handle = malloc(a, size)
        a.record_stream(handle, stream)
        a.free(handle)
    a.complete_events()
    malloc(a, 10, stream=9)
    (segment,) = [s for s in a.memory_snapshot() if s["stream"] == 0]
    assert [(x["size"], x["requested_size"], x["state"]) for x in segment["blocks"]] == [
        (512, 50, "active_allocated"),
        (2 * MIB - 512, 200, "inactive"),
    ]
    assert a.address(keep) == segment["address"]


def test_lazy_reclaim_leaves_events_alone_up_to_512_or_a_miss() -> None:
    a = npu(alloc_conf="multi_stream_lazy_reclaim:True")
    handles = [malloc(a, 1) for _ in range(514)]
    for handle in handles[:512]:
        a.record_stream(handle, 1)
        a.free(handle)
    a.complete_events()
    seen = freed(a)
    malloc(a, 1)
    assert seen == [], "512 events are not more than 512"
    a.record_stream(handles[512], 1)
    a.free(handles[512])
    malloc(a, 1)
    assert len(seen) == 512, "the 513th made it look; its own event has not completed"
    a.complete_events()
    malloc(a, MIB // 2)
    assert len(seen) == 512
    malloc(a, 2 * MIB)
    assert len(seen) == 513, "a miss looks, too"


# -- erase_stream ------------------------------------------------------------------------------------------------------


def test_erase_stream_works_only_from_the_blocks_own_stream() -> None:
    a = npu()
    handle = malloc(a)
    a.record_stream(handle, 1)
    a.erase_stream(handle, 1, 2)
    a.free(handle)
    assert states(a)[0] == "active_pending_free"
    other = malloc(a)
    a.record_stream(other, 1)
    a.erase_stream(other, 1, 0)
    a.free(other)
    assert states(a) == ["active_pending_free", "inactive"]


def test_erase_stream_leaves_an_empty_queue_that_can_change_the_order() -> None:
    def order(erase: bool) -> list[int]:
        a = npu()
        handles = [malloc(a) for _ in range(3)]
        if erase:
            for stream in (0, 1, 2):
                a.erase_stream(handles[0], stream, 0)
        for stream in (0, 2):
            a.record_stream(handles[stream], stream)
            a.free(handles[stream])
        seen = freed(a)
        a.complete_events()
        malloc(a)
        return [offset // 1024 for offset in seen]

    assert order(erase=False) == [0, 2]
    assert order(erase=True) == [2, 0], "the table had grown for three"


def test_cuda_has_no_erase_stream() -> None:
    a = npu(flavour="torch_cuda")
    with pytest.raises(RuntimeError, match="erase_stream is torch_npu's"):
        a.erase_stream(malloc(a), 1, 0)


# -- what waits for events ---------------------------------------------------------------------------------------------


def waiting(a: CachingAllocator, size: int) -> None:
    handle = malloc(a, size)
    a.record_stream(handle, 1)
    a.free(handle)


def test_empty_cache_waits_for_every_event() -> None:
    a = npu()
    waiting(a, 3 * MIB)
    a.empty_cache()
    assert list(a.walk()) == []
    assert a.stats()["num_sync_all_streams"] == 1


def test_a_block_that_becomes_free_in_the_last_release_is_not_searched_again() -> None:
    """pytorch#189504: the same request fails and then succeeds. research_after_sync is the proposed fix."""
    a = npu(20)
    keep = malloc(a, 2 * MIB)
    waiting(a, 6 * MIB)
    malloc(a, 11 * MIB)
    with pytest.raises(OutOfMemory) as failed:
        malloc(a, 5 * MIB)
    facts = failed.value.facts
    assert (facts.rule, classify(facts)) == ("no_second_search", Cause.ALLOCATOR_RULE)
    malloc(a, 5 * MIB)
    a.free(keep)
    fixed = npu(20, research_after_sync=True)
    malloc(fixed, 2 * MIB)
    waiting(fixed, 6 * MIB)
    malloc(fixed, 11 * MIB)
    malloc(fixed, 5 * MIB)
    assert fixed.stats()["num_alloc_retries"] == 0
    fixed.check()


def test_pending_bytes_are_told_apart_in_a_failure() -> None:
    a = npu(20, alloc_conf="throw_on_npumalloc_oom:True")
    waiting(a, 6 * MIB)
    with pytest.raises(OutOfMemory) as failed:
        malloc(a, 15 * MIB)
    facts = failed.value.facts
    assert (facts.pending_bytes, facts.allocated_bytes, facts.rule) == (6 * MIB + 512, 0, "")
    assert facts.cached_free_bytes == 14 * MIB - 512


def test_stream_33_is_stream_1_again() -> None:
    a = npu()
    handle = malloc(a, stream=33)
    a.free(handle)
    assert a.address(malloc(a, stream=1)) == 2 * MIB
    assert [segment.stream for segment in a.walk()] == [1]
