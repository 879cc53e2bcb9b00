"""What a log says around a failure: at which point of a server's life it stood, and which settings were on.

::

    File ".../gpu_worker.py", line 136, in load_model            -> start_up, weights
    File ".../worker.py", line 354, in determine_available_memory -> start_up, profile
    ... in initialize_from_config | capture_model | warm_up_...   -> start_up, kv_cache | capture | warm_up
    ... in execute_model | forward_batch_generation ...           -> run_time, step
    Starting to load model | Capturing cudagraphs, not ended      -> start_up, weights | capture
    INFO: Application startup complete.                           -> whatever follows is run_time
    PYTORCH_NPU_ALLOC_CONF=expandable_segments:True               -> a setting

A profile run calls the same model as a step, so a frame of the start decides over one of a step.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from hbmtwin.sim.explain.findings import Finding, Line

When = Literal["start_up", "run_time"]

_FRAMES: dict[str, tuple[When, str]] = {
    "load_model": ("start_up", "weights"),
    "load_weights": ("start_up", "weights"),
    "process_weights_after_loading": ("start_up", "weights"),
    "create_weights": ("start_up", "weights"),
    "initialize_model": ("start_up", "weights"),
    "profile_run": ("start_up", "profile"),
    "determine_available_memory": ("start_up", "profile"),
    "determine_num_available_blocks": ("start_up", "profile"),
    "profile_max_num_token": ("start_up", "profile"),
    "initialize_kv_cache": ("start_up", "kv_cache"),
    "initialize_kv_caches": ("start_up", "kv_cache"),
    "initialize_from_config": ("start_up", "kv_cache"),
    "initialize_cache": ("start_up", "kv_cache"),
    "init_memory_pool": ("start_up", "kv_cache"),
    "allocate_kv_cache_tensors": ("start_up", "kv_cache"),
    "capture_model": ("start_up", "capture"),
    "capture_graph": ("start_up", "capture"),
    "capture_one_batch_size": ("start_up", "capture"),
    "capture_end": ("start_up", "capture"),
    "init_cuda_graphs": ("start_up", "capture"),
    "init_device_graphs": ("start_up", "capture"),
    "compile_or_warm_up_model": ("start_up", "warm_up"),
    "kernel_warmup": ("start_up", "warm_up"),
    "execute_model": ("run_time", "step"),
    "sample_tokens": ("run_time", "step"),
    "forward_batch_generation": ("run_time", "step"),
    "forward_thread_func": ("run_time", "step"),
    "process_batch_prefill": ("run_time", "step"),
    "process_batch_decode": ("run_time", "step"),
}
_FRAME = re.compile(r"File \"[^\"]{1,300}\", line \d{1,7}, in _{0,2}(\w{1,60}?)_{0,2}\s*$")
_TRACEBACK = "Traceback (most recent call last)"
_SERVING = re.compile(
    r"Application startup complete|Uvicorn running on|Avg prompt throughput|Starting vLLM API server|"
    r"The server is fired up and ready|Decode batch\b|Prefill batch\b|Running: \d{1,6} reqs|POST /v1/"
)
_FAILED_START = re.compile(
    r"EngineCore failed to start|Engine core initialization failed|Engine process failed to start|"
    r"WorkerProc initialization failed|Failed to start engine|Scheduler hit an exception.{0,40}__init__"
)
_BEGUN = re.compile(
    r"(Starting to load model|Load weight begin)|Capturing (?:the model for )?(?:cuda|CUDA|npu|NPU|acl|ACL) ?graph|"
    r"Capture (?:cuda|npu) graph begin"
)
"""The first group: weights; else graphs."""
_ENDED = re.compile(
    r"Loading (?:model )?weights took|Model loading took|Load weight end|Graph capturing finished|"
    r"Capture (?:cuda|npu) graph end"
)
_ALLOC_CONF = re.compile(
    r"^\W{0,4}(?:export |ENV |-e )?(PYTORCH_(?:(?:CUDA|HIP|NPU|XPU)_)?ALLOC_CONF)\W{1,4}([A-Za-z_0-9:,.\[\]>]{1,300})"
)
_NUMBER = re.compile(r"(?<!variable )(HCCL_BUFFSIZE|TASK_QUEUE_ENABLE)[\"']?\s{0,2}[=:]\s{0,2}[\"']?(\d{1,9})(?![\d.])")
"""Not torch_npu's hint to set the environment variable TASK_QUEUE_ENABLE=1, which ends in a full stop."""


def read(lines: Sequence[Line]) -> list[Finding]:
    """Kinds ``moment`` (words ``when``, ``phase``) and ``setting`` (words by name). O(characters).

    A moment stands at the line that tells it; of one traceback there is one, at its last telling frame.
    """
    found: list[Finding] = []
    open_moments: dict[str, int] = {}
    for line in lines:
        text = line.text
        if _TRACEBACK in text:
            open_moments.pop(line.rank, None)
        elif frame := _FRAME.search(text):
            told = _FRAMES.get(frame[1])
            if told is not None:
                _keep(found, open_moments, Finding("moment", line.number, line.rank, {}, _moment(told)))
        elif _SERVING.search(text):
            found.append(Finding("moment", line.number, line.rank, {}, {"when": "run_time", "phase": "serving"}))
        elif _FAILED_START.search(text):
            found.append(Finding("moment", line.number, line.rank, {}, {"when": "start_up", "phase": "failed_start"}))
        elif begun := _BEGUN.search(text):
            words = {"when": "start_up", "phase": "begun", "what": "weights" if begun[1] else "capture"}
            found.append(Finding("moment", line.number, line.rank, {}, words))
        elif _ENDED.search(text):
            found.append(Finding("moment", line.number, line.rank, {}, {"when": "start_up", "phase": "ended"}))
        if "ALLOC_CONF" in text and (conf := _ALLOC_CONF.search(text)):
            found.append(Finding("setting", line.number, line.rank, {}, {conf[1]: conf[2]}))
        found.extend(
            Finding("setting", line.number, line.rank, {number[1]: int(number[2])}) for number in _NUMBER.finditer(text)
        )
    return found


def _moment(told: tuple[When, str]) -> dict[str, str]:
    return {"when": told[0], "phase": told[1]}


def _keep(found: list[Finding], open_moments: dict[str, int], moment: Finding) -> None:
    """One moment a traceback: the start over a step, and the innermost frame of the start."""
    at = open_moments.get(moment.rank)
    if at is None:
        open_moments[moment.rank] = len(found)
        found.append(moment)
        return
    step_in_start = moment.words["phase"] == "step" and found[at].words["when"] == "start_up"
    found[at] = moment._replace(words=found[at].words if step_in_start else moment.words)
