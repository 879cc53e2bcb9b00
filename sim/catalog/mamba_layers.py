"""Which layers of a hybrid model are Mamba-2, and their sizes, as its ``config.json`` tells.

::

    model_type          which layers                   sizes                   the MLP
    bamba               attn_layer_indices: attention  mamba_n_heads, ...      intermediate_size, in every layer
    granitemoehybrid    layer_types                    mamba_n_heads, ...      shared_intermediate_size, in every layer
    nemotron_h          hybrid_override_pattern        mamba_num_heads, ...    intermediate_size, a layer of its own

Defaults are those of Hugging Face's configuration classes. Types of the states are those that vLLM 0.27 chooses by
itself: the model's, but what the config says of the recurrence in Nemotron-H, else float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hbmtwin.kernels.records import LayerType, Mamba2
from hbmtwin.sim.catalog.errors import CatalogError

HYBRIDS = ("bamba", "granitemoehybrid", "nemotron_h")
"""Model types that are read here; other state spaces are not computed."""
PATTERN: dict[str, LayerType] = {"M": "mamba", "*": "attention", "-": "mlp"}
"""Letters of Nemotron-H's pattern. E is a mixture of experts."""
STATE_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
MAX_SIZE = 1 << 24


class HybridLayers(NamedTuple):
    """What the config says of its layers."""

    mamba: Mamba2 | None
    """None where all layers are attention."""
    layer_types: tuple[LayerType, ...]
    mlp_in_layer: bool
    rotary_dim: int
    source: str
    """What is to be added to where the config comes from."""


def hybrid_layers(
    config: Mapping[str, Any], where: str, *, num_layers: int, hidden_size: int, head_dim: int, dtype_bytes: int
) -> HybridLayers:
    """The layers of a model whose type is one of :data:`HYBRIDS`. Raise CatalogError."""
    kind = str(config.get("model_type"))
    types = {"bamba": _bamba_types, "granitemoehybrid": _granite_types, "nemotron_h": _nemotron_types}[kind](
        config, where, num_layers
    )
    rotary = {"bamba": _bamba_rotary, "granitemoehybrid": _granite_rotary, "nemotron_h": lambda *_: 0}[kind](
        config, head_dim
    )
    own_mlp = kind == "nemotron_h"
    if "mamba" not in types and not own_mlp:
        return HybridLayers(None, (), True, rotary, "")
    if not {"mamba", "attention"} <= set(types):
        raise CatalogError(
            f"{where}: layers of attention and of Mamba-2 are computed together only; one kind is missing"
        )
    try:
        mamba = (_nemotron_sizes if own_mlp else _mamba_sizes)(config, where, hidden_size, dtype_bytes)
    except CatalogError:
        raise
    except ValueError as error:  # sizes that do not go together
        raise CatalogError(f"{where}: {error}") from None
    note = "; vLLM serves this type up to 0.23, here by the rules of 0.27" if kind == "bamba" else ""
    return HybridLayers(mamba, types, not own_mlp, rotary, note)


def _bamba_types(config: Mapping[str, Any], where: str, num_layers: int) -> tuple[LayerType, ...]:
    indices = config.get("attn_layer_indices") or []
    good = isinstance(indices, list) and all(type(i) is int and 0 <= i < num_layers for i in indices)
    if not good:
        raise CatalogError(f"{where}: attn_layer_indices must list layers from 0 to {num_layers - 1}, not {indices!r}")
    return tuple("attention" if i in indices else "mamba" for i in range(num_layers))


def _granite_types(config: Mapping[str, Any], where: str, num_layers: int) -> tuple[LayerType, ...]:
    types = config.get("layer_types")
    if types is None:
        types = ["mamba"] * num_layers
    if not isinstance(types, list) or len(types) != num_layers or set(map(str, types)) - {"attention", "mamba"}:
        raise CatalogError(f"{where}: layer_types must say attention or mamba for each of {num_layers} layers")
    return tuple("attention" if kind == "attention" else "mamba" for kind in types)


def _nemotron_types(config: Mapping[str, Any], where: str, num_layers: int) -> tuple[LayerType, ...]:
    pattern = config.get("hybrid_override_pattern")
    if not isinstance(pattern, str) or len(pattern) != num_layers:
        raise CatalogError(f"{where}: hybrid_override_pattern must have a letter for each of {num_layers} layers")
    if "E" in pattern:
        raise CatalogError(
            f"{where}: mixture of experts (E in hybrid_override_pattern) comes with a later release; dense hybrids "
            "are computed now"
        )
    if other := sorted(set(pattern) - PATTERN.keys()):
        raise CatalogError(f"{where}: hybrid_override_pattern has {''.join(other)[:20]!r}; known are M, * and -")
    return tuple(PATTERN[letter] for letter in pattern)


def _bamba_rotary(config: Mapping[str, Any], head_dim: int) -> int:
    part = config.get("partial_rotary_factor")
    if isinstance(part, int | float) and 0 < part <= 1:
        return int(head_dim * part)
    given = config.get("attn_rotary_emb")
    return given if type(given) is int and 0 < given <= head_dim else head_dim


def _granite_rotary(config: Mapping[str, Any], head_dim: int) -> int:
    return head_dim if config.get("position_embedding_type") == "rope" else 0


def _mamba_sizes(config: Mapping[str, Any], where: str, hidden_size: int, dtype_bytes: int) -> Mamba2:
    heads = _size(config, "mamba_n_heads", where, default=128)
    inner = _size(config, "mamba_expand", where, default=2) * hidden_size
    d_head = config.get("mamba_d_head", "auto")
    if d_head == "auto":
        d_head = inner // heads
    if type(d_head) is not int or d_head * heads != inner:
        raise CatalogError(
            f"{where}: {heads} mamba_n_heads of mamba_d_head {str(d_head)[:20]} are not mamba_expand x hidden_size = "
            f"{inner}"
        )
    return Mamba2(
        n_heads=heads,
        d_head=d_head,
        d_state=_size(config, "mamba_d_state", where, default=256),
        n_groups=_size(config, "mamba_n_groups", where, default=1),
        d_conv=_size(config, "mamba_d_conv", where, default=4),
        chunk_size=_size(config, "mamba_chunk_size", where, default=256),
        conv_bias=config.get("mamba_conv_bias") is not False,
        conv_dtype_bytes=dtype_bytes,
        ssm_dtype_bytes=dtype_bytes,
    )


def _nemotron_sizes(config: Mapping[str, Any], where: str, hidden_size: int, dtype_bytes: int) -> Mamba2:
    dtype = config.get("mamba_ssm_cache_dtype", "float32")
    if dtype not in STATE_DTYPE_BYTES:
        raise CatalogError(
            f"{where}: mamba_ssm_cache_dtype {str(dtype)[:40]!r} is not known; known: {', '.join(STATE_DTYPE_BYTES)}"
        )
    return Mamba2(
        n_heads=_size(config, "mamba_num_heads", where, default=128),
        d_head=_size(config, "mamba_head_dim", where, default=64),
        d_state=_size(config, "ssm_state_size", where, default=128),
        n_groups=_size(config, "n_groups", where, default=8),
        d_conv=_size(config, "conv_kernel", where, default=4),
        chunk_size=_size(config, "chunk_size", where, default=128),
        conv_bias=config.get("use_conv_bias") is not False,
        conv_dtype_bytes=dtype_bytes,
        ssm_dtype_bytes=STATE_DTYPE_BYTES[dtype],
    )


def _size(config: Mapping[str, Any], key: str, where: str, *, default: int) -> int:
    value = config.get(key, default)
    if type(value) is not int or not 1 <= value <= MAX_SIZE:
        raise CatalogError(f"{where}: {key} must be a whole number from 1 to {MAX_SIZE}, not {str(value)[:40]}")
    return value
