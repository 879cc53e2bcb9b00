"""Whole steps of a run: which are measured and what they stand for, how much of a model fits, and the report's sums.

Times are those of a runner of ours, whose steps take what a formula says: what is scaled, summed and compared is then
known in literal numbers. The decoder itself is held to a plain one in ``test_small_decoder.py``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hbmtwin.dashboard.run_replay_steps import steps_figure, steps_part
from hbmtwin.kernels.attention.backends import BackendUnavailable, load
from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.run import run as simulate
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.run_replay.decodable import NoDecoder, check_decoder, need_of, read_model
from hbmtwin.validation.run_replay.room import Room
from hbmtwin.validation.run_replay.sampling import Batch
from hbmtwin.validation.run_replay.source import RecordedRun, load_run
from hbmtwin.validation.run_replay.step_report import StepReplay
from hbmtwin.validation.run_replay.steps import StepOptions, replay_steps, scaled

GIB = 1 << 30
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}
ROOM = Room(GIB, "a GiB may be taken")


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> None:
    try:
        load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


def recorded(folder: Path, *settings: str, preset: str = "paged", config: dict[str, Any] | None = None) -> RecordedRun:
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    overrides = [
        f"model.name='{folder / 'config.json'}'",
        "device.name=cpu",
        "calibration.profile=cpu-epyc-1-thread",
        "results.steps=true",
        "kv_cache.block_size=16",
        "engine.max_model_len=256",
        "workload.request_rate=inf",
        "workload.num_prompts=5",
        "workload.prompt_tokens=20",
        "workload.output_tokens=6",
        "workload.system_prompt_tokens=0",
        "session.turns=1",
        *settings,
    ]
    simulate(Scenario.load(preset=preset, overrides=overrides)).save(folder / "result")
    return load_run(folder / "result", trace=False)


class Formula:
    """A step takes 1,000 ns and, a layer, 100 and 10 a token, of which 4 a token are attention; and so many ns more in
    every second round."""

    def __init__(self, model: ModelShape, blocks: int, layers: int, *, busy: int = 0) -> None:
        self.made = (model.num_layers, blocks, layers)
        self.tokens, self.calls, self.busy = 0, 0, busy
        self.placed: list[Batch] = []

    def place(self, b: Batch) -> None:
        self.tokens = sum(b.new_tokens)
        self.placed.append(b)

    def time_ns(self, num_layers: int) -> float:
        self.calls += 1
        return 1000 + num_layers * (100 + 10 * self.tokens) + self.busy * (self.calls % 2)

    def attention_ns(self, num_layers: int) -> float:
        return num_layers * 4 * self.tokens


def measured(run: RecordedRun, options: StepOptions | None = None, **settings: Any) -> StepReplay:
    settings = {"room": ROOM, "runner": Formula, **settings}
    return replay_steps(run, ServerPlan(run.scenario), "cpu", options or StepOptions(), **settings)


@pytest.mark.usefixtures("torch")
def test_every_step_through_all_layers(tmp_path: Path) -> None:
    run, told = recorded(tmp_path), []
    s = measured(run, told=told.append)
    assert s.kinds == ("prefill",) + ("decode",) * 5
    assert s.sequences.tolist() == [5] * 6
    assert s.measured_ns.tolist() == [1000 + 4 * (100 + 10 * 100)] + [1000 + 4 * (100 + 10 * 5)] * 5
    assert s.measured_attention_ns.tolist() == [1600] + [80] * 5
    assert (s.layers_in_words, s.total_steps, s.left_out, s.same_device) == ("all 4 layers", 6, 0, True)
    assert s.without_layers_ns.tolist() == []
    assert s.total_measured_ns == 5400 + 5 * 1600
    ends = np.concatenate([np.array(e) for e in run.steps["step_ends_ns"]])
    assert s.total_predicted_ns == s.predicted_ns.sum() == ends[-1] - run.steps["start_ns"][0]
    assert told[0].startswith(
        "measuring 6 of 6 steps through all 4 layers, in 9 rounds: about 1 s, and none begins after 120 s"
    )
    json.dumps(s.to_dict(), allow_nan=False)


@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_fewer_layers_are_scaled_to_the_exact_time_where_layers_are_alike(tmp_path: Path, depth: int) -> None:
    run = recorded(tmp_path)
    whole, part = measured(run), measured(run, StepOptions(layers=depth))
    assert part.measured_ns.tolist() == whole.measured_ns.tolist()
    assert part.measured_attention_ns.tolist() == whole.measured_attention_ns.tolist()
    assert part.without_layers_ns.tolist() == [1000] * 6
    assert part.at_depth_ns[0] == 1000 + depth * 1100
    assert part.layers_in_words == f"{depth} of 4 layers"
    assert any(
        f"Measured {depth} of 4 layers, all alike: a step's time is t({depth}) + {4 - depth} x (t({depth}) - t(0))" in n
        for n in part.notes
    )


def test_the_rule_that_scales() -> None:
    assert scaled(700, 100, 2, 10) == 700 + 8 * 300
    assert scaled(700, 100, 2, 2) == 700


@pytest.mark.usefixtures("torch")
def test_what_does_not_fit_is_told_with_the_sizes_and_measured_with_fewer_layers(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    plan = ServerPlan(run.scenario)
    need = need_of(
        plan, read_model(plan), [Batch(0, 0, (20,) * 5, (0,) * 5, 0), Batch(0, 0, (1,) * 5, (25,) * 5, 0)], 2
    )
    assert need.ends == 2 * (2 * 300 * 64 + 2 * ((1 << 20) - 3))
    weights = (4 + 2 * 2) * 16 * 64 + 64 * 64 + 2 * 160 * 64 + 64 * 160 + 4 * 64
    assert need.layer == 2 * (weights + 5 * 2 * 16 * 2 * 2 * 16)
    made: list[Formula] = []

    def keep(*sizes: Any) -> Formula:
        made.append(Formula(*sizes))
        return made[-1]

    s = measured(run, room=Room(need.of(4) - 1, "little is free"), runner=keep)
    assert made[0].made == (4, 10, 3)
    (note,) = [n for n in s.notes if "Measured 3 of 4 layers" in n]
    assert note.startswith("All 4 layers of ")
    assert "for embedding and head" in note
    assert "; little is free. Measured" in note
    with pytest.raises(NoDecoder, match="little is free: not even one layer fits"):
        measured(run, room=Room(need.of(1) - 1, "little is free"), runner=keep)
    assert len(made) == 1, "nothing is made where nothing fits"


@pytest.mark.usefixtures("torch")
def test_time_is_kept_by_fewer_steps_then_fewer_layers_then_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path, "workload.num_prompts=30", "workload.output_tokens=40", "scheduler.max_num_seqs=4")
    some = [measured(run, StepOptions(limit_s=limit)) for limit in (100, 0.8, 0.5, 0.3, 0.1, 0.05)]
    found = [(len(s.steps), s.layers_measured, "Medians of 1 round " in " ".join(s.notes)) for s in some]
    assert found == [(24, 4, False), (12, 4, False), (8, 4, False), (8, 4, True), (8, 2, True), (4, 2, True)]
    assert "would take longer than half the limit of 0.1 s" in " ".join(some[4].notes)
    with pytest.raises(
        NoDecoder, match="one step through 1 of 4 layers, 2 times, takes about 1 s here; give --limit-s 2"
    ):
        measured(run, StepOptions(limit_s=1e-4))


@pytest.mark.usefixtures("torch")
def test_when_time_is_up_the_round_ends_and_in_the_first_steps_are_left_out(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    clock = iter(range(1000))
    s = measured(run, StepOptions(limit_s=3), now_s=lambda: next(clock))
    assert (len(s.steps), s.left_out) == (4, 2)
    assert any("2 chosen steps were left out: the time limit was reached." in n for n in s.notes)
    clock = iter(range(1000))
    assert measured(run, StepOptions(limit_s=10), now_s=lambda: next(clock)).left_out == 0


@pytest.mark.usefixtures("torch")
def test_a_profile_of_another_cpu_or_of_other_threads_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded(tmp_path)
    monkeypatch.setattr("hbmtwin.validation.run_replay.steps.device_called", lambda torch, backend: "AMD EPYC")
    said = "The profile is of another CPU, or of other threads: hbmtwin bench kernels: "
    assert not any(said in note for note in measured(run).notes)
    assert any(said in note for note in measured(run, StepOptions(threads=2)).notes)
    monkeypatch.setattr("hbmtwin.validation.run_replay.steps.device_called", lambda torch, backend: "Other")
    assert any(said in note for note in measured(run).notes)


@pytest.mark.usefixtures("torch")
def test_medians_and_the_least_of_the_rounds(tmp_path: Path) -> None:
    run = recorded(tmp_path, "workload.output_tokens=7")  # seven steps, so that busy ones fall on each in turn
    s = measured(run, runner=lambda *sizes: Formula(*sizes, busy=400))
    quiet = measured(run)
    assert s.least_ns.tolist() == quiet.measured_ns.tolist()
    assert set((s.measured_ns - quiet.measured_ns).tolist()) == {0, 400}


@pytest.mark.usefixtures("torch")
def test_a_prediction_that_is_twice_as_long_is_told_as_such(tmp_path: Path) -> None:
    """Planted: every number of the report must see it."""
    run = recorded(tmp_path)
    s = measured(run)
    twice = replace(s, predicted_ns=2 * s.measured_ns, total_predicted_ns=int(2 * s.measured_ns.sum()))
    rows = {row.quantity: row for row in twice.errors()}
    assert rows["step time (ns)"].mape_percent == 100.0
    assert rows["  prefill steps"].steps == 1
    assert rows["  decode steps"].steps == 5
    assert twice.total_error_percent == 100.0
    assert "predicted 0.000 s, measured 0.000 s: +100.0 %" in twice.in_words[0]
    right = replace(s, predicted_ns=s.measured_ns, total_predicted_ns=int(s.measured_ns.sum()))
    assert [row.mape_percent for row in right.errors()[:2]] == [0.0, 0.0]
    elsewhere = replace(twice, same_device=False)
    assert elsewhere.factor == 0.5
    assert elsewhere.errors()[0].quantity == "step time (ns), behind one factor"
    assert elsewhere.errors()[0].mape_percent == 0.0
    assert "measured times are 0.5 times the predicted ones" in elsewhere.in_words[0]


@pytest.mark.usefixtures("torch")
def test_the_sum_of_all_steps_counts_each_for_as_many_as_it_stands_for(tmp_path: Path) -> None:
    s = measured(recorded(tmp_path))
    some = replace(
        s,
        stands_for=np.array([1.0, 3.0]),
        predicted_ns=np.array([100, 10]),
        measured_ns=np.array([200, 10]),
        predicted_attention_ns=np.array([50, 2]),
        measured_attention_ns=np.array([20, 1]),
        total_predicted_ns=1300,
    )
    assert some.total_measured_ns == 1300 * 230 // 130
    assert some.attention_shares == (56 / 130, 23 / 230)


@pytest.mark.usefixtures("torch")
def test_the_picture_has_both_sides_of_step_and_attention_and_an_error_for_each(tmp_path: Path) -> None:
    s = measured(recorded(tmp_path))
    traces = {trace.name: trace for trace in steps_figure(s).data}
    assert list(traces) == [
        *("step, measured", "step, predicted", "attention, measured", "attention, predicted", "prefill", "decode"),
    ]
    assert list(traces["step, measured"].y) == (s.measured_ns / 1e6).tolist()
    assert len(traces["prefill"].y) + len(traces["decode"].y) == len(s.steps)
    assert "all 4 layers" in steps_part(s)


# -- refused -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, Callable[[Path], list[str]], str]] = {
    "experts": ("paged", lambda f: ["model.name=qwen1.5-moe-a2.7b", "device.name=h100-80gb"], "a mixture of experts"),
    "latent": ("paged", lambda f: ["model.name=minicpm3-4b", "device.name=h100-80gb"], r"latent attention \(MLA\)"),
    "states": (
        "paged",
        lambda f: ["model.name=granite-4.0-h-micro", "device.name=h100-80gb", "kv_cache.block_size=64"],
        r"state-space layers \(Mamba-2\)",
    ),
    "ranks": (
        "paged",
        lambda f: ["engine.tensor_parallel_size=2", "device.name=h100-80gb"],
        "tensor_parallel_size = 2",
    ),
    "small KV": ("paged", lambda f: ["kv_cache.dtype=fp8", "device.name=h100-80gb"], "keeps KV in 16 bits"),
    "one piece": ("doubling", lambda f: ["device.name=h100-80gb"], "keeps KV in one piece a sequence"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_decoder_cannot_do_is_refused_by_name(tmp_path: Path, what: str) -> None:
    preset, settings, why = REFUSED[what]
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    overrides = [f"model.name='{tmp_path / 'config.json'}'", "engine.max_model_len=256", *settings(tmp_path)]
    plan = ServerPlan(Scenario.load(preset=preset, overrides=overrides))
    with pytest.raises(NoDecoder, match=why):
        check_decoder(plan)


@pytest.mark.usefixtures("torch")
def test_layers_that_are_not_alike_are_measured_all_or_not_at_all(tmp_path: Path) -> None:
    config = CONFIG | {
        "model_type": "gemma3_text",
        "sliding_window": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    run = recorded(tmp_path, config=config)
    assert measured(run).layers_measured == 4
    with pytest.raises(NoDecoder, match="layers are not alike"):
        measured(run, StepOptions(layers=2))
