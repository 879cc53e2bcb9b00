"""The mixture of experts of a model, as its ``config.json`` tells.

::

    model_type                  experts             of one expert           shared             dense layers
    mixtral, granitemoe,        num_local_experts   intermediate_size       none               none
      olmoe, minimax_m2           or num_experts
    qwen2_moe, qwen3_moe        num_experts         moe_intermediate_size   one with a gate,   decoder_sparse_step,
                                                                              qwen2_moe only     mlp_only_layers
    deepseek, deepseek_v2, v3,  n_routed_experts    moe_intermediate_size   n_shared_experts   first_k_dense_replace,
      kimi_k2, glm4_moe, dots1                                                of that size       moe_layer_freq
    hunyuan, hunyuan_v1_moe     num_experts         moe_intermediate_size   num_shared_expert  none
                                                                              of the MLP's

Rules and defaults are those of Hugging Face's configuration classes and of vLLM's models of these types. Other types
with experts are refused by name: their layers may hold more than these words say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hbmtwin.kernels.records import Experts
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.catalog.sizes import size

PLAIN = frozenset({"granitemoe", "minimax_m2", "mixtral", "olmoe"})
QWEN = frozenset({"qwen2_moe", "qwen3_moe"})
DEEPSEEK = frozenset({"deepseek", "deepseek_v2", "deepseek_v3", "dots1", "glm4_moe", "kimi_k2"})
HUNYUAN = frozenset({"hunyuan", "hunyuan_v1_moe"})
KINDS = PLAIN | QWEN | DEEPSEEK | HUNYUAN
"""Model types whose experts are read here."""
FIELDS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")
"""Words by which a config tells that it has experts."""
FP32_ROUTER = frozenset({"glm4_moe", "minimax_m2"})
"""Model types whose router vLLM keeps in fp32."""
CORRECTED = frozenset({"dots1", "glm4_moe", "minimax_m2"})
"""Those whose router adds a bias an expert, besides those that say ``topk_method`` noaux_tc."""


def experts_of(config: Mapping[str, Any], where: str, num_layers: int) -> Experts | None:
    """The experts in *config*; None where every layer has a single MLP. Raise CatalogError."""
    kind = str(config.get("model_type"))
    told = next((key for key in FIELDS if config.get(key) not in (None, 0)), None)
    if told is None and kind not in PLAIN | QWEN:
        return None
    if kind not in KINDS:
        raise CatalogError(
            f"{where}: experts ({told}) of the model type {kind[:40]} are not computed; those of "
            f"{', '.join(sorted(KINDS))} are"
        )
    try:
        for kinds, read in ((PLAIN, _plain), (QWEN, _qwen), (DEEPSEEK, _deepseek), (HUNYUAN, _hunyuan)):
            if kind in kinds:
                return read(config, kind, where, num_layers)
    except CatalogError:
        raise
    except ValueError as error:  # sizes that do not go together
        raise CatalogError(f"{where}: {error}") from None
    raise AssertionError(f"no reader of {kind}")


def _plain(config: Mapping[str, Any], kind: str, where: str, _: int) -> Experts:
    number = "num_experts" if kind == "olmoe" else "num_local_experts"
    return Experts(
        num_experts=size(config, number, where),
        experts_per_token=size(config, "num_experts_per_tok", where),
        intermediate_size=size(config, "intermediate_size", where),
        router_dtype_bytes=4 if kind in FP32_ROUTER else 0,
        correction_bias=kind in CORRECTED,
    )


def _qwen(config: Mapping[str, Any], kind: str, where: str, num_layers: int) -> Experts:
    step = size(config, "decoder_sparse_step", where, default=1)
    only_mlp = config.get("mlp_only_layers") or []
    if not isinstance(only_mlp, list) or not all(type(i) is int and 0 <= i < num_layers for i in only_mlp):
        raise CatalogError(f"{where}: mlp_only_layers must list layers from 0 to {num_layers - 1}, not {only_mlp!r}")
    shared = size(config, "shared_expert_intermediate_size", where) if kind == "qwen2_moe" else 0
    return Experts(
        num_experts=size(config, "num_experts", where),
        experts_per_token=size(config, "num_experts_per_tok", where),
        intermediate_size=size(config, "moe_intermediate_size", where),
        shared_intermediate_size=shared,
        shared_gate=shared > 0,
        dense_layers=tuple(i for i in range(num_layers) if i in only_mlp or (i + 1) % step),
    )


def _deepseek(config: Mapping[str, Any], kind: str, where: str, num_layers: int) -> Experts:
    one = size(config, "moe_intermediate_size", where)
    first = size(config, "first_k_dense_replace", where, default=0, low=0)
    every = size(config, "moe_layer_freq", where, default=1)
    return Experts(
        num_experts=size(config, "n_routed_experts", where),
        experts_per_token=size(config, "num_experts_per_tok", where),
        intermediate_size=one,
        shared_intermediate_size=size(config, "n_shared_experts", where, default=0, low=0) * one,
        dense_layers=tuple(i for i in range(num_layers) if i < first or i % every),
        router_dtype_bytes=4 if kind in FP32_ROUTER else 0,
        correction_bias=kind in CORRECTED or config.get("topk_method") == "noaux_tc",
    )


def _hunyuan(config: Mapping[str, Any], _: str, where: str, num_layers: int) -> Experts:
    alike = {key: _alike(config, key, where, num_layers) for key in ("moe_intermediate_size", "moe_topk")}
    shared = _alike(config, "num_shared_expert", where, num_layers)
    return Experts(
        num_experts=size(config, "num_experts", where),
        experts_per_token=size(alike, "moe_topk", where),
        intermediate_size=size(alike, "moe_intermediate_size", where),
        shared_intermediate_size=(
            size({"num_shared_expert": shared}, "num_shared_expert", where) * size(config, "intermediate_size", where)
            if config.get("use_mixed_mlp_moe", shared is not None)
            else 0
        ),
    )


def _alike(config: Mapping[str, Any], key: str, where: str, num_layers: int) -> Any:
    """The value of all layers, where a list has one for each."""
    value = config.get(key)
    if not isinstance(value, list):
        return value
    if len(value) != num_layers or any(one != value[0] for one in value):
        raise CatalogError(f"{where}: {key} must be one number, or a list of {num_layers} times the same")
    return value[0]
