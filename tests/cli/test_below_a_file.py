"""A path below a file is told by the name that the user gave, whatever we call what we write first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Shell = Callable[..., Any]

BELOW = "file.csv/x.csv"


@pytest.fixture
def files(tmp_path: Path, shell: Shell) -> None:
    """A file that is no folder, a trace, its model, a trace of operations and a result."""
    (tmp_path / "file.csv").write_text("a file\n")
    rows = "".join(f"{n / 2},{100 + n % 9},{5 + n % 7}\n" for n in range(100))
    (tmp_path / "trace.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}")
    (tmp_path / "operations.csv").write_text("op,id,size,stream,arg\nmalloc,0,512,0,\n")
    assert shell("workload", "learn", "trace.csv", "--out", "model.toml", "--no-check").code == 0
    assert shell("run", "--num-prompts", "1", "--out", "result").code == 0


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize(
    "arguments",
    [
        ("workload", "generate", "model.toml", "--out", BELOW),
        ("workload", "generate", "model.toml", "--out", "file.csv/x.parquet"),
        ("workload", "generate", "model.toml", "--out", "file.csv/x.jsonl", "--format", "mooncake"),
        ("workload", "learn", "trace.csv", "--out", "file.csv/x.toml", "--no-check"),
        ("workload", "describe", "trace.csv", "--out", "file.csv/x"),
        ("init", "file.csv/x.toml"),
        ("run", "--num-prompts", "1", "--out", "file.csv/x"),
        ("compare", "--policies", "paged", "--num-prompts", "1", "--out", "file.csv/x"),
        ("replay", "operations.csv", "--capacity-bytes", "1000000000", "--per-op", BELOW),
        ("export", "result", "--format", "openmetrics", "--out", "file.csv/x.txt"),
        ("export", "result", "--format", "csv", "--out", "file.csv/x"),
    ],
    ids=lambda arguments: " ".join(arguments[:2] + arguments[-1:]),
)
def test_a_path_below_a_file(shell: Shell, arguments: tuple[str, ...]) -> None:
    before = sorted(Path().rglob("*"))
    answer = shell(*arguments)
    assert answer.code in (1, 2)
    last = answer.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert "file.csv" in last
    assert "partial" not in last
    assert "Traceback" not in answer.err
    assert sorted(Path().rglob("*")) == before
