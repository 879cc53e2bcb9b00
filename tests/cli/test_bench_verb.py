"""``hbmtwin bench kernels`` and ``hbmtwin calibrate``: files in and out, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hbmtwin.cli.output import write_whole
from hbmtwin.dashboard.bench_figure import bench_figure, write_bench_page
from hbmtwin.dashboard.collectives_figure import collectives_figure
from hbmtwin.kernels.profile import read_profile
from hbmtwin.validation.bench import collectives as bench_collectives
from hbmtwin.validation.bench import kernels as bench_kernels
from hbmtwin.validation.bench.records import OPS, Bench, MemoryFigure, read_bench

from ..validation.test_calibrate import bench
from ..validation.test_calibrate_collectives import measured
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
        (["bench", "kernels", "--memory-gib", "3"], "--memory-gib: caps a device's memory, and a CPU has none"),
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
        (["bench", "kernels", "--out", "/proc/b.json"], "--out: /proc/b.json cannot be written: No such file"),
        (["bench", "kernels", "--picture", "/proc/b.html"], "--picture: /proc/b.html cannot be written: No such"),
        (["bench", "collectives", "--ranks", "2", "--out", "/proc/c.json"], "--out: /proc/c.json cannot be written: "),
        (["calibrate", "--out", "/proc/p.json"], "cannot be written: No such file or directory; name a file in a dir"),
        (["calibrate", "--out", "x" * 300], "x cannot be written: File name too long; name a file in a directory"),
        (["calibrate", "--out", "b.json/p.json"], "--out: there is no directory b.json; make it first"),
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
    assert [path.name for path in Path().iterdir()] == ["b.json"]


def test_a_profile_is_written_whole_or_not_at_all(
    shell: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path("b.json").write_text(bench().to_json(), encoding="utf-8")
    Path("p.json").write_text("before")
    real = Path.write_text

    def full(path: Path, text: str, **options: str) -> int:
        if not path.name.endswith(".partial"):
            return real(path, text, **options)
        real(path, text[: len(text) // 2], **options)
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as disk:
        disk.setattr(Path, "write_text", full)
        answer = shell("calibrate", "--from-bench", "b.json", "--out", "p.json")
    assert (answer.code, answer.err) == (1, "error: [Errno 28] No space left on device: 'p.json'\n")
    assert Path("p.json").read_text() == "before"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.json", "p.json"]
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(pipe.read_text)
        write_whole(pipe, "whole")
        assert read.result(10) == "whole"


def test_a_backend_that_is_not_here_is_told_with_its_cure(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    answer = shell("bench", "kernels")
    assert answer.code == 1
    assert "pip install 'hbmtwin[torch]'" in answer.err


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ((), "Peaks: 20.0 GB/s and 175 GFLOP/s, of its own fastest copy and product. Times"),
        (("copy",), "Peak: 175 GFLOP/s, of its own fastest product; that of GB/s is not known, since the grid has no"),
        (("matmul",), "Peak: 20.0 GB/s, of its own fastest copy; that of GFLOP/s is not known, since the grid has no"),
        (("copy", "matmul"), "No peak is known, since the grid has neither copy nor matmul. Times are medians"),
    ],
)
def test_a_peak_that_was_not_measured_is_not_told_as_0(
    shell: Shell, left_out: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    some = replace(b, points=tuple(p for p in b.points if p.case.op not in left_out))
    monkeypatch.setattr(bench_kernels, "run_bench", lambda *arguments, **options: some)
    answer = shell("bench", "kernels")
    assert answer.code == 0, answer.err
    assert said in " ".join(answer.out.split())
    assert " 0.0 GB/s" not in answer.out
    assert " 0 GFLOP/s" not in answer.out


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
    ("left_out", "panels", "drawn"),
    [(("matmul",), 2, True), (("matmul", "copy"), 1, True), (("copy",), 2, True), (OPS[1:], 1, False)],
)
def test_a_picture_without_a_peak_or_a_kernel_divides_by_nothing(
    left_out: tuple[str, ...], panels: int, drawn: bool
) -> None:
    b = bench()
    figure = bench_figure(replace(b, points=tuple(p for p in b.points if p.case.op not in left_out)))
    assert len({trace.xaxis for trace in figure.data} | {"x"}) == panels
    assert bool(figure.data) == drawn
    assert all(np.isfinite(np.asarray(trace.y, float)).all() for trace in figure.data)
    assert max((max(trace.y) for trace in figure.data if trace.xaxis == "x2"), default=0) < 101


def test_a_picture_of_collectives_has_every_point(tmp_path: Path) -> None:
    eager, graphed = measured(), measured(op="all_reduce_in_graph")
    both = replace(eager, points=eager.points + graphed.points)
    figure = collectives_figure(both)
    assert sum(len(trace.x) for trace in figure.data) == 2 * len(both.points)
    assert [trace.name for trace in figure.data if trace.showlegend is not False][2:4] == [
        "8 ranks",
        "2 ranks, in a graph",
    ]
    write_bench_page(both, tmp_path / "a.html")
    assert b"Bus bandwidth" in (tmp_path / "a.html").read_bytes()


def test_collectives_join_the_kernels_in_a_profile(shell: Shell) -> None:
    Path("k.json").write_text(bench(0.02).to_json(), encoding="utf-8")
    Path("c.json").write_text(measured(0.02).to_json(), encoding="utf-8")
    answer = shell("calibrate", "--from-bench", "k.json", "--from-bench", "c.json", "--out", "p.json")
    assert answer.code == 0, answer.err
    assert "allreduce_ns.4" in answer.out
    assert "link_bandwidth_bytes_per_s" in answer.out
    assert read_profile(Path("p.json")).allreduce_ns.keys() == {2, 4, 8}
    other = replace(measured(), device="another")
    Path("c.json").write_text(other.to_json(), encoding="utf-8")
    answer = shell("calibrate", "--from-bench", "k.json", "--from-bench", "c.json", "--out", "q.json")
    assert answer.code == 2
    assert "device 'made up' and 'another': a profile is of one device" in answer.err
    assert not Path("q.json").exists()


@pytest.mark.parametrize("again", ["b.json", "./b.json", "link.json", "no.json"])
def test_a_file_that_is_named_twice_is_refused(shell: Shell, again: str) -> None:
    Path("b.json").write_text(bench().to_json(), encoding="utf-8")
    Path("link.json").symlink_to("b.json")
    first = "no.json" if again == "no.json" else "b.json"
    answer = shell("calibrate", "--from-bench", first, "--from-bench", again, "--out", "p.json")
    assert answer.code == 2
    what = "is named twice" if again != "link.json" else "is the file b.json again"
    named = Path(again)
    assert answer.err == f"error: --from-bench: {named} {what}, whose points are no further ones; name it once\n"
    assert not Path("p.json").exists()


def test_all_reduces_alone_are_told_what_to_put_beside_them(shell: Shell) -> None:
    Path("c.json").write_text(measured().to_json(), encoding="utf-8")
    answer = shell("calibrate", "--from-bench", "c.json", "--out", "p.json")
    assert answer.code == 2
    assert answer.err == (
        "error: --from-bench: no times of kernels, and a profile needs them beside those of all-reduces; make them on "
        "the same machine with hbmtwin bench kernels --out bench.json, and name both: --from-bench bench.json\n"
    )


@pytest.mark.parametrize("verb", [("bench", "kernels"), ("bench", "collectives"), ("calibrate",)])
def test_the_help_says_that_an_older_file_is_replaced(shell: Shell, verb: tuple[str, ...]) -> None:
    assert "an older one is replaced" in " ".join(shell(*verb, "--help").out.replace("│", " ").split())


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "run/meta.json: is not there; a served run has meta.json, timeseries.csv and requests.jsonl: name its"),
        ({"meta.json": "{"}, "run/meta.json: is no JSON (Expecting property name"),
        (
            {"meta.json": '{"model": "m", "vllm_version": "0.19", "engine_kwargs": {}}'},
            "run/timeseries.csv: is not there; a served run has meta.json, timeseries.csv and requests.jsonl",
        ),
    ],
)
def test_a_served_run_that_lacks_a_file_is_told_in_words(shell: Shell, files: dict[str, str], said: str) -> None:
    Path("run").mkdir()
    for name, text in files.items():
        (Path("run") / name).write_text(text)
    log = ("--from-engine-log", "run", "--model", "qwen3-32b", "--device", "h200")
    answer = shell("calibrate", *log, "--out", "p.json")
    assert answer.code == 2
    assert answer.err.startswith(f"error: --from-engine-log: {said}")
    assert "Errno" not in answer.err


def test_a_second_measurement_of_the_same_cases_adds_no_points(shell: Shell) -> None:
    Path("a.json").write_text(bench(0.02).to_json(), encoding="utf-8")
    Path("b.json").write_text(bench(0.02, seed=2).to_json(), encoding="utf-8")
    one = json.loads(shell("calibrate", "--from-bench", "a.json", "--out", "p.json", "--json").out)
    both = json.loads(
        shell("calibrate", "--from-bench", "a.json", "--from-bench", "b.json", "--out", "q.json", "--json").out
    )
    assert [row["points"] for row in both["cross_validated"]] == [row["points"] for row in one["cross_validated"]]
    assert both["left_out"][-1].startswith("repeats of ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--ranks", "1"], "--ranks: numbers from 2 to 64 with commas, such as 2,4,8, not '1'"),
        (["--ranks", "2,x"], "--ranks: numbers from 2 to 64"),
        (["--ranks", "2,²"], "--ranks: numbers from 2 to 64"),
        (["--ranks", "9" * 5000], "--ranks: numbers from 2 to 64"),
        (["--ranks", "2", "--grid", "g.json"], "--ranks: g.json tells its own; leave it out"),
        (["--grid", "no.json"], "--grid: no.json: no such file"),
        (["--grid", "g.json"], "--grid: g.json: 0: copy is timed by hbmtwin bench kernels"),
        (["--dtype", "int4"], "--dtype: 'int4' is none"),
        (["--memory-gib", "3"], "--memory-gib: caps a device's memory, and a CPU has none of its own; leave it out"),
        (["--out", "."], "--out: . is a directory"),
        (["--picture", "no/b.html"], "--picture: there is no directory no"),
    ],
)
def test_a_group_that_makes_no_sense_is_refused_before_any_is_started(
    shell: Shell, arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # a measurement would end with 1
    Path("g.json").write_text('[{"op": "copy", "bytes": 64}]')
    answer = shell("bench", "collectives", *([] if "--ranks" in arguments else ["--grid", "g.json"]), *arguments)
    assert answer.code == 2
    assert said in answer.err


def test_a_group_that_fails_is_a_failure_and_measured_ones_a_file(
    shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failed(*arguments: object, **options: object) -> Bench:
        raise bench_collectives.GroupFailed("all_reduce of 2 ranks: rank 1 ended with -9; see whether ...")

    monkeypatch.setattr(bench_collectives, "run_collectives", failed)
    answer = shell("bench", "collectives", "--ranks", "2", "--out", "c.json")
    assert (answer.code, answer.err) == (1, "error: all_reduce of 2 ranks: rank 1 ended with -9; see whether ...\n")
    assert not Path("c.json").exists()
    figure = MemoryFigure("communicator_bytes", 5 << 20, "free memory lost", "H")
    done = replace(measured(), memory=(figure,))
    monkeypatch.setattr(bench_collectives, "run_collectives", lambda *arguments, **options: done)
    answer = shell("bench", "collectives", "--ranks", "2,4,8", "--out", "c.json", "--picture", "c.html")
    assert answer.code == 0, answer.err
    assert "communicator_bytes: 5,242,880 bytes (confidence H): free memory lost" in answer.out
    assert read_bench(Path("c.json")) == done
    assert Path("c.html").exists()
    told = json.loads(shell("bench", "collectives", "--ranks", "2", "--json").out)
    assert told.pop("wall_s") >= 0
    assert told == json.loads(done.to_json())


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
