"""The cases that go on any device: on a real one where there is one, on the CPU always."""

from __future__ import annotations

from typing import Any

import pytest

from hbmtwin.kernels.attention.backends import BackendUnavailable, kernels_for
from hbmtwin.kernels.attention.cpu import CpuKernels
from hbmtwin.kernels.attention.validator import KernelArgumentError
from hbmtwin.validation import attention_numerics
from hbmtwin.validation.attention_numerics import TOLERANCE, differences, main


@pytest.mark.parametrize("backend", ["cpu", "cuda", "npu"])
@pytest.mark.parametrize("kind", ["flash", "standard"])
def test_kernels_agree_with_the_reference(backend: Any, kind: Any, torch: Any) -> None:
    try:
        kernels = kernels_for(backend, kind)
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    found = list(differences(kernels))
    assert len(found) == 2 * 2 * (2 * 6 + 1)
    assert [one for one in found if not one.right] == []
    if backend == "cpu":
        assert [one for one in found if one.refused] == []
        rounded = [one for one in found if one.method != "write_kv"]
        assert all(one.largest > one.tolerance / 100 for one in rounded)  # they are not the reference itself


def test_what_is_wrong_and_what_is_refused_is_told(torch: Any) -> None:
    class Partial(CpuKernels):
        """Forgets windows in decode, takes no INT8, fails where some tokens are in blocks, writes one slot further."""

        def write_kv(self, k: Any, v: Any, k_cache: Any, v_cache: Any, *, slots: Any) -> None:
            super().write_kv(k, v, k_cache, v_cache, slots=(slots + 1) % k_cache.flatten(0, 1).size(0))

        def paged_prefill(self, *args: Any, **batch: Any) -> Any:
            raise RuntimeError("No available kernel.\nAborting execution.")

        def decode(self, q: Any, k: Any, v: Any, *, kv_lens: Any, scale: float, window: int = 0) -> Any:
            return super().decode(q, k, v, kv_lens=kv_lens, scale=scale)

        def paged_decode(self, *args: Any, **batch: Any) -> Any:
            if batch.get("k_scale") is not None:
                raise KernelArgumentError("k_cache", "is int8; give float16")
            return super().paged_decode(*args, **batch)

    found = list(differences(Partial("cpu-flash", "cpu"), ["float16"]))
    wrong = {(one.method, one.case) for one in found if not one.right and not one.failed}
    failed = [one for one in found if one.failed]
    assert {(one.method, one.failed, one.right) for one in failed} == {
        ("paged_prefill", "FAILED: No available kernel.", False)
    }
    assert len(failed) == 4
    assert wrong == {
        *(("decode", f"{heads}, window 100") for heads in ("MHA", "GQA 8 to 1")),
        *(("write_kv", heads) for heads in ("MHA", "GQA 8 to 1")),
    }
    refused = [one for one in found if one.refused]
    assert len(refused) == 2 * 2 * 2
    assert {one.refused for one in refused} == {"k_cache: is int8; give float16"}
    assert all("INT8" in one.case for one in refused)


def test_the_command_tells_every_case(torch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cpu-flash     float16  prefill       MHA ")
    assert lines[0].endswith(" of 2.5e-03")
    assert lines[52] == "cpu-flash: 52 cases, 0 refused by name"
    assert lines[-1] == "0 cases differ from float64 attention by more than rounding"


def test_the_command_fails_on_a_difference(
    torch: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(TOLERANCE, "standard", {"float16": 0.0, "bfloat16": 1.0})
    assert main(["cpu"]) == 3
    out = capsys.readouterr().out
    assert out.count(": DIFFERS") == 24
    assert out.endswith("24 cases differ from float64 attention by more than rounding\n")


def test_the_command_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def unavailable(backend: str, kind: str) -> Any:
        raise BackendUnavailable(f"{backend}: no {kind} here; take another")

    monkeypatch.setattr(attention_numerics, "kernels_for", unavailable)
    assert main(["cuda"]) == 1
    assert capsys.readouterr().err == "cuda: no flash here; take another\n"
    assert main([]) == 2
    assert main(["tpu"]) == 2
    assert capsys.readouterr().err.endswith("attention_numerics: give one of cpu, cuda, npu\n")
