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
from megatron_pg.declarations.choices import AUTO
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.head import head_text

_MOST_RANKS = 2**14  # of one model; Megatron takes seconds to make the groups of more ranks


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `validate`."""
    add_launch_options(parser)


def run(options: argparse.Namespace) -> int:
    """Print the result; every violation is a line on standard error."""
    launch = read_launch(options)
    violations, remarks = check(launch)
    valid = not violations
    if valid and launch.args.pg_fused_head == AUTO:
        remarks = (*remarks, f"--pg-fused-head {head_text(Facts(launch.args))}")
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
        if launch.unread:
            say(f"  not read: {launch.unread}")
    for rule, message in violations:
        sys.stderr.write(f"megatron-pg validate: [{rule}] {message}\n")
    return 0 if valid else 2


def check(launch: Launch) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Violations (rule, message) of the decision table and the layout, and remarks.

    Validation reconciles the job's arguments in place. A custom reducer or objective is tried.
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

                custom_objective_of(Facts(args))
        except ArgumentError as error:
            return [*error.violations, *layout], ()
    remarks = (warning for warning in caught if issubclass(warning.category, (ArgumentNotice, ArgumentWarning)))
    return layout, tuple(str(remark.message) for remark in remarks)


@contextmanager
def _layout_of_rank_zero(args: argparse.Namespace) -> Iterator[None]:
    """Megatron's parallel state of rank 0, without the other ranks: a custom reducer may read its layout."""
    sizes = {name: max(vars(args).get(name) or 1, 1) for name in MODEL_SIZES}
    if (ranks := math.prod(sizes.values())) > _MOST_RANKS:
        raise InputError(
            f"TP·PP·CP = {ranks} is more than {_MOST_RANKS} ranks, the most for which a reducer is tried. "
            "Correct the sizes."
        )
    try:
        state = import_module("megatron.core.parallel_state")
        store = import_module("torch.testing._internal.distributed.fake_pg").FakeStore()
    except Exception:  # missing or broken; a function that needs Megatron fails with its own message
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
