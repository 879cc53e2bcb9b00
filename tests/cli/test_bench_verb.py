"""``hbmtwin bench kernels`` and ``hbmtwin calibrate``: files in and out, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hbmtwin.dashboard.bench_figure import bench_figure, write_bench_page
from hbmtwin.kernels.profile import read_profile
from hbmtwin.validation.bench.records import MemoryFigure

from ..validation.test_calibrate import bench
from .conftest import Shell


def test_times_become_a_profile(shell: Shell, tmp_path: Path) -> None:
    Path("b.json").write_text(bench(0.02).to_json(), encoding="utf-8")
    answer = shell("calibrate", "--from-bench", "b.json", "--out", "mine.json", "--made", "on a Monday")
    assert answer.code == 0, answer.err
    assert "mine of cpu" in answer.out
    assert "weight_bandwidth_efficiency" in answer.out
    assert "left out: decode: 60 points, since an engine's cache is paged" in answer.out
    profile = read_profile(tmp_path / "mine.json")
    assert (profile.name, profile.made, profile.device) == ("mine", "on a Monday", "cpu")
    again = shell("calibrate", "--from-bench", "b.json", "--out", "mine.json", "--made", "on a Monday", "--json")
    told = json.loads(again.out)
    assert told["cross_validated_percent"] == profile.cross_validated_percent
    assert read_profile(tmp_path / "mine.json") == profile


def test_measured_memory_is_in_the_profile_and_on_the_screen(shell: Shell, tmp_path: Path) -> None:
    memory = (MemoryFigure("context_bytes", 5 << 20, "a drop", "H"), MemoryFigure("workspace_bytes", 7, "others", "L"))
    Path("b.json").write_text(replace(bench(), memory=memory).to_json(), encoding="utf-8")
    answer = shell("calibrate", "--from-bench", "b.json", "--out", "mine.json")
    assert answer.code == 0, answer.err
    assert "context_bytes: 5,242,880 bytes, measured" in answer.out
    assert "workspace_bytes" not in answer.out
    assert read_profile(tmp_path / "mine.json").memory == {"context_bytes": 5 << 20}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "kernels", "--grid", "no.json"], "--grid: no.json: no such file"),
        (["bench", "kernels", "--grid", "bad.json"], "--grid: bad.json: a list of cases is wanted"),
        (["bench", "kernels", "--dtype", "int4"], "--dtype: 'int4' is none; choose one of float32"),
        (["calibrate", "--from-bench", "bad.json", "--out", "p.json"], "bad.json: format: missing"),
        (["calibrate", "--from-engine-log", "bad.json", "--out", "p.json"], "with --model and --device"),
        (
            ["calibrate", "--from-bench", "b.json", "--device", "h200", "--out", "p.json"],
            "times of a CPU say nothing of h200",
        ),
        (
            [
                "calibrate",
                "--from-engine-log",
                "bad.json",
                "--model",
                "qwen3-32b",
                "--device",
                "h200",
                "--out",
                "p.json",
            ],
            "--from-engine-log: ",
        ),
        (["calibrate", "--model", "m", "--out", "p.json"], "--model: belongs to --from-engine-log"),
        (
            ["calibrate", "--from-engine-log", "bad.json", "--from-bench", "bad.json", "--out", "p.json"],
            "leave out --from-bench",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(shell: Shell, arguments: list[str], said: str) -> None:
    Path("bad.json").write_text("{}")
    Path("b.json").write_text(bench().to_json(), encoding="utf-8")
    answer = shell(*arguments)
    assert answer.code == 2
    assert said in answer.err
    assert not Path("p.json").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "kernels", "--out", "."], "--out: . is a directory"),
        (["bench", "kernels", "--picture", "no/b.html"], "--picture: there is no directory no"),
        (["calibrate", "--out", "no/p.json"], "--out: there is no directory no"),
        (["calibrate", "--from-bench", "b.json", "--out", "b.json"], "--out: b.json is what the profile is made from"),
    ],
)
def test_a_place_that_takes_no_file_is_refused_before_anything_is_measured(
    shell: Shell, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # a measurement would end with 1
    before = bench().to_json()
    Path("b.json").write_text(before, encoding="utf-8")
    answer = shell(*arguments)
    assert answer.code == 2
    assert said in answer.err
    assert Path("b.json").read_text(encoding="utf-8") == before


def test_a_backend_that_is_not_here_is_told_with_its_cure(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    answer = shell("bench", "kernels")
    assert answer.code == 1
    assert "pip install 'hbmtwin[torch]'" in answer.err


def test_the_picture_has_every_point_and_the_same_bytes(tmp_path: Path) -> None:
    b = bench()
    figure = bench_figure(b)
    drawn = sum(len(trace.x) for trace in figure.data if trace.name != "roof")
    assert drawn == 2 * sum(p.case.op != "copy" for p in b.points)
    write_bench_page(b, tmp_path / "a.html")
    first = (tmp_path / "a.html").read_bytes()
    write_bench_page(b, tmp_path / "a.html")
    assert (tmp_path / "a.html").read_bytes() == first
    assert b"made up" in first


@pytest.mark.parametrize(
    ("arguments", "option"),
    [(["calibrate", "--out", "p.json", "--from-bench"], "--from-bench"), (["bench", "kernels", "--grid"], "--grid")],
)
def test_a_directory_where_a_file_is_wanted_names_its_option(
    shell: Shell, tmp_path: Path, arguments: list[str], option: str
) -> None:
    told = shell(*arguments, str(tmp_path))
    assert told.code == 2
    assert told.err == f"error: {option}: {tmp_path}: cannot be read: Is a directory\n"
