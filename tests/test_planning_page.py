"""docs/planning.md: its command is one, its numbers of runs are the rule's, and it names every target and exit code."""

from __future__ import annotations

import re
from pathlib import Path

from hbmtwin.api import PlanQuestion, Scenario, rule_of
from hbmtwin.sim.capacity.plan_targets import TARGETS, target_of
from hbmtwin.sim.capacity.promise import parse_slos

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "planning.md").read_text(encoding="utf-8")


def test_its_command_is_one() -> None:
    (command,) = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
    hbmtwin, verb, path, *options = command.split()
    assert (hbmtwin, verb) == ("hbmtwin", "plan")
    assert target_of(Scenario.load(ROOT / path), None).name == "users"
    assert len(parse_slos(options[options.index("--slo") + 1])) == 2


def test_the_runs_that_a_yes_takes() -> None:
    told = re.search(r"a yes takes (\d+) runs without a failure at `--survive ([\d.]+)`, (\d+) at ([\d.]+)", PAGE)
    assert told is not None
    assert [int(told[1]), int(told[3])] == [rule_of(PlanQuestion(survive=float(told[i]))).least_for_yes for i in (2, 4)]
    others = re.search(r"(\d+) at 0.95\s+and (\d+) at 0.99", PAGE)
    assert others is not None
    assert [int(n) for n in others.groups()] == [rule_of(PlanQuestion(survive=s)).least_for_yes for s in (0.95, 0.99)]


def test_every_target_is_told_and_every_example_can_be_planned() -> None:
    for target in TARGETS:
        assert f"`{target}`" in PAGE
    for path in sorted((ROOT / "examples" / "plan").glob("*.toml")):
        assert f"hbmtwin plan examples/plan/{path.name}" in path.read_text(encoding="utf-8")
        assert target_of(Scenario.load(path), None).values
