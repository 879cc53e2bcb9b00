"""Results on disk: found by their key, never more than agreed, and nothing that cannot be read is handed out."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import streamlit as st

from hbmtwin.api import Scenario, run
from hbmtwin.dashboard.app import jobs
from hbmtwin.dashboard.app.kept_results import KeptResults

SMALL = ["workload.num_prompts=3", "workload.request_rate=inf"]


def test_what_was_kept_is_what_was_run(tmp_path: Path) -> None:
    result = run(Scenario.load(overrides=SMALL))
    kept = KeptResults(tmp_path)
    result.save(kept.path("a"))
    again = kept.get("a")
    assert again is not None
    assert again.summary == result.summary
    assert kept.get("b") is None


def test_the_oldest_go_first_and_the_last_stays(tmp_path: Path) -> None:
    kept = KeptResults(tmp_path, most_bytes=2_500)
    for at, name in enumerate("abcd"):
        kept.path(name).mkdir()
        (kept.path(name) / "x").write_bytes(b"0" * 1_000)
        os.utime(kept.path(name), (at, at))
    kept.make_room()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d"]
    KeptResults(tmp_path, most_bytes=1).make_room()
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_a_use_makes_it_young(tmp_path: Path) -> None:
    result = run(Scenario.load(overrides=SMALL))
    kept = KeptResults(tmp_path, most_bytes=1)
    for at, name in enumerate("ab"):
        result.save(kept.path(name))
        os.utime(kept.path(name), (at, at))
    assert kept.get("a") is not None
    kept.make_room()
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_damaged_one_is_run_again_at_its_place(tmp_path: Path) -> None:
    kept = KeptResults(tmp_path)
    result = run(Scenario.load(overrides=SMALL))
    result.save(kept.path("a"))
    (kept.path("a") / "summary.json").unlink()
    assert kept.get("a") is None
    result.save(kept.path("a"))
    assert kept.get("a") is not None
    kept.path("a-operations").mkdir()
    (kept.path("a-operations") / "maps.parquet").write_bytes(b"PAR1 cut")
    assert kept.tables("a-operations", ("maps",)) is None
    assert not kept.path("a-operations").exists()


def test_a_result_in_memory_is_none_once_its_directory_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HBMTWIN_CACHE", str(tmp_path))
    scenario = Scenario.load(overrides=SMALL)
    try:
        run(scenario).save(jobs.shared().kept.path(jobs.key_of(scenario)))
        assert jobs.result_of(scenario) is not None
        shutil.rmtree(jobs.shared().kept.path(jobs.key_of(scenario)))
        assert jobs.result_of(scenario) is None
    finally:
        jobs.shared().workers.close()
        st.cache_resource.clear()


@pytest.mark.parametrize("damage", ["summary.json", "timeline.parquet"])
def test_a_damaged_one_is_none(damage: str, tmp_path: Path) -> None:
    kept = KeptResults(tmp_path)
    run(Scenario.load(overrides=SMALL)).save(kept.path("a"))
    (kept.path("a") / damage).write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/never'\ntR.")
    assert kept.get("a") is None


def test_where_they_lie_can_be_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HBMTWIN_CACHE", str(tmp_path / "own"))
    assert KeptResults().path("k") == tmp_path / "own" / "k"
    monkeypatch.delenv("HBMTWIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert KeptResults().path("k") == tmp_path / "xdg" / "hbmtwin" / "dashboard" / "k"


def test_what_is_removed_from_outside_is_not_there_and_nothing_breaks(tmp_path: Path) -> None:
    kept = KeptResults(tmp_path / "kept", most_bytes=1)
    (tmp_path / "kept" / "plan-gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "kept" / "plan-there").mkdir()
    assert {path.name for path in kept.named(("plan-",))} == {"plan-gone", "plan-there"}
    kept.make_room()
    shutil.rmtree(tmp_path / "kept")
    assert kept.named(("plan-",)) == []
    kept.make_room()
    (tmp_path / "kept").write_text("a file at its place")
    assert kept.named(("plan-",)) == []
    kept.make_room()
