"""ServeGen's files: both layouts make one model, clients without lengths take the mix, and slips are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hbmtwin.workloads import WorkloadError
from hbmtwin.workloads.learned.model import Window
from hbmtwin.workloads.learned.servegen import is_servegen, read_servegen

TRACES = Path(__file__).resolve().parents[4] / "shared" / "traces"
R1, M_SMALL = (TRACES / f"servegen_{name}.jsonl.gz" for name in ("reason_deepseek-r1", "language_m-small"))
needs_traces = pytest.mark.skipif(not R1.exists(), reason="the ServeGen files are not beside this checkout")

WINDOWS: list[list[Any]] = [
    [0, 0.5, 0.9, "Gamma", 1.2, 1.7],
    [600, 0.0, 0.0, None, None, None],
    [1200, 0.01, 1.5, None, None, None],
    [1800, 0.25, 2.0, "Weibull", 0.6, 2.6],
]
DATASET = {"0": {"input_tokens": [[4, 90], [0.25, 0.75]], "output_tokens": [[0, 7], [0.5, 0.5]]}}
SILENT = {"client": 2, "windows": [[0, 1.5, 1.0, "Gamma", 1.0, 0.67]], "dataset": {"0": []}}


def line(**changes: Any) -> dict[str, Any]:
    return {"client": 0, "windows": WINDOWS, "dataset": DATASET} | changes


def lines_of(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_a_worked_example(tmp_path: Path) -> None:
    model = read_servegen(lines_of(tmp_path / "x.jsonl", line(), SILENT))
    assert (model.window_s, model.span_s) == (600.0, 2400.0)
    assert [client.id for client in model.clients] == [0, 2]
    assert model.clients[0].windows == (
        Window(0.0, 0.5, "gamma", 1.2),
        Window(1200.0, 0.01, "gamma", 1.0),
        Window(1800.0, 0.25, "weibull", 0.6),
    )
    (lengths,) = model.clients[0].lengths
    assert [lengths.prompt_tokens.at(u) for u in (0.1, 0.24, 0.26, 0.9)] == [4, 4, 90, 90]
    assert [lengths.output_tokens[0].at(u) for u in (0.4, 0.6)] == [1, 7]
    assert model.clients[1].lengths == ()
    assert model.pooled == lengths
    assert model.notes == ("no lengths of their own have clients 2: theirs are the mix of the others', by requests",)


def test_upstream_s_folder_is_the_same_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    rows = [",".join("" if value is None else str(value) for value in window) for window in WINDOWS]
    (folder / "chunk-10-trace.csv").write_text("\n".join(rows) + "\n")
    texts = {field: str(dict(zip(*table, strict=True))) for field, table in DATASET["0"].items()}
    (folder / "chunk-10-dataset.json").write_text(json.dumps({"0": texts}))
    (folder / "chunk-2-trace.csv").write_text("0,1.5,1.0,Gamma,1.0,0.67\n")
    (folder / "notes.txt").write_text("not a chunk")
    assert is_servegen(folder)
    model = read_servegen(folder)
    same = read_servegen(lines_of(tmp_path / "x.jsonl", SILENT, line(client=10)))
    assert (model.clients, model.pooled, model.span_s) == (same.clients, same.pooled, same.span_s)


def test_the_mix_counts_each_table_as_often_as_it_is_drawn_from(tmp_path: Path) -> None:
    """Three quarters of all requests with lengths are client 1's, and two thirds of those come in its first table."""

    def fixed(tokens: int) -> dict[str, Any]:
        return {field: [[tokens], [1.0]] for field in ("input_tokens", "output_tokens")}

    windows = [[0, 2.0, 1.0, "Gamma", 1.0, 0.5], [600, 1.0, 1.0, "Gamma", 1.0, 1.0]]
    model = read_servegen(
        lines_of(
            tmp_path / "x.jsonl",
            {"client": 0, "windows": [[0, 1.0, 1.0, "Gamma", 1.0, 1.0]], "dataset": {"0": fixed(10)}},
            {"client": 1, "windows": windows, "dataset": {"0": fixed(20), "600": fixed(30)}},
            SILENT,
        )
    )
    assert model.pooled is not None
    at = model.pooled.prompt_tokens.at
    assert [at(u) for u in (0.2, 0.24, 0.26, 0.74, 0.76, 0.9)] == [10, 10, 20, 20, 30, 30]


def test_other_fields_are_named(tmp_path: Path) -> None:
    fields = {"text_tokens": [[5], [1]], "output_tokens": [[6], [1]], "image_count": [[1], [1]]}
    model = read_servegen(lines_of(tmp_path / "x.jsonl", line(dataset={"0": fields})))
    assert model.clients[0].lengths[0].prompt_tokens.at(0.5) == 5
    assert model.notes == ("not in the model: image_count",)


def test_a_text_is_data_and_never_run(tmp_path: Path) -> None:
    trap = f"__import__('pathlib').Path({str(tmp_path / 'trap')!r}).touch()"
    fields = {"input_tokens": trap, "output_tokens": "{1: 1.0}"}
    with pytest.raises(WorkloadError, match="input_tokens: this is no Python dict of value: probability"):
        read_servegen(lines_of(tmp_path / "x.jsonl", line(dataset={"0": fields})))
    assert not (tmp_path / "trap").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"client": -1}, "client is '-1'; it must be a whole number from 0"),
        ({"client": True}, "client is 'True'; it must be"),
        ({"windows": 5}, "windows is '5'; it must be a list of windows"),
        ({"windows": [[0, 1.0]]}, r"windows\[0\] is \[0, 1.0\]; it must be start_s, rate, cv, family, shape, scale"),
        ({"windows": [[0, -1, 1, "Gamma", 1, 1]]}, r"windows\[0\]: rate is '-1'; it must be a number from 0 to 1e9"),
        ({"windows": [[0, 1, 1, "Pareto", 1, 1]]}, r"windows\[0\]: the family is 'Pareto'; it must be Gamma"),
        ({"windows": [[0, 1, 1, "Gamma", 0, 1]]}, r"windows\[0\]: the shape is '0'; it must be a number above 0"),
        ({"windows": [[0, 1, 1, "Gamma", None, 1]]}, r"windows\[0\]: the shape is 'None'"),
        ({"windows": [WINDOWS[3], WINDOWS[0]]}, r"windows\[1\] starts at 0 s; windows must be in order"),
        ({"windows": [[5, 1, 1, "Gamma", 1, 1], [605, 1, 1, "Gamma", 1, 1]]}, "client 0: start_s of a window is a"),
        ({"dataset": []}, r"dataset is '\[\]'; it must be an object"),
        ({"dataset": {"x": {}}}, r"dataset\['x'\]: this is no time"),
        ({"dataset": {"0": [1]}}, r"dataset\['0'\] is '\[1\]'; it must be an object of field: lengths"),
        ({"dataset": {"0": {"a": 1}}}, "needs input_tokens or text_tokens, and output_tokens; has a"),
        ({"dataset": {"0": {"input_tokens": 3, "output_tokens": "{}"}}}, "input_tokens is '3'; it must be"),
        ({"dataset": {"0": {"input_tokens": [[-1], [1]], "output_tokens": "{}"}}}, "'-1' among the lengths"),
        ({"dataset": {"0": {"input_tokens": [["a"], [1]], "output_tokens": "{}"}}}, "'a' among the lengths"),
        ({"dataset": {}}, "no client has lengths; one data set at least must not be empty"),
        ({"windows": []}, "no client sends anything"),
    ],
)
def test_a_slip_is_told_with_its_place(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = lines_of(tmp_path / "x.jsonl", line(**changes))
    with pytest.raises(WorkloadError, match=said) as caught:
        read_servegen(path)
    assert str(caught.value).startswith(f"{path}:")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no client in it"),
        ("{", "x.jsonl:1: this is no JSON"),
        ("[]\n", "x.jsonl:1: no object with client, windows and dataset"),
        ('{"client": 0, "windows": []}\n', "x.jsonl:1: no object with client, windows and dataset"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    with pytest.raises(WorkloadError, match=said):
        read_servegen(path)


def test_what_is_one(tmp_path: Path) -> None:
    assert is_servegen(lines_of(tmp_path / "x.jsonl", line()))
    assert not is_servegen(lines_of(tmp_path / "y.jsonl", {"timestamp": 0, "input_length": 5}))
    assert not is_servegen(tmp_path)
    assert not is_servegen(tmp_path / "nowhere.jsonl")


@needs_traces
def test_deepseek_r1_has_its_published_figures() -> None:
    model = read_servegen(R1)
    assert is_servegen(R1)
    assert len(model.clients) == 73
    assert (model.span_s, model.window_s) == (86_400.0, 600.0)
    assert model.request_rate == pytest.approx(16.0, abs=0.05)
    windows = [window for client in model.clients for window in client.windows]
    assert sum(w.family == "gamma" for w in windows) == 2589
    assert sum(w.family == "weibull" for w in windows) == 522
    sent = sorted((model.expected_requests((client,)) for client in model.clients), reverse=True)
    assert sent[0] / sum(sent) == pytest.approx(0.286, abs=0.001)
    assert sum(sent[:10]) / sum(sent) == pytest.approx(0.677, abs=0.001)
    assert model.notes == ("not in the model: reason_ratio",)


@needs_traces
def test_m_small_says_whose_lengths_are_missing() -> None:
    model = read_servegen(M_SMALL)
    assert [client.id for client in model.clients if not client.lengths] == [1, 5, 8, 11, 38]
    assert model.request_rate == pytest.approx(1174, abs=1)
    assert "clients 1, 5, 8, 11, 38" in model.notes[0]
