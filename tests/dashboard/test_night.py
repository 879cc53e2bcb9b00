"""Figures on a dark page: what is meant for a white one is turned wherever it stands, and can be seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import plotly.graph_objects as go
import pytest

from hbmtwin.api import PRESETS, Result, Scenario, run
from hbmtwin.dashboard.address_map import address_map
from hbmtwin.dashboard.figures import memory_over_time
from hbmtwin.dashboard.night import at_night
from hbmtwin.dashboard.palette import (
    ALARM,
    ARRIVALS,
    HOLE,
    INK,
    LEAST,
    MEMORY,
    MOST_SERVED,
    NIGHT,
    NO_NUMBER,
    OUTPUTS,
    PAPER,
    PROMPTS,
    ROOF,
    SLOWEST,
    policy_colours,
)

from . import chinese_of_capacity

FREE = ("kv_pool_free", "driver_free")


def light_of(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, as WCAG 2 has it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((light_of(one), light_of(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def turned(colour: str) -> str:
    return NIGHT.get(colour, colour)


def strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from strings(inner)


@pytest.fixture(scope="module")
def dead() -> Result:
    crowd = ["workload.num_prompts=60", "workload.request_rate=8", "workload.prompt_tokens=400"]
    return run(Scenario.load(preset="doubling", overrides=crowd))


def figures(result: Result) -> list[go.Figure]:
    return [memory_over_time({"doubling": result}), address_map(result, 10**10)]


def test_contrast_by_hand() -> None:
    assert contrast("#000000", "#FFFFFF") == pytest.approx(21)
    assert contrast("#777777", "#FFFFFF") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("colour", [*policy_colours([*PRESETS, *"abcd"]).values(), ALARM, ARRIVALS, PROMPTS, OUTPUTS])
def test_lines_and_marks_can_be_seen_on_either_page(colour: str) -> None:
    assert contrast(colour, PAPER) > 2.9
    assert contrast(turned(colour), turned(PAPER)) > 3.5


def test_words_can_be_read_on_either_page() -> None:
    assert contrast(INK, PAPER) > 12
    assert contrast(turned(INK), turned(PAPER)) > 12
    assert contrast(turned(ROOF), turned(PAPER)) > 12
    assert contrast(turned(ALARM), turned(PAPER)) > 4.5


def test_what_is_free_stands_back_on_either_page() -> None:
    for key in FREE:
        colour = MEMORY[key].colour
        assert 1.1 < contrast(colour, PAPER) < 1.7
        assert 1.1 < contrast(turned(colour), turned(PAPER)) < 1.7
    in_use = [layer.colour for key, layer in MEMORY.items() if key not in FREE and key != "pending_events"]
    assert min(contrast(colour, PAPER) for colour in in_use) > 1.8
    assert min(contrast(turned(colour), turned(PAPER)) for colour in in_use) > 3


def test_scales_of_heat_maps_grow_away_from_either_page() -> None:
    for middle, end in (("#E69F00", SLOWEST), ("#56B4E9", MOST_SERVED)):
        for page in (lambda colour: colour, turned):
            steps = [contrast(page(colour), page(PAPER)) for colour in (LEAST, middle, end)]
            assert 1.1 < steps[0] < steps[1] < steps[2] > 10
    assert contrast(turned(NO_NUMBER), turned(LEAST)) > 1.7


def test_no_two_meanings_share_a_colour_in_the_night_either() -> None:
    lines = policy_colours([*PRESETS, "one", "two", "three", "four"])
    colours = [turned(layer.colour) for layer in MEMORY.values()] + [turned(line) for line in lines.values()]
    assert len(set(colours)) == len(colours)


def test_no_colour_of_the_day_is_left(dead: Result) -> None:
    for figure in figures(dead):
        of_day = set(NIGHT) & set(strings(json.loads(figure.to_json())))
        assert {PAPER, INK} <= of_day
        left = set(NIGHT) & set(strings(json.loads(at_night(figure).to_json())))
        assert left <= ({INK} if figure.layout.updatemenus else set()), "the buttons are bright, their words dark"


@pytest.mark.parametrize("drawn", chinese_of_capacity.FIGURES, ids=lambda drawn: drawn.__name__)
def test_figures_of_capacity_can_be_seen_at_night(drawn: Callable[..., object]) -> None:
    for figure in chinese_of_capacity.FIGURES[drawn]():
        told = json.loads(at_night(figure).to_json())
        assert not set(NIGHT) & set(strings(told))
        for trace in told["data"]:
            if not (colours := {colour for colour in strings(trace) if len(colour) == 7 and colour[0] == "#"}):
                continue
            most = max(contrast(colour, NIGHT[PAPER]) for colour in colours)
            assert most > (1.4 if trace["type"] == "bar" else 2.5), "what is free stands back"


def test_everything_else_stays(dead: Result) -> None:
    for bright, dark in zip(figures(dead), map(at_night, figures(dead)), strict=True):
        for before, after in zip(bright.data, dark.data, strict=True):
            assert (before.name, before.hovertemplate) == (after.name, after.hovertemplate)
            assert json.loads(before.to_json())["y"] == json.loads(after.to_json())["y"]
        for part in ("annotations", "shapes"):
            assert len(bright.layout[part]) == len(dark.layout[part])
        assert [note.text for note in bright.layout.annotations] == [note.text for note in dark.layout.annotations]


def test_turning_twice_is_turning_once(dead: Result) -> None:
    assert not set(NIGHT) & set(NIGHT.values())
    once, twice = figures(dead)[0], figures(dead)[0]
    assert at_night(once).to_json() == at_night(at_night(twice)).to_json()


def test_a_colour_in_a_scale_and_one_shape_of_two_are_turned() -> None:
    figure = go.Figure(go.Heatmap(z=[[0, 1]], colorscale=[[0, MEMORY["driver_free"].colour], [1, "#0072B2"]]))
    figure.add_shape(type="line", x0=0, x1=1, y0=0, y1=1, line_color="#0072B2")
    figure.add_shape(type="rect", x0=0, x1=1, y0=0, y1=1, fillcolor=HOLE)
    at_night(figure)
    scale: Any = figure.data[0].colorscale
    assert [colour for _, colour in scale] == [NIGHT[MEMORY["driver_free"].colour], "#0072B2"]
    assert [shape.fillcolor for shape in figure.layout.shapes] == [None, NIGHT[HOLE]]
    assert figure.layout.shapes[0].line.color == "#0072B2"
