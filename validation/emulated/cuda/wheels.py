"""What is needed of three wheels from PyPI: two libraries of torch, its headers, and CUDA's headers.

They are taken out of the files that ``pip download`` leaves, into the user's cache folder; nothing is installed, and no
CUDA library is touched: its runtime is what the emulation stands in for.
"""

from __future__ import annotations

import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hbmtwin.validation.emulated.build import EmulatorUnavailable

TORCH: Final = "2.11.0"
"""The release whose rules are modelled."""
CUDA: Final = "13.0"
LIBRARIES: Final = ("torch/lib/libc10.so", "torch/lib/libc10_cuda.so")
_NEEDED: Final = {
    f"torch-{TORCH}*-manylinux*x86_64.whl": (*LIBRARIES, "torch/include/c10/", "torch/include/torch/headeronly/"),
    f"nvidia_cuda_runtime-{CUDA}.*x86_64.whl": ("nvidia/cu13/include/",),
    f"nvidia_cuda_crt-{CUDA}.*x86_64.whl": ("nvidia/cu13/include/",),
}
"""Name of the file, and what is taken out: files, or whole folders with a slash at their end."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A folder with the parts of the wheels, as they would lie in site-packages."""

    folder: Path

    @property
    def libraries(self) -> Path:
        """Where ``libc10.so`` and ``libc10_cuda.so`` are."""
        return self.folder / "torch/lib"

    @property
    def torch_headers(self) -> Path:
        """For ``#include <c10/...>``."""
        return self.folder / "torch/include"

    @property
    def cuda_headers(self) -> Path:
        """For ``#include <cuda_runtime_api.h>``."""
        return self.folder / "nvidia/cu13/include"


def unpack_wheels(wheels: Path, cache: Path) -> Unpacked:
    """Take the parts out of the wheels in a folder, unless an earlier call has. Seconds the first time.

    Raise EmulatorUnavailable if a wheel is missing; the text says how to get it.
    """
    folder = cache / f"torch-cuda-{TORCH}"
    if folder.is_dir():
        return Unpacked(folder)
    found = {pattern: sorted(wheels.glob(pattern)) for pattern in _NEEDED}
    missing = [pattern for pattern, files in found.items() if not files]
    if missing:
        raise EmulatorUnavailable(
            f"{wheels} has no {', no '.join(missing)}; get the three (530 MB) with\n"
            f"    pip download --no-deps -d {wheels} torch=={TORCH} 'nvidia-cuda-runtime=={CUDA}.*' "
            f"'nvidia-cuda-crt=={CUDA}.*'"
        )
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix="unpacking-") as scratch:
        made = Path(scratch) / "made"
        for pattern, parts in _NEEDED.items():
            with zipfile.ZipFile(found[pattern][0]) as wheel:
                wheel.extractall(made, [name for name in wheel.namelist() if name.startswith(parts)])
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return Unpacked(folder)
