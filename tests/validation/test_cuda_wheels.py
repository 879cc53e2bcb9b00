"""The real CUDA allocator is opt-in: what is missing is said, and only what is needed is taken out of the wheels."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hbmtwin.validation.emulated import EmulatorUnavailable
from hbmtwin.validation.emulated.cuda.traffic import CUDA_CONFIGURATIONS, cuda_trace
from hbmtwin.validation.emulated.cuda.wheels import unpack_wheels

TORCH = "torch-2.11.0-cp311-cp311-manylinux_2_28_x86_64.whl"
RUNTIME = "nvidia_cuda_runtime-13.0.96-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"
CRT = "nvidia_cuda_crt-13.0.88-py3-none-manylinux2014_x86_64.manylinux_2_17_x86_64.whl"


def write_wheel(path: Path, *names: str) -> None:
    with zipfile.ZipFile(path, "w") as wheel:
        for name in names:
            wheel.writestr(name, name)


def test_a_missing_wheel_is_named_with_the_command_that_gets_it(tmp_path: Path) -> None:
    write_wheel(tmp_path / TORCH, "torch/lib/libc10.so")
    with pytest.raises(EmulatorUnavailable) as absent:
        unpack_wheels(tmp_path, tmp_path / "cache")
    text = str(absent.value)
    assert "no nvidia_cuda_runtime-13.0" in text
    assert "no torch-" not in text
    assert f"pip download --no-deps -d {tmp_path} torch==2.11.0" in text


def test_two_libraries_and_the_headers_are_taken_out_once(tmp_path: Path) -> None:
    write_wheel(
        tmp_path / TORCH,
        *("torch/lib/libc10.so", "torch/lib/libc10_cuda.so", "torch/lib/libtorch_cuda.so", "torch/__init__.py"),
        *("torch/include/c10/macros/Macros.h", "torch/include/torch/headeronly/version.h", "torch/include/ATen/ATen.h"),
    )
    write_wheel(tmp_path / RUNTIME, "nvidia/cu13/include/cuda.h", "nvidia/cu13/lib/libcudart.so.13")
    write_wheel(tmp_path / CRT, "nvidia/cu13/include/crt/host_config.h")
    unpacked = unpack_wheels(tmp_path, tmp_path / "cache")
    files = sorted(str(path.relative_to(unpacked.folder)) for path in unpacked.folder.rglob("*") if path.is_file())
    assert files == [
        "nvidia/cu13/include/crt/host_config.h",
        "nvidia/cu13/include/cuda.h",
        "torch/include/c10/macros/Macros.h",
        "torch/include/torch/headeronly/version.h",
        "torch/lib/libc10.so",
        "torch/lib/libc10_cuda.so",
    ]
    for wheel in tmp_path.glob("*.whl"):
        wheel.unlink()
    assert unpack_wheels(tmp_path, tmp_path / "cache") == unpacked


def test_the_script_says_so_and_ends_with_2(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "hbmtwin.validation.emulated.cuda", "--wheels", str(tmp_path)],
        env={"XDG_CACHE_HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")


def test_there_are_enough_configurations_and_no_pool_dies_inside_a_scope() -> None:
    assert len({c.name for c in CUDA_CONFIGURATIONS}) == len(CUDA_CONFIGURATIONS) == 51
    by_name = {c.name: c for c in CUDA_CONFIGURATIONS}
    entered = deaths = 0
    for op in cuda_trace(by_name["pools"], 4000):
        entered += (op.op == "mempool_begin") - (op.op == "mempool_end")
        if op.op == "mempool_delete":
            deaths += 1
            assert entered == 0
    assert deaths > 5
