"""Capacity with directories that say other things than they should: it tells which one, and the page stays."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from hbmtwin.dashboard.app import jobs

from ...patience import PATIENCE_S

PAGE = """
from hbmtwin.dashboard.app import capacity_page, language
language.choose()
capacity_page.show()
"""
FILES = {"sweep": "sweep.json", "plan": "plan.json", "oom-point": "summary.json"}
OOM_POINT = {"model": "m", "device": "d", "load": {}, "policies": {}, "smallest_memory": None}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = tmp_path / "kept"
    monkeypatch.setenv("HBMTWIN_CACHE", str(place))
    place.mkdir()
    yield place
    jobs.shared().workers.close()
    st.cache_resource.clear()


def capacity(kind: str) -> AppTest:
    app = AppTest.from_string(PAGE, default_timeout=PATIENCE_S)
    app.query_params["kind"] = kind
    app.run()
    assert not app.exception
    return app


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("sweep", {"grid": 5, "runs": "x", "outcomes": []}),
        ("plan", {"plans": 5, "left_out": {}}),
        ("plan", {"plans": {"paged": {"target": "users"}}, "left_out": {}}),
        ("oom-point", OOM_POINT | {"policies": 5}),
        ("oom-point", OOM_POINT | {"policies": {"paged": {}}}),
    ],
)
def test_a_damaged_one_is_named(kind: str, said: dict[str, Any], kept: Path) -> None:
    for number in (1, 2):  # the choice names both
        (kept / f"{kind}-{number}").mkdir()
        (kept / f"{kind}-{number}" / FILES[kind]).write_text(json.dumps(said))
        (kept / f"{kind}-{number}" / "runs.parquet").write_bytes(b"PAR1 cut")
    (told,) = (error.value.replace("\\", "") for error in capacity(kind).error)
    assert told.startswith(f"{kind}-")
    assert "cannot be shown: its files are damaged" in told


def test_a_plan_of_which_every_policy_was_left_out_says_why(kept: Path) -> None:
    (kept / "plan-1").mkdir()
    (kept / "plan-1" / "plan.json").write_text(json.dumps({"plans": {}, "left_out": {"buddy": "it is not for this"}}))
    app = capacity("plan")
    assert [caption.value for caption in app.caption][-1] == "buddy is left out\\: it is not for this"
    assert not app.error


def test_the_directory_may_be_removed_while_the_app_runs(kept: Path) -> None:
    capacity("plan")
    shutil.rmtree(kept)
    assert "None is finished yet" in capacity("plan").info[0].value
