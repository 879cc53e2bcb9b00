"""The emulated driver is compiled once, in seconds, and says in one sentence why it cannot be."""

import ctypes
import platform
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from hbmtwin.validation.emulated import EmulatorUnavailable, build
from hbmtwin.validation.emulated.build import build_emulator
from hbmtwin.validation.emulated.elf import read_dynamic_symbols

from ..patience import PATIENCE_S


@pytest.fixture(scope="module")
def built() -> build.Build:
    try:
        return build_emulator()
    except EmulatorUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture
def pretended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with all that a build needs, and the cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "require_machine", lambda: None)
    monkeypatch.setattr(build, "_require_wheels", lambda: (tmp_path, tmp_path))
    monkeypatch.setattr(build, "version", lambda _: "2.13.0")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    return tmp_path / "hbmtwin"


def test_all_that_torch_npu_expects_of_the_vendor_is_there(built: build.Build) -> None:
    provided = read_dynamic_symbols(built.libraries[0]).defined
    torch_lib, npu = build._require_wheels()
    missing = build.missing_symbols(torch_lib, npu)
    assert {"aclrtMallocPhysical", "aclInit", "rtKernelLaunch", "_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE"} <= {
        *missing
    }
    assert not {name for name in missing if name.startswith(("Py", "dl", "pthread", "_ZN3c10", "_ZSt"))}
    assert {*missing} <= provided


def test_a_default_body_gives_0_and_a_body_of_ours_stands_before_it(built: build.Build) -> None:
    driver = ctypes.CDLL(str(built.libraries[0]))
    device = ctypes.c_int32(-1)
    assert driver.aclInit(None) == 0
    assert driver.aclrtGetDevice(ctypes.byref(device)) == 107002
    assert driver.aclrtSetDevice(3) == 0
    assert driver.aclrtGetDevice(ctypes.byref(device)) == 0
    assert device.value == 3


def test_names_of_other_libraries_lead_to_the_driver(built: build.Build) -> None:
    assert [path.name for path in built.libraries] == [
        "libascendcl.so",
        "libhccl.so",
        "libacl_op_compiler.so",
        "libge_runner.so",
        "libgraph.so",
        "libacl_tdt_channel.so",
        "libatb.so",
    ]
    assert ctypes.CDLL(str(built.libraries[1])).HcclSetConfig() == 0


def test_second_use_compiles_nothing(built: build.Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build_emulator() == built


def test_two_may_build_at_once_and_share_what_was_first(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    both_compile = threading.Barrier(2, timeout=PATIENCE_S)

    def slow_compiler(made: Path, *_: Path) -> None:
        made.mkdir()
        (made / "library").write_text("whole")
        both_compile.wait()

    monkeypatch.setattr(build, "_compile", slow_compiler)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: build_emulator(), range(2))
    assert first == second
    assert [*pretended.iterdir()] == [first.folder]
    assert (first.folder / "library").read_text() == "whole"


def test_a_failed_build_leaves_nothing(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_compiler(made: Path, *_: Path) -> None:
        made.mkdir()
        raise EmulatorUnavailable("gcc could not compile")

    monkeypatch.setattr(build, "_compile", broken_compiler)
    with pytest.raises(EmulatorUnavailable):
        build_emulator()
    assert [*pretended.iterdir()] == []


def test_the_key_changes_with_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for release in ("2.13.0", "2.13.1"):
        monkeypatch.setattr(build, "version", lambda _, release=release: release)
        keys.add(build._key())
    assert len(keys) == 2


def test_other_machines_are_told_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    with pytest.raises(EmulatorUnavailable, match=r"x86-64 Linux wheel, and this is aarch64 .*; use a container"):
        build_emulator()


def test_a_missing_wheel_is_told_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(build, "require_machine", lambda: None)
    monkeypatch.setattr(build, "version", absent)
    with pytest.raises(EmulatorUnavailable, match=r"torch-npu is not installed; pip install torch==2\.13\.0 &&"):
        build_emulator()


def test_another_release_of_the_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Somewhere:
        def locate_file(self, name: str) -> str:
            return name

    monkeypatch.setattr(build, "require_machine", lambda: None)
    monkeypatch.setattr(build, "version", lambda _: "2.9.0.post2")
    monkeypatch.setattr(build, "distribution", lambda _: Somewhere())
    with pytest.raises(EmulatorUnavailable, match=r"torch-npu 2\.9\.0\.post2 is installed and .* made for 2\.13\.0"):
        build_emulator()


def test_a_missing_compiler_is_named(pretended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(EmulatorUnavailable, match=r"gcc is not here; install gcc and g\+\+"):
        build_emulator()
    assert not pretended.exists()


def test_a_cache_that_cannot_be_made_is_told_with_the_variable(
    pretended: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        EmulatorUnavailable, match=r"the cache folder cannot be made \(.*\); name another in XDG_CACHE_HOME"
    ):
        build_emulator()


def test_our_c_compiles_without_warnings() -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    policy = ["-DFIRST_ADDRESS=2097152ull", "-DEND_ADDRESS=281474976710656ull", "-DALLOC_UNIT=512ull"]
    sources = [str(build.SOURCES / name) for name in ("memory.c", "runtime.c")]
    build.run_compiler("gcc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", *policy, *sources)


def test_what_the_compiler_says_is_told(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    with pytest.raises(EmulatorUnavailable, match=r"(?s)gcc could not compile the emulated driver: .*no-such-file"):
        build.run_compiler("gcc", str(tmp_path / "no-such-file.c"))


def test_only_elf_is_read_for_symbols(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library at all, only a line of text")
    with pytest.raises(ValueError, match="is no 64-bit little-endian ELF file"):
        read_dynamic_symbols(tmp_path / "text")
