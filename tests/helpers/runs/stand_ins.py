"""Modules for packages that a host or a recipe imports and does not need, so that no run depends on what is
installed."""

import functools
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

USED: set[str] = set()  # packages that something imported


class Mocks:
    """Finds packages, or packages in packages, installed or not. Their names are mocks, except for `contents`."""

    def __init__(self, packages: Sequence[str], contents: Mapping[str, Mapping[str, Any]]) -> None:
        self._packages, self._contents = packages, contents

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        is_ours = any(f"{name}.".startswith(f"{package}.") for package in self._packages)
        return ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        USED.add(spec.name.partition(".")[0])
        module = ModuleType(spec.name)

        @functools.cache
        def attribute(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return self.make(name)

        module.__getattr__, module.__version__ = attribute, "99.0.0"
        return module

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self._contents.get(module.__name__, {}))

    def make(self, name: str) -> Any:
        return MagicMock(name=name)


class Classes(Mocks):
    """The same with empty classes, which a host may subclass."""

    def make(self, name: str) -> type:
        return _EmptyClass(name, (), {"__init__": lambda self, *args, **kwargs: None})


class _EmptyClass(type):
    def __getattr__(cls, name: str) -> MagicMock:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


def install(*packages: str, **contents: dict[str, object]) -> Mocks:
    """Make packages importable as mocks, and return their finder."""
    finder = Mocks(packages, contents)
    sys.meta_path.insert(0, finder)
    return finder
