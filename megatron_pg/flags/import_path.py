"""Functions that a user names on the command line by import path, `package.module:function`.

The path is checked before anything is imported: plain identifiers only, so no file path, URL or dunder
reaches the import system.
"""

import functools
import hashlib
import importlib
import inspect
import keyword
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_pg.rollouts.printable import listed, shorten

_NAME = r"(?!__)[A-Za-z_][A-Za-z0-9_]*"
_PATH = re.compile(rf"({_NAME}(?:\.{_NAME})*)[.:]({_NAME})")


class ImportPathError(ValueError):
    """An import path is malformed, cannot be imported, or names something that cannot be called as asked."""


class ImportFailedError(ImportPathError):
    """The module at an import path cannot be imported, or has no such attribute."""


def split_import_path(path: Any) -> tuple[str, str]:
    """Module and attribute of `package.module:function` or `package.module.function`.

    Raises:
        ImportPathError: `path` is not a string of that form.
    """
    match = _PATH.fullmatch(path) if isinstance(path, str) else None
    keywords = [] if match is None else [word for word in re.split("[.:]", path) if keyword.iskeyword(word)]
    if match is None or keywords or path.partition(":")[0].endswith(".py"):
        raise ImportPathError(
            f"{shorten(path)} is not package.module.function or package.module:function. Write one of the two forms, "
            "not a file path."
        )
    return match.group(1), match.group(2)


def load_function(path: str, parameters: tuple[str, ...]) -> Callable:
    """Import the function at `path` and check that it can be called with `parameters`, in that order.

    Args:
        path: `package.module:function` or `package.module.function`.
        parameters: names of the positional parameters that it will be given; the names are not compared.

    Raises:
        ImportFailedError: the module or its attribute cannot be loaded.
        ImportPathError: the path is malformed, or the attribute is a class, a coroutine or generator function, not
            callable, or does not accept that many positional arguments.
    """
    module_name, attribute = split_import_path(path)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        fix = "Put its folder on PYTHONPATH of every rank." if isinstance(error, ModuleNotFoundError) else "Correct it."
        raise ImportFailedError(f"cannot be imported ({type(error).__name__}: {error}). {fix}") from error
    try:
        function = getattr(module, attribute)
    except AttributeError:
        functions = listed(name for name, value in vars(module).items() if inspect.isfunction(value)) or "none"
        raise ImportFailedError(
            f"cannot be imported, because {module_name} has no attribute {attribute!r}. Its functions: {functions}."
        ) from None
    except Exception as error:  # a module's own __getattr__
        raise ImportFailedError(f"cannot be imported ({type(error).__name__}: {error}). Correct it.") from error
    _check_callable(function, parameters)
    return function


def source_of(function: Callable) -> tuple[str, str]:
    """File name and sha256 of the source file that defines `function`, so that ranks and runs can be compared."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):
        function = type(function)
    try:
        path = Path(inspect.getsourcefile(function) or "")
        return path.name, hashlib.sha256(path.read_bytes()).hexdigest()
    except (TypeError, OSError):  # built in, or defined without a file
        return "no source file", hashlib.sha256(repr(function).encode()).hexdigest()


def _check_callable(function: object, parameters: tuple[str, ...]) -> None:
    expected = f"It must be a function that accepts ({', '.join(parameters)})."
    if not callable(function) or inspect.isclass(function):
        raise ImportPathError(f"is a {type(function).__name__}. {expected}")
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(is_kind(function) for is_kind in kinds):
        raise ImportPathError(f"is a coroutine or generator function. {expected}")
    try:
        signature = inspect.signature(function)
        signature.bind(*parameters)
    except (TypeError, ValueError) as error:
        shown = f"the signature {signature}" if "signature" in locals() else "no readable signature"
        raise ImportPathError(f"has {shown}. {expected}") from error
