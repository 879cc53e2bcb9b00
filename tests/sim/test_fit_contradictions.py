"""What cannot be meant is refused by its flag, with the cure, before memory is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hbmtwin.sim.fit.fit import fit
from hbmtwin.sim.fit.options import FitError

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"engine": "mindie", "npu_mem_size": float("inf")}, "--npu-mem-size: GiB of KV, above 0, or -1 .* not inf"),
    ({"engine": "mindie", "npu_mem_size": float("nan")}, "--npu-mem-size: GiB of KV, above 0, or -1 .* not nan"),
    ({"engine": "mindie", "npu_mem_size": 0}, "--npu-mem-size: GiB of KV, above 0, or -1 .* not 0"),
    ({"engine": "mindie", "npu_mem_size": 1e30}, r"--npu-mem-size: GiB of KV, above 0, or -1 .* not 1e\+30"),
    ({"engine_version": "abc"}, "--engine-version: a release such as 0.18, or leave it out, not 'abc'"),
    ({"engine_version": ""}, "--engine-version: a release such as 0.18, or leave it out, not ''"),
    ({"kv_cache_dtype": "foo"}, "--kv-cache-dtype: unknown dtype 'foo'"),
    ({"pipeline_parallel_size": 33}, "--pipeline-parallel-size: 32 layers make 1 to 32 stages, not 33"),
    ({"enable_expert_parallel": True}, "--enable-expert-parallel: llama-3.1-8b has no experts.*; leave it out"),
    (
        {"max_num_seqs": 100, "max_num_batched_tokens": 10},
        "--max-num-batched-tokens: 10 is less than --max-num-seqs 100, .*; raise it, or lower --max-num-seqs",
    ),
    (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
        "--max-num-batched-tokens: 1024 is less than --max-model-len 131072, .*; leave it out, or add --enable-chunked",
    ),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED)
def test_refused_by_its_flag(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(FitError, match=f"^{says}"):
        fit("llama-3.1-8b", "ascend-910b4", **flags)


@pytest.mark.parametrize(
    "flags",
    [
        {"engine": "mindie", "npu_mem_size": -1},
        {"engine_version": "main"},
        {"engine_version": "V0"},
        {"engine_version": "0.11.0rc1"},
        {"max_num_batched_tokens": 10},  # then fewer sequences are the default
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024, "max_model_len": 1024},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024, "max_model_len": -1},
    ],
)
def test_what_goes_together_is_answered(flags: dict[str, Any]) -> None:
    assert fit("llama-3.1-8b", "ascend-910b4", **flags).budget.lines


def test_experts_are_not_missed_where_the_model_is_not_known() -> None:
    assert fit(kv_bytes_per_token=1024, available_kv_bytes=1 << 30, enable_expert_parallel=True).fits


def test_another_engine_than_the_run_s_has_its_own_defaults(tmp_path: Path) -> None:
    file = tmp_path / "scenario.toml"
    file.write_text('[model]\nname = "qwen3-8b"\n[engine]\ntensor_parallel_size = 2\n', encoding="utf-8")
    for engine in ("mindie", "sglang", "vllm-ascend"):
        by_file = fit(scenario=file, engine=engine)
        by_flags = fit("qwen3-8b", "ascend-910b4", engine=engine, tensor_parallel_size=2)
        assert by_file.budget.lines == by_flags.budget.lines
        assert by_file.budget.kv_tokens == by_flags.budget.kv_tokens


def test_as_long_as_fits_never_speaks_of_the_model_s_own_length() -> None:
    answer = fit("llama-3.1-8b", "ascend-910b4", max_model_len=-1, kv_cache_memory_bytes=1)
    assert str(answer.reason).startswith("one request of max_model_len 1 needs 16.0 MiB of KV")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"dtype": "foo"}, "--dtype: 'foo' is none of auto, "),
        ({"quantization": "fp8"}, "--quantization: without --model its weights are not known; leave it out"),
    ],
)
def test_bare_numbers_take_no_words_that_say_nothing(flags: dict[str, Any], says: str) -> None:
    with pytest.raises(FitError, match=f"^{says}"):
        fit(kv_bytes_per_token=1024, available_kv_bytes=1 << 30, **flags)


@pytest.mark.parametrize("flags", [{}, {"other_tenant_bytes": 100 << 30}, {"graph_bytes": 1 << 30}])
def test_where_only_the_room_for_kv_is_known_nothing_is_said_of_the_rest(flags: dict[str, Any]) -> None:
    answer = fit(kv_bytes_per_token=1024, available_kv_bytes=1 << 30, max_model_len=4096, **flags)
    assert answer.fits
    assert answer.warnings == ()
