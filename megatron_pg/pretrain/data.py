"""Checks of what the dataset provider returns, before anything is taken from it."""

from argparse import Namespace
from typing import Any

from megatron_pg.args import ArgumentError
from megatron_pg.plan.documents import Documents


def checked_data(returned: Any, args: Namespace) -> tuple[Any, Any, Any]:
    """Training, validation and test data that the dataset provider returned.

    Raises:
        ArgumentError: rule E64. They are not three, training data are missing or have the wrong type for
            --docs-per-step, or an evaluation has no iterator.
    """
    if problem := _problem(returned, args):
        raise ArgumentError([("E64", f"dataset provider returned {problem}")])
    train, valid, test = returned
    return train, valid, test


def _problem(returned: object, args: Namespace) -> str | None:
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        kind = type(returned).__name__
        return f"a {kind}, expected (train, valid, test). Return (training data, None, None)."
    train = returned[0]
    if train is None and args.train_iters and not args.skip_train:
        return (
            f"None for training data, but --train-iters is {args.train_iters}. "
            "Return an iterator of PackedBatch, or pass --skip-train."
        )
    is_documents, kind = isinstance(train, Documents), type(train).__name__
    iterators = [part for part in (train if isinstance(train, list) else [train]) if part is not None]
    if not is_documents and not all(hasattr(part, "__next__") for part in iterators):
        return (
            f"a {kind} as training data, which is not an iterator. Return an iterator of PackedBatch: a generator, or "
            "iter(...)."
        )
    if args.docs_per_step and not is_documents:
        return f"a {kind} for training, but --docs-per-step is {args.docs_per_step}. Return megatron_pg.Documents."
    if is_documents and not args.docs_per_step:
        return "Documents, but --docs-per-step is 0. Set it, or return an iterator of PackedBatch."
    valid = returned[1]
    is_iterated = all(hasattr(part, "__next__") for part in (valid if isinstance(valid, list) else [valid]))
    if args.eval_iters and not args.full_validation and not is_iterated:  # --full-validation gets data sets
        return (
            f"a {type(valid).__name__} as validation data, but --eval-iters is {args.eval_iters}. Return an iterator "
            "of PackedBatch, or pass --eval-iters 0."
        )
    return None
