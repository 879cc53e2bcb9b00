"""A run on the host itself: planned by vLLM's rules for a CPU, timed by the profile that is shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.api import FitError, fit
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import run as simulate
from hbmtwin.sim.scenario import Scenario, ScenarioError

GIB = 1 << 30
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


def served(folder: Path, **settings: Any) -> Result:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    keys = {
        "model.name": str(folder / "config.json"),
        "device.name": "cpu",
        "device.memory_bytes": 4 * GIB,
        "calibration.profile": "cpu-epyc-1-thread",
        "workload.num_prompts": 4,
        "workload.prompt_tokens": 40,
        "workload.output_tokens": 6,
    }
    return simulate(Scenario.of(keys | settings))


def test_a_cpu_serves_with_the_shipped_profile(tmp_path: Path) -> None:
    summary = served(tmp_path).summary
    assert summary["basis"] == "calibrated on cpu, profile cpu-epyc-1-thread"
    assert summary["oom"] is None
    # 0.9 of 4 GiB, less some 60 % of a GiB for libraries, weights and activations of a few MiB
    assert 2.7 * GIB < summary["kv_budget_bytes"] < 3.1 * GIB
    assert any(note.startswith("cpu: torch takes a CPU's memory from the C library") for note in summary["notes"])


def test_several_ranks_and_quantised_caches_are_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"tensor_parallel_size.*no all-reduce time"):
        served(tmp_path, **{"engine.tensor_parallel_size": 2})
    with pytest.raises(ScenarioError, match="vLLM on a CPU keeps its cache in 16 bits; use one of auto, float16"):
        served(tmp_path, **{"kv_cache.dtype": "fp8"})
    with pytest.raises(ScenarioError, match="profile cpu-epyc-1-thread was made on cpu, not on h100-80gb"):
        served(tmp_path, **{"device.name": "h100-80gb"})


def test_fit_answers_for_a_cpu() -> None:
    said = fit(model="qwen2.5-0.5b", device="cpu", total_memory_bytes=4 * GIB)
    assert said.budget.fits
    assert said.budget.usable_bytes == -(-4 * GIB * 92 // 100)
    assert not fit(model="llama-2-13b", device="cpu").budget.fits
    with pytest.raises(FitError, match="vllm does not serve on cpu; use one of vllm-cpu"):
        fit(model="qwen2.5-0.5b", device="cpu", engine="vllm")
