"""The setting text: read as torch reads it, refused where torch refuses, and what a refusal leaves behind."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import pytest

from hbmtwin.allocators.caching import AllocatorConf, ConfRuntimeError, ConfValueError
from hbmtwin.allocators.caching.conf_text import double, size_t
from hbmtwin.validation.emulated import EmulatedNpu, EmulatorUnavailable, NpuSettings
from hbmtwin.workloads.formats.memory_trace import MemoryOp

MIB = 1 << 20
UNLIMITED = (1 << 64) - 1

DEFAULTS: dict[str, Any] = {
    "max_split_size": UNLIMITED,
    "max_non_split_rounding": 20 * MIB,
    "garbage_collection_threshold": 0.0,
    "roundup_power2_divisions": None,
    "expandable_segments": False,
    "large_segment_size": 20 * MIB,
    "per_process_memory_fraction": 1.0,
    "base_addr_aligned_bytes": 16384,
    "page_size_1g": False,
    "segment_size": 0,
    "multi_stream_lazy_reclaim": False,
    "throw_on_npumalloc_oom": False,
    "throw_on_cudamalloc_oom": False,
}

REFUSED: dict[str, tuple[type[ValueError] | type[RuntimeError], str]] = {
    # what PyTorch itself reads
    "max_split_size_mb:19": (ValueError, "max_split_size_mb too small, must be >= 20"),
    "max_split_size_mb:30,large_segment_size_mb:40": (ValueError, "max_split_size_mb too small, must be >= 40"),
    "max_non_split_rounding_mb:19": (ValueError, "max_non_split_rounding_mb too small, must be >= 20"),
    "large_segment_size_mb:10": (ValueError, "large_segment_size_mb must be > 10 MB"),
    "garbage_collection_threshold:0": (ValueError, r"set it in \(0.0, 1.0\)"),
    "garbage_collection_threshold:1.0": (ValueError, r"set it in \(0.0, 1.0\)"),
    "garbage_collection_threshold:-0.5": (ValueError, r"set it in \(0.0, 1.0\)"),
    "garbage_collection_threshold:nan": (ValueError, r"set it in \(0.0, 1.0\)"),
    "roundup_power2_divisions:3": (ValueError, "has to be power of 2"),
    "roundup_power2_divisions:0": (ValueError, "has to be power of 2"),
    "roundup_power2_divisions:[1:3]": (ValueError, "has to be power of 2"),
    "roundup_power2_divisions:[>:3]": (ValueError, "has to be power of 2"),
    "roundup_power2_divisions:[3:4]": (ValueError, "have to be power of 2"),
    "roundup_power2_divisions:[1:2 2:4]": (ValueError, "has to be power of 2"),
    "expandable_segments:true": (ValueError, "Expected 'True' or 'False'"),
    "expandable_segments:1": (ValueError, "Expected 'True' or 'False'"),
    "pinned_use_background_threads:yes": (ValueError, "Expected 'True' or 'False'"),
    # keys
    "colour:blue": (ValueError, "Unrecognized key 'colour' in NPU allocator config"),
    "max_split_size:20": (ValueError, "Unrecognized key 'max_split_size' in NPU allocator config"),
    "release_lock_on_cudamalloc:True": (ValueError, "Unrecognized key 'release_lock_on_cudamalloc'"),
    "backend:native": (ValueError, "Unrecognized key 'backend'"),
    ",max_split_size_mb:20": (ValueError, "Unrecognized key ','"),
    # what torch_npu reads
    "base_addr_aligned_kb:17": (RuntimeError, r"base_addr_aligned_kb error, must be \[0~16\]"),
    "base_addr_aligned_kb:08": (RuntimeError, "base_addr_aligned_kb"),
    "base_addr_aligned_kb:-1": (RuntimeError, "base_addr_aligned_kb"),
    "base_addr_aligned_kb:+8": (RuntimeError, "base_addr_aligned_kb"),
    "base_addr_aligned_kb:8.0": (RuntimeError, "base_addr_aligned_kb"),
    "page_size:2m": (RuntimeError, "Unsupported page_size value"),
    "segment_size_mb:19": (RuntimeError, r"segment_size_mb error, must be \[20, 512\]"),
    "segment_size_mb:513": (RuntimeError, r"segment_size_mb error, must be \[20, 512\]"),
    "segment_size_mb:20.5": (RuntimeError, "segment_size_mb"),
    "segment_size_mb:+20": (RuntimeError, "segment_size_mb"),
    "segment_size_mb:x": (RuntimeError, "segment_size_mb"),
    "multi_stream_lazy_reclaim:true": (RuntimeError, "Expected a single True/False argument"),
    "throw_on_npumalloc_oom:1": (RuntimeError, "Expected a single True/False argument"),
    "release_lock_on_npumalloc:x": (RuntimeError, "Expected a single True/False argument"),
    "pin_memory_expandable_segments:x": (RuntimeError, "Expected a single True/False argument"),
    "pinned_mem_register:x": (RuntimeError, "Expected a single True/False argument"),
    "per_process_memory_fraction:1.01": (RuntimeError, r"set it in \[0.0, 1.0\]"),
    "per_process_memory_fraction:-0.1": (RuntimeError, r"set it in \[0.0, 1.0\]"),
    "expandable_segments:True,max_split_size_mb:40": (RuntimeError, "cannot be enabled with `expandable_segments`"),
    "garbage_collection_threshold:0.5,expandable_segments:True": (RuntimeError, "cannot be enabled with"),
    # numbers that are none
    "max_split_size_mb:many": (RuntimeError, "stoull"),
    "large_segment_size_mb:x": (RuntimeError, "stoull"),
    "max_split_size_mb:99999999999999999999": (RuntimeError, "stoull"),
    "max_split_size_mb:[30]": (RuntimeError, "stoull"),
    "roundup_power2_divisions:[x:4]": (RuntimeError, "stoull"),
    "garbage_collection_threshold:x": (RuntimeError, "stod"),
    "garbage_collection_threshold:1e-400": (RuntimeError, "stod"),
    "per_process_memory_fraction:half": (RuntimeError, "stod"),
    # broken texts
    "max_split_size_mb": (RuntimeError, "INTERNAL ASSERT"),
    "max_split_size_mb:": (RuntimeError, "INTERNAL ASSERT"),
    "base_addr_aligned_kb": (RuntimeError, "INTERNAL ASSERT"),
    "roundup_power2_divisions:[1:2": (RuntimeError, "INTERNAL ASSERT"),
    "roundup_power2_divisions:[": (RuntimeError, "INTERNAL ASSERT"),
    "base_addr_aligned_kb:": (RuntimeError, "INTERNAL ASSERT"),
    "max_split_size_mb::30": (RuntimeError, "stoull"),
    "max_split_size_mb:30 expandable_segments:True": (ValueError, "Unrecognized key 'True'"),
    "max_split_size_mb:30:40": (ValueError, "Unrecognized key '40'"),
    "max_split_size_mb:30,,": (ValueError, "Unrecognized key ','"),
    "colour:[1:2": (ValueError, "Unrecognized key 'colour'"),
}
"""Every refusal from the environment: the kind that torch_npu 2.13.0 raises, and what is recognisable in its text."""

RUNTIME = (
    "base_addr_aligned_kb:0",
    "page_size:1g",
    "segment_size_mb:64",
    "multi_stream_lazy_reclaim:True",
    "garbage_collection_threshold:0.5",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:64",
    "pinned_use_background_threads:True",
    "pin_memory_expandable_segments:True",
    "pinned_mem_register:True",
    "pinned_reserve_segment_size_mb:1",
)
"""What ``_set_allocator_settings`` of torch_npu does not take."""


def settings(conf: AllocatorConf) -> dict[str, Any]:
    return {name: getattr(conf, name) for name in DEFAULTS}


def changed(conf: AllocatorConf) -> dict[str, Any]:
    return {name: value for name, value in settings(conf).items() if value != DEFAULTS[name]}


def parsed(*texts: str, **options: Any) -> AllocatorConf:
    conf = AllocatorConf(**options)
    for text in texts:
        conf.parse(text)
    return conf


@pytest.fixture(scope="module")
def npu() -> Iterator[EmulatedNpu]:
    try:
        with EmulatedNpu() as npu:
            yield npu
    except EmulatorUnavailable as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_refused_and_how(text: str) -> None:
    kind, said = REFUSED[text]
    with pytest.raises(kind, match=said):
        AllocatorConf().parse(text)


def test_torch_npu_refuses_the_same_in_the_same_way(npu: EmulatedNpu) -> None:
    for text, (kind, said) in REFUSED.items():
        error = npu.replay([], NpuSettings(alloc_conf=text)).setup_error
        assert error is not None, text
        assert error.kind == kind.__name__, text
        assert re.search(said, error.text), text


@pytest.mark.parametrize("at_runtime", RUNTIME)
def test_what_torch_npu_does_not_take_at_run_time(at_runtime: str) -> None:
    with pytest.raises(ConfValueError, match=f"unsupported setting: {at_runtime.split(':')[0]}"):
        AllocatorConf().parse(at_runtime, at="runtime")


def test_torch_npu_refuses_the_same_at_run_time(npu: EmulatedNpu) -> None:
    run = npu.replay(MemoryOp("set_conf", arg=text) for text in (*RUNTIME, *REFUSED))
    for i, text in enumerate(RUNTIME):
        assert run.errors[i].kind == "ValueError", text
        assert f"unsupported setting: {text.split(':')[0]}" in run.errors[i].text
    for i, text in enumerate(REFUSED, len(RUNTIME)):
        with pytest.raises((ConfValueError, ConfRuntimeError)) as refused:
            AllocatorConf().parse(text, at="runtime")
        kind = "ValueError" if isinstance(refused.value, ValueError) else "RuntimeError"
        assert (text, run.errors[i].kind) == (text, kind)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("", {}),
        ("max_split_size_mb:20", {"max_split_size": 20 * MIB}),
        (" max_split\t_size_mb : 128 ,", {"max_split_size": 128 * MIB}),
        ("max_split_size_mb:64,max_split_size_mb:32", {"max_split_size": 32 * MIB}),
        ("max_split_size_mb:30.9", {"max_split_size": 30 * MIB}),
        ("max_split_size_mb:-1", {"max_split_size": (1 << 64) - MIB}),
        ("max_split_size_mb:17592186044446", {"max_split_size": (1 << 64) - MIB}),
        ("max_split_size_mb:+30", {"max_split_size": 30 * MIB}),
        ("max_split_size_mb,30]pinned_mem_register[True", {"max_split_size": 30 * MIB}),
        ("segment_size_mb:020", {"segment_size": 20 * MIB}),
        ("large_segment_size_mb:11", {"large_segment_size": 11 * MIB, "max_non_split_rounding": 11 * MIB}),
        (
            "max_split_size_mb:11,large_segment_size_mb:11",
            {"large_segment_size": 11 * MIB, "max_non_split_rounding": 11 * MIB, "max_split_size": 11 * MIB},
        ),
        (
            "max_split_size_mb:40,max_non_split_rounding_mb:25",
            {"max_split_size": 40 * MIB, "max_non_split_rounding": 25 * MIB},
        ),
        ("garbage_collection_threshold:0.6", {"garbage_collection_threshold": 0.6}),
        ("garbage_collection_threshold:0x1p-1", {"garbage_collection_threshold": 0.5}),
        ("expandable_segments:True", {"expandable_segments": True}),
        ("expandable_segments:False,pinned_use_background_threads:True", {}),
        ("base_addr_aligned_kb:0", {"base_addr_aligned_bytes": 0}),
        ("base_addr_aligned_kb:8", {"base_addr_aligned_bytes": 8192}),
        ("page_size:1g", {"page_size_1g": True}),
        ("segment_size_mb:64", {"segment_size": 64 * MIB}),
        ("multi_stream_lazy_reclaim:True", {"multi_stream_lazy_reclaim": True}),
        (
            "throw_on_npumalloc_oom:True,per_process_memory_fraction:0.5",
            {"throw_on_npumalloc_oom": True, "per_process_memory_fraction": 0.5},
        ),
        ("release_lock_on_npumalloc:True,pin_memory_expandable_segments:True,pinned_mem_register:True", {}),
        ("pinned_reserve_segment_size_mb:64,pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:8", {}),
    ],
)
def test_what_is_applied(text: str, values: dict[str, Any]) -> None:
    assert changed(parsed(text)) == values


@pytest.mark.parametrize(
    ("value", "slots"),
    [
        ("4", (4,) * 16),
        ("[256:1,512:2,>:8]", (1,) * 9 + (2,) + (8,) * 6),
        ("[>:4]", (0,) + (4,) * 15),
        ("[4:2,16:8]", (2, 2, 2, 0, 8) + (0,) * 11),
        ("[65536:2]", (2,) * 16),
        ("[1:0,2:4]", (0, 4) + (0,) * 14),
        ("[1:2,]", (2,) + (0,) * 15),
        ("[]", None),
    ],
)
def test_roundup_divisions_have_a_slot_per_power_of_two(value: str, slots: tuple[int, ...] | None) -> None:
    assert parsed(f"roundup_power2_divisions:{value}").roundup_power2_divisions == slots


def test_each_text_resets_split_size_roundup_and_gc_and_keeps_the_rest() -> None:
    everything = (
        "large_segment_size_mb:32,max_split_size_mb:64,max_non_split_rounding_mb:48,garbage_collection_threshold:0.5,"
        "roundup_power2_divisions:4,base_addr_aligned_kb:4,segment_size_mb:40,multi_stream_lazy_reclaim:True,"
        "throw_on_npumalloc_oom:True,per_process_memory_fraction:0.9"
    )
    conf = parsed(everything, "release_lock_on_npumalloc:True")
    assert changed(conf) == {
        "large_segment_size": 32 * MIB,
        "max_non_split_rounding": 32 * MIB,
        "base_addr_aligned_bytes": 4096,
        "segment_size": 40 * MIB,
        "multi_stream_lazy_reclaim": True,
        "throw_on_npumalloc_oom": True,
        "per_process_memory_fraction": 0.9,
    }


def test_an_empty_text_does_nothing_at_all() -> None:
    assert changed(parsed("max_split_size_mb:40", "")) == {"max_split_size": 40 * MIB}


def after_refusal(before: str, text: str, *, at: Any = "environment") -> dict[str, Any]:
    conf = parsed(before)
    with pytest.raises((ConfValueError, ConfRuntimeError)):
        conf.parse(text, at=at)
    return changed(conf)


def test_a_refused_key_leaves_everything_as_it_was() -> None:
    before = "max_split_size_mb:40"
    assert after_refusal(before, "garbage_collection_threshold:0.5,colour:blue") == {"max_split_size": 40 * MIB}
    assert after_refusal(before, "max_split_size_mb:64,base_addr_aligned_kb:0", at="runtime") == {
        "max_split_size": 40 * MIB
    }


def test_a_refused_value_of_pytorch_leaves_the_reset_and_what_stood_before_it() -> None:
    text = "throw_on_npumalloc_oom:True,garbage_collection_threshold:0.5,expandable_segments:maybe,max_split_size_mb:64"
    assert after_refusal("roundup_power2_divisions:4", text) == {"garbage_collection_threshold": 0.5}


def test_a_refused_value_of_torch_npu_comes_after_all_keys_of_pytorch() -> None:
    text = "base_addr_aligned_kb:8,segment_size_mb:1,page_size:1g,max_split_size_mb:64"
    assert after_refusal("", text) == {"base_addr_aligned_bytes": 8192, "max_split_size": 64 * MIB}


def test_a_refused_combination_is_not_rolled_back() -> None:
    conf = AllocatorConf()
    with pytest.raises(ConfRuntimeError, match="cannot be enabled with `expandable_segments`"):
        conf.parse("expandable_segments:True,max_split_size_mb:40")
    assert conf.expandable_segments
    with pytest.raises(ConfRuntimeError, match="cannot be enabled with `expandable_segments`"):
        conf.parse("max_split_size_mb:40")
    conf.parse("max_split_size_mb:40,expandable_segments:False")
    assert changed(conf) == {"max_split_size": 40 * MIB}


def test_what_torch_npu_takes_at_run_time() -> None:
    conf = parsed("garbage_collection_threshold:0.5,roundup_power2_divisions:4")
    conf.parse(
        "expandable_segments:True,throw_on_npumalloc_oom:True,per_process_memory_fraction:0.25,"
        "release_lock_on_npumalloc:True,pinned_max_round_threshold_mb:1,pinned_max_cached_size_mb:1",
        at="runtime",
    )
    assert changed(conf) == {
        "expandable_segments": True,
        "throw_on_npumalloc_oom": True,
        "per_process_memory_fraction": 0.25,
    }


def test_cuda_takes_its_own_keys_allows_expandable_with_gc_and_takes_all_at_run_time() -> None:
    conf = AllocatorConf("torch_cuda")
    conf.parse("expandable_segments:True,max_split_size_mb:40,garbage_collection_threshold:0.5", at="runtime")
    conf.parse("backend:native,pinned_num_register_threads:8,release_lock_on_cudamalloc:True", at="runtime")
    assert changed(conf) == {"expandable_segments": True}
    for text, said in {
        "base_addr_aligned_kb:0": "Unrecognized key 'base_addr_aligned_kb' in CUDA allocator config",
        "backend:cudaMallocAsync": "backend:cudaMallocAsync is another allocator",
        "pinned_num_register_threads:3": "power of 2 of at most 128, not 3",
        "pinned_num_register_threads:256": "power of 2 of at most 128, not 256",
    }.items():
        with pytest.raises(ConfValueError, match=said):
            conf.parse(text)


def test_older_releases_know_fewer_keys_and_their_own_limit_of_the_split_size() -> None:
    with pytest.raises(ConfValueError, match="Unrecognized key 'segment_size_mb'"):
        parsed("segment_size_mb:64", absent_keys=frozenset({"segment_size_mb"}))
    with pytest.raises(ConfValueError, match="must be >= 21"):
        parsed("max_split_size_mb:20", split_size_exclusive=True)
    assert not parsed("page_size:1g", page_size_1g_supported=False).page_size_1g


def test_a_misspelt_key_gets_the_nearest_one() -> None:
    with pytest.raises(ConfValueError, match="did you mean 'max_split_size_mb'"):
        parsed("max_split_size:20")


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("", 20 * MIB),
        ("segment_size_mb:64", 64 * MIB),
        ("segment_size_mb:64,large_segment_size_mb:32", 32 * MIB),
        ("segment_size_mb:64,large_segment_size_mb:32,page_size:1g", 1 << 30),
    ],
)
def test_page_of_a_large_expandable_segment(text: str, page: int) -> None:
    assert parsed(text).expandable_page_size == page


def test_whole_numbers_are_read_as_c_does() -> None:
    assert [size_t(text) for text in ("20", "20.5", "0x10", "+7", "-1", "12mb")] == [20, 20, 0, 7, UNLIMITED, 12]


def test_numbers_are_read_as_c_does() -> None:
    assert [double(text) for text in ("0.5", ".5", "5.", "1e-1x", "0x1.8p-1", "-inf", "0e999")] == [
        0.5,
        0.5,
        5.0,
        0.1,
        0.75,
        -math.inf,
        0.0,
    ]
    assert math.isnan(double("NaN"))
    for text in ("1e999", "1e-400", "x", ""):
        with pytest.raises(ConfRuntimeError, match="stod"):
            double(text)
