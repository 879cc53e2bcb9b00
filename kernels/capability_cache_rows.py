"""Rows of the capability table about the cache of KV: see :mod:`hbmtwin.kernels.capability_rows`."""

from __future__ import annotations

from hbmtwin.kernels.capability_use import (
    CUDA,
    FLASHINFER_HEAD_DIMS,
    LATENTS,
    MAX_HEAD_DIM,
    NO_BF16,
    NPU,
    NPU_NO_FP8,
    NPU_ONLY,
    PER_TOKEN_HEAD,
    Row,
    apart,
    quantised,
    unit_of,
)

CACHE = (
    Row(
        *("quantised_cpu", ("cpu",), (), "kv_cache_dtype", True),
        lambda use, kv: quantised(kv),
        "{kv!r}: vLLM on a CPU keeps its cache in 16 bits; use one of {left}",
        "{kv!r}：vLLM 的 CPU 后端只支持 16 位 KV；可用 {left}",
        "vLLM of 2026, platforms/cpu.py: falls back to auto, or refuses beside chunked prefill",
    ),
    Row(
        *("bf16_kv", NO_BF16, (), "kv_cache_dtype", True),
        lambda use, kv: kv == "bfloat16",
        "{kv!r}: {chip} has no bfloat16; use one of {left}",
        "{kv!r}：{chip} 不支持 bfloat16；可用 {left}",
        "asc 9294 (910A); 310P: aclnnCast takes no bfloat16, LlamaFactory issue 7522",
    ),
    Row(
        *("latent_npu", NPU, (), "kv_cache_dtype", True),
        lambda use, kv: use.latent and quantised(kv),
        "{kv!r} for the latent tensor of {model} (MLA): {chip} has no FP8, and a latent is not stored in integers; use "
        "one of {left}",
        "{model}（MLA）的 latent 缓存用 {kv!r}：{chip} 不支持 FP8，latent 也不以整数存放；可用 {left}",
        "op-plugin: FIA with rope; a W8A8C8 checkpoint of DeepSeek runs between separate prefill and decode servers "
        "only, asc 7222",
    ),
    Row(
        *("latent_310p", ("310p", "910a"), (), "model", True),
        lambda use, kv: use.latent,
        "{model} keeps a latent cache (MLA), and no op of {chip} reads one; use Atlas A2 or A3",
        "{model} 采用 MLA，缓存的是 latent，而 {chip} 没有能读它的算子；请改用 Atlas A2 或 A3",
        "asc 182b75e, vllm_ascend/_310p: no MLA; op-plugin: FIA and the MLA ops name A2 and A3",
    ),
    Row(
        *("latent_size_npu", ("a2", "a3"), (), "kv_cache_dtype", True),
        lambda use, kv: use.latent and (use.model.kv_lora_rank, use.model.qk_rope_head_dim) not in LATENTS,
        "a latent of {latent} elements: {op} reads {latents}",
        "latent 维度为 {latent}：{op} 只支持 {latents}",
        "op-plugin: FIA with query_rope and key_rope",
    ),
    Row(
        *("fp8_kv_npu", NPU_NO_FP8, (), "kv_cache_dtype", True),
        lambda use, kv: kv.startswith("fp8"),
        "{kv!r}: {chip} has no FP8; use one of {left}",
        "{kv!r}：{chip} 不支持 FP8；可用 {left}",
        "asc 8102: fp8 and fp8_e5m2 crash on a 910B2",
    ),
    Row(
        *("head_dim_npu", NPU, (), "kv_cache_dtype", True),
        lambda use, kv: (
            not use.latent and (use.model.head_dim % unit_of(use, kv) > 0 or use.model.head_dim > MAX_HEAD_DIM)
        ),
        "{kv!r} with head_dim {head_dim}: {op} needs a multiple of {unit}, at most {max_head_dim}",
        "{kv!r}，head_dim 为 {head_dim}：{op} 要求是 {unit} 的倍数，且不超过 {max_head_dim}",
        "op-plugin: FIA",
    ),
    Row(
        *("int4_paged_npu", NPU, (), "kv_cache_dtype", True),
        lambda use, kv: use.paged and kv.startswith("int4"),
        "int4 with a block table is not supported by {op}; use one of {left}",
        "{op} 在分页（block table）下不支持 int4；可用 {left}",
        "op-plugin: FIA, dtypes of a paged cache",
    ),
    Row(
        *("int4_310p", ("310p", "910a"), (), "kv_cache_dtype", True),
        lambda use, kv: kv.startswith("int4"),
        "{kv!r}: {op} reads int8 and 16 bits; use one of {left}",
        "{kv!r}：{op} 只支持 int8 和 16 位；可用 {left}",
        "op-plugin: incre flash attention; FIA, which reads int4, names A2 and A3",
    ),
    Row(
        *("quantised_310p", ("310p", "910a"), ("vllm", "vllm-ascend"), "kv_cache_dtype", True),
        lambda use, kv: use.paged and kv.startswith("int8"),
        "{kv!r}: the backend of {chip} in vllm-ascend reads 16 bits only; use one of {left}",
        "{kv!r}：vllm-ascend 的 {chip} 后端只支持 16 位 KV；可用 {left}",
        "vllm_ascend/_310p/attention/attention_v1.py: caches go to _npu_paged_attention as they are",
    ),
    Row(
        *("apart_npu", NPU, (), "kv_cache_dtype", True),
        lambda use, kv: use.paged and apart(use) and kv == use.v,
        "K and V apart: {op} takes one dtype and one antiquant mode for both where there is a block table; leave "
        "v_dtype out, or use a contiguous policy",
        "K 与 V 的 dtype 不同：{op} 在分页下要求两者的 dtype 和反量化模式一致；请去掉 v_dtype，或改用 contiguous 策略",
        "op-plugin: FIA, antiquant modes",
    ),
    Row(
        *("apart_cuda", CUDA, (), "kv_cache_dtype", True),
        lambda use, kv: use.paged and apart(use) and kv == use.v,
        "K and V apart: vLLM has one kv_cache_dtype for both; leave v_dtype out, or use a contiguous policy",
        "K 与 V 的 dtype 不同：vLLM 只有一个 kv_cache_dtype；请去掉 v_dtype，或改用 contiguous 策略",
        "vLLM 0.27.1, config/cache.py",
    ),
    Row(
        *("npu_dtype_cuda", CUDA, (), "kv_cache_dtype", True),
        lambda use, kv: use.paged and kv in NPU_ONLY,
        "{kv!r} is a dtype of the NPU ops; use one of {left}",
        "{kv!r} 是 NPU 算子的 dtype；可用 {left}",
        "vLLM 0.27.1, config/cache.py",
    ),
    Row(
        *("fp8_head_ampere", ("ampere",), ("vllm",), "kv_cache_dtype", True),
        lambda use, kv: kv == "fp8_per_token_head",
        "{kv!r} needs compute capability 8.9: only the Triton kernel reads it; use one of {left}",
        "{kv!r} 需要计算能力 8.9：只有 Triton 内核支持；可用 {left}",
        "vLLM 0.27.1, v1/attention/backends/triton_attn.py; vllm 26431 (RTX 3090)",
    ),
    Row(
        *("latent_ampere", ("ampere",), ("vllm",), "kv_cache_dtype", True),
        lambda use, kv: use.latent and quantised(kv),
        "{kv!r} for a latent cache (MLA): no backend reads it on {chip}; use one of {left}",
        "latent 缓存（MLA）用 {kv!r}：{chip} 上没有后端支持；可用 {left}",
        "vLLM 0.27.1, v1/attention/backends/mla/triton_mla.py: FP8 from compute capability 8.9",
    ),
    Row(
        *("latent_cuda", ("ada", "hopper", "blackwell_rtx"), ("vllm",), "kv_cache_dtype", True),
        lambda use, kv: use.latent and kv in ("fp8_e5m2", *PER_TOKEN_HEAD),
        "{kv!r} for a latent cache (MLA): no backend reads it; use one of {left}",
        "latent 缓存（MLA）用 {kv!r}：没有后端支持；可用 {left}",
        "vLLM 0.27.1, v1/attention/backends/mla: supported_kv_cache_dtypes",
    ),
    Row(
        *("fp8_head_dim_ampere", ("ampere",), ("vllm",), "kv_cache_dtype", True),
        lambda use, kv: (
            not use.latent and kv in ("fp8", "fp8_e4m3", "fp8_e5m2") and use.model.head_dim not in FLASHINFER_HEAD_DIMS
        ),
        "{kv!r} with head_dim {head_dim} on {chip}: FlashInfer alone reads FP8 there, for head_dim {flashinfer}; use "
        "one of {left}",
        "{chip} 上 head_dim 为 {head_dim} 时用 {kv!r}：那里只有 FlashInfer 支持 FP8，且 head_dim 须为 {flashinfer}；"
        "可用 {left}",
        "vLLM 0.27.1, v1/attention/backends: flash_attn.py (FP8 with FA3 only), triton_attn.py (8.9), flashinfer.py; "
        "head_dim 512 came with FlashInfer's pull request 5044, 2026-09",
    ),
    Row(
        *("e5m2_weights_cuda", CUDA, ("vllm",), "kv_cache_dtype", True),
        lambda use, kv: use.method == "fp8" and kv == "fp8_e5m2",
        "{kv!r} with an FP8 checkpoint: vLLM refuses it; use one of {left}",
        "FP8 权重配 {kv!r}：vLLM 会拒绝；可用 {left}",
        "vLLM 0.27.1, model_executor/layers/attention/attention.py",
    ),
    Row(
        *("fp8_kv_ampere", ("ampere",), ("vllm",), "kv_cache_dtype", False),
        lambda use, kv: kv in ("fp8", "fp8_e4m3", "fp8_e5m2") and not use.latent,
        "{kv!r} on {chip}: FlashInfer reads it, in software, not FlashAttention; vLLM 0.11 took Triton there and did "
        "not start",
        "{chip} 上用 {kv!r}：由 FlashInfer 以软件方式读取，而非 FlashAttention；vLLM 0.11 会选 Triton 而启动失败",
        "vLLM 0.27.1, v1/attention/backends/flashinfer.py (8.0 and up); FlashInfer's pull request 5044, on an A100; "
        "vllm 26431: 0.11 fails on an RTX 3090",
    ),
    Row(
        *("npu_dtype_notes_cuda", CUDA, (), "kv_cache_dtype", False),
        lambda use, kv: not use.paged and kv in NPU_ONLY,
        "a dtype of the NPU ops; the times on CUDA are those of a kernel that would read it",
        "这是 NPU 算子的 dtype；CUDA 上的耗时按假想能读它的内核计算",
        "vLLM 0.27.1, config/cache.py",
    ),
    Row(
        *("long_query_npu", NPU, (), "kv_cache_dtype", False),
        lambda use, kv: use.paged and use.long_query and quantised(kv),
        "{op} reads a quantised cache with a block table for one query token only; a prefill over cached tokens "
        "must dequantise them first, at a cost that is not counted",
        "{op} 在分页下只有单 token 查询能直接读量化缓存；对已缓存 token 的 prefill 须先反量化，其开销未计入",
        "op-plugin: FIA, dtypes of a paged cache for Q_S > 1; asc 4218, 7474",
    ),
    Row(
        *("int8_by_checkpoint", ("a2", "a3"), ("vllm", "vllm-ascend"), "kv_cache_dtype", False),
        lambda use, kv: use.paged and kv.startswith("int8"),
        "{kv!r}: vllm-ascend has no such value of --kv-cache-dtype; an INT8 cache comes with a W8A8C8 checkpoint, one "
        "constant scale a channel",
        "{kv!r}：vllm-ascend 的 --kv-cache-dtype 没有这个取值；INT8 KV 由 W8A8C8 权重带来，每通道一个静态 scale",
        "asc 7474; vllm_ascend/quantization/methods/kv_c8.py",
    ),
)
