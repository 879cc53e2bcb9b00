"""``fit`` by name: one function behind every surface, records that are frozen, phrases that say the same twice."""

from __future__ import annotations

import importlib
import io
import json
import re
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import hbmtwin
from hbmtwin.cli.fit_screen import FitScreen
from hbmtwin.sim.budget.memory_budget import DoesNotFit, budget_of
from hbmtwin.sim.budget.ranges import objection_at_the_bad_end, objection_at_the_good_end
from hbmtwin.sim.catalog import device, devices, model, models
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.fit.fit import fit
from hbmtwin.sim.fit.options import FitError, FitOptions, check_options
from hbmtwin.sim.fit.question import ask
from hbmtwin.sim.phrases import LANGUAGES, Said
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.sim.sizes import parse_bytes, parse_count

GIB = 1 << 30

SCENARIOS = [
    {},
    {"model.name": "llama-3.1-8b", "engine.max_model_len": 131_072},
    {"model.name": "llama-3.1-8b", "device.name": "a100-80gb", "engine.tensor_parallel_size": 2},
    {"model.name": "llama-2-70b", "device.name": "ascend-910b2", "engine.pipeline_parallel_size": 4},
    {"model.name": "gemma-2-27b", "device.name": "a100-80gb", "scheduler.max_num_batched_tokens": 8192},
    {"model.name": "bamba-9b", "device.name": "a100-80gb", "kv_cache.enable_prefix_caching": True},
    {"device.memory_bytes": 20 * GIB, "device.other_tenant_bytes": 1 * GIB, "kv_cache.dtype": "int8"},
    {"memory.activation_bytes": 3 * GIB, "scheduler.enable_chunked_prefill": False},
    {"model.name": "qwen3-8b", "device.name": "ascend-910b2", "kv_cache.block_size": 256, "kv_cache.policy": "paged"},
]


@pytest.mark.parametrize("keys", SCENARIOS)
def test_fit_on_a_scenario_is_the_budget_that_run_plans_with(keys: dict[str, Any], tmp_path: Path) -> None:
    scenario = Scenario.of(keys)
    file = tmp_path / "scenario.toml"
    file.write_text(scenario.to_toml(), encoding="utf-8")
    found = fit(scenario=file).budget
    try:
        planned = ServerPlan(scenario).budget
    except DoesNotFit as refusal:
        planned = refusal.budget
    assert found.lines == planned.lines
    assert (found.fits, found.num_blocks, found.kv_tokens, found.stage, found.groups) == (
        *(planned.fits, planned.num_blocks, planned.kv_tokens, planned.stage, planned.groups),
    )
    assert planned.reason.startswith(found.reason)


def test_it_is_a_public_name_and_takes_names_or_records() -> None:
    by_name = hbmtwin.fit("llama-2-7b", "ascend-910b4")
    by_record = hbmtwin.fit(model("llama-2-7b"), device("ascend-910b4"))
    by_keyword = fit(model="llama-2-7b", device="ascend-910b4")
    assert by_name.to_dict() == by_keyword.to_dict()
    assert by_name.budget == by_record.budget
    assert json.loads(json.dumps(by_record.to_dict("zh"))) == by_record.to_dict("zh")
    changed: Any = by_name
    with pytest.raises(FrozenInstanceError):
        changed.may_start = True


def test_every_option_can_be_given_and_is_told_as_given() -> None:
    answer = fit(
        model="qwen3-30b-a3b",
        device="h100-80gb",
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=2,
        enable_expert_parallel=True,
        max_model_len=8192,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        gpu_memory_utilization=0.85,
        block_size=32,
        kv_cache_dtype="fp8",
        dtype="bfloat16",
        quantization="fp8",
        enable_prefix_caching=False,
        enable_chunked_prefill=True,
        enforce_eager=True,
        num_speculative_tokens=2,
        other_tenant_bytes=GIB,
    )
    q = answer.question
    assert (q.ranks.tensor, q.ranks.pipeline, q.ranks.data, q.ranks.expert) == (2, 2, 2, True)
    assert (q.max_model_len, q.max_num_seqs, q.max_num_batched_tokens, q.block_size) == (8192, 64, 4096, 32)
    assert (q.gpu_memory_utilization, q.enforce_eager, q.num_speculative_tokens) == (0.85, True, 2)
    assert q.layout.dtype.bits == 8
    assert q.model.quantization is not None
    assert all(argument.origin == "given" for argument in answer.arguments if argument.name != "engine")


def test_quantised_weights_are_smaller_by_their_bits() -> None:
    sizes = {
        method: fit("llama-3.1-8b", "h100-80gb", **({"quantization": method} if method else {})).budget.weights_bytes
        for method in ("", "fp8", "awq")
    }
    assert 0.5 < sizes["fp8"] / sizes[""] < 0.6  # embedding and head stay in 16 bits
    assert 0.3 < sizes["awq"] / sizes[""] < 0.4


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("weights_bytes", 0, "--weights-bytes: from 1 to 17592186044416, not 0"),
        ("data_parallel_size", 10**11, "--data-parallel-size: from 1 to 1048576, not 100000000000"),
        ("num_speculative_tokens", 10**11, "--num-speculative-tokens: from 0 to 1048576, not 100000000000"),
        ("max_model_len", 10**14, "--max-model-len: from 1 to 17592186044416, or auto for as long as fits, not 1000"),
    ],
)
def test_a_slip_of_the_unit_is_told_with_both_ends(option: str, value: int, told: str) -> None:
    with pytest.raises(FitError, match=told):
        check_options({option: value})


def test_unknown_names_are_told_with_the_nearest() -> None:
    with pytest.raises(FitError, match=r"--max-num-sequences: no such option; did you mean --max-num-seqs\?"):
        check_options({"max_num_sequences": 4})
    with pytest.raises(CatalogError, match=r"did you mean 'ascend-910b4'"):
        fit("llama-2-7b", "ascend-910b5x")
    with pytest.raises(FitError, match="--quantization: unknown quantization 'awk': did you mean 'awq'"):
        fit("deepseek-r1", "h200", quantization="awk", tensor_parallel_size=8)


def test_what_no_kernel_runs_is_told_with_the_changes_that_make_it_run() -> None:
    answer = fit("deepseek-r1", "ascend-910c", tensor_parallel_size=16)
    assert answer.budget.fits
    assert not answer.fits
    assert "does not compute in FP8" in str(answer.reason)
    assert [dict(advice.settings) for advice in answer.advice] == [{"quantization": "ascend"}]
    again = fit("deepseek-r1", "ascend-910c", tensor_parallel_size=16, quantization="ascend")
    assert again.fits
    assert again.budget.kv_tokens == answer.advice[0].budget.kv_tokens
    assert "planned is one that is quantised as ascend" in str(again.warnings[0])
    cache = fit("llama-2-7b", "ascend-910b4", kv_cache_dtype="fp8")
    assert [dict(advice.settings) for advice in cache.advice] == [{"kv_cache_dtype": "auto"}]
    assert fit("llama-2-7b", "ascend-910b4", kv_cache_dtype="auto").fits


def test_the_options_are_all_on_the_command_line() -> None:
    import inspect

    from hbmtwin.cli.fit import fit as verb

    assert set(FitOptions.__annotations__) - set(inspect.signature(verb).parameters) == set()


# -- ranges ------------------------------------------------------------------------------------------------------------


def test_the_ends_of_the_ranges() -> None:
    for length, starts, bad, good in (
        (32_768, True, False, False),  # starts, whatever
        (96_256, True, True, False),  # by the figures only
        (96_384, False, True, False),  # not by the figures, at the good end
        (131_072, False, True, True),  # in no case
    ):
        q = ask({"model": "llama-3.1-8b", "device": "ascend-910b4", "max_model_len": length}).question
        b = budget_of(q)
        assert b.fits is starts
        assert (objection_at_the_bad_end(q, b) is not None) is bad
        assert (objection_at_the_good_end(q, b) is not None) is good
    answer = fit("llama-3.1-8b", "ascend-910b4", max_model_len=96_384)
    assert answer.may_start
    assert not answer.fits
    low, high = answer.num_blocks_range
    assert low < answer.budget.num_blocks < high


def test_planted_a_range_that_is_read_from_the_wrong_end_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("hbmtwin.sim.budget.ranges")
    honest = module._at
    monkeypatch.setattr(module, "_at", lambda b, held, rest: honest(b, rest, held))
    with pytest.raises(AssertionError):
        test_the_ends_of_the_ranges()


# -- words -------------------------------------------------------------------------------------------------------------


def test_a_finding_with_braces_is_told_as_it_is() -> None:
    from hbmtwin.kernels.capabilities import CapabilityFinding
    from hbmtwin.sim.fit.kernels import said

    finding = CapabilityFinding("k", "dtype", True, "a {set} of 2", "集合 {set}", "here")
    assert [said(finding).text(lang) for lang in LANGUAGES] == ["dtype: a {set} of 2", "dtype：集合 {set}"]
    assert isinstance(said(finding), Said)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("32768", 32_768), ("32k", 32_000), ("32K", 32_768), ("25.6k", 25_600), ("1m", 10**6), ("2M", 1 << 21)],
)
def test_tokens_in_vllms_short_forms(text: str, tokens: int) -> None:
    assert parse_count(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "1.5", "1.5K", "32kk", "-4", "0.0001k", "1e3"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ValueError, match="whole number"):
        parse_count(text)


def test_bytes_with_units() -> None:
    assert parse_bytes("8.11GiB") == 8_708_046_192
    assert parse_bytes("1GB") == 10**9


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(models()),
    "device": st.sampled_from(devices()),
    "engine": st.sampled_from(["vllm", "vllm-ascend", "sglang", "mindie", "tensorrt-llm"]),
    "engine_version": st.sampled_from(["0.6", "0.18", "V0", "abc", ""]),
    **{f"{way}_parallel_size": st.sampled_from([1, 2, 3, 8, 100]) for way in ("tensor", "pipeline", "data")},
    "max_model_len": st.sampled_from([-1, 1, 7, 4096, 2**40]),
    "max_num_seqs": st.sampled_from([1, 1024, 10**6]),
    "max_num_batched_tokens": st.sampled_from([1, 2048, 10**6]),
    "gpu_memory_utilization": st.sampled_from([0.01, 0.9, 1.0]),
    "mem_fraction_static": st.sampled_from([0.1, 0.9]),
    "free_gpu_memory_fraction": st.sampled_from([0.1, 0.9]),
    "npu_mem_size": st.sampled_from([-1, 4, 1.5, 0, -3]),
    "block_size": st.sampled_from([1, 7, 128, 10**6, 2**40]),
    "kv_cache_dtype": st.sampled_from(["auto", "fp8", "int8", "int4_per_token_head"]),
    "quantization": st.sampled_from(["fp8", "ascend", "awq", "gptq"]),
    "num_speculative_tokens": st.sampled_from([0, 1, 1000]),
    **{name: st.booleans() for name in ("enable_expert_parallel", "enable_prefix_caching", "enforce_eager")},
    **{
        name: st.sampled_from([0, 1, GIB, 64 * GIB])
        for name in FitOptions.__annotations__
        if name.endswith(("_bytes", "_override", "_per_token"))
    },
    **{name: st.sampled_from([1, 7, 64]) for name in ("num_layers", "num_kv_heads", "head_dim")},
}


@settings(deadline=None)  # a large model is loaded once, block by block
@given(st.fixed_dictionaries({}, optional=VALUES), st.sampled_from([60, 140]))
def test_whatever_is_asked_is_answered_or_refused_in_a_sentence(options: dict[str, Any], width: int) -> None:
    try:
        answer = fit(**options)
    except (FitError, CatalogError):  # any other error is one of ours
        return
    assert sum(line.bytes for line in answer.budget.lines) == answer.question.device.memory_bytes
    assert answer.fits is (answer.reason is None)
    for lang in LANGUAGES:
        console = Console(width=width, file=io.StringIO(), highlight=False)
        FitScreen(console, lang).show(answer)
        assert json.loads(json.dumps(answer.to_dict(lang), allow_nan=False))["fits"] is answer.fits


def warned(**options: Any) -> str:
    return " | ".join(map(str, fit(**options).warnings))


def test_what_is_to_be_known_beside_the_verdict() -> None:
    tight = warned(model="llama-2-7b", device="ascend-910b4", gpu_memory_utilization=0.96)
    assert re.search(r"outside the plan 0\.\d\d GiB to 1\.09 GiB are left; .* of at most 0\.95 leaves more", tight)
    null = warned(model="llama-3.1-8b", device="ascend-910b4", max_model_len=96_256)
    assert "of 752 blocks one is the engine's null block; shorten max_model_len to 96,128" in null
    assert "null block" not in warned(model="llama-3.1-8b", device="ascend-910b4", max_model_len=-1)
    forced = fit(model="llama-2-7b", device="ascend-910b4", block_size=64)
    assert forced.question.block_size == 128
    assert any("block_size" in str(warning) and "128" in str(warning) for warning in forced.warnings)
    assert warned(model="llama-2-7b", device="ascend-910b4") == ""
