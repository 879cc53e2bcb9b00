"""Which kernels a backend has, and whether they can be had here.

::

    backend   flash                                standard
    cpu       torch's SDPA, flash kernel           matmul, softmax, matmul
    cuda      torch's SDPA, flash kernel           the same
    npu       torch_npu's fused attention          the same
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Final, get_args

from hbmtwin.kernels.attention.interface import AttentionKernels, Backend, Kind

BACKENDS: Final = get_args(Backend)
KINDS: Final = get_args(Kind)


class BackendUnavailable(RuntimeError):
    """A backend's library or device is not here; the text has the cure."""


def kernels_for(backend: Backend, kind: Kind = "flash") -> AttentionKernels:
    """The kernels of *backend*, which believe their arguments: ``Checked`` of ``.checked`` holds them to the rules.

    Raises BackendUnavailable where torch, torch_npu or the device is missing, ValueError for a name that is none.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is none; choose one of {', '.join(BACKENDS)}")
    if kind not in KINDS:
        raise ValueError(f"kind: {kind!r} is none; choose one of {', '.join(KINDS)}")
    load(backend)
    name = backend if kind == "flash" else kind
    made: AttentionKernels = import_module(f"hbmtwin.kernels.attention.{name}").kernels(backend)
    return made


def load(backend: Backend) -> Any:
    """torch, with the device of *backend* at hand. Raises BackendUnavailable."""
    try:
        with _without_plug_ins():
            torch = import_module("torch")
        if backend == "npu":
            import_module("torch_npu")
    except ModuleNotFoundError as missing:
        extra = "npu" if backend == "npu" else "torch"
        raise BackendUnavailable(f"{backend}: {missing}; pip install 'hbmtwin[{extra}]'") from missing
    except (ImportError, OSError, RuntimeError) as broken:
        cure = "source CANN's set_env.sh first" if backend == "npu" else "install it again"
        raise BackendUnavailable(f"{backend}: torch cannot be loaded ({broken}); {cure}") from broken
    if backend != "cpu" and not getattr(torch, backend).is_available():
        raise BackendUnavailable(
            f"{backend}: torch {torch.__version__} sees no device of this kind; take another backend, or see "
            "whether its driver and a torch built for it are installed"
        )
    return torch


@contextmanager
def _without_plug_ins() -> Iterator[None]:
    """torch's import loads an installed torch_npu, and fails with it where CANN is missing: half a torch is left."""
    name = "TORCH_DEVICE_BACKEND_AUTOLOAD"
    if "torch" in sys.modules or name in os.environ:
        yield
        return
    os.environ[name] = "0"
    try:
        yield
    finally:
        del os.environ[name]
