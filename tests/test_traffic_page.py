"""docs/workloads.md: its example is a scenario, its trace is a trace, its figures are the built-in workload's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hbmtwin.api import Scenario, workload_preset, workload_presets
from hbmtwin.cli import bench_words
from hbmtwin.sim.traffic import source_of
from hbmtwin.workloads.builtin import (
    BURSTS,
    NUM_PROMPTS,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    REQUEST_RATE,
    SYSTEM_PROMPT_TOKENS,
    THINK_TIME,
    TURNS,
)

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "workloads.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of that language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_examples_are_scenarios(tmp_path: Path) -> None:
    assert len(blocks("toml")) == 2
    for example in blocks("toml"):
        (tmp_path / "mine.toml").write_text(example, encoding="utf-8")
        assert source_of(Scenario.load(tmp_path / "mine.toml")).total_requests == NUM_PROMPTS


def test_the_example_of_a_trace_is_read(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    (text,) = blocks("text")
    trace.write_text(text, encoding="utf-8")
    assert source_of(Scenario.load(overrides=[f"workload.trace={trace}"])).total_requests == 3


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("workload.num_prompts", f"{NUM_PROMPTS}"),
        (
            "workload.request_rate",
            f"{REQUEST_RATE} sessions a second; of each {BURSTS.every_s} s {BURSTS.length_s} s at {BURSTS.factor} "
            f"times that, the others at {BURSTS.calm_factor:.2g} times",
        ),
        ("workload.system_prompt_tokens", f"{SYSTEM_PROMPT_TOKENS}"),
        (
            "workload.prompt_tokens",
            f"new tokens of a turn: median {PROMPT_TOKENS.at(0.5)}, at most {PROMPT_TOKENS.values[-1]}",
        ),
        (
            "workload.output_tokens",
            f"median {OUTPUT_TOKENS.at(0.5)}, at most {OUTPUT_TOKENS.values[-1]}: the quantiles of the Azure 2023 "
            "conversation trace",
        ),
        ("session.turns", f"1 for more than half of the sessions, at most {TURNS.values[-1]}"),
        ("session.think_time_s", f"log-normal with mean {THINK_TIME.mean_s} and sigma {THINK_TIME.sigma}"),
    ],
)
def test_the_figures_are_the_built_in_workloads(key: str, said: str) -> None:
    assert f"| `{key}` | {said} |" in PAGE
    assert TURNS.at(0.5) == 1


@pytest.mark.parametrize(
    "table",
    [
        'workload.prompt_tokens={distribution="fixed", value=512}',
        'workload.prompt_tokens={distribution="lognormal", mean=300, median=200, min=10, max=900}',
        'workload.prompt_tokens={distribution="lognormal", mean=300, stddev=200}',
        'session.think_time_s={distribution="constant", seconds=3}',
        'session.think_time_s={distribution="lognormal", mean=30, median=20}',
    ],
)
def test_every_named_form_is_one(table: str) -> None:
    assert source_of(Scenario.load(overrides=[table])).total_requests == NUM_PROMPTS
    for word in re.findall(r'(\w+)=(?!\{)|="(\w+)"', table):
        assert re.search(rf"`{word[0] or word[1]}`", PAGE), word


def test_every_workload_with_a_name_is_in_the_table_with_its_rate_and_whose_it_is() -> None:
    rows = {cells[0].strip(" `"): cells for cells in (line.split("|")[1:-1] for line in PAGE.splitlines()) if cells}
    for name in workload_presets():
        preset = workload_preset(name)
        rate = preset.keys["workload.request_rate"]
        said = rows[name][1].strip()
        assert said.startswith("all at once" if rate == float("inf") else f"{rate:g}"), name
        assert ("(assumed)" in said) == preset.sources["workload.request_rate"].endswith("(confidence L)"), name
        assert re.split(r" \(|, ", preset.credit)[0] in " ".join(PAGE.split()), name


def test_every_benchmark_word_is_on_the_page() -> None:
    words = {*bench_words.KEYS, *bench_words.RANDOM, "--dataset-name", "--dataset-path", "--goodput"}
    assert {word for word in words if f"`{word}" not in PAGE} == set()
