"""A link may say anything: it is told what is wrong with it, as plain text, at once, and the page stays."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from hbmtwin.dashboard.app import jobs

from ...patience import PATIENCE_S

PAGE = """
from hbmtwin.dashboard.app import {page}, language
language.choose()
{page}.show()
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HBMTWIN_CACHE", str(tmp_path / "kept"))
    yield
    jobs.shared().workers.close()
    st.cache_resource.clear()


@pytest.mark.parametrize("page", ["what_if_page", "memory_map_page", "compare_page", "capacity_page", "validate_page"])
@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (("model.name=<script>alert(1)</script>![x](http://evil.example/y)",), "unknown model"),
        (("device.name=**b**[a](javascript:alert(1))",), "unknown device"),
        (tuple(f"a{number}=1" for number in range(700)), "unknown key"),
        (("seed=" + "[" * 4000,), "nested too deeply"),
        (("seed=" + "9" * 5000,), "more than 77 digits"),
        (("kv_cache.block_size=" + "9" * 400,), "more than 77 digits"),
        (("\0\1",), "write it as section"),
        (("model.name=/etc/passwd",), "no valid JSON"),
    ],
    ids=["html", "markdown", "many", "deep", "endless", "long", "nonsense", "a file of the system"],
)
def test_it_is_told_as_plain_text(page: str, settings: tuple[str, ...], told: str) -> None:
    app = AppTest.from_string(PAGE.format(page=page), default_timeout=PATIENCE_S)
    app.query_params["set"] = list(settings)
    app.run()
    assert not app.exception
    raw = "\n".join(str(part.value) for part in (*app.error, *app.markdown, *app.caption))
    assert told.replace("_", "\\_") in raw
    assert "<script>" not in raw
    assert "](" not in raw


def test_a_trace_without_an_end_holds_no_page(tmp_path: Path) -> None:
    app = AppTest.from_string(PAGE.format(page="what_if_page"), default_timeout=PATIENCE_S)
    app.query_params["set"] = ["workload.trace=/dev/zero"]
    assert not app.run().exception
    assert app.button(key="run")
