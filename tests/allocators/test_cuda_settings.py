"""What a text of settings leaves behind on CUDA, refused or not, as seen on torch 2.11.0's binary."""

from __future__ import annotations

import pytest

from hbmtwin.allocators.caching import ConfError
from hbmtwin.allocators.caching.conf import AllocatorConf
from hbmtwin.allocators.stats import UNLIMITED

MIB = 1 << 20


def started() -> AllocatorConf:
    """All that every text resets is set."""
    conf = AllocatorConf("torch_cuda", absent_keys=frozenset({"throw_on_cudamalloc_oom"}))
    conf.parse("max_split_size_mb:50,roundup_power2_divisions:4,garbage_collection_threshold:0.3")
    return conf


def limits(conf: AllocatorConf) -> tuple[int, bool, float]:
    return conf.max_split_size, conf.roundup_power2_divisions is not None, conf.garbage_collection_threshold


def test_an_empty_text_resets_on_cuda_and_does_nothing_on_an_npu() -> None:
    conf = started()
    conf.parse("", at="runtime")
    assert limits(conf) == (UNLIMITED, False, 0.0)
    npu = AllocatorConf("torch_npu")
    npu.parse("max_split_size_mb:50")
    npu.parse("", at="runtime")
    assert npu.max_split_size == 50 * MIB


@pytest.mark.parametrize("text", ["colour:blue", "colour", "throw_on_cudamalloc_oom:True", ",max_split_size_mb:30"])
def test_an_unknown_key_is_refused_after_the_reset(text: str) -> None:
    conf = started()
    with pytest.raises(ConfError, match="Unrecognized key"):
        conf.parse(text, at="runtime")
    assert limits(conf) == (UNLIMITED, False, 0.0)


def test_what_stands_before_an_unknown_key_is_applied_and_what_stands_behind_is_not() -> None:
    conf = started()
    with pytest.raises(ConfError, match="Unrecognized key"):
        conf.parse("max_split_size_mb:30,colour:blue,garbage_collection_threshold:0.5", at="runtime")
    assert limits(conf) == (30 * MIB, False, 0.0)


def test_the_large_segment_counts_even_behind_an_unknown_key() -> None:
    conf = started()
    with pytest.raises(ConfError, match="Unrecognized key"):
        conf.parse("colour:blue,large_segment_size_mb:40", at="runtime")
    assert conf.large_segment_size == 40 * MIB


def test_a_key_without_a_value_is_seen_when_it_is_read() -> None:
    conf = started()
    with pytest.raises(ConfError, match="key:value"):
        conf.parse("max_split_size_mb:30,expandable_segments", at="runtime")
    assert limits(conf) == (30 * MIB, False, 0.0)
