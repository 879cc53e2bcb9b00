"""hbmtwin: a discrete-event twin of accelerator memory (HBM) for LLM serving.

``import hbmtwin`` loads nothing heavy: every name of :mod:`hbmtwin.api` is fetched on first use (PEP 562),
so that scripts and shell completion start fast.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("hbmtwin")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    if name.startswith("_"):
        raise AttributeError(name)
    api = import_module("hbmtwin.api")
    if name not in api.__all__:
        raise AttributeError(f"module 'hbmtwin' has no attribute {name!r}")
    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({"__version__", *import_module("hbmtwin.api").__all__})
