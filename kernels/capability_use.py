"""What is to be run, on which family of devices: the columns that the rows of the capability table speak of.

::

    family   devices                              bf16   fp8   paged attention that is documented for it
    910a     910A, 910ProA, 910PremiumA           no     no    none
    310p     310P1..P7, one chip of a Duo card    no     no    ATB paged attention, incre flash attention (IFA)
    a2       910B1..B4, B2C                       yes    no    fused infer attention (FIA), ATB
    a3       910C, 910_93xx: one die              yes    no    FIA, ATB
    ampere   compute capability 8.0, 8.6          yes    no    FlashAttention 2, FlashInfer, Triton
    ada      8.9                                  yes    yes   the same
    hopper   9.0                                  yes    yes   FlashAttention 3, FlashInfer, Triton
    blackwell_rtx  12.0: RTX PRO and GeForce      yes    yes   FlashAttention 2, FlashInfer, Triton
    cpu      a server's cores                     yes    no    vLLM's own, torch's flash kernel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hbmtwin.kernels.records import DeviceSpec, ModelShape, Quantization

FIA, IFA = "npu_fused_infer_attention_score", "npu_incre_flash_attention"

WeightFormat = Literal["16bit", "fp8", "int8", "int4", "fp4"]
Setting = Literal["engine", "dtype", "quantization", "kv_cache_dtype", "block_size", "model"]

SIXTEEN_BIT = ("auto", "float16", "bfloat16")
NPU_ONLY = ("int8", "int8_per_token", "int4", "int4_per_token")
"""Dtypes of the cache that only ops of the NPU have."""
PER_TOKEN_HEAD = ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head")
"""Those of vLLM's Triton kernels, beside plain FP8."""

EIGHT_BIT = {
    "ascend": ("int8", "int8_per_token", "int8_per_token_head"),
    "nvidia": ("fp8", "int8_per_token_head", "fp8_per_token_head"),
    "cpu": (),
}
"""What is proposed in place of a dtype of the cache that does not go, by vendor."""

HEAD_DIM_UNIT = {16: 16, 8: 32, 4: 64}
"""FIA: head_dim must be a multiple of this, by the bits of an element."""
MAX_HEAD_DIM = 512
LATENTS = ((512, 64), (128, 64))
"""FIA: (latent, rotary) elements of the MLA caches that it reads."""
MAX_QUERIES_PER_KV = 64
FLASHINFER_HEAD_DIMS = (64, 128, 256)
"""That its FP8 kernels for compute capability 8 take in the release that vLLM 0.27 pins."""
BLOCK_ELEMENTS_310P = 16_384
"""Of one head in one block that the kernel of 310P takes."""


class Family(NamedTuple):
    """Devices of one kind of cores: what they compute with, and what people call them."""

    vendor: str
    called: str
    bf16: bool
    fp8: bool
    kernel_block_sizes: tuple[int, ...]
    """A block of the KV cache must be a multiple of one of these."""
    attention: str
    """The op that reads a paged cache."""
    source: str


_NPU_OPS = "op-plugin 517f2e7d, documents of the attention ops"
_VLLM = "vLLM 0.27.1, platforms/cuda.py and v1/attention/backends"

FAMILIES: dict[str, Family] = {
    "910a": Family(
        "ascend", "Ascend 910A", False, False, (128,), FIA, f"{_NPU_OPS}: none names it; bfloat16: asc 9294"
    ),
    "310p": Family(
        *("ascend", "310P", False, False, (128, 64), IFA),
        f"{_NPU_OPS}; block sizes: vllm_ascend/_310p/attention/attention_v1.py",
    ),
    "a2": Family("ascend", "Atlas A2", True, False, (128,), FIA, f"{_NPU_OPS}; asc 182b75e"),
    "a3": Family("ascend", "Atlas A3", True, False, (128,), FIA, f"{_NPU_OPS}; asc 182b75e"),
    "ampere": Family("nvidia", "NVIDIA Ampere", True, False, (16,), "FlashAttention 2", _VLLM),
    "ada": Family("nvidia", "NVIDIA Ada", True, True, (16,), "FlashAttention 2", _VLLM),
    "hopper": Family("nvidia", "NVIDIA Hopper", True, True, (16,), "FlashAttention 3", _VLLM),
    "blackwell_rtx": Family("nvidia", "NVIDIA RTX Blackwell", True, True, (16,), "FlashAttention 2", _VLLM),
    "cpu": Family("cpu", "a CPU", True, False, (1,), "vLLM's CPU attention", "vLLM of 2026, platforms/cpu.py"),
}
"""By the name that a device of the catalog gives as its ``family``."""

NPU = tuple(name for name, family in FAMILIES.items() if family.vendor == "ascend")
CUDA = tuple(name for name, family in FAMILIES.items() if family.vendor == "nvidia")
NO_BF16 = tuple(name for name, family in FAMILIES.items() if not family.bf16)
NPU_NO_FP8 = tuple(name for name in NPU if not FAMILIES[name].fp8)
CUDA_NO_FP8 = tuple(name for name in CUDA if not FAMILIES[name].fp8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A model with its settings on a device."""

    family: str
    engine: str
    """As ``--engine`` calls it; empty: any, only what devices and ops cannot do counts."""
    model: ModelShape
    dtype: str
    """Of what is computed; ``auto``: what the model's config says, which the shape does not tell."""
    method: str
    """Of quantisation, as vLLM calls it; empty: none."""
    weights: WeightFormat
    k: str
    """The dtype of K in the cache by its name, or of the latent."""
    v: str
    paged: bool
    long_query: bool
    """Whether a step may compute several tokens over cached ones: chunked prefill, prefix hits."""
    block_size: int | None
    """None: the engine's default."""

    @property
    def on(self) -> Family:
        """The family of its device."""
        return FAMILIES[self.family]

    @property
    def latent(self) -> bool:
        """Whether the cache keeps one latent tensor (MLA)."""
        return bool(self.model.latent_dim)

    @property
    def kernel_block(self) -> int:
        """The smallest block that the attention kernel takes."""
        return min(self.on.kernel_block_sizes)


def use_of(
    device: DeviceSpec,
    model: ModelShape,
    *,
    engine: str,
    dtype: str,
    kv_cache_dtype: str,
    v_dtype: str | None,
    paged: bool,
    long_query: bool,
    block_size: int | None,
) -> Use:
    """The columns of that. Raise ValueError for a device of a family that the table does not have."""
    if device.family not in FAMILIES:
        raise ValueError(
            f"{device.name}: unknown family {device.family!r}; give the device one of {', '.join(FAMILIES)}"
        )
    return Use(
        family=device.family,
        engine=engine,
        model=model,
        dtype=dtype,
        method=model.quantization.method if model.quantization is not None else "",
        weights=weight_format(model.quantization),
        k=kv_cache_dtype,
        v=v_dtype or kv_cache_dtype,
        paged=paged,
        long_query=long_query,
        block_size=block_size,
    )


def weight_format(quantization: Quantization | None) -> WeightFormat:
    """What the stored weights are made of."""
    if quantization is None:
        return "16bit"
    floats = quantization.weight_type == "float"
    if quantization.weight_bits == 4:
        return "fp4" if floats else "int4"
    if quantization.weight_bits == 8:
        return "fp8" if floats else "int8"
    return "16bit"


def kv_bits(name: str, model: ModelShape) -> int:
    """Bits of an element of the cache under that name."""
    if name == "auto":
        return 8 * model.dtype_bytes
    return next((bits for start, bits in (("fp8", 8), ("int8", 8), ("int4", 4)) if name.startswith(start)), 16)


def quantised(name: str) -> bool:
    """Whether that dtype of the cache is one of 8 or 4 bits."""
    return name.startswith(("fp8", "int8", "int4"))


class Row(NamedTuple):
    """One thing that does not go, or goes otherwise."""

    key: str
    families: tuple[str, ...]
    engines: tuple[str, ...]
    """Empty: whatever engine, it is the device or its ops that cannot."""
    setting: Setting
    """The setting at fault; ``kv_cache_dtype`` is asked for K and for V."""
    refuses: bool
    """False: it runs, and this is to be known."""
    holds: Callable[[Use, str], bool]
    """Of a use and the dtype of the cache that is asked about."""
    en: str
    zh: str
    source: str


def unit_of(use: Use, kv: str) -> int:
    """What head_dim must be a multiple of, for that dtype of the cache; 1 where nothing is said."""
    return HEAD_DIM_UNIT.get(kv_bits(kv, use.model), 1)


def apart(use: Use) -> bool:
    """Whether K and V are of two dtypes."""
    return use.k != use.v and not {use.k, use.v} <= set(SIXTEEN_BIT)


def places(use: Use, kv: str, left: Sequence[str]) -> dict[str, object]:
    """What stands in the places of a row's text; *left* are dtypes of the cache that no row refuses."""
    model, on = use.model, use.on
    return {
        "engine": use.engine,
        "chip": on.called,
        "op": on.attention,
        "model": model.name,
        "kv": kv,
        "left": ", ".join(left),
        "head_dim": model.head_dim,
        "unit": unit_of(use, kv),
        "max_head_dim": MAX_HEAD_DIM,
        "latent": f"{model.kv_lora_rank} + {model.qk_rope_head_dim}",
        "latents": ", ".join(f"{rank} + {rope}" for rank, rope in LATENTS),
        "queries": model.num_attention_heads // model.num_kv_heads,
        "max_queries": MAX_QUERIES_PER_KV,
        "flashinfer": ", ".join(str(dim) for dim in FLASHINFER_HEAD_DIMS),
        "block_size": use.block_size,
        "block_elements": f"{BLOCK_ELEMENTS_310P:,}",
        "kernel_block": use.kernel_block,
        "kernel_blocks": ", ".join(str(size) for size in on.kernel_block_sizes),
    }
