"""``--error-bars`` of ``run`` and ``compare``: the figures of the function, in text, in JSON and in the result."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.api import Result, Scenario, error_bars, error_bars_to_dicts
from hbmtwin.api import run as simulate

from ..known_figures import known_figures
from ..tiny_scenario import TINY

Shell = Callable[..., Any]
SHORT = ("--set", "workload.num_prompts=3", "--set", "workload.output_tokens=20")


def tiny(folder: Path) -> str:
    (folder / "tiny.toml").write_text(TINY, encoding="utf-8")
    return "tiny.toml"


def test_a_run_has_its_bars_in_text_in_json_and_in_its_result(shell: Shell, tmp_path: Path) -> None:
    known = known_figures(tmp_path / "known.json", host_layer_ns=(450_000, 1_000_000))
    asked = ("run", tiny(tmp_path), *SHORT, *(word for one in known for word in ("--set", one)), "--error-bars")
    code, out, err = shell(*asked, "--out", "mine")
    assert code == 0
    assert err.endswith("note: error bars take 2 further runs\n")
    bars = out.partition("Error bars\n")[2]
    assert "host_layer_ns 1,000 µs" in bars
    assert "One uncertain figure at a time at its low or its high end, 2 ends in all" in bars
    assert "the run: held, and so at all 2 ends." in bars
    assert "host_layer_ns: calibrated: profile known, 1 points, confidence L" in bars
    kept = Result.load(tmp_path / "mine")
    told = json.loads(shell(*asked, "--json").out)["error_bars"]
    assert told == kept.summary["error_bars"]
    result = {"x": simulate(Scenario.load(tmp_path / "tiny.toml", overrides=(*SHORT[1::2], *known)))}
    assert told == error_bars_to_dicts(error_bars(result, jobs=1))["x"]


def test_numbers_stand_in_the_table_as_in_json(shell: Shell, tmp_path: Path) -> None:
    asked = ("run", tiny(tmp_path), "--error-bars")
    rows = {line[:18].strip(): " ".join(line[18:].split()) for line in shell(*asked).out.splitlines()}
    assert rows["TTFT p99"] == "42.1 ms 44.5 ms 54.3 ms weight_bandwidth_efficiency 94.0 % host_layer_ns 1,000 µs"
    assert rows["completed requests"] == "10 10 10 does not move"
    assert rows["peak reserved"] == "14.76 GiB 14.76 GiB 14.88 GiB the run non_torch_bytes 0 B"


def test_a_comparison_has_the_order_of_its_runs(shell: Shell, tmp_path: Path) -> None:
    asked = ("compare", tiny(tmp_path), "--policies", "doubling,paged", "--error-bars")
    code, out, err = shell(*asked, "--out", "mine")
    assert code == 0
    assert "note: error bars take 66 further runs\n" in err
    said = " ".join(out.partition("Error bars\n")[2].split())
    assert "TTFT p99 45.3 ms (42.3 ms to 55.3 ms) 44.5 ms (42.1 ms to 54.3 ms)" in said
    assert "TPOT p99: paged < doubling at all 33 ends." in said
    assert (
        "TTFT p99: paged < doubling as they are; paged and doubling change places at 2 of 33 ends (the fixed time of "
        "an attention call 50 µs; the time of a layer's small operators 80 µs)."
    ) in said
    kept = Result.load(tmp_path / "mine" / "paged").summary["error_bars"]
    assert kept["order"]["ttft_p99_s"]["doubling"]["below"] == 31


def test_where_all_figures_are_known_nothing_is_run_again(shell: Shell, tmp_path: Path) -> None:
    known = [word for setting in known_figures(tmp_path / "known.json") for word in ("--set", setting)]
    code, out, err = shell("run", tiny(tmp_path), *SHORT, *known, "--error-bars")
    assert (code, "further runs" in err) == (0, False)
    assert out.endswith("Error bars\nNo figure behind this run has a range.\n")
    told = json.loads(shell("run", "tiny.toml", *SHORT, *known, "--error-bars", "--json").out)["error_bars"]
    assert told["ends"] == []
    assert told["bars"]["ttft_p99_s"]["least"] == told["bars"]["ttft_p99_s"]["value"]


def test_nothing_is_run_again_unless_asked(shell: Shell, tmp_path: Path) -> None:
    code, out, err = shell("run", tiny(tmp_path), *SHORT, "--json")
    assert (code, "error bars" in err) == (0, False)
    assert "error_bars" not in json.loads(out)


def test_the_help_says_what_it_costs(shell: Shell) -> None:
    for verb in ("run", "compare"):
        assert "Two further runs a figure" in " ".join(shell(verb, "--help").out.replace("│", " ").split())


@pytest.mark.parametrize("verb", ["run", "compare"])
@pytest.mark.parametrize(("out", "why"), [("page/below", "Not a directory"), ("x" * 300, "File name too long")])
def test_an_out_that_cannot_be_is_told_before_anything_is_run(
    shell: Shell, tmp_path: Path, verb: str, out: str, why: str
) -> None:
    (tmp_path / "page").write_text("", encoding="utf-8")
    answer = shell(verb, "--error-bars", "--out", out)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(f"error: --out: {out} cannot be written: {why}; name ")  # no note of further runs
    assert [path.name for path in tmp_path.iterdir()] == ["page"]


def test_a_trial_of_out_leaves_nothing_behind(shell: Shell, tmp_path: Path) -> None:
    assert shell("run", "--set", "seed=x", "--out", "new/deep").code == 2
    assert shell("run", "--set", "model.name=qwen3-32b", "--out", "new/deep").code == 3  # tried, and does not fit
    assert list(tmp_path.iterdir()) == []
