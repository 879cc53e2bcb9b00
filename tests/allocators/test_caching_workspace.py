"""torch_npu's workspace allocator, beside the caching allocator's books."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag, Work

MIB = 1 << 20


def make(capacity_mib: int = 100, **settings: object) -> CachingAllocator:
    return CachingAllocator(HbmDriver(capacity_mib * MIB), CachingConfig(**settings))


def used(a: CachingAllocator) -> float:
    free, total = a.driver.mem_info()
    return (total - free) / MIB


def test_a_stream_has_one_block_that_grows_and_never_shrinks() -> None:
    a = make()
    first = a.workspace(100)
    assert (used(a), a.workspace_bytes) == (2, 2 * MIB)
    assert a.workspace(2 * MIB - 32) == first, "32 bytes are added, then whole 2 MiB"
    a.workspace(2 * MIB - 31)
    assert used(a) == 4
    a.workspace(5)
    assert used(a) == 4
    a.workspace(5, stream=1)
    assert used(a) == 6
    assert all(value == 0 for key, value in a.stats().items() if key != "max_split_size")
    assert list(a.walk()) == []


def test_growing_frees_the_old_block_first_after_the_device_has_stopped() -> None:
    a = make(10)
    a.workspace(5 * MIB)
    assert a.take_work() == Work(driver_calls=1)
    a.workspace(9 * MIB)
    assert a.take_work() == Work(driver_calls=2, syncs=1)
    assert used(a) == 10


def test_workspaces_take_addresses_of_segments() -> None:
    a = make()
    one = a.workspace(100)
    handle = a.malloc(100, tag=Tag.KV)
    assert (one, a.address(handle)) == (2 * MIB, 4 * MIB)


def test_a_failure_is_remembered_until_something_empties_the_allocator() -> None:
    a = make(10)
    a.workspace(100)
    with pytest.raises(OutOfMemory) as failed:
        a.workspace(30 * MIB)
    assert failed.value.torch_message == (
        "NPU out of memory. NPUWorkspaceAllocator tried to allocate 30.00 MiB(NPU 0; 10.00 MiB total capacity; "
        "10.00 MiB free). If you want to reduce memory usage, take a try to set the environment variable "
        "TASK_QUEUE_ENABLE=1."
    )
    assert used(a) == 0, "the old block is gone"
    assert a.memory_snapshot()[0]["address"] == 0
    assert a.memory_snapshot()[0]["total_size"] == 32 * MIB
    a.take_work()
    with pytest.raises(OutOfMemory):
        a.workspace(1)
    assert a.take_work() == Work(), "the driver is not asked"
    a.workspace(1, stream=1)
    a.empty_cache()
    a.workspace(1)
    assert used(a) == 2
    assert a.stats()["num_ooms"] == 0


def test_a_larger_request_asks_the_driver_again() -> None:
    a = make(40)
    keep = a.malloc(20 * MIB, tag=Tag.KV)
    with pytest.raises(OutOfMemory):
        a.workspace(30 * MIB)
    a.free(keep)
    with pytest.raises(OutOfMemory):
        a.workspace(20 * MIB)
    with pytest.raises(OutOfMemory):
        a.workspace(33 * MIB)
    a.empty_cache()
    a.workspace(33 * MIB)


def test_a_refused_workspace_says_what_the_driver_has_and_that_the_cache_does_not_serve_it() -> None:
    """16 MiB are cached, 12 at the driver: 17 MiB and the pad are 18 in whole pages, and nothing of the cache goes."""
    a = make(28, limit_bytes=22 * MIB)
    a.free(a.malloc(15 * MIB, tag=Tag.KV))
    with pytest.raises(OutOfMemory) as refused:
        a.workspace(17 * MIB)
    facts = refused.value.facts
    assert (facts.need_bytes, facts.driver_free_bytes, facts.largest_free_bytes) == (18 * MIB, 12 * MIB, 16 * MIB)
    assert (facts.rule, facts.limit_bytes) == ("", 28 * MIB)
    with pytest.raises(OutOfMemory) as refused:
        a.workspace(13 * MIB)
    assert refused.value.facts.rule == "workspace"


def test_the_last_try_of_a_request_empties_it() -> None:
    a = make(30)
    a.workspace(15 * MIB)
    a.malloc(25 * MIB, tag=Tag.KV)
    assert (a.workspace_bytes, a.usage().reserved) == (0, 26 * MIB)


def test_a_pools_death_leaves_it_alone() -> None:
    a = make()
    a.workspace(100)
    a.mempool_begin("p")
    a.mempool_end("p")
    a.mempool_delete("p")
    assert a.workspace_bytes == 2 * MIB


def test_cuda_has_none() -> None:
    with pytest.raises(RuntimeError, match="the workspace allocator is torch_npu's"):
        make(flavour="torch_cuda").workspace(5)
