"""The page about measured times: its commands exist, its grid is one, its Python runs, its figures are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hbmtwin.kernels.profile import MEMORY
from hbmtwin.validation.bench.grid import collectives_of, read_grid
from hbmtwin.validation.bench.records import COLLECTIVES, MEMORY_FIGURES, OPS

from .test_on_ascend_page import found

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "calibration.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_exists_with_its_options(line: str) -> None:
    command, words = found(shlex.split(line)[1:])
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_its_grid_is_one_and_its_table_has_every_op(tmp_path: Path) -> None:
    (grid,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "g.json").write_text(grid)
    assert len(read_grid(tmp_path / "g.json")) == 8
    timed = PAGE.partition("## What is timed")[2].partition("Operands are")[0]
    assert [op for op in OPS if op not in COLLECTIVES and f"`{op}`" not in timed] == []


def test_its_sizes_of_messages_are_those_of_the_grid() -> None:
    found = {}
    for backend in ("cpu", "cuda", "npu"):
        sizes = [c.named()["bytes"] for c in collectives_of("full", backend, (2,), 2)]
        found[backend] = (len(sizes), sizes[0], sizes[-1])
    assert found == {"cpu": (10, 2 << 10, 1 << 20), "cuda": (14, 8 << 10, 64 << 20), "npu": (14, 8 << 10, 64 << 20)}
    words = " ".join(PAGE.split())
    assert "of 1 to 8192 tokens, 8 KiB to 64 MiB," in words
    assert "on a CPU of 1 to 512 tokens of a smaller model, 2 KiB to 1 MiB" in words
    assert "`--grid full` has fourteen, on a CPU ten." in words
    ascend = (Path(__file__).resolve().parents[1] / "docs" / "on-ascend.md").read_text(encoding="utf-8")
    assert "fourteen sizes of message from 8 KiB to 64 MiB" in ascend


def test_its_python_runs() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, object] = {}
    exec(program, names)
    assert getattr(names["device"], "name", "") == "cpu"


def test_what_takes_a_figure_of_memory_is_the_profile_or_nothing() -> None:
    rows = dict(re.findall(r"^\| `(\w+_bytes)` \|.*\| ([^|]*) \|$", PAGE, re.MULTILINE))
    assert set(rows) == set(MEMORY_FIGURES)
    assert {name for name, taken_by in rows.items() if taken_by != "nothing"} == set(MEMORY_FIGURES) & set(MEMORY)
