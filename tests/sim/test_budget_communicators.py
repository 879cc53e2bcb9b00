"""A measured communicator in the budget's terms: by hand for each engine, in ``fit`` and in a run, and who says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hbmtwin.cli.exits import subtraction
from hbmtwin.sim.budget import charges
from hbmtwin.sim.budget.memory_budget import BudgetLine, DoesNotFit
from hbmtwin.sim.fit.fit import fit
from hbmtwin.sim.fit.words import how_known
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

from .test_fit_profile import GIB, MIB, scenario_file

HUNDREDTH = GIB // 100
NPU, GPU = "ascend-910b2", "a100-80gb"


def lines_of(folder: Path, memory: dict[str, int], device: str, tp: int, pp: int = 1) -> dict[str, BudgetLine]:
    keys = {"device.name": device, "engine.tensor_parallel_size": tp, "engine.pipeline_parallel_size": pp}
    file = scenario_file(folder, memory, device, **keys)
    found, twin = fit(scenario=file), Twin(Scenario.load(file))
    assert found.budget.lines == twin.budget.lines
    assert sum(line.bytes for line in found.budget.lines) == found.budget.total_bytes
    return {line.item: line for line in found.budget.lines}


def hundredths(line: BudgetLine) -> list[int]:
    return [round(size / HUNDREDTH) for size in (line.bytes, line.low, line.high)]


def test_on_an_npu_it_takes_the_place_of_the_two_buffers(tmp_path: Path) -> None:
    """0.64 (0.50 to 1.10) has 0.39 of HCCL's: with 0.60 measured, 0.85 (0.71 to 1.31)."""
    m = {"communicator_bytes": 60 * GIB // 100}
    before, after = (lines_of(tmp_path, memory, NPU, 2)["non-torch"] for memory in ({}, m))
    assert (hundredths(before), hundredths(after)) == ([64, 50, 110], [85, 71, 131])
    assert after.source.startswith("communicator measured: profile bench-7; the rest: 0.15 GiB")
    assert (before.profile, after.profile) == ("", "bench-7")
    alone = lines_of(tmp_path, m, NPU, 1)["non-torch"]
    assert (hundredths(alone), alone.profile) == ([15, 0, 20], "")


def test_a_pipeline_s_group_comes_behind_the_plan(tmp_path: Path) -> None:
    """Late: 0.39 (0.20 to 0.39 + 0.15 of ATB); with 0.60 measured 0.60 to 0.75. Outside torch nothing changes."""
    m = {"communicator_bytes": 60 * GIB // 100}
    before, after = (lines_of(tmp_path, memory, NPU, 1, 2) for memory in ({}, m))
    assert hundredths(before["late buffers"]) == [39, 20, 54]
    assert hundredths(after["late buffers"]) == [60, 60, 75]
    assert after["late buffers"].profile == "bench-7"
    assert after["non-torch"] == before["non-torch"]
    both = lines_of(tmp_path, m, NPU, 2, 2)
    assert (hundredths(both["non-torch"])[0], hundredths(both["late buffers"])[0]) == (85, 60)


@pytest.mark.parametrize(("measured", "least"), [(60, [151, 121, 211]), (130, [181, 171, 211]), (300, [351, 341, 371])])
def test_on_cuda_it_is_a_bound_from_below(measured: int, least: list[int], tmp_path: Path) -> None:
    """0.51 and 1 GiB a group, 0.8 to 1.4 of both: 1.51 (1.21 to 2.11). At least 0.51 (0.41 to 0.71) and what was
    measured."""
    before, after = (
        lines_of(tmp_path, memory, GPU, 2)["context"] for memory in ({}, {"communicator_bytes": measured * GIB // 100})
    )
    assert hundredths(before) == [151, 121, 211]
    assert hundredths(after) == pytest.approx(least, abs=1)
    assert after.profile == ("bench-7" if measured > 80 else "")
    if measured > 80:
        assert "; at least the communicators, measured: profile bench-7" in after.source


def test_a_measured_context_is_exact_and_its_groups_are_not(tmp_path: Path) -> None:
    one, two = (lines_of(tmp_path, {"context_bytes": GIB // 2}, GPU, tp)["context"] for tp in (1, 2))
    assert one == BudgetLine("context", GIB // 2, GIB // 2, GIB // 2, "measured: profile bench-7")
    assert hundredths(two) == [150, 130, 190]
    assert two.source == "measured: profile bench-7; groups estimated"


def test_libraries_that_were_measured_as_a_whole_have_it_in_them(tmp_path: Path) -> None:
    found = lines_of(tmp_path, {"non_torch_bytes": 777 * MIB, "communicator_bytes": GIB}, NPU, 2)["non-torch"]
    assert found == BudgetLine("non-torch", *[777 * MIB] * 3, "measured: profile bench-7")


def test_counted_beside_the_buffers_it_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def beside(measured: int | None, estimate: Any, *others: Any) -> Any:
        return estimate._replace(bytes=estimate.bytes + (measured or 0))

    monkeypatch.setattr(charges, "non_torch_with", beside)
    with pytest.raises(AssertionError):
        test_on_an_npu_it_takes_the_place_of_the_two_buffers(tmp_path)


def test_a_line_says_that_it_was_measured_and_by_whom(tmp_path: Path) -> None:
    memory = {"context_bytes": GIB // 2, "graph_bytes": 3 * MIB, "communicator_bytes": 60 * GIB // 100}
    found = {item: str(how_known(line)) for item, line in lines_of(tmp_path, memory, NPU, 2).items()}
    assert found["context"] == "measured, bench-7"
    assert found["graphs"] == "measured, bench-7"
    assert found["non-torch"] == "0.71 to 1.31, partly measured, bench-7"
    assert found["weights"] == "exact"
    given = fit("qwen2.5-7b", GPU, graph_bytes=3 * MIB).budget.line("graphs")
    assert given is not None
    assert (given.source, str(how_known(given))) == ("measured", "given")


def test_a_run_notes_them_and_a_key_of_the_scenario_is_nobodys(tmp_path: Path) -> None:
    keys = {"workload.users": 1, "workload.num_prompts": 1, "memory.activation_bytes": 2 * GIB}
    memory = {"context_bytes": GIB // 2, "activation_bytes": GIB}
    twin = Twin(Scenario.load(scenario_file(tmp_path, memory, **keys)))
    activations = twin.budget.line("activations")
    assert activations is not None
    assert (activations.bytes, activations.source) == (2 * GIB, "measured")
    notes = twin.run().summary["notes"]
    assert [note for note in notes if note.startswith("memory budget")] == [
        "memory budget: context 0.50 GiB measured, in whole or in part (calibration.profile bench-7)"
    ]


def test_a_refusal_prints_them(tmp_path: Path) -> None:
    keys = {"device.memory_bytes": 8 * GIB}
    with pytest.raises(DoesNotFit) as caught:
        Twin(Scenario.load(scenario_file(tmp_path, {"context_bytes": GIB // 2}, **keys)))
    text = subtraction(caught.value)
    assert "context              0.50 GiB   measured, profile bench-7\n" in text
    assert "activations          0.63 GiB   estimated, 0.61 to 0.65\n" in text
