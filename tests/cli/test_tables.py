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
