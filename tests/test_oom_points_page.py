"""docs/oom-points.md: its commands parse, its pictures are there, and its figures are where the example writes them."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main

from hbmtwin.cli.app import app
from hbmtwin.sim.capacity.oom_point_draws import draws_of
from hbmtwin.sim.capacity.oom_point_loads import check_load, parse_load
from hbmtwin.sim.scenario import Scenario

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "oom_points"
PAGE = (ROOT / "docs" / "oom-points.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oom_points_example", EXAMPLE / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def commands() -> list[list[str]]:
    """Those of the page and of the scenario files' heads, as words."""
    texts = [PAGE, *(path.read_text(encoding="utf-8").replace("#  ", "") for path in EXAMPLE.glob("*.toml"))]
    lines = [line.strip() for text in texts for line in re.sub(r"\\\n", " ", text).splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("hbmtwin oom-point")]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_parses(words: list[str]) -> None:
    group: Any = typer.main.get_command(app)
    command = group.commands[words[1]]
    context = command.make_context("oom-point", words[2:])
    if (load := context.params["load"]) is not None:
        assert len(parse_load(load).values) > 1


def test_what_the_example_runs_is_legal(example: ModuleType) -> None:
    for service in example.SERVICES:
        preset = example._traffic(service, None, Path())
        scenario = Scenario.load(EXAMPLE / f"{service.name}.toml", overrides=preset, preset="paged")
        for rates in (service.rates, service.few_rates):
            check_load(scenario, parse_load(rates))
        assert len(draws_of(scenario, example.DRAWS)) == example.DRAWS
        assert parse_load(service.scales).values[0] == parse_load(service.few_scales).values[0]


def test_pictures_and_figures_have_their_places(example: ModuleType, tmp_path: Path) -> None:
    _, told, _ = PAGE.split(example.MARK)
    pictures = re.findall(r"\]\((oom-point-.*?\.png)\)\n\n- ", told)
    assert pictures
    assert len(pictures) == told.count("![")
    for name in pictures:
        assert (ROOT / "docs" / name).stat().st_size < 150_000
    (tmp_path / "oom-points.md").write_text(PAGE, encoding="utf-8")
    example.renew(tmp_path, ["### One\n", "- said\n"])
    page = (tmp_path / "oom-points.md").read_text(encoding="utf-8")
    assert page.split(example.MARK)[1] == "\n### One\n\n- said\n\n"
    assert page.split(example.MARK)[::2] == PAGE.split(example.MARK)[::2]


def test_wrong_arguments_and_a_missing_trace_are_told(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example.main([]) == example.main(["--trace", "x"]) == 2
    assert example.main(["--traces", str(tmp_path), str(tmp_path / "out")]) == 1
    assert "neither azure2023_conv.csv.gz nor AzureLLMInferenceTrace_conv.csv is there" in capsys.readouterr().err
