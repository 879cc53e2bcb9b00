"""How the KV of a model lies in memory under ``kv_cache.dtype``, and whether a kernel reads it so.

::

    dtype                                      bits   scale                        whose name
    auto, float16, bfloat16                    16     none                         vLLM
    fp8, fp8_e4m3, fp8_e5m2                    8      fp32 a tensor, constant      vLLM
    int8_per_token_head, fp8_per_token_head    8      fp32 a token and KV head     vLLM; int8: NPU mode 3, paged 5
    int4_per_token_head                        4      fp32 a token and KV head     vLLM; NPU mode 3
    int8, int4                                 8, 4   16 bits a channel, constant  NPU mode 0
    int8_per_token, int4_per_token             8, 4   fp32 a token                 NPU mode 1; int8 paged: 4

Names and bytes of vLLM are those of its 0.27, modes of the NPU those of ``npu_fused_infer_attention_score`` (FIA). Who
reads what is the capability table's (:mod:`hbmtwin.kernels.capabilities`).
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from hbmtwin.allocators.records import KVDtype, KVLayout
from hbmtwin.kernels.capabilities import CapabilityFinding, capability_findings
from hbmtwin.kernels.capability_use import NPU_ONLY, PER_TOKEN_HEAD, SIXTEEN_BIT
from hbmtwin.kernels.records import DeviceSpec, ModelShape

FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
DTYPES = (*SIXTEEN_BIT, *FP8, *PER_TOKEN_HEAD, *NPU_ONLY)
"""All names that ``kv_cache.dtype`` and ``kv_cache.v_dtype`` take."""


def kv_layout(
    model: ModelShape, *, dtype: str = "auto", v_dtype: str | None = None, tensor_parallel_size: int = 1
) -> KVLayout:
    """The layout of *model*'s KV on one rank; *v_dtype* is V's where it differs from K's.

    Raise ValueError for an unknown dtype, with the nearest known one, and for one that the model's KV cannot have; it
    starts with the key at fault, as the refusals below do.
    """
    if model.latent_dim:
        if v_dtype is not None:
            raise ValueError(
                f"v_dtype: {v_dtype!r} where {model.name} keeps one latent tensor and no V (MLA); leave it out"
            )
        if dtype in DTYPES and dtype not in (*SIXTEEN_BIT, *FP8):
            raise ValueError(
                f"dtype: the latent tensor of {model.name} (MLA) cannot be stored as {dtype!r}; use one of "
                f"{', '.join((*SIXTEEN_BIT, *FP8))}"
            )
        return KVLayout(
            num_layers=model.num_attention_layers,
            num_kv_heads=1,
            head_dim=model.latent_dim,
            dtype=_dtype("dtype", dtype, model),
            tensor_parallel_size=tensor_parallel_size,
            v_head_dim=0,
        )
    return KVLayout(
        num_layers=model.num_attention_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=_dtype("dtype", dtype, model),
        tensor_parallel_size=tensor_parallel_size,
        v_dtype=None if v_dtype is None else _dtype("v_dtype", v_dtype, model),
    )


def scale_tensors(layout: KVLayout) -> Iterator[tuple[str, int]]:
    """Yield ``(name, bytes)`` of the constant scales of the cache, which are loaded after the weights."""
    for i in range(layout.num_layers):
        for name, size in layout.constant_scales:
            yield f"layers.{i}.{name}", size


def kv_refusal(
    device: DeviceSpec, model: ModelShape, *, dtype: str, v_dtype: str | None, paged: bool = False
) -> str | None:
    """Why no attention op of that device reads this KV, beginning with the key at fault; None where one does.

    *paged*: in blocks, else wherever it lies. Names that do not exist are left to :func:`kv_layout`.
    """
    found = _findings(device, model, dtype, v_dtype, paged)
    return next((f"{_KEYS.get(f.setting, f.setting)}: {f.en}" for f in found if f.refused), None)


def kernel_notes(
    device: DeviceSpec, model: ModelShape, *, dtype: str, v_dtype: str | None, paged: bool
) -> tuple[str, ...]:
    """What holds for this KV on that device, in blocks or not, and is not in the step's time."""
    names = {"kv_cache_dtype": dtype, "v_dtype": v_dtype}
    told = [f for f in _findings(device, model, dtype, v_dtype, paged) if not f.refused and f.setting != "dtype"]
    return tuple(f"{_KEYS[f.setting]} = {names[f.setting]}: {f.en}" if f.setting in names else f.en for f in told)


_KEYS = {"kv_cache_dtype": "kv_cache.dtype", "v_dtype": "kv_cache.v_dtype", "model": "model.name"}
"""The scenario's key for what the capability table calls it."""


def _findings(
    device: DeviceSpec, model: ModelShape, dtype: str, v_dtype: str | None, paged: bool
) -> tuple[CapabilityFinding, ...]:
    return capability_findings(
        device,
        model,
        kv_cache_dtype=dtype if dtype in DTYPES else "auto",
        v_dtype=v_dtype if v_dtype in DTYPES and not model.latent_dim else None,
        paged=paged,
    )


def _dtype(key: str, name: str, model: ModelShape) -> KVDtype:
    if name not in DTYPES:
        near = get_close_matches(name, DTYPES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"{key}: unknown {key} {name!r}: {hint}Known are {', '.join(DTYPES)}")
    if name == "auto":
        return KVDtype(8 * model.dtype_bytes)
    if name in SIXTEEN_BIT:
        return KVDtype(16)
    if name in FP8:
        return KVDtype(8, "tensor")
    bits = 4 if name.startswith("int4") else 8
    if name in PER_TOKEN_HEAD:
        return KVDtype(bits, "token_head")
    return KVDtype(bits, "token" if name.endswith("_per_token") else "channel")
