"""A figure's unit goes by its name, and no number of it is written as a power."""

from __future__ import annotations

import pytest

from hbmtwin.dashboard.figure_text import figure_text


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("host_step_ns", 20_000_000, "20 ms"),
        ("host_step_ns", 8_000_000, "8,000 µs"),
        ("allreduce_ns.8", 25_500, "25.5 µs"),
        ("memory_bandwidth_bytes_per_s", 8e11, "800 GB/s"),
        ("peak_flops_per_s", 2.8e14, "280 TFLOP/s"),
        ("kv_bandwidth_efficiency", 0.31, "31.0 %"),
        ("non_torch_bytes", 0.0, "0 B"),
        ("graph_bytes", 2.0**28, "256.00 MiB"),
        ("attention_block_tokens", 128, "128"),
    ],
)
def test_a_figure_has_its_unit(name: str, value: float, told: str) -> None:
    assert figure_text(name, value) == told
