"""Rows in a directory: each lands whole or not at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hbmtwin.sim.result import ResultError
from hbmtwin.sim.scenario import Scenario
from hbmtwin.sim.sweep.run_row import Row, died_row, run_row
from hbmtwin.sim.sweep.store import RunStore, check_runs_directory


@pytest.fixture
def row(tiny: Path) -> Row:
    return run_row(Scenario.load(tiny))


def test_a_row_comes_back_as_it_went(row: Row, tmp_path: Path) -> None:
    failed = died_row("f" * 32, 7)
    with RunStore(tmp_path / "out") as store:
        assert store.finished() == {}
        store.add(row)
        store.add(failed)
    with RunStore(tmp_path / "out") as again:
        assert again.finished() == {row["key"]: row, failed["key"]: failed}
        assert again.remarks == ()


def test_what_is_half_written_runs_again_and_is_told(row: Row, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with RunStore(out) as store:
        store.add(row)
        store.add({**row, "key": "a" * 32})
        store.add({**row, "key": "b" * 32})
    runs = out / "runs"
    (runs / f"{'a' * 32}.parquet").write_bytes((runs / f"{'a' * 32}.parquet").read_bytes()[:-100])  # cut by the power
    (runs / f"{'c' * 32}.parquet").write_bytes((runs / f"{'b' * 32}.parquet").read_bytes())  # another run's
    (runs / f".{'d' * 32}.parquet.4711.partial").write_bytes(b"PAR1")
    (runs / "notes.txt").write_text("mine", encoding="utf-8")
    with RunStore(out) as again:
        assert set(again.finished()) == {row["key"], "b" * 32}
        assert [remark.partition(": ")[0] for remark in again.remarks] == [
            str(runs / f"{'a' * 32}.parquet"),
            str(runs / f"{'c' * 32}.parquet"),
            str(runs / "notes.txt"),
        ]
        again.add({**row, "key": "a" * 32})
    assert not list(runs.glob(".*.partial"))
    assert (runs / "notes.txt").read_text(encoding="utf-8") == "mine"
    assert pq.read_table(runs / f"{'a' * 32}.parquet").num_rows == 1


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("...", encoding="utf-8")
    with pytest.raises(ResultError, match="holds no runs of hbmtwin; choose another --out"):
        RunStore(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(ResultError, match="is no directory"):
        RunStore(tmp_path / "file")


def test_one_that_was_killed_while_it_was_made_is_ours(tmp_path: Path) -> None:
    check_runs_directory(tmp_path)
    (tmp_path / "runs").mkdir()
    check_runs_directory(tmp_path)
    (tmp_path / "runs" / ".lock").touch()
    (tmp_path / "runs" / ".hbmtwin.json.12.partial").touch()
    with RunStore(tmp_path):
        pass
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {".lock", "hbmtwin.json"}


def test_who_fails_before_the_first_row_leaves_no_directory_that_was_not_there(row: Row, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()

    def fails(out: Path, *, first: Row | None = None, beside: str | None = None) -> list[str]:
        with suppress(ZeroDivisionError), RunStore(out) as store:
            if first is not None:
                store.add(first)
            if beside is not None:
                (out / "runs" / beside).touch()
            raise ZeroDivisionError
        return sorted(str(path.relative_to(place)) for path in place.rglob("*"))

    assert fails(place / "a" / "b") == []
    (place / "a").mkdir()
    assert fails(place / "a") == ["a"]
    assert fails(place / "a", beside="mine") == [
        *("a", "a/runs", "a/runs/.lock", "a/runs/hbmtwin.json", "a/runs/mine"),
    ]
    there = fails(place / "b", first=row)
    assert f"b/runs/{row['key']}.parquet" in there
    assert fails(place / "b") == there


def test_another_form_is_refused(tmp_path: Path) -> None:
    with RunStore(tmp_path):
        pass
    (tmp_path / "runs" / "hbmtwin.json").write_text('{"rows": 0}', encoding="utf-8")
    with pytest.raises(ResultError, match="by another release"):
        RunStore(tmp_path)


def test_one_process_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from hbmtwin.api import RunStore; "
        "store = RunStore(Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(ResultError, match="another process adds runs to it"):
            RunStore(tmp_path)
    finally:
        other.kill()
        other.communicate()
    with RunStore(tmp_path) as store:
        assert store.finished() == {}


def test_a_full_disk_loses_nothing_that_landed(row: Row, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, whole = tmp_path / "out", Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        whole(path, bytes(data)[:50])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with RunStore(out) as store:
        store.add(row)
        monkeypatch.setattr(Path, "write_bytes", half)
        with pytest.raises(ResultError, match="the disk is full; what has landed stays"):
            store.add({**row, "key": "a" * 32})
        assert set(store.finished()) == {row["key"]}
    monkeypatch.undo()
    with RunStore(out) as again:
        assert set(again.finished()) == {row["key"]}
    assert {path.name for path in (out / "runs").iterdir()} == {".lock", "hbmtwin.json", f"{row['key']}.parquet"}
