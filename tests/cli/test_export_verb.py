"""``hbmtwin export``: a stored result in, a file for another tool out."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Shell = Callable[..., Any]

FEW = ("--set", "workload.num_prompts=5", "--set", "session.turns=1")


@pytest.fixture
def stored(shell: Shell) -> Shell:
    assert shell("run", *FEW, "--out", "result").code == 0
    return shell


def test_every_format_is_written(stored: Shell, tmp_path: Path) -> None:
    assert stored("export", "result", "--format", "perfetto", "--out", "trace.json.gz") == (
        0,
        "wrote trace.json.gz\n",
        "",
    )
    assert len(json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]) > 20
    assert stored("export", "result", "--format", "openmetrics", "--out", "metrics.txt").code == 0
    assert (tmp_path / "metrics.txt").read_text(encoding="utf-8").endswith("\n# EOF\n")
    code, out, _ = stored("export", "result", "--format", "csv", "--out", "tables", "--json")
    assert (code, json.loads(out)) == (0, {"written": "tables", "format": "csv"})
    assert (tmp_path / "tables" / "requests.csv").is_file()


def test_mistakes_are_usage_errors_with_a_cure(stored: Shell, tmp_path: Path) -> None:
    code, out, err = stored("export", "result", "--format", "tikz", "--out", "x")
    assert (code, out) == (2, "")
    assert "'perfetto', 'openmetrics', 'csv'" in err
    (tmp_path / "empty").mkdir()
    for place in ("nowhere", "empty"):
        code, out, err = stored("export", place, "--format", "csv", "--out", "x")
        assert (code, out) == (2, "")
        assert err == f"error: {place}: not a result directory of hbmtwin; `hbmtwin run --out DIRECTORY` writes one\n"
    (tmp_path / "result").rename(tmp_path / "empty" / "paged")
    _, _, err = stored("export", "empty", "--format", "csv", "--out", "x")
    assert "name one of its runs, e.g. empty/paged" in err
    code, _, err = stored("export", "empty/paged", "--format", "csv", "--out", "empty/paged")
    assert code == 2
    assert "name a new directory" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty"]


def test_a_damaged_result_is_a_failure(stored: Shell, tmp_path: Path) -> None:
    (tmp_path / "result" / "summary.json").write_text("{", encoding="utf-8")
    code, out, err = stored("export", "result", "--format", "perfetto", "--out", "x.json")
    assert (code, out) == (1, "")
    assert err.startswith("error: result: not a result directory of hbmtwin: ")
