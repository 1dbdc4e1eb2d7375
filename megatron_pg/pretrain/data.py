"""Checks of what the dataset provider returns, before anything is taken from it."""

from argparse import Namespace
from typing import Any

from megatron_pg.args import ArgumentError
from megatron_pg.plan.documents import Documents


def checked_data(returned: object, args: Namespace) -> tuple[Any, Any, Any]:
    """Training, validation and test data that the dataset provider returned.

    Raises:
        ArgumentError: rule E64, if they are not three, if there are no training data to train on, or if these have the
            wrong type for --docs-per-step.
    """
    if not isinstance(returned, (tuple, list)) or len(returned) != 3:
        raise _error(
            f"dataset provider returned a {type(returned).__name__}, expected (train, valid, test). "
            "Return (training data, None, None)."
        )
    train, valid, test = returned
    if train is None and args.train_iters and not args.skip_train:
        raise _error(
            f"dataset provider returned None for training data, but --train-iters is {args.train_iters}. "
            "Return an iterator of PackedBatch, or pass --skip-train."
        )
    _check_training_data(train, args)
    return train, valid, test


def _check_training_data(train: object, args: Namespace) -> None:
    is_documents, kind = isinstance(train, Documents), type(train).__name__
    iterators = [part for part in (train if isinstance(train, list) else [train]) if part is not None]
    if not is_documents and not all(hasattr(part, "__next__") for part in iterators):
        raise _error(
            f"dataset provider returned a {kind} as training data, which is not an iterator. Return an iterator of "
            "PackedBatch: a generator, or iter(...)."
        )
    if args.docs_per_step and not is_documents:
        raise _error(
            f"dataset provider returned a {kind} for training, but --docs-per-step is {args.docs_per_step}. "
            "Return megatron_pg.Documents."
        )
    if is_documents and not args.docs_per_step:
        raise _error(
            "dataset provider returned Documents, but --docs-per-step is 0. Set it, or return an iterator of "
            "PackedBatch."
        )


def _error(message: str) -> ArgumentError:
    return ArgumentError([("E64", message)])
