"""``hbmtwin sweep``: what it prints and writes, what it refuses, and how it ends."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from hbmtwin.sim.sweep import execute
from hbmtwin.sim.sweep.run_row import failed_row, run_row

GRID = ("--grid", "kv_cache.preset=paged,doubling", "workload.num_prompts=2:6:2")


@pytest.fixture(name="sweep")
def _sweep(shell: Callable[..., object], tiny: Path) -> Callable[..., object]:
    """The verb on the tiny scenario, in this process."""
    return lambda *arguments: shell("sweep", tiny, *arguments, "--jobs", "1")


def test_a_sweep_writes_tables_and_a_report(sweep, tmp_path: Path) -> None:
    answer = sweep(*GRID, "--seeds", 2, "--out", "out")
    assert answer.code == 0
    assert answer.err == "note: 6 combinations x 2 seeds: 12 runs\nreport: out/report.html\n"
    assert answer.out.startswith("12 of 12 runs held. The most with every seed: preset ")
    out = tmp_path / "out"
    assert {path.name for path in out.iterdir()} == {
        *("runs", "runs.parquet", "runs.csv", "sweep.json", "report.html", "plotly.min.js")
    }
    table = pd.read_parquet(out / "runs.parquet")
    assert list(table.columns[:5]) == ["kv_cache.preset", "workload.num_prompts", "key", "seed", "outcome"]
    assert list(table["kv_cache.preset"]) == ["paged"] * 6 + ["doubling"] * 6
    assert list(table["workload.num_prompts"]) == [2, 2, 4, 4, 6, 6] * 2
    assert list(table["seed"]) == [0, 1] * 6
    assert list(table["requests_completed"]) == list(table["workload.num_prompts"])
    pd.testing.assert_frame_equal(
        pd.read_csv(out / "runs.csv")[["key", "ttft_p99_s", "makespan_s"]],
        table[["key", "ttft_p99_s", "makespan_s"]],
        check_dtype=False,
    )
    about = json.loads((out / "sweep.json").read_text(encoding="utf-8"))
    assert about == {
        "scenario": "tiny.toml",
        "set": [],
        "grid": {"kv_cache.preset": ["paged", "doubling"], "workload.num_prompts": ["2", "4", "6"]},
        "seeds": {"first": 0, "count": 2},
        "runs": 12,
        "outcomes": {"held": 12},
        "version": about["version"],
    }
    report = (out / "report.html").read_text(encoding="utf-8")
    assert '<script src="plotly.min.js">' in report
    assert "$" not in report.split("<script", 2)[0]


def test_json_has_combinations_and_fronts(sweep) -> None:
    answer = sweep(*GRID, "--seeds", 2, "--out", "out", "--json")
    told = json.loads(answer.out)
    assert [c["settings"]["workload.num_prompts"] for c in told["combinations"]] == [2, 4, 6, 2, 4, 6]
    assert told["combinations"][0]["survival"] == pytest.approx({"share": 1.0, "low": 0.15811, "high": 1.0}, abs=1e-5)
    assert told["capacity"] == "requests served per second"
    assert set(told["pareto"]) == {"ttft_p99_s", "tpot_p99_s"}


def test_what_is_there_does_not_run_again_also_in_a_larger_grid(sweep, tmp_path: Path) -> None:
    sweep(*GRID, "--out", "out")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").glob("*.parquet")}
    answer = sweep("--grid", "kv_cache.preset=paged", "--grid", "workload.num_prompts=2:8:2", "--out", "out")
    assert answer.err.startswith("note: 4 combinations x 1 seed: 4 runs; 3 of them are in out already\n")
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "runs").glob("*.parquet")}
    assert len(after) == len(before) + 1
    assert before.items() <= after.items()
    assert len(pd.read_csv(tmp_path / "out" / "runs.csv")) == 4  # only what was asked


def test_settings_and_seeds_as_in_run(sweep, tmp_path: Path) -> None:
    answer = sweep("--grid", "workload.num_prompts=2", "--set", "slo.ttft_s=1", "--seed", 7, "--seeds", 3, "--out", "o")
    assert answer.code == 0
    table = pd.read_csv(tmp_path / "o" / "runs.csv")
    assert list(table["seed"]) == [7, 8, 9]
    assert list(table["share_met"]) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--grid: nothing is varied; write key=a,b,c or key=start:stop:step"),
        (("--grid", "kv_cache.preset=paged,dubling"), "no preset is called 'dubling' (there are"),
        (("--grid", "kv_cache.preset=paged,dubling"), "did you mean 'doubling'?"),
        (("--grid", "kv_cache.prest=paged"), "kv_cache.prest: unknown key; did you mean 'kv_cache.preset'?"),
        (("--grid", "kv_cache.policy=paged,pagd"), "did you mean 'paged'?"),
        (("--grid", "scheduler.policy=vllm,sglan"), "did you mean 'sglang'?"),
        (("--grid", "device.name=ascend-910b4,asc910"), "device.name=asc910: unknown device 'asc910': did you mean"),
        (("--grid", "workload.num_prompts=4,x"), "workload.num_prompts: input should be a valid integer, not 'x'"),
        (("--grid", "workload.num_prompts=0"), "workload.num_prompts: input should be greater than or equal to 1"),
        (("--grid", "workload.num_prompts=9:1:1"), "has no values"),
        (
            ("--variant", "big:kv_cache.initial_tokens=1024"),
            "variants of one key are its values, e.g. --grid kv_cache.",
        ),
        (("--variant=big:seed=2", "--grid", "workload.num_prompts=4"), "use hbmtwin compare or oom-point --variant"),
        (("--grid", "workload.num_prompts=4", "--set", "workload.num_prompts=3"), "--grid varies it"),
        (("--grid", "workload.num_prompts=4", "--address", "x:1"), "add --executor ray"),
        (("--grid", "workload.num_prompts=1:1000:1", "--seeds", "2000"), "take at most 1,000,000 runs"),
        (("--grid", "workload.num_prompts=1,2", "--seed", str(2**63 - 1), "--seeds", "2"), "go beyond"),
        (
            ("--grid", "workload.num_prompts=1,2", "--set", "workload.users=3", "--set", "workload.request_rate=2"),
            "all 2",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_runs(sweep, tmp_path: Path, arguments, said: str) -> None:
    answer = sweep(*arguments)
    assert answer.code == 2
    assert said in answer.err
    assert answer.out == ""
    assert not (tmp_path / "hbmtwin-sweep").exists()


def test_a_directory_of_something_else_is_left_alone(sweep, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("...", encoding="utf-8")
    answer = sweep(*GRID, "--out", "mine")
    assert answer.code == 2
    assert answer.err == "error: mine: exists and holds no runs of hbmtwin; choose another --out or empty it\n"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_an_illegal_combination_and_one_that_does_not_fit_are_rows(sweep, tmp_path: Path) -> None:
    answer = sweep(
        "--grid", "engine.tensor_parallel_size=1,3", "device.memory_bytes=100MiB,4GiB", "--seeds", 2, "--out", "out"
    )
    assert answer.code == 0
    assert "note: 2 combinations are illegal: engine.tensor_parallel_size: tiny cannot be split" in answer.err
    assert "note: 1 combination does not fit: no memory is left for KV" in answer.err
    assert list(pd.read_csv(tmp_path / "out" / "runs.csv")["outcome"]) == [
        *("does_not_fit", "does_not_fit", "held", "held"),
        *["illegal"] * 4,
    ]


def test_a_run_that_fails_stops_nobody_and_is_said(sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def row_here(key, scenario):
        planted = ZeroDivisionError("planted")
        return failed_row(key, 1, planted) if scenario.seed == 1 else {**run_row(scenario), "key": key}

    monkeypatch.setattr(execute, "row_here", row_here)
    answer = sweep(*GRID, "--seeds", 2, "--out", "out")
    assert answer.code == 1
    assert "error: 6 runs failed: ZeroDivisionError: planted\n" in answer.err
    assert answer.out.startswith("6 of 12 runs held.")
    table = pd.read_csv(tmp_path / "out" / "runs.csv")
    assert list(table["outcome"]) == ["held", "failed"] * 6
    assert set(table["error"].dropna()) == {"ZeroDivisionError: planted"}


def test_a_full_disk_is_told_and_the_same_command_goes_on(
    sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, written = Path.write_bytes, []

    def full_after_five(path: Path, data: bytes) -> int:
        written.append(path)
        if len(written) > 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return whole(path, data)

    monkeypatch.setattr(Path, "write_bytes", full_after_five)
    answer = sweep(*GRID, "--seeds", 2, "--out", "out")
    assert answer.code == 1
    assert answer.out == ""
    assert answer.err.splitlines()[1:] == [
        "note: 5 runs are stored in out; the same command goes on from there",
        "error: out/runs: cannot be written: the disk is full; what has landed stays",
    ]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    answer = sweep(*GRID, "--seeds", 2, "--out", "out")
    assert answer.code == 0
    assert "12 runs; 5 of them are in out already" in answer.err
    assert not list((tmp_path / "out").rglob("*.partial"))


def test_a_missing_ray_says_what_to_install(sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    answer = sweep(*GRID, "--executor", "ray", "--out", "out")
    assert answer.code == 1
    assert answer.err.splitlines()[-1] == "error: Ray is not installed here; run pip install ray"
    assert not (tmp_path / "out").exists()


def test_a_ray_cluster_that_is_not_there_is_told_at_once(sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    with socket.socket() as nobody:  # bound, but no one listens
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        answer = sweep(*GRID, "--executor", "ray", "--address", address, "--out", "out")
    assert answer.code == 1
    assert answer.err.splitlines()[1:] == [
        f"error: the Ray cluster at {address} cannot be had: [Errno 111] Connection refused"
    ]


def test_seeds_of_a_trace_are_one_run_and_it_is_said(sweep, tmp_path: Path) -> None:
    trace = tmp_path / "own.csv"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:15:4{i}.6805900,{20 + i},4" for i in range(3)]
    trace.write_text("\n".join(lines), encoding="utf-8")
    told = "note: a trace has happened once: the seeds of a combination are the same run again"
    sets = ("--grid", "workload.time_scale=1,2", "--set", f"workload.trace={trace}", "--jobs", 1, "--out", "out")
    assert told in sweep(*sets, "--seeds", 2).err
    assert told not in sweep(*sets, "--seeds", 1).err
    assert told not in sweep(*GRID, "--seeds", 2, "--out", "other").err


def test_users_for_whom_there_is_no_request_are_told(sweep) -> None:
    told = "note: of 30 users only 4 ever ask: raise workload.num_prompts"
    assert told in sweep("--grid", "workload.users=2,30", "--jobs", 1, "--out", "out").err
    more = ("--set", "workload.num_prompts=30")
    assert "ever ask" not in sweep("--grid", "workload.users=2,30", *more, "--jobs", 1, "--out", "out").err


def test_help_says_how_ranges_count(shell) -> None:
    text = " ".join(shell("sweep", "--help").out.split())
    assert "key=start:stop:step" in text
    assert "hits it" in text
    assert "Variants of one key are its values" in text
