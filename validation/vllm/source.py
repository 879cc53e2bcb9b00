"""vLLM's own block manager and scheduler on a machine without a device: their unmodified files, without the rest of it.

The files that decide who computes what, and which block goes where (``REAL``), are read from the source package of one
version. Whatever else they import (torch, the configuration, logging, ZMQ) is a stub; a stub that is called and is not
known to be harmless (``HARMLESS``) stops the run, so no decision can come from one.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "0.27.1"
SHA256 = "eec2d54d137ac1e59cb4c39226dfee1943eefc8f4788f5821d7300d6acbdb646"
"""Of the source package on PyPI."""
REAL = (
    "vllm.envs",
    "vllm.utils",
    "vllm.utils.hashing",
    "vllm.utils.math_utils",
    "vllm.v1.core.block_pool",
    "vllm.v1.core.encoder_cache_manager",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.core.kv_cache_metrics",
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.sched.async_scheduler",
    "vllm.v1.core.sched.interface",
    "vllm.v1.core.sched.output",
    "vllm.v1.core.sched.request_queue",
    "vllm.v1.core.sched.scheduler",
    "vllm.v1.core.sched.utils",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.v1.metrics.stats",
    "vllm.v1.request",
    "vllm.v1.utils",
)
HARMLESS = frozenset(
    {
        "vllm.logger.init_logger",
        "vllm.config.get_current_vllm_config_or_none",
        "vllm.distributed.kv_events.EventPublisherFactory.create",
        "vllm.platforms.current_platform.register_custom_kv_cache_specs",
    }
)
"""Stubs that may be called: what they answer is logged, sent or ignored, never looked at to decide something."""
OUTSIDE = ("torch", "cbor2", "uvloop")
"""Packages that the real files import at their top and do not use here."""


class NoVllm(Exception):
    """vLLM's source cannot be had here, and what to do about it."""


class StubCalled(Exception):
    """A stub was asked for something: what ran is then not vLLM's own."""


class _StubType(type):
    """A class of no content: has every attribute, may stand in annotations and as a base."""

    path: str

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub(f"{cls.path}.{name}")

    def __call__(cls, *args: Any, **named: Any) -> Any:
        if cls.path not in HARMLESS:
            raise StubCalled(f"{cls.path} was called, which is a stub here: vLLM {VERSION} needs the real one")
        return _Quiet()


class _Quiet:
    """What a harmless stub returns: takes any call, as a logger does."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **named: None


def _stub(path: str) -> Any:
    return _StubType(path.rpartition(".")[2], (), {"path": path})


class _NoStructuredOutput:
    @staticmethod
    def from_sampling_params(params: object) -> None:
        """None: no request here asks for a grammar."""


class _Record(SimpleNamespace):
    """A cache event or an answer without the machinery that sends it: the fields that vLLM's core gives it."""


RECORDS = {
    path: type(path.rpartition(".")[2], (_Record,), {})
    for path in (
        "vllm.distributed.kv_events.BlockStored",
        "vllm.distributed.kv_events.BlockRemoved",
        "vllm.distributed.kv_events.AllBlocksCleared",
        "vllm.v1.engine.EngineCoreOutput",
        "vllm.v1.engine.EngineCoreOutputs",
    )
}
"""Stubs that are records: the real ones are the same fields, made to be packed and sent."""


class _StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        record = RECORDS.get(f"{self.__name__}.{name}")
        if record is not None:
            return record
        if name == "StructuredOutputRequest":
            return _NoStructuredOutput
        made = _stub(f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _StubLoader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = _StubModule(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is in it."""


class _Finder(MetaPathFinder):
    def __init__(self, root: Path) -> None:
        self.root = root

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in REAL:
            place = self.root.joinpath(*fullname.split("."))
            if place.is_dir():
                return spec_from_file_location(fullname, place / "__init__.py", submodule_search_locations=[])
            return spec_from_file_location(fullname, place.with_suffix(".py"))
        if fullname.partition(".")[0] in ("vllm", *OUTSIDE):
            return ModuleSpec(fullname, _StubLoader(), is_package=True)
        return None


@contextmanager
def vllm_core(root: Path) -> Iterator[dict[str, Any]]:
    """The real modules by their last name, from the tree under *root*; nothing of them stays imported afterwards."""
    missing = [name for name in REAL if not _file_of(root, name).is_file()]
    if missing:
        raise NoVllm(f"{root} is no source tree of vLLM {VERSION}: {missing[0]} is not in it")
    ours = ("vllm", *OUTSIDE)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ours}
    for name in before:
        del sys.modules[name]
    finder = _Finder(root)
    sys.meta_path.insert(0, finder)
    try:
        yield {name.rpartition(".")[2]: importlib.import_module(name) for name in REAL}
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
            del sys.modules[name]
        sys.modules.update(before)


def _file_of(root: Path, name: str) -> Path:
    place = root.joinpath(*name.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def unpacked(source: Path | None, folder: Path) -> Path:
    """The tree of *source* (a source package, or a folder that holds ``vllm/``), downloaded by pip if None.

    Raise NoVllm where there is none, or where it is not the package that was published.
    """
    if source is not None and source.is_dir():
        return source
    package = source or _downloaded(folder)
    if not package.is_file():
        raise NoVllm(f"{package} does not exist; leave --vllm out to download it")
    digest = hashlib.sha256(package.read_bytes()).hexdigest()
    if digest != SHA256:
        raise NoVllm(f"{package} is not the published source package of vLLM {VERSION}: its sha256 is {digest}")
    with tarfile.open(package) as archive:
        wanted = [member for member in archive.getmembers() if "/vllm/" in member.name and member.name.endswith(".py")]
        archive.extractall(folder, members=wanted, filter="data")
    return folder / f"vllm-{VERSION}"


def _downloaded(folder: Path) -> Path:
    """pip's download of the source package; its metadata are made without compiling when the target is empty."""
    command = [sys.executable, "-P", "-m", "pip", "download", f"vllm=={VERSION}", "--no-deps", "--no-binary", "vllm"]
    chosen = {"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": VERSION}
    ran = subprocess.run(
        [*command, "--dest", str(folder)], env=os.environ | chosen, capture_output=True, text=True, check=False
    )
    package = folder / f"vllm-{VERSION}.tar.gz"
    if ran.returncode or not package.is_file():
        lines = (ran.stderr or ran.stdout).strip().splitlines() or ["no message"]
        raise NoVllm(
            f"pip could not download the source package of vLLM {VERSION}: {lines[-1].strip()}\n"
            f"Get vllm-{VERSION}.tar.gz where there is a network and give it with --vllm FILE."
        )
    return package
