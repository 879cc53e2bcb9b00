"""The table of settings in which runs differ."""

from __future__ import annotations

from hbmtwin.api import PRESETS, Scenario
from hbmtwin.dashboard.settings import setting_text, settings_table


def test_one_row_a_run_and_a_dash_where_a_key_does_not_concern_it() -> None:
    header, rows = settings_table(
        {"paged": Scenario.load(preset="paged"), "big": Scenario.load(preset="doubling", overrides=["seed=7"])}
    )
    assert header[:3] == ["policy", "seed", "memory.\noom"]
    assert dict(zip(header, rows[0], strict=True)) | {"kv_cache.\ngrowth": "–", "seed": "0"} == dict(
        zip(header, rows[0], strict=True)
    )
    assert dict(zip(header, rows[1], strict=True))["kv_cache.\ngrowth"] == "doubling"


def test_the_four_presets_are_told_apart_by_their_keys() -> None:
    header, rows = settings_table({name: Scenario.load(preset=name) for name in PRESETS})
    assert len({row[1:] for row in rows}) == len(PRESETS)
    assert "kv_cache.\npreset" not in header


def test_runs_that_do_not_differ_have_no_columns() -> None:
    assert settings_table({"a": Scenario(), "b": Scenario()}) == (["policy"], [("a",), ("b",)])


def test_values_as_they_are_written() -> None:
    values = (None, "", True, 1024, 0.9, {"distribution": "uniform", "low": 1})
    assert [setting_text(v) for v in values] == [
        "default",
        "default",
        "true",
        "1024",
        "0.9",
        "distribution uniform, low 1",
    ]
