"""The emulated driver is compiled once, in seconds, and says in one sentence why it cannot be."""

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from hbmtwin.validation.emulated import EmulatorUnavailable, build
from hbmtwin.validation.emulated.build import build_emulator
from hbmtwin.validation.emulated.elf import read_dynamic_symbols


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def built(cache: Path) -> build.Build:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        try:
            return build_emulator()
        except EmulatorUnavailable as missing:
            pytest.skip(str(missing))


def test_all_that_torch_npu_expects_of_the_vendor_is_there(built: build.Build, cache: Path) -> None:
    provided = read_dynamic_symbols(built.libraries[0]).defined
    torch_lib, npu = build._require_wheels()
    missing = build.missing_symbols(torch_lib, npu)
    assert {"aclrtMallocPhysical", "aclInit", "rtKernelLaunch", "_ZN3atb5Utils13GetTensorSizeERKNS_6TensorE"} <= {
        *missing
    }
    assert not {name for name in missing if name.startswith(("Py", "dl", "pthread", "_ZN3c10", "_ZSt"))}
    assert {*missing} <= provided
    assert built.folder.parent == cache / "hbmtwin"


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


def test_second_use_compiles_nothing(built: build.Build, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(build, "_compile", lambda *_: pytest.fail("compiled again"))
    assert build_emulator() == built


def test_two_processes_may_build_at_once(built: build.Build, tmp_path: Path) -> None:
    other = tmp_path / "other"
    command = [
        sys.executable,
        "-P",
        "-c",
        "from hbmtwin.validation.emulated.build import build_emulator; print(build_emulator().folder)",
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(other)}
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = [process.communicate()[0].strip() for process in both]
    assert folders[0] == folders[1] == str(other / "hbmtwin" / built.folder.name)
    assert [path.name for path in (other / "hbmtwin").iterdir()] == [built.folder.name]


def test_who_comes_second_takes_what_the_first_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile_somebody_else(made: Path, *_: Path) -> None:
        made.mkdir(parents=True)
        finished = tmp_path / "hbmtwin" / f"emulated-{build._key()}"
        finished.mkdir()
        (finished / "theirs").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_require_machine", lambda: None)
    monkeypatch.setattr(build, "_require_wheels", lambda: (tmp_path, tmp_path))
    monkeypatch.setattr(build, "version", lambda _: "2.13.0")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(build, "_compile", meanwhile_somebody_else)
    assert (build_emulator().folder / "theirs").exists()


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

    monkeypatch.setattr(build, "_require_machine", lambda: None)
    monkeypatch.setattr(build, "version", absent)
    with pytest.raises(EmulatorUnavailable, match=r"torch-npu is not installed; pip install torch==2\.13\.0 and then"):
        build_emulator()


def test_another_release_of_the_wheel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Somewhere:
        def locate_file(self, name: str) -> str:
            return name

    monkeypatch.setattr(build, "_require_machine", lambda: None)
    monkeypatch.setattr(build, "version", lambda _: "2.9.0.post2")
    monkeypatch.setattr(build, "distribution", lambda _: Somewhere())
    with pytest.raises(EmulatorUnavailable, match=r"torch-npu 2\.9\.0\.post2 is installed and .* made for 2\.13\.0"):
        build_emulator()


def test_a_missing_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "_require_machine", lambda: None)
    monkeypatch.setattr(build, "_require_wheels", lambda: (tmp_path, tmp_path))
    monkeypatch.setattr(build, "version", lambda _: "2.13.0")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    with pytest.raises(EmulatorUnavailable, match=r"gcc is not here; install gcc and g\+\+"):
        build_emulator()


def test_what_the_compiler_says_is_told(tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    with pytest.raises(EmulatorUnavailable, match=r"(?s)gcc could not compile the emulated driver: .*no-such-file"):
        build._run("gcc", str(tmp_path / "no-such-file.c"))


def test_only_elf_is_read_for_symbols(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no library at all, only a line of text")
    with pytest.raises(ValueError, match="is no 64-bit little-endian ELF file"):
        read_dynamic_symbols(tmp_path / "text")
