"""What vLLM and vllm-ascend say when they do not start, and when a running server is short of KV.

===========================  ======================================================================================
kind                         which check it is
===========================  ======================================================================================
error_free_too_little        free memory against utilisation times total, before anything is loaded
error_released               another process gave memory back while the profile ran
error_no_kv                  nothing is left for KV after the profile
error_length_tokens          one longest request against the tokens that fit (v0, and v1 until 0.8)
error_length_bytes           the same in bytes (v1 from 0.9)
error_no_length              no length at all fits (``max_model_len`` auto)
error_batch_below_length     prompts that may not be cut into chunks, and a batch below the longest one
error_batch_below_seqs       a batch below the number of sequences
error_positions              a length above what the model was trained for
error_states                 hybrid models: a state block for every sequence
error_sampler                logits of ``max_num_seqs`` rows, after the KV cache was placed
error_elsewhere              the process that was pasted only passes on that another one failed
warning_graphs_cut           hybrid models: graphs are captured for as many sequences as there are states
preempted                    v0: one line for a preempted request, now and then
swap_full                    v0: preempted requests were to be swapped out, and host memory was full
metrics                      the line that comes every ten seconds
request_too_long             a request was refused: longer than ``max_model_len``
request_never                v0: a prompt that no empty cache would hold
===========================  ======================================================================================

Sources: worker.py of v0, kv_cache_utils.py, gpu_worker.py, worker/utils.py, config/*.py, metrics/loggers.py of 0.18,
0.22 and 0.27; vllm-ascend's worker.py; public threads.
"""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.forms import form, joined, read_forms

VLLM_ERRORS = (
    form(
        "error_free_too_little",
        "Free memory on device ({free_bytes:G}/{total_bytes}) on startup is less than desired GPU memory utilization "
        "({gpu_memory_utilization}, {usable_bytes})",
    ),
    *(
        form(
            "error_free_too_little",
            f"Free memory on device {device}{{device}} ({{free_bytes:G}}/{{total_bytes}}) on startup is less than "
            "desired GPU memory utilization ({gpu_memory_utilization}, {usable_bytes})",
        )
        for device in ("cuda:", "npu:", "xpu:")
    ),
    form(
        "error_released",
        "Error in memory profiling. Initial free memory {free_bytes}, current free memory {after_bytes}. This happens",
    ),
    form("error_no_kv", "No available memory for the cache blocks"),
    form(
        "error_length_tokens",
        "The model's max seq len ({max_model_len}) is larger than the maximum number of tokens that can be stored in "
        "KV cache ({kv_tokens})",
    ),
    *(
        form(
            "error_length_bytes",
            f"To serve at least one request with the {model} max seq len ({{max_model_len}}), {{need_bytes}} KV cache "
            "is needed, which is larger than the available KV cache memory ({available_kv_bytes}{*}estimated maximum "
            "model length is {longest}",
        )
        for model in ("models's", "model's", "model")
    ),
    *(
        form(
            "error_length_bytes",
            f"To serve at least one request with the {model} max seq len ({{max_model_len}}), ({{need_bytes}} KV cache "
            "is needed, which is larger than the available KV cache memory ({available_kv_bytes}{*}estimated maximum "
            "model length is {longest}",
        )
        for model in ("models's", "model's", "model")
    ),
    form("error_no_length", "Cannot auto-fit max_model_len: not enough GPU memory"),
    form(
        "error_batch_below_length",
        "max_num_batched_tokens ({max_num_batched_tokens}) is smaller than max_model_len ({max_model_len})",
    ),
    form(
        "error_batch_below_seqs",
        "max_num_batched_tokens ({max_num_batched_tokens}) must be greater than or equal to max_num_seqs "
        "({max_num_seqs})",
    ),
    form(
        "error_positions",
        "User-specified max_model_len ({max_model_len}) is greater than the derived max_model_len{*}={positions}",
    ),
    form("error_states", "max_num_seqs ({max_num_seqs}) exceeds available Mamba cache blocks ({num_gpu_blocks})"),
    form("error_sampler", "CUDA out of memory occurred when warming up sampler with {max_num_seqs} dummy requests"),
    form("error_sampler", "NPU out of memory occurred when warming up sampler with {max_num_seqs} dummy requests"),
    form("error_elsewhere", "Engine core initialization failed. See root cause above"),
    form("error_elsewhere", "Engine process failed to start. See stack trace for the root cause"),
    form("error_elsewhere", "WorkerProc initialization failed due to an exception in a background process"),
    form(
        "warning_graphs_cut",
        "Capping cudagraph capture sizes from max {largest} to {capped} to fit Mamba cache blocks ({num_gpu_blocks} "
        "blocks available)",
    ),
    form(
        "preempted",
        "Sequence group {request:w} is preempted by PreemptionMode.{mode:w} mode because there is not enough KV cache "
        "space{*}total_cumulative_preemption_cnt={preemptions}",
    ),
    form(
        "preempted",
        "Sequence group {request:w} is preempted by PreemptionMode.{mode:w} mode because there is not enough KV cache "
        "space{*}total_num_cumulative_preemption={preemptions}",
    ),
    form("swap_full", "Aborted due to the lack of CPU swap space"),
    form(
        "metrics",
        "Avg prompt throughput: {prompt_tokens_per_s} tokens/s, Avg generation throughput: {output_tokens_per_s} "
        "tokens/s, Running: {running} reqs, [Swapped: {swapped} reqs, ][Waiting: {waiting} reqs][Pending: {waiting} "
        "reqs][, Deferred: {deferred} reqs][, Preemptions: {preemptions}], GPU KV cache usage: {kv_usage:%}%"
        "[, CPU KV cache usage: {cpu_usage:%}%][, Prefix cache hit rate: {hit_rate:%}%]",
        engine="vllm",
        reach=600,
    ),
    form(
        "request_too_long",
        "This model's maximum context length is {max_model_len} tokens. However, you requested {request_tokens} tokens",
    ),
    form(
        "request_never",
        "Input prompt ({request_tokens} tokens)[ + lookahead slots ({lookahead})] is too long and exceeds the capacity "
        "of block_manager",
        reach=200,
    ),
    form(
        "request_too_long",
        "Input length ({request_tokens} tokens) exceeds the maximum allowed length ({max_model_len} tokens)",
        reach=200,
    ),
    form(
        "request_too_long",
        "This model's maximum context length is {max_model_len} tokens. However, your request has {request_tokens} "
        "input tokens",
    ),
)


def read(lines: Sequence[Line]) -> list[Finding]:
    """Kinds as in the table. O(characters)."""
    return read_forms(joined(lines), VLLM_ERRORS)
