"""The public names are exactly what they are said to be, and the package fetches them on first use."""

from __future__ import annotations

import types

import hbmtwin
from hbmtwin import api


def test_all_is_what_is_importable() -> None:
    public = {
        name
        for name, value in vars(api).items()
        if not name.startswith("_") and name != "annotations" and not isinstance(value, types.ModuleType)
    }
    assert set(api.__all__) == public
    assert len(api.__all__) == len(public)


def test_the_package_offers_the_same_names() -> None:
    assert set(dir(hbmtwin)) == {"__version__", *api.__all__}
    for name in api.__all__:
        assert getattr(hbmtwin, name) is getattr(api, name)


def test_a_name_that_does_not_exist_is_no_attribute() -> None:
    assert not hasattr(hbmtwin, "simulate")
