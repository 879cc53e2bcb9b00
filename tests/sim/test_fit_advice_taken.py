"""Advice as whoever takes it finds it: asked again with the flags, by the engine's own defaults and its kernels.

::

    advice  --settings of the flags-->  fit  -->  the same figures, nothing refused, and only notes that were told
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hbmtwin.sim import catalog
from hbmtwin.sim.fit import advice as fit_advice
from hbmtwin.sim.fit.fit import fit
from hbmtwin.sim.fit.options import FitOptions
from hbmtwin.sim.fit.report import Fit

GIB = 1 << 30


def check(options: dict[str, Any], answer: Fit) -> None:
    """What stands beside each change is what comes of it."""
    for advice in (*answer.advice, *answer.advised.pairs):
        again = fit(**{**options, **advice.settings})
        assert again.fits, (options, advice.settings)
        assert again.budget.kv_tokens == advice.budget.kv_tokens, (options, advice.settings)
        assert again.question.max_model_len == advice.question.max_model_len
        told = {str(note) for note in (*answer.warnings, *advice.notes)}
        of_kernels = {str(note) for note in again.budget.warnings}
        assert of_kernels <= told


ENGINES = {"ascend": ("vllm-ascend", "sglang", "mindie"), "nvidia": ("vllm", "sglang", "tensorrt-llm")}


@settings(deadline=None, max_examples=40)
@given(
    model=st.sampled_from(catalog.models()),
    device=st.sampled_from(catalog.devices()),
    engine=st.integers(0, 2),
    flags=st.fixed_dictionaries(
        {},
        optional={
            "tensor_parallel_size": st.sampled_from([2, 4, 8]),
            "data_parallel_size": st.sampled_from([2, 4]),
            "enable_expert_parallel": st.just(True),
            "max_model_len": st.sampled_from([-1, 4096, 100_000]),
            "quantization": st.sampled_from(["fp8", "awq", "gptq", "ascend", "none"]),
            "kv_cache_dtype": st.sampled_from(["fp8", "fp8_e5m2", "int8"]),
            "other_tenant_bytes": st.just(7 * GIB),
            "total_memory_bytes": st.sampled_from([9 * GIB, 20 * GIB]),
            "enable_chunked_prefill": st.just(False),
        },
    ),
)
def test_whoever_takes_an_advice_gets_what_it_says_with_any_engine(
    model: str, device: str, engine: int, flags: dict[str, Any]
) -> None:
    options = {
        "model": model,
        "device": device,
        "engine": ENGINES[catalog.device(device).vendor][engine],
        **flags,
    }
    try:
        answer = fit(**options)
    except ValueError:  # cannot be split so
        return
    check(options, answer)


CASES: dict[str, FitOptions] = {
    "a share that follows from the ranks": {
        "model": "mistral-small-24b",
        "device": "ascend-910c",
        "engine": "sglang",
        "max_num_seqs": 16,
    },
    "another device's batch": {
        "model": "kimi-k2",
        "device": "l40s",
        "tensor_parallel_size": 8,
        "max_model_len": 4096,
        "max_num_batched_tokens": 512,
    },
    "MindIE's share": {
        "model": "llama-3.1-8b",
        "device": "ascend-910b3",
        "engine": "mindie",
        "tensor_parallel_size": 2,
        "max_num_batched_tokens": 8192,
        "other_tenant_bytes": 8 * GIB,
    },
    "memory that was measured": {"model": "llama-3.1-8b", "device": "ascend-910b4", "total_memory_bytes": 10 * GIB},
    "as long as fits": {
        "model": "llama-3.1-8b",
        "device": "rtx-3090",
        "gpu_memory_utilization": 0.6,
        "max_model_len": -1,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_defaults_that_follow_from_a_change_are_in_its_result(case: str) -> None:
    answer = fit(**CASES[case])
    assert answer.advice
    check(dict(CASES[case]), answer)


def test_as_long_as_fits_needs_room_for_one_token_only() -> None:
    advice = fit(**CASES["as long as fits"]).advice[0]
    assert dict(advice.settings) == {"gpu_memory_utilization": 0.7}
    assert not fit(**{**CASES["as long as fits"], "gpu_memory_utilization": 0.69}).fits


def test_a_share_goes_by_its_option() -> None:
    (first, *_) = fit(**CASES["MindIE's share"]).advice
    assert str(first.change).startswith("NPU_MEMORY_FRACTION 0.")
    assert list(first.settings) == ["gpu_memory_utilization"]
    vain = fit("qwen2.5-72b", "ascend-910c", engine="sglang").advised.in_vain
    assert "mem_fraction_static" in vain
    assert "gpu_memory_utilization" not in vain


def test_no_value_is_advised_that_the_engine_does_not_have() -> None:
    for engine in ("vllm-ascend", "sglang", "mindie"):
        advised = fit("llama-3.1-8b", "ascend-910b4", engine=engine).advised
        assert advised.helps
        assert not any("kv_cache_dtype" in advice.settings for advice in advised.helps)


def test_what_is_to_be_known_of_a_change_stands_with_it() -> None:
    answer = fit("llama-3.1-8b", "a100-40gb", max_model_len=131_072, gpu_memory_utilization=0.7)
    notes = {next(iter(advice.settings)): [str(note) for note in advice.notes] for advice in answer.advice}
    assert len(notes["kv_cache_dtype"]) == 1
    assert "FlashInfer reads it, in software" in notes["kv_cache_dtype"][0]
    assert notes["tensor_parallel_size"] == []
    told = {advice["change"]: advice["warnings"] for advice in answer.to_dict()["advice"]}
    assert told["kv_cache_dtype fp8"] == notes["kv_cache_dtype"]


def test_two_changes_that_no_kernel_runs_are_not_advised() -> None:
    answer = fit("deepseek-v3", "ascend-910b4")  # FP8 weights
    assert answer.advised.pairs == answer.advice == ()


def test_what_runs_only_with_another_cache_and_fits_only_with_less_is_told_both() -> None:
    options: dict[str, Any] = {"model": "llama-3.1-8b", "device": "ascend-910b4", "kv_cache_dtype": "fp8"}
    answer = fit(**options)
    assert answer.advice == ()
    first = answer.advised.pairs[0]
    assert dict(first.settings) == {"kv_cache_dtype": "auto", "max_model_len": 96_256}
    assert str(first.change) == "kv_cache_dtype auto with max_model_len 96256"
    check(options, answer)


def test_weights_that_cannot_be_split_so_are_no_change() -> None:
    options: dict[str, Any] = {"model": "glm-4-9b", "device": "rtx-3090", "max_model_len": 262_144}
    options |= {"tensor_parallel_size": 4, "quantization": "ascend", "other_tenant_bytes": 8 * GIB}
    answer = fit(**options)
    assert answer.refused is not None
    check(options, answer)


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        ({"other_tenant_bytes": 29 * GIB}, {"other_tenant_bytes": 0, "max_model_len": 96_256}),
        ({"kv_cache_memory_bytes": 100 * GIB}, {"kv_cache_memory_bytes": 14_864_613_376, "max_model_len": 113_408}),
    ],
)
def test_room_and_a_shorter_request_together(flags: dict[str, Any], changes: dict[str, Any]) -> None:
    options = {"model": "llama-3.1-8b", "device": "ascend-910b4", **flags}
    answer = fit(**options)
    assert answer.advice == ()
    assert dict(answer.advised.pairs[0].settings) == changes
    check(options, answer)
    assert not fit(**{**options, **changes, "max_model_len": changes["max_model_len"] + 1}).fits


@pytest.mark.parametrize(
    ("flags", "change"),
    [
        ({"num_gpu_blocks_override": 1_000_000}, {"num_gpu_blocks_override": 886}),
        ({"num_gpu_blocks_override": 31}, {"num_gpu_blocks_override": 32}),
        ({"kv_cache_memory_bytes": 100 * GIB}, {"kv_cache_memory_bytes": 14_864_613_376}),
        ({"engine": "mindie", "npu_mem_size": 0.1, "max_num_batched_tokens": 4096}, {"npu_mem_size": 0.5}),
    ],
)
def test_what_stands_in_for_the_plan_is_told_as_it_is_typed(flags: dict[str, Any], change: dict[str, Any]) -> None:
    options = {"model": "llama-3.1-8b", "device": "ascend-910b4", "max_model_len": 4096, **flags}
    answer = fit(**options)
    assert dict(answer.advice[0].settings) == change
    check(options, answer)
    (name, value), *_ = change.items()
    step = {"num_gpu_blocks_override": 1, "kv_cache_memory_bytes": 16 << 20, "npu_mem_size": 0.01}[name]
    further = value - step if flags[name] < value else value + step
    assert not fit(**{**options, name: further}).fits


def test_what_helps_one_way_is_not_said_to_help_no_way() -> None:
    old: FitOptions = {"gpu_memory_utilization": 0.9, "engine_version": "0.6", "max_model_len": 34_000}
    advised = fit("llama-3.1-8b", "rtx-3090", other_tenant_bytes=3 * GIB, **old).advised
    helping = {name for advice in advised.helps for name in advice.settings}
    assert helping
    assert not helping & set(advised.in_vain)
    assert len(set(advised.in_vain)) == len(advised.in_vain)


def test_planted_a_result_that_was_not_asked_again_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    module = importlib.import_module("hbmtwin.sim.fit.fit")
    monkeypatch.setattr(module, "_asked_again", lambda options, advice, **rest: advice)
    with pytest.raises(AssertionError):
        test_defaults_that_follow_from_a_change_are_in_its_result("another device's batch")
    assert fit_advice.advise is module.advise
