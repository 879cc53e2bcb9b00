"""Models of the catalog (``models.toml``), and any decoder whose ``config.json`` lies on disk.

A name may be said in three ways, looked for in this order, as vLLM prefers what is on disk to the hub::

    llama-2-7b                          the catalog's own, in any case of its letters
    configs/llama/config.json           a path, or its directory
    meta-llama/Llama-2-7b-hf            a repository of the Hugging Face hub, in any case, as the hub has it
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from hbmtwin.kernels.records import ModelShape
from hbmtwin.sim.catalog.errors import CatalogError
from hbmtwin.sim.catalog.hf_config import read_config, shape_of


def models() -> tuple[str, ...]:
    """Ids of all models, sorted."""
    return tuple(sorted(_entries()))


def hugging_face_ids(name: str) -> tuple[str, ...]:
    """Repositories of the hub that the catalog's model *name* stands for, the one that its sizes are from among them.

    Raise KeyError if the catalog has no such model.
    """
    return tuple(_entries()[name]["hugging_face_ids"])


def model_name(name: str) -> str:
    """The catalog's own name for *name*; what it does not know, and what lies on disk, comes back as it is. O(1).

    So a result reads the same however its model was called. A repository of somebody else that ends in a name of the
    catalog is that model: whoever changes the sizes says so in the name.
    """
    names = _entries()
    if name in names or os.path.exists(name):
        return name
    small = name.lower()
    last = small.rpartition("/")[2]
    return _repositories().get(small) or (last if last in names else name)


def model(name_or_path: str) -> ModelShape:
    """The model of a catalog id, of a ``config.json``, of the directory that holds one, or of a repository's id.

    Nothing is downloaded. Raise CatalogError for an unknown id, with the nearest ones, and for a file that cannot be
    read or describes a model that is not computed yet.
    """
    name = model_name(name_or_path)
    if name in _entries():
        return _shape(name)
    path = Path(name_or_path)
    if os.path.isdir(path):  # unlike Path's, these take any name for one that may not be there
        path = path / "config.json"
    if os.path.isfile(path):
        return read_config(path)
    if path.suffix == ".json":
        raise CatalogError(f"model {name_or_path}: no such file")
    raise CatalogError(
        f"unknown model {name_or_path!r}: {_nearest(name_or_path)}The catalog has {len(models())} (`hbmtwin catalog "
        "models` lists them). Any Hugging Face model works from disk: give the path of its config.json (nothing is "
        "downloaded)"
    )


def _nearest(name: str) -> str:
    """The nearest names of both kinds, first those that begin so, as a question; empty if none is near."""
    small = name.lower().replace("_", "-")
    last = small.rpartition("/")[2]
    near = [own for own in models() if len(last) > 2 and own.startswith(last)][:2]
    near = near or get_close_matches(last, models(), n=1, cutoff=0.5)
    repositories = {id.lower(): id for own in models() for id in hugging_face_ids(own)}
    near += [repositories[id] for id in get_close_matches(small, repositories, n=1, cutoff=0.7)]
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


@cache
def _entries() -> Mapping[str, dict[str, Any]]:
    return tomllib.loads(files("hbmtwin.sim.catalog").joinpath("models.toml").read_text(encoding="utf-8"))


@cache
def _repositories() -> Mapping[str, str]:
    """Repositories' ids in small letters, and the catalog's names for them."""
    return {id.lower(): name for name in _entries() for id in hugging_face_ids(name)}


@cache
def _shape(name: str) -> ModelShape:
    entry = _entries()[name]
    return shape_of(entry, name=name, where=f"models.toml, {name}", source=entry["source"])
