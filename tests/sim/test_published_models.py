"""The catalog against what others published: parameters of checkpoints, weights in boot logs to their last digit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hbmtwin.kernels.layer_shapes import Split, layer_shapes, norm_shapes
from hbmtwin.kernels.records import ModelShape
from hbmtwin.kernels.stages import stage_layers, stage_shapes
from hbmtwin.kernels.weights import weight_bytes_per_rank
from hbmtwin.sim.budget.loaded_weights import loaded_weight_bytes
from hbmtwin.sim.catalog import model, models, with_quantization

GIB = 1 << 30

PARAMETERS = {
    "codellama-7b": 6_738_546_688,
    "command-r7b": 8_028_033_024,
    "deepseek-moe-16b": 16_375_728_128,
    "deepseek-r1": 671_026_419_200,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "gemma-2-27b": 27_227_128_320,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gemma-7b": 8_537_680_896,
    "glm-4-9b": 9_399_951_360,
    "granite-4.0-h-micro": 3_191_396_096,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-2-7b": 6_738_415_616,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-small-24b": 23_572_403_200,
    "mixtral-8x22b": 140_620_634_112,
    "mixtral-8x7b": 46_702_792_704,
    "nemotron-nano-9b-v2": 8_888_227_328,
    "olmo-3-7b": 7_298_011_136,
    "phi-2": 2_779_683_840,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-72b": 72_706_203_648,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-30b-a3b-2507": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "qwen3-vl-235b-a22b": 235_093_634_560,
    "qwq-32b": 32_763_876_352,
    "youtu-llm-2b": 1_961_560_064,
}
"""What the hub tells of each checkpoint; a tied head counted once, layers that predict more tokens left out."""
ROUNDED = {
    "bamba-9b": 9.78e9,
    "glm-4.5-air": 106e9,
    "granite-3.1-8b": 8.17e9,
    "hunyuan-a13b": 80e9,
    "kimi-k2": 1.03e12,
    "minicpm3-4b": 4.07e9,
    "minimax-m2.5": 229e9,
}
"""Those whose card or name has a rounded number only."""


def parameters(m: ModelShape) -> int:
    """Of the whole model, without the padding of its vocabulary."""
    layers = (
        layer_shapes(m, Split(), m.layer_types[i] if m.layer_types else "attention", experts=m.has_experts(i))
        for i in range(m.num_layers)
    )
    total = sum(weight.elements for layer in layers for weight in layer)
    total += sum(weight.elements for weight in norm_shapes("norm", m))
    total += m.vocab_size * m.hidden_size * (1 if m.tie_word_embeddings else 2)
    return total + (m.vocab_size if m.parts.head_bias else 0)


@pytest.mark.parametrize("name", models())
def test_a_model_has_as_many_parameters_as_published(name: str) -> None:
    found = parameters(model(name))
    if name in ROUNDED:
        assert found == pytest.approx(ROUNDED[name], rel=0.01)
    else:
        assert found == PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_the_source_says_the_same_number_or_none(name: str) -> None:
    source = model(name).source
    assert f"{PARAMETERS[name]:,}" in source or "parameters" not in source


# -- boot logs -------------------------------------------------------------------------------------------------------


def fp32(m: ModelShape) -> ModelShape:
    return replace(m, dtype_bytes=4)


LOGGED = [
    # vLLM 0.19.0, H100 (llm-d-planner d3121e05)
    ("codellama-7b", 1, "12.56"),
    ("llama-3.1-8b", 1, "14.99"),
    ("llama-3.1-8b", 2, "7.51"),
    ("qwen2.5-7b", 1, "14.25"),
    ("qwen2.5-7b", 4, "3.55"),
    ("qwen2.5-72b", 2, "67.8"),
    ("gemma-2-2b", 1, "4.90"),
    ("gemma-2-27b", 1, "50.72"),
    ("gemma-7b", 1, "15.91"),
    ("granite-3.1-8b", 1, "15.25"),
    ("phi-2", 1, "5.19"),
    ("mixtral-8x7b", 2, "43.51"),
    ("deepseek-v2-lite", 1, "29.43"),
    ("qwen3-30b-a3b", 1, "56.88"),
    # vLLM 0.11 to 0.18, H100 (planner issue 194, docs of 2026-04-27)
    ("qwen3-14b", 1, "27.52"),
    ("qwen3-32b", 1, "61.03"),
    # V0, L40S (vllm 15815)
    ("qwen2.5-32b", 2, "30.71"),
]


@pytest.mark.parametrize(("name", "tp", "logged"), LOGGED)
def test_weights_are_those_that_vllm_logs_to_its_last_digit(name: str, tp: int, logged: str) -> None:
    digits = len(logged.partition(".")[2])
    assert f"{loaded_weight_bytes(model(name), 'nvidia', tp) / GIB:.{digits}f}" == logged


def test_the_rows_that_are_no_plain_model_agree_too() -> None:
    llama = model("llama-3.1-8b")
    assert round(loaded_weight_bytes(fp32(llama), "nvidia") / GIB, 2) == 29.98
    stages = stage_shapes(llama, stage_layers(32, 2))
    assert [round(loaded_weight_bytes(stage, "nvidia") / GIB, 2) for stage in stages] == [7.51, 7.51]
    # Llama-3.3-70B in FP8 with a scale a channel, as RedHat's dynamic checkpoints have it.
    channel = with_quantization(model("llama-3.3-70b"), "w8a8").quantization
    eight_bit = replace(model("llama-3.3-70b"), quantization=channel)
    assert round(loaded_weight_bytes(eight_bit, "nvidia", 2) / GIB, 2) == 33.88


@pytest.mark.parametrize(
    ("shape", "logged", "more", "why"),
    [
        (model("mistral-small-24b"), 44.76, (0.80, 0.90), "Mistral-Small-3.1 reads images: 0.44 billion parameters"),
        (with_quantization(model("mistral-small-24b"), "w8a8"), 24.07, (0.80, 0.90), "the same, left in 16 bit"),
        (
            replace(model("qwen3-0.6b"), vocab_size=151669, max_position_embeddings=32768),
            1.13,
            (0.008, 0.018),
            "Qwen3-Embedding-0.6B on 910C: 13 MiB that are not explained",
        ),
    ],
    ids=["images", "images, w8a8", "Ascend"],
)
def test_rows_that_do_not_agree_are_off_by_what_is_known(
    shape: ModelShape, logged: float, more: tuple[float, float], why: str
) -> None:
    gap = logged - loaded_weight_bytes(shape, "nvidia") / GIB
    assert more[0] < gap < more[1], why


def test_blocks_of_the_allocator_are_what_the_sum_of_tensors_lacks() -> None:
    # gate_up_proj has 259 MiB in a block of 260, down_proj 129.5 of 130, qkv_proj 31.5 of 32; 28 layers, and both ends.
    qwen = model("qwen2.5-7b")
    lacking = loaded_weight_bytes(qwen, "nvidia") - weight_bytes_per_rank(qwen)
    assert lacking == pytest.approx(57 << 20, abs=64 << 10)
    assert f"{weight_bytes_per_rank(qwen) / GIB:.2f}" != "14.25"


@pytest.mark.parametrize("vendor", ["nvidia", "ascend"])
@pytest.mark.parametrize("name", ["llama-2-7b", "gemma-3-1b", "deepseek-v2-lite", "phi-2", "nemotron-nano-9b-v2"])
def test_blocks_hold_the_tensors_and_little_more(name: str, vendor: str) -> None:
    tensors = weight_bytes_per_rank(model(name))
    assert tensors <= loaded_weight_bytes(model(name), vendor) < 1.02 * tensors


def test_qwen3_vl_repeats_its_four_kv_heads_on_eight_ranks() -> None:
    vl = model("qwen3-vl-235b-a22b")
    assert (vl.num_layers, vl.num_attention_heads, vl.num_kv_heads, vl.head_dim) == (94, 64, 4, 128)
    attention = vl.num_layers * 2 * 4096 * 128
    four, eight = weight_bytes_per_rank(vl, 4), weight_bytes_per_rank(vl, 8)
    on_every_rank = 94 * 2 * (128 * 4096 + 2 * 128 + 2 * 4096) + 2 * 4096 + 262144 * 128 * 2
    assert 2 * eight - four == on_every_rank + 2 * attention  # one K and one V head instead of half of each
