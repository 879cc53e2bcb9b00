"""Quantised weights in the words of a config.json, and by a name."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.kernels.quantized_weights import is_unquantized
from hbmtwin.kernels.records import ModelShape, Quantization
from hbmtwin.kernels.weights import weight_bytes
from hbmtwin.sim.catalog import QUANTIZATIONS, CatalogError, model, with_quantization

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}
W8A8_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
    "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
}
W4A16_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True},
    "input_activations": None,
}
NVFP4_GROUP = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
    "input_activations": {"num_bits": 4, "type": "float"},
}


def read(folder: Path, said: object, key: str = "quantization_config") -> ModelShape:
    path = folder / "config.json"
    path.write_text(json.dumps({**LLAMA, key: said}), encoding="utf-8")
    return model(str(path))


def compressed(*groups: dict[str, Any], **besides: Any) -> dict[str, Any]:
    named = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, **besides}


def weights(changed: dict[str, Any], group: dict[str, Any] = W8A8_GROUP) -> dict[str, Any]:
    return {**group, "weights": {**group["weights"], **changed}}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            {"quant_method": "fp8", "activation_scheme": "static"},
            Quantization(
                method="fp8", weight_bits=8, weight_type="float", activation_bits=8, group_size=-1, scale_bytes=4
            ),
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]},
            Quantization(
                method="fp8",
                weight_bits=8,
                weight_type="float",
                activation_bits=8,
                group_size=-1,
                block=(128, 128),
                scale_bytes=4,
                unquantized=("lm_head",),
            ),
        ),
        (
            compressed(W8A8_GROUP, ignore=["lm_head"]),
            Quantization(
                method="compressed-tensors", weight_bits=8, activation_bits=8, scale_bytes=4, unquantized=("lm_head",)
            ),
        ),
        (
            compressed(W4A16_GROUP),
            Quantization(method="compressed-tensors", weight_bits=4, group_size=128),
        ),
        (
            compressed(weights({"symmetric": False}, W4A16_GROUP)),
            Quantization(method="compressed-tensors", weight_bits=4, group_size=128, zero_points=True),
        ),
        (
            compressed(NVFP4_GROUP),
            Quantization(
                method="compressed-tensors",
                weight_bits=4,
                weight_type="float",
                activation_bits=4,
                group_size=16,
                scale_bytes=1,
            ),
        ),
        (
            compressed(weights({"strategy": "block", "block_structure": [128, 64], "type": "float"})),
            Quantization(
                method="compressed-tensors",
                weight_bits=8,
                weight_type="float",
                activation_bits=8,
                block=(128, 64),
                scale_bytes=4,
            ),
        ),
        (
            {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
            Quantization(method="awq", weight_bits=4, group_size=64, zero_points=True),
        ),
        (
            {"quant_method": "awq", "w_bit": 4, "q_group_size": 128, "modules_to_not_convert": ["visual"]},
            Quantization(method="awq", weight_bits=4, group_size=128, zero_points=True, unquantized=("*visual*",)),
        ),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False},
            Quantization(method="gptq", weight_bits=4, group_size=128),
        ),
        (
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False, "desc_act": True},
            Quantization(method="gptq", weight_bits=8, zero_points=True, input_channel_bytes=8),
        ),
        (
            {"quant_method": "ascend"},
            Quantization(
                method="ascend", weight_bits=8, activation_bits=8, output_channel_bytes=10, input_channel_bytes=6
            ),
        ),
    ],
    ids=[
        *("fp8", "fp8 in blocks", "w8a8", "w4a16", "w4a16 with zero points", "nvfp4", "blocks", "awq"),
        *("awq of old", "gptq", "gptq by act order", "ascend"),
    ],
)
def test_a_config_is_read(tmp_path: Path, said: dict[str, Any], expected: Quantization) -> None:
    found = read(tmp_path, said)
    assert found.quantization == expected
    assert f"weights in {expected.weight_bits} bits ({expected.method})" in found.source


def test_other_places_and_names_of_the_same(tmp_path: Path) -> None:
    gptq = {"bits": 4, "group_size": 128}
    assert read(tmp_path, gptq, "quantize_config") == read(tmp_path, {**gptq, "quant_method": "gptq_marlin"})
    groups = {"config_groups": {"group_0": W8A8_GROUP}}
    assert read(tmp_path, groups, "compression_config") == read(tmp_path, compressed(W8A8_GROUP))
    assert read(tmp_path, "w8a8", "quantize").quantization == read(tmp_path, {"quant_method": "ascend"}).quantization
    assert read(tmp_path, "float", "quantize").quantization is None
    assert read(tmp_path, None).quantization is None
    assert read(tmp_path, compressed()).quantization is None


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' are not computed; known are fp8, awq, gptq"),
        ({"quant_method": ["x"]}, "known are fp8"),
        ({}, "quant_method 'None'"),
        ("fp8", "must be a JSON object, not str"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size must be two whole numbers"),
        ({"quant_method": "awq", "bits": 8}, "bits must be 4 in AWQ, not 8"),
        ({"quant_method": "awq", "zero_point": "yes"}, "zero_point must be true or false"),
        ({"quant_method": "gptq", "bits": 5}, "bits must be 2, 3, 4 or 8 in GPTQ"),
        ({"quant_method": "gptq", "group_size": 128}, "bits is missing"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "group_size is the text '128'"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:.*": {}}}, "dynamic, which quantises some matrices"),
        ({"quant_method": "gptq", "bits": 4, "lm_head": True}, "lm_head, which quantises some matrices"),
        ({"quant_method": "gptq", "bits": 4, "modules_to_not_convert": "lm_head"}, "must be a list of names"),
        ({"quant_method": "compressed-tensors"}, "config_groups must be a JSON object of groups"),
        (compressed(W8A8_GROUP, W4A16_GROUP), "groups of matrices that are quantised differently"),
        (compressed({**W8A8_GROUP, "targets": ["re:.*experts.*"]}), "targets must be"),
        (compressed({"targets": ["Linear"]}), "group_0: weights is missing"),
        (compressed(weights({"num_bits": 2})), "weights of type int in 2 bits"),
        (compressed(weights({"type": "ternary"})), "weights of type ternary in 8 bits"),
        (compressed(weights({"strategy": "magic"})), "the strategy 'magic' of weights"),
        (compressed(W8A8_GROUP, ignore=["re:(a+)+$"]), r"the pattern 're:\(a\+\)\+\$' is not read"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:60],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, said: object, message: str) -> None:
    with pytest.raises(CatalogError, match=message) as refused:
        read(tmp_path, said)
    assert "config.json, quantization_config" in str(refused.value)


def test_a_word_of_mindie_that_is_not_computed(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="quantize: quantised weights 'w8a8s' are not computed"):
        read(tmp_path, "w8a8s", "quantize")


@pytest.mark.parametrize(
    ("ignored", "matrix", "layer", "expected"),
    [
        ("lm_head", "mlp.down_proj", 3, False),
        ("model.layers.3.mlp.down_proj", "mlp.down_proj", 3, True),
        ("language_model.model.layers.3.mlp.down_proj", "mlp.down_proj", 3, True),
        ("model.language_model.layers.3.mlp.down_proj", "mlp.down_proj", 3, True),
        ("re:.*lm_head", "mlp.down_proj", 3, False),
        ("re:.*mlp\\.down_proj$", "mlp.down_proj", 3, True),
        ("re:.*self_attn.*", "self_attn.qkv_proj", 3, True),
        ("re:model\\.layers\\.3\\..*", "self_attn.o_proj", 3, True),
        ("re:model\\.layers\\.3\\..*", "self_attn.o_proj", 30, False),
        ("re:^.*mlp.gate$", "mlp.gate_up_proj", 3, False),
    ],
)
def test_names_that_stay_in_16_bit(tmp_path: Path, ignored: str, matrix: str, layer: int, expected: bool) -> None:
    found = read(tmp_path, compressed(W8A8_GROUP, ignore=[ignored])).quantization
    assert found is not None
    assert is_unquantized(matrix, found, layer) is expected


def test_a_long_list_of_names_takes_no_long_time(tmp_path: Path) -> None:
    names = [f"model.layers.{i}.{part}" for i in range(32) for part in ("input_layernorm", "mlp.gate", "self_attn.x")]
    stars = [f"re:.*a{'b' * i}.*" for i in range(40)]
    start = time.process_time()
    weight_bytes(read(tmp_path, compressed(W8A8_GROUP, ignore=names + stars)))
    assert time.process_time() - start < 1


# -- by name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "gib"),
    [("none", 14.96), ("fp8", 8.46), ("w8a8", 8.46), ("ascend", 8.48), ("awq", 5.34), ("gptq", 5.31), ("w4a16", 5.31)],
)
def test_a_model_by_name(name: str, gib: float) -> None:
    assert weight_bytes(with_quantization(model("llama-3.1-8b"), name)) / 2**30 == pytest.approx(gib, abs=0.01)


def test_a_name_is_told_in_the_source_and_none_takes_it_back() -> None:
    plain = model("llama-3.1-8b")
    assert with_quantization(plain, "none") is plain
    assert with_quantization(plain, "awq").source.endswith("; quantised as awq")
    sixteen = with_quantization(model("deepseek-v3"), "none")
    assert sixteen.quantization is None
    assert weight_bytes(sixteen) > 1.9 * weight_bytes(model("deepseek-v3"))


def test_names_that_go_with_a_quantised_checkpoint_and_those_that_do_not(tmp_path: Path) -> None:
    v3 = model("deepseek-v3")
    assert with_quantization(v3, "fp8") is v3
    w8a8 = read(tmp_path, compressed(W8A8_GROUP))
    assert with_quantization(w8a8, "compressed-tensors") is w8a8
    assert with_quantization(w8a8, "w8a8") is w8a8
    with pytest.raises(ValueError, match="quantization: 'awq', and the checkpoint of deepseek-v3 is stored as fp8"):
        with_quantization(v3, "awq")


def test_names_that_are_unknown_or_say_too_little() -> None:
    plain = model("llama-3.1-8b")
    with pytest.raises(ValueError, match="quantization: unknown quantization 'gptq4': did you mean 'gptq'"):
        with_quantization(plain, "gptq4")
    with pytest.raises(ValueError, match=r"'compressed-tensors' tells neither bits nor groups.*config.json of the"):
        with_quantization(plain, "compressed-tensors")
    assert QUANTIZATIONS[-1] == "none"


def test_quantised_weights_know_no_planted_dtype() -> None:
    plain = model("llama-3.1-8b")
    assert weight_bytes(with_quantization(replace(plain, dtype_bytes=4), "fp8")) > weight_bytes(
        with_quantization(plain, "fp8")
    )
