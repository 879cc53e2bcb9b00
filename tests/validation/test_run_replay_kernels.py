"""What is timed of a run, with which arguments, and what becomes of the times: on a clock and kernels of our own."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, load
from hbmtwin.sim.catalog import device
from hbmtwin.sim.run import run as simulate
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.server_plan import ServerPlan
from hbmtwin.validation.run_replay.errors import error_row
from hbmtwin.validation.run_replay.kernels import NoKernels, all_batches, replay_kernels
from hbmtwin.validation.run_replay.predicted import is_it
from hbmtwin.validation.run_replay.sampling import Batch, sample
from hbmtwin.validation.run_replay.source import RecordedRun, load_run


def batch(row: int, new: tuple[int, ...], context: tuple[int, ...]) -> Batch:
    return Batch(row, row, new, context, 1000)


PREFILL, MIXED, DECODE = ((8, 8), (0, 0)), ((8, 1), (0, 9)), ((1, 1), (9, 9))


# -- which steps -------------------------------------------------------------------------------------------------------


def test_all_steps_where_there_are_no_more() -> None:
    batches = [batch(i, *DECODE) for i in range(5)]
    assert sample(batches, 5) == batches
    assert sample([], 3) == []


def test_every_kind_has_a_share_and_every_nth_is_taken() -> None:
    kinds = [PREFILL] * 10 + [MIXED] * 30 + [DECODE] * 60
    batches = [batch(i, *kind) for i, kind in enumerate(kinds)]
    assert [b.row for b in sample(batches, 10)] == [0, 10, 25, 35, 40, 55, 65, 75, 85, 95]
    assert [b.kind for b in sample(batches, 10)] == ["prefill"] + ["mixed"] * 3 + ["decode"] * 6


@pytest.mark.parametrize("most", [1, 2, 3, 7, 50])
def test_as_many_as_asked_for_and_none_twice(most: int) -> None:
    kinds = [PREFILL] * 2 + [DECODE] * 200 + [MIXED]
    batches = [batch(i, *kind) for i, kind in enumerate(kinds)]
    rows = [b.row for b in sample(batches, most)]
    assert len(rows) == most
    assert rows == sorted(set(rows))
    assert rows == [b.row for b in sample(batches, most)]


def test_the_heaviest_is_always_among_them() -> None:
    batches = [batch(i, (1, 1), (9, 9)) for i in range(100)]
    batches[37] = batch(37, (1, 1), (9, 500))
    assert 37 in [b.row for b in sample(batches, 4)]
    assert (batches[37].pairs, batches[0].pairs) == (10 + 501, 20)


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_worked_row_of_errors() -> None:
    row = error_row("x", [0, 4, 8, 12], [100, 110, 90, 0], [100, 100, 100, 0])
    assert row[:4] == ("x", 4, 2, 5.0)
    assert (row.p50_percent, row.p95_percent) == (5.0, 10.0)
    assert (row.worst_step, row.worst_predicted, row.worst_measured) == (4, 110, 100)


def test_equal_series_and_no_series() -> None:
    assert error_row("x", [3], [7], [7])[1:] == (1, 0, 0.0, 0.0, 0.0, -1, 0, 0)
    assert error_row("x", [], [], [])[1:] == (0, 0, None, None, None, -1, 0, 0)


def test_what_was_predicted_where_nothing_was_measured_differs_and_is_the_worst() -> None:
    row = error_row("x", [1, 2], [5, 6], [0, 3])
    assert (row.differing, row.mape_percent, row.worst_step) == (2, 100.0, 1)


def test_the_shorter_series_counts() -> None:
    assert error_row("x", [1, 2, 3], [5, 5, 5], [5, 5]).steps == 2


# -- kernels -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch() -> None:
    """torch without its plug-ins, of which torch_npu needs a driver."""
    try:
        load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


def recorded(folder: Path, *settings: str, preset: str = "paged", on: str = "ascend-910b4") -> RecordedRun:
    overrides = [
        "results.steps=true",
        "workload.request_rate=inf",
        "workload.num_prompts=3",
        "workload.prompt_tokens=20",
        "workload.output_tokens=4",
        "workload.system_prompt_tokens=0",
        "session.turns=1",
        "engine.max_model_len=256",
        f"device.name={on}",
        *settings,
    ]
    simulate(Scenario.load(preset=preset, overrides=overrides)).save(folder / "result")
    return load_run(folder / "result", trace=False)


def test_batches_are_those_of_the_table(tmp_path: Path) -> None:
    batches = all_batches(recorded(tmp_path))
    assert [(b.new_tokens, b.context_tokens, b.kind) for b in batches] == [
        ((20, 20, 20), (0, 0, 0), "prefill"),
        ((1, 1, 1), (20, 20, 20), "decode"),
    ]
    assert batches[1].step == 1
    assert batches[1].duration_ns > 0


class Spy:
    """Notes what it is asked."""

    name, device = "cpu-spy", "cpu"

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[tuple[int, ...], ...], dict[str, Any]]] = []

    def __getattr__(self, verb: str) -> Any:
        def call(*tensors: Any, **settings: Any) -> Any:
            self.calls.append((verb, tuple(tuple(t.shape) for t in tensors), settings))
            return tensors[0]

        return call


def ticking() -> Any:
    """Each look at the clock is 500 ns after the one before."""
    return itertools.count(0, 500).__next__


@pytest.mark.usefixtures("torch")
def test_paged_batches_become_paged_calls(tmp_path: Path) -> None:
    run, spy = recorded(tmp_path), Spy()
    k = replay_kernels(run, ServerPlan(run.scenario), "cpu", kernels=spy, clock_ns=ticking())
    calls = {verb: (shapes, settings) for verb, shapes, settings in spy.calls}
    assert [verb for verb, _, _ in spy.calls] == ["paged_prefill"] * 4 + ["paged_decode"] * 4
    shapes, settings = calls["paged_prefill"]
    block = ServerPlan(run.scenario).block_size
    blocks = 3 * -(-20 // block)
    assert shapes == ((60, 32, 128), (blocks, block, 32, 128), (blocks, block, 32, 128))
    assert (settings["q_lens"], settings["context_lens"], settings["window"]) == ([20] * 3, [20] * 3, 0)
    assert settings["scale"] == pytest.approx(128**-0.5)
    shapes, settings = calls["paged_decode"]
    assert shapes[0] == (3, 32, 128)
    assert settings["context_lens"] == [21] * 3
    table = settings["block_table"].numpy()
    assert sorted(table.flatten().tolist()) == list(range(table.size)), "no block stands for two sequences"
    assert k.measured_ns.tolist() == [32 * 500] * 2
    assert (k.kinds, k.num_layers, k.left_out, k.total_steps) == (("prefill", "decode"), 32, 0, 2)
    assert k.predicted_attention_ns is not None
    assert (k.predicted_attention_ns < k.predicted_step_ns).all()
    assert not k.same_device
    assert k.measured_on.startswith("cpu-spy on ")


@pytest.mark.usefixtures("torch")
def test_contiguous_batches_become_plain_calls(tmp_path: Path) -> None:
    run, spy = recorded(tmp_path, preset="doubling"), Spy()
    replay_kernels(run, ServerPlan(run.scenario), "cpu", max_steps=2, kernels=spy, clock_ns=ticking())
    assert {verb for verb, _, _ in spy.calls} == {"prefill", "decode"}
    decode = next(call for call in spy.calls if call[0] == "decode")
    longest = max(decode[2]["kv_lens"])
    assert decode[1] == ((3, 32, 128), (3, longest, 32, 128), (3, longest, 32, 128))


@pytest.mark.usefixtures("torch")
def test_layers_with_a_window_are_timed_with_it(tmp_path: Path) -> None:
    run, spy = recorded(tmp_path, "model.name=gemma-3-1b", "engine.max_model_len=2048"), Spy()
    plan = ServerPlan(run.scenario)
    k = replay_kernels(run, plan, "cpu", kernels=spy, clock_ns=ticking())
    assert {call[2]["window"] for call in spy.calls} == {0, plan.window}
    assert k.measured_ns.tolist() == [plan.rank_model.num_attention_layers * 500] * len(k.steps)


@pytest.mark.usefixtures("torch")
def test_a_step_too_heavy_for_the_machine_is_left_out_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hbmtwin.validation.run_replay.kernels.MAX_LAYER_BYTES", 1_500_000)
    run = recorded(tmp_path)
    k = replay_kernels(run, ServerPlan(run.scenario), "cpu", kernels=Spy(), clock_ns=ticking())
    assert (k.steps.tolist(), k.left_out) == ([1], 1)
    assert any("1 sampled steps were left out" in note for note in k.notes)


@pytest.mark.usefixtures("torch")
def test_times_of_another_device_are_compared_behind_one_factor(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    k = replay_kernels(run, ServerPlan(run.scenario), "cpu", kernels=Spy(), clock_ns=ticking())
    assert k.predicted_attention_ns is not None
    ratios = k.measured_ns / k.predicted_attention_ns
    assert k.factor == pytest.approx(np.median(ratios))
    (row,) = k.errors()
    assert row.quantity == "attention time (ns), behind one factor"
    assert row.mape_percent is not None
    told = k.to_dict()
    assert (told["predicted_for"], told["same_device"]) == ("ascend-910b4", False)
    assert told["basis"] == "default, uncalibrated"
    json.dumps(told, allow_nan=False)


def test_attention_over_a_latent_is_refused(tmp_path: Path) -> None:
    run = recorded(tmp_path, "model.name=deepseek-v2-lite", on="ascend-910b1")
    with pytest.raises(NoKernels, match="keeps a latent"):
        replay_kernels(run, ServerPlan(run.scenario), "cpu", kernels=Spy(), clock_ns=ticking())


@pytest.mark.usefixtures("torch")
def test_the_cpus_own_kernels(tmp_path: Path) -> None:
    run = recorded(tmp_path)
    k = replay_kernels(run, ServerPlan(run.scenario), "cpu", max_steps=1)
    assert k.measured_on.startswith("cpu-flash on ")
    assert (k.measured_ns > 0).all()
    assert any("1 of 2 steps was timed: a fixed sample" in note for note in k.notes)


@pytest.mark.parametrize(("name", "same"), [("Ascend910B4", True), ("Ascend910B2", False)])
def test_a_prediction_is_for_the_device_that_calls_itself_so(name: str, same: bool) -> None:
    assert is_it(device("ascend-910b4"), "npu", name) is same
    assert not is_it(device("ascend-910b4"), "cpu", name)
