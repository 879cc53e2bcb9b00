"""The emulated CUDA runtime and the program that replays traces, compiled on first use as the NPU's emulation is.

::

    libcudart.so.13   ../memory.c + runtime.c + driver_api.c + absent.c; the symbol version that the wheel asks for
    replay            replay.cpp, linked to the wheel's libc10_cuda.so and to the library above
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hbmtwin.allocators.driver import ALLOC_UNIT, END_ADDRESS, FIRST_ADDRESS, PAGE_UNIT
from hbmtwin.validation.emulated import build as shared
from hbmtwin.validation.emulated.cuda.wheels import Unpacked, unpack_wheels

SOURCES: Final = Path(__file__).parent
RUNTIME: Final = "libcudart.so.13"
_RUNTIME_SOURCES: Final = ("../memory.c", "runtime.c", "driver_api.c", "absent.c")
_OTHER_SOURCES: Final = ("../driver.h", "replay.cpp", "tables.h", "build.py")


@dataclass(frozen=True, slots=True)
class CudaBuild:
    """A finished build."""

    folder: Path

    @property
    def replay(self) -> Path:
        """The program."""
        return self.folder / "replay"


def build_cuda(wheels: Path) -> CudaBuild:
    """Compile for the wheels in a folder, or find it compiled. Seconds the first time.

    Raise EmulatorUnavailable where the machine, a wheel or a compiler is missing.
    """
    shared.require_machine()
    cache = shared.cache_folder()
    unpacked = unpack_wheels(wheels, cache)
    folder = cache / f"cuda-{_key(unpacked)}"
    if folder.is_dir():
        return CudaBuild(folder)
    for compiler in ("gcc", "g++"):
        if shutil.which(compiler) is None:
            raise shared.EmulatorUnavailable(f"{compiler} is needed and is not here; install gcc and g++")
    with tempfile.TemporaryDirectory(dir=cache, prefix="building-") as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        _compile(made, unpacked)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return CudaBuild(folder)


def _policy() -> dict[str, int]:
    """The address policy of the simulated driver, for the compiler."""
    return {
        "FIRST_ADDRESS": FIRST_ADDRESS,
        "END_ADDRESS": END_ADDRESS,
        "ALLOC_UNIT": ALLOC_UNIT,
        "PAGE_UNIT": PAGE_UNIT,
    }


def _key(unpacked: Unpacked) -> str:
    parts = [(SOURCES / name).read_bytes() for name in (*_RUNTIME_SOURCES, *_OTHER_SOURCES)]
    parts.append(f"{unpacked.folder} {_policy()}".encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _compile(folder: Path, unpacked: Unpacked) -> None:
    policy = [f"-D{name}={value}ull" for name, value in _policy().items()]
    cuda = ("-isystem", str(unpacked.cuda_headers))
    sources = [str(SOURCES / name) for name in _RUNTIME_SOURCES]
    symbols = folder / "symbols.map"
    symbols.write_text(f"{RUNTIME} {{ global: *; }};\n")
    named = (f"-Wl,-soname,{RUNTIME}", f"-Wl,--version-script={symbols}")
    shared.run_compiler("gcc", *shared.SHARED, *policy, *cuda, *sources, *named, "-o", str(folder / RUNTIME))
    link = [f"-L{unpacked.libraries}", "-lc10_cuda", "-lc10", f"-Wl,-rpath,{unpacked.libraries}"]
    link += [f"-L{folder}", f"-l:{RUNTIME}", "-Wl,-rpath,$ORIGIN"]
    headers = ("-isystem", str(unpacked.torch_headers), *cuda)
    program = (str(SOURCES / "replay.cpp"), *link, "-o", str(folder / "replay"))
    shared.run_compiler("g++", "-O2", "-std=c++20", *policy, *headers, *program)
