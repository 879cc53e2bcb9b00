"""``hbmtwin plan``: an answer on the screen and as JSON, what makes no sense, what does not fit, and a killed plan."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.sim.capacity.promise import METRICS

from ..patience import PATIENCE_S, until

Shell = Callable[..., Any]

SMALL = """
seed = 1
[model]
name = "llama-2-7b"
[device]
name = "ascend-910b4"
[engine]
max_model_len = 4096
[kv_cache]
preset = "doubling"
[workload]
users = 8
num_prompts = 8
prompt_tokens = 1200
output_tokens = { distribution = "uniform", low = 20, high = 400 }
system_prompt_tokens = 0
[session]
turns = 1
think_time_s = 0
"""
QUICK = ("--survive", "0.5", "--quick", "--jobs", "1")


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL, encoding="utf-8")
    return path


def test_an_answer_its_margin_and_what_was_promised(shell: Shell, scenario: Path) -> None:
    code, out, err = shell("plan", scenario, *QUICK)
    assert code == 0
    assert "users, the most at which at least 50 % of runs hold" in out
    assert "confidence of 95 %" in " ".join(out.split())
    assert "margin 1 %" in out
    assert "order" in out
    assert "Traceback" not in err
    first = shell("plan", scenario, *QUICK, "--json")
    again = shell("plan", scenario, *QUICK[:-1], "2", "--json", "--out", "kept")
    assert first.out == again.out  # whatever the number of processes
    (plan,) = json.loads(first.out)["plans"].values()
    assert plan["kind"] == "found"
    assert plan["answer"] < plan["first_failing"]
    seen = {tried["value"]: tried for tried in plan["tried"]}
    assert seen[plan["answer"]]["decided"] is True
    assert seen[plan["first_failing"]]["decided"] is False
    resumed = shell("plan", scenario, *QUICK, "--json", "--out", "kept")
    assert resumed.out == first.out
    told = json.loads(Path("kept", "plan.json").read_text(encoding="utf-8"))
    assert told["left_out"] == {}
    (kept,) = told["plans"].values()
    assert {name: value for name, value in kept.items() if name in plan} == plan
    assert kept["verdict"]["en"].startswith(f"{plan['answer']} users")
    assert "用户" in kept["verdict"]["zh"]


def test_the_same_in_chinese(shell: Shell, scenario: Path) -> None:
    """Numbers are the same, and no English word is left but names."""
    explained = ("--survive", "0.5", "--jobs", "1", "--quick", "--target", "max_model_len")
    english, chinese = (shell("plan", scenario, *explained, "--lang", lang).out for lang in ("en", "zh"))
    assert "promise" in english
    assert "目标" in chinese
    assert "注：更长的请求在任何负载下都被拒绝" in chinese
    words = set(re.findall(r"[A-Za-z][\w-]+", chinese, re.ASCII))
    assert words <= {"token", "KV", "GiB", "ms", *METRICS}
    counts = [sorted(re.findall(r"\d+", re.sub(r"_p\d+", "", said))) for said in (english, chinese)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--slo", "tfft_p99=2s"), "did you mean 'ttft_p99'"),
        (("--slo", "ttft_p99=2"), "a number and its unit"),
        (("--target", "user"), "did you mean 'users'"),
        (("--target", "request_rate"), "a closed loop"),
        (("--survive", "1.0"), "no number of runs shows that all would hold"),
        (("--survive", "0.95", "--seeds", "20"), "at least 107"),
        (("--margin", "3x"), "--margin 3x"),
        (("--policies", "pagde"), "did you mean 'paged'"),
        (("--policies", ""), "--policies: no preset is named"),
        (("--margin", "64GiB"), "--margin 64 GiB: the device has 29.50 GiB; take less"),
        (("--survive", "0.5", "--seeds", "9" * 20), "at most 20,000"),
        (("--jobs", "0"), "--jobs"),
        (("--set", "workload.user=3"), "did you mean 'workload.users'"),
    ],
)
def test_what_makes_no_sense(
    shell: Shell, scenario: Path, tmp_path: Path, arguments: tuple[str, ...], told: str
) -> None:
    code, out, err = shell("plan", scenario, *arguments, "--out", "out")
    assert (code, out) == (2, "")
    assert told in err
    assert not (tmp_path / "out").exists()
    assert "Traceback" not in err


def test_a_trace_that_is_missing_is_told_before_the_first_run(shell: Shell) -> None:
    code, out, err = shell("plan", *QUICK, "--set", "workload.trace=missing.csv")
    assert (code, out) == (1, "")
    assert err.startswith("error: workload.trace: missing.csv: no such file")


def test_a_variant_that_is_left_out_stands_in_the_json(shell: Shell, scenario: Path) -> None:
    code, out, err = shell(
        "plan", scenario, *QUICK, "--policies", "doubling", "--variant", "bad:engine.tensor_parallel_size=3", "--json"
    )
    assert code == 0
    told = json.loads(out)
    assert list(told["plans"]) == ["doubling"]
    assert "cannot be split over tensor_parallel_size 3" in told["left_out"]["bad"]
    assert "note: 'bad' is left out: " in err


def test_a_directory_of_something_else_is_left_alone(shell: Shell, scenario: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear", encoding="utf-8")
    code, _, err = shell("plan", scenario, *QUICK, "--out", "mine")
    assert code == 2
    assert "holds no runs of hbmtwin" in err


def test_an_slo_that_no_load_meets(shell: Shell, scenario: Path) -> None:
    code, out, _ = shell("plan", scenario, *QUICK, "--slo", "tpot_p99=1us")
    assert code == 3
    text = " ".join(out.split())
    assert "nothing holds: even at 1 user 0 of" in text
    assert "The best that was reached there: tpot_p99" in text


def test_a_server_that_does_not_start_at_one_user(shell: Shell, scenario: Path) -> None:
    code, out, err = shell("plan", scenario, *QUICK, "--set", "device.memory_bytes=8GiB")
    assert (code, out) == (3, "")
    assert "at the easiest value, 1 user: no memory is left for KV" in err
    assert "sum: the device" in err


def test_a_plan_that_is_interrupted_says_what_stands(scenario: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "import sys; from hbmtwin.cli import main; sys.exit(main())",
        "plan",
        str(scenario),
    ]
    environment = {**os.environ, "COLUMNS": "140"}
    with subprocess.Popen(
        [*command, "--survive", "0.99", "--quick", "--jobs", "2", "--out", "kept"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as process:
        folder = tmp_path / "kept" / "runs"
        until(lambda: process.poll() is not None or len(list(folder.glob("*.parquet"))) >= 3)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert out == ""
    assert "runs stand in kept; the same command goes on from there" in err
    assert "Traceback" not in err
    assert len(list(folder.glob("*.parquet"))) >= 3
