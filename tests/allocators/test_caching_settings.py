"""Settings in mid-run, resets, releases, messages, caching off, and where the simulation must stop."""

import pytest

from hbmtwin.allocators import HbmDriver
from hbmtwin.allocators.caching import CachingAllocator, CachingConfig, ConfError, UnsafeState
from hbmtwin.allocators.oom import OutOfMemory
from hbmtwin.allocators.records import Tag, Work
from hbmtwin.allocators.size_text import format_size

MIB = 1 << 20
GIB = 1 << 30


def make(capacity_mib: int = 200, conf: str = "", **settings: object) -> CachingAllocator:
    return CachingAllocator(HbmDriver(capacity_mib * MIB), CachingConfig(alloc_conf=conf, **settings))


def mib(a: CachingAllocator, size: float, stream: int = 0) -> int:
    return a.malloc(round(size * MIB), stream=stream, tag=Tag.KV)


# -- settings in mid-run -----------------------------------------------------------------------------------------------


def test_any_text_ends_roundup_and_collection() -> None:
    a = make(conf="roundup_power2_divisions:4,garbage_collection_threshold:0.5")
    a.malloc(1_200_000, tag=Tag.KV)
    a.set_allocator_settings("release_lock_on_npumalloc:True")
    a.malloc(1_200_000, tag=Tag.KV)
    assert [b.size for s in a.walk() for b in s.blocks][:2] == [1_310_720, 1_200_128]
    assert a.conf.garbage_collection_threshold == 0


def test_the_statistic_keeps_its_first_value_and_oversize_follows_the_setting() -> None:
    a = make(conf="max_split_size_mb:20")
    handle = mib(a, 30)
    a.set_allocator_settings("max_split_size_mb:40")
    a.free(handle)
    stats = a.stats()
    assert stats["max_split_size"] == 20 * MIB
    assert (stats["oversize_allocations.current"], stats["oversize_allocations.peak"]) == (1, 1), "not counted back"
    a.set_allocator_settings("max_split_size_mb:20")
    b = make()
    handle = mib(b, 30)
    b.set_allocator_settings("max_split_size_mb:20")
    b.free(handle)
    assert b.stats()["oversize_allocations.current"] == -1
    assert b.stats()["oversize_allocations.freed"] == 1


def test_a_refused_text_is_not_rolled_back() -> None:
    a = make()
    with pytest.raises(ConfError):
        a.set_allocator_settings("expandable_segments:True,max_split_size_mb:40")
    mib(a, 3)
    assert [s.is_expandable for s in a.walk()] == [True]


def test_the_fraction_in_a_text_does_not_move_the_cap() -> None:
    a = make(100)
    a.set_allocator_settings("per_process_memory_fraction:0.3")
    mib(a, 60)


def test_preemptive_refusal_comes_before_the_driver_is_asked() -> None:
    a = make(100)
    a.set_allocator_settings("throw_on_npumalloc_oom:True,per_process_memory_fraction:0.3")
    a.free(mib(a, 11))
    seen: list[str] = []
    a.trace_observer = lambda action, *_: seen.append(action)
    a.take_work()
    with pytest.raises(OutOfMemory) as failed:
        mib(a, 19)
    assert failed.value.torch_message == (
        "NPU out of memory. Allocation was preemptively rejected because it would exceed per_process_memory_fraction "
        "limit. Requested size: 19.00 MiB"
    )
    assert failed.value.facts.rule == "preempted"
    stats = a.stats()
    assert (stats["num_oom_rejections"], stats["num_ooms"], stats["num_alloc_retries"]) == (1, 0, 0)
    assert seen == []
    assert a.take_work() == Work()
    mib(a, 11)


# -- where the simulation stops ----------------------------------------------------------------------------------------


def test_lowering_max_split_size_stops_at_the_first_request_that_would_free_a_piece() -> None:
    a = make(100)
    mib(a, 3)
    a.free(mib(a, 60))
    mib(a, 18)
    a.set_allocator_settings("max_split_size_mb:20")
    mib(a, 15, stream=1)
    with pytest.raises(UnsafeState, match="Do not lower max_split_size_mb in mid-run"):
        mib(a, 70)


def test_a_split_size_after_expandable_segments_stops_too() -> None:
    a = make(100, "expandable_segments:True")
    mib(a, 3)
    a.free(mib(a, 50))
    a.set_allocator_settings("expandable_segments:False,max_split_size_mb:20")
    with pytest.raises(UnsafeState, match="a piece of an expandable segment"):
        mib(a, 60)


def test_cuda_passes_expandable_blocks_by() -> None:
    a = make(100, "expandable_segments:True,max_split_size_mb:20", flavour="torch_cuda")
    mib(a, 3)
    a.free(mib(a, 50))
    with pytest.raises(OutOfMemory):
        mib(a, 98)
    a.check()


# -- resets ------------------------------------------------------------------------------------------------------------


def test_resets_and_peaks() -> None:
    a = make(conf="max_split_size_mb:20")
    keep = mib(a, 30)
    a.free(mib(a, 3))
    with pytest.raises(OutOfMemory):
        mib(a, 190)
    a.reset_accumulated_memory_stats()
    stats = a.stats()
    four = [stats[f"allocated_bytes.all.{n}"] for n in ("current", "peak", "allocated", "freed")]
    assert four == [32 * MIB, 32 * MIB + 3 * MIB + 512, 0, 0]
    assert [stats[f"num_{n}"] for n in ("ooms", "alloc_retries", "device_alloc", "sync_all_streams")] == [0] * 4
    assert stats["max_split_size"] == 20 * MIB
    a.free(keep)
    a.reset_peak_memory_stats()
    stats = a.stats()
    four = [stats[f"allocated_bytes.all.{n}"] for n in ("current", "peak", "allocated", "freed")]
    assert four == [0, 0, 0, 32 * MIB]
    assert stats["oversize_segments.peak"] == stats["oversize_segments.current"] == 1
    mib(a, 5)
    assert a.stats()["allocation.all.allocated"] == 1


def test_resets_with_waiting_blocks() -> None:
    a = make()
    handle = mib(a, 3)
    a.record_stream(handle, 1)
    a.free(handle)
    a.reset_accumulated_memory_stats()
    a.complete_events()
    mib(a, 4)
    stats = a.stats()
    assert [stats[f"active.all.{n}"] for n in ("current", "peak", "allocated", "freed")] == [1, 1, 1, 1]
    assert [stats[f"allocation.all.{n}"] for n in ("current", "peak", "allocated", "freed")] == [1, 1, 1, 0]


# -- releases ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("soc", "cann", "release", "rounded"),
    [
        ("Ascend910B2", "9.1.0", "2.13.0", 1024),
        ("Ascend950", "9.1.0", "2.13.0", 512),
        ("Ascend950", "9.0.0", "2.13.0", 1024),
        ("Ascend950", "9.1.0", "2.9.0", 1024),
    ],
)
def test_the_pad_is_by_chip_cann_and_release(soc: str, cann: str, release: str, rounded: int) -> None:
    a = make(soc=soc, cann=cann, release=release)
    a.malloc(512, tag=Tag.KV)
    assert a.usage().allocated == rounded


@pytest.mark.parametrize(
    ("flavour", "release", "keys"),
    [
        ("torch_npu", "2.13.0", 123),
        ("torch_npu", "2.12.0", 119),
        ("torch_npu", "2.5.1", 119),
        ("torch_cuda", None, 122),
    ],
)
def test_statistics_have_the_keys_of_their_release(flavour: str, release: str | None, keys: int) -> None:
    assert len(make(flavour=flavour, release=release).stats()) == keys


def test_old_releases_lack_settings_and_verbs() -> None:
    with pytest.raises(ConfError, match="large_segment_size_mb"):
        make(conf="large_segment_size_mb:32", release="2.9.0")
    with pytest.raises(ConfError, match="roundup"):
        make(conf="roundup_power2_divisions:4", release="2.7.1")
    with pytest.raises(ConfError, match="too small"):
        make(conf="max_split_size_mb:20", release="2.9.0")
    make(conf="max_split_size_mb:21", release="2.9.0")
    with pytest.raises(RuntimeError, match="does not exist in this release"):
        make(release="2.5.1", conf="expandable_segments:True").empty_virt_addr_cache()


def test_a_release_that_is_not_modelled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"release '2\.99' of torch_npu is not modelled; there are 2\.5\.1"):
        CachingConfig(release="2.99")
    with pytest.raises(ValueError, match="no CANN version"):
        CachingConfig(cann="new")


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1024, "1024 bytes"),
        (1025, "1.00 KiB"),
        (MIB, "1024.00 KiB"),
        (MIB + 5243, "1.01 MiB"),
        (GIB, "1024.00 MiB"),
        (GIB + 1, "1.00 GiB"),
        ((1 << 60) - 1, "1073741824.00 GiB"),
    ],
)
def test_sizes_print_as_torch_prints_them(size: int, text: str) -> None:
    assert format_size(size) == text


def message(a: CachingAllocator, size: int) -> str:
    with pytest.raises(OutOfMemory) as failed:
        a.malloc(size, tag=Tag.KV)
    return failed.value.torch_message


def test_the_npu_message_names_the_segment_not_the_request() -> None:
    a = make(30, limit_bytes=28 * MIB)
    a.malloc(MIB + 1, tag=Tag.KV)
    assert message(a, 20 * MIB) == (
        "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 30.00 MiB total capacity; 1.00 MiB already allocated; "
        "1.00 MiB current active; 10.00 MiB free; 28.00 MiB allowed; 20.00 MiB reserved in total by PyTorch).If "
        "reserved memory is >> allocated memory try setting max_split_size_mb to avoid fragmentation."
    )
    old = make(30, release="2.9.0")
    assert "reserved in total by PyTorch) If reserved" in message(old, 40 * MIB)


def test_the_cuda_message() -> None:
    a = make(40, flavour="torch_cuda")
    a.mempool_begin("p")
    a.free(mib(a, 4))
    a.mempool_end("p")
    a.malloc(512, tag=Tag.KV)
    assert message(a, 20 * MIB) == (
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 40.00 MiB of which 18.00 MiB "
        "is free. Of the allocated memory 20.00 MiB is allocated by PyTorch, with 20.00 MiB allocated in private "
        "pools (e.g., CUDA Graphs), and 2.00 MiB is reserved by PyTorch but unallocated. If reserved but unallocated "
        "memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See "
        "documentation for Memory Management  (https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-"
        "usage-with-pytorch-cuda-alloc-conf)"
    )


def test_an_exabyte() -> None:
    assert message(make(), 1 << 60) == "NPU out of memory. Tried to allocate more than 1EB memory."


# -- caching off -------------------------------------------------------------------------------------------------------


def test_without_caching_each_tensor_is_a_driver_call_and_no_statistic_moves() -> None:
    a = make(no_caching=True)
    one, two = mib(a, 3), a.malloc(1000, tag=Tag.KV, stream=2)
    assert (a.address(two) - a.address(one), a.driver.mem_info()[0]) == (
        3 * MIB + 512,
        200 * MIB - 3 * MIB - 512 - 1536,
    )
    assert a.usage()[:4] == (3 * MIB + 2048, 3 * MIB + 2048, 3 * MIB + 1000, 0)
    a.record_stream(one, 1)
    a.free(one)
    assert a.driver.mem_info()[0] == 200 * MIB - 1536, "at once, whoever used it"
    assert a.take_work() == Work(driver_calls=3, syncs=1)
    assert all(value == 0 for key, value in a.stats().items() if key != "max_split_size")
    assert len(list(a.walk())) == 1
    assert a.memory_snapshot() == []
    with pytest.raises(OutOfMemory):
        mib(a, 201)
    a.check()


# -- the observer ------------------------------------------------------------------------------------------------------


def test_the_observer_sees_every_verb_in_the_words_of_the_trace() -> None:
    a = make(conf="expandable_segments:True")
    seen: list[tuple[object, ...]] = []
    a.observer = lambda *call: seen.append(call[:5])
    handle = a.malloc(100, tag=Tag.KV)
    a.record_stream(handle, 2)
    a.erase_stream(handle, 2, 0)
    a.complete_events(2, 3)
    a.complete_events()
    a.synchronize()
    a.empty_virt_addr_cache()
    a.set_allocator_settings("expandable_segments:False")
    a.set_per_process_memory_fraction(0.5)
    a.reset_peak_memory_stats()
    a.reset_accumulated_memory_stats()
    a.mempool_begin("p", use_on_oom=True, no_split=True)
    a.mempool_end("p")
    a.mempool_delete("p")
    a.workspace(7, stream=1)
    assert seen == [
        ("malloc", 0, 100, 0, ""),
        ("record_stream", 0, 0, 2, ""),
        ("erase_stream", 0, 0, 2, "0"),
        ("event_complete", -1, 0, 2, "3"),
        ("event_complete", -1, 0, -1, ""),
        ("synchronize", -1, 0, 0, ""),
        ("empty_virt_addr_cache", -1, 0, 0, ""),
        ("set_conf", -1, 0, 0, "expandable_segments:False"),
        ("set_fraction", -1, 0, 0, "0.5"),
        ("reset_peak", -1, 0, 0, ""),
        ("reset_accumulated", -1, 0, 0, ""),
        ("mempool_begin", 1, 0, 0, "use_on_oom|no_split"),
        ("mempool_end", 1, 0, 0, ""),
        ("mempool_delete", 1, 0, 0, ""),
        ("workspace", -1, 7, 1, ""),
    ]
