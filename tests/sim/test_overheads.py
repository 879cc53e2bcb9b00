"""Overheads: the formulas by a second reading of them, and how far they are from public boot logs."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.records import Experts, ModelShape, Quantization
from hbmtwin.sim.catalog import device, model
from hbmtwin.sim.engines import (
    GIB,
    MIB,
    Ranks,
    activation_peak,
    engine_rules,
    graph_pool,
    late_buffers,
    non_torch,
    rules_for,
    run_time_sampler,
)
from hbmtwin.sim.engines.overheads import captured_graphs

H100, B2, P310 = device("h100-80gb"), device("ascend-910b2"), device("ascend-310p")
LLAMA = model("llama-3.1-8b")
MOE = replace(LLAMA, experts=Experts(num_experts=8, experts_per_token=2, intermediate_size=14_336))
W8A8 = Quantization(method="compressed-tensors", weight_bits=8, activation_bits=8)


def _benchmark() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "overheads.py"
    spec = importlib.util.spec_from_file_location("overheads", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["overheads"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


LOGS = _benchmark()


# Public logs

WORST: dict[str, tuple[int, float, float]] = {
    "activations, dense": (20, 0.01, 0.06),
    "activations, MoE": (6, 0.04, 0.10),
    "activations, image input": (6, 0.07, 0.10),
    "activations, NPU": (1, 0.03, 0.03),
    "graphs, dense": (14, 0.09, 0.17),
    "graphs, image input": (6, 0.16, 0.25),
    "graphs, MoE": (5, 0.20, 0.53),
    "graphs, NPU": (1, 0.15, 0.15),
    "non-torch, several ranks": (7, 0.02, 0.04),
    "non-torch, one rank": (27, 0.08, 1.66),
    "non-torch, NPU": (1, 0.15, 0.15),
    "context": (5, 0.02, 0.06),
    "KV, dense": (14, 0.04, 0.22),
    "KV, MoE": (5, 0.04, 0.08),
    "KV, image input": (5, 0.07, 0.09),
}
"""Points, mean error and worst error in GiB, of each kind."""


def too_far(rows: list[Any]) -> list[str]:
    """The kinds whose errors are larger than told."""
    found = []
    for what, points, size, worst, *_ in LOGS.summary(rows):
        count, most, most_worst = WORST[what]
        assert points == count, what
        if size > most + 0.005 or worst > most_worst + 0.005:
            found.append(what)
    return found


def test_predictions_are_as_near_to_the_logs_as_the_docs_say() -> None:
    rows = list(LOGS.rows())
    assert too_far(rows) == []
    dense = [row for row in rows if row.what == "activations, dense" and not row.outlier]
    assert all(row.within for row in dense)
    assert sum(row.within for row in rows if not row.outlier) / sum(not row.outlier for row in rows) > 0.9


def test_the_page_has_the_errors_of_today() -> None:
    page = (Path(__file__).parents[2] / "docs" / "overheads.md").read_text(encoding="utf-8")
    told = [line for line in page.splitlines() if line.startswith("| ") and line[2:5] != "---"][1:]
    assert told == list(LOGS.table())


def test_another_releases_sampler_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def as_before_0_17(engine: str, version: str | None = None) -> Any:
        rules = engine_rules(engine, version)
        return replace(rules, logits_value_bytes=38) if engine == "vllm" else rules

    monkeypatch.setattr(LOGS, "engine_rules", as_before_0_17)
    assert {"activations, dense", "activations, MoE"} <= set(too_far(list(LOGS.rows())))


def test_logits_shared_over_ranks_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(rules: Any, shape: ModelShape, *args: Any, **more: Any) -> Any:
        words = shape.vocab_size // more["tensor_parallel_size"]
        return activation_peak(rules, replace(shape, vocab_size=words), *args, **more)

    monkeypatch.setattr(LOGS, "activation_peak", shared)
    assert "activations, dense" in too_far(list(LOGS.rows()))


# Activations


def naive_peak(
    m: ModelShape, version: str, *, tp: int, tokens: int, seqs: int, drafts: int, sms: int, ranks: Ranks
) -> float:
    """cost-and-overhead.md section 3, in bytes."""
    b, hidden = m.dtype_bytes, m.hidden_size
    gate = 3 if m.gated_mlp else 2
    k = {"V0": 38, "0.16": 38, "0.27": 14}[version] + (2 if b == 4 else 0)
    inner = 0 if m.experts else m.intermediate_size / tp
    f = b * tokens * (gate * inner + 3.4 * hidden)
    if m.quantization:
        f += tokens * max(inner, hidden)
    z = min(seqs * (1 + drafts), tokens) * m.vocab_size * k + b * tokens * hidden
    if version == "0.27":
        z += 4 * sms * m.vocab_size
    w = 0.0
    if m.experts:
        e = m.experts
        own = e.intermediate_size / (1 if ranks.expert else ranks.tensor * ranks.data)
        w = b * tokens * e.experts_per_token * (hidden + 2 * own)
    return 0.05 * GIB + max(f, z) + w


@given(
    st.data(),
    st.sampled_from(["V0", "0.16", "0.27"]),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(1, 65_536),
    st.integers(1, 2048),
)
def test_the_activation_peak_by_a_second_reading(
    data: st.DataObject, version: str, tp: int, tokens: int, seqs: int
) -> None:
    shape = data.draw(
        st.sampled_from(
            [
                LLAMA,
                MOE,
                replace(LLAMA, gated_mlp=False),
                replace(LLAMA, dtype_bytes=4),
                replace(LLAMA, quantization=W8A8),
                replace(LLAMA, vocab_size=1000),
                replace(MOE, vocab_size=1000),
            ]
        )
    )
    drafts, dp, expert = data.draw(st.integers(0, 4)), data.draw(st.sampled_from([1, 2, 4])), data.draw(st.booleans())
    ranks = Ranks(tp, 1, dp, expert)
    size = activation_peak(
        engine_rules("vllm", version),
        shape,
        H100,
        tensor_parallel_size=tp,
        max_num_batched_tokens=tokens,
        max_num_seqs=seqs,
        num_speculative_tokens=drafts,
        ranks=ranks,
    )
    expected = naive_peak(shape, version, tp=tp, tokens=tokens, seqs=seqs, drafts=drafts, sms=132, ranks=ranks)
    assert size.bytes == pytest.approx(expected, abs=2**20)
    assert size.low <= size.bytes <= size.high


def test_a_mixture_of_experts_has_a_wider_range() -> None:
    def spread(shape: ModelShape) -> float:
        size = activation_peak(
            engine_rules("vllm"),
            shape,
            H100,
            tensor_parallel_size=1,
            max_num_batched_tokens=8192,
            max_num_seqs=1024,
        )
        return (size.high - size.low) / size.bytes

    assert spread(LLAMA) == pytest.approx(0.06)
    assert spread(MOE) == pytest.approx(0.16)


def test_weights_of_four_bits_need_no_workspace_of_experts() -> None:
    def peak(shape: ModelShape) -> int:
        return activation_peak(
            engine_rules("vllm"),
            shape,
            H100,
            tensor_parallel_size=1,
            max_num_batched_tokens=8192,
            max_num_seqs=1024,
        ).bytes

    mxfp4 = Quantization(method="mxfp4", weight_bits=4, weight_type="float", group_size=32)
    assert peak(MOE) - peak(replace(MOE, quantization=mxfp4)) == 2 * 8192 * 2 * (4096 + 2 * 14_336)


# The sampler when the server runs


def test_the_sampler_at_run_time_is_that_of_the_published_peak() -> None:
    qwen = replace(LLAMA, vocab_size=151_936)
    size = run_time_sampler(engine_rules("vllm-ascend"), qwen, max_num_seqs=1024)
    assert size.bytes == 1024 * 151_936 * 12
    assert round(size.bytes / GIB, 3) == 1.739
    # gpt-oss-20b on vLLM 0.19 asked for 786 MiB when its sampler was warmed up.
    oss = run_time_sampler(engine_rules("vllm", "0.19"), replace(LLAMA, vocab_size=201_088), max_num_seqs=1024)
    assert oss.bytes // MIB == 785
    assert run_time_sampler(engine_rules("vllm"), qwen, max_num_seqs=1024).bytes == 0
    assert run_time_sampler(engine_rules("vllm-ascend"), replace(qwen, last_stage=False), max_num_seqs=1024).bytes == 0


def test_drafts_have_rows_of_their_own() -> None:
    rules = engine_rules("vllm-ascend")
    assert (
        run_time_sampler(rules, LLAMA, max_num_seqs=64, num_speculative_tokens=3).bytes
        == run_time_sampler(rules, LLAMA, max_num_seqs=256).bytes
    )


# Graphs


@pytest.mark.parametrize(
    ("engine", "version", "seqs", "tokens", "drafts", "graphs"),
    [
        ("vllm", "0.19", 1024, 8192, 0, 51 + 51),
        ("vllm", None, 256, 2048, 0, 51 + 35),
        ("vllm", None, 1, 2048, 0, 2 + 1),
        ("vllm", None, 64, 256, 0, 19 + 11),
        ("vllm", None, 256, 100, 0, 15 + 15),
        ("vllm", None, 64, 8192, 3, 51 + 35),
        ("vllm", "0.11", 1024, 8192, 0, 67 + 67),
        ("vllm", "0.10", 1024, 8192, 0, 67),
        ("vllm", "V0", 256, 2048, 0, 35),
        ("vllm-ascend", None, 256, 2048, 0, 35),
        ("vllm-ascend", None, 16, 2048, 3, 11),
        ("sglang", None, 256, 8192, 0, 35),
        ("mindie", None, 256, 8192, 0, 0),
    ],
)
def test_how_many_graphs_are_captured(
    engine: str, version: str | None, seqs: int, tokens: int, drafts: int, graphs: int
) -> None:
    found = captured_graphs(
        engine_rules(engine, version),
        LLAMA,
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        num_speculative_tokens=drafts,
    )
    assert found == graphs


@pytest.mark.parametrize(
    ("layers", "ranks", "sizes"),
    [
        (48, Ranks(), 39),  # as logged: asc 2125
        (48, Ranks(4), 12),  # as its own comment computes
        (48, Ranks(4, 1, 2), 7),
        (80, Ranks(), 23),
        (20, Ranks(), 51),
    ],
)
def test_streams_bound_the_sizes_on_ascend(layers: int, ranks: Ranks, sizes: int) -> None:
    shape = replace(LLAMA, num_layers=layers)
    rules = engine_rules("vllm-ascend")
    assert captured_graphs(rules, shape, max_num_seqs=512, max_num_batched_tokens=2048, ranks=ranks) == sizes


def test_eager_captures_nothing() -> None:
    eager = graph_pool(engine_rules("vllm"), LLAMA, max_num_seqs=256, max_num_batched_tokens=2048, enforce_eager=True)
    assert eager[:3] == (0, 0, 0)
    assert eager.source.startswith("enforce_eager")


def test_latent_attention_doubles_the_pool_and_experts_add_to_it() -> None:
    def pool(shape: ModelShape) -> int:
        return graph_pool(engine_rules("vllm"), shape, max_num_seqs=256, max_num_batched_tokens=2048).bytes

    latent = replace(LLAMA, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, head_dim=192)
    assert pool(latent) == 2 * pool(LLAMA)
    assert pool(MOE) == pool(LLAMA) + 35 * GIB // 100
    assert pool(replace(latent, experts=MOE.experts)) == pool(latent)


# Outside torch


def gib(size: int) -> float:
    return round(size / GIB, 2)


def test_groups_of_ranks_outside_torch_on_ascend() -> None:
    rules = rules_for(B2)
    assert [gib(non_torch(rules, LLAMA, Ranks(tp)).bytes) for tp in (1, 2, 8)] == [0.15, 0.64, 0.64]
    whole = non_torch(rules, MOE, Ranks(2, 1, 1, True))
    assert (gib(whole.bytes), gib(whole.high)) == (2.6, 3.66)
    assert non_torch(rules, LLAMA, Ranks(2, 1, 1, True)) == non_torch(rules, LLAMA, Ranks(2))
    # asc 10122: 310P with two ranks of tensor and expert parallelism, 1.00 and 1.05 GiB.
    assert gib(non_torch(rules_for(P310), MOE, Ranks(2, 1, 1, True)).bytes) == 1.03
    assert gib(late_buffers(rules, Ranks(1, 2)).bytes) == 0.39
    assert late_buffers(rules, Ranks()).high == 150 * MIB


@pytest.mark.parametrize(
    ("version", "one", "two"),
    [("0.10", 0.13, 0.45), ("0.17", 0.13, 0.45), ("0.18", 0.25, 0.45), ("0.19", 0.25, 2.08), ("0.27", 0.25, 2.08)],
)
def test_outside_torch_by_release(version: str, one: float, two: float) -> None:
    rules = engine_rules("vllm", version)
    assert (gib(non_torch(rules, LLAMA, Ranks()).bytes), gib(non_torch(rules, LLAMA, Ranks(2)).bytes)) == (one, two)
