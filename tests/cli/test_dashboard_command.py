"""``hbmtwin dashboard`` says before it starts why it cannot, and ends with 2."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hbmtwin.cli import main


def told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path, *words: str) -> str:
    monkeypatch.setenv("HBMTWIN_CACHE", str(cache))
    monkeypatch.setattr("os.execv", lambda *a: pytest.fail("it started"))
    assert main(["dashboard", "--no-browser", *words]) == 2
    return capsys.readouterr().err


def test_a_port_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = str(taken.getsockname()[1])
        said = told(monkeypatch, capsys, tmp_path, "--port", port)
    assert f"port {port} is in use, maybe by another dashboard; name another with --port" in said


def test_an_address_that_is_not_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = told(monkeypatch, capsys, tmp_path, "--host", "192.0.2.1")
    assert "192.0.2.1:8501: cannot listen there" in said


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    said = told(monkeypatch, capsys, file / "below")
    assert "results cannot be kept there; name a directory that can be written with HBMTWIN_CACHE" in said


def test_a_directory_that_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "no such directory" in told(monkeypatch, capsys, tmp_path, str(tmp_path / "nothing"))


def test_a_file_of_the_users_is_not_imported_in_place_of_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setenv("HBMTWIN_CACHE", str(tmp_path))
    monkeypatch.setattr("os.execv", lambda _, words: started.append(words))
    with socket.create_server(("localhost", 0)) as free:
        port = str(free.getsockname()[1])
    main(["dashboard", "--no-browser", "--port", port])
    assert started[0][1:5] == ["-P", "-m", "streamlit", "run"]  # a click.py in the directory would end it otherwise
