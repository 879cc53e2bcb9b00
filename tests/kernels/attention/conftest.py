"""Kernels that are held to the reference, and batches to hold them with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, kernels_for, load
from hbmtwin.kernels.attention.cuda import CudaKernels
from hbmtwin.kernels.attention.interface import AttentionKernels
from hbmtwin.validation.attention_numerics import AttentionBatches, largest_difference, tolerance_of


@pytest.fixture(scope="session")
def torch() -> Any:
    """torch for the CPU on one thread, or a skip that says what to install."""
    try:
        loaded = load("cpu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    loaded.set_num_threads(1)
    return loaded


@pytest.fixture(params=["cpu-flash", "cpu-standard", "cuda-flash"])
def kernels(request: pytest.FixtureRequest, torch: Any) -> AttentionKernels:
    """Each kind; CUDA's with tensors on the CPU: its own branches, the CPU's arithmetic."""
    if request.param == "cuda-flash":
        return CudaKernels("cuda-flash", "cpu")
    return kernels_for("cpu", "standard" if request.param == "cpu-standard" else "flash")


@pytest.fixture(scope="session")
def batches(torch: Any) -> AttentionBatches:
    """What batches are made with."""
    return AttentionBatches()


@pytest.fixture(scope="session")
def differs() -> Callable[..., float]:
    """Largest difference from the reference as a multiple of the tolerance: 1 or less is right, NaN is infinite."""

    def measured(kernels: AttentionKernels, method: str, batch: dict[str, Any]) -> float:
        return largest_difference(kernels, method, batch) / tolerance_of(kernels, batch)

    return measured
