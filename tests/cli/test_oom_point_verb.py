"""``hbmtwin oom-point`` as users meet it: the answer, what stands in --out, and what goes wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.sim.sweep import execute

from ..patience import PATIENCE_S, alive, until
from ..tiny_scenario import TINY

Shell = Callable[..., Any]

TWO = ("--policies", "doubling,paged", "--load", "users=5:8:1", "--seeds", "3", "--jobs", "1")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(TINY, encoding="utf-8")
    return path


def test_the_answer_is_a_sentence_for_each_policy_and_the_table_behind_it(shell: Shell, tiny: Path) -> None:
    code, out, _ = shell("oom-point", tiny, *TWO)
    assert code == 0
    text = " ".join(out.split())
    assert "llama-2-7b on ascend-910b4, 5 to 8 users: 3 seeds" in text
    assert "doubling runs out of memory first at 7 users, in all at 8; at 6 in none (0 of 3: with 95% " in text
    assert "confidence in fewer than 71%). Causes: " in text
    assert "paged never runs out of memory up to 8 users (0 of 3: " in text
    assert "Memory suffices in all 3 draws: doubling up to 6, paged up to 8, the largest asked for (without " in text
    assert "paged preempts at 8 users in every draw; at 7 in none (0 of 3: " in text
    assert " of its tokens twice, and never thrashes." in text
    (row,) = (line.split() for line in out.splitlines() if line.startswith("doubling   "))
    assert row[3:9] == ["3", "of", "3", "7", "to", "8"]


def test_what_stands_in_out_and_a_second_time_nothing_runs(
    shell: Shell, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = shell("oom-point", tiny, *TWO, "--out", "points", "--json")
    assert code == 0
    assert "report: points/report.html" in err
    answer = json.loads(out)
    assert answer["load"] == {"key": "users", "values": [5, 6, 7, 8]}
    doubling = answer["policies"]["doubling"]["fails"]
    assert (doubling["first_load"], doubling["half_load"], doubling["last_load"]) == (7, 7, 8)
    assert sum(doubling["causes"].values()) == 3
    assert answer["policies"]["paged"]["fails"]["first_load"] is None
    assert answer["policies"]["paged"]["preempts"]["first_load"] == 8
    assert sorted(path.name for path in Path("points").iterdir() if path.is_file()) == [
        *("critical_loads.csv", "critical_loads.parquet", "plotly.min.js", "report.html"),
        *("runs.csv", "runs.parquet", "summary.json"),
    ]
    stored = json.loads(Path("points/summary.json").read_text(encoding="utf-8"))
    said = stored.pop("said")
    assert {**stored, "wall_s": answer["wall_s"]} == answer  # the numbers
    printed = " ".join(shell("oom-point", tiny, *TWO, "--out", "points").out.split())
    assert [words for words in (said["en"]["headline"], *said["en"]["sentences"]) if words not in printed] == []
    assert said["zh"]["sentences"][0].startswith("全部 3 个样本显存够用")
    pages = {path.name: path.read_bytes() for path in Path("points").iterdir() if path.is_file()}

    def never(*arguments: object) -> None:
        raise AssertionError("a run that is stored ran again")

    monkeypatch.setattr(execute, "run_row", never)
    assert shell("oom-point", tiny, *TWO, "--out", "points").code == 0
    assert {path.name: path.read_bytes() for path in Path("points").iterdir() if path.is_file()} == pages


def test_a_variant_stands_beside_the_presets(shell: Shell, tiny: Path) -> None:
    variant = ("--variant", "half:kv_cache.preset=doubling,kv_cache.dtype=int8")
    code, out, _ = shell("oom-point", tiny, *TWO, *variant, "--json")
    assert code == 0
    answer = json.loads(out)
    assert list(answer["policies"]) == ["doubling", "paged", "half"]
    assert answer["variants"] == {"half": ["kv_cache.preset=doubling", "kv_cache.dtype=int8"]}
    assert answer["policies"]["doubling"]["fails"]["first_load"] == 7
    assert answer["policies"]["half"]["fails"]["first_load"] is None  # half the bytes
    alone = shell("oom-point", tiny, *TWO, *variant, "--policies", "none", "--out", "points")
    assert "doubling" not in alone.out
    assert "half never runs out of memory up to 8 users (0 of 3: " in " ".join(alone.out.split())
    assert "half" in Path("points", "report.html").read_text(encoding="utf-8")


def test_a_policy_that_dies_at_the_smallest_load_is_told_so(shell: Shell, tiny: Path) -> None:
    code, out, _ = shell(
        "oom-point", tiny, "--policies", "doubling", "--load", "users=9,10", "--seeds", "2", "--jobs", "1"
    )
    assert code == 0
    assert "runs out of memory at 9 users already, the smallest load asked for, in every draw." in " ".join(out.split())


def test_a_model_that_does_not_fit_is_an_answer(shell: Shell, tiny: Path) -> None:
    sets = ("--set", "engine.gpu_memory_utilization=0.3")
    code, out, _ = shell(
        "oom-point", tiny, *sets, "--policies", "paged", "--load", "users=1,2", "--seeds", "2", "--jobs", "1"
    )
    assert code == 0
    assert "Causes: does_not_fit 2." in " ".join(out.split())


def test_the_smallest_memory_is_told_with_its_spread(shell: Shell, tiny: Path) -> None:
    code, out, _ = shell(
        "oom-point", tiny, "--policies", "doubling", "--load", "users=2,6", "--seeds", "2", "--jobs", "1", "--memory",
        "--out", "points",
    )  # fmt: skip
    assert code == 0
    assert "Smallest device memory that survives (GiB)" in out
    summary = json.loads(Path("points/summary.json").read_text(encoding="utf-8"))
    few, more = summary["smallest_memory"]["doubling"]["fails"]["curve"]
    assert 27 << 30 < few["median_bytes"] < more["median_bytes"] < 30 << 30
    assert Path("points/smallest_memory.csv").read_text(encoding="utf-8").count("\n") == 1 + 2 * 2


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--policies", "pagd"), 2, "no preset is called 'pagd' (there are caching, pooled, doubling, paged)"),
        (("--policies", ","), 2, "--policies: no preset is named"),
        (("--policies", "none"), 2, "--policies: no preset is named"),
        (("--variant", "paged:engine.max_model_len=9"), 2, "'paged' is a preset; choose another name"),
        (("--variant", "three:engine.tensor_parallel_size=3"), 2, "error: variant 'three': engine.tensor_parallel"),
        (("--load", "usrs=1:4:1"), 2, "'usrs' is no load; did you mean 'users'?"),
        (("--load", "users=4:1:1"), 2, "it ends below where it begins"),
        (("--load", "rate_scale=1,2"), 2, "concerns a trace or a model"),
        (("--load", "users=1:1e9:1"), 2, "1,000,000,000 values; at most 1,000"),
        (("--load", "request_rate=1e-300:1e300:x2"), 2, "at least 1e-09 and at most 1e+09, not 1e-300"),
        (("--load", "request_rate=1:2:1e-300"), 2, "at least 1e-09 and at most 1e+09, not 1e-300"),
        (("--load", "users=nan"), 2, "at most 1e+09, not nan"),
        (("--load", "users=1,1.0000001"), 2, "and 1.0000001 is none"),
        (("--load", "request_rate=1,2", "--set", "workload.users=3"), 2, "here the load is users"),
        (("--load", "users=1,2", "--set", "workload.request_rate=3"), 2, "here the load is request_rate"),
        (("--seeds", "0"), 2, "--seeds"),
        (("--jobs", "0"), 2, "--jobs: 1 or more"),
        (("--set", "workload.trace=missing.csv"), 1, "missing.csv: "),
        (("--set", "engine.max_model_len=x"), 2, "engine.max_model_len"),
        (("--out", "tiny.toml"), 2, "tiny.toml: is no directory; choose another --out"),
    ],
)
def test_what_makes_no_sense_is_told_before_anything_runs(
    shell: Shell, tiny: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int, said: str
) -> None:
    def never(*arguments: object) -> None:
        raise AssertionError("a run has begun")

    monkeypatch.setattr(execute, "run_row", never)
    answer = shell("oom-point", tiny, *arguments)
    assert answer.code == code
    assert said in answer.err
    assert "Traceback" not in answer.err


def test_an_interrupt_ends_with_130_leaves_no_process_and_loses_no_run(tiny: Path, tmp_path: Path) -> None:
    """SIGINT to all of a terminal's processes, as Ctrl-C sends it, once a run has landed."""
    command = [sys.executable, "-m", "hbmtwin", "oom-point", str(tiny), *TWO[:-2], "--jobs", "2", "--seeds", "20"]
    running = subprocess.Popen(
        [*command, "--out", "points"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    rows = tmp_path / "points" / "runs"
    try:
        until(lambda: running.poll() is not None or len(list(rows.glob("*.parquet"))) > 2)
        os.killpg(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=PATIENCE_S)
    finally:
        running.kill()
    assert running.returncode == 130, err.decode()
    landed = len(list(rows.glob("*.parquet")))
    told = [  # one may have landed that the interrupt kept from being counted
        f"note: {count} runs are stored in points; the same command goes on from there"
        for count in (landed, landed - 1)
    ]
    *_, note, last = err.decode().splitlines()
    assert note in told
    assert last == "interrupted"
    assert b"Traceback" not in err
    assert not [path for path in rows.iterdir() if path.name.endswith(".partial")]
    assert not (tmp_path / "points" / "report.html").exists()
    assert until(lambda: not alive(running.pid))  # joblib's resource tracker ends a moment after us


def test_a_full_disk_is_told_and_what_ran_before_stands(
    shell: Shell, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, written = Path.write_bytes, []

    def full(path: Path, data: bytes) -> int:
        if len(written) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path.name)
        return write(path, data)

    monkeypatch.setattr(Path, "write_bytes", full)
    code, _, err = shell("oom-point", tiny, *TWO, "--out", "points")
    assert code == 1
    assert "the disk is full; what has landed stays" in err
    assert "3 runs are stored in points; the same command goes on from there" in err


def test_runs_that_end_in_an_error_are_told_and_the_others_count(
    shell: Shell, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hbmtwin.sim.sweep.run_row import failed_row, run_row
    from hbmtwin.sim.sweep.scenario_key import scenario_key

    def planted(scenario: Any) -> Any:
        return failed_row(scenario_key(scenario), 1, ValueError("planted")) if scenario.seed == 1 else run_row(scenario)

    monkeypatch.setattr(execute, "run_row", planted)
    code, out, err = shell("oom-point", tiny, *TWO)
    assert code == 1
    assert "ValueError: planted" in err
    assert "doubling runs out of memory first at 7 users, in all at 8" in " ".join(out.split())
