"""Biases, norms and the rotary part of a model, which its ``config.json`` tells in part and its type in part.

::

    model_type                          biases                              norms a layer, of query and key
    llama, mistral, granite, ...        attention_bias (qkv and o),         2
                                          mlp_bias
    qwen2, qwen2_moe                    qkv                                 2
    qwen3, qwen3_moe                    attention_bias (qkv)                2, one a head
    glm, glm4, glm4_moe                 attention_bias (qkv)                2, 4 (glm4), one a head if use_qk_norm
    hunyuan, hunyuan_v1_moe             attention_bias (qkv and o)          2, one a head if use_qk_norm
    gemma, gemma2, gemma3_text          attention_bias (qkv and o)          2, 4, 4 and one a head
    olmo2, olmo3, olmoe, minimax_m2     none                                2, one as wide as all heads
    cohere, cohere2                     none                                1
    phi, gpt_neox, starcoder2           all, the norms' and phi's head's    1, 2, 2

From the classes of vLLM 0.27 and of Hugging Face. Types that are not here are read like the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from hbmtwin.kernels.records import SmallParts
from hbmtwin.sim.catalog.sizes import flag, size

QKV_BIAS = frozenset({"qwen2", "qwen2_moe"})
"""Their class has it, whatever the config says."""
NO_OUTPUT_BIAS = frozenset({"dots1", "glm", "glm4", "glm4_moe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"})
NO_BIAS = frozenset({"cohere", "cohere2", "minimax_m2", "olmo2", "olmo3", "olmoe"})
ALL_BIASES = frozenset({"gpt_neox", "phi", "starcoder2"})
NORMS = {"cohere": 1, "cohere2": 1, "gemma2": 4, "gemma3_text": 4, "glm4": 4, "phi": 1}
NORM_A_HEAD = frozenset({"dots1", "gemma3_text", "qwen3", "qwen3_moe"})
NORM_A_HEAD_IF_SAID = frozenset({"glm4_moe", "hunyuan", "hunyuan_v1_moe"})
NORM_OF_ALL_HEADS = frozenset({"minimax_m2", "olmo2", "olmo3", "olmoe"})
NORM_BIAS = frozenset({"gpt_neox", "nemotron", "phi", "starcoder2"})
ROTATED = {"glm": 0.5, "glm4": 0.5, "glm4_moe": 0.5, "gpt_neox": 0.25, "nemotron": 0.5, "phi": 0.5, "stablelm": 0.25}
"""Part of a head that is rotated where the config does not say."""
DEEPSEEK = frozenset({"deepseek_v2", "deepseek_v3", "kimi_k2"})


def small_parts(config: Mapping[str, Any], where: str) -> SmallParts:
    """Biases and norms of a layer. Raise CatalogError."""
    kind = str(config.get("model_type"))
    if kind in ALL_BIASES:
        biases = flag(config, "use_bias" if kind == "starcoder2" else "attention_bias", where, default=True)
        attention, output, mlp = biases, biases, biases if kind == "starcoder2" else True
    elif kind in NO_BIAS:
        attention = output = mlp = False
    else:
        attention = kind in QKV_BIAS or flag(config, "attention_bias", where)
        output = attention and kind not in NO_OUTPUT_BIAS
        mlp = flag(config, "mlp_bias", where)
    norm: Literal["none", "head", "width"] = "none"
    if kind in NORM_A_HEAD or (kind in NORM_A_HEAD_IF_SAID and flag(config, "use_qk_norm", where)):
        norm = "head"
    elif kind in NORM_OF_ALL_HEADS:
        norm = "width"
    return SmallParts(
        qkv_bias=attention,
        output_bias=output,
        mlp_bias=mlp,
        query_key_norm=norm,
        norms=NORMS.get(kind, 2),
        norm_bias=kind in NORM_BIAS,
        head_bias=kind == "phi",
    )


def rotary_dim(config: Mapping[str, Any], where: str, head_dim: int) -> int | None:
    """Elements of a head that are rotated; None: all. Raise CatalogError."""
    kind = str(config.get("model_type"))
    if kind == "minimax_m2":
        return size(config, "rotary_dim", where, default=head_dim, limit=head_dim)
    part = config.get("partial_rotary_factor", config.get("rotary_pct", ROTATED.get(kind)))
    if not isinstance(part, int | float) or isinstance(part, bool) or not 0 < part < 1:
        return None
    return int(head_dim * part)


def rotary_tables(config: Mapping[str, Any]) -> int:
    """How many tables of cosines and sines the engine keeps."""
    kind = config.get("model_type")
    return 2 if kind == "gemma3_text" or (kind == "olmo3" and config.get("rope_scaling")) else 1


def rotary_dtype_bytes(config: Mapping[str, Any]) -> int:
    """Of an element of the table; 0: as the model's. DeepSeek's YaRN goes through FlashInfer, which reads fp32."""
    return 4 if config.get("model_type") in DEEPSEEK and config.get("rope_scaling") else 0
