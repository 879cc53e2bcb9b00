"""Engines: which rules a version has, what is the default, and how each divides a device, in literal numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.records import DeviceSpec
from hbmtwin.sim.catalog import device, model
from hbmtwin.sim.engines import (
    ENGINES,
    GIB,
    MIB,
    Account,
    EngineArgs,
    EngineRules,
    engine_rules,
    rules_for,
    settings_of,
)
from hbmtwin.sim.engines.settings import BatchRule

LLAMA, GRANITE, GEMMA = model("llama-3.1-8b"), model("granite-4.0-h-micro"), model("gemma-2-9b")
H100, A100, RTX = device("h100-80gb"), device("a100-80gb"), device("rtx-3090")
B2, B4, C, P310 = device("ascend-910b2"), device("ascend-910b4"), device("ascend-910c"), device("ascend-310p")


# Which rules


@pytest.mark.parametrize(
    ("engine", "version", "profile"),
    [
        ("vllm", None, "0.21"),
        ("vllm", "main", "0.21"),
        ("vllm", "0.27.1", "0.21"),
        ("vllm", "v0.21.0rc1", "0.21"),
        ("vllm", "0.20.2", "0.19"),
        ("vllm", "0.18.0", "0.18"),
        ("vllm", "0.17", "0.17"),
        ("vllm", "0.16.0+cu129", "0.12"),
        ("vllm", "0.11", "0.11"),
        ("vllm", "0.10.2", "0.8"),
        ("vllm", "vllm 0.8.5", "0.8"),
        ("vllm", "0.7.3", "V0"),
        ("vllm", "0.5.4", "V0"),
        ("vllm", "0.9.1 with V0", "V0"),
        ("vllm", "V0", "V0"),
        ("vllm", "1.0", "0.21"),
        ("vllm-ascend", "0.9.1", "0.7"),
        ("vllm-ascend", "0.20.2rc1", "0.18"),
        ("vllm-ascend", "0.21", "0.21"),
        ("mindie", "1.0.RC3", "1.0"),
        ("mindie", "2.1RC1", "2.0"),
        ("sglang", "0.5.23", "0.5"),
        ("sglang", "0.3", "0.5"),
        ("tensorrt-llm", "1.2", "1.0"),
    ],
)
def test_a_version_has_the_rules_of_the_newest_profile_that_is_not_above(
    engine: str, version: str | None, profile: str
) -> None:
    assert engine_rules(engine, version).version == profile


def test_profiles_go_from_the_oldest_to_the_newest_and_name_their_sources() -> None:
    for name, profiles in ENGINES.items():
        assert [p.since for p in profiles] == sorted(p.since for p in profiles)
        for profile in profiles:
            assert profile.engine == name
            assert {"activations", "non_torch", "late", "graphs", "no_graphs", "sampler"} <= set(profile.sources)


def test_an_engine_is_chosen_by_device_and_refused_by_name() -> None:
    assert (rules_for(H100).engine, rules_for(B4).engine) == ("vllm", "vllm-ascend")
    assert rules_for(B4, "mindie", "1").fraction == 0.8
    assert rules_for(device("cpu")).engine == "vllm-cpu"
    with pytest.raises(ValueError, match="vllm does not serve on cpu; use one of vllm-cpu"):
        rules_for(device("cpu"), "vllm")
    with pytest.raises(ValueError, match="'vlm' is not known; did you mean 'vllm'"):
        engine_rules("vlm")
    with pytest.raises(ValueError, match="vllm does not serve on ascend-910b4; use one of vllm-ascend, sglang, mindie"):
        rules_for(B4, "vllm")
    with pytest.raises(ValueError, match="mindie does not serve on h100-80gb; use one of vllm, sglang, tensorrt-llm"):
        rules_for(H100, "mindie")


# How the device is divided


ACCOUNT = Account(
    total=1_000_000_001, tenants=100, fraction=0.9, context=50, weights=400, activations=30, non_torch=20, graphs=10
)


def test_vllm_takes_a_share_of_the_total_rounded_up_and_ascend_down() -> None:
    assert engine_rules("vllm").divide(ACCOUNT) == (900_000_001, 900_000_001 - 460, 0)
    assert engine_rules("vllm-ascend").divide(ACCOUNT) == (900_000_000, 900_000_000 - 460, 0)
    assert engine_rules("mindie").divide(ACCOUNT) == (900_000_000, 900_000_000 - 460, 0)


def test_vllm_on_a_cpu_divides_as_on_cuda_captures_nothing_and_has_defaults_of_its_own() -> None:
    cpu = device("cpu")
    rules = rules_for(cpu)
    assert rules.divide(ACCOUNT._replace(graphs=0)) == (900_000_001, 900_000_001 - 450, 0)
    s = settings_of(rules, LLAMA, cpu, EngineArgs(max_model_len=4096))
    assert (s.max_num_batched_tokens, s.max_num_seqs, s.block_size, s.enforce_eager) == (2048, 128, 128, True)


def test_310p_keeps_half_for_operators() -> None:
    rules = rules_for(P310)
    assert rules.divide(ACCOUNT) == (900_000_000, 449_999_770, 449_999_770)
    assert rules.divide(ACCOUNT._replace(weights=401)) == (900_000_000, 449_999_769, 449_999_770)
    short = rules.divide(ACCOUNT._replace(weights=900_000_000))
    assert (short.kv, short.kept) == (-60, 0)
    assert rules_for(P310, "mindie").divide(ACCOUNT).kept == 0


def test_sglang_takes_a_share_of_what_is_free_and_charges_weights_only() -> None:
    # 1,000,000,001 - 150 are free; a tenth of that, rounded up, stays free.
    free = 999_999_851
    assert engine_rules("sglang").divide(ACCOUNT) == (free - 99_999_986, free - 99_999_986 - 400, 0)


def test_tensorrt_llm_takes_a_fraction_of_what_is_left() -> None:
    left = 999_999_851 - 460
    assert engine_rules("tensorrt-llm").divide(ACCOUNT) == (999_999_851, math.floor(0.9 * left), 0)
    assert engine_rules("tensorrt-llm").divide(ACCOUNT._replace(weights=1 << 40)).kv < 0


@given(
    engine=st.sampled_from(sorted(ENGINES)),
    fraction=st.floats(0.01, 1.0),
    sizes=st.lists(st.integers(0, 10**9), min_size=5, max_size=5),
    more=st.integers(0, 10**9),
)
def test_whatever_takes_more_leaves_no_more_for_kv(engine: str, fraction: float, sizes: list[int], more: int) -> None:
    account = Account(10**10, 0, fraction, *sizes)
    kv = engine_rules(engine).divide(account).kv
    for field in ("tenants", "context", "weights", "activations", "non_torch", "graphs"):
        assert engine_rules(engine).divide(account._replace(**{field: getattr(account, field) + more})).kv <= kv
    assert kv <= account.total


# What is the default


def defaults(on: DeviceSpec, rules: EngineRules) -> tuple[float, int, int, int]:
    s = settings_of(rules, LLAMA, on, EngineArgs())
    return s.gpu_memory_utilization, s.max_num_seqs, s.max_num_batched_tokens, s.block_size


@pytest.mark.parametrize(
    ("on", "engine", "version", "expected"),
    [
        (H100, "vllm", None, (0.92, 1024, 8192, 16)),
        (H100, "vllm", "0.19", (0.9, 1024, 8192, 16)),
        (A100, "vllm", None, (0.92, 256, 2048, 16)),
        (RTX, "vllm", None, (0.92, 256, 2048, 16)),
        (H100, "vllm", "0.6", (0.9, 256, 2048, 16)),
        (C, "vllm-ascend", None, (0.92, 256, 2048, 128)),
        (B4, "vllm-ascend", "0.18", (0.9, 256, 2048, 128)),
        (B4, "mindie", None, (0.9, 200, 131_072, 128)),
        (B4, "mindie", "1.0", (0.8, 200, 131_072, 128)),
        (H100, "tensorrt-llm", None, (0.9, 2048, 8192, 32)),
        (RTX, "sglang", None, (0.716, 48, 4096, 1)),
        (H100, "sglang", None, (0.834, 256, 8192, 1)),
        (B4, "sglang", None, (0.774, 16, 4096, 128)),
        (B2, "sglang", None, (0.791, 64, 8192, 128)),
    ],
)
def test_what_an_engine_takes_where_nothing_is_said(
    on: DeviceSpec, engine: str, version: str | None, expected: tuple[float, int, int, int]
) -> None:
    assert defaults(on, rules_for(on, engine, version)) == expected


def test_what_was_said_stands() -> None:
    said = EngineArgs(0.5, 1000, 7, 77, 32, False, False, True)
    for on in (H100, B4):
        for profiles in ENGINES.values():
            if on.vendor not in profiles[-1].vendors:
                continue
            s = settings_of(profiles[-1], LLAMA, on, said)
            assert (s.gpu_memory_utilization, s.max_model_len, s.max_num_seqs) == (0.5, 1000, 7)
            assert (s.max_num_batched_tokens, s.enforce_eager, s.batch_rule) == (77, True, None)
            assert not s.enable_prefix_caching


def test_a_block_on_ascend_has_128_tokens_unless_nothing_needs_it() -> None:
    rules = rules_for(B4)
    assert settings_of(rules, LLAMA, B4, EngineArgs(block_size=16)).block_size == 128
    plain = EngineArgs(block_size=16, enable_prefix_caching=False, enable_chunked_prefill=False)
    assert settings_of(rules, LLAMA, B4, plain).block_size == 16
    assert settings_of(rules, GRANITE, B4, EngineArgs(block_size=64)).block_size == 64


def test_a_batch_holds_a_longest_prompt_where_prompts_are_whole_and_no_more_than_all_sequences() -> None:
    rules = rules_for(H100)
    whole = settings_of(rules, LLAMA, H100, EngineArgs(enable_chunked_prefill=False))
    assert (whole.max_num_batched_tokens, whole.batch_rule) == (131_072, BatchRule(8192))
    short = settings_of(rules, LLAMA, H100, EngineArgs(max_model_len=100, max_num_seqs=4))
    assert (short.max_num_batched_tokens, short.max_num_seqs) == (400, 4)
    # max_num_seqs, not given, is no more than the tokens of a batch.
    assert settings_of(rules, LLAMA, H100, EngineArgs(max_num_batched_tokens=512)).max_num_seqs == 512


@pytest.mark.parametrize(
    ("length", "chunked", "tokens", "is_chunked"),
    [
        (1000, None, 2048, False),
        (20_000, None, 20_000, False),
        (32_768, None, 32_768, False),
        (32_769, None, 2048, True),
        (35_000, None, 2048, True),
        (35_000, False, 35_000, False),
        (20_000, True, 2048, True),
    ],
)
def test_v0_cuts_prompts_by_itself_above_32768(
    length: int, chunked: bool | None, tokens: int, is_chunked: bool
) -> None:
    rules = rules_for(RTX, "vllm", "0.6.6")
    s = settings_of(rules, LLAMA, RTX, EngineArgs(max_model_len=length, enable_chunked_prefill=chunked))
    assert (s.max_num_batched_tokens, s.enable_chunked_prefill) == (tokens, is_chunked)
    assert s.batch_rule is None if chunked else s.batch_rule is not None
    if s.batch_rule is not None:
        assert s.batch_rule.tokens(length) == tokens
    # Not with a window, whose models V0 never cuts by itself.
    windowed = replace(GEMMA, max_position_embeddings=131_072)
    s = settings_of(rules, windowed, RTX, EngineArgs(max_model_len=length, enable_chunked_prefill=chunked))
    assert s.max_num_batched_tokens == (2048 if chunked else max(length, 2048))


def naive_fraction(total_mib: float, chunk: int, tp: int, pp: int, graphs: int) -> float:
    """SGLang's reserve as paged-kv.md words it."""
    kept = 512 + 1.5 * (chunk if chunk > 2048 else 2048)
    kept += tp * pp / 8 * 1024
    kept += 2 * graphs
    if total_mib > 60 * 1024 and kept < 10_240:
        kept = 10_240
    return round((total_mib - kept) / total_mib, 3)


NAIVE_ROWS = {10: (2048, 8, 8), 24: (4096, 48, 160), 48: (4096, 32, 160), 79: (8192, 256, 512), 141: (8192, 256, 512)}
"""By GiB of a CUDA device: chunk, largest captured batch below four ranks and from there on."""


@pytest.mark.parametrize("gib", NAIVE_ROWS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), (4, 1), (8, 1)])
def test_sglangs_default_fraction_by_a_second_reading(gib: int, tp: int, pp: int) -> None:
    on = replace(H100, memory_bytes=gib * GIB)
    s = settings_of(engine_rules("sglang"), LLAMA, on, EngineArgs(tensor_parallel_size=tp, pipeline_parallel_size=pp))
    chunk, few, many = NAIVE_ROWS[gib]
    largest = many if tp >= 4 else few
    assert (s.max_num_batched_tokens, s.max_num_seqs) == (chunk, largest)
    assert s.gpu_memory_utilization == naive_fraction(gib * GIB / MIB, chunk, tp, pp, largest)


def test_an_ascend_device_beyond_64_gib_falls_through_to_the_general_rows() -> None:
    large = settings_of(engine_rules("sglang"), LLAMA, replace(B2, memory_bytes=96 * GIB), EngineArgs())
    assert (large.max_num_batched_tokens, large.max_num_seqs) == (8192, 256)
