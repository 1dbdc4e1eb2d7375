"""Replaced functions of a host: the check of their signatures, wrappers, and launchers of its scripts."""

import functools
import inspect
import re
import runpy
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from megatron_pg.args import ArgumentError
from megatron_pg.hosts.startup import refuse


def attribute(path: str) -> Any:
    """The current value of `module:name` or `module:Class.name` of a host; another plugin may have replaced it."""
    module, _, name = path.partition(":")
    return functools.reduce(getattr, name.split("."), import_module(module))


def check_signatures(version: str, signatures: Iterable[str]) -> str:
    """Refuse a host whose functions have other first parameters than the adapter expects.

    Args:
        version: the host and the version that the adapter was run with.
        signatures: `module:name(parameter, …)` each; of several paths with `|` between them, the first that exists.

    Returns:
        The path of the last of the functions.

    Raises:
        ArgumentError: a function takes other parameters or does not exist.
    """
    for signature in signatures:
        *paths, parameters = re.split(r"[|(]", signature.rstrip(")"))
        expected = parameters.split(", ")
        for path in paths:
            try:
                names, cause = [*inspect.signature(attribute(path)).parameters], None
                break
            except (ImportError, AttributeError) as error:
                names, cause = [], error
        use = f"as in {version}. Use that version"
        if cause is not None:
            found, use = f"does not exist ({cause}), and the loss needs it", f"{use} and put its checkout on PYTHONPATH"
        else:
            found = f"takes ({', '.join(names)}), not ({parameters})"
        if names[: len(expected)] != expected:
            refuse(f"{path} {found} {use}, or use a megatron_pg that supports yours.", cause=cause)
    return path


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function of a host, once, by `wrapper`, which receives the function before its arguments."""
    function = getattr(owner, name)
    if getattr(function, "is_wrapped", False):
        return

    @functools.wraps(function)
    def wrapped(*given: Any, **named: Any) -> Any:
        return wrapper(function, *given, **named)

    wrapped.is_wrapped = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def launch(words: Sequence[str], usage: str, prepare: Callable[[], None]) -> None:
    """Run the host's script `words[0]` with the words that follow, after `prepare`."""
    if not words:
        sys.exit(f"usage: {usage}")
    prepare()
    sys.argv, sys.path[0] = [*words], str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Run a launcher's command; an argument error is printed without a traceback."""
    try:
        main(sys.argv[1:])
    except ArgumentError as error:
        sys.exit(str(error))
