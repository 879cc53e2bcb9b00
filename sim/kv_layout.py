"""How the KV of a model lies in memory under ``kv_cache.dtype``, and which ops can read it so.

::

    dtype                                      bits   scale                        whose name
    auto, float16, bfloat16                    16     none                         vLLM
    fp8, fp8_e4m3, fp8_e5m2                    8      fp32 a tensor, constant      vLLM
    int8_per_token_head, fp8_per_token_head    8      fp32 a token and KV head     vLLM; int8: NPU mode 3, paged 5
    int4_per_token_head                        4      fp32 a token and KV head     vLLM; NPU mode 3
    int8, int4                                 8, 4   16 bits a channel, constant  NPU mode 0
    int8_per_token, int4_per_token             8, 4   fp32 a token                 NPU mode 1; int8 paged: 4

Names and bytes of vLLM are those of its 0.27; modes and limits of the NPU are those that the documents of
``npu_fused_infer_attention_score`` (FIA) give for Atlas A2 and A3. Nothing here was run on an NPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from hbmtwin.allocators.records import KVDtype, KVLayout
from hbmtwin.kernels.records import ModelShape

SIXTEEN_BIT = ("auto", "float16", "bfloat16")
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
PER_TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
NPU_ONLY = ("int8", "int8_per_token", "int4", "int4_per_token")
DTYPES = (*SIXTEEN_BIT, *FP8, *PER_TOKEN_HEAD, *NPU_ONLY)
"""All names that ``kv_cache.dtype`` and ``kv_cache.v_dtype`` take."""

NPU_HEAD_DIM_UNIT = {16: 16, 8: 32, 4: 64}
"""FIA: head_dim must be a multiple of this, by the bits of an element."""
NPU_MAX_HEAD_DIM = 512
NPU_LATENT = ((512, 64), (128, 64))
"""FIA: (latent, rotary) elements of the MLA caches that it reads."""


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


def device_refusal(device_vendor: str, model: ModelShape, *, dtype: str, v_dtype: str | None) -> str | None:
    """Why no attention op of that vendor reads this KV, wherever it lies; None where one does.

    Names that do not exist are left to :func:`kv_layout`, which is to be asked after this.
    """
    if device_vendor != "ascend":
        return None
    if model.latent_dim:
        latent = (model.kv_lora_rank, model.qk_rope_head_dim)
        if latent not in NPU_LATENT:
            known = " or ".join(f"{rank} + {rope}" for rank, rope in NPU_LATENT)
            return (
                f"dtype: a latent of {latent[0]} + {latent[1]} elements: npu_fused_infer_attention_score reads {known}"
            )
        if dtype in DTYPES and dtype not in SIXTEEN_BIT:
            return (
                f"dtype: {dtype!r} for the latent tensor of {model.name} (MLA): Atlas A2 and A3 have no FP8, and a "
                f"latent is not stored in integers; use one of {', '.join(SIXTEEN_BIT)}"
            )
        return None
    given = [(key, name) for key, name in (("dtype", dtype), ("v_dtype", v_dtype or dtype)) if name in DTYPES]
    for key, name in given:
        if name.startswith("fp8"):
            fits = model.head_dim % NPU_HEAD_DIM_UNIT[8] == 0
            left = ("int8", "int8_per_token", "int8_per_token_head") if fits else SIXTEEN_BIT
            return f"{key}: {name!r}: Atlas A2 and A3 have no FP8; use one of {', '.join(left)}"
    for key, name in given:
        unit = NPU_HEAD_DIM_UNIT[_dtype(key, name, model).bits]
        if model.head_dim % unit or model.head_dim > NPU_MAX_HEAD_DIM:
            return (
                f"{key}: {name!r} with head_dim {model.head_dim}: npu_fused_infer_attention_score needs a "
                f"multiple of {unit}, at most {NPU_MAX_HEAD_DIM}"
            )
    return None


def paged_refusal(device_vendor: str, dtype: str, v_dtype: str | None) -> str | None:
    """Why no paged attention of that vendor's engine reads this KV; None where one does."""
    apart = v_dtype is not None and v_dtype != dtype and not {dtype, v_dtype} <= set(SIXTEEN_BIT)
    given = (("dtype", dtype), ("v_dtype", v_dtype or dtype))
    if device_vendor == "ascend":
        key = next((key for key, name in given if name.startswith("int4")), None)
        if key is not None:
            return f"{key}: int4 with a block table is not supported by npu_fused_infer_attention_score; use int8"
        if apart:
            return (
                "v_dtype: K and V apart: npu_fused_infer_attention_score takes one dtype and one antiquant mode for "
                "both where there is a block table; leave v_dtype out, or use a contiguous policy"
            )
        return None
    if apart:
        return (
            "v_dtype: K and V apart: vLLM has one kv_cache_dtype for both; leave v_dtype out, or use a contiguous "
            "policy"
        )
    if dtype in NPU_ONLY:
        return (
            f"dtype: {dtype!r} is a dtype of the NPU ops; vLLM on CUDA takes fp8 or one of {', '.join(PER_TOKEN_HEAD)}"
        )
    return None


def kernel_notes(device_vendor: str, dtype: str, v_dtype: str | None, *, paged: bool) -> tuple[str, ...]:
    """What holds for a quantised cache on that vendor's devices, in blocks or not, and is not in the step's time."""
    given = (("dtype", dtype), ("v_dtype", v_dtype or dtype))
    if device_vendor != "ascend":
        foreign = next((f"kv_cache.{key} = {name}" for key, name in given if name in NPU_ONLY), None)
        if foreign is None:
            return ()
        return (f"{foreign}: a dtype of the NPU ops; the times on CUDA are those of a kernel that would read it",)
    quantised = next((f"kv_cache.{key} = {name}" for key, name in given if name not in SIXTEEN_BIT), None)
    if not paged or quantised is None:
        return ()
    return (
        f"{quantised}: npu_fused_infer_attention_score reads a quantised cache with a block table "
        "for one query token only; a prefill over cached tokens must dequantise them first, whose time is not counted",
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
