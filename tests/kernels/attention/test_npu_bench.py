"""What the benchmark asks of attention kernels is legal for an NPU's ops: shapes, dtypes, contiguity, blocks."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hbmtwin.kernels.attention.npu import NpuKernels
from hbmtwin.kernels.attention.npu_choice import choice_for
from hbmtwin.validation.bench import kernels as bench_kernels
from hbmtwin.validation.bench.kernels import ClockTimer, run_bench
from hbmtwin.validation.bench.records import case

from .npu_documented_ops import DocumentedOps

HEADS = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
LAYER = {"hidden_size": 512, "intermediate_size": 1024, **HEADS}
CASES = {
    "layer": {"tokens": 20, **LAYER},
    "prefill": {"batch": 2, "new_tokens": 20, "context_tokens": 30, **HEADS},
    "decode": {"batch": 2, "context_tokens": 100, **HEADS},
    "paged_decode": {"batch": 4, "context_tokens": 100, "block_size": 128, **HEADS},
    "step": {"batch": 4, "context_tokens": 100, "block_size": 128, "num_layers": 2, "vocab_size": 1000, **LAYER},
}


@pytest.mark.parametrize("family", ["a2", "310p"])
@pytest.mark.parametrize("op", CASES)
def test_a_case_of_the_benchmark_runs(family: str, op: str, torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = NpuKernels(family, choice_for(family))
    monkeypatch.setattr(kernels, "device", "cpu")
    monkeypatch.setattr(bench_kernels, "kernels_for", lambda backend, kind: kernels)
    monkeypatch.setitem(bench_kernels.POOL_BYTES, "cpu", 32 << 20)
    monkeypatch.setitem(sys.modules, "torch_npu", DocumentedOps(torch).module())
    monkeypatch.setenv("ATB_HOME_PATH", "/nowhere")
    made = run_bench([case(op, CASES[op], op)], dtype="float16", rounds=1, timer=ClockTimer())
    assert [point.case.op for point in made.points] == [op]
    assert made.kernels == "npu-flash"
