"""Policies by name: registered, found, suggested, and brought by other packages."""

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import hbmtwin.allocators
import hbmtwin.allocators.registry as subject
from hbmtwin.allocators.registry import Registry, UnknownPolicy, device_allocators, kv_policies


@dataclass(frozen=True)
class Config:
    size: int = 1


class Shelf:
    """A shelf."""

    Config = Config


class Box:
    """A box."""

    Config = Config


@pytest.fixture
def registry() -> Registry[object]:
    registry: Registry[object] = Registry("hbmtwin.test_furniture", "piece of furniture")
    registry.register("shelf")(Shelf)
    registry.register("box")(Box)
    return registry


def test_the_package_registers_every_file_that_decorates_a_class() -> None:
    folder = Path(hbmtwin.allocators.__path__[0])
    for registry, decorator in ((device_allocators, "@device_allocators"), (kv_policies, "@kv_policies")):
        pattern = re.compile(rf'^{decorator}\.register\("(\w+)"\)$', re.MULTILINE)
        written = [name for file in folder.rglob("*.py") for name in pattern.findall(file.read_text(encoding="utf-8"))]
        assert len(written) >= 3
        assert set(written) <= set(registry.names())


def test_classes_are_found_by_name_in_order_of_registration(registry: Registry[object]) -> None:
    assert registry.names() == ["shelf", "box"]
    assert list(registry) == [("shelf", Shelf), ("box", Box)]
    assert registry.get("box") is Box


def test_an_unknown_name_gets_a_suggestion(registry: Registry[object]) -> None:
    with pytest.raises(UnknownPolicy) as unknown:
        registry.get("shelff")
    message = "no piece of furniture is called 'shelff' (there are shelf, box); did you mean 'shelf'?"
    assert unknown.value.args == (message,)
    with pytest.raises(UnknownPolicy, match=r"no device allocator is called 'zzz' \(there are [^)]*caching[^)]*\)$"):
        device_allocators.get("zzz")


def test_a_name_belongs_to_one_class(registry: Registry[object]) -> None:
    registry.register("box")(Box)
    with pytest.raises(ValueError, match="piece of furniture 'box' is registered already"):
        registry.register("box")(Shelf)
    registry.unregister("box")
    registry.register("box")(Shelf)
    assert registry.get("box") is Shelf


def test_other_packages_bring_theirs_by_entry_point(
    registry: Registry[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Point:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> type:
            return Box if self.name == "shelf" else Shelf

    asked = []

    def entry_points(group: str) -> list[Point]:
        asked.append(group)
        return [Point("rack"), Point("shelf")]

    monkeypatch.setattr(subject, "entry_points", entry_points)
    assert registry.names() == ["shelf", "box", "rack"]
    assert registry.get("shelf") is Shelf, "what is built in keeps its name"
    assert [name for name, _ in registry] == ["shelf", "box", "rack"]
    assert asked == ["hbmtwin.test_furniture"], "looked up once, at the first reading"
