"""hbmtwin: a discrete-event twin of accelerator memory (HBM) for LLM serving.

``import hbmtwin`` loads nothing heavy: every name of :mod:`hbmtwin.api` is fetched on first use (PEP 562),
so that scripts and shell completion start fast; ``__version__`` too, for the package's metadata cost 30 ms to read.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__: str


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name.startswith("_"):
        raise AttributeError(name)
    api = import_module("hbmtwin.api")
    if name not in api.__all__:
        raise AttributeError(f"module 'hbmtwin' has no attribute {name!r}")
    return getattr(api, name)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("hbmtwin")
    except PackageNotFoundError:  # a source tree that was never installed
        return "0+unknown"


def __dir__() -> list[str]:
    return sorted({"__version__", *import_module("hbmtwin.api").__all__})
