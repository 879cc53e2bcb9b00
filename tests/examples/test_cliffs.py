"""The cliffs: no preemption, a steep rise, thrashing, and under one rule a live-lock, as docs/cliffs.md says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from hbmtwin.sim.scheduler import schedulers

from ..patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
CLIFFS = ROOT / "examples" / "cliffs"
PAGE = (ROOT / "docs" / "cliffs.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def cliff() -> Iterator[ModuleType]:
    """The module of the example; its scheduler leaves the registry with it, as other tests count who is there."""
    sys.path.insert(0, str(CLIFFS))
    try:
        yield importlib.import_module("cliff")
    finally:
        sys.path.remove(str(CLIFFS))
        for name in ("cliff", "picture", "largest_gives_way"):
            sys.modules.pop(name, None)
        schedulers.unregister("largest_gives_way")


@pytest.mark.parametrize(
    ("rule", "blocks", "verdict", "completed", "ttft_p99_s", "recomputed"),
    [
        ("whole prompt", 640, "held", 240, 0.31, 0.0),
        ("whole prompt", 340, "preempted", 240, 2.89, 8.8),
        ("whole prompt", 34, "preempted", 240, 321.54, 19.2),
        ("first chunk", 520, "held", 240, 0.38, 0.0),
        ("first chunk", 380, "thrashing", 240, 7.62, 40.4),
        ("first chunk", 160, "thrashing", 240, 65.29, 71.5),
        ("first chunk", 34, "thrashing", 240, 587.45, 95.1),
        ("largest gives way", 460, "preempted", 240, 0.57, 10.8),
        ("largest gives way", 420, "thrashing", 240, 49.13, 76.5),
        ("largest gives way", 45, "live-lock", 46, 575.23, 99.4),
        ("largest gives way", 34, "live-lock", 40, 1127.97, 99.7),
    ],
)
def test_points_of_the_sweep(
    cliff: ModuleType, rule: str, blocks: int, verdict: str, completed: int, ttft_p99_s: float, recomputed: float
) -> None:
    p = cliff.point(rule, blocks)
    assert blocks in cliff.BLOCKS
    assert (p.verdict, p.completed) == (verdict, completed)
    assert round(p.ttft_p99_s, 2) == ttft_p99_s
    assert round(100 * p.recomputed_share, 1) == recomputed


def test_the_page_says_what_the_points_say() -> None:
    for said in ("9 % of the tokens are computed twice", "72 % of its work is repeated", "at 0.5 GiB 95 %"):
        assert said in " ".join(PAGE.split())
    assert "after 46 of 240 requests at 0.7 GiB, 40 at 0.5" in " ".join(PAGE.split())


def test_the_picture_marks_every_verdict(cliff: ModuleType) -> None:
    """Drawn from made-up points: one of each verdict, and TTFT `never` where it would not end."""
    picture = importlib.import_module("picture")
    points = [
        cliff.Point(rule, blocks, 1, 2.0, 0.5, verdict, 9.0, 240)
        for rule in cliff.RULES
        for blocks, verdict in ((640, "held"), (380, "thrashing"), (34, "live-lock"))
    ]
    figure = picture.cliffs(points)
    assert "8.1" not in figure.layout.title.text
    assert "at 5.9 GiB it takes 2 s, and at 0.5 one rule never ends" in figure.layout.title.text
    lines = [trace for trace in figure.data if trace.mode == "lines+markers"]
    assert [list(trace.marker.symbol) for trace in lines] == [["circle-open", "diamond", "x"]] * 6
    assert [trace.y[2] for trace in lines] == [picture.NEVER_S, 50.0] * 3
    assert [axis.title.text for axis in (figure.layout.yaxis, figure.layout.yaxis2)] == [
        "TTFT p99 (s)",
        "recomputed (%)",
    ]
    assert {trace.name for trace in figure.data if trace.mode == "markers"} == {words for _, words in picture.KEY}


def test_the_page_has_its_picture_and_the_commands() -> None:
    assert "](cliffs.png)" in PAGE
    assert (ROOT / "docs" / "cliffs.png").read_bytes().startswith(b"\x89PNG")
    assert "python examples/cliffs\n" in PAGE


def test_a_wrong_argument_is_told_at_once() -> None:
    done = subprocess.run([sys.executable, str(CLIFFS), "--jason"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("usage: python examples/cliffs")


def test_the_three_forms_of_the_table(
    cliff: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    spec = importlib.util.spec_from_file_location("cliffs_main", CLIFFS / "__main__.py")
    assert spec is not None
    assert spec.loader is not None
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    points = [cliff.Point("first chunk", 380, 318, 7.62, 0.404, "thrashing", 78.7, 240)]
    monkeypatch.setattr(main, "sweep", lambda: points)
    assert main.main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["pool_gib"] == 5.9375
    assert main.main(["--markdown"]) == 0
    assert "| first chunk | 5.94 | thrashing | 318 | 40.4 | 7.62 | 79 | 240 |" in capsys.readouterr().out
    assert main.main([]) == 0
    assert "thrashing" in capsys.readouterr().out
