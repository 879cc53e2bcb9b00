"""Pipeline stages: vLLM's cut, case by case; and all stages together are the model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.kernels.activations import ActivationModel, StepProgram
from hbmtwin.kernels.records import BatchShape, ModelShape
from hbmtwin.kernels.stages import stage_layers, stage_shapes, stage_sizes
from hbmtwin.kernels.weights import (
    can_split,
    embedding_bytes,
    rotary_table_bytes,
    streamed_bytes,
    weight_bytes_per_rank,
    weight_tensors,
)
from hbmtwin.sim.catalog import device, model, models
from hbmtwin.sim.kv_layout import kv_layout

LLAMA_8B = model("llama-3.1-8b")
WITHOUT_ATTENTION = [("bamba-9b", 4), ("nemotron-nano-9b-v2", 4)]
"""Models and stages one of which would have none."""


@pytest.mark.parametrize(
    ("layers", "stages", "sizes"),
    [
        (32, 1, (32,)),
        (32, 2, (16, 16)),
        (32, 3, (11, 11, 10)),
        (32, 5, (6, 6, 7, 7, 6)),
        (61, 4, (15, 15, 16, 15)),
        (62, 4, (15, 16, 16, 15)),
        (63, 4, (16, 16, 16, 15)),
        (80, 8, (10,) * 8),
        (26, 4, (6, 7, 7, 6)),
        (28, 8, (3, 3, 3, 4, 4, 4, 4, 3)),
        (7, 7, (1,) * 7),
        (3, 2, (2, 1)),
    ],
)
def test_layers_are_cut_as_vllm_cuts_them(layers: int, stages: int, sizes: tuple[int, ...]) -> None:
    assert stage_sizes(layers, stages) == sizes


@given(st.integers(1, 200), st.integers(1, 64))
def test_every_layer_is_on_one_stage_and_the_last_has_no_more_than_any(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match=f"{layers} layers make 1 to {layers} stages, not {stages}"):
            stage_layers(layers, stages)
        return
    cut = stage_layers(layers, stages)
    assert [i for own in cut for i in own] == list(range(layers))
    sizes = [len(own) for own in cut]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


def test_a_partition_of_ones_own() -> None:
    assert stage_layers(32, 2, [20, 12]) == (range(20), range(20, 32))
    for wrong in ([20, 11], [32], [16, 8, 8], [33, -1], [32, 0]):
        with pytest.raises(ValueError, match="into 2 stages: write one number above 0 a stage"):
            stage_layers(32, 2, wrong)


def shapes(of: ModelShape, stages: int) -> tuple[ModelShape, ...]:
    return stage_shapes(of, stage_layers(of.num_layers, stages))


def test_one_stage_is_the_model() -> None:
    assert shapes(LLAMA_8B, 1) == (LLAMA_8B,)


def test_weights_of_a_stage_by_hand() -> None:
    # A layer: qkv 6144 x 4096, o 4096 x 4096, gate, up and down 3 x 14336 x 4096, two norms; 2 bytes each.
    layer = 2 * (6144 * 4096 + 4096 * 4096 + 3 * 14336 * 4096 + 2 * 4096)
    table = 2 * 128256 * 4096
    rotary = 2 * 131072 * 128
    first, middle, last = shapes(LLAMA_8B, 3)
    assert weight_bytes_per_rank(first) == 11 * layer + table + rotary
    assert weight_bytes_per_rank(middle) == 11 * layer + rotary
    assert weight_bytes_per_rank(last) == 10 * layer + 2 * 4096 + table + rotary
    # vLLM 0.19 logged 7.51 GiB for a rank of two stages.
    assert [round(weight_bytes_per_rank(stage) / 2**30, 2) for stage in shapes(LLAMA_8B, 2)] == [7.51, 7.51]


def test_a_tied_table_is_on_both_ends() -> None:
    tied = replace(LLAMA_8B, tie_word_embeddings=True)
    has_table = [[name for name, _ in weight_tensors(stage)].count("embed_tokens") for stage in shapes(tied, 4)]
    assert has_table == [1, 0, 0, 1]


def test_some_classes_of_vllm_make_the_ends_on_every_stage() -> None:
    olmo, gemma = model("olmo-3-7b"), model("gemma-2-9b")
    ends = ("embed_tokens", "norm", "lm_head")
    for shape, expected in ((olmo, ends), (gemma, ends[:2])):
        for stage in shapes(shape, 4):
            assert [name for name, _ in weight_tensors(stage) if name in ends] == list(expected)
    assert LLAMA_8B.split_ends
    assert not olmo.split_ends


@pytest.mark.parametrize(("name", "stages"), [c for c in product(models(), [2, 3, 4]) if c not in WITHOUT_ATTENTION])
def test_stages_together_are_the_model(name: str, stages: int) -> None:
    whole = model(name)
    tp = 2 if can_split(whole, 2) else 1
    parts = shapes(whole, stages)
    assert sum(part.num_layers for part in parts) == whole.num_layers
    norm = (2 if whole.parts.norm_bias else 1) * whole.hidden_size * whole.dtype_bytes
    ends = embedding_bytes(whole, tp) * (1 if whole.tie_word_embeddings else 2) + norm
    ends += whole.vocab_size // tp * whole.dtype_bytes if whole.parts.head_bias else 0
    doubled = (stages - 1) * rotary_table_bytes(whole)
    if not whole.split_ends:
        doubled += (stages - 1) * ends
    elif whole.tie_word_embeddings:
        doubled += embedding_bytes(whole, tp)
    assert sum(weight_bytes_per_rank(part, tp) for part in parts) == weight_bytes_per_rank(whole, tp) + doubled
    assert sum(streamed_bytes(part, tp) for part in parts) == streamed_bytes(whole, tp)
    assert sum(kv_layout(p, tensor_parallel_size=tp).token_bytes for p in parts) == (
        kv_layout(whole, tensor_parallel_size=tp).token_bytes
    )
    assert sum((part.layer_windows for part in parts), ()) == whole.layer_windows
    assert sum((part.layer_types for part in parts), ()) == whole.layer_types


def test_a_stage_without_a_kind_of_layer_is_refused() -> None:
    # Attention at layers 9, 18 and 27 of 32.
    with pytest.raises(ValueError, match=r"stage 0 of 4 of bamba-9b \(layers 0 to 7\) has no layer of attention"):
        shapes(model("bamba-9b"), 4)


def program(stage: ModelShape) -> StepProgram:
    activations = ActivationModel(stage, device("a100-80gb"), tensor_parallel_size=1, attention="flash")
    return activations.program(BatchShape(prefill=((8192, 0),)))


def test_only_the_last_stage_makes_logits_and_the_others_hold_what_they_pass_on() -> None:
    whole, parts = program(LLAMA_8B), [program(stage) for stage in shapes(LLAMA_8B, 3)]
    made = [[step.name for step in part.before + part.after if step.verb == "malloc"] for part in parts]
    assert made[0] == ["sent", "hidden"]
    assert made[1] == ["received", "sent", "hidden"]
    assert made[2][:2] == ["received", "hidden"]
    assert "logits" in made[2]
    assert [len(part.layers) for part in parts] == [11, 11, 10]
    passed = 2 * 2 * 8192 * 4096
    layer = 2 * 8192 * (3 * 14336 + 3 * 4096)  # fuller than one row of logits
    assert whole.peak_bytes == layer
    assert [part.peak_bytes for part in parts] == [layer + passed, layer + 2 * passed, layer + passed]
