"""Tables for people: nothing is cut off, however narrow the terminal."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from hbmtwin.api import PRESETS, Scenario, devices, models, run
from hbmtwin.cli.tables import print_comparison
from hbmtwin.dashboard.verdict import HEADER, rows

Shell = Callable[..., Any]

FEW = ("workload.num_prompts=12",)
DYING = ("workload.num_prompts=40", "workload.request_rate=inf", "workload.prompt_tokens=1500", "session.turns=1")


@pytest.fixture(scope="module")
def summaries() -> dict[str, dict[str, Any]]:
    served = {name: run(Scenario.load(preset=name, overrides=FEW)).summary for name in ("caching", "paged")}
    return {**served, "doubling": run(Scenario.load(preset="doubling", overrides=DYING)).summary}


def drawn(summaries: dict[str, dict[str, Any]], width: int, **console: Any) -> str:
    out = io.StringIO()
    print_comparison(Console(file=out, width=width, highlight=False, **console), summaries, wall_s=1.0)
    return out.getvalue()


@pytest.mark.parametrize("width", [30, 40, 72, 80, 100, 130, 200])
def test_every_number_and_every_word_is_whole_at_every_width(summaries: dict[str, dict[str, Any]], width: int) -> None:
    text = drawn(summaries, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for row in rows(summaries):
        for title, cell in list(zip(HEADER, row, strict=True))[2:]:
            assert cell in text, title
        assert all(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text) for word in row[1].replace(",", "").split())


def test_what_is_too_wide_becomes_tables_that_each_name_the_policies(summaries: dict[str, dict[str, Any]]) -> None:
    def lines_of(width: int) -> int:
        return sum(line.startswith("doubling ") for line in drawn(summaries, width).splitlines())

    assert [lines_of(width) for width in (200, 80, 40)] == [1, 2, 5]


@pytest.mark.parametrize("width", [30, 40, 80, 140])
def test_the_catalog_cuts_no_id_and_no_name(shell: Shell, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))  # which counts in a pipe as well
    text = shell("catalog").out
    assert width - 20 <= max(map(len, text.splitlines())) <= width
    assert "…" not in text
    firsts = {line.split()[0] for line in text.splitlines() if line.strip()}
    assert {*devices(), *models(), *PRESETS, "contiguous", "vllm"} <= firsts
    assert "device allocator" in text


@pytest.mark.parametrize("width", [30, 40, 80, 140])
def test_a_table_of_words_breaks_them_where_it_must_and_loses_none(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    listed = json.loads(shell("catalog", "policies", "--json").out)
    text = shell("catalog", "policies").out
    for family in ("preset", "growth rule", "KV dtype"):  # two columns each
        entries = [entry for entry in listed if entry["family"] == family]
        lines = text.partition(f"{family}  ")[2].partition("─\n")[2].splitlines()
        at = max(len(entry["name"]) for entry in entries) + 3
        words = "".join(line[at:] for line in lines[: lines.index("")])
        assert words.replace(" ", "") == "".join(entry["summary"] for entry in entries).replace(" ", "")


def test_a_pipe_without_columns_gets_140(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("sys.__stdout__", None)  # whoever runs the tests may do so in a terminal
    assert max(map(len, shell("catalog").out.splitlines())) == 140


def test_no_color_takes_the_colours_and_leaves_bold(
    summaries: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """no-color.org asks for output without colours; bold and dim are none."""

    def styles() -> set[str]:
        text = drawn(summaries, 140, force_terminal=True, color_system="standard")
        return {code for codes in re.findall(r"\x1b\[([\d;]*)m", text) for code in codes.split(";")}

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert styles() == {"0", "1", "2", "31"}
    monkeypatch.setenv("NO_COLOR", "1")
    assert styles() == {"0", "1", "2"}


def test_a_run_of_a_pipeline_shows_its_stages(shell: Shell) -> None:
    pipeline = ["--set", "engine.pipeline_parallel_size=2", "--set", "workload.num_prompts=4"]
    answer = shell("run", *pipeline, "--set", "engine.layer_partition=[20,12]")
    assert answer.code == 0
    header, _, first, second = (line.split() for line in answer.out.splitlines()[-7:-3])
    assert header[:2] == ["stage", "layers"]
    assert first[:5] == ["0,", "decides", "0", "to", "19"]
    assert second[:4] == ["1", "20", "to", "31"]
    assert float(first[-1]) == 0
    assert float(second[-1]) > 1
    assert int(first[-2].replace(",", "")) < int(second[-2].replace(",", ""))
    stages = json.loads(shell("run", *pipeline, "--json").out)["stages"]
    assert [stage["num_layers"] for stage in stages] == [16, 16]
    assert "\nstage" not in shell("run", *pipeline[2:]).out


def test_a_pipeline_that_does_not_fit_has_a_column_for_each_stage(shell: Shell) -> None:
    answer = shell("run", "--set", "model.name=llama-2-70b", "--set", "engine.pipeline_parallel_size=3")
    assert answer.code == 3
    lines = answer.err.splitlines()
    assert "stage 0 of 3: no memory is left for KV" in lines[0]
    table = {line[:18].strip(): line[18:].split() for line in lines[2:]}
    assert lines[1].split() == ["stage", "0", "stage", "1", "stage", "2", "(GiB)"]
    assert table["weights"] == ["43.52", "43.03", "41.93"]
    assert table["sum: the device"] == ["29.50"] * 3
    for place in range(3):
        parts = [float(row[place]) for item, row in table.items() if not item.startswith("sum")]
        assert sum(parts) == pytest.approx(29.50, abs=0.05)
