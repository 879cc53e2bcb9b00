"""The examples do what their first lines promise."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from hbmtwin.sim.books import Row
from hbmtwin.sim.experiment import compare
from hbmtwin.sim.run import Twin
from hbmtwin.sim.scenario import Scenario

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
AZURE = EXAMPLES / "../../shared/traces/azure2023_conv.csv.gz"
MIB = 2**20
needs_azure = pytest.mark.skipif(not AZURE.exists(), reason="the Azure 2023 trace is not beside the repository")


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_scenario_can_be_read(path: Path) -> None:
    assert Scenario.load(path).schema_version == 1


def test_doubling_dies_of_its_copy_on_a_power_of_two_where_paged_survives() -> None:
    """C1: buffers of 512 tokens are full with the 128th generated token; the next one asks for twice the memory."""
    results = compare(EXAMPLES / "growth_copy.toml", ["doubling", "paged"], jobs=1)
    oom = results["doubling"].oom
    assert oom is not None
    assert oom["cause"] == "growth_copy"
    assert oom["asked_bytes"] == 1024 * MIB // 2
    assert oom["growth_copy_bytes"] == 5 * 256 * MIB  # four old buffers, and the one that was to be replaced
    assert oom["free_bytes"] < oom["need_bytes"] <= oom["free_bytes"] + oom["growth_copy_bytes"]
    died = results["doubling"].requests
    assert set(died["status"]) == {"failed"}
    assert int(died["output_tokens"].max()) == 129
    rows = results["doubling"].timeline
    assert int(rows["kv_tokens"].add(rows["kv_unfilled"]).iloc[-2]) == 48 * 256 * MIB  # 12 GiB before the jump
    assert results["paged"].oom is None
    assert results["paged"].summary["requests_completed"] == 48


def test_the_jump_moves_with_the_power_of_two() -> None:
    """One prompt token less, and one more generated token fits into the buffers."""
    scenario = Scenario.load(EXAMPLES / "growth_copy.toml", preset="doubling", overrides=["workload.prompt_tokens=383"])
    died = Twin(scenario).run()
    assert died.oom is not None
    assert died.oom["cause"] == "growth_copy"
    assert int(died.requests["output_tokens"].max()) == 130


def test_live_blocks_placed_afresh_leave_room_for_the_request_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A6, with the map."""
    script = load_script("external_fragmentation")
    assert script.main([str(tmp_path / "map.html")]) == 0
    said = capsys.readouterr().out
    numbers = re.search(r"largest free ([\d.]+) MiB < need ([\d.]+) MiB <= free in all ([\d.]+) MiB", said)
    assert numbers is not None
    largest, need, free = map(float, numbers.groups())
    assert largest < need <= free
    assert free > 4 * need  # four times over, in pieces
    assert "the request fits" in said
    assert (tmp_path / "map.html").stat().st_size > 10_000


@needs_azure
def test_two_thousand_azure_requests_end_with_a_result_for_all_four() -> None:
    results = compare(
        EXAMPLES / "azure_2000.toml",
        ["caching", "pooled", "doubling", "paged"],
        overrides=["kv_cache.tensors=merged"],
    )
    for name, result in results.items():
        summary = result.summary
        rejected = sum(summary["requests_rejected"].values())
        ended = summary["requests_completed"] + summary["requests_failed"] + summary["requests_unfinished"] + rejected
        assert ended == summary["requests_total"] == 2000, name
        byte_columns = list(Row._fields)
        assert set(result.timeline[byte_columns].sum(axis=1)) == {summary["capacity_bytes"]}, name
    paged = results["paged"].summary
    assert paged["kv_usage_mean"] == pytest.approx(0.7, abs=0.02)
    assert paged["requests_rejected"] == {"max_model_len": 143}
    assert paged["requests_completed"] == 1857
    causes = {name: result.oom and result.oom["cause"] for name, result in results.items()}
    assert causes["paged"] is None
    assert None not in [causes[name] for name in ("caching", "pooled", "doubling")]


@needs_azure
def test_per_layer_buffers_serve_the_first_fifty() -> None:
    overrides = ["workload.num_prompts=50", "kv_cache.tensors=per_layer"]
    results = compare(EXAMPLES / "azure_2000.toml", ["caching", "pooled", "doubling"], overrides=overrides)
    for result in results.values():
        assert result.summary["requests_completed"] == 47
        assert result.summary["requests_rejected"] == {"max_model_len": 3}
