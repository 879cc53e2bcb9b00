"""The capability table: which combinations no kernel runs, or runs in another way than people expect.

::

    key               families         engines        holds where                    refuses   source
    fp8_kv_npu        all of Ascend    any            the cache's dtype is FP8       yes       asc 8102
    long_query_npu    all of Ascend    any            8 bits, in blocks, query > 1   no        op-plugin
    awq_npu           a2, a3           vllm-ascend    the method is AWQ              no        asc 4378

Each is said in English and in Chinese, with the cure. Rows stand in the order in which they are told; one about the
cache is asked for K and for V. "asc" is vllm-project/vllm-ascend, "op-plugin" Ascend/op-plugin 517f2e7d, its documents
of torch_npu's ops. Nothing here was run on an NPU: what a calibration measures makes further rows.
"""

from __future__ import annotations

from hbmtwin.kernels.capability_cache_rows import CACHE
from hbmtwin.kernels.capability_use import (
    BLOCK_ELEMENTS_310P,
    CUDA,
    CUDA_NO_FP8,
    MAX_QUERIES_PER_KV,
    NO_BF16,
    NPU,
    NPU_NO_FP8,
    Row,
)

ENGINES = (
    Row(
        *("nvidia_engine", CUDA, ("vllm-ascend", "mindie"), "engine", True),
        lambda use, kv: True,
        "{engine} serves Ascend devices only; use vllm",
        "{engine} 只支持昇腾设备；请改用 vllm",
        "readme of vllm-ascend; documents of MindIE",
    ),
    Row(
        *("ascend_engine", NPU, ("tensorrt-llm",), "engine", True),
        lambda use, kv: True,
        "{engine} serves NVIDIA devices only; use vllm-ascend, sglang or mindie",
        "{engine} 只支持 NVIDIA 设备；请改用 vllm-ascend、sglang 或 mindie",
        "readme of TensorRT-LLM",
    ),
    Row(
        *("910a_engine", ("910a",), ("vllm", "vllm-ascend", "sglang"), "engine", True),
        lambda use, kv: True,
        "{engine} is built for Atlas A2, A3 and 310P, not for the first 910 (910A, 910ProB); use mindie",
        "{engine} 只提供 Atlas A2、A3 和 310P 的版本，不支持初代 910（910A、910ProB）；请改用 mindie",
        "asc 8, 859; 'A2 or newer' in torch_npu begins at the 910B1",
    ),
    Row(
        *("910a_attention", ("910a",), (), "model", False),
        lambda use, kv: True,
        "no fused attention op is documented for the 910A: what is said of attention is that of Atlas A2",
        "没有面向 910A 的融合注意力算子文档：此处的注意力限制取自 Atlas A2",
        "op-plugin: tables of supported devices of the attention ops",
    ),
)

DTYPES = (
    Row(
        *("no_bf16", NO_BF16, (), "dtype", True),
        lambda use, kv: use.dtype == "bfloat16",
        "{chip} does not compute in bfloat16; use --dtype float16",
        "{chip} 不支持 bfloat16 计算；请加 --dtype float16",
        "asc 9294 (910A); 310P: aclnnCast takes no bfloat16, LlamaFactory issue 7522, and its attention ops float16",
    ),
    Row(
        *("maybe_bf16", NO_BF16, (), "dtype", False),
        lambda use, kv: use.dtype == "auto" and use.model.dtype_bytes == 2,
        "{chip} does not compute in bfloat16, which most configs name: start with --dtype float16",
        "{chip} 不支持 bfloat16 计算，而多数模型的 config 写的正是它：启动时请加 --dtype float16",
        "asc 9294 (910A); 310P: aclnnCast takes no bfloat16, LlamaFactory issue 7522, and its attention ops float16",
    ),
    Row(
        *("w8a8_float16", ("a2", "a3"), ("vllm-ascend",), "dtype", False),
        lambda use, kv: use.method == "ascend" and use.weights == "int8" and use.dtype == "float16",
        "W8A8 weights with float16: aclnnQuantMatmulWeightNz takes no float16 scales and may stop the start; "
        "use --dtype bfloat16",
        "W8A8 权重配 float16：aclnnQuantMatmulWeightNz 不接受 float16 的 scale，可能启动失败；请改用 --dtype bfloat16",
        "asc 12907, on a 910B4-1, vllm-ascend 0.23.0rc1",
    ),
)

WEIGHTS = (
    Row(
        *("fp8_weights_npu", NPU_NO_FP8, (), "quantization", True),
        lambda use, kv: use.weights == "fp8",
        "{chip} does not compute in FP8; take a W8A8 (INT8) checkpoint of the model",
        "{chip} 不支持 FP8 计算；请换用该模型的 W8A8（INT8）权重",
        "asc 1526 (a maintainer: FP8 begins with A5), 3197, 14466",
    ),
    Row(
        *("fp4_weights_npu", NPU, (), "quantization", True),
        lambda use, kv: use.weights == "fp4",
        "{chip} has no FP4; take the bfloat16 checkpoint of the model, or one in W4A8 or W8A8",
        "{chip} 不支持 FP4；请换用该模型的 bfloat16 权重，或 W4A8、W8A8 量化权重",
        "asc 7131: gpt-oss in MXFP4 is refused, its bfloat16 copy runs",
    ),
    Row(
        *("fp8_weights_ampere", CUDA_NO_FP8, (), "quantization", False),
        lambda use, kv: use.weights == "fp8",
        "{chip} does not compute in FP8: weights stay FP8 in memory and are widened in the product (Marlin); that "
        "saves memory, and takes the time of 16 bits",
        "{chip} 没有 FP8 计算单元：权重以 FP8 存放，计算时由 Marlin 反量化；省显存，速度与 16 位相当",
        "vLLM 0.27.1, model_executor/kernels/linear/scaled_mm/marlin.py; vLLM's page on FP8 W8A8",
    ),
    Row(
        *("ascend_weights_cuda", CUDA, (), "quantization", True),
        lambda use, kv: use.method == "ascend",
        "quantisation 'ascend' (ModelSlim) is read by Ascend's engines only; take an FP8, AWQ, GPTQ or "
        "compressed-tensors checkpoint",
        "'ascend'（ModelSlim）量化权重只有昇腾引擎能读；请换用 FP8、AWQ、GPTQ 或 compressed-tensors 权重",
        "vllm_ascend/quantization/modelslim_config.py registers it; vLLM 0.27.1 has no such method",
    ),
    Row(
        *("awq_310p", ("310p", "910a"), ("vllm", "vllm-ascend"), "quantization", True),
        lambda use, kv: "awq" in use.method,
        "no AWQ weights on {chip}: its schemes are W8A8 and its compressed forms; quantise to W8A8 with ModelSlim",
        "{chip} 不支持 AWQ 权重：只有 W8A8 及其压缩格式；请用 ModelSlim 量化为 W8A8",
        "vllm_ascend/_310p/quantization/methods: w8a8_dynamic, w8a8_static, w8a8s, w8a8sc",
    ),
    Row(
        *("awq_npu", ("a2", "a3"), ("vllm", "vllm-ascend"), "quantization", False),
        lambda use, kv: "awq" in use.method,
        "AWQ weights need a vllm-ascend of mid-2026 or later; earlier ones refuse them",
        "AWQ 权重需要 2026 年中及以后的 vllm-ascend；更早的版本会拒绝",
        "asc 4378 (resolved 2026-06); refused by 0.9 and 0.13: asc 1233, 6800",
    ),
    Row(
        *("gptq_npu", NPU, ("vllm", "vllm-ascend"), "quantization", True),
        lambda use, kv: "gptq" in use.method,
        "vllm-ascend reads no GPTQ weights; quantise to W8A8 with ModelSlim or LLM Compressor, or use sglang",
        "vllm-ascend 不支持 GPTQ 权重；请用 ModelSlim 或 LLM Compressor 量化为 W8A8，或改用 sglang",
        "asc 6603 (closed), 6974: no plan; SGLang reads them, its pull request 15203",
    ),
)

SHAPES = (
    Row(
        *("queries_per_kv_npu", NPU, (), "model", True),
        lambda use, kv: not use.latent and use.model.num_attention_heads > MAX_QUERIES_PER_KV * use.model.num_kv_heads,
        "{model} has {queries} query heads a KV head; {op} takes at most {max_queries}",
        "{model} 每个 KV 头对应 {queries} 个查询头；{op} 最多支持 {max_queries} 个",
        "op-plugin: FIA, incre flash attention",
    ),
    Row(
        *("head_dim_310p", ("310p",), ("vllm", "vllm-ascend"), "model", True),
        lambda use, kv: not use.latent and use.kernel_block * use.model.head_dim > BLOCK_ELEMENTS_310P,
        "head_dim {head_dim}: even a block of 64 tokens has more than the {block_elements} elements a head that "
        "the kernel of 310P takes",
        "head_dim 为 {head_dim}：即使 64 个 token 的 block 每头元素数超过 310P 内核上限 {block_elements}",
        "asc 182b75e: block size times head dim at most 16,384",
    ),
    Row(
        *("gqa_310p", ("310p", "910a"), (), "model", False),
        lambda use, kv: not use.paged and not use.latent and use.model.num_attention_heads > use.model.num_kv_heads,
        "npu_prompt_flash_attention on {chip} has no grouped queries: K and V of a prompt must be repeated for every "
        "query head, which is not counted",
        "{chip} 上的 npu_prompt_flash_attention 不支持 GQA：prefill 须把 K、V 按查询头复制，其开销未计入",
        "op-plugin: prompt flash attention",
    ),
    Row(
        *("window_310p", ("310p",), ("vllm", "vllm-ascend"), "model", False),
        lambda use, kv: use.model.window > 0,
        "{model} has layers with a sliding window, and the backend of 310P makes a causal mask only: check the answers",
        "{model} 含滑动窗口层，而 310P 后端只生成因果掩码：请核对输出",
        "vllm_ascend/_310p/attention/attention_mask.py",
    ),
    Row(
        *("block_size_npu", NPU, ("vllm", "vllm-ascend"), "block_size", False),
        lambda use, kv: use.block_size not in (None, 128) and use.long_query and use.model.mamba is None,
        "a block size of {block_size}: vllm-ascend takes 128 instead where prefix caching or chunked prefill is on, as "
        "both are by default",
        "开启前缀缓存或 chunked prefill 时（两者默认开启），vllm-ascend 会把 block size {block_size} 改为 128",
        "asc 182b75e, refresh_block_size",
    ),
    Row(
        *("block_unit_npu", NPU, ("vllm", "vllm-ascend"), "block_size", True),
        lambda use, kv: (
            use.block_size is not None
            and not use.long_query
            and use.model.mamba is None
            and use.block_size % use.kernel_block > 0
        ),
        "a block size of {block_size}: the attention kernel takes blocks of {kernel_blocks}; use 128",
        "block size {block_size}：注意力内核只支持 {kernel_blocks}；请用 128",
        "asc 182b75e, get_supported_kernel_block_sizes",
    ),
    Row(
        *("block_unit_cuda", CUDA, ("vllm",), "block_size", True),
        lambda use, kv: use.block_size is not None and use.block_size % use.kernel_block > 0,
        "a block size of {block_size}: the attention kernels take multiples of {kernel_block}; use {kernel_block}",
        "block size {block_size}：注意力内核要求是 {kernel_block} 的倍数；请用 {kernel_block}",
        "vLLM 0.27.1, v1/attention/backends: get_supported_kernel_block_sizes",
    ),
)

ROWS: tuple[Row, ...] = (*ENGINES, *DTYPES, *WEIGHTS, *CACHE, *SHAPES)
"""The table, in the order in which findings are told."""
