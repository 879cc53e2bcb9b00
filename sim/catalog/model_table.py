"""Models of the catalog (``models.toml``), and any dense decoder whose ``config.json`` lies on disk."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib.resources import files
from pathlib import Path

from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.catalog.errors import CatalogError, unknown
from hbmtwin.sim.catalog.hf_config import read_config, shape_of


def models() -> tuple[str, ...]:
    """Ids of all models, sorted."""
    return tuple(sorted(_table()))


def model(name_or_path: str) -> ModelShape:
    """The model of a catalog id, or of a ``config.json``, or of the directory that holds one.

    Nothing is downloaded. Raise CatalogError for an unknown id, with the nearest one, and for a file that cannot be
    read or describes a model that is not computed yet.
    """
    table = _table()
    if name_or_path in table:
        return table[name_or_path]
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return read_config(path)
    if path.suffix == ".json":
        raise CatalogError(f"model {name_or_path}: no such file")
    raise CatalogError(
        f"{unknown('model', name_or_path, table)}. Any Hugging Face model works from disk: give the path of its "
        "config.json (nothing is downloaded)"
    )


@cache
def _table() -> dict[str, ModelShape]:
    text = files("hbmtwin.sim.catalog").joinpath("models.toml").read_text(encoding="utf-8")
    return {
        name: shape_of(entry, name=name, where=f"models.toml, {name}", source=entry["source"])
        for name, entry in tomllib.loads(text).items()
    }
