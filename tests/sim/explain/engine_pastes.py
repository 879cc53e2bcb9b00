"""Texts of serving engines in their real forms, with numbers of our own, and what each must be told as.

Where a log's figures follow from each other they were computed by hand from the rule that its engine has, so that the
arithmetic can be compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from hbmtwin.allocators.oom import Cause

GIB = 1 << 30


class Paste(NamedTuple):
    name: str
    text: str
    cause: Cause | None
    when: str | None
    said: str
    """Part of the verdict."""
    engine: str = ""
    numbers: Mapping[str, Any] = MappingProxyType({})
    helps: tuple[str, ...] = ()
    useless: tuple[str, ...] = ()
    arithmetic: tuple[str, ...] = ()


PASTES = (
    Paste(
        "length in bytes, v1 with its process prefixes",
        "(APIServer pid=90) INFO 02-11 08:00:01 [utils.py:233] non-default args: {'model': 'acme/Foo-9B', "
        "'max_model_len': 65536, 'gpu_memory_utilization': 0.88}\n"
        "(EngineCore_DP0 pid=91) INFO 02-11 08:00:30 [gpu_worker.py:298] Available KV cache memory: 2.50 GiB\n"
        "(EngineCore_DP0 pid=91) ERROR 02-11 08:00:30 [core.py:708] ValueError: To serve at least one request with the "
        "models's max seq len (65536), (8.00 GiB KV cache is needed, which is larger than the available KV cache "
        "memory (2.50 GiB). Based on the available memory, the estimated maximum model length is 20480. Try "
        "increasing `gpu_memory_utilization` or decreasing `max_model_len` when initializing the engine.\n",
        Cause.NEVER_FITS,
        "start_up",
        "one request of max_model_len 65,536 tokens needs 8.00 GiB",
        "vllm",
        {"need_bytes": 8 * GIB, "available_kv_bytes": 5 * GIB // 2, "longest": 20480, "max_model_len": 65536},
        helps=("max_model_len 20,480",),
        useless=("expandable_segments", "max_num_seqs lower", "half the bytes a token, 4.00 GiB"),
        arithmetic=("8.00 GiB needed - 2.50 GiB left for KV = 5.50 GiB short", "131,072 bytes of KV a token"),
    ),
    Paste(
        "the same of 0.27, cut off behind the sizes",
        "ValueError: To serve at least one request with the model's max seq len (40960), (5.00 GiB KV cache is needed, "
        "which is larger than the available KV cache memory (4.00 GiB). Bas",
        Cause.NEVER_FITS,
        "start_up",
        "40,960 tokens needs 5.00 GiB",
        "vllm",
        {"need_bytes": 5 * GIB, "available_kv_bytes": 4 * GIB},
        helps=("max_model_len about 32,768", "kv_cache_dtype fp8: half the bytes a token, 2.50 GiB"),
    ),
    Paste(
        "the same, cut off before them",
        "ValueError: To serve at least one request with the model's max seq len (40960), (5.0",
        Cause.NEVER_FITS,
        "start_up",
        "the message is cut off",
        "vllm",
        {"max_model_len": 40960},
        helps=("paste the whole line",),
    ),
    Paste(
        "length in tokens, v0 with its subtraction",
        "INFO 03-02 10:11:12 worker.py:266] Memory profiling takes 4.10 seconds\n"
        "INFO 03-02 10:11:12 worker.py:266] the current vLLM instance can use total_gpu_memory (24.00GiB) x "
        "gpu_memory_utilization (0.90) = 21.60GiB\n"
        "INFO 03-02 10:11:12 worker.py:266] model weights take 15.00GiB; non_torch_memory takes 0.25GiB; PyTorch "
        "activation peak memory takes 2.35GiB; the rest of the memory reserved for KV Cache is 4.00GiB.\n"
        "INFO 03-02 10:11:12 executor_base.py:111] # cuda blocks: 2048, # CPU blocks: 2048\n"
        "ValueError: The model's max seq len (40960) is larger than the maximum number of tokens that can be stored in "
        "KV cache (32768). Try increasing `gpu_memory_utilization` or decreasing `max_model_len`.\n",
        Cause.NEVER_FITS,
        "start_up",
        "the KV cache holds 32,768 tokens",
        "vllm",
        {"total_bytes": 24 * GIB, "weights_bytes": 15 * GIB, "kv_tokens": 32768, "num_gpu_blocks": 2048},
        helps=("max_model_len 32,768", "gpu_memory_utilization 0.95 in place of 0.9"),
        arithmetic=(
            "40,960 tokens - 32,768 = 8,192 tokens short",
            "5.00 GiB needed - 4.00 GiB left for KV = 1.00 GiB short",
            "4.00 GiB for KV = 21.60 GiB that may be used (0.9 x 24.00 GiB) - 15.00 GiB weights - 2.35 GiB activation "
            "peak - 0.25 GiB outside torch",
        ),
    ),
    Paste(
        "nothing left, vllm-ascend before 0.18, two ranks interleaved",
        "(Worker_TP0_EP0 pid=40) INFO 01-05 03:04:05 [worker.py:287] Available memory: 536870912, total memory: "
        "65452113920\n"
        "(Worker_TP1_EP1 pid=41) INFO 01-05 03:04:05 [worker.py:287] Available memory: -1073741824, total memory: "
        "65452113920\n"
        "(EngineCore_DP0 pid=39) ERROR 01-05 03:04:06 [core.py:708] ValueError: No available memory for the cache "
        "blocks. Try increasing `gpu_memory_utilization` when initializing the engine.\n",
        Cause.NEVER_FITS,
        "start_up",
        "take 1.00 GiB more than the engine may use",
        "vllm-ascend",
        {"available_kv_bytes": -GIB, "total_bytes": 65452113920, "tensor_parallel_size": 2},
        helps=("gpu_memory_utilization higher by 0.02",),
        useless=("max_model_len shorter", "expandable_segments"),
    ),
    Paste(
        "a negative number and nothing else",
        "Loading model weights took 27.5000 GB\nAvailable KV cache memory: -0.87 GiB\n",
        Cause.NEVER_FITS,
        "start_up",
        "take 0.87 GiB more",
        "vllm",
        {"weights_bytes": 55 * GIB // 2},
        helps=("quantised weights",),
    ),
    Paste(
        "somebody else holds the device, CUDA",
        "ValueError: Free memory on device cuda:0 (20.00/80.00 GiB) on startup is less than desired GPU memory "
        "utilization (0.9, 72.0 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.\n",
        Cause.OTHER_TENANT,
        "start_up",
        "60.00 GiB of the device are held already",
        "vllm",
        {"free_bytes": 20 * GIB, "total_bytes": 80 * GIB, "usable_bytes": 72 * GIB},
        helps=("gpu_memory_utilization 0.25", "end what holds the 60.00 GiB"),
        useless=("max_model_len",),
        arithmetic=("80.00 GiB in all - 20.00 GiB free = 60.00 GiB held", "72.00 GiB wanted - 20.00 GiB free"),
    ),
    Paste(
        "the same on Ascend, in a Chinese thread",
        "启动报错如下，请帮忙看一下，单卡 910B3：\n"
        "(Worker_TP3 pid=4411) ValueError: Free memory on device (10.96/60.96 GiB) on startup is less than desired GPU "
        "memory utilization (0.9, 54.86 GiB). Decrease GPU memory utilization\n"
        "[rank3]:[W105 torch_npu] 麻烦了\n",
        Cause.OTHER_TENANT,
        "start_up",
        "50.00 GiB of the device are held already",
        "vllm-ascend",
        {"total_bytes": 65455301591},
    ),
    Paste(
        "memory released while it was measured",
        "AssertionError: Error in memory profiling. Initial free memory 30.50 GiB, current free memory 41.25 GiB. This "
        "happens when other processes sharing the same container release GPU memory while vLLM is profiling.\n",
        None,
        "start_up",
        "free memory grew from 30.50 GiB to 41.25 GiB",
        "vllm",
        helps=("start it again", "kv_cache_memory_bytes"),
    ),
    Paste(
        "states of a hybrid model",
        "(EngineCore pid=7) ValueError: max_num_seqs (512) exceeds available Mamba cache blocks (300). Each decode "
        "sequence requires one Mamba cache block, so CUDA graph capture cannot proceed.\n",
        Cause.NEVER_FITS,
        "start_up",
        "max_num_seqs 512 wants as many, and the pool has 300",
        "vllm",
        helps=("max_num_seqs 300 or fewer", "1.71 times"),
        arithmetic=("212 state blocks short",),
    ),
    Paste(
        "the sampler's warm-up",
        "RuntimeError: CUDA out of memory occurred when warming up sampler with 1024 dummy requests. Please try "
        "lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.\n",
        None,
        "start_up",
        "logits of 1,024 sequences",
        "vllm",
        helps=("max_num_seqs lower than 1,024", "gpu_memory_utilization lower"),
        useless=("gpu_memory_utilization higher", "max_model_len shorter"),
    ),
    Paste(
        "a batch below the longest prompt",
        "ValueError: max_num_batched_tokens (4096) is smaller than max_model_len (32768). This effectively limits the "
        "maximum sequence length to max_num_batched_tokens and makes vLLM reject longer sequences.\n",
        None,
        "start_up",
        "no shortage of memory",
        "vllm",
        helps=("enable_chunked_prefill", "max_num_batched_tokens 32,768", "max_model_len 4,096 or less"),
        useless=("gpu_memory_utilization",),
    ),
    Paste(
        "more sequences than tokens",
        "ValueError: max_num_batched_tokens (128) must be greater than or equal to max_num_seqs (256).\n",
        None,
        "start_up",
        "cannot have 256 sequences",
        "vllm",
        helps=("max_num_seqs 128 or fewer",),
    ),
    Paste(
        "above the model's positions",
        "Value error, User-specified max_model_len (65536) is greater than the derived max_model_len "
        "(max_position_embeddings=32768.0 or model_max_length=None in model's config.json).\n",
        None,
        "start_up",
        "above the 32,768 positions",
        "vllm",
        helps=("max_model_len 32,768 or less",),
    ),
    Paste(
        "preemption of v0",
        "WARNING 05-09 00:49:33 scheduler.py:1057] Sequence group 12 is preempted by PreemptionMode.RECOMPUTE mode "
        "because there is not enough KV cache space. This can affect the end-to-end performance. Increase "
        "gpu_memory_utilization or tensor_parallel_size to provide more KV cache memory. "
        "total_cumulative_preemption_cnt=151\n",
        Cause.SHORTAGE,
        "run_time",
        "preempted and computed again later (151 so far)",
        "vllm",
        helps=("max_num_seqs lower", "gpu_memory_utilization higher"),
        useless=("gpu_memory_utilization lower", "max_model_len shorter", "expandable_segments"),
    ),
    Paste(
        "preemptions of v1 in its ten-second lines, with the boot lines above",
        "INFO 11-30 05:00:33 [kv_cache_utils.py:864] GPU KV cache size: 80,000 tokens\n"
        "INFO 11-30 05:00:33 [kv_cache_utils.py:868] Maximum concurrency for 8,000 tokens per request: 10.00x\n"
        + "".join(
            f"INFO 11-30 05:12:{second} [loggers.py:118] Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg "
            f"generation throughput: 2.0 tokens/s, Running: {running} reqs, Waiting: 9 reqs, Preemptions: {count}, GPU "
            f"KV cache usage: {usage}%, Prefix cache hit rate: 0.0%\n"
            for second, running, count, usage in ((33, 20, 2, 96.5), (43, 25, 3, 100.0))
        ),
        Cause.SHORTAGE,
        "run_time",
        "(5 so far)",
        "vllm",
        {"kv_tokens": 80_000, "max_model_len": 8_000},
        helps=("max_num_seqs about 25",),
        arithmetic=("25 running, 9 waiting, 100.0 %", "about 3,200 tokens held by each"),
    ),
    Paste(
        "a full cache with a queue, v0's line",
        "INFO 06-01 12:00:00 metrics.py:455] Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: 88.0 "
        "tokens/s, Running: 64 reqs, Swapped: 0 reqs, Pending: 31 reqs, GPU KV cache usage: 98.9%, CPU KV cache usage: "
        "0.0%.\n",
        Cause.SHORTAGE,
        "run_time",
        "(98.9 % of it), and 31 requests wait",
        "vllm",
    ),
    Paste(
        "swap space is full",
        "RuntimeError: Aborted due to the lack of CPU swap space. Please increase the swap space to avoid this error.",
        Cause.SHORTAGE,
        "run_time",
        "the engine ends",
        "vllm",
        helps=("swap_space larger",),
    ),
    Paste(
        "one request that is too long",
        "{'error': {'message': \"This model's maximum context length is 8192 tokens. However, you requested 9200 "
        'tokens (8700 in the messages, 500 in the completion). Please reduce the length"}}',
        None,
        "run_time",
        "one request of 9,200 tokens was refused",
        helps=("at most 8,192",),
    ),
    Paste(
        "one request that is too long for SGLang",
        "[2026-02-03 04:05:10 TP0] Input length (9001 tokens) exceeds the maximum allowed length (8186 tokens). Use a "
        "shorter input or enable --allow-auto-truncate.",
        None,
        "run_time",
        "one request of 9,001 tokens was refused",
        helps=("at most 8,186",),
    ),
    Paste(
        "a prompt that no empty cache of v0 would hold",
        "WARNING 05-09 00:49:33 scheduler.py:900] Input prompt (30000 tokens) + lookahead slots (0) is too long and "
        "exceeds the capacity of block_manager\n",
        Cause.NEVER_FITS,
        "run_time",
        "one prompt of 30,000 tokens was dropped",
        helps=("gpu_memory_utilization higher",),
    ),
    Paste(
        "SGLang has no room for its pool",
        "[2026-02-03 04:05:06] server_args=ServerArgs(model_path='acme/Bar-32B', context_length=16384, "
        "mem_fraction_static=0.75, tp_size=1, max_running_requests=None)\n"
        "[2026-02-03 04:05:10 TP0] Load weight begin. avail mem=80.00 GB\n"
        "[2026-02-03 04:05:40 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=16.00 GB, "
        "mem usage=64.00 GB.\n"
        "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.\n",
        Cause.NEVER_FITS,
        "start_up",
        "take all of its --mem-fraction-static",
        "sglang",
        {"load_begin_bytes": 80 * GIB, "load_end_bytes": 16 * GIB, "mem_fraction_static": 0.75},
        helps=("--mem-fraction-static above 0.800",),
        useless=("--context-length shorter",),
        arithmetic=("-4.00 GiB for the pool = 16.00 GiB free after loading - (1 - 0.75) x 80.00 GiB",),
    ),
    Paste(
        "the same of 0.5.23, which names the fraction",
        "ValueError: Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static=0.6. Raise "
        "--mem-fraction-static above 0.713 (minimum viable = 1 - available/pre = 0.7124).\n",
        Cause.NEVER_FITS,
        "start_up",
        "take all of its --mem-fraction-static",
        "sglang",
        helps=("above 0.713",),
    ),
    Paste(
        "SGLang retracts, both forms",
        "[2026-02-03 05:00:00 TP1] Decode out of memory happened. #retracted_reqs: 2, #new_token_ratio: 0.30 -> 0.41\n"
        "[2026-02-03 05:00:09 TP1] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 9\n"
        "[2026-02-03 05:00:10 TP1] Decode batch. #running-req: 40, #token: 98000, token usage: 0.98, cuda graph: True, "
        "gen throughput (token/s): 900.10, #queue-req: 12\n",
        Cause.SHORTAGE,
        "run_time",
        "retracted and computed again later (5 in these lines)",
        "sglang",
        helps=("--max-running-requests lower", "--mem-fraction-static higher"),
        arithmetic=("40 running, 12 waiting, 98.0 %",),
    ),
    Paste(
        "SGLang's graphs have no room",
        "[2026-02-03 04:06:00 TP0] Load weight begin. avail mem=80.00 GB\n"
        "Exception: Capture cuda graph failed: CUDA out of memory\nPossible solutions:\n"
        "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n",
        None,
        "start_up",
        "graphs were captured after the token pool was placed",
        "sglang",
        helps=("each 0.01 leaves about 0.80 GiB",),
        useless=("--mem-fraction-static higher",),
    ),
    Paste(
        "SGLang's pool is smaller than one request",
        "[2026-02-03 04:06:00 TP0] KV pool holds 5000 tokens, fewer than --context-length 8192. One full-length "
        "request cannot fit\n",
        Cause.NEVER_FITS,
        "start_up",
        "5,000 tokens, fewer than one request of context_length 8,192",
        "sglang",
        helps=("--context-length 5,000",),
    ),
    Paste(
        "MindIE's warm-up",
        "[2026-01-25 17:23:11,888] [249] [281471718846752] [llm] [ERROR] [logging.py-348] : Warmup failed, because of "
        "multimodal model inference out of memory when `maxInputTokenLen` set to 4096. Please try to decrease "
        "`maxPrefillTokens` in config.json of mindie-service.\n",
        None,
        "start_up",
        "maxInputTokenLen 4,096",
        "mindie",
        helps=("maxPrefillTokens",),
        useless=("npuMemSize",),
    ),
)
"""What failed."""


class Healthy(NamedTuple):
    name: str
    text: str
    engine: str
    numbers: dict[str, Any]
    says: tuple[str, ...]
    books: tuple[str, ...] = ()


HEALTHY = (
    Healthy(
        "a boot of vLLM 0.18 with its suggestion",
        "(APIServer pid=4) INFO 04-12 09:30:07 [api_server.py:1912] vLLM API server version 0.18.0\n"
        "\x1b[36m(EngineCore_DP0 pid=5)\x1b[0;0m INFO 04-12 09:30:20 [gpu_model_runner.py:4567] Model loading took "
        "16.00 GiB memory and 3.912345 seconds\n"
        "\x1b[36m(EngineCore_DP0 pid=5)\x1b[0;0m INFO 04-12 09:30:41 [gpu_worker.py:456] Available KV cache memory: "
        "51.75 GiB\n"
        "(EngineCore_DP0 pid=5) INFO 04-12 09:30:41 [kv_cache_utils.py:1314] GPU KV cache size: 423,936 tokens\n"
        "(EngineCore_DP0 pid=5) INFO 04-12 09:30:41 [kv_cache_utils.py:1319] Maximum concurrency for 32,768 tokens per "
        "request: 12.94x\n"
        "(EngineCore_DP0 pid=5) INFO 04-12 09:30:52 [gpu_worker.py:640] Free memory on device (79.50/80.0 GiB) on "
        "startup. Desired GPU memory utilization is (0.875, 70.0 GiB). Actual usage is 16.0 GiB for weight, 2.0 GiB "
        "for peak activation, 0.25 GiB for non-torch memory, and 0.75 GiB for CUDAGraph memory. Replace "
        "gpu_memory_utilization config with `--kv-cache-memory=54609838080` (50.86 GiB) to fit into requested memory\n"
        "(APIServer pid=4) INFO:     Application startup complete.\n",
        "vllm",
        {
            "kv_tokens": 423_936,
            "max_model_len": 32_768,
            "suggested_kv_bytes": 54_609_838_080,
            "graph_bytes": 3 * GIB // 4,
        },
        ("vLLM 0.18.0", "the KV cache holds 423,936 tokens", "12.94 requests of 32,768 tokens"),
        (
            "51.75 GiB for KV = 70.00 GiB that may be used (0.875 x 80.00 GiB) - 16.00 GiB weights - 2.00 GiB "
            "activation peak - 0.25 GiB outside torch",
        ),
    ),
    Healthy(
        "vllm-ascend from 0.18 on",
        "(EngineCore pid=28) INFO 04-15 06:30:01 [worker.py:575] Free memory on device (60.86/61.25 GiB) on startup. "
        "Desired GPU memory utilization is (0.8, 49.0 GiB). Actual usage: 1.5 GiB for weights, 0.25 GiB for peak "
        "activation, 0.125 GiB for non-torch memory, 0.05 GiB for NPU graph memory. Replace gpu_memory_utilization "
        "with `--kv-cache-memory=50331648000` (46.88 GiB) to fit in requested memory\n"
        "(EngineCore pid=28) INFO 04-15 06:29:55 [worker.py:500] Available KV cache memory: 47.12 GiB\n",
        "vllm-ascend",
        {"non_torch_bytes": GIB // 8, "activation_bytes": GIB // 4},
        ("vLLM on Ascend", "47.12 GiB are left for the KV cache"),
        ("47.12 GiB for KV = 49.00 GiB that may be used (0.8 x 61.25 GiB)",),
    ),
    Healthy(
        "blocks of v0 with a log's time stamps of Kubernetes, broken by a terminal",
        "2026-03-01T10:00:00.123456789Z INFO 03-01 10:00:00 gpu_executor.py:122] # GPU blocks: 27\n"
        "896, # CPU blo\ncks: 2048\n",
        "vllm",
        {"num_gpu_blocks": 27896},
        ("27,896 blocks",),
    ),
    Healthy(
        "what 0.21 and later say of graphs and of layers of unlike kinds",
        "(EngineCore pid=5) INFO 06-02 08:00:00 [gpu_worker.py:578] CUDA graph memory profiling is enabled (default "
        "since v0.21.0). The current --gpu-memory-utilization=0.9200 is equivalent to --gpu-memory-utilization=0.9080 "
        "without CUDA graph memory profiling. To maintain the same effective KV cache size as before, increase\n"
        "(EngineCore pid=5) WARNING 06-02 08:00:01 [kv_cache_utils.py:1227] Add 3 padding layers, may waste at most "
        "6.25% KV cache memory\n",
        "vllm",
        {"gpu_memory_utilization": 0.92},
        ("0.92 leaves as much for KV as 0.908", "3 padding layers, up to 0.0625"),
    ),
    Healthy(
        "SGLang",
        "[2026-01-23 19:35:20 TP0] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=63.75 GB\n"
        "[2026-01-23 19:35:20 TP0] KV Cache is allocated. #tokens: 400000, K size: 24.50 GB, V size: 24.50 GB\n"
        "[2026-01-23 19:35:20 TP0] Memory pool end. avail mem=8.25 GB\n"
        "[2026-01-23 19:35:40 TP0] max_total_num_tokens=400000, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        "max_running_requests=2048, context_len=131072, available_gpu_mem=6.50 GB\n",
        "sglang",
        {"kv_tokens": 400_000, "max_model_len": 131_072, "max_num_seqs": 2048, "k_bytes": 49 * GIB // 2},
        ("the token pool holds 400,000 tokens; a request has at most 131,072", "8.25 GiB are left beside"),
    ),
    Healthy(
        "TensorRT-LLM",
        "[TensorRT-LLM][INFO] Max KV cache blocks per sequence: 65 [window size=2049], tokens per block=32, primary "
        "blocks=1000, secondary blocks=0, max sequence length=2049\n"
        "[TensorRT-LLM][INFO] [MemUsageChange] Allocated 4.00 GiB for max tokens in paged KV cache (32000).\n",
        "tensorrt-llm",
        {"num_gpu_blocks": 1000, "block_size": 32, "kv_tokens": 32_000, "available_kv_bytes": 4 * GIB},
        ("1,000 blocks of 32 tokens", "takes 4.00 GiB and holds 32,000 tokens"),
    ),
    Healthy(
        "MindIE's configuration",
        '{"BackendConfig": {\n  "npuMemSize" : 8,\n  "worldSize" : 2\n}}\n',
        "mindie",
        {"npu_mem_size": 8},
        ("npuMemSize 8",),
    ),
    Healthy(
        "a server that lacks nothing",
        "INFO 11-30 05:12:43 [loggers.py:118] Engine 000: Avg prompt throughput: 9.5 tokens/s, Avg generation "
        "throughput: 99.0 tokens/s, Running: 3 reqs, Waiting: 0 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate"
        ": 50.0%\n",
        "vllm",
        {},
        (),
    ),
)
"""What did not fail."""
