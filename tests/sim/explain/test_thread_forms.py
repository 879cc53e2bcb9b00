"""Forms that public threads have and that were once read wrong, in own wording and numbers."""

from __future__ import annotations

import pytest

from hbmtwin.allocators.oom import Cause
from hbmtwin.sim.explain.explaining import explain
from hbmtwin.sim.explain.explanation import Explanation


def helps(told: Explanation) -> str:
    return "\n".join(str(said) for said in told.judgements[0].helps)


def books(told: Explanation) -> str:
    return "\n".join(str(said) for said in told.judgements[0].arithmetic)


def useless(told: Explanation) -> str:
    return "\n".join(str(said) for said in told.judgements[0].does_not_help)


@pytest.mark.parametrize(
    ("pools", "usage"),
    [
        ("#token: 90112, token usage: 0.98,", "98.0 %"),
        ("#full token: 90112, full token usage: 0.97, #swa token: 512, swa token usage: 0.05,", "97.0 %"),
        ("#full token: 1024, full token usage: 0.10, #swa token: 8192, swa token usage: 0.99,", "99.0 %"),
        ("#full token: 1024, full token usage: 0.20, mamba num: 64, mamba usage: 1.00,", "100.0 %"),
    ],
)
def test_decode_lines_of_hybrid_models_tell_the_fullest_pool(pools: str, usage: str) -> None:
    told = explain(
        f"[2026-03-01 10:00:00 TP0] Decode batch, #running-req: 6, {pools} cuda graph: True, gen throughput (token/s): "
        "88.10, #queue-req: 5\n"
        "[2026-03-01 10:00:01 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_token_ratio: 0.1\n"
    )
    assert f"6 running, 5 waiting, {usage} of the KV cache in use" in books(told)


def test_a_retraction_alone_has_no_books() -> None:
    told = explain("[2026-03-01 10:00:01 TP0] KV cache pool is full. Retract requests. #retracted_reqs: 2, #new_tok\n")
    assert told.judgements[0].cause is Cause.SHORTAGE
    assert told.judgements[0].arithmetic == ()


def test_advice_for_sglang_has_sglangs_names() -> None:
    told = explain(
        "[2026-03-01 10:00:00 TP3] Decode batch, #running-req: 6, #token: 90112, token usage: 0.98, #queue-req: 5\n"
        "torch.OutOfMemoryError: NPU out of memory. Tried to allocate 96.00 MiB (NPU 3; 61.27 GiB total capacity; "
        "55.50 GiB already allocated; 55.50 GiB current active; 7.00 MiB free; 57.90 GiB reserved in total by "
        "PyTorch).If reserved\n"
        "python3 -m sglang.launch_server --model-path /m/Foo-9B --tp-size 4 --mem-fraction-static 0.9\n"
    )
    assert told.server.engine == "sglang"
    said = helps(told) + useless(told)
    assert "--mem-fraction-static lower by 0.01" in said
    assert "--chunked-prefill-size lower" in said
    for name in ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vllm"):
        assert name not in said
        assert name not in "".join(said.text("zh") for said in told.judgements[0].helps)


@pytest.mark.parametrize("counted", ["total_cumulative_preemption_cnt=37", "total_num_cumulative_preemption=37"])
def test_preemptions_are_counted_by_the_words_of_each_release(counted: str) -> None:
    told = explain(
        "WARNING 08-20 10:18:39 scheduler.py:1141] Sequence group 12 is preempted by PreemptionMode.RECOMPUTE mode "
        f"because there is not enough KV cache space. This can affect the end-to-end performance. {counted}\n"
    )
    assert "(37 so far)" in str(told.verdict)


def test_of_two_starts_in_one_text_the_failed_one_counts() -> None:
    """The room and the length of the one that started stood in the fit command of the one that did not."""
    told = explain(
        "with 50000\nAvailable KV cache memory: 12.00 GiB\nGPU KV cache size: 262,144 tokens\n"
        "Maximum concurrency for 50,000 tokens per request: 5.24x\nand with 200000\n"
        "ValueError: To serve at least one request with the models's max seq len (200000), (9.16 GiB KV cache is needed"
        ", which is larger than the available KV cache memory (6.00 GiB). Based on the available memory, the estimated "
        "maximum model length is 131072. Try increasing\n"
    )
    assert "--max-model-len 200000 --kv-bytes-per-token 49152 --available-kv-bytes 6442450944" in told.fit_command


def test_a_start_after_the_failed_one_counts() -> None:
    told = explain(
        "ValueError: To serve at least one request with the models's max seq len (200000), (9.16 GiB KV cache is needed"
        ", which is larger than the available KV cache memory (6.00 GiB). Based on\nretried with 50000\n"
        "Available KV cache memory: 12.00 GiB\nGPU KV cache size: 262,144 tokens\n"
        "Maximum concurrency for 50,000 tokens per request: 5.24x\n"
    )
    assert told.server.numbers["max_model_len"] == 50_000


@pytest.mark.parametrize(
    ("message", "device"),
    [
        ("HIP out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 61.27 GiB", ""),
        ("NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 61.27 GiB total capacity", "ascend-910c"),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.15 GiB", "a100-80gb"),
    ],
)
def test_the_device_is_guessed_among_those_of_the_allocators_vendor(message: str, device: str) -> None:
    assert explain(message).server.device == device


def test_a_length_in_tokens_is_advised_in_tokens() -> None:
    told = explain(
        "ValueError: The model's max seq len (9216) is larger than the maximum number of tokens that can be stored in "
        "KV cache (6144). Try increasing `gpu_memory_utilization` or\n"
    )
    assert "9,216 tokens in place of 6,144 take 1.50 times the memory for KV" in helps(told)
    assert "kv_cache_dtype fp8, where the device has it: half the bytes a token, about 12,288 tokens" in helps(told)
    assert "nothing is fragmented" in useless(told)


def test_more_reserved_than_the_device_has_lies_in_host_memory() -> None:
    told = explain(
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of "
        "8.00 GiB of which 0 bytes is free. Of the allocated memory 9.50 GiB is allocated by PyTorch, and 0.50 GiB is "
        "reserved by PyTorch but unallocated.\n"
    )
    assert "10.00 GiB reserved > 8.00 GiB of the device: at least 1.98 GiB lie in host memory" in books(told)
    assert "outside of it" not in books(told)


def test_what_no_process_is_named_for_is_not_called_the_servers() -> None:
    told = explain(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.00 GiB. GPU 0 has a total capacity of 24.00 "
        "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 20.00 GiB memory in use. Of the "
        "allocated memory 18.00 GiB is allocated by PyTorch, and 1.00 GiB is reserved by PyTorch but unallocated.\n"
    )
    assert "2.98 GiB of the device are named by nobody; a driver keeps 1024.00 MiB at most" in books(told)
    assert "one server holds" not in books(told)


OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 64.00 MiB. GPU 0 has a total capacity of 24.00 GiB "
    "of which 16.00 MiB is free. Of the allocated memory 22.00 GiB is allocated by PyTorch, and 20.00 MiB is reserved "
    "by PyTorch but unallocated.\n"
)
BEGUN = "INFO 11-02 08:00:01 model_runner.py:1456] Capturing cudagraphs for decoding. This may lead to unexpected\n"
ENDED = "INFO 11-02 08:00:31 model_runner.py:1584] Graph capturing finished in 30 secs, took 0.50 GiB\n"
LOADING = "INFO 11-02 07:59:01 model_runner.py:1110] Starting to load model /m/Foo-9B...\n"
LOADED = "INFO 11-02 07:59:41 model_runner.py:1115] Loading model weights took 16.0000 GB\n"
SERVING = "INFO:     Application startup complete.\n"


@pytest.mark.parametrize(
    ("log", "when", "phase"),
    [
        (LOADING, "start_up", "weights"),
        (LOADING + LOADED, None, ""),
        (LOADING + LOADED + BEGUN, "start_up", "capture"),
        (LOADING + LOADED + BEGUN + ENDED, None, ""),
        (LOADING + LOADED + BEGUN + ENDED + SERVING, "run_time", ""),
        ('  File "/v/torch/cuda/graphs.py", line 84, in capture_end\n', "start_up", "capture"),
        (SERVING + '  File "/v/gpu_worker.py", line 9, in load_model\n', "start_up", "weights"),
    ],
)
def test_what_the_log_was_at_tells_the_moment(log: str, when: str | None, phase: str) -> None:
    (judgement,) = explain(log + OOM).judgements
    assert (judgement.when, judgement.phase) == (when, phase)


def test_a_script_tells_its_settings() -> None:
    told = explain(
        'llm = LLM(\n    model="Qwen/Qwen3-8B",\n    max_num_seqs=16,\n    max_model_len=8192,\n    '
        "gpu_memory_utilization=0.8,\n)\nprint(max_num_seqs=99)\n" + OOM
    )
    assert told.server.model == "Qwen/Qwen3-8B"
    wanted = {"max_num_seqs": 16, "max_model_len": 8192, "gpu_memory_utilization": 0.8}
    assert {name: told.server.numbers[name] for name in wanted} == wanted


def test_a_variable_is_no_models_name() -> None:
    assert explain("llm = LLM(model=path, max_model_len=4096)\n" + OOM).server.model == ""
    assert explain("the class LLM(Base) is documented\n" + OOM).server.engine == ""


def test_what_tensorrt_llm_says_of_its_cache() -> None:
    told = explain(
        "[TensorRT-LLM][INFO] Allocate 1073741824 bytes for k/v cache.\n"
        "[TensorRT-LLM][INFO] Using 8192 tokens in paged KV cache.\n"
        "[TensorRT-LLM][INFO] Memory usage when calculating max tokens in paged kv cache: total: 22.00 GiB, available: "
        "2.00 GiB\n"
    )
    said = "\n".join(str(each) for each in told.says)
    assert "the KV cache holds 8,192 tokens" in said
    assert "2.00 GiB of 22.00 GiB were free when the KV cache was sized" in said
    assert "about 131,072 bytes of KV a token" in "\n".join(str(each) for each in told.arithmetic)


@pytest.mark.parametrize(
    ("text", "cause", "when"),
    [
        (
            "[TensorRT-LLM][ERROR] maxTokensInPagedKvCache must be large enough to process at least 1 sequence to",
            Cause.NEVER_FITS,
            "start_up",
        ),
        (
            "[TensorRT-LLM][ERROR] CUDA runtime error in ::cudaMallocAsync(ptr, n, stream->get()): out of memory (/x.h",
            None,
            None,
        ),
        (
            "AssertionError: No space left for only one request, self.token_to_kv_pool_allocator.available_size()=3",
            Cause.SHORTAGE,
            "run_time",
        ),
    ],
)
def test_errors_that_were_not_read(text: str, cause: Cause | None, when: str | None) -> None:
    told = explain(text)
    assert told.understood
    assert (told.judgements[0].cause, told.judgements[0].when) == (cause, when)


def test_statistics_that_count_a_failure_are_not_called_healthy() -> None:
    told = explain(
        "|                  PyTorch CUDA memory summary, device ID 0                 |\n"
        "|            CUDA OOMs: 2            |        cudaMalloc retries: 5         |\n"
        "|        Metric         | Cur Usage  | Peak Usage | Tot Alloc  | Tot Freed  |\n"
        "| Allocated memory      |    2048 MB |    4096 MB |   89299 MB |   88237 MB |\n"
        "| GPU reserved memory   |   10240 MB |   12420 MB |   16924 MB |    4504 MB |\n"
    )
    assert "count 2 since the process began: 8.00 GiB of 10.00 GiB reserved are not in tensors" in str(told.verdict)


def test_less_than_one_request_is_no_healthy_start() -> None:
    """A paste that ends before the refusal, and `hbmtwin fit`'s own screen, have only the three boot lines."""
    told = explain(
        "INFO 08-06 01:39:22 executor_base.py:111] # cuda blocks: 96, # CPU blocks: 512\n"
        "INFO 08-06 01:39:22 executor_base.py:116] Maximum concurrency for 2048 tokens per request: 0.75x\n"
    )
    (judgement,) = told.judgements
    assert (judgement.cause, judgement.when) == (Cause.NEVER_FITS, "start_up")
    assert "one request of max_model_len 2,048 tokens does not fit: the KV cache holds 1,536 tokens" in str(
        told.verdict
    )
    assert "2,048 tokens - 1,536 = 512 tokens short" in books(told)


@pytest.mark.parametrize("model", ["models's", "model's", "model"])
@pytest.mark.parametrize("bracket", ["(", ""])
def test_a_length_in_bytes_with_and_without_its_lonely_bracket(model: str, bracket: str) -> None:
    told = explain(
        f"ERROR To serve at least one request with the {model} max seq len (24576), {bracket}3.00 GiB KV cache is "
        "needed, which is larger than the available KV cache memory (1.50 GiB). Based on the available memory, the "
        "estimated maximum model length is 12288. Try\n"
    )
    assert told.judgements[0].cause is Cause.NEVER_FITS
    assert "3.00 GiB needed - 1.50 GiB left for KV = 1.50 GiB short" in books(told)
    assert "131,072 bytes of KV a token" in books(told)
    assert "max_model_len 12,288" in helps(told)


def test_vllm_ascends_line_with_the_kv_cache_as_it_was_placed() -> None:
    told = explain(
        "(Worker_TP0 pid=3) INFO 07-26 15:49:29 [worker.py:1029] Free memory on device (60.50/60.96 GiB) on startup. "
        "Desired GPU memory utilization is (0.6, 36.58 GiB). Actual usage: 20.00 GiB for weights, 1.00 GiB for peak "
        "activation, 0.50 GiB for non-torch memory, 0.58 GiB for NPU graph memory. Current KV cache memory: 14.50 GiB."
    )
    assert told.server.engine == "vllm-ascend"
    assert told.server.numbers["available_kv_bytes"] == 29 << 29
    assert "14.50 GiB for KV = 36.58 GiB that may be used" in "\n".join(str(each) for each in told.arithmetic)


def test_a_message_of_a_device_without_memory_divides_by_nothing() -> None:
    told = explain(
        "NPU out of memory. Tried to allocate 1.00 GiB (NPU 0; 0 bytes total capacity; 0 bytes free)\n"
        "the rest of the memory reserved for KV Cache is -1.00GiB.\nNo available memory for the cache blocks\n"
    )
    assert told.judgements


def test_blocks_of_states_are_no_pool_of_tokens() -> None:
    """A hybrid model's concurrency is not its tokens through the length, and no block size comes of it."""
    told = explain(
        "Available KV cache memory: 8.00 GiB\nGPU KV cache size: 160,000 tokens\n"
        "Maximum concurrency for 100,000 tokens per request: 4.75x\n"
        "Capping cudagraph capture sizes from max 512 to 256 to fit Mamba cache blocks (263 blocks available).\n"
    )
    assert "block_size" not in told.server.numbers
    assert "--block-size" not in told.fit_command
    assert not any("requests of full length" in str(each) for each in told.arithmetic)
