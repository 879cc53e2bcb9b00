"""Questions of bare numbers: sizes of the KV of a model that is not at hand, over ranks."""

from __future__ import annotations

import pytest

from hbmtwin.sim.fit.fit import fit
from hbmtwin.sim.fit.options import FitError, FitOptions

ROOM: FitOptions = {"available_kv_bytes": 11_381_826_560, "block_size": 128, "engine": "vllm-ascend"}


@pytest.mark.parametrize(
    ("kv_heads", "ranks", "on_each"), [(4, 1, 4), (4, 2, 2), (4, 4, 1), (4, 8, 1), (4, 16, 1), (1, 7, 1), (6, 3, 2)]
)
def test_kv_heads_are_split_over_ranks_and_copied_where_there_are_more_ranks(
    kv_heads: int, ranks: int, on_each: int
) -> None:
    answer = fit(num_layers=94, num_kv_heads=kv_heads, head_dim=128, tensor_parallel_size=ranks, **ROOM)
    assert answer.budget.kv_bytes_per_token == 2 * 94 * on_each * 128 * 2


def test_the_log_of_a_replicated_model_comes_out_of_its_bare_sizes() -> None:
    answer = fit(num_layers=94, num_kv_heads=4, head_dim=128, tensor_parallel_size=8, max_model_len=32_768, **ROOM)
    assert (answer.budget.kv_bytes_per_token, answer.budget.kv_tokens) == (48_128, 236_416)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 3), (6, 4), (999_999, 2)])
def test_kv_heads_that_go_over_ranks_neither_way_are_refused_by_name(kv_heads: int, ranks: int) -> None:
    with pytest.raises(FitError, match=f"^--tensor-parallel-size: {kv_heads} KV heads .* not over {ranks}$"):
        fit(num_layers=2, num_kv_heads=kv_heads, head_dim=128, tensor_parallel_size=ranks, **ROOM)


@pytest.mark.parametrize("ranks", [{}, {"tensor_parallel_size": 8}, {"pipeline_parallel_size": 2}])
def test_bytes_of_a_token_are_those_of_one_rank(ranks: FitOptions) -> None:
    answer = fit(kv_bytes_per_token=48_128, max_model_len=32_768, **ROOM, **ranks)
    assert (answer.budget.kv_bytes_per_token, answer.budget.kv_tokens) == (48_128, 236_416)
