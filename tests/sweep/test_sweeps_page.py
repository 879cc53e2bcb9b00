"""docs/sweeps.md: its commands are commands, and its numbers those of the runs that it tells of."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from hbmtwin.cli import app, sweep
from hbmtwin.sim.sweep.execute import run_each
from hbmtwin.sim.sweep.grid import parse_axis, parse_grid
from hbmtwin.sim.sweep.points import point_summaries
from hbmtwin.sim.sweep.sweep import points_of, sweep_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^hbmtwin sweep .*$", PAGE, re.MULTILINE)


def options(command: str) -> dict[str, list[str]]:
    """The words of a command, as the program takes them apart."""
    verb = typer.main.get_command(app.app).commands["sweep"]
    context = verb.make_context("sweep", shlex.split(command)[2:])
    return context.params


def test_the_commands_are_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(COMMANDS) == 3
    monkeypatch.chdir(ROOT)
    for command in COMMANDS:
        given = options(command)
        grid = parse_grid(given["grid"], given["overrides"] or ())
        path = given["scenario"] and ROOT / "examples" / "sweeps" / Path(given["scenario"]).name
        points = points_of(path, grid, overrides=given["overrides"] or ())
        assert len(points) == len(grid)


def test_every_form_of_a_grid_is_one() -> None:
    words = re.findall(r"^\| `([\w.]+=[^`]+)` \|", PAGE, re.MULTILINE)
    assert [len(parse_axis(word).values) for word in words] == [2, 20, 4, 5]


@pytest.mark.parametrize("users", [12])
def test_the_rows_of_the_page_are_what_the_sweep_gives(users: int) -> None:
    """Twenty of its six hundred runs."""
    said = re.search(
        rf"^doubling +{users} +(\d+) / 20 +(.*?\)) +([\d.]+) +([\d.]+) +([\d.]+) *(.*)$", PAGE, re.MULTILINE
    )
    assert said is not None
    grid = parse_grid(["kv_cache.preset=doubling", f"workload.users={users}"])
    points = points_of(ROOT / "examples" / "sweeps" / "chat.toml", grid)
    rows = {str(row["key"]): row for row in run_each(points[0].seeded(range(20)), jobs=1)}
    table = sweep_table(points, range(20), rows).to_pylist()
    (point,) = point_summaries(table, ["kv_cache.preset", "workload.users"])
    assert point.held == int(said[1])
    middles = [point.measured[name].median for name in ("requests_per_s", "ttft_p99_s", "tpot_p99_s")]
    assert [f"{middles[0]:.3f}", f"{middles[1]:.2f}", f"{1000 * middles[2]:.1f}"] == [said[3], said[4], said[5]]
    others = [f"{count} {cause.replace('_', ' ')}" for cause, count in point.outcomes.items() if cause != "held"]
    assert ", ".join(others) == said[6].strip()


def test_the_help_is_that_of_the_page() -> None:
    assert sweep.MOST_ERRORS < 10
    for word in ("--grid", "--set", "--seed", "--executor", "--address", "--json", "--out"):
        assert f"`{word}" in PAGE or f" {word} " in PAGE, word
