"""Mixtures of experts, biases and norms in the words of a config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.kernels.records import Experts, ModelShape, SmallParts
from hbmtwin.sim.catalog import CatalogError, model
from hbmtwin.sim.catalog.experts import KINDS, experts_of

SIZES: dict[str, Any] = {
    "num_hidden_layers": 6,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
QWEN3 = {"model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 768}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 512,
    "first_k_dense_replace": 2,
    "topk_method": "noaux_tc",
}


def read(folder: Path, **said: Any) -> ModelShape:
    path = folder / "config.json"
    path.write_text(json.dumps({**SIZES, **said}), encoding="utf-8")
    return model(str(path))


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2},
            Experts(num_experts=8, experts_per_token=2, intermediate_size=4096),
        ),
        (
            {"model_type": "olmoe", "num_experts": 64, "num_experts_per_tok": 8},
            Experts(num_experts=64, experts_per_token=8, intermediate_size=4096),
        ),
        (
            {"model_type": "minimax_m2", "num_local_experts": 256, "num_experts_per_tok": 8, "rotary_dim": 64},
            Experts(
                num_experts=256,
                experts_per_token=8,
                intermediate_size=4096,
                router_dtype_bytes=4,
                correction_bias=True,
            ),
        ),
        (QWEN3, Experts(num_experts=64, experts_per_token=4, intermediate_size=768)),
        (
            {**QWEN3, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
            Experts(num_experts=64, experts_per_token=4, intermediate_size=768, dense_layers=(0, 1, 2, 4)),
        ),
        (
            {**QWEN3, "model_type": "qwen2_moe", "shared_expert_intermediate_size": 5632},
            Experts(
                num_experts=64,
                experts_per_token=4,
                intermediate_size=768,
                shared_intermediate_size=5632,
                shared_gate=True,
            ),
        ),
        (
            DEEPSEEK,
            Experts(
                num_experts=64,
                experts_per_token=6,
                intermediate_size=512,
                shared_intermediate_size=1024,
                dense_layers=(0, 1),
                correction_bias=True,
            ),
        ),
        (
            {**DEEPSEEK, "model_type": "deepseek_v2", "topk_method": "greedy", "moe_layer_freq": 2},
            Experts(
                num_experts=64,
                experts_per_token=6,
                intermediate_size=512,
                shared_intermediate_size=1024,
                dense_layers=(0, 1, 3, 5),
            ),
        ),
        (
            {**DEEPSEEK, "model_type": "glm4_moe", "n_shared_experts": None},
            Experts(
                num_experts=64,
                experts_per_token=6,
                intermediate_size=512,
                dense_layers=(0, 1),
                router_dtype_bytes=4,
                correction_bias=True,
            ),
        ),
        (
            {
                "model_type": "hunyuan_v1_moe",
                "num_experts": 64,
                "moe_topk": [8] * 6,
                "num_shared_expert": [1] * 6,
                "moe_intermediate_size": [3072] * 6,
            },
            Experts(num_experts=64, experts_per_token=8, intermediate_size=3072, shared_intermediate_size=4096),
        ),
    ],
    ids=["mixtral", "olmoe", "minimax", "qwen3", "qwen3, some", "qwen2", "deepseek", "every second", "glm", "hunyuan"],
)
def test_experts_are_read(tmp_path: Path, said: dict[str, Any], expected: Experts) -> None:
    assert read(tmp_path, **said).experts == expected


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (
            {"model_type": "gpt_oss", "num_local_experts": 32},
            r"experts \(num_local_experts\) of the model type gpt_oss",
        ),
        ({"model_type": "dbrx", "moe_num_experts": 16}, "those of deepseek, deepseek_v2"),
        ({"model_type": "mixtral", "num_experts_per_tok": 2}, "num_local_experts is missing"),
        ({"model_type": "qwen3_moe"}, "num_experts is missing"),
        ({**QWEN3, "num_experts_per_tok": 65}, "a token passes at most all 64 experts, not 65 of them"),
        ({**QWEN3, "num_experts": "64"}, "num_experts is the text '64'"),
        ({**QWEN3, "mlp_only_layers": [6]}, "mlp_only_layers must list layers from 0 to 5"),
        ({**QWEN3, "mlp_only_layers": "all"}, "mlp_only_layers must list layers"),
        ({**QWEN3, "decoder_sparse_step": 0}, "decoder_sparse_step must be a whole number from 1"),
        ({**DEEPSEEK, "first_k_dense_replace": -1}, "first_k_dense_replace must be a whole number from 0"),
        ({**DEEPSEEK, "n_shared_experts": True}, "n_shared_experts must be a whole number"),
        (
            {"model_type": "hunyuan", "num_experts": 4, "moe_topk": [1, 2] * 3, "moe_intermediate_size": 8},
            "moe_topk must be one number, or a list of 6 times the same",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:60],
)
def test_what_is_not_computed_is_refused_by_name(tmp_path: Path, said: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message) as refused:
        read(tmp_path, **said)
    assert "config.json" in str(refused.value)


def test_a_dense_model_has_no_experts_whatever_zeros_its_config_has(tmp_path: Path) -> None:
    assert read(tmp_path, model_type="llama", num_local_experts=0).experts is None
    assert experts_of({"model_type": "llama"}, "here", 6) is None
    assert len(KINDS) == 14


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"model_type": "llama"}, SmallParts()),
        (
            {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
            SmallParts(qkv_bias=True, output_bias=True, mlp_bias=True),
        ),
        ({"model_type": "qwen2"}, SmallParts(qkv_bias=True)),
        ({"model_type": "qwen3"}, SmallParts(query_key_norm="head")),
        ({"model_type": "qwen3", "attention_bias": True}, SmallParts(qkv_bias=True, query_key_norm="head")),
        ({"model_type": "olmo3"}, SmallParts(query_key_norm="width")),
        ({"model_type": "gemma2"}, SmallParts(norms=4)),
        ({"model_type": "gemma3_text"}, SmallParts(norms=4, query_key_norm="head")),
        ({"model_type": "cohere2"}, SmallParts(norms=1)),
        ({"model_type": "glm4", "attention_bias": True}, SmallParts(qkv_bias=True, norms=4)),
        (
            {"model_type": "phi"},
            SmallParts(qkv_bias=True, output_bias=True, mlp_bias=True, norms=1, norm_bias=True, head_bias=True),
        ),
        ({"model_type": "starcoder2", "use_bias": False}, SmallParts(norm_bias=True)),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_biases_and_norms_of_a_type(tmp_path: Path, said: dict[str, Any], expected: SmallParts) -> None:
    assert read(tmp_path, **said).parts == expected


def test_a_bias_that_is_no_flag(tmp_path: Path) -> None:
    with pytest.raises(CatalogError, match="attention_bias must be true or false, not 'yes'"):
        read(tmp_path, model_type="llama", attention_bias="yes")


@pytest.mark.parametrize(
    ("said", "rotated"),
    [
        ({"model_type": "llama"}, None),
        ({"model_type": "phi", "partial_rotary_factor": 0.4}, 51),
        ({"model_type": "glm"}, 64),
        ({"model_type": "gpt_neox", "rotary_pct": 1.0}, None),
        ({"model_type": "llama", "partial_rotary_factor": 0.25}, 32),
        ({"model_type": "llama", "partial_rotary_factor": "half"}, None),
        (
            {"model_type": "minimax_m2", "num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 64},
            64,
        ),
    ],
    ids=lambda value: str(value)[:50] if isinstance(value, dict) else "",
)
def test_how_much_of_a_head_is_rotated(tmp_path: Path, said: dict[str, Any], rotated: int | None) -> None:
    assert read(tmp_path, **said).rotary_dim == rotated


def test_tables_of_rotations() -> None:
    assert (model("gemma-3-1b").rotary_tables, model("gemma-2-9b").rotary_tables) == (2, 1)
    assert (model("deepseek-v3").rotary_dtype_bytes, model("youtu-llm-2b").rotary_dtype_bytes) == (4, 0)
