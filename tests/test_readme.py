"""The README's commands run as they are written, and its layout is the repository's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from hbmtwin import Scenario
from hbmtwin.cli import main

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line for block in re.findall(r"```console\n(.*?)```", README, re.DOTALL) for line in block.strip().splitlines()
]
SMALL = ["--set", "workload.num_prompts=30"]


def hbmtwin_arguments(command: str) -> list[str]:
    """The arguments of a README command that runs hbmtwin, of an environment's own or of the path."""
    words = shlex.split(command.rpartition("&&")[2])
    assert Path(words[0]).name == "hbmtwin"
    return words[1:]


def test_the_first_command_installs_and_compares_with_nothing_given() -> None:
    assert COMMANDS[0].endswith("/pip install . && .venv/bin/hbmtwin compare")


def test_the_second_command_is_the_test_script() -> None:
    assert COMMANDS[1] == "scripts/test"
    assert (ROOT / "scripts" / "test").stat().st_mode & 0o100
    assert "exec scripts/test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_every_hbmtwin_command_runs_as_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    ours = [hbmtwin_arguments(command) for command in COMMANDS if "hbmtwin" in command]
    verbs = [words[0] for words in ours]
    assert verbs == ["compare", "fit", "plan", "init", "catalog", "run", "compare", "compare", "run", "run", "run"]
    for words in ours:
        if words[0] == "plan":  # minutes: tests/cli/test_plan_verb.py runs a smaller one
            assert Scenario.load(ROOT / words[1]).workload.users
            continue
        smaller = SMALL if words[0] in ("compare", "run") else []
        assert main([*words, *smaller]) == 0, capsys.readouterr().err
    assert (tmp_path / "hbmtwin-compare" / "report.html").is_file()


def test_the_layout_names_every_folder_and_no_other() -> None:
    layout = re.search(r"```text\n(.*?)```", README, re.DOTALL)
    assert layout is not None
    named = [line.split("/")[0] for line in layout[1].splitlines()]
    assert len(named) == 10
    for name in named:
        assert (ROOT / name).is_dir(), name
    python = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert python <= set(named)


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{name}.md" for name in ("index", "fit", "metrics", "policies", "ranks", "workloads")),
    ],
)
def test_links_between_pages_lead_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        assert ((ROOT / page).parent / target).exists(), target
