"""The emulated driver is compiled on first use and kept in the user's cache folder.

Next to our own C sources, every other symbol that torch_npu's libraries expect from the vendor's runtime gets a default
body that returns 0, since they are bound at load. Which these are is read from the installed wheel::

    libascendcl.so   memory.c + runtime.c + default bodies
    libhccl.so ...   empty; the names that torch_npu's libraries ask for, each linked to libascendcl.so
    libprobe.so      probe.cpp + workspace.cpp, loaded after torch_npu
    home/, opp/      the folders that ASCEND_HOME_PATH and ASCEND_OPP_PATH must name
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from hbmtwin.allocators.driver import ALLOC_UNIT, END_ADDRESS, FIRST_ADDRESS
from hbmtwin.validation.emulated.elf import read_dynamic_symbols

TORCH_NPU = "2.13.0"
"""The release whose rules are modelled, and for which the emulation was made."""
SOURCES = Path(__file__).parent
DRIVER = "libascendcl.so"
NAMES = ("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so", "libacl_tdt_channel.so", "libatb.so")
"""The vendor's other libraries by SONAME. torchair's are left out: it is not needed."""
COMPILED = ("memory.c", "runtime.c", "probe.cpp", "workspace.cpp")
SHARED = ("-shared", "-fPIC", "-O2")
PROBE = "libprobe.so"


class EmulatorUnavailable(Exception):
    """The emulated driver cannot run here; the text says why and what helps."""


@dataclass(frozen=True, slots=True)
class Build:
    """A finished build: a folder of libraries."""

    folder: Path

    @property
    def libraries(self) -> list[Path]:
        """The vendor's libraries in the order in which they must be loaded, before torch."""
        return [self.folder / name for name in (DRIVER, *NAMES)]

    @property
    def probe(self) -> Path:
        """What reaches into torch_npu; to be loaded after it."""
        return self.folder / PROBE

    def environment(self) -> dict[str, str]:
        """The variables that torch_npu needs at import."""
        return {
            "ASCEND_HOME_PATH": str(self.folder / "home"),
            "ASCEND_OPP_PATH": str(self.folder / "opp"),
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            "TASK_QUEUE_ENABLE": "0",
        }


def build_emulator() -> Build:
    """Compile the emulated driver for the installed wheel, or find it compiled. Takes seconds the first time.

    Two processes may build at once: each in a folder of its own, which is then renamed; who is second uses the first's.
    Raise EmulatorUnavailable where the machine, the wheels or the compiler are missing.
    """
    require_machine()
    torch_lib, npu = _require_wheels()
    folder = cache_folder() / f"emulated-{_key()}"
    if folder.is_dir():
        return Build(folder)
    for compiler in ("gcc", "g++"):
        if shutil.which(compiler) is None:
            raise EmulatorUnavailable(
                f"the emulated driver is compiled on first use and {compiler} is not here; install gcc and g++"
            )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise EmulatorUnavailable(
            f"the cache folder cannot be made ({error}); name another in XDG_CACHE_HOME"
        ) from None
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="building-") as scratch:
        made = Path(scratch) / "made"
        _compile(made, torch_lib, npu)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    return Build(folder)


def require_machine() -> None:
    """Raise EmulatorUnavailable on anything but x86-64 Linux."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise EmulatorUnavailable(
            f"the emulated driver serves torch_npu's x86-64 Linux wheel, and this is {platform.machine()} "
            f"{sys.platform}; use a container or machine of that kind"
        )


def _require_wheels() -> tuple[Path, Path]:
    """The folders of torch's libraries and of torch_npu."""
    try:
        found = version("torch-npu")
        torch = Path(str(distribution("torch").locate_file("torch")))
        npu = Path(str(distribution("torch-npu").locate_file("torch_npu")))
    except PackageNotFoundError as missing:
        raise EmulatorUnavailable(
            f"{missing.name} is not installed; pip install torch=={TORCH_NPU} && "
            f"pip install --no-deps torch-npu=={TORCH_NPU}"
        ) from None
    if found.split("+")[0] != TORCH_NPU:
        raise EmulatorUnavailable(
            f"torch-npu {found} is installed and the emulated driver is made for {TORCH_NPU}; "
            f"pip install torch-npu=={TORCH_NPU} --no-deps"
        )
    return torch / "lib", npu


def cache_folder() -> Path:
    """Where builds are kept: ``$XDG_CACHE_HOME/hbmtwin``, else ``~/.cache/hbmtwin``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hbmtwin"


def _key() -> str:
    """What the build depends on: our sources, the wheels' versions, the address policy."""
    parts = [(SOURCES / name).read_bytes() for name in (*COMPILED, "driver.h", "build.py")]
    parts.append(f"{version('torch')} {version('torch-npu')} {FIRST_ADDRESS} {END_ADDRESS} {ALLOC_UNIT}".encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def missing_symbols(torch_lib: Path, npu: Path) -> list[str]:
    """Names that torch_npu's libraries need and that neither torch nor this process (Python, libc) provides, sorted."""
    needed: set[str] = set()
    provided: set[str] = set()
    for path in [*npu.glob("_C.*.so"), *(npu / "lib").glob("*.so")]:
        symbols = read_dynamic_symbols(path)
        needed |= symbols.needed
        provided |= symbols.defined
    for path in torch_lib.glob("*.so"):
        provided |= read_dynamic_symbols(path).defined
    here = ctypes.CDLL(None)
    return sorted(name for name in needed - provided if not hasattr(here, name))


def _compile(folder: Path, torch_lib: Path, npu: Path) -> None:
    for name in ("home/runtime", "home/compiler", "opp"):
        (folder / name).mkdir(parents=True)
    # Weak, so that a body of ours stands instead wherever there is one.
    defaults = [f".weak {name}\n.set {name}, hbmtwin_default" for name in missing_symbols(torch_lib, npu)]
    assembly = folder / "defaults.s"
    assembly.write_text(
        "\n".join(
            [
                ".text",
                "hbmtwin_default:",
                "xorl %eax, %eax",
                "ret",
                *defaults,
                '.section .note.GNU-stack,"",@progbits',
                "",
            ]
        )
    )
    policy = [f"-DFIRST_ADDRESS={FIRST_ADDRESS}ull", f"-DEND_ADDRESS={END_ADDRESS}ull", f"-DALLOC_UNIT={ALLOC_UNIT}ull"]
    memory, runtime, probe, workspace = (str(SOURCES / name) for name in COMPILED)
    run_compiler(
        "gcc", *SHARED, *policy, memory, runtime, str(assembly), f"-Wl,-soname,{DRIVER}", "-o", str(folder / DRIVER)
    )
    for name in NAMES:
        link = ["-Wl,--no-as-needed", f"-L{folder}", "-lascendcl", "-Wl,-rpath,$ORIGIN"]
        run_compiler("gcc", "-shared", "-x", "none", *link, f"-Wl,-soname,{name}", "-o", str(folder / name))
    headers = [torch_lib.parent / "include", npu / "include", npu / "include/third_party/acl/inc"]
    include = [word for path in headers for word in ("-isystem", str(path))]
    # Linked by name to libraries that are loaded by then, since torch_npu's symbols are not global.
    link = [f"-L{torch_lib}", "-lc10", f"-L{npu / 'lib'}", "-ltorch_npu", f"-L{folder}", "-lascendcl"]
    run_compiler("g++", *SHARED, "-std=c++20", *include, probe, workspace, *link, "-o", str(folder / PROBE))


def run_compiler(*command: str) -> None:
    """Run one command of a compiler. Raise EmulatorUnavailable with what it says when it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulatorUnavailable(f"{command[0]} could not compile the emulated driver: {done.stderr.strip()}")
