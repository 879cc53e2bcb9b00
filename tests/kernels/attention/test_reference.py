"""The reference on numbers that a reader can work out: weights 1 to 2, since exp(ln 2) = 2."""

from __future__ import annotations

from math import log
from typing import Any

import pytest

from hbmtwin.kernels.attention.reference import ReferenceKernels

REFERENCE = ReferenceKernels()


def _one_head(torch: Any, *values: float) -> Any:
    return torch.tensor(values)[:, None, None]


def test_a_query_weighs_what_it_sees(torch: Any) -> None:
    q = _one_head(torch, 1.0, 1.0)
    k, v = _one_head(torch, 0.0, log(2)), _one_head(torch, 3.0, 6.0)
    out = REFERENCE.prefill(q, k, v, q_lens=[2], kv_lens=[2], scale=1.0)
    assert out.flatten().tolist() == pytest.approx([3.0, 5.0])
    assert out.dtype == torch.float64


def test_the_last_query_sees_all_keys_and_a_window_the_last_of_them(torch: Any) -> None:
    q = _one_head(torch, 1.0, 1.0)
    k, v = _one_head(torch, 0.0, 0.0, log(2)), _one_head(torch, 2.0, 4.0, 9.0)
    whole = REFERENCE.prefill(q, k, v, q_lens=[2], kv_lens=[3], scale=1.0)
    assert whole.flatten().tolist() == pytest.approx([3.0, 6.0])  # (2 + 4) / 2, (2 + 4 + 2 * 9) / 4
    two = REFERENCE.prefill(q, k, v, q_lens=[2], kv_lens=[3], scale=1.0, window=2)
    assert two.flatten().tolist() == pytest.approx([3.0, 22 / 3])  # (2 + 4) / 2, (4 + 2 * 9) / 3
    own = REFERENCE.prefill(q, k, v, q_lens=[2], kv_lens=[3], scale=1.0, window=1)
    assert own.flatten().tolist() == pytest.approx([4.0, 9.0])


def test_scale_is_applied_to_the_scores(torch: Any) -> None:
    q, k, v = _one_head(torch, 1.0), _one_head(torch, 0.0, 2 * log(2)), _one_head(torch, 3.0, 6.0)
    out = REFERENCE.prefill(q, k, v, q_lens=[1], kv_lens=[2], scale=0.5)
    assert out.flatten().tolist() == pytest.approx([5.0])


def test_neighbouring_query_heads_share_a_kv_head(torch: Any) -> None:
    q, k = torch.ones(1, 4, 1), torch.zeros(1, 2, 1)
    v = torch.tensor([[[3.0], [6.0]]])
    assert REFERENCE.prefill(q, k, v, q_lens=[1], kv_lens=[1], scale=1.0).flatten().tolist() == [3.0, 3.0, 6.0, 6.0]


def test_sequences_lie_one_behind_the_other(torch: Any) -> None:
    q, k = _one_head(torch, 1.0, 1.0, 1.0), _one_head(torch, 0.0, 0.0, 0.0, 0.0)
    v = _one_head(torch, 1.0, 3.0, 10.0, 20.0)
    out = REFERENCE.prefill(q, k, v, q_lens=[1, 2], kv_lens=[2, 2], scale=1.0)
    assert out.flatten().tolist() == [2.0, 10.0, 15.0]


def test_decode_leaves_padding_out(torch: Any) -> None:
    q, k = torch.ones(2, 1, 1), torch.zeros(2, 3, 1, 1)
    v = torch.tensor([[4.0, 99.0, 99.0], [1.0, 2.0, 3.0]])[:, :, None, None]
    assert REFERENCE.decode(q, k, v, kv_lens=[1, 3], scale=1.0).flatten().tolist() == [4.0, 2.0]


def test_blocks_are_read_in_the_order_of_the_table(torch: Any) -> None:
    v_cache = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])[:, :, None, None]
    k_cache = torch.zeros_like(v_cache)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    q = torch.ones(1, 1, 1)
    for window, want in ((0, 4.0), (2, 3.5), (1, 1.0)):  # tokens 5, 6, 1
        out = REFERENCE.paged_decode(q, k_cache, v_cache, block_table=table, context_lens=[3], scale=1.0, window=window)
        assert out.item() == want
    q = torch.ones(2, 1, 1)
    out = REFERENCE.paged_prefill(q, k_cache, v_cache, block_table=table, q_lens=[2], context_lens=[3], scale=1.0)
    assert out.flatten().tolist() == [5.5, 4.0]


def test_int8_is_multiplied_with_the_scale_of_its_token_or_of_its_head(torch: Any) -> None:
    v_cache = torch.tensor([[[2, 4], [6, 8]]], dtype=torch.int8)[..., None]  # one block: 2 tokens of 2 heads
    table, q = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 2, 1)
    read = {"block_table": table, "context_lens": [2], "scale": 1.0}
    per_token = torch.tensor([[0.5, 2.0]])
    out = REFERENCE.paged_decode(q, v_cache * 0, v_cache, **read, k_scale=per_token, v_scale=per_token)
    assert out.flatten().tolist() == [6.5, 9.0]  # (1 + 12) / 2, (2 + 16) / 2
    per_head = torch.tensor([[[0.5, 2.0], [1.0, 10.0]]])  # head 0 at tokens 0 and 1, head 1
    out = REFERENCE.paged_decode(q, v_cache * 0, v_cache, **read, k_scale=per_head, v_scale=per_head)
    assert out.flatten().tolist() == [6.5, 42.0]  # (1 + 12) / 2, (4 + 80) / 2


def test_a_slot_is_block_times_block_size_plus_offset(torch: Any) -> None:
    k_cache, v_cache = torch.zeros(3, 2, 1, 1), torch.zeros(3, 2, 1, 1)
    k = torch.tensor([7.0, 8.0])[:, None, None]
    REFERENCE.write_kv(k, k + 10, k_cache, v_cache, slots=torch.tensor([5, 2]))
    assert k_cache.flatten().tolist() == [0, 0, 8, 0, 0, 7]
    assert v_cache.flatten().tolist() == [0, 0, 18, 0, 0, 17]
