"""A report of ``hbmtwin validate run`` with both of its parts, in round numbers: no torch is needed to have one."""

from __future__ import annotations

from typing import Any

GIB = 1 << 30
COUNTERS = ("reserved", "allocated", "requested", "driver_free")


def error(quantity: str, differing: int, percent: float, worst_step: int) -> dict[str, Any]:
    """A row of errors."""
    return {
        "quantity": quantity,
        "steps": 4,
        "differing": differing,
        "mape_percent": percent,
        "p50_percent": percent,
        "p95_percent": percent,
        "worst_step": worst_step,
        "worst_predicted": 0,
        "worst_measured": 0,
    }


REPORT: dict[str, Any] = {
    "run": "llama-2-7b on ascend-910b4, paged",
    "backend": "npu",
    "agrees": True,
    "memory": {
        "numbers_compared": 12_345_678,
        "steps": {
            "step": [0, 1, 2, 3],
            "measured": {name: [GIB, 2 * GIB, 2 * GIB, 3 * GIB] for name in COUNTERS},
            "predicted": {name: [GIB, 2 * GIB, 2 * GIB, 3 * GIB] for name in COUNTERS},
        },
        "errors": [error(name, 0, 0.0, -1) for name in COUNTERS],
    },
    "step_times": {
        "measured_on": "an NPU",
        "predicted_for": "ascend-910b4",
        "basis": "default, uncalibrated",
        "total_predicted_ns": 9_000_000_000,
        "total_measured_ns": 10_000_000_000,
        "steps_of_the_run": 4,
        "steps": {
            "step": [0, 1, 2, 3],
            "kind": ["prefill", "decode", "decode", "decode"],
            "measured_ns": [200_000_000, 20_000_000, 20_000_000, 22_000_000],
            "predicted_ns": [180_000_000, 18_000_000, 18_000_000, 20_000_000],
            "measured_attention_ns": None,
            "predicted_attention_ns": None,
        },
        "errors": [error("step time (ns)", 4, 9.77, 3), error("  decode steps", 3, 9.7, 3)],
    },
    "kernels": None,
}
