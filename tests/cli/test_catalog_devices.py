"""``hbmtwin catalog devices``: one line each, or every figure with its range and source."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from hbmtwin.api import device, device_figures, devices
from hbmtwin.cli.device_tables import range_text, value_text

Shell = Callable[..., Any]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("memory_bytes", 65_452_113_920, "60.96 GiB"),
        ("context_bytes", 0, "0.00 GiB"),
        ("memory_bandwidth_bytes_per_s", 3.35e12, "3,350 GB/s"),
        ("send_bandwidth_bytes_per_s", 19.6e9, "19.6 GB/s"),
        ("peak_flops_per_s", 165.2e12, "165.2 TFLOP/s"),
        ("attention_launch_ns", 11_000, "11 us"),
        ("host_step_ns", 20_000_000, "20,000 us"),
        ("allreduce_ns", {"2": 4_400, "8": 5_300}, "2: 4.4 us, 8: 5.3 us"),
        ("weight_bandwidth_efficiency", 0.78, "0.78"),
        ("multiprocessor_count", 132, "132"),
    ],
)
def test_a_figure_is_shown_in_the_unit_that_its_name_tells(key: str, value: Any, text: str) -> None:
    assert value_text(key, value) == text


def test_a_range_has_one_unit_and_none_without_width() -> None:
    assert range_text("memory_bytes", 1 << 30, 3 << 29) == "1.00..1.50 GiB"
    assert range_text("sync_ns", 5_000, 50_000) == "5..50 us"
    assert range_text("kv_bandwidth_efficiency", 0.31, 0.8) == "0.31..0.8"
    assert range_text("sync_ns", None, None) == range_text("sync_ns", 7, 7) == ""


def test_the_list_names_every_device_and_what_its_runtime_calls_it(shell: Shell) -> None:
    code, out, err = shell("catalog", "devices")
    assert (code, err) == (0, "")
    for name in devices():
        (line,) = [line for line in out.splitlines() if line.startswith(f"{name} ")]
        assert device(name).family in line
        assert f"{device(name).memory_bytes / (1 << 30):.2f}" in line
        assert device(name).runtime_names[0] in line


def test_all_has_every_figure_with_its_source(shell: Shell) -> None:
    figures = json.loads(shell("catalog", "devices", "--all", "--json").out)
    assert list(figures) == list(devices())
    for name in devices():
        assert {key: value["source"] for key, value in figures[name].items()} == {
            key: figure.source for key, figure in device_figures(name).items()
        }
    assert figures["h100-80gb"]["attention_launch_ns"] == {
        "value": 11_000,
        "low": 9_000,
        "high": 14_000,
        "confidence": "H",
        "source": "aic: fixed part of decode attention, FlashAttention 3",
    }
    code, out, err = shell("catalog", "devices", "--all")
    assert (code, err) == (0, "")
    assert out.count("attention_launch_ns") == len(devices())
    assert "9..14 us" in out
    assert "uncalibrated" in out


@pytest.mark.parametrize("part", [(), ("models",)])
def test_all_is_for_devices(shell: Shell, part: tuple[str, ...]) -> None:
    code, _, err = shell("catalog", *part, "--all")
    assert code == 2
    assert "use hbmtwin catalog devices --all" in err
