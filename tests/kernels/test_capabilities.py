"""The capability table: every row can hold and says so in both languages, and known cases come out as published."""

from __future__ import annotations

import re
from dataclasses import replace
from string import Formatter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.capabilities import CapabilityFinding, capability_findings
from hbmtwin.kernels.capability_rows import ROWS
from hbmtwin.kernels.capability_use import FAMILIES, places, use_of
from hbmtwin.kernels.records import DeviceSpec, ModelShape, Quantization

MODEL = ModelShape("some-8b", 32, 4096, 14336, 32, 8, 128, 128256, 131072)
LATENT = replace(MODEL, name="latent", head_dim=192, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64)
WINDOWS = replace(MODEL, name="windows", layer_windows=(4096,) * 32)

FP8 = Quantization(method="fp8", weight_bits=8, weight_type="float", activation_bits=8)
W8A8 = Quantization(method="ascend", weight_bits=8, activation_bits=8)
AWQ = Quantization(method="awq", weight_bits=4, group_size=128)
GPTQ = Quantization(method="gptq", weight_bits=4, group_size=128)
MXFP4 = Quantization(method="gpt_oss_mxfp4", weight_bits=4, weight_type="float", group_size=32)
INT8 = Quantization(method="compressed-tensors", weight_bits=8, activation_bits=8)


def on(family: str) -> DeviceSpec:
    vendor = FAMILIES[family].vendor if family in FAMILIES else "ascend"
    return DeviceSpec(f"a {family}", vendor, 1 << 35, 1e12, 1e14, 0.5, 0.5, 0.5, 0, 0, 0, family=family)


def findings(family: str, model: ModelShape = MODEL, **settings: Any) -> tuple[CapabilityFinding, ...]:
    return capability_findings(on(family), model, **settings)


def keys(family: str, model: ModelShape = MODEL, **settings: Any) -> list[str]:
    """Names of what is refused, and in brackets of what is to be known."""
    found = findings(family, model, **settings)
    return [finding.key if finding.refused else f"({finding.key})" for finding in found]


# -- known cases ------------------------------------------------------------------------------------------------------

CASES: list[tuple[str, ModelShape, dict[str, Any], list[str]]] = [
    # a usual model on usual devices
    *((family, MODEL, {"engine": "vllm"}, []) for family in ("ampere", "ada", "hopper", "blackwell_rtx")),
    *((family, MODEL, {"engine": "vllm-ascend"}, []) for family in ("a2", "a3")),
    ("310p", MODEL, {"engine": "vllm-ascend", "dtype": "float16"}, []),
    ("310p", MODEL, {"engine": "vllm-ascend"}, ["(maybe_bf16)"]),
    ("310p", MODEL, {"engine": "vllm-ascend", "dtype": "bfloat16"}, ["no_bf16"]),
    ("910a", MODEL, {"engine": "mindie", "dtype": "float16"}, ["(910a_attention)"]),
    ("910a", MODEL, {"engine": "vllm-ascend", "dtype": "float16"}, ["910a_engine", "(910a_attention)"]),
    ("910a", MODEL, {"dtype": "bfloat16"}, ["(910a_attention)", "no_bf16"]),
    ("ampere", MODEL, {"engine": "mindie"}, ["nvidia_engine"]),
    ("hopper", MODEL, {"engine": "vllm-ascend"}, ["nvidia_engine"]),
    ("a2", MODEL, {"engine": "tensorrt-llm"}, ["ascend_engine"]),
    # weights
    *((f, replace(MODEL, quantization=FP8), {"dtype": "float16"}, ["fp8_weights_npu"]) for f in ("a2", "a3", "310p")),
    ("ampere", replace(MODEL, quantization=FP8), {"engine": "vllm"}, ["(fp8_weights_ampere)"]),
    *((f, replace(MODEL, quantization=FP8), {"engine": "vllm"}, []) for f in ("ada", "hopper")),
    *((f, replace(MODEL, quantization=W8A8), {"engine": "vllm-ascend"}, []) for f in ("a2", "a3")),
    ("310p", replace(MODEL, quantization=W8A8), {"engine": "vllm-ascend", "dtype": "float16"}, []),
    ("a2", replace(MODEL, quantization=W8A8), {"engine": "vllm-ascend", "dtype": "float16"}, ["(w8a8_float16)"]),
    ("ampere", replace(MODEL, quantization=W8A8), {"engine": "vllm"}, ["ascend_weights_cuda"]),
    *((f, replace(MODEL, quantization=INT8), {}, []) for f in ("a2", "ampere", "hopper")),
    ("a2", replace(MODEL, quantization=AWQ), {"engine": "vllm-ascend"}, ["(awq_npu)"]),
    ("310p", replace(MODEL, quantization=AWQ), {"engine": "vllm-ascend", "dtype": "float16"}, ["awq_310p"]),
    ("a3", replace(MODEL, quantization=GPTQ), {"engine": "vllm-ascend"}, ["gptq_npu"]),
    ("a3", replace(MODEL, quantization=GPTQ), {"engine": "sglang"}, []),
    *((f, replace(MODEL, quantization=q), {"engine": "vllm"}, []) for f in ("ampere", "ada") for q in (AWQ, GPTQ)),
    ("a2", replace(MODEL, quantization=MXFP4), {"engine": "vllm-ascend"}, ["fp4_weights_npu"]),
    ("ampere", replace(MODEL, quantization=MXFP4), {"engine": "vllm"}, []),
    # the cache on an NPU
    *((f, MODEL, {"kv_cache_dtype": "fp8"}, ["fp8_kv_npu"]) for f in ("a2", "a3")),
    ("a2", MODEL, {"kv_cache_dtype": "int8"}, ["(long_query_npu)"]),
    *(
        ("a2", MODEL, {"kv_cache_dtype": "int8", "enable_prefix_caching": p, "enable_chunked_prefill": c}, told)
        for p, c, told in [
            (True, False, ["(long_query_npu)"]),
            (False, True, ["(long_query_npu)"]),
            (False, False, []),
        ]
    ),
    ("a2", MODEL, {"kv_cache_dtype": "int8", "paged": False}, []),
    (
        *("a3", MODEL, {"kv_cache_dtype": "int8", "engine": "vllm-ascend"}),
        ["(long_query_npu)", "(int8_by_checkpoint)"],
    ),
    ("a2", MODEL, {"kv_cache_dtype": "int4"}, ["int4_paged_npu"]),
    ("a2", MODEL, {"kv_cache_dtype": "int4_per_token_head"}, ["int4_paged_npu"]),
    ("a2", MODEL, {"kv_cache_dtype": "int4", "paged": False}, []),
    ("310p", MODEL, {"kv_cache_dtype": "int4", "paged": False, "dtype": "float16"}, ["int4_310p", "(gqa_310p)"]),
    ("310p", MODEL, {"kv_cache_dtype": "int8", "dtype": "float16", "engine": "vllm-ascend"}, ["quantised_310p"]),
    ("310p", MODEL, {"kv_cache_dtype": "int8", "dtype": "float16"}, ["(long_query_npu)"]),
    ("310p", MODEL, {"kv_cache_dtype": "bfloat16", "dtype": "float16"}, ["bf16_kv"]),
    ("a2", MODEL, {"v_dtype": "int8"}, ["apart_npu"]),
    ("a2", MODEL, {"v_dtype": "int8", "paged": False}, []),
    ("a2", MODEL, {"v_dtype": "float16"}, []),
    # the cache on CUDA
    ("hopper", MODEL, {"engine": "vllm", "kv_cache_dtype": "fp8"}, []),
    ("ada", MODEL, {"engine": "vllm", "kv_cache_dtype": "fp8_per_token_head"}, []),
    *(
        ("ampere", MODEL, {"engine": "vllm", "kv_cache_dtype": kv}, ["(fp8_kv_ampere)"])
        for kv in ("fp8", "fp8_e4m3", "fp8_e5m2")
    ),
    ("ampere", MODEL, {"engine": "vllm", "kv_cache_dtype": "fp8_per_token_head"}, ["fp8_head_ampere"]),
    ("ampere", MODEL, {"engine": "vllm", "kv_cache_dtype": "int8_per_token_head"}, []),
    *(
        ("ampere", replace(MODEL, head_dim=size), {"engine": "vllm", "kv_cache_dtype": "fp8"}, ["fp8_head_dim_ampere"])
        for size in (96, 512)
    ),
    ("ampere", LATENT, {"engine": "vllm", "kv_cache_dtype": "fp8"}, ["latent_ampere"]),
    ("hopper", LATENT, {"engine": "vllm", "kv_cache_dtype": "fp8"}, []),
    ("ada", LATENT, {"engine": "vllm", "kv_cache_dtype": "int8_per_token_head"}, ["latent_cuda"]),
    ("blackwell_rtx", LATENT, {"engine": "vllm", "kv_cache_dtype": "int8_per_token_head"}, ["latent_cuda"]),
    ("hopper", LATENT, {"engine": "vllm", "kv_cache_dtype": "fp8_e5m2"}, ["latent_cuda"]),
    (
        *("hopper", replace(MODEL, quantization=FP8), {"engine": "vllm", "kv_cache_dtype": "fp8_e5m2"}),
        ["e5m2_weights_cuda"],
    ),
    ("ada", MODEL, {"kv_cache_dtype": "int8"}, ["npu_dtype_cuda"]),
    ("ada", MODEL, {"kv_cache_dtype": "int8", "paged": False}, ["(npu_dtype_notes_cuda)"]),
    ("hopper", MODEL, {"v_dtype": "fp8"}, ["apart_cuda"]),
    # on a CPU
    ("cpu", MODEL, {"engine": "vllm-cpu"}, []),
    *(("cpu", MODEL, {"kv_cache_dtype": kv}, ["quantised_cpu"]) for kv in ("fp8", "int8")),
    # shapes
    ("a2", LATENT, {"engine": "vllm-ascend"}, []),
    ("a2", replace(LATENT, kv_lora_rank=256, qk_rope_head_dim=32), {}, ["latent_size_npu"]),
    *(("a2", LATENT, {"kv_cache_dtype": kv}, ["latent_npu"]) for kv in ("fp8", "int8")),
    ("310p", LATENT, {"dtype": "float16"}, ["latent_310p"]),
    ("a2", replace(MODEL, head_dim=80), {}, []),
    ("a2", replace(MODEL, head_dim=100), {}, ["head_dim_npu"]),
    ("a2", replace(MODEL, head_dim=1024), {}, ["head_dim_npu"]),
    ("a2", replace(MODEL, head_dim=80), {"kv_cache_dtype": "int8"}, ["head_dim_npu"]),
    ("a2", replace(MODEL, head_dim=96), {"v_dtype": "int4", "paged": False}, ["head_dim_npu"]),
    ("a2", replace(MODEL, num_attention_heads=64, num_kv_heads=1), {}, []),
    ("a2", replace(MODEL, num_attention_heads=80, num_kv_heads=1), {}, ["queries_per_kv_npu"]),
    ("310p", replace(MODEL, head_dim=256), {"dtype": "float16", "engine": "vllm-ascend"}, []),
    ("310p", replace(MODEL, head_dim=320), {"dtype": "float16", "engine": "vllm-ascend"}, ["head_dim_310p"]),
    ("310p", MODEL, {"dtype": "float16", "paged": False}, ["(gqa_310p)"]),
    ("310p", replace(MODEL, num_kv_heads=32), {"dtype": "float16", "paged": False}, []),
    ("310p", WINDOWS, {"dtype": "float16", "engine": "vllm-ascend"}, ["(window_310p)"]),
    ("a2", WINDOWS, {"engine": "vllm-ascend"}, []),
    # blocks
    ("a2", MODEL, {"engine": "vllm-ascend", "block_size": 128}, []),
    ("a2", MODEL, {"engine": "vllm-ascend", "block_size": 64}, ["(block_size_npu)"]),
    *(
        (family, MODEL, {"engine": "vllm-ascend", "dtype": "float16", "block_size": size, **OFF}, told)
        for OFF in [{"enable_prefix_caching": False, "enable_chunked_prefill": False}]
        for family, size, told in [("a2", 64, ["block_unit_npu"]), ("a2", 256, []), ("310p", 64, [])]
    ),
    ("hopper", MODEL, {"engine": "vllm", "block_size": 48}, []),
    ("hopper", MODEL, {"engine": "vllm", "block_size": 8}, ["block_unit_cuda"]),
]


@pytest.mark.parametrize(("family", "model", "settings", "told"), CASES)
def test_what_is_told(family: str, model: ModelShape, settings: dict[str, Any], told: list[str]) -> None:
    assert keys(family, model, **settings) == told


def test_every_row_is_told_in_a_case() -> None:
    told = {key.strip("()") for *_, keys in CASES for key in keys}
    assert {row.key for row in ROWS} == told


# -- the table ---------------------------------------------------------------------------------------------------------


def test_rows_have_names_of_their_own_and_sources() -> None:
    assert len({row.key for row in ROWS}) == len(ROWS)
    for row in ROWS:
        assert row.source.strip()
        assert row.families
        assert set(row.families) <= set(FAMILIES)
        assert row.engines == () or set(row.engines) <= {"vllm", "vllm-ascend", "sglang", "mindie", "tensorrt-llm"}


def test_both_languages_have_the_same_places_and_numbers() -> None:
    def places_of(text: str) -> set[str]:
        return {name for _, name, _, _ in Formatter().parse(text) if name}

    for row in ROWS:
        assert places_of(row.en) == places_of(row.zh), row.key
        assert re.search(r"[一-鿿]", row.zh), row.key
        assert not re.search(r"[^\x00-\x7f]", row.en), row.key


def test_places_are_filled_for_every_family() -> None:
    for family in FAMILIES:
        use = use_of(
            *(on(family), MODEL),
            engine="vllm",
            dtype="auto",
            kv_cache_dtype="auto",
            v_dtype=None,
            paged=True,
            long_query=True,
            block_size=None,
        )
        for row in ROWS:
            for text in (row.en, row.zh):
                assert "{" not in text.format(**places(use, "auto", ()))


def test_a_refusal_names_the_setting_and_the_cure() -> None:
    (refused,) = findings("a2", kv_cache_dtype="fp8_e4m3")
    assert refused == CapabilityFinding(
        *("fp8_kv_npu", "kv_cache_dtype", True),
        "'fp8_e4m3': Atlas A2 has no FP8; use one of int8, int8_per_token, int8_per_token_head",
        "'fp8_e4m3'：Atlas A2 不支持 FP8；可用 int8, int8_per_token, int8_per_token_head",
        "asc 8102: fp8 and fp8_e5m2 crash on a 910B2",
    )
    (refused,) = findings("a2", kv_cache_dtype="fp8_e4m3", engine="vllm-ascend")  # whose option has no int8
    assert refused.en == "'fp8_e4m3': Atlas A2 has no FP8; use one of auto, float16, bfloat16"
    (refused,) = findings("a3", replace(MODEL, head_dim=80), v_dtype="fp8")
    assert refused.setting == "v_dtype"
    assert refused.en.endswith("use one of auto, float16, bfloat16")


def test_of_a_refused_setting_one_reason_is_told_and_no_warning() -> None:
    narrow = replace(MODEL, head_dim=96)
    assert keys("310p", narrow, kv_cache_dtype="int4", dtype="float16") == ["head_dim_npu"]
    assert keys("a2", kv_cache_dtype="int4", engine="vllm-ascend") == ["int4_paged_npu"]


KV_DTYPES = (
    *("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "int8", "int8_per_token", "int4"),
    *("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "int4_per_token"),
)


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    engine=st.sampled_from(["", "vllm", "vllm-ascend", "sglang", "mindie", "tensorrt-llm"]),
    model=st.sampled_from([MODEL, LATENT, WINDOWS, replace(MODEL, num_kv_heads=32)]),
    head_dim=st.sampled_from([64, 80, 96, 100, 128, 256, 512, 1024]),
    quantization=st.sampled_from([None, FP8, W8A8, AWQ, GPTQ, MXFP4, INT8]),
    dtype=st.sampled_from(["auto", "float16", "bfloat16"]),
    kv=st.sampled_from(KV_DTYPES),
    v=st.sampled_from([None, *KV_DTYPES]),
    paged=st.booleans(),
    caching=st.booleans(),
    block_size=st.sampled_from([None, 8, 16, 64, 128, 256]),
)
def test_what_is_proposed_instead_goes(
    family: str,
    engine: str,
    model: ModelShape,
    head_dim: int,
    quantization: Quantization | None,
    dtype: str,
    kv: str,
    v: str | None,
    paged: bool,
    caching: bool,
    block_size: int | None,
) -> None:
    shape = replace(model, head_dim=head_dim, quantization=quantization)
    asked: dict[str, Any] = {
        "engine": engine,
        "dtype": dtype,
        "paged": paged,
        "block_size": block_size,
        "enable_prefix_caching": caching,
        "enable_chunked_prefill": caching,
    }
    found = findings(family, shape, kv_cache_dtype=kv, v_dtype=v, **asked)
    refused = [finding.setting for finding in found if finding.refused]
    assert len(set(refused)) == len(refused)
    assert not {finding.setting for finding in found if not finding.refused} & set(refused)
    for finding in found:
        assert "{" not in finding.en + finding.zh
        if finding.setting in ("kv_cache_dtype", "v_dtype") and "use one of " in finding.en:
            for name in finding.en.rpartition("use one of ")[2].split(", "):
                again = findings(family, shape, kv_cache_dtype=name, **asked)
                assert not any(f.refused and f.setting == "kv_cache_dtype" for f in again), (finding, name)


def test_an_unknown_family_is_refused_and_nothing_is_known_of_none() -> None:
    assert capability_findings(replace(on("a2"), family=""), MODEL, kv_cache_dtype="fp8") == ()
    with pytest.raises(ValueError, match=r"a tpu: unknown family 'tpu'; give the device one of 910a, 310p, a2"):
        findings("tpu")
