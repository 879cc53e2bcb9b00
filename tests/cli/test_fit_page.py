"""The page of ``fit``: its commands run, its output is theirs, and it names no option or key that is not there."""

from __future__ import annotations

import inspect
import json
import re
import shlex
from pathlib import Path

import pytest

from hbmtwin import fit as ask
from hbmtwin.cli.fit import fit as verb
from hbmtwin.sim.fit.options import flag

from .conftest import Shell

PAGE = (Path(__file__).parents[2] / "docs" / "fit.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ (hbmtwin fit [^\n]*)\n```\n\n```text\n(.*?)\n```", PAGE, re.DOTALL)
FIGURES = re.compile(r"\d[\d,.]*")


def shape(line: str) -> str:
    """A line without what moves with the engines' figures: numbers, bars, and the room between them."""
    return " ".join(re.sub(r"[█─]+", "", FIGURES.sub("#", line)).split())


@pytest.mark.parametrize(("command", "told"), EXAMPLES)
def test_examples_print_what_the_page_says(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, command: str, told: str
) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    code, out, err = shell(*shlex.split(command)[1:])
    assert (code, err) == (3 if "does not start" in told else 0, "")
    printed = [shape(line) for line in out.splitlines()]
    assert [line for line in map(shape, told.splitlines()) if line not in printed] == []


def test_the_examples_were_found() -> None:
    assert len(EXAMPLES) == 2


def test_every_option_of_the_page_is_one() -> None:
    known = {flag(name) for name in inspect.signature(verb).parameters} | {"--json", "--lang"}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) - known == set()


def test_every_key_of_the_record_is_on_the_page() -> None:
    record = ask("llama-2-7b", "ascend-910b4").to_dict()
    assert json.dumps(record)
    named = {key: key.removeprefix("available_kv_bytes") if key != "available_kv_bytes" else key for key in record}
    assert [key for key, name in named.items() if f"`{name}`" not in PAGE] == []


def test_the_notebooks_lines_run() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    exec(compile(code[1], "docs/fit.md", "exec"), {})
