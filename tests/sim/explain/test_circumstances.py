"""At which point of a server's life a log stood, and which settings were on."""

from __future__ import annotations

import pytest

from hbmtwin.sim.explain import circumstances
from hbmtwin.sim.explain.findings import Finding, Line


def lines(text: str) -> list[Line]:
    return [Line(number, row) for number, row in enumerate(text.split("\n"), 1)]


def one(found: list[Finding]) -> Finding:
    (finding,) = found
    return finding


def frame(function: str) -> str:
    return f'  File "/opt/v/worker.py", line 7, in {function}'


@pytest.mark.parametrize(
    ("functions", "when", "phase"),
    [
        (["_initialize_kv_caches", "determine_available_memory", "profile_run", "forward"], "start_up", "profile"),
        (["load_model", "execute_model"], "start_up", "weights"),
        (["compile_or_warm_up_model", "capture_model", "_dummy_run"], "start_up", "capture"),
        (["initialize_from_config", "initialize_kv_cache"], "start_up", "kv_cache"),
        (["compile_or_warm_up_model", "_dummy_sampler_run"], "start_up", "warm_up"),
        (["execute_model", "load_model"], "start_up", "weights"),
        (["run_busy_loop", "execute_model", "forward"], "run_time", "step"),
        (["init_cuda_graphs", "__init__", "capture_one_batch_size"], "start_up", "capture"),
    ],
)
def test_a_traceback_tells_one_moment(functions: list[str], when: str, phase: str) -> None:
    text = "\n".join(["Traceback (most recent call last):", *map(frame, functions)])
    assert one(circumstances.read(lines(text))).words == {"when": when, "phase": phase}


def test_a_second_traceback_tells_its_own() -> None:
    text = "\n".join(["Traceback (most recent call last):", frame("load_model"), "Traceback (most recent call last):"])
    found = circumstances.read(lines(text + "\n" + frame("execute_model")))
    assert [finding.words["phase"] for finding in found] == ["weights", "step"]


def test_settings() -> None:
    text = (
        "export PYTORCH_NPU_ALLOC_CONF=expandable_segments:True\n"
        "try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation\n"
        "HCCL_BUFFSIZE=1200\nTASK_QUEUE_ENABLE: 2\n"
        "take a try to set the environment variable TASK_QUEUE_ENABLE=1.\nTASK_QUEUE_ENABLE=1.\n"
    )
    found = circumstances.read(lines(text))
    assert [(finding.line, dict(finding.words)) for finding in found if finding.words] == [
        (1, {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"})
    ]
    assert [dict(finding.numbers) for finding in found if finding.numbers] == [
        {"HCCL_BUFFSIZE": 1200},
        {"TASK_QUEUE_ENABLE": 2},
    ]
