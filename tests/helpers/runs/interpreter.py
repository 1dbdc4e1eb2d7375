"""Triton's interpreter, faster: several times for kernels that call functions or merge the statistics of threads."""

import os
from types import SimpleNamespace


def make_faster() -> None:
    """Change the interpreter for the rest of this process, if kernels are interpreted in it."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton import language
        from triton.runtime import interpreter
    except ImportError:
        return
    # it goes over all names of the language whenever a kernel calls another function
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": language, "core": language.core}))
    interpreter._patch_lang = lambda function: SimpleNamespace(restore=lambda: None)
    one_by_one = interpreter.ReduceOps.generic_reduce
    interpreter.ReduceOps.generic_reduce = lambda self, input: (
        _merge_halves(self, input) if self.axis == 0 and input[0].shape[0] % 2 == 0 else one_by_one(self, input)
    )


def _merge_halves(reduce, input) -> list:
    """Reduce the first axis as warps do: all of one half with the other half, instead of one element after another."""
    parts, dtypes = [each.handle.data for each in input], [each.dtype for each in input]
    while (rows := len(parts[0])) > 1:
        halves = [
            reduce.to_tensor(part[half], dtype)
            for half in (slice(rows // 2), slice(rows // 2, rows))
            for part, dtype in zip(parts, dtypes, strict=True)
        ]
        merged = reduce.combine_fn.fn(*halves)
        parts = [each.handle.data for each in (merged if isinstance(merged, tuple) else (merged,))]
    return [
        reduce.to_tensor(part if reduce.keep_dims else part[0], dtype)
        for part, dtype in zip(parts, dtypes, strict=True)
    ]
