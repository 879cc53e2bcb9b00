"""The NPU kernels on an NPU, against the float64 reference. Skipped where there is none, which is everywhere so far.

``pytest tests/kernels/attention/test_npu_device.py -rs`` on an Ascend server; a refusal of an op names it.
"""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, kernels_for
from hbmtwin.kernels.attention.checked import Checked
from hbmtwin.kernels.attention.interface import AttentionShape
from hbmtwin.kernels.attention.npu import NpuKernels
from hbmtwin.kernels.attention.reference import ReferenceKernels

LIMIT = {"float16": 1e-2, "bfloat16": 2e-2}
INT8_LIMIT = 4e-2
"""As accelerators are usually held to; what a card gives is still to be seen."""
SHAPES = {
    "32 of 8, 128: TND": (32, 8, 128),
    "14 of 2, 64: BNSD": (14, 2, 64),
    "16 of 4, 256: BNSD": (16, 4, 256),
}
Q_LENS, LENS = [3, 3, 1, 1, 20, 1], [3, 3, 9, 9, 150, 129]
GARBAGE = 50.0


@pytest.fixture(scope="module")
def npu() -> NpuKernels:
    try:
        made: Any = kernels_for("npu")
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    return made


@pytest.fixture(params=LIMIT)
def dtype(request: pytest.FixtureRequest, npu: NpuKernels) -> str:
    if npu.family == "310p" and request.param == "bfloat16":
        pytest.skip("a 310P has no bfloat16")
    return str(request.param)


def distance(npu: NpuKernels, method: str, arguments: dict[str, Any]) -> float:
    there = {name: value.to("npu") if hasattr(value, "to") else value for name, value in arguments.items()}
    made = getattr(Checked(npu), method)(**there).cpu().double()
    far = (made - getattr(ReferenceKernels(), method)(**arguments)).abs().max()
    return float(far.nan_to_num(float("inf")))


@pytest.mark.parametrize("heads", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("window", [0, 7])
@pytest.mark.parametrize("method", ["prefill", "decode", "paged_prefill", "paged_decode"])
def test_every_method(
    npu: NpuKernels, heads: tuple[int, int, int], dtype: str, window: int, method: str, batches: Any
) -> None:
    shape = AttentionShape(*heads, heads[2], dtype)
    arguments = {
        "prefill": lambda: batches.packed(shape, Q_LENS, LENS, window),
        "decode": lambda: batches.padded(shape, LENS, window, garbage=GARBAGE),
        "paged_prefill": lambda: batches.paged(shape, LENS, 128, Q_LENS, window, garbage=GARBAGE),
        "paged_decode": lambda: batches.paged(shape, LENS, 128, window=window, garbage=GARBAGE),
    }[method]()
    assert distance(npu, method, arguments) < LIMIT[dtype]


@pytest.mark.parametrize("per_head", [False, True], ids=["per token", "per token and head"])
def test_int8(npu: NpuKernels, per_head: bool, dtype: str, batches: Any) -> None:
    if npu.family == "310p":
        pytest.skip("INT8 caches are for FIA")
    plain = batches.paged(AttentionShape(32, 8, 128, 128, dtype), LENS, 128, garbage=GARBAGE)
    assert distance(npu, "paged_decode", batches.int8(plain, per_head=per_head)) < INT8_LIMIT


def test_a_write_lands_in_its_slots(npu: NpuKernels, torch: Any) -> None:
    new, cache = torch.randn(5, 8, 128).half(), torch.zeros(3, 128, 8, 128).half().to("npu")
    values, slots = torch.zeros_like(cache), torch.tensor([0, 383, 128, 5, 200], dtype=torch.int32)
    npu.write_kv(new.to("npu"), -new.to("npu"), cache, values, slots=slots.to("npu"))
    assert cache.cpu().view(-1, 8, 128)[slots.long()].equal(new)
    assert values.cpu().equal(-cache.cpu())
    assert int(cache.cpu().ne(0).any(-1).any(-1).sum()) == 5
