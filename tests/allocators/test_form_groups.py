"""How layers become groups, and bytes per block, against the tables of specs/paged-kv.md sections 5, 6 and 9."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from hbmtwin.allocators.form_groups import form_groups
from hbmtwin.allocators.kv_groups import Grouping, KVGroup, LayerKV, one_group
from hbmtwin.allocators.records import KVDtype, KVLayout

PER_HEAD = {bits: KVDtype(bits, "token_head") for bits in (4, 8)}


def formed(layers: Sequence[LayerKV], block_size: int = 16, **more: Any) -> Grouping:
    base: dict[str, Any] = {"max_model_len": 4096, "enable_prefix_caching": False}
    return form_groups(layers, block_size=block_size, **base | more)


def attention(token_bytes: int, window: int = 0, count: int = 1) -> list[LayerKV]:
    kind: Any = "sliding_window" if window else "full"
    return [LayerKV(kind=kind, token_bytes=token_bytes, window=window)] * count


def mamba(state_bytes: int, count: int = 1, **more: int) -> list[LayerKV]:
    return [LayerKV(kind="mamba", state_bytes=state_bytes, **more)] * count


# Bytes per block of a layer


@pytest.mark.parametrize(
    ("layout", "block_size", "page_bytes"),
    [
        pytest.param(KVLayout(32, 32, 128), 16, 16 * 32 * (128 + 128) * 2, id="MHA, Llama 2 7B"),
        pytest.param(KVLayout(32, 8, 128), 16, 65_536, id="GQA, Llama 3 8B"),
        pytest.param(KVLayout(80, 8, 128, tensor_parallel_size=4), 128, 128 * 2 * 256 * 2, id="GQA over 4 ranks"),
        pytest.param(KVLayout(80, 8, 128, tensor_parallel_size=16), 16, 16 * 1 * 256 * 2, id="heads replicated"),
        pytest.param(KVLayout(4, 8, 192, v_head_dim=128), 16, 16 * 8 * (192 + 128) * 2, id="V smaller than K"),
        pytest.param(KVLayout(61, 1, 576, v_head_dim=0), 64, 64 * 576 * 2, id="MLA, DeepSeek V3"),
        pytest.param(
            KVLayout(61, 1, 576, v_head_dim=0, tensor_parallel_size=8), 64, 73_728, id="MLA, not divided over ranks"
        ),
        pytest.param(KVLayout(32, 8, 128, dtype=KVDtype(8, "tensor")), 16, 16 * 8 * 256, id="FP8, scale per tensor"),
        pytest.param(
            KVLayout(32, 8, 128, dtype=PER_HEAD[8]), 16, 16 * 8 * 256 + 2 * 16 * 8 * 4, id="INT8 and FP8 per head"
        ),
        pytest.param(KVLayout(32, 8, 128, dtype=PER_HEAD[4]), 16, 16 * 8 * 128 + 2 * 16 * 8 * 4, id="INT4 per head"),
    ],
)
def test_bytes_of_a_block(layout: KVLayout, block_size: int, page_bytes: int) -> None:
    layers = attention(layout.layer_token_bytes, count=layout.num_layers)
    grouping = formed(layers, block_size)
    assert (grouping.page_bytes, grouping.group_length) == (page_bytes, layout.num_layers)
    assert grouping == one_group(layout, block_size)
    assert grouping.block_bytes == page_bytes * layout.num_layers
    assert grouping.token_bytes == layout.token_bytes


# One type


def test_layers_of_one_type_and_two_sizes_are_one_group_of_all_bytes() -> None:
    grouping = formed(attention(1024, count=3) + attention(512, count=2))
    assert grouping.groups == (KVGroup(block_size=16, token_bytes=4096),)
    assert (grouping.page_bytes, grouping.group_length, grouping.token_bytes) == (16 * 4096, 1, 4096)


def test_windows_of_one_size_are_one_group_that_forgets() -> None:
    grouping = formed(attention(1024, window=128, count=4))
    assert grouping.groups == (
        KVGroup(kind="sliding_window", window=128, num_layers=4, block_size=16, token_bytes=1024),
    )


def test_states_alone_are_one_group() -> None:
    grouping = formed(mamba(5000, count=3), speculative_blocks=2)
    assert grouping.groups == (
        KVGroup(kind="mamba", num_layers=3, block_size=4096, state_bytes=5000, speculative_blocks=2),
    )
    assert grouping.block_bytes == 15_000
    assert grouping.token_bytes == 0


# Buckets


def counts(grouping: Grouping) -> list[tuple[str, int]]:
    return [(group.kind, group.num_layers) for group in grouping.groups]


def test_a_pattern_of_one_to_five_makes_six_groups() -> None:
    """Gemma 3 27B on one rank: 62 layers, each sixth sees all."""
    layers = [layer for index in range(62) for layer in attention(8192, window=0 if index % 6 == 5 else 1024)]
    grouping = formed(layers)
    # 52 windows over ceil(52 / 10) = 6 groups: layer i to group i mod 6, so 9 9 9 9 8 8 and never 10 10 10 10 10 2.
    assert counts(grouping) == [("sliding_window", n) for n in (9, 9, 9, 9, 8, 8)] + [("full", 10)]
    assert (grouping.group_length, grouping.page_bytes) == (10, 131_072)
    assert grouping.block_bytes == 1_310_720
    assert grouping.token_bytes == 62 * 8192


def test_below_one_and_a_half_times_the_smallest_the_largest_bucket_is_the_length() -> None:
    assert counts(formed(attention(64, count=13) + attention(64, 128, count=12))) == [
        ("full", 13),
        ("sliding_window", 12),
    ]
    assert formed(attention(64, count=13) + attention(64, 128, count=12)).group_length == 13
    grouping = formed(attention(64, count=4) + attention(64, 128, count=6))  # 6 is not below 1.5 * 4
    assert counts(grouping) == [("full", 4), ("sliding_window", 3), ("sliding_window", 3)]
    assert grouping.group_length == 4


def test_windows_of_two_sizes_are_two_buckets() -> None:
    grouping = formed(attention(64, 128, count=2) + attention(64, 256, count=2) + attention(64, count=1))
    assert counts(grouping) == [("sliding_window", 1)] * 4 + [("full", 1)]
    assert [group.window for group in grouping.groups] == [128, 128, 256, 256, 0]


# Pages of one size


def test_a_smaller_page_gets_a_larger_block() -> None:
    grouping = formed(attention(2048, count=2) + attention(1024, window=128, count=2))
    assert [(group.kind, group.block_size) for group in grouping.groups] == [("full", 16), ("sliding_window", 32)]
    assert grouping.page_bytes == 32_768


def test_pages_that_do_not_divide_are_refused_or_padded() -> None:
    layers = attention(2048) + attention(1536, window=128)
    with pytest.raises(ValueError, match=r"16 tokens of a sliding_window layer are 24576 bytes.*32768.*disable_hybrid"):
        formed(layers)
    grouping = formed(layers, strided_pages=True)
    assert [group.block_size for group in grouping.groups] == [16, 16]
    assert [group.token_bytes for group in grouping.groups] == [2048, 1536]
    assert grouping.page_bytes == 32_768


# Mamba


def test_a_block_of_attention_is_raised_until_its_page_holds_a_state() -> None:
    layers = mamba(1_000_000, count=3) + attention(1024)
    grouping = formed(layers, enable_prefix_caching=True)
    # 16 * ceil(1,000,000 / (16 * 1,024)) = 16 * 62
    assert grouping.groups == (
        *[KVGroup(kind="mamba", block_size=992, state_bytes=1_000_000, mamba_mode="align")] * 3,
        KVGroup(block_size=992, token_bytes=1024),
    )
    assert (grouping.page_bytes, grouping.group_length) == (992 * 1024, 1)


def test_a_block_that_holds_a_state_already_stays_and_the_state_is_padded() -> None:
    grouping = formed(mamba(10_000) + attention(1024), block_size=64, enable_prefix_caching=True, mamba_mode="all")
    assert [group.block_size for group in grouping.groups] == [64, 64]
    assert grouping.page_bytes == 65_536
    assert formed(mamba(10_000) + attention(1024), block_size=64, kernel_block_size=128).page_bytes == 128 * 1024


def test_in_mode_all_the_models_own_chunk_divides_the_block() -> None:
    layers = mamba(100_000) + attention(1024)  # 98 tokens hold a state
    for mode, chunk, size in (("all", 256, 256), ("all", 1, 112), ("align", 256, 112)):
        grouping = formed(layers, enable_prefix_caching=True, mamba_mode=mode, mamba_chunk=chunk)
        assert [(group.block_size, group.mamba_mode) for group in grouping.groups] == [(size, mode), (size, "none")]


def test_without_prefix_caching_a_state_lasts_for_the_whole_request() -> None:
    grouping = formed(mamba(10_000) + attention(1024), mamba_mode="all")
    assert [(group.block_size, group.mamba_mode) for group in grouping.groups] == [(4096, "none"), (16, "none")]
    assert [group.max_blocks(4096, 2048) for group in grouping.groups] == [1, 256]


def test_blocks_that_start_up_counts_for_a_request() -> None:
    for mode, blocks in (("none", 3), ("align", 4), ("all", 66)):
        group = KVGroup(kind="mamba", block_size=64, state_bytes=1, mamba_mode=mode, speculative_blocks=2)
        assert group.max_blocks(4096, 2048) == blocks
    windowed = KVGroup(kind="sliding_window", window=1024, block_size=16, token_bytes=1)
    assert windowed.max_blocks(131_072, 8192) == 577  # ceil((1023 + 8192) / 16) + 1
    local = KVGroup(kind="chunked_local", window=8192, block_size=16, token_bytes=1)
    assert local.max_blocks(131_072, 8192) == 1024


# vllm-ascend


def on_ascend(recurrent: int, conv: int, k: int = 512, v: int = 512, **more: Any) -> Grouping:
    layers = [*mamba(recurrent + conv, count=3, conv_bytes=conv), LayerKV(token_bytes=k + v, k_bytes=k)]
    return formed(layers, block_size=128, ascend=True, **more)


def test_on_ascend_a_recurrent_state_fills_the_k_of_a_block_exactly() -> None:
    grouping = on_ascend(524_288, 24_576, enable_prefix_caching=True)  # 128 * ceil(524,288 / (128 * 512)) = 1,024
    assert [group.block_size for group in grouping.groups] == [1024] * 4
    assert grouping.page_bytes == 1024 * 1024 + 24_576
    assert grouping.group_length == 1
    with pytest.raises(ValueError, match="1152 tokens of 512 bytes are 589824; change tensor_parallel_size"):
        on_ascend(524_289, 0)


def test_on_ascend_only_align_has_states_by_the_block() -> None:
    for caching, mode, size in ((True, "align", 1024), (True, "all", 4096), (False, "none", 4096)):
        grouping = on_ascend(524_288, 0, enable_prefix_caching=caching, mamba_mode=mode)
        assert [group.block_size for group in grouping.groups] == [size] * 3 + [1024]
    with pytest.raises(ValueError, match="k_bytes"):
        formed(mamba(1024) + attention(1024), ascend=True)


# Records


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "at least one token a block"),
        ({"num_layers": -1}, "at least one token a block and no fewer than no layers"),
        ({"kind": "sliding_window"}, "window belongs to"),
        ({"window": 4}, "window belongs to"),
        ({"sinks": 4}, "sinks belong to"),
        ({"kind": "mamba", "token_bytes": 4}, "a Mamba group keeps states"),
    ],
)
def test_what_a_group_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVGroup(**fields)


def test_a_model_needs_layers() -> None:
    with pytest.raises(ValueError, match="no groups"):
        formed([])
