"""``hbmtwin workload describe``: the tables, the JSON, the page, and complaints."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Shell = Callable[..., Any]

SESSIONS = """arrival_s,prompt_tokens,output_tokens,session,turn
0,520,80,0,0
1.5,900,210,1,0
42,760,95,0,1
43,1300,95,1,1
50,2000,10,1,2
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    (tmp_path / "mine.csv").write_text(SESSIONS, encoding="utf-8")
    return tmp_path / "mine.csv"


def lines(out: str) -> list[str]:
    return [line.rstrip() for line in out.splitlines()]


def test_for_people(shell: Shell, trace: Path) -> None:
    answer = shell("workload", "describe", trace)
    assert (answer.code, answer.err) == (0, "")
    out = lines(answer.out)
    assert out[0] == "mine.csv: 5 requests in 50.00 s, 0.10 a second"
    assert "sessions               2" in out
    assert "turns of a session     mean 2.50, p50 2.5, p95 2.95, most 3" in out
    assert "turn of a request      mean 1.80, p95 2.8; 60.0 % are no first turn" in out
    assert "between two turns      mean 30.17 s, p50 41.50 s, p95 41.95 s" in out
    assert "Blocks of 16 tokens that a prefix cache hits, of 345" in out
    assert out[-2].split() == ["endless", "–", "169", "49.0", "%", "169", "49.0", "%"]


def test_json_is_the_description_and_nothing_else(shell: Shell, trace: Path) -> None:
    answer = shell("workload", "describe", trace, "--json")
    found = json.loads(answer.out)
    assert (answer.code, answer.err) == (0, "")
    assert list(found) == [
        *("trace", "notes", "requests", "arrivals", "prompt_tokens", "output_tokens", "pearson", "spearman"),
        *("spearman_exact", "tenants", "sessions", "reuse"),
    ]
    assert (found["requests"], found["notes"], found["tenants"]) == (5, [], None)
    assert list(found["arrivals"]) == [
        *("span_s", "request_rate", "tick_s", "iat_mean_s", "iat_cv", "iat_cv_windows", "windows", "peak_second"),
    ]
    assert found["prompt_tokens"]["quantiles"]["p50"] == 900
    assert list(found["prompt_tokens"]) == ["mean", "cv", "least", "most", "quantiles", "mass_points"]
    assert found["reuse"]["curve"] == {
        "capacities": [1000, 2000, 5000, 10000, 20000, 50000, 100000, None],
        "hits": [169] * 8,
        "references": 345,
        "distinct": 176,
    }


def test_a_page_and_the_json_are_written_where_told(shell: Shell, trace: Path, tmp_path: Path) -> None:
    answer = shell("workload", "describe", trace, "--out", "there", "--json")
    assert answer.code == 0
    there = tmp_path / "there"
    assert sorted(p.name for p in there.iterdir()) == ["plotly.min.js", "workload.html", "workload.json"]
    assert (there / "workload.json").read_text(encoding="utf-8") == answer.out
    assert "5 requests in 50.00 s" in (there / "workload.html").read_text(encoding="utf-8")
    assert lines(shell("workload", "describe", trace, "--out", "there").out)[-1] == "pictures: there/workload.html"


def test_a_file_in_the_way_of_the_page_is_not_touched(shell: Shell, trace: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine", encoding="utf-8")
    answer = shell("workload", "describe", trace, "--out", "there")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "error: there is no directory; name another one for --out\n"
    assert (tmp_path / "there").read_text(encoding="utf-8") == "mine"


def test_block_size_and_the_first_requests(shell: Shell, trace: Path) -> None:
    answer = shell("workload", "describe", trace, "--block-size", "100", "--num-prompts", "3", "--json")
    found = json.loads(answer.out)
    assert (found["requests"], found["reuse"]["block_size"]) == (3, 100)
    assert found["reuse"]["curve"]["hits"][-1] == 5  # of the 600 tokens that the second turn repeats, 520 were seen


def test_ticks_are_told_and_spread(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "ticks.jsonl"
    path.write_text(
        "".join(
            f'{{"timestamp": {3000 * (i // 4)}, "input_length": 600, "output_length": 5, "hash_ids": [0, {i + 1}]}}\n'
            for i in range(80)
        ),
        encoding="utf-8",
    )
    told = shell("workload", "describe", path)
    assert (
        "times are ticks of 3 s, which most requests share: a CV would be the clock's and is not computed" in told.out
    )
    assert "Blocks of 512 tokens that a prefix cache hits, of 160" in told.out
    plain = json.loads(shell("workload", "describe", path, "--json").out)["arrivals"]
    spread = json.loads(shell("workload", "describe", path, "--jitter", "--json").out)["arrivals"]
    assert (plain["tick_s"], plain["iat_cv"], plain["windows"][0]["idc"], plain["peak_second"]) == (3, None, None, None)
    assert spread["tick_s"] is None
    assert 0.5 < spread["iat_cv"] < 1.5
    assert spread["windows"][0]["idc"] < 3


def test_lengths_without_times_are_described_and_told(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n10,5,15,2\n30,6,36,5\n", encoding="utf-8"
    )
    answer = shell("workload", "describe", path)
    assert answer.code == 0
    assert answer.err == f"note: {path}: lengths without times, so nothing but lengths is described\n"
    assert lines(answer.out)[0] == "lengths.csv: 2 requests, no time between them"
    assert "Arrivals in windows" not in answer.out
    assert "least   p1" in answer.out


def test_bad_lines_are_refused_or_counted(shell: Shell, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n1,nan,5\n2,5,5\n", encoding="utf-8")
    answer = shell("workload", "describe", path)
    assert (answer.code, answer.out) == (1, "")
    assert answer.err.startswith(f"error: {path}:3: prompt_tokens is 'nan'")
    answer = shell("workload", "describe", path, "--skip-bad-lines")
    assert answer.code == 0
    assert answer.err.startswith(f"note: 1 bad line was skipped; the first: {path}:3: ")
    assert lines(answer.out)[0] == "mine.csv: 2 requests in 2.00 s, 1.00 a second"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nope.csv"], 1, "error: nope.csv: no such file"),
        (["mine.csv", "--format", "azur"], 1, "error: no trace format 'azur'; did you mean 'azure'?"),
        (["mine.csv", "--jitter"], 1, "error: mine.csv: jitter spreads times that are ticks; those of "),
        (["mine.csv", "--block-size", "0"], 2, "error: Invalid value for '--block-size'"),
        ([], 2, "error: Missing argument"),
    ],
)
def test_complaints(shell: Shell, trace: Path, arguments: list[str], code: int, message: str) -> None:
    answer = shell("workload", "describe", *arguments)
    assert (answer.code, answer.out) == (code, "")
    assert answer.err.startswith(message)


def test_a_gzip_that_ends_early_is_told(shell: Shell, tmp_path: Path) -> None:
    whole = gzip.compress(SESSIONS.encode() * 50)
    (tmp_path / "cut.csv.gz").write_bytes(whole[: len(whole) // 2])
    answer = shell("workload", "describe", "cut.csv.gz")
    assert (answer.code, answer.out) == (1, "")
    assert "the gzip file ends early" in answer.err or "unknown" in answer.err


def test_the_help_loads_no_numbers() -> None:
    code = (
        "import sys; from hbmtwin.cli import main; main(['workload', '--help']); "
        "sys.exit(bool({'numpy', 'pandas', 'plotly'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0
