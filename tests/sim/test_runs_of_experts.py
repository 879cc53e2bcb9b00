"""Whole runs of mixtures of experts and of quantised weights, on models that take milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.kernels.weights import weight_bytes_per_rank
from hbmtwin.sim.result import Result
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario, ScenarioError

PLAIN: dict[str, Any] = json.loads((Path(__file__).parent / "tiny" / "plain.json").read_text(encoding="utf-8"))
MIXTURE: dict[str, Any] = {
    **PLAIN,
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 1024,
}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
MODELS = {"mixture": MIXTURE, "FP8": {**PLAIN, **FP8}, "both": {**MIXTURE, **FP8}}


def scenario(folder: Path, config: dict[str, Any], **keys: Any) -> Scenario:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    named = {key.replace("__", "."): value for key, value in keys.items()}
    return Scenario.of(
        {
            "model.name": str(path),
            "device.name": "a100-80gb",
            "engine.max_model_len": 512,
            "kv_cache.policy": "paged",
            "workload.num_prompts": 30,
            "workload.request_rate": 200.0,
            "workload.prompt_tokens": 100,
            "workload.output_tokens": 80,
            "workload.system_prompt_tokens": 0,
            "session.turns": 1,
            "results.interval_s": 0.01,
        }
        | named
    )


def run(folder: Path, config: dict[str, Any], *, step_mode: bool = False, **keys: Any) -> Result:
    return Twin(scenario(folder, config, **keys)).run(step_mode=step_mode)


@pytest.mark.parametrize("tensor_parallel_size", [1, 2])
@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_a_leap_is_its_steps(tmp_path: Path, config: dict[str, Any], tensor_parallel_size: int) -> None:
    keys = {"engine__tensor_parallel_size": tensor_parallel_size}
    leaps, steps = run(tmp_path, config, **keys), run(tmp_path, config, step_mode=True, **keys)
    for name in ("timeline", "requests", "checkpoints"):
        assert getattr(leaps, name).equals(getattr(steps, name)), name
    assert leaps.summary["requests_completed"] == 30


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_what_is_loaded_are_the_weights_of_the_shapes(tmp_path: Path, config: dict[str, Any]) -> None:
    twin = Twin(scenario(tmp_path, config))
    weights = twin.run().timeline["weights"]
    assert set(weights) == {weight_bytes_per_rank(twin.model)}
    assert weights.iloc[0] <= twin.budget.weights_bytes


def test_fewer_bits_and_fewer_experts_make_tokens_faster(tmp_path: Path) -> None:
    def token_s(config: dict[str, Any]) -> float:
        alone = run(tmp_path, config, workload__num_prompts=1, workload__request_rate=1.0)
        return float(alone.summary["tpot_s"]["p50"])

    wide = {**PLAIN, "intermediate_size": 16 * 1024}
    dense = token_s(wide)
    assert token_s({**wide, **FP8}) < 0.9 * dense
    assert token_s(MIXTURE) < 0.9 * dense  # as many weights, of which a token alone reads an eighth


def test_tensors_one_by_one_are_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(ScenarioError, match=r"^memory\.activations: 'per_layer'.*of experts .*use 'peak' or 'none'"):
        Twin(scenario(tmp_path, MIXTURE, memory__activations="per_layer"))
    with pytest.raises(ScenarioError, match="matrices quantised as fp8"):
        Twin(scenario(tmp_path, {**PLAIN, **FP8}, memory__activations="per_layer"))


def test_a_result_says_how_far_its_times_are_known(tmp_path: Path) -> None:
    notes = run(tmp_path, MODELS["both"]).summary["notes"]
    assert any(note.startswith("experts of ") and "confidence L" in note for note in notes)
    assert any("in fp8: 1.2 (0.9 to 1.9) of the 16-bit FLOPs" in note for note in notes)
    assert not any("confidence L" in note for note in run(tmp_path, PLAIN).summary["notes"])
