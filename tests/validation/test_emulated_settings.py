"""Which settings torch_npu 2.13.0 refuses, how, and what a refused one leaves behind: observed on the binary."""

import pytest

from hbmtwin.validation.emulated import EmulatedNpu, NpuSettings, RealError
from hbmtwin.workloads.formats.memory_trace import MemoryOp

MIB = 1 << 20
ONE = [MemoryOp("malloc", 1, 100)]

REFUSED = [
    ("max_split_size_mb:19", "ValueError", "CachingAllocator option max_split_size_mb too small, must be >= 20"),
    ("max_split_size_mb:30,large_segment_size_mb:40", "ValueError", "must be >= 40"),
    ("max_non_split_rounding_mb:19", "ValueError", "max_non_split_rounding_mb too small, must be >= 20"),
    ("garbage_collection_threshold:0", "ValueError", "garbage_collect_threshold is invalid, set it in (0.0, 1.0)"),
    ("garbage_collection_threshold:1", "ValueError", "garbage_collect_threshold is invalid, set it in (0.0, 1.0)"),
    ("roundup_power2_divisions:3", "ValueError", "For roundups, the divisions has to be power of 2"),
    ("roundup_power2_divisions:0", "ValueError", "For roundups, the divisions has to be power of 2"),
    ("roundup_power2_divisions:[256:3]", "ValueError", "has to be power of 2 or 0 to disable roundup"),
    ("roundup_power2_divisions:[100:2]", "ValueError", "For roundups, the intervals have to be power of 2"),
    (
        "expandable_segments:true",
        "ValueError",
        "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got 'true'",
    ),
    ("large_segment_size_mb:10", "ValueError", "large_segment_size_mb must be > 10 MB"),
    ("foo:1", "ValueError", "Unrecognized key 'foo' in NPU allocator config"),
    ("release_lock_on_cudamalloc:True", "ValueError", "Unrecognized key 'release_lock_on_cudamalloc'"),
    (",max_split_size_mb:40", "ValueError", "Unrecognized key ','"),
    ("max_split_size_mb:40 expandable_segments:False", "ValueError", "Unrecognized key 'False'"),
    ("pinned_use_background_threads:x", "ValueError", "Expected 'True' or 'False'"),
    ("base_addr_aligned_kb:17", "RuntimeError", "base_addr_aligned_kb error, must be [0~16], dtype is int"),
    ("base_addr_aligned_kb:016", "RuntimeError", "base_addr_aligned_kb error, must be [0~16], dtype is int"),
    ("base_addr_aligned_kb:x", "RuntimeError", "base_addr_aligned_kb is invalid."),
    ("page_size:2g", "RuntimeError", "Unsupported page_size value: 2g"),
    ("segment_size_mb:19", "RuntimeError", "segment_size_mb error, must be [20, 512], dtype is int"),
    ("segment_size_mb:513", "RuntimeError", "segment_size_mb error, must be [20, 512], dtype is int"),
    (
        "multi_stream_lazy_reclaim:1",
        "RuntimeError",
        "Expected a single True/False argument for multi_stream_lazy_reclaim",
    ),
    ("throw_on_npumalloc_oom:yes", "RuntimeError", "Expected a single True/False argument for throw_on_npumalloc_oom"),
    ("per_process_memory_fraction:1.5", "RuntimeError", "per_process_memory_fraction is invalid, set it in [0.0, 1.0]"),
    ("max_split_size_mb:abc", "RuntimeError", "stoull"),
    ("garbage_collection_threshold:x", "RuntimeError", "stod"),
    ("pinned_max_round_threshold_mb:x", "RuntimeError", "stoull"),
    ("max_split_size_mb", "RuntimeError", "INTERNAL ASSERT FAILED"),
    ("max_split_size_mb:", "RuntimeError", "INTERNAL ASSERT FAILED"),
    ("roundup_power2_divisions:[256:1,512:2", "RuntimeError", "Expected closing bracket ']'"),
    ("expandable_segments:True,max_split_size_mb:40", "RuntimeError", "cannot be enabled with `expandable_segments`"),
    ("garbage_collection_threshold:0.5,expandable_segments:True", "RuntimeError", "cannot be enabled with"),
]
NOT_IN_MID_RUN = [
    "garbage_collection_threshold:0.5",
    "roundup_power2_divisions:4",
    "large_segment_size_mb:64",
    "base_addr_aligned_kb:0",
    "page_size:1g",
    "segment_size_mb:64",
    "multi_stream_lazy_reclaim:True",
    "pinned_mem_register:True",
]


@pytest.mark.parametrize(("conf", "kind", "text"), REFUSED, ids=[conf for conf, _, _ in REFUSED])
def test_refused_at_the_first_use_of_the_device(npu: EmulatedNpu, conf: str, kind: str, text: str) -> None:
    run = npu.replay(ONE, NpuSettings(alloc_conf=conf))
    assert run.setup_error is not None
    assert run.setup_error.kind == kind
    assert text in run.setup_error.text
    assert len(run.results) == len(run.stats) == 0


@pytest.mark.parametrize(
    ("conf", "max_split_size"),
    [
        ("max_split_size_mb:20.5", 20 * MIB),
        ("max_split_size_mb:-1", -MIB),
        ("max_split_size_mb:40,", 40 * MIB),
        (" max_split_size_mb : 40 ", 40 * MIB),
        ("max_split_size_mb:40,max_split_size_mb:50", 50 * MIB),
        ("max_split_size_mb:40;x", 40 * MIB),
        ("roundup_power2_divisions:[256:0]", -1),
    ],
)
def test_numbers_are_read_as_c_does(npu: EmulatedNpu, conf: str, max_split_size: int) -> None:
    run = npu.replay(ONE, NpuSettings(alloc_conf=conf))
    assert run.stat("max_split_size").tolist() == [max_split_size]


@pytest.mark.parametrize("conf", NOT_IN_MID_RUN)
def test_not_settable_in_mid_run(npu: EmulatedNpu, conf: str) -> None:
    key = conf.partition(":")[0]
    text = f"torch_npu.npu.memory._set_allocator_settings() unsupported setting: {key}"
    assert npu.replay([MemoryOp("set_conf", arg=conf)]).errors == {0: RealError("ValueError", text)}


def test_the_general_variable_does_too_but_not_both(npu: EmulatedNpu) -> None:
    general = (("PYTORCH_ALLOC_CONF", "max_split_size_mb:50"),)
    assert npu.replay(ONE, NpuSettings(environment=general)).stat("max_split_size").tolist() == [50 * MIB]
    both = npu.replay(ONE, NpuSettings(alloc_conf="max_split_size_mb:40", environment=general))
    assert both.setup_error is not None
    assert both.setup_error.kind == "RuntimeError"
    assert both.setup_error.text.startswith("Both PYTORCH_NPU_ALLOC_CONF and PYTORCH_ALLOC_CONF have been set")


def test_a_refused_setting_is_not_rolled_back(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("set_conf", arg="expandable_segments:True,max_split_size_mb:40"),
        MemoryOp("set_conf", arg="max_split_size_mb:40"),
        MemoryOp("set_conf", arg=""),
        MemoryOp("malloc", 1, 3 * MIB),
    ]
    run = npu.replay(ops)
    assert [*run.errors] == [0, 1]
    assert run.segments["is_expandable"].tolist() == [1]
    assert run.stat("max_split_size").tolist() == [-1] * 4


def test_an_unknown_key_refuses_the_whole_text_before_anything_is_applied(npu: EmulatedNpu) -> None:
    ops = [
        MemoryOp("set_conf", arg="expandable_segments:True,foo:1"),
        MemoryOp("malloc", 1, 3 * MIB),
    ]
    run = npu.replay(ops)
    assert run.errors[0].kind == "ValueError"
    assert run.segments["is_expandable"].tolist() == [0]
