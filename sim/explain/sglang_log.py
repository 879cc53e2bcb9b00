"""What SGLang prints: free memory from step to step of its start, the size of its token pool, and retractions.

===================  ==============================================================================================
start                Load weight begin / end. avail mem=F GB, mem usage=W GB; KV Cache is allocated. K size: k GB, V
                     size: v GB; Memory pool end. avail mem=F GB; Capture cuda graph begin / end
pool                 max_total_num_tokens=T, ..., max_running_requests=R, context_len=L
does not start       Not enough memory. Please try to increase --mem-fraction-static; Loaded weights leave no GPU memory
                     for the KV cache under --mem-fraction-static=f; Capture cuda graph failed
runs short           Decode out of memory happened / KV cache pool is full. Retract requests. #retracted_reqs: r;
                     Prefill out of memory; Out of memory. Try to lower your batch size; Decode batch ... token usage
===================  ==============================================================================================

It writes GB for 2^30 bytes. Sources: model_runner.py, scheduler.py, schedule_batch.py, memory_pool.py of 0.3 to 0.5;
kv_cache_configurator.py, metrics_reporter.py and allocation.py of 0.5.23; public logs.
"""

from __future__ import annotations

from collections.abc import Sequence

from hbmtwin.sim.explain.findings import Finding, Line
from hbmtwin.sim.explain.forms import form, joined, read_forms

SGLANG = (
    form("sglang_load_begin", "Load weight begin. avail mem={load_begin_bytes}", engine="sglang"),
    form(
        "sglang_load_end",
        "Load weight end.{*}avail mem={load_end_bytes}[, mem usage={weights_bytes}]",
        reach=400,
        engine="sglang",
    ),
    form("sglang_kv", "KV Cache is allocated.{*}K size: {k_bytes}, V size: {v_bytes}", reach=200, engine="sglang"),
    form("sglang_kv", "KV Cache is allocated.{*}KV size: {kv_bytes}", reach=200, engine="sglang"),
    form("sglang_pool_end", "Memory pool end. avail mem={pool_end_bytes}", engine="sglang"),
    form("sglang_graph_begin", "Capture cuda graph begin.{*}avail mem={pool_end_bytes}", reach=200, engine="sglang"),
    form("sglang_graphs", "Capture cuda graph end.{*}mem usage={graph_bytes}", reach=200, engine="sglang"),
    form("sglang_graphs", "Capture npu graph end.{*}mem usage={graph_bytes}", reach=200, engine="sglang"),
    form(
        "sglang_graphs", "Capture target decode CUDA graph end.{*}mem usage={graph_bytes}", reach=200, engine="sglang"
    ),
    form("sglang_pool", "max_total_num_tokens={kv_tokens},{*}context_len={max_model_len}", reach=300, engine="sglang"),
    form(
        "sglang_pool",
        "max_total_num_tokens={kv_tokens},[ chunked_prefill_size={chunked_prefill_size},] max_prefill_tokens="
        "{max_prefill_tokens}, max_running_requests={max_num_seqs}, context_len={max_model_len}",
        reach=300,
        engine="sglang",
    ),
    form("sglang_ready", "The server is fired up and ready", engine="sglang"),
    form("sglang_no_kv", "Not enough memory. Please try to increase --mem-fraction-static", engine="sglang"),
    form(
        "sglang_no_kv",
        "Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={mem_fraction_static}. Raise "
        "--mem-fraction-static above {least_fraction}",
        engine="sglang",
    ),
    form("sglang_capture_failed", "Capture cuda graph failed", engine="sglang"),
    form("sglang_capture_failed", "Capture CUDA graph failed", engine="sglang"),
    form(
        "sglang_short_pool",
        "KV pool holds {kv_tokens} tokens, fewer than --context-length {max_model_len}",
        engine="sglang",
    ),
    form("sglang_retract", "Decode out of memory happened. #retracted_reqs: {retracted}", reach=200, engine="sglang"),
    form(
        "sglang_retract",
        "KV cache pool is full. Retract requests. #retracted_reqs: {retracted}",
        reach=200,
        engine="sglang",
    ),
    form("sglang_out_of_slots", "Prefill out of memory. Try to lower your batch size", engine="sglang"),
    form("sglang_out_of_slots", "Decode out of memory. Try to lower your batch size", engine="sglang"),
    form(
        "sglang_out_of_slots",
        "Out of memory. Try to lower your batch size. Try to allocate {request_tokens} tokens",
        engine="sglang",
    ),
    form("sglang_out_of_slots", "No space left for only one request", engine="sglang"),
    form("sglang_unbalanced", "The memory capacity is unbalanced. Some GPUs may be occupied by other processes"),
    *(
        form(
            "sglang_batch",
            f"Decode batch{{*}}#running-req: {{running}}, {pools},{{*}}#queue-req: {{waiting}}",
            reach=500,
            engine="sglang",
        )
        for pools in (
            "#token: {held_tokens}, token usage: {kv_usage}",
            "#full token: {held_tokens}, full token usage: {kv_usage}",
            "#full token: {held_tokens}, full token usage: {kv_usage}, #swa token: {swa_tokens}, swa token usage: "
            "{swa_usage}",
            "#full token: {held_tokens}, full token usage: {kv_usage}, mamba num: {states}, mamba usage: {state_usage}",
        )
    ),
)


def read(lines: Sequence[Line]) -> list[Finding]:
    """Kinds ``sglang_...``. O(characters)."""
    return read_forms(joined(lines), SGLANG)
