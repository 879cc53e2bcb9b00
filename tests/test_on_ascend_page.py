"""The page for whoever has an Ascend server: its commands and options exist, and its lists are the code's."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from hbmtwin.allocators.caching.releases import release_rules
from hbmtwin.cli.app import app
from hbmtwin.kernels.attention.npu_choice import choice_for

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "on-ascend.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines() if line.startswith("hbmtwin ")]


def found(words: list[str]) -> tuple[Any, list[str]]:
    """The command of the line, and the words behind its name."""
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, words[0]
        command, words = command.commands[words[0]], words[1:]
    return command, words


def test_the_page_has_the_commands_of_its_table() -> None:
    named = re.findall(r"^\| \d \| `(hbmtwin [a-z ]+[a-z])", PAGE, re.MULTILINE)
    assert named
    for name in named:
        assert any(command.startswith(name) for command in COMMANDS), name


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_exists_with_its_options(line: str) -> None:
    command, words = found(shlex.split(line.partition(" > ")[0])[1:])
    options = {name for parameter in command.params for name in parameter.opts}
    assert {word for word in words if word.startswith("--")} <= options


def test_the_releases_of_the_page_are_those_that_are_modelled() -> None:
    listed = re.search(r"allocator is modelled: ([^A-Z]*)\. Another", PAGE)
    assert listed is not None
    releases = re.split(r",\s+", listed[1])
    assert len(releases) == 11
    for release in releases:
        release_rules("torch_npu", release, "Ascend910B2", "8.5.0")
    with pytest.raises(ValueError, match=re.escape(", ".join(releases))):
        release_rules("torch_npu", "1.0", "Ascend910B2", "8.5.0")


def test_the_ops_of_the_page_are_those_that_are_called() -> None:
    table = PAGE.partition("## Which ops are called")[2]
    for family in ("a2", "310p"):
        assert {op for op in choice_for(family) if f"`{op}`" not in table} == set()


def test_the_page_says_that_nothing_ran_on_an_npu() -> None:
    assert "**Nothing of hbmtwin has run on an NPU yet**" in PAGE
