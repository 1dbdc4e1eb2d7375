"""Megatron's own `pretrain()` with the policy-gradient step in it: the only package that imports megatron.training.

`run` calls Megatron and replaces a few of its names for the length of the call. `startup` validates and compares the
ranks, `data` checks what the dataset provider returns, `documents` owns the position in the documents, `log` writes the
steps, `errors` shows an error that every rank has once.
"""

from megatron_pg.declarations.installation import missing_piece

try:
    import megatron.training.training  # noqa: F401, once for all modules of this package
except ImportError as error:
    raise ImportError(missing_piece(error), name=error.name) from error

from megatron_pg.pretrain.run import chain_args_providers, pretrain

__all__ = ["chain_args_providers", "pretrain"]
