"""The setting text: honoured as torch reads it, or refused by name."""

import pytest

from hbmtwin.allocators.caching import AllocConf, CachingConfig, UnsupportedSetting, parse_alloc_conf

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1


@pytest.mark.parametrize(
    ("text", "conf"),
    [
        ("", AllocConf(UNLIMITED, 20 * MIB, 20 * MIB, None)),
        ("max_split_size_mb:20", AllocConf(max_split_size=20 * MIB)),
        (" max_split\t_size_mb : 128 ,", AllocConf(max_split_size=128 * MIB)),
        ("max_split_size_mb:64,max_split_size_mb:32", AllocConf(max_split_size=32 * MIB)),
        ("max_split_size_mb:30.9", AllocConf(max_split_size=30 * MIB)),
        ("max_split_size_mb:-1", AllocConf(max_split_size=(1 << 64) - MIB)),
        ("large_segment_size_mb:64", AllocConf(UNLIMITED, 64 * MIB, 64 * MIB)),
        ("max_split_size_mb:64,large_segment_size_mb:64", AllocConf(64 * MIB, 64 * MIB, 64 * MIB)),
        ("large_segment_size_mb:11,max_split_size_mb:11", AllocConf(11 * MIB, 11 * MIB, 11 * MIB)),
        ("max_split_size_mb:40,max_non_split_rounding_mb:25", AllocConf(40 * MIB, 25 * MIB)),
        ("expandable_segments:False", AllocConf()),
        ("per_process_memory_fraction:1,pinned_use_background_threads:False", AllocConf()),
    ],
)
def test_what_is_honoured(text: str, conf: AllocConf) -> None:
    assert parse_alloc_conf(text, "torch_npu") == conf


@pytest.mark.parametrize(
    ("value", "slots"),
    [
        ("4", (4,) * 16),
        ("[256:1,512:2,>:8]", (1,) * 9 + (2,) + (8,) * 6),
        ("[>:4]", (0,) + (4,) * 15),
        ("[4:2,16:8]", (2, 2, 2, 0, 8) + (0,) * 11),
        ("[65536:2]", (2,) * 16),
        ("[1:0,2:4]", (0, 4) + (0,) * 14),
    ],
)
def test_roundup_divisions_have_a_slot_per_power_of_two(value: str, slots: tuple[int, ...]) -> None:
    assert parse_alloc_conf(f"roundup_power2_divisions:{value}", "torch_npu").roundup_power2_divisions == slots


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:19", "max_split_size_mb too small, must be >= 20"),
        ("max_split_size_mb:30,large_segment_size_mb:40", "must be >= 40"),
        ("max_non_split_rounding_mb:19", "max_non_split_rounding_mb too small"),
        ("large_segment_size_mb:10", "large_segment_size_mb must be > 10, not 10"),
        ("max_split_size_mb:many", "max_split_size_mb needs a whole number, not 'many'"),
        ("roundup_power2_divisions:3", "number of divisions has to be a power of 2, not 3"),
        ("roundup_power2_divisions:0", "has to be a power of 2, not 0"),
        ("roundup_power2_divisions:[3:4]", "boundary has to be a power of 2, not 3"),
        ("roundup_power2_divisions:[4:3]", "number of divisions has to be a power of 2, not 3"),
        ("max_split_size:20", "no setting of torch_npu's allocator; did you mean 'max_split_size_mb'"),
        ("colour:blue", "'colour' is no setting of torch_npu's allocator$"),
        ("release_lock_on_cudamalloc:True", "is a setting of torch_cuda, not of torch_npu"),
        (",max_split_size_mb:20", "cannot read ',max_split_size_mb:20'"),
        ("max_split_size_mb", "cannot read"),
        ("roundup_power2_divisions:[1:2", "cannot read"),
    ],
)
def test_what_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        CachingConfig(alloc_conf=text)
    assert not isinstance(refused.value, UnsupportedSetting)


@pytest.mark.parametrize(
    "text",
    [
        "expandable_segments:True",
        "expandable_segments:false",
        "garbage_collection_threshold:0.8",
        "per_process_memory_fraction:0.5",
        "base_addr_aligned_kb:0",
        "page_size:1g",
        "segment_size_mb:64",
        "multi_stream_lazy_reclaim:True",
        "throw_on_npumalloc_oom:True",
        "pinned_mem_register:True",
        "max_split_size_mb:32,expandable_segments:True",
    ],
)
def test_settings_of_a_later_release_are_refused_by_name(text: str) -> None:
    key = text.rsplit(",")[-1].split(":")[0]
    with pytest.raises(UnsupportedSetting, match=f"{key}:.* comes with a later release"):
        CachingConfig(alloc_conf=text)


def test_other_settings_are_checked_too() -> None:
    with pytest.raises(ValueError, match="flavour must be one of torch_npu, torch_cuda, not 'tensorflow'"):
        CachingConfig(flavour="tensorflow")
    with pytest.raises(ValueError, match="limit_bytes must not be negative"):
        CachingConfig(limit_bytes=-1)
