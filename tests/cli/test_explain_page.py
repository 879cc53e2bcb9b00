"""The page of ``explain``: its texts, pasted, are told as it says, and its keys are those of the record."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hbmtwin import explain

from .conftest import Shell

PAGE = (Path(__file__).parents[2] / "docs" / "explain.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```log\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
CHINESE = re.search(r"begins:\n\n```text\n(.*?)\n\.\.\.\n```", PAGE, re.DOTALL)
COMMANDS = re.findall(r"^ +(hbmtwin fit --.*)$", PAGE, re.MULTILINE)


def one_line(text: str) -> str:
    """Without the line breaks of a terminal."""
    return " ".join(text.split())


def told(shell: Shell, folder: Path, log: str, *options: str) -> str:
    file = folder / "server.log"
    file.write_text(log, encoding="utf-8")
    code, out, err = shell("explain", file, *options)
    assert (code, err) == (0, "")
    return out


def test_the_examples_were_found() -> None:
    assert len(EXAMPLES) == 3
    assert CHINESE is not None
    assert len(COMMANDS) == 1


@pytest.mark.parametrize(("log", "page"), EXAMPLES)
def test_a_text_is_told_as_the_page_says(shell: Shell, tmp_path: Path, log: str, page: str) -> None:
    assert one_line(told(shell, tmp_path, log)) == one_line(page)


def test_the_chinese_beginning_is_what_is_printed(shell: Shell, tmp_path: Path) -> None:
    assert CHINESE is not None
    printed = told(shell, tmp_path, EXAMPLES[0][0], "--lang", "zh")
    assert "".join(printed.split()).startswith("".join(CHINESE[1].split()))


def test_the_command_that_it_ends_with_comes_to_the_numbers_of_the_page(shell: Shell) -> None:
    code, out, _ = shell(*shlex.split(COMMANDS[0])[1:], "--json")
    record = json.loads(out)
    assert (code, record["fits"], record["available_kv_bytes"]) == (3, False, 11_381_826_560)
    assert "11,381,826,560" in PAGE


def test_every_key_of_the_record_is_on_the_page() -> None:
    keys = re.search(r"`--json` prints the record: `([^`]*)`", PAGE)
    assert keys is not None
    record = explain(EXAMPLES[0][0]).to_dict()
    named = set(re.findall(r"\w+", keys[1]))
    within = {key for part in ("judgements", "findings") for key in record[part][0]}
    assert named == set(record) | within


def test_the_notebooks_lines_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert code is not None
    (tmp_path / "server.log").write_text(EXAMPLES[0][0], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    exec(compile(code[1], "docs/explain.md", "exec"), {})
