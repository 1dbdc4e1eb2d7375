"""Triton's interpreter, faster."""

import os
from types import SimpleNamespace


def patch_language_once() -> None:
    """Leave triton.language patched for this process, if kernels are interpreted in it.

    The interpreter goes over all names of the language whenever a kernel calls another function, which takes a third of
    the time of a small kernel.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
