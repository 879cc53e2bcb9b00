"""The report: one page that needs no network and says what the command line says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hbmtwin.api import Result, Scenario, run
from hbmtwin.dashboard.report import MAX_MOMENTS, write_report
from hbmtwin.dashboard.verdict import headline, oom_in_words, rows
from hbmtwin.kernels.profile import Coefficient, Profile

HEAVY = ("workload.num_prompts=40", "workload.request_rate=inf", "workload.prompt_tokens=1500", "session.turns=1")


@pytest.fixture(scope="module")
def results() -> dict[str, Result]:
    return {name: run(Scenario.load(preset=name, overrides=HEAVY)) for name in ("doubling", "paged")}


@pytest.fixture(scope="module")
def page(results: dict[str, Result], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(results, path)
    assert path.with_name("plotly.min.js").is_file()
    return path.read_text(encoding="utf-8")


def test_the_same_results_make_the_same_bytes(results: dict[str, Result], tmp_path: Path) -> None:
    """In processes of their own: an id drawn at random would differ, and so would the order of a set."""
    for name, result in results.items():
        result.save(tmp_path / name)
    write = (
        "import sys; from pathlib import Path; from hbmtwin.api import Result; "
        "from hbmtwin.dashboard.report import write_report; "
        "write_report({n: Result.load(Path(n)) for n in ('doubling', 'paged')}, Path(sys.argv[1]))"
    )
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, "-c", write, f"{hash_seed}.html"], cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()


def test_traffic_without_a_rate_comes_at_once_and_the_policies_share_it(page: str) -> None:
    assert "; traffic: all at once. Every policy gets the same requests at the same times.</p>" in page


def test_nothing_is_fetched_from_anywhere(page: str) -> None:
    assert re.findall(r'(?:src|href)="([^"]*)"', page) == ["plotly.min.js"]
    assert "https://cdn" not in page


def test_the_verdict_the_table_and_the_death_stand_in_it(page: str, results: dict[str, Result]) -> None:
    summaries = {name: result.summary for name, result in results.items()}
    assert results["doubling"].oom is not None
    assert headline(summaries) in page
    assert oom_in_words(results["doubling"].oom) in page
    for cells in rows(summaries):
        assert f"<td>{'</td><td>'.join(cells)}</td>" in page


def test_every_policy_has_maps_and_the_dead_one_shows_its_last_moment(page: str) -> None:
    found = re.search(r"^const maps = (.*);$", page, re.MULTILINE)
    assert found is not None
    maps = json.loads(found[1])
    assert list(maps) == ["doubling", "paged"]
    assert all(1 < len(shown) <= MAX_MOMENTS for shown in maps.values())
    assert maps["doubling"][-1]["label"].endswith("s, out of memory")


def test_settings_that_differ_are_a_table(page: str) -> None:
    assert "<tr><td>doubling</td><td>stop</td><td>contiguous</td><td>doubling</td>" in page
    assert "<tr><td>paged</td><td>preempt</td><td>paged</td><td>–</td>" in page


def test_alerts_are_counted_and_listed(results: dict[str, Result], tmp_path: Path) -> None:
    alert = {"metric": "usage", "kind": "above", "threshold": 0.5, "value": 0.6, "worst": 0.75, "cleared_s": 9.0}
    for count, told in ((0, ""), (1, "1 alert, the first"), (60, "60 alerts, the first")):
        summary = {**results["paged"].summary, "alerts": [{**alert, "time_s": float(i)} for i in range(count)]}
        write_report({"paged": replace(results["paged"], summary=summary)}, tmp_path / "report.html")
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert told in page
        assert page.count("<li>KV usage above 50.0 % from") == min(count, 50)
        assert ("and 10 more in summary.json" in page) is (count == 60)


def test_goodput_is_told_where_something_was_promised(results: dict[str, Result], tmp_path: Path) -> None:
    promised = run(Scenario.load(overrides=["workload.num_prompts=4", "session.turns=1", "slo.ttft_s=1000"]))
    write_report({"paged": results["paged"], "few": promised}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert page.count("</strong>: goodput ") == 1
    assert "requests/s, 4 met the SLO (100.0 %).</p>" in page


def test_a_comparison_of_different_traffic_does_not_say_the_same(results: dict[str, Result], tmp_path: Path) -> None:
    other = run(Scenario.load(overrides=["workload.num_prompts=4", "session.turns=1"]))
    write_report({"paged": results["paged"], "few": other}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<h1>KV-memory policies compared</h1>" in page
    assert "on the same traffic" not in page


def test_no_placeholder_is_left(page: str) -> None:
    shell = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "$" not in shell


def test_a_report_needs_a_result(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least one result"):
        write_report({}, tmp_path / "report.html")


def test_steps_outside_of_a_profile_are_told_on_the_page(tmp_path: Path) -> None:

    profile = Profile(
        name="lab",
        device="a100-80gb",
        made="on a Monday",
        source="by hand",
        coefficients={"step_overhead_ns": Coefficient(1e6, 1e6, 1e6, 3.0, 12, "M")},
        validity={"decode_count": (1, 1)},
    )
    (tmp_path / "p.json").write_text(profile.to_json(), encoding="utf-8")
    sets = (f"calibration.profile={tmp_path / 'p.json'}", "device.name=a100-80gb", "workload.num_prompts=12")
    result = run(Scenario.load(overrides=[*sets, "workload.users=4", "model.name=qwen2.5-7b"]))
    assert result.summary["calibration"]["steps_outside"] > 0
    write_report({"paged": result}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "steps lie outside of what was measured on a100-80gb" in page
    assert "calibrated on a100-80gb, profile lab" in page
