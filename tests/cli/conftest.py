"""The command line in this process: what a shell would see."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from hbmtwin.cli import main


class Answer(NamedTuple):
    code: int
    out: str
    err: str


Shell = Callable[..., Answer]


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Shell:
    """Run ``hbmtwin`` with these arguments, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")

    def run(*arguments: str | Path) -> Answer:
        code = main([str(a) for a in arguments])
        out, err = capsys.readouterr()
        return Answer(code, out, err)

    return run
