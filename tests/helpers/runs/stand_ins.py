"""Empty modules for packages that a recipe's code imports but doesn't need, so that no run depends on what is
installed."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from unittest.mock import MagicMock

USED: set[str] = set()  # packages that something imported


class _Finder:
    def __init__(self, packages: tuple[str, ...], real: dict[str, dict[str, object]]) -> None:
        self.packages, self.real = packages, real

    def find_spec(self, name: str, path=None, target=None) -> ModuleSpec | None:
        is_ours = any(f"{name}.".startswith(f"{package}.") for package in self.packages)
        return ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        USED.add(spec.name.partition(".")[0])
        module = ModuleType(spec.name)

        def mock(name: str) -> MagicMock:
            if name.startswith("__"):
                raise AttributeError(name)
            return MagicMock(name=f"{spec.name}.{name}")

        module.__getattr__ = mock
        return module

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(self.real.get(module.__name__, {}))


def install(*packages: str, **real: dict[str, object]) -> _Finder:
    """Make the packages (or packages in packages) importable, installed or not, and return their finder.

    Everything in them is a mock, except `real`, by package.
    """
    finder = _Finder(packages, real)
    sys.meta_path.insert(0, finder)
    return finder
