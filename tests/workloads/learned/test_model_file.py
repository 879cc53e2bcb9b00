"""The file of a learned model: what is written comes back, and what is wrong is told with its place."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbmtwin.workloads import WorkloadError
from hbmtwin.workloads.learned.measured import Measured
from hbmtwin.workloads.learned.model import Client, Family, LengthWindow, Sharing, TrafficModel, Window
from hbmtwin.workloads.learned.model_file import model_lines, read_model, write_model

TABLE = Measured((0.0, 0.25, 0.25, 1.0), (4, 9, 11, 300))
LENGTHS = LengthWindow(0.0, TABLE, (TABLE,))
SHARING = Sharing(16, 32, (0.1, 0.7), ((0.0, 0.5), (0.25, 0.5, 1.0)), (0.5, 2.0, 61.25), (100,))
MODEL = TrafficModel(
    source='a "trace"\nwith \\ in its name',
    span_s=1500.5,
    window_s=600.0,
    clients=(
        Client(
            0,
            (Window(0.0, 1.5, "gamma", 0.25), Window(1200.0, 2e-05, "weibull", 1.1)),
            (LENGTHS, LengthWindow(600.0, TABLE, (TABLE, TABLE), (50,))),
            minute_cv=0.2,
            sharing=SHARING,
        ),
        Client(7, (Window(600.0, 3.0, "gamma", 1.0),)),
    ),
    pooled=LENGTHS,
    notes=("one", "two"),
)
RATES = st.floats(1e-6, 1e6)
WINDOWS = st.lists(
    st.tuples(st.integers(0, 9), RATES, st.sampled_from(["gamma", "weibull"]), st.floats(1e-9, 1e6)),
    min_size=1,
    unique_by=lambda window: window[0],
).map(sorted)


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    for name in ("model.toml", "model.toml.gz"):
        write_model(MODEL, tmp_path / name)
        assert read_model(tmp_path / name) == MODEL
        first = (tmp_path / name).read_bytes()
        write_model(MODEL, tmp_path / name)
        assert (tmp_path / name).read_bytes() == first
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.toml", "model.toml.gz"]


def test_other_programs_read_it(tmp_path: Path) -> None:
    tree = tomllib.loads("\n".join(model_lines(MODEL)))
    assert tree["hbmtwin_traffic_model"] == 1
    assert tree["source"] == MODEL.source
    assert tree["clients"][0]["windows"] == [[0, 1.5, "gamma", 0.25], [1200, 2e-05, "weibull", 1.1]]
    assert tree["clients"][0]["lengths"][1]["prompt_below"] == [50]
    assert tree["clients"][1].keys() == {"id", "windows"}


@given(WINDOWS, st.floats(0, 10), st.text())
def test_any_model_comes_back(
    tmp_path_factory: pytest.TempPathFactory,
    windows: list[tuple[int, float, Family, float]],
    minute_cv: float,
    source: str,
) -> None:
    rows = tuple(Window(10.0 * index, rate, family, shape) for index, rate, family, shape in windows)
    model = TrafficModel(source, 100.0, 10.0, (Client(3, rows, (LENGTHS,), minute_cv),))
    path = tmp_path_factory.getbasetemp() / "any.toml"
    write_model(model, path)
    assert read_model(path) == model


TEXT = "\n".join(model_lines(MODEL))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("hbmtwin_traffic_model = 1", "", "no key 'hbmtwin_traffic_model'; a model begins with it"),
        ("hbmtwin_traffic_model = 1", "hbmtwin_traffic_model = 2", "is 2; this hbmtwin reads version 1"),
        ("span_s = 1500.5", "", "no key 'span_s'; it is needed"),
        ("span_s = 1500.5", "span_s = 'x'", "span_s: this is 'x'; it must be a finite number"),
        ("span_s = 1500.5", "span_s = inf", "span_s: this is 'inf'; it must be a finite number"),
        ("span_s = 1500.5", "span_s = -1", "span_s is above 0 and up to 1e9, not -1.0"),
        ("span_s = 1500.5", "span_x = 1", "unknown key 'span_x'; did you mean 'span_s'?"),
        ("window_s = 600", "window_s = true", "window_s: this is 'True'; it must be a finite number"),
        ("id = 0", "id = 0.5", "clients[0].id: this is '0.5'; it must be a whole number"),
        ("id = 0", "id = -1", "clients[0]: id is from 0 to 524287, not -1"),
        ("id = 7", "id = 0", "each client has its own id"),
        ("minute_cv = 0.2", "minute_cw = 0.2", "clients[0]: unknown key 'minute_cw'; did you mean 'minute_cv'?"),
        ("minute_cv = 0.2", "minute_cv = 11", "clients[0]: minute_cv is from 0 to 10, not 11.0"),
        ('"weibull", 1.1]', '"pareto", 1.1]', "clients[0].windows[1]: the family is 'pareto'; a window is [start_s,"),
        ('"weibull", 1.1]', '"weibull"]', "clients[0].windows[1]: this is [1200, 2e-05, 'weibull']; it must be a list"),
        ('"weibull", 1.1]', '"weibull", "x"]', "clients[0].windows[1][3]: this is 'x'; it must be a finite number"),
        ('"weibull", 1.1]', '"weibull", 0]', "clients[0]: shape is from 1e-9 to 1e6, not 0.0"),
        ("[1200, 2e-05,", "[1200, -1,", "clients[0]: request_rate is above 0 and up to 1e6, not -1.0"),
        ("[1200, 2e-05,", "[1300, 2e-05,", "client 0: start_s of a window is a multiple of window_s below span_s"),
        ("[1200, 2e-05,", "[1800, 2e-05,", "client 0: start_s of a window is a multiple of window_s below span_s"),
        ("[1200, 2e-05,", "[0, 2e-05,", "clients[0]: windows must be in order of start_s"),
        ("start_s = 600", "start_s = 0", "clients[0]: lengths must be in order of start_s"),
        ("prompt_below = [50]", "", "clients[0].lengths[1]: 0 bounds in prompt_below need 1 tables of output"),
        ("prompt_below = [50]", "prompt_below = [5.5]", "clients[0].lengths[1].prompt_below[0]: this is '5.5'"),
        ("prompt_below = [50]", "prompt_below = 5", "lengths[1].prompt_below: this is '5'; it must be a list"),
        ("tokens = [4, 9,", "tokens = [9, 4,", "pooled.prompt_tokens: tokens are from 1 to 2^40 and must not fall"),
        ("tokens = [4, 9,", "tokens = ['4', 9,", "prompt_tokens.tokens[0]: this is '4'; it must be a whole"),
        ("block_size = 16", "block_size = 0", "clients[0].sharing: block_size is from 1 to 2^40, not 0"),
        ("follow_share = [0.1, 0.7]", "follow_share = [0.1, 1.7]", "clients[0].sharing: follow_share is from 0 to 1"),
        ("follow_share = [0.1, 0.7]", "follow_share = [0.1]", "clients[0].sharing: 1 bounds in prompt_below need 2 of"),
        ("[0.25, 0.5, 1]", "[0.25, 0.5, 2]", "clients[0].sharing: shared_part has two or more parts from 0 to 1"),
        ("[0.25, 0.5, 1]", "3", "clients[0].sharing.shared_part[1]: this is 3; it must be a list of numbers"),
        ("follow_after_s = [0.5,", "follow_after_s = [5,", "clients[0].sharing: follow_after_s has two or more times"),
        ('notes = ["one", "two"]', 'notes = ["one", 2]', "notes[1]: this is '2'; it must be a text in quotes"),
        ("[pooled]", "[pooled", "this is no TOML ("),
    ],
)
def test_a_slip_is_told_with_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in TEXT
    path = tmp_path / "model.toml"
    path.write_text(TEXT.replace(old, new, 1))
    with pytest.raises(WorkloadError) as caught:
        read_model(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message.count(str(path)) == 1
    assert said in message


def test_parts_that_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "model.toml"
    without = TrafficModel("", 600.0, 600.0, (Client(0, (Window(0.0, 1.0, "gamma", 1.0),), (LENGTHS,)),))
    text = "\n".join(model_lines(without))
    path.write_text(text[: text.index("[[clients.lengths]]")])
    with pytest.raises(WorkloadError, match=r"client 0 has no lengths, and there is no \[pooled\]; give one"):
        read_model(path)
    path.write_text("hbmtwin_traffic_model = 1\nspan_s = 1\nwindow_s = 1\nclients = []\n")
    with pytest.raises(WorkloadError, match="clients is empty; give it one or more tables"):
        read_model(path)
    path.write_text("hbmtwin_traffic_model = 1\nspan_s = 1\nwindow_s = 1\n[[clients]]\nid = 0\nwindows = []\n")
    with pytest.raises(WorkloadError, match="no client sends anything; give one a window"):
        read_model(path)
