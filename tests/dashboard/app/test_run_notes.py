"""What a run tells beside its numbers, in Chinese: each note is provoked by settings, and no English is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hbmtwin.api import Scenario, run
from hbmtwin.dashboard.app import in_chinese as told
from hbmtwin.dashboard.app.run_notes import NOTES
from hbmtwin.sim import legality
from hbmtwin.sim.model_states import state_notes
from hbmtwin.sim.model_windows import window_notes
from hbmtwin.sim.pipeline import pipeline_notes
from hbmtwin.sim.resolve import batch_notes, device_notes, matrix_notes
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.sim.traffic import source_of, trace_notes
from hbmtwin.sim.workload_presets import context_notes

from . import wrong_examples as wrong
from .test_in_chinese import ENGLISH, used_in, words

TRACE = f"workload.trace={wrong.TINY / 'requests.csv'}"
LARGE = "device.memory_bytes=1TiB"
GROUPS = "kv_cache.disable_hybrid_kv_cache_manager=true"
MAMBA = ("model.name=bamba-9b", "kv_cache.enable_prefix_caching=true", "kv_cache.mamba_cache_mode=all", LARGE)
STAGES = "engine.pipeline_parallel_size"
FEW = "scheduler.max_num_batched_tokens=100"
SETTINGS: tuple[tuple[str, ...], ...] = (
    *(("kv_cache.swap_space_bytes=1",), ("kv_cache.growth=doubling",), ("memory.fit=first",)),
    *((wrong.CONTIGUOUS, "kv_cache.initial_tokens=1"), ("scheduler.batching=sorted",)),
    *(("engine.task_queue_enable=2",), (TRACE, "workload.rate_scale=2"), ("workload.trace_format=x",)),
    *(("workload.rate_scale=2",), ("workload.time_scale=2",), ("workload.priorities=[1.0]",)),
    ("workload.clients=[{request_rate=1}]", "workload.arrival_pattern=gamma"),
    *(("workload.users=3", "workload.arrival_pattern=gamma"), ("results.cache_events=true",)),
    *(("session.between_turns=keep",), (wrong.CONTIGUOUS, "scheduler.policy=static_batch"), (FEW,)),
    ("memory.activations=per_layer", "memory.activation_bytes=1GiB"),
    ("memory.activations=per_layer", "engine.task_queue_enable=2", "device.name=a100-80gb"),
    *((GROUPS,), ("kv_cache.mamba_cache_mode=align",), ("scheduler.policy=prefill_first", FEW)),
    *(("scheduler.enable_chunked_prefill=false", FEW), (*wrong.V0, FEW), ("kv_cache.block_size=1",)),
    *((*wrong.STATES, "kv_cache.block_size=1"), MAMBA, (wrong.WINDOWS, "device.name=a100-80gb", GROUPS)),
    *((wrong.TRUNCATED,), ("model.name=deepseek-moe-16b", LARGE), ("device.name=cpu", wrong.SHORT)),
    ("model.name=deepseek-r1", LARGE, "device.name=h200"),
    *((f"{STAGES}=3",), (f"{STAGES}=2",)),
    (
        *("model.name=codellama-7b", LARGE, "device.name=h200", "engine.tensor_parallel_size=8", f"{STAGES}=3"),
        *("scheduler.policy=sglang", "kv_cache.policy=radix"),
    ),
    *(("workload.preset=mooncake-conversation", *more) for more in ((), ("workload.num_prompts=2000",))),
    *((f"model.name={name}", f"workload.preset={preset}", LARGE) for name, preset in (("gemma-3-1b", "reasoning-r1"),)),
    ("workload.preset=sharegpt",),
    ("kv_cache.dtype=int8", "device.name=ascend-910b4", wrong.CONTIGUOUS),
)
NOT_PROVOKED = {
    "The p99, {tokens} tokens, is held by no model of the catalog": "no preset is so long",
    "The p99, {tokens} tokens, is held by {names} and {last}": "every preset is held by more",
    "calibration.profile {name}: all-reduces were measured of {counts} ranks; the latency of {ranks} is the "
    "catalog's": ("no profile that comes along was measured on several devices"),
    "memory budget: {lines} measured, in whole or in part (calibration.profile {name})": (
        "nor does one say what memory holds"
    ),
}
"""Notes that no example here has, and why."""


def notes(*settings: str) -> list[str]:
    """Those that are known before the first request."""
    scenario = Scenario.load(overrides=settings)
    plan, source = ServerPlan(scenario), source_of(scenario)
    return [
        *trace_notes(scenario, source),
        *legality.notes(scenario),
        *device_notes(scenario, plan.model, plan.device),
        *matrix_notes(plan.model),
        *pipeline_notes(scenario, plan.budget),
        *batch_notes(scenario, plan.max_model_len),
        *context_notes(scenario.workload.preset, source, plan.longest_request),
        *window_notes(scenario, plan.model, plan.kept_model),
        *state_notes(scenario, plan.model, plan.pool, plan.block_size),
    ]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    found = [note for settings in SETTINGS for note in notes(*settings)]
    folder = tmp_path_factory.mktemp("notes")
    found += _of_traces(folder)
    model = folder / "head.json"
    model.write_text(json.dumps(wrong.WHOLE | {"num_attention_heads": 16, "num_key_value_heads": 4}))
    measured = ["device.name=cpu", "calibration.profile=cpu-epyc-1-thread", "device.memory_bytes=64GiB", wrong.SHORT]
    many = ["workload.num_prompts=20", "workload.request_rate=inf", "workload.system_prompt_tokens=0"]
    short = ["session.turns=1", "workload.output_tokens=2", "workload.prompt_tokens=8"]
    for asked in (wrong.PLAIN, f"model.name={model}"):
        found += run(Scenario.load(overrides=[asked, *measured, *many, *short])).summary["notes"]
    return list(dict.fromkeys(found))


def _of_traces(folder: Path) -> list[str]:
    found = []
    fine = f"{wrong.HEADER}\n1,2,3\n"
    for place, rows in enumerate((fine + "x,1,1\n", fine + "x,1,1\ny,1,1\n")):
        path = folder / f"{place}.csv"
        path.write_text(rows)
        found += notes(f"workload.trace={path}", "workload.skip_bad_lines=true")
    for failed in (1, 2):
        path = folder / f"failed{failed}.csv"
        path.write_text("Timestamp,Request tokens,Response tokens\n1,2,3\n" + "2,2,0\n" * failed)
        found += notes(f"workload.trace={path}")
    calls = folder / "calls.csv"
    calls.write_text("session,call,t_s,input_chars,output_chars,shared_prefix_chars\n1,1,0,8,8,0\n")
    turns = folder / "turns.json"
    number = {"distribution": "constant", "value": 2}
    asked = {"num_turns": number, "prefix_num_tokens": number, "num_tokens": number}
    turns.write_text(
        json.dumps({"num_conversations": 2, "prompt_input": asked, "prompt_output": {"num_tokens": number}})
    )
    return [
        *found,
        *notes(f"workload.trace={calls}"),
        *notes(f"workload.multi_turn={turns}", "workload.prompt_tokens=3"),
    ]


def test_every_note_is_told_in_chinese(lines: list[str]) -> None:
    assert len(lines) > 40
    assert [line for line in lines if told.in_chinese(line) is None] == []


def test_no_english_is_left(lines: list[str]) -> None:
    left = [(line, words(told.in_chinese(line) or "") & ENGLISH) for line in lines]
    assert [(line, found) for line, found in left if found] == []


def test_every_note_has_an_example(lines: list[str]) -> None:
    used = used_in(lines, NOTES)
    assert [phrase.en for phrase in NOTES if phrase not in used] == list(NOT_PROVOKED)
