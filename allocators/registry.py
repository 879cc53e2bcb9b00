"""Registries: a policy is one file with one decorated class, and is then listed, documented and tested everywhere.

Other packages add theirs by an entry point in the group of the same name (``hbmtwin.allocators``,
``hbmtwin.kv_policies``, ``hbmtwin.schedulers``), which is loaded when a registry is first read.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterator, Sequence
from importlib import import_module
from importlib.metadata import entry_points
from pkgutil import iter_modules
from typing import Generic, TypeVar

from hbmtwin.allocators.contract import DeviceAllocator, KVPolicy

T = TypeVar("T")


class UnknownPolicy(LookupError):
    """No policy has that name; the message names those that exist and the nearest one."""


class Registry(Generic[T]):
    """Classes by name: those of *modules* in that order, then others in order of registration.

    *modules* are our own, imported when the registry is first read, not before: what only plans memory needs no
    scheduler. Every registered class has a ``Config`` (a frozen dataclass of its settings) and a docstring whose first
    line says what it is; the command line, the documentation and the contract tests read both.
    """

    def __init__(self, group: str, noun: str, modules: Callable[[], Sequence[str]] = tuple) -> None:
        self.group = group
        self.noun = noun
        self._modules = modules
        self._classes: dict[str, type[T]] = {}
        self._plugins_loaded = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Decorate a class to register it as *name*. Raise ValueError if the name is taken by another class."""

        def decorate(cls: type[T]) -> type[T]:
            if self._classes.setdefault(name, cls) is not cls:
                raise ValueError(f"{self.noun} {name!r} is registered already")
            return cls

        return decorate

    def unregister(self, name: str) -> None:
        """Take a name back (for tests that register one)."""
        del self._classes[name]

    def get(self, name: str) -> type[T]:
        """The class of that name. Raise UnknownPolicy."""
        self._load_plugins()
        if name in self._classes:
            return self._classes[name]
        raise self.unknown(name, self._classes)

    def unknown(self, name: str, known: Collection[str]) -> UnknownPolicy:
        """The refusal of a name that is none of the *known* ones."""
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        return UnknownPolicy(f"no {self.noun} is called {name!r} (there are {', '.join(known)}){hint}")

    def names(self) -> list[str]:
        """All names, in order of registration."""
        self._load_plugins()
        return list(self._classes)

    def __iter__(self) -> Iterator[tuple[str, type[T]]]:
        self._load_plugins()
        return iter(self._classes.items())

    def _load_plugins(self) -> None:
        if not self._plugins_loaded:
            self._plugins_loaded = True
            modules = self._modules()
            for module in modules:
                import_module(module)
            ours = sorted(self._classes, key=lambda name: _place(self._classes[name], modules))
            self._classes = {name: self._classes[name] for name in ours}
            for point in entry_points(group=self.group):
                self._classes.setdefault(point.name, point.load())


def _place(cls: type, modules: Sequence[str]) -> int:
    """Where its module, or the package that this is in, stands among *modules*; behind them if it does not."""
    return next((i for i, module in enumerate(modules) if f"{cls.__module__}.".startswith(f"{module}.")), len(modules))


def _this_folder() -> list[str]:
    """A policy is registered by being a file of this folder."""
    package = import_module(__package__)
    return [f"{__package__}.{module.name}" for module in iter_modules(package.__path__)]


device_allocators: Registry[DeviceAllocator] = Registry("hbmtwin.allocators", "device allocator", _this_folder)
kv_policies: Registry[KVPolicy] = Registry("hbmtwin.kv_policies", "KV policy", _this_folder)
