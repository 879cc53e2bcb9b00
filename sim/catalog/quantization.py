"""How a model's weights are quantised: what its ``config.json`` says, or one name.

::

    quant_method         weights               scales                                    stays in 16 bit
    fp8                  8 bit float           fp32, one a matrix or weight_block_size   modules_to_not_convert
    compressed-tensors   config_groups:        fp32 a channel, or 16 bit a group         ignore
                           num_bits, type
    awq                  4 bit                 16 bit a group, and zero points           modules_to_not_convert
    gptq                 2 to 8 bit            16 bit a group; zero points unless sym    modules_to_not_convert
    ascend, or MindIE's  8 bit                 of vllm-ascend's W8A8, see ASCEND_W8A8    unknown here: it stands in
      quantize: w8a8                                                                       quant_model_description

    name                 as
    fp8                  vLLM quantises a 16-bit checkpoint while it loads: one scale a matrix
    w8a8, w4a16, awq,    the usual checkpoints of that name: a scale a channel in 8 bit, groups of 128 in 4 bit
      gptq, ascend

Other methods are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from hbmtwin.kernels.records import ModelShape, Quantization
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.catalog.sizes import flag, size

FIELDS = ("quantization_config", "compression_config", "quantize_config")
OTHER_NAMES = {"compressed_tensors": "compressed-tensors", "gptq_marlin": "gptq", "awq_marlin": "awq"}
GROUP_SIZE = 128
"""What AWQ and GPTQ checkpoints have unless they say otherwise."""
ASCEND_W8A8 = Quantization(
    method="ascend", weight_bits=8, activation_bits=8, output_channel_bytes=4 + 4 + 2, input_channel_bytes=3 * 2
)
"""vllm-ascend's static W8A8 in bf16: an output channel has weight_scale and weight_offset (2 bytes each), quant_bias
and deq_scale (4 each); an input channel scale, its reciprocal and offset of the activations (2 each)."""
BY_NAME = {
    "fp8": Quantization(
        method="fp8", weight_bits=8, weight_type="float", activation_bits=8, group_size=-1, scale_bytes=4
    ),
    "w8a8": Quantization(method="compressed-tensors", weight_bits=8, activation_bits=8, scale_bytes=4),
    "ascend": ASCEND_W8A8,
    "awq": Quantization(method="awq", weight_bits=4, group_size=GROUP_SIZE, zero_points=True),
    "gptq": Quantization(method="gptq", weight_bits=4, group_size=GROUP_SIZE),
    "w4a16": Quantization(method="compressed-tensors", weight_bits=4, group_size=GROUP_SIZE),
}
"""The usual form of each, those of 8 bits first."""
QUANTIZATIONS = (*BY_NAME, "compressed-tensors", "none")
"""What ``quantization`` takes by name."""


def with_quantization(model: ModelShape, name: str) -> ModelShape:
    """*model* with its matrices stored as *name* says; ``none``: in its dtype.

    Raise ValueError for an unknown name, with the nearest known one, and for a checkpoint that is stored otherwise.
    """
    if name not in QUANTIZATIONS:
        near = get_close_matches(name.lower(), QUANTIZATIONS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"quantization: unknown quantization {name!r}: {hint}Known are {', '.join(QUANTIZATIONS)}")
    own = model.quantization
    if name == "none":
        if own is None:
            return model
        return replace(model, quantization=None, source=f"{model.source}; in 16 bit")
    if own is not None:
        if name == own.method or BY_NAME.get(name) == own:
            return model
        raise ValueError(
            f"quantization: {name!r}, and the checkpoint of {model.name} is stored as {own.method}, which the engine "
            "takes as it is; leave quantization out, or say 'none' to plan it in 16 bit"
        )
    if name not in BY_NAME:
        raise ValueError(
            f"quantization: {name!r} tells neither bits nor groups of {model.name}; give the config.json of the "
            f"quantised checkpoint as the model, or one of {', '.join(BY_NAME)}"
        )
    return replace(model, quantization=BY_NAME[name], source=f"{model.source}; quantised as {name}")


def quantization_of(config: Mapping[str, Any], where: str) -> Quantization | None:
    """What *config* says of its weights; None: they are in its dtype. Raise CatalogError, naming *where* and field."""
    if isinstance(config.get("quantize"), str):  # MindIE's word, of msmodelslim
        return _mindie(config["quantize"], f"{where}, quantize")
    key = next((key for key in FIELDS if config.get(key) is not None), None)
    if key is None:
        return None
    where, said = f"{where}, {key}", config[key]
    if not isinstance(said, Mapping):
        raise CatalogError(f"{where}: must be a JSON object, not {type(said).__name__}")
    told = said.get("quant_method")
    if told is None:
        told = "compressed-tensors" if "config_groups" in said else "gptq" if "bits" in said else None
    method = OTHER_NAMES.get(str(told), str(told))
    if method not in READERS:
        raise CatalogError(
            f"{where}: quantised weights of quant_method {method[:40]!r} are not computed; known are "
            f"{', '.join(READERS)}"
        )
    return READERS[method](said, where)


def _fp8(said: Mapping[str, Any], where: str) -> Quantization:
    block = said.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and 1 <= n <= 1 << 16 for n in block)
    ):
        raise CatalogError(f"{where}: weight_block_size must be two whole numbers, not {str(block)[:40]}")
    return replace(
        BY_NAME["fp8"],
        block=None if block is None else (block[0], block[1]),
        unquantized=_names(said, where, "ignored_layers", "modules_to_not_convert"),
    )


def _awq(said: Mapping[str, Any], where: str) -> Quantization:
    bits = "w_bit" if "w_bit" in said else "bits"
    group = "q_group_size" if "q_group_size" in said else "group_size"
    if size(said, bits, where, default=4) != 4:
        raise CatalogError(f"{where}: {bits} must be 4 in AWQ, not {said[bits]}")
    return Quantization(
        method="awq",
        weight_bits=4,
        group_size=_group(said, group, where),
        zero_points=flag(said, "zero_point", where, default=True),
        unquantized=_names(said, where, "modules_to_not_convert", anywhere=True),
    )


def _gptq(said: Mapping[str, Any], where: str) -> Quantization:
    if said.get("dynamic") or said.get("lm_head"):
        key = "dynamic" if said.get("dynamic") else "lm_head"
        raise CatalogError(f"{where}: {key}, which quantises some matrices in another way, is not computed")
    bits = size(said, "bits", where)
    if bits not in (2, 3, 4, 8):
        raise CatalogError(f"{where}: bits must be 2, 3, 4 or 8 in GPTQ, not {bits}")
    return Quantization(
        method="gptq",
        weight_bits=bits,
        group_size=_group(said, "group_size", where),
        zero_points=not flag(said, "sym", where, default=True),
        input_channel_bytes=8 if flag(said, "desc_act", where) else 0,  # g_idx and how it is sorted, int32 each
        unquantized=_names(said, where, "modules_to_not_convert", anywhere=True),
    )


def _group(said: Mapping[str, Any], key: str, where: str) -> int:
    """Channels that share a scale; -1 there means all of them, which is one scale an output channel here."""
    group = size(said, key, where, default=GROUP_SIZE, low=-1)
    return 0 if group == -1 else group


def _compressed_tensors(said: Mapping[str, Any], where: str) -> Quantization | None:
    groups = said.get("config_groups")
    if not isinstance(groups, Mapping) or not all(isinstance(group, Mapping) for group in groups.values()):
        raise CatalogError(f"{where}: config_groups must be a JSON object of groups")
    schemes = [_scheme(group, f"{where}, config_groups, {str(name)[:40]}") for name, group in groups.items()]
    if not schemes:
        return None
    if any(scheme != schemes[0] for scheme in schemes):
        raise CatalogError(f"{where}: groups of matrices that are quantised differently are not computed")
    return replace(schemes[0], unquantized=_names(said, where, "ignore"))


def _scheme(group: Mapping[str, Any], where: str) -> Quantization:
    targets = group.get("targets")
    if targets is not None and targets != ["Linear"]:
        raise CatalogError(f"{where}: targets must be ['Linear'], all projections, not {str(targets)[:60]}")
    weights, inputs = group.get("weights"), group.get("input_activations")
    if not isinstance(weights, Mapping):
        raise CatalogError(f"{where}: weights is missing")
    bits = size(weights, "num_bits", where)
    kind, strategy = weights.get("type", "int"), weights.get("strategy") or "tensor"
    if bits not in (4, 8) or kind not in ("int", "float"):
        raise CatalogError(f"{where}: weights of type {str(kind)[:20]} in {bits} bits are not computed")
    activation_bits = size(inputs, "num_bits", where) if isinstance(inputs, Mapping) else 16
    common = Quantization(
        method="compressed-tensors",
        weight_bits=bits,
        weight_type=kind,
        activation_bits=activation_bits,
        scale_bytes=4 if activation_bits < 16 else 2,
        zero_points=bits == 4 and not flag(weights, "symmetric", where, default=True),
    )
    if strategy == "tensor":
        return replace(common, group_size=-1)
    if strategy == "channel":
        return common
    if strategy in ("group", "tensor_group"):
        group_size = _group(weights, "group_size", where)
        return replace(common, group_size=group_size, scale_bytes=1 if kind == "float" and bits == 4 else 2)
    block = weights.get("block_structure")
    if (
        strategy == "block"
        and isinstance(block, list)
        and len(block) == 2
        and all(type(n) is int and n > 0 for n in block)
    ):
        return replace(common, block=(block[0], block[1]), scale_bytes=4)
    raise CatalogError(f"{where}: the strategy {str(strategy)[:40]!r} of weights is not computed")


def _mindie(said: str, where: str) -> Quantization | None:
    if said.lower() in ("", "float"):
        return None
    if said.lower() not in ("w8a8", "w8a8_dynamic"):
        raise CatalogError(f"{where}: quantised weights {said[:40]!r} are not computed; known are w8a8, w8a8_dynamic")
    return ASCEND_W8A8


READERS: dict[str, Callable[[Mapping[str, Any], str], Quantization | None]] = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "ascend": lambda said, where: ASCEND_W8A8,  # its quant_model_description.json has what stays in 16 bit
}


def _names(said: Mapping[str, Any], where: str, *keys: str, anywhere: bool = False) -> tuple[str, ...]:
    """The modules that stay in 16 bit; *anywhere*: as pieces of names, which is how AWQ and GPTQ look for them.

    Patterns (``re:``) may have ``.*`` and no more: the file is not trusted with regular expressions.
    """
    key = next((key for key in keys if said.get(key) is not None), keys[0])
    names = said.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CatalogError(f"{where}: {key} must be a list of names")
    return tuple(dict.fromkeys(_name(name, f"{where}, {key}", anywhere=anywhere) for name in names))


def _name(name: str, where: str, *, anywhere: bool) -> str:
    if name.startswith("re:"):
        text = name[3:]
        end = "" if text.endswith("$") else "*"
        text = text.removeprefix("^").removesuffix("$").replace(".*", "*").replace("\\.", ".")
        if set(text) & set("\\[](){}|+?^$"):
            raise CatalogError(f"{where}: the pattern {name[:60]!r} is not read; only .* is")
        name = text + end
    for prefix in ("model.", "language_model.", "model."):
        name = name.removeprefix(prefix)
    return f"*{name}*" if anywhere and "*" not in name else name
