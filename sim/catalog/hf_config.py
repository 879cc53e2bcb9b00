"""Read a model's sizes from a Hugging Face ``config.json``.

::

    attention_windows    layers that see a window        experts         mixtures of experts
    mamba_layers         Mamba-2 layers of hybrids       quantization    what is stored in fewer bits
    small_parts          biases, norms, rotary part      here            all else, and what is refused

The file is not trusted: its size is bounded and every number checked. A model whose memory follows other rules (state
spaces other than those of :mod:`hbmtwin.sim.catalog.mamba_layers`, sparse or chunked attention), that reads more than
text, or that writes none, is refused by name: a wrong size is worse than none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.catalog.attention_windows import layer_windows
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.catalog.experts import experts_of
from hbmtwin.sim.catalog.mamba_layers import HYBRIDS, hybrid_layers
from hbmtwin.sim.catalog.quantization import quantization_of
from hbmtwin.sim.catalog.sizes import size
from hbmtwin.sim.catalog.small_parts import rotary_dim, rotary_dtype_bytes, rotary_tables, small_parts

MAX_CONFIG_BYTES = 1 << 20
MAX_LAYERS = 1 << 12

DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 2}
"""vLLM's ``dtype = "auto"`` loads float32 checkpoints as 16 bit, and so do we."""

PLAIN_MLP = frozenset({"gpt_neox", "nemotron", "nemotron_h", "opt", "phi", "starcoder2"})
"""Model types whose MLP has two matrices; all others with these field names have gate, up and down."""

TIED = frozenset({"cohere", "cohere2", "gemma", "gemma2", "gemma3_text"})
"""Model types whose head is the embedding where the config does not say."""

LATENT_NOT_CACHED = frozenset({"minicpm3"})
"""Model types with latent attention (MLA) whose K and V vLLM caches head by head, V padded to K's width."""

ENDS_ON_EVERY_STAGE = frozenset(
    {
        *("bamba", "cohere", "cohere2", "gemma", "gemma2", "gemma3_text", "gpt_neox", "granitemoehybrid", "internlm2"),
        *("minicpm", "minicpm3", "nemotron_h", "olmo3", "opt", "orion", "phi", "stablelm"),
    }
)
"""Model types whose class in vLLM 0.27 (bamba: 0.22) makes embedding, last norm and head on every pipeline stage, not
only where they are used."""

ENCODERS = frozenset(
    {
        *("albert", "bert", "camembert", "deberta", "deberta-v2", "distilbert", "electra", "modernbert"),
        *("mpnet", "nomic_bert", "roberta", "xlm-roberta"),
    }
)
"""Model types that embed or classify, whatever their config says of its architecture."""

MULTIMODAL = (
    *("text_config", "vision_config", "audio_config", "vision_tower", "mm_vision_tower", "visual", "img_processor"),
    *("thinker_config", "speech_config"),
)
"""Fields of models that read images or sound: they have weights, and use memory, that are not counted."""

NOT_COMPUTED = {
    "index_topk": "sparse attention with an index of its own",
    "ssm_cfg": "state-space layers",
    "state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "linear_num_value_heads": "linear attention",
    "cross_attention_layers": "cross attention",
    "attention_chunk_size": "chunked local attention",
}
"""Fields that, when set and not 0, make a model whose memory is not computed yet."""
OTHER_LAYERS = frozenset(
    {
        *("falcon_h1", "falcon_mamba", "jamba", "kimi_linear", "lfm2", "mamba", "mamba2", "minimax", "plamo2"),
        *("qwen3_next", "recurrent_gemma", "rwkv", "rwkv5", "xlstm", "zamba", "zamba2"),
    }
)
"""Model types with layers of other kinds, whatever fields their config has."""


def read_config(path: Path) -> ModelShape:
    """Read *path*; the model is named after its directory. Raise CatalogError with file, line and cure."""
    where = f"model {path}"
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as e:
        raise CatalogError(f"{where}: cannot be read: {e.strerror}") from e
    if len(raw) > MAX_CONFIG_BYTES:
        raise CatalogError(f"{where}: larger than 1 MiB, so this is no config.json")
    try:
        config = json.loads(raw.decode("utf-8"))
    except json.JSONDecodeError as e:
        raise CatalogError(f"{where}, line {e.lineno}: no valid JSON: {e.msg}") from e
    except (ValueError, RecursionError) as e:
        raise CatalogError(f"{where}: no valid JSON: {e}") from e
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return shape_of(config, name=name or path.stem, where=where, source=f"{path.name} of {name}")


def shape_of(config: object, *, name: str, where: str, source: str) -> ModelShape:
    """The sizes in *config*, in Hugging Face's words. Raise CatalogError, naming *where* and the field."""
    if not isinstance(config, Mapping):
        raise CatalogError(f"{where}: must be a JSON object, not {type(config).__name__}")
    if not isinstance(config.get("model_type", ""), str | None):
        raise CatalogError(f"{where}: model_type must be a text, not {str(config['model_type'])[:40]}")
    _refuse_what_is_not_computed(config, where)
    _refuse_what_writes_no_text(config, where)

    heads = size(config, "num_attention_heads", where)
    kv_heads = size(config, "num_key_value_heads", where, default=heads)
    if heads % kv_heads:
        raise CatalogError(
            f"{where}: num_key_value_heads {kv_heads} does not divide num_attention_heads {heads}: each KV head "
            "serves the same number of heads"
        )
    hidden = size(config, "hidden_size", where)
    num_layers = size(config, "num_hidden_layers", where, limit=MAX_LAYERS)
    latent = _latent_attention(config, where, default_v=hidden // heads)
    if latent:
        kv_heads, head_dim = heads, latent["qk_nope_head_dim"] + latent["qk_rope_head_dim"]
    else:
        if config.get("head_dim") is None and hidden % heads:
            raise CatalogError(
                f"{where}: head_dim is missing, and hidden_size {hidden} is no multiple of {heads} heads"
            )
        head_dim = size(config, "head_dim", where, default=hidden // heads)
    # Nemotron-H's pattern of layers says what they are, whatever fields of experts a config of the type has.
    experts = None if config.get("model_type") == "nemotron_h" else experts_of(config, where, num_layers)
    quantization = quantization_of(config, where)
    tied_flag = config.get("tie_word_embeddings")
    if tied_flag is None:
        tied_flag = config.get("model_type") in TIED
    if not isinstance(tied_flag, bool):
        raise CatalogError(f"{where}: tie_word_embeddings must be true or false, not {tied_flag!r}")
    dtype_bytes, dtype_source = _dtype_bytes(config, where)
    hybrid = None
    if config.get("model_type") in HYBRIDS:
        hybrid = hybrid_layers(
            config, where, num_layers=num_layers, hidden_size=hidden, head_dim=head_dim, dtype_bytes=dtype_bytes
        )
    mlp_size = "shared_intermediate_size" if config.get("model_type") == "granitemoehybrid" else "intermediate_size"
    written_out = bool(latent) and config.get("model_type") in LATENT_NOT_CACHED
    return ModelShape(
        name=name,
        num_layers=num_layers,
        hidden_size=hidden,
        intermediate_size=size(config, mlp_size, where),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=size(config, "vocab_size", where),
        max_position_embeddings=size(config, "max_position_embeddings", where),
        dtype_bytes=dtype_bytes,
        tie_word_embeddings=tied_flag,
        gated_mlp=config.get("model_type") not in PLAIN_MLP,
        kv_lora_rank=latent.get("kv_lora_rank", 0),
        q_lora_rank=latent.get("q_lora_rank", 0),
        qk_nope_head_dim=latent.get("qk_nope_head_dim", 0),
        qk_rope_head_dim=latent.get("qk_rope_head_dim", 0),
        v_head_dim=latent.get("v_head_dim", 0),
        latent_cache=not written_out,
        layer_windows=() if hybrid else layer_windows(config, where, num_layers),
        rotary_dim=hybrid.rotary_dim if hybrid else rotary_dim(config, where, head_dim),
        rotary_tables=rotary_tables(config),
        rotary_dtype_bytes=rotary_dtype_bytes(config),
        mamba=hybrid.mamba if hybrid else None,
        layer_types=hybrid.layer_types if hybrid else (),
        mlp_in_layer=hybrid.mlp_in_layer if hybrid else True,
        split_ends=config.get("model_type") not in ENDS_ON_EVERY_STAGE,
        parts=small_parts(config, where),
        experts=experts,
        quantization=quantization,
        source=source
        + dtype_source
        + (f"; weights in {quantization.weight_bits} bits ({quantization.method})" if quantization else "")
        + (hybrid.source if hybrid else "")
        + ("; vLLM caches its K and V, not the latent" if written_out else ""),
    )


def _latent_attention(config: Mapping[str, Any], where: str, *, default_v: int) -> dict[str, int]:
    """The sizes of MLA; none where there is no kv_lora_rank. A query without down projection has no q_lora_rank."""
    if config.get("kv_lora_rank") is None:
        return {}
    return {
        "kv_lora_rank": size(config, "kv_lora_rank", where),
        "q_lora_rank": size(config, "q_lora_rank", where) if config.get("q_lora_rank") is not None else 0,
        "qk_nope_head_dim": size(config, "qk_nope_head_dim", where),
        "qk_rope_head_dim": size(config, "qk_rope_head_dim", where),
        "v_head_dim": size(config, "v_head_dim", where, default=default_v),
    }


def _refuse_what_writes_no_text(config: Mapping[str, Any], where: str) -> None:
    """Encoders, and models with other inputs; Hugging Face calls what writes text ...ForCausalLM or ...LMHeadModel."""
    listed = config.get("architectures")
    names = [str(name)[:60] for name in listed] if isinstance(listed, list) else []
    called = ", ".join(names) or str(config.get("model_type"))[:60]
    for key in MULTIMODAL:
        if config.get(key) is not None:
            raise CatalogError(
                f"{where}: {called} reads more than text ({key}), and its weights beside the language model are not "
                "counted; to plan the language model alone, give a config.json with that part's fields only"
            )
    if config.get("model_type") in ENCODERS or (
        names and not any("CausalLM" in name or "LMHead" in name for name in names)
    ):
        raise CatalogError(f"{where}: {called} writes no text, so it keeps no KV; dense decoders are computed")


def _refuse_what_is_not_computed(config: Mapping[str, Any], where: str) -> None:
    kind = str(config.get("model_type"))
    for key, what in NOT_COMPUTED.items():
        if key == "mamba_d_state" and kind in HYBRIDS:
            continue
        if config.get(key) not in (None, 0):
            raise CatalogError(
                f"{where}: {what} ({key}) comes with a later release; decoders, dense or with experts, are computed now"
            )
    if config.get("model_type") in OTHER_LAYERS:
        raise CatalogError(
            f"{where}: layers of the model type {config['model_type']} come with a later release; decoders, and "
            "hybrids with Mamba-2 layers of bamba, granitemoehybrid and nemotron_h, are computed now"
        )
    if config.get("is_encoder_decoder"):
        raise CatalogError(f"{where}: encoder-decoder models are not computed")


def _dtype_bytes(config: Mapping[str, Any], where: str) -> tuple[int, str]:
    """Bytes of a weight, and what the source must say of them."""
    given = config.get("torch_dtype") or config.get("dtype")
    name = str(given or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CatalogError(f"{where}: dtype {name[:40]!r} comes with a later release; known: {', '.join(DTYPE_BYTES)}")
    if name != "float32":
        return DTYPE_BYTES[name], ""
    stated = "float32" if given else "no dtype given"
    return DTYPE_BYTES[name], f"; {stated}, counted as 16 bit, as vLLM's dtype auto loads it"
