"""The cases that go on any device: on a real one where there is one, on the CPU always."""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, kernels_for
from hbmtwin.kernels.attention.cpu import CpuKernels
from hbmtwin.kernels.attention.validator import KernelArgumentError
from hbmtwin.validation.attention_numerics import differences


@pytest.mark.parametrize("backend", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("kind", ["flash", "standard"])
def test_kernels_agree_with_the_reference(backend: Any, kind: Any, torch: Any) -> None:
    try:
        kernels = kernels_for(backend, kind)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    found = list(differences(kernels))
    assert len(found) == 2 * 2 * 2 * 6
    assert [one for one in found if not one.right] == []
    if backend == "cpu":
        assert [one for one in found if one.refused] == []
        assert all(one.largest > one.tolerance / 100 for one in found)  # they round, and are not the reference itself


def test_what_is_wrong_and_what_is_refused_is_told(torch: Any) -> None:
    class Partial(CpuKernels):
        """Forgets windows in decode, and takes no INT8."""

        def decode(self, q: Any, k: Any, v: Any, *, kv_lens: Any, scale: float, window: int = 0) -> Any:
            return super().decode(q, k, v, kv_lens=kv_lens, scale=scale)

        def paged_decode(self, *args: Any, **batch: Any) -> Any:
            if batch.get("k_scale") is not None:
                raise KernelArgumentError("k_cache", "is int8; give float16")
            return super().paged_decode(*args, **batch)

    found = list(differences(Partial("cpu-flash", "cpu"), ["float16"]))
    wrong = {(one.method, one.case) for one in found if not one.right}
    assert wrong == {("decode", f"{heads}, window 100") for heads in ("MHA", "GQA 8 to 1")}
    refused = [one for one in found if one.refused]
    assert len(refused) == 2 * 2 * 2
    assert {one.refused for one in refused} == {"k_cache: is int8; give float16"}
    assert all("INT8" in one.case for one in refused)
