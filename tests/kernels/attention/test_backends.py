"""Which kernel really runs, what a missing library or device answers, and that nothing is loaded unasked."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from math import prod
from typing import Any

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, kernels_for, load
from hbmtwin.kernels.attention.interface import AttentionKernels, AttentionShape
from hbmtwin.kernels.attention.standard import StandardKernels

FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"
METHODS = ("prefill", "decode", "paged_prefill", "paged_decode")


def _ops(torch: Any, kernels: AttentionKernels, method: str, batch: dict[str, Any]) -> list[str]:
    with torch.autograd.profiler.profile() as profile:
        getattr(kernels, method)(**batch)
    return [event.name for event in profile.function_events]


def _batch(batches: Any, method: str, window: int, dtype: str) -> dict[str, Any]:
    shape, lens = AttentionShape(8, 2, 32, 16, dtype), [40, 40, 21]
    q_lens = [40, 9, 1]
    match method:
        case "prefill":
            return batches.packed(shape, q_lens, lens, window)
        case "decode":
            return batches.padded(shape, lens, window)
        case "paged_prefill":
            return batches.paged(shape, lens, 16, q_lens, window)
    return batches.paged(shape, lens, 16, window=window)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_flash_kernel_is_what_runs(method: str, window: int, dtype: str, batches: Any, torch: Any) -> None:
    """Once for each sequence, in decode for each run of one length, and no product that writes scores."""
    ops = _ops(torch, kernels_for("cpu"), method, _batch(batches, method, window, dtype))
    assert ops.count(FLASH) == (2 if method == "decode" else 3)
    assert not [op for op in ops if "bmm" in op or "softmax" in op or "_math" in op]


@pytest.mark.parametrize("method", METHODS)
def test_standard_attention_writes_its_scores(method: str, batches: Any, torch: Any) -> None:
    ops = _ops(torch, kernels_for("cpu", "standard"), method, _batch(batches, method, 0, "bfloat16"))
    assert ops.count("aten::bmm") == 2 * 3
    assert ops.count("aten::softmax") == 3
    assert FLASH not in ops


def _largest_copy(torch: Any, kernels: AttentionKernels, batch: dict[str, Any]) -> int:
    with torch.autograd.profiler.profile(record_shapes=True) as profile:
        kernels.decode(**batch)
    return max(prod(event.input_shapes[0]) for event in profile.function_events if event.name == "aten::copy_")


class AllAtOnce(StandardKernels):
    """Sequences of a run in one matmul: torch copies their keys, whose heads are not the first dimension."""

    def _rows(self, q: Any, k: Any, v: Any, scale: float) -> Any:
        return self._weighted(self._scores(q, k, scale), v)


def test_decode_copies_answers_and_no_keys(batches: Any, torch: Any) -> None:
    """Neither for heads that share a KV head nor for sequences that go in one call."""
    batch = batches.padded(AttentionShape(8, 2, 32, 32, "float32"), [40, 40, 21])
    answers, keys_of_a_run = 3 * 8 * 32, 2 * 40 * 2 * 32
    for kind in ("flash", "standard"):
        assert _largest_copy(torch, kernels_for("cpu", kind), batch) <= answers
    assert _largest_copy(torch, AllAtOnce("cpu-standard", "cpu"), batch) >= keys_of_a_run


def test_without_torch_the_answer_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BackendUnavailable, match=r"^cpu: .*torch.*; pip install 'hbmtwin\[torch\]'$"):
        kernels_for("cpu")
    with pytest.raises(BackendUnavailable, match=r"^npu: .*; pip install 'hbmtwin\[npu\]'$"):
        kernels_for("npu")


def test_without_a_device_the_answer_says_so(torch: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(BackendUnavailable, match=r"^cuda: torch 2\.\S+ sees no device of this kind; take another"):
        kernels_for("cuda", "standard")


def test_names_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^backend: 'tpu' is none; choose one of cpu, cuda, npu$"):
        kernels_for("tpu")
    with pytest.raises(ValueError, match=r"^kind: 'paged' is none; choose one of flash, standard$"):
        kernels_for("cpu", "paged")


def test_an_npu_without_cann_does_not_keep_a_cpu_from_running() -> None:
    """torch_npu is installed where this matters: torch would load it, and fail."""
    if find_spec("torch") is None:
        pytest.skip("no torch; pip install 'hbmtwin[torch]'")
    code = (
        "import os; from hbmtwin.kernels.attention.backends import load; "
        "print(load('cpu').ones(2).sum().item(), 'TORCH_DEVICE_BACKEND_AUTOLOAD' in os.environ)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "2.0 False\n", done.stderr


def test_a_cpu_runs_where_an_npu_was_refused() -> None:
    if find_spec("torch_npu") is None:
        pytest.skip("no torch_npu; pip install 'hbmtwin[npu]'")
    code = """if True:
        from hbmtwin.kernels.attention.backends import BackendUnavailable, kernels_for
        try:
            kernels_for("npu")
        except BackendUnavailable as refused:
            print(refused)
        print(kernels_for("cpu").name)
        """
    environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, text=True)
    refused, name = done.stdout.splitlines()
    assert refused.startswith("npu: torch")
    assert refused.endswith(("source CANN's set_env.sh first", "a torch built for it are installed"))
    assert name == "cpu-flash"


def test_importing_kernels_loads_no_torch() -> None:
    modules = ("backends", "checked", "cpu", "cuda", "interface", "reference", "standard", "validator")
    code = (
        f"import sys, hbmtwin, hbmtwin.kernels; assert 'hbmtwin.kernels.attention' not in sys.modules; "
        f"from hbmtwin.kernels.attention import {', '.join(modules)}; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_load_gives_torch(torch: Any) -> None:
    assert load("cpu") is torch
