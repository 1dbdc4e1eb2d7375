"""`megatron-pg validate`: the startup checks without starting. Exit code 0: it would start; 2: it would stop."""

import argparse
import math
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from megatron_pg.args import ArgumentError, ArgumentNotice, ArgumentWarning, validate_args
from megatron_pg.cli.launch import MODEL_SIZES, Launch, add_launch_options, layout_of, read_arguments, read_launch
from megatron_pg.cli.terminal import InputError, say, show_json

_MOST_RANKS = 2**14  # of one model: Megatron's groups of so many take seconds to write down


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `validate`."""
    add_launch_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the verdict; every violation is a line on the standard error."""
    launch = read_launch(options)
    violations, remarks = check(launch)
    valid = not violations
    if options.json:
        show_json(
            {
                "source": launch.source,
                "valid": valid,
                "violations": [{"rule": rule, "message": message} for rule, message in violations],
                "remarks": list(remarks),
                "arguments": read_arguments(launch) if valid else None,
                "other_arguments": list(launch.others),
            }
        )
    elif valid:
        say(f"valid: {launch.source}")
        for remark in remarks:
            say(f"  note: {remark}")
        say(f"  {len(launch.others)} further arguments belong to other parsers and were not checked")
    for rule, message in violations:
        sys.stderr.write(f"megatron-pg validate: [{rule}] {message}\n")
    return 0 if valid else 2


def check(launch: Launch) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Violations (rule, message) of the decision table and the layout, or remarks, on the launch's arguments, which it reconciles.

    A user's functions are tried.
    """
    layout = []
    try:
        layout_of(launch)
    except InputError as error:
        layout.append(("layout", str(error)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            args = validate_args(launch.args)
            if args.custom_pg_loss_reducer_function_path is not None:
                from megatron_pg.reducers.custom import load_custom_reducer  # imports torch

                per_token = vars(args).get("calculate_per_token_loss", False)
                with _layout_of_rank_zero(args):
                    load_custom_reducer(args.custom_pg_loss_reducer_function_path, calculate_per_token_loss=per_token)
            if args.pg_custom_objective_path is not None:
                from megatron_pg.objectives.custom.loading import custom_objective_of  # imports torch

                custom_objective_of(args)
        except ArgumentError as error:
            return [*error.violations, *layout], ()
    ours = (each for each in caught if issubclass(each.category, (ArgumentNotice, ArgumentWarning)))
    return layout, tuple(str(each.message) for each in ours)


@contextmanager
def _layout_of_rank_zero(args: argparse.Namespace) -> Iterator[None]:
    """Megatron's parallel state as in training, without the other ranks: a user's function may ask it for its layout."""
    sizes = {name: max(vars(args).get(name) or 1, 1) for name in MODEL_SIZES}
    if (ranks := math.prod(sizes.values())) > _MOST_RANKS:
        raise InputError(
            f"TP·PP·CP = {ranks} ranks is more than the {_MOST_RANKS} for which a reducer is tried. Correct one of the sizes."
        )
    try:
        state = import_module("megatron.core.parallel_state")
        store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    except Exception:  # missing, or broken in any way: a function that needs it says so itself
        yield
        return
    distributed = import_module("torch.distributed")
    distributed.init_process_group("fake", store=store, rank=0, world_size=ranks)
    try:
        state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
        yield
    finally:
        state.destroy_model_parallel()
        distributed.destroy_process_group()
